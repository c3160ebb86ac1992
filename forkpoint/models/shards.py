"""The safetensors files of a model folder: which tensors the folder holds, and in which file each one is."""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forkpoint.checks import read_json
from forkpoint.errors import ModelFolderError
from forkpoint.foreign_files import ADAPTERS, foreign_files, is_lfs_pointer
from forkpoint.freed_memory import return_freed_memory
from forkpoint.models.cuts import Part

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
# safetensors' names of the dtypes that models are stored in
DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
SHARD: Final = re.compile(r"(model(?:\.safetensors)?)-(\d{1,5})-of-(\d{1,5})\.safetensors")
LIKE_SHARDS: Final = r"model(\.safetensors)?-.*-of-.*\.safetensors"  # also of shards that somebody has renamed
# What wrappers of training put before the names of tensors, and parts of names of adapters that are not merged.
WRAPPERS: Final = ("base_model.model.", "_orig_mod.", "module.")
OF_ADAPTERS: Final = re.compile(r"\.(lora_\w+|base_layer|modules_to_save)\.")
LOGGER: Final = logging.getLogger(__name__)


class Shards:
    """The open safetensors files of `folder`. Call `close` when done.

    A mapped file keeps its pages that were read in memory. Files are therefore opened anew before the pages of all
    files together are more than those of the largest file. Whole tensors that stay on the host are not mapped. Their
    conversion frees memory, which is returned to the system before there is much of it.

    `file_of` maps the stored name of each tensor to the name of its file. Raises ModelFolderError for a shard that is
    missing, broken, outside of the folder, or does not hold what the index says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / INDEX_NAME
        listed = _read_index(index) if index.is_file() else {}
        names = sorted(set(listed.values())) or _unlisted_files(folder)
        _check_other_files(folder, names)
        self._files = {name: _open_shard(folder, name) for name in names}
        self._most_bytes = max((folder / name).stat().st_size for name in names)
        self._bytes: dict[str, ShardBytes] = {}  # of files from which whole tensors were read
        self._unreturned = 0  # bytes of tensors that were read since freed memory was returned
        self._read_bytes: dict[str, int] = {}  # of each file since it was opened, the least recently read file first
        if not listed:
            for shard, file in self._files.items():
                listed |= dict.fromkeys(file.keys(), shard)
        self.file_of = self._locate(listed)

    def _locate(self, listed: Mapping[str, str]) -> dict[str, str]:
        """Return the file of each tensor. The index decides where a tensor is stored twice.

        Logs such copies and tensors that the index does not list. Raises ModelFolderError for tensors that are not
        there.
        """
        located = dict(listed)
        for shard, file in self._files.items():
            held = set(file.keys())
            missing = {name for name, where in listed.items() if where == shard} - held
            if missing:
                raise ModelFolderError(
                    f"{self.folder / shard} lacks {some(missing)}, which {INDEX_NAME} says it holds; "
                    "fetch the file again"
                )
            copies = {name for name in held if located.get(name, shard) != shard}
            if copies:
                LOGGER.warning("%s also holds %s, which is read from another shard", shard, patterns(copies))
            unlisted = held - set(located)
            if unlisted:
                LOGGER.warning(
                    "%s does not list %s of %s; these tensors are read too", INDEX_NAME, patterns(unlisted), shard
                )
                located |= dict.fromkeys(unlisted, shard)
        return located

    def is_from_mlx(self, name: str) -> bool:
        """Return whether MLX wrote the file of a tensor."""
        return bool((self._files[self.file_of[name]].metadata() or {}).get("format") == "mlx")

    def slice(self, name: str) -> Any:
        """Return safetensors' slice object of a tensor, which knows its shape and dtype before the data are read."""
        return self._files[self.file_of[name]].get_slice(name)

    def read(self, name: str, part: Part, owned: bool) -> Tensor:
        """Return the part of a tensor. Raises SafetensorError.

        The tensor is mapped from its file and keeps the file mapped, or has memory of its own if it is `owned`.
        """
        shard = self.file_of[name]
        file = self._files[shard]
        if owned and not part.spans:
            if shard not in self._bytes:
                self._bytes[shard] = ShardBytes(self.folder / shard)
            self._return_freed(self._bytes[shard].size(name))
            whole = self._bytes[shard].read(name)
            return file.get_tensor(name).clone() if whole is None else whole
        tensor = part.of(file.get_slice(name) if part.spans else file.get_tensor(name))
        # Even a few columns of a matrix touch all of its pages.
        self._count(shard, prod(part.whole) * tensor.element_size())
        return tensor.clone() if owned else tensor

    def _count(self, shard: str, num_bytes: int) -> None:
        """Count bytes read from a shard, and open the least recently read others anew if too many are mapped."""
        self._read_bytes[shard] = self._read_bytes.pop(shard, 0) + num_bytes
        while sum(self._read_bytes.values()) > self._most_bytes and len(self._read_bytes) > 1:
            oldest = next(iter(self._read_bytes))
            del self._read_bytes[oldest]
            self._files[oldest] = _open_shard(self.folder, oldest)

    def _return_freed(self, num_bytes: int) -> None:
        """Return freed memory if tensors of an eighth of a shard have been read, with one of `num_bytes` to come."""
        self._unreturned += num_bytes
        if self._unreturned > self._most_bytes // 8:
            return_freed_memory()
            self._unreturned = 0

    def sizes(self) -> dict[str, int]:
        """Return the stored bytes of each tensor."""
        stored = {shard: ShardBytes(self.folder / shard) for shard in self._files}
        return {name: stored[shard].size(name) for name, shard in self.file_of.items()}

    def close(self) -> None:
        self._files.clear()
        self._bytes.clear()


class ShardBytes:
    """The tensors of a shard as bytes of its file. `_open_shard` has checked before that the file is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            self._entries = json.loads(file.read(length))
        self._first = 8 + length  # byte of the file at which tensors begin

    def size(self, name: str) -> int:
        """Return the number of bytes of a tensor."""
        start, end = self._entries[name]["data_offsets"]
        return int(end - start)

    def read(self, name: str) -> Tensor | None:
        """Read a tensor into new memory; None if its dtype is not in DTYPES. Raises SafetensorError."""
        entry = self._entries[name]
        if entry["dtype"] not in DTYPES:
            return None
        found = np.empty(self.size(name), dtype=np.uint8)  # on the host, whatever device a model is loaded for
        room = memoryview(found.data)
        with self._path.open("rb", buffering=0) as file:
            file.seek(self._first + entry["data_offsets"][0])
            while room:  # the system reads at most 2 GiB at once
                count = file.readinto(room)
                if not count:
                    raise SafetensorError("the file was cut short")
                room = room[count:]
        return torch.from_numpy(found).view(DTYPES[entry["dtype"]]).view(entry["shape"])


def patterns(names: Iterable[str]) -> str:
    """Abbreviate tensor names: names that differ only in numbers become one pattern with its count."""
    counts = Counter(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in sorted(names))
    return ", ".join(pattern if count == 1 else f"{pattern} ({count} tensors)" for pattern, count in counts.items())


def some(names: Collection[str]) -> str:
    """Return the first three names in sorted order, and how many more there are, for an error."""
    first = sorted(names)[:3]
    more = f" and {len(names) - len(first)} more" if len(names) > len(first) else ""
    return ", ".join(repr(name) for name in first) + more


def _read_index(index: Path) -> dict[str, str]:
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(v, str) for v in listed.values()):
        raise ModelFolderError(f"{index} has no 'weight_map' from tensor names to file names; fetch the file again")
    return listed


def left_by_training(names: Collection[str]) -> str:
    """Return, for an error about tensors, what their names say about how the model was saved; "" if nothing."""
    if any(OF_ADAPTERS.search(name) for name in names):
        return ADAPTERS
    wrapper = next((each for each in WRAPPERS if any(name.startswith(each) for name in names)), None)
    return "" if wrapper is None else f"it holds tensors whose names begin with {wrapper!r}; save the model without it"


def _unlisted_files(folder: Path) -> list[str]:
    """Return the files of a folder without an index: a single one, or all shards, whose names say how many there are.

    Raises ModelFolderError.
    """
    if os.path.lexists(folder / SINGLE_NAME):
        return [SINGLE_NAME]
    others = sorted(path.name for path in folder.glob("*.safetensors") if not path.match("adapter_*"))
    numbered = [found for found in map(SHARD.fullmatch, others) if found is not None]
    if not numbered:
        found = f", only {some(others)}" if others else foreign_files(folder)
        raise ModelFolderError(
            f"{folder} holds neither {SINGLE_NAME} nor {INDEX_NAME}{found}; give a folder with safetensors weights, "
            "or load_format='dummy' for random ones"
        )
    stem, first, count = numbered[0].groups()
    wanted = [f"{stem}-{number:0{len(first)}}-of-{count}.safetensors" for number in range(1, int(count) + 1)]
    missing = set(wanted) - set(others)
    if missing:
        raise ModelFolderError(
            f"{folder} holds no {INDEX_NAME}, and lacks shards: {some(missing)}; fetch the missing files"
        )
    return wanted


def _check_other_files(folder: Path, shards: Collection[str]) -> None:
    """Raise ModelFolderError for shards besides the model's own `shards`, and log other safetensors files."""
    others = {path.name for path in folder.glob("*.safetensors")} - set(shards)
    stray = {name for name in others if name == SINGLE_NAME or re.fullmatch(LIKE_SHARDS, name)}
    if stray and not (folder / INDEX_NAME).is_file():
        raise ModelFolderError(
            f"{folder} holds {some(stray)} next to {some(shards)}, and no {INDEX_NAME} that says which are the "
            "model's; remove those of the other version"
        )
    if stray:
        raise ModelFolderError(
            f"{folder} holds {some(stray)}, which {INDEX_NAME} does not name; the index or the shards are of "
            "another version: fetch both again"
        )
    if others:
        LOGGER.info("files of %s that are not read: %s", folder, ", ".join(sorted(others)))


def _open_shard(folder: Path, name: str) -> Any:
    path = folder / name
    if not os.path.lexists(path):
        raise ModelFolderError(f"shard {path} is missing; fetch it again")
    _check_inside(folder, name)
    if not path.is_file():
        raise ModelFolderError(f"shard {path} is not a regular file; fetch it again")
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        if is_lfs_pointer(path):
            raise ModelFolderError(f"shard {path} is a pointer of Git LFS; run 'git lfs pull' in the folder") from None
        raise ModelFolderError(f"shard {path} is broken or cut short: {error}; fetch it again") from error


def _check_inside(folder: Path, name: str) -> None:
    """Raise ModelFolderError for a shard that is not in `folder`.

    Only links of huggingface_hub's cache may leave the folder. They point from a snapshot to the blobs of its
    repository, or of the whole cache.
    """
    home = folder.resolve()
    allowed = [home]
    if home.parent.name == "snapshots" and home.parents[1].name.startswith("models--"):
        allowed += [home.parents[1] / "blobs", home.parents[2] / "blobs"]
    given = Path(name)
    leaves = given.is_absolute() or ".." in given.parts
    target = Path(os.path.realpath(folder / name))  # unlike Path.resolve, it takes a link that names itself
    if leaves or not any(target.is_relative_to(place) for place in allowed):
        raise ModelFolderError(
            f"shard {name!r} is not inside of {folder}; forkpoint reads only files of this folder: copy it there"
        )
