"""Weights by name: out of sharded safetensors, or made up."""

from __future__ import annotations

import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forkpoint.checks import read_json
from forkpoint.errors import ModelFolderError
from forkpoint.models.cuts import WHOLE, Cut, Part
from forkpoint.models.fields import canonical_name
from forkpoint.models.quantization import Fp8Format
from forkpoint.ops.linear.scaled import BLOCK, CODES, Matrix, ScaledMatrix, dense, quantise
from forkpoint.ops.ranks import ALONE, Ranks

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
FP8_TYPES = ("F8_E4M3", "F8_E5M2")
_PIECE = 1 << 22  # elements looked at together
# Parts of multimodal and speculative checkpoints that a text model does not use.
IGNORED = ("model.visual.", "visual.", "model.mtp.")
MTP = "mtp."

Span: TypeAlias = tuple[float, float]
LoadingProgress = Callable[[int, int], None]  # is told bytes read and bytes in all, after each tensor


class JoinedMatrix:
    """A matrix `shape[..., N, K]` made of parts, each put straight into its place; zeros where none is.

    With `scaled` it is in FP8, as all parts are: with a scale for each block of 128 rows if parts have that and
    `whole_blocks` says that each starts on one, else for each row.
    """

    def __init__(self, source: WeightSource, shape: Sequence[int], scaled: bool, whole_blocks: bool) -> None:
        *lead, num_rows, width = shape
        by_block = source.fp8 is not None and source.fp8.by_block
        rows, columns = BLOCK if by_block and whole_blocks else 1, BLOCK if by_block else width
        elements = torch.zeros(*shape, dtype=source.codes if scaled else source.dtype, device=source.device)
        self.matrix: Matrix = elements
        if scaled:
            scales = torch.ones(*lead, -(-num_rows // rows), -(-width // columns), device=source.device)
            self.matrix = ScaledMatrix(elements, scales, rows, columns, source.dtype)

    def put(self, part: Matrix, start: int, which: int | slice | None = None) -> None:
        """`part` from row `start` and column 0 on, of the matrix, or matrices, `which`."""
        *_, num_rows, width = part.shape
        at, whole = ... if which is None else which, self.matrix
        if not isinstance(whole, ScaledMatrix):
            whole[at, start : start + num_rows, :width] = dense(part)
            return
        assert isinstance(part, ScaledMatrix), "a joint in FP8 has parts in FP8"
        if part.rows < whole.rows:
            self.matrix = whole = whole.by_row()
        part = part if part.rows == whole.rows else part.by_row()
        first, (*_, scale_rows, scale_columns) = start // whole.rows, part.scales.shape
        codes = part.codes.view(torch.uint8)  # not every device can copy FP8 to a part of a tensor
        whole.codes.view(torch.uint8)[at, start : start + num_rows, :width] = codes
        whole.scales[at, first : first + scale_rows, :scale_columns] = part.scales


def join_rows(source: WeightSource, rows: Mapping[str, Cut], columns: int) -> Matrix:
    """`[sum(rows), columns]`: the matrices `name.weight` of such rows below each other; in FP8 where all of them
    are."""
    names, counts = [f"{name}.weight" for name in rows], [cut.length for cut in rows.values()]
    scaled, whole_blocks = all(map(source.is_scaled, names)), not any(count % BLOCK for count in counts[:-1])
    joined = JoinedMatrix(source, (sum(counts), columns), scaled, whole_blocks)
    for name, cut, end in zip(names, rows.values(), accumulate(counts), strict=True):
        joined.put(source.get_matrix(name, (cut.length, columns), cut), end - cut.length)
    return joined.matrix


@dataclass(kw_only=True, eq=False)
class WeightSource(ABC):
    """Where a model gets its tensors, by their canonical names (`model.layers.0...`) and of the shapes that this rank
    has."""

    dtype: torch.dtype
    device: torch.device
    fp8: Fp8Format | None = None
    ranks: Ranks = ALONE
    as_bytes: bool = False  # what is in FP8 comes to the device as its bytes, for one that has no such numbers

    @property
    def codes(self) -> torch.dtype:
        """Of what is in FP8."""
        return torch.uint8 if self.as_bytes else CODES

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether `get` can return this tensor."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape in which it is stored, whole; None for made-up weights, which take any."""

    def get(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype | None = None,
        span: Span | None = None,
        cut: Cut = WHOLE,
    ) -> Tensor:
        """A new tensor of `shape` in `dtype` (default: the model's), on the source's device; made up in `span`. By
        `cut` it is this rank's part."""
        return self._own(name, shape, cut.part(shape, self.ranks), dtype or self.dtype, span)

    def is_scaled(self, name: str) -> bool:
        """Whether `get_matrix` gives it in FP8."""
        return self.fp8 is not None and self.fp8.covers(name)

    def get_matrix(self, name: str, shape: Sequence[int], cut: Cut = WHOLE) -> Matrix:
        """A matrix `[..., N, K]` as it is stored: in FP8 with its scales, or as `get` gives it."""
        if not self.is_scaled(name) or self.fp8 is None:
            return self.get(name, shape, cut=cut)
        part = cut.part(shape, self.ranks)
        codes, scales = self._scaled(name, shape, part)
        rows, columns = (BLOCK, BLOCK) if self.fp8.by_block else (1, (part.whole if part else shape)[-1])
        if part is not None:
            return part.of_scaled(codes, scales, rows, columns, self.dtype)
        return ScaledMatrix(codes, scales, rows, columns, self.dtype)

    def _scaled(self, name: str, shape: Sequence[int], part: Part | None) -> tuple[Tensor, Tensor]:
        """The part's codes and all scales of a matrix that is not stored in FP8, put in it whole, so that all ranks
        have the same scales."""
        matrix = self._own(name, part.whole if part else shape, None, self.dtype, None)
        found = quantise(matrix.cpu() if self.as_bytes else matrix)  # bytes by the host, which has such numbers
        codes = found.codes.view(torch.uint8).to(self.device)
        return (part.of(codes).clone() if part else codes).view(self.codes), found.scales.to(self.device)

    @abstractmethod
    def _own(self, name: str, shape: Sequence[int], part: Part | None, dtype: torch.dtype, span: Span | None) -> Tensor:
        """The part that has `shape`."""


@dataclass(kw_only=True, eq=False)
class DummyWeights(WeightSource):
    """Random weights for any name and shape, uniform in `span` or normal with the deviation `shape[-1] ** -0.5`; the
    bits depend on the seed, the name, the whole shape and the device alone."""

    seed: int

    def has(self, name: str) -> bool:
        return True

    def shape(self, name: str) -> tuple[int, ...] | None:
        return None

    def _own(self, name: str, shape: Sequence[int], part: Part | None, dtype: torch.dtype, span: Span | None) -> Tensor:
        # torch's CPU generator looks at 32 bits of a seed only.
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(f"{self.seed}:{name}".encode()))
        made = torch.empty(*(part.whole if part else shape), dtype=dtype, device=self.device)
        if span is not None:
            made.uniform_(*span, generator=generator)
        else:
            made.normal_(0.0, made.shape[-1] ** -0.5, generator=generator)
        return part.of(made).clone() if part else made


@dataclass(kw_only=True, eq=False)
class FileWeights(WeightSource):
    """Tensors of a model folder, read one at a time. To be closed.

    Raises ModelFolderError for a missing, broken or unexpected shard, a missing tensor, a wrong shape, and
    values that are not finite, naming the tensor and the file.
    """

    folder: Path
    progress: LoadingProgress | None = None
    names: Sequence[tuple[str, str]] = ()  # the family's
    mtp: bool = False  # the MTP head's tensors are there too

    def __post_init__(self) -> None:
        listed = _listed_tensors(self.folder)
        self._files = {shard: _open_shard(self.folder / shard) for shard in sorted(set(listed.values()))}
        ignored = IGNORED if self.mtp else (*IGNORED, MTP)
        kept = {n: s for n, s in listed.items() if not n.startswith(ignored) and not n.endswith("rotary_emb.inv_freq")}
        self._stored = {canonical_name(name, self.names): (name, shard) for name, shard in kept.items()}
        self._check_against_shards(listed)
        self._unread = set(self._stored)
        self._num_bytes = self._sizes() if self.progress is not None else {}
        self._total_bytes, self._read_bytes = sum(self._num_bytes.values()), 0
        self._tell()

    def close(self) -> None:
        """Let go of the files."""
        self._files.clear()

    def _check_against_shards(self, listed: dict[str, str]) -> None:
        for shard, file in self._files.items():
            lacking = {name for name, where in listed.items() if where == shard} - set(file.keys())
            if lacking:
                raise ModelFolderError(
                    f"{self.folder / shard} lacks {_some(lacking)}, which {INDEX_NAME} says it holds; "
                    "fetch the file again"
                )

    def _sizes(self) -> dict[str, int]:
        """Bytes of each tensor that a model may ask for, by its canonical name."""
        stored = {shard: _stored_bytes(self.folder / shard) for shard in self._files}
        return {name: stored[shard][inside] for name, (inside, shard) in self._stored.items()}

    def _tell(self) -> None:
        if self.progress is not None:
            self.progress(self._read_bytes, self._total_bytes)

    def has(self, name: str) -> bool:
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def named_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """All that a model may ask for, whole."""
        return [(name, self.shape(name)) for name in sorted(self._stored)]

    def rest(self) -> list[str]:
        """Names that nobody asked for."""
        return sorted(self._unread)

    def _own(self, name: str, shape: Sequence[int], part: Part | None, dtype: torch.dtype, span: Span | None) -> Tensor:
        if self._stored_type(name) in FP8_TYPES:
            raise ModelFolderError(
                f"tensor {self._where(name)} is stored in FP8, where forkpoint reads bfloat16 or float32; without "
                "quantization_config in config.json, and for embeddings, norms and the output head, FP8 is not read"
            )
        return self._finite(name, shape, part).to(dtype)

    def is_scaled(self, name: str) -> bool:
        if self.fp8 is None or self.fp8.on_load:
            return super().is_scaled(name)
        return self._stored_type(name) in FP8_TYPES

    def _scaled(self, name: str, shape: Sequence[int], part: Part | None) -> tuple[Tensor, Tensor]:
        if self.fp8 is None or self.fp8.on_load:
            return super()._scaled(name, shape, part)
        if self._stored_type(name) != "F8_E4M3":
            raise ModelFolderError(f"tensor {self._where(name)} is of {self._stored_type(name)}; only e4m3 is read")
        codes, scale = self._finite(name, shape, part), name + self.fp8.scale_suffix
        scales = self._read(scale, self.fp8.scale_shape(part.whole if part else shape), None).float()
        if not bool((scales.isfinite() & (scales > 0)).all()):
            raise ModelFolderError(f"the scales {self._where(scale)} are not all positive and finite")
        return codes, scales

    def _stored_type(self, name: str) -> str:
        return str(self._slice(name).get_dtype())

    def _slice(self, name: str) -> Any:
        """What safetensors knows of it before it is read."""
        stored, shard = self._find(name)
        return self._files[shard].get_slice(stored)

    def _where(self, name: str) -> str:
        stored, shard = self._find(name)
        return f"{stored!r} in {self.folder / shard}"

    def _read(self, name: str, shape: Sequence[int], part: Part | None) -> Tensor:
        """A copy on the device, as stored (FP8 as `codes`), of the part that has `shape`."""
        stored, shard = self._find(name)
        found, whole = self.shape(name), tuple(part.whole if part else shape)
        if found != whole:
            raise ModelFolderError(
                f"tensor {self._where(name)} has shape {list(found)}; config.json asks for {list(whole)}"
            )
        file = self._files[shard]
        try:
            tensor: Tensor = file.get_tensor(stored) if part is None else part.of(file.get_slice(stored))
        except SafetensorError as error:
            raise ModelFolderError(f"{self.folder / shard} is broken at {stored!r}: {error}") from error
        # A copy: the tensor otherwise keeps the whole file mapped. It is looked through where that is fastest.
        tensor = (tensor.view(self.codes) if tensor.dtype == CODES else tensor).to(self.device, copy=True)
        if name in self._unread:
            self._unread.remove(name)
            self._read_bytes += self._num_bytes.get(name, 0)
            self._tell()
        return tensor

    def _finite(self, name: str, shape: Sequence[int], part: Part | None) -> Tensor:
        """What `_read` gives."""
        tensor = self._read(name, shape, part)
        if not _is_finite(tensor):
            raise ModelFolderError(
                f"tensor {self._where(name)} holds NaN or infinite values; fetch the file again, "
                "or repair the training run that wrote it"
            )
        return tensor

    def _find(self, name: str) -> tuple[str, str]:
        if name not in self._stored:
            raise ModelFolderError(
                f"{self.folder} holds no tensor {name!r}; config.json and the weights belong to different models, "
                "or a shard is missing from the index"
            )
        return self._stored[name]


def _listed_tensors(folder: Path) -> dict[str, str]:
    """Stored name -> file name."""
    index = folder / INDEX_NAME
    if not index.is_file():
        if not (folder / SINGLE_NAME).is_file():
            raise ModelFolderError(
                f"{folder} holds neither {SINGLE_NAME} nor {INDEX_NAME}; give a folder with safetensors weights, "
                "or load_format='dummy' for random ones"
            )
        return dict.fromkeys(_open_shard(folder / SINGLE_NAME).keys(), SINGLE_NAME)
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(v, str) for v in listed.values()):
        raise ModelFolderError(f"{index} has no 'weight_map' from tensor to file name")
    extra = {path.name for path in folder.glob("model-*-of-*.safetensors")} - set(listed.values())
    if extra:
        raise ModelFolderError(
            f"{folder} holds {_some(extra)}, which {INDEX_NAME} does not name; the index or the shards are of "
            "another version: fetch both again"
        )
    return listed


def _open_shard(path: Path) -> Any:
    if not path.is_file():
        raise ModelFolderError(f"shard {path} is missing; fetch it again")
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelFolderError(f"shard {path} is broken or cut short: {error}; fetch it again") from error


def _stored_bytes(path: Path) -> dict[str, int]:
    """Bytes of each tensor of a shard that `_open_shard` has found whole."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    spans = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: end - start for name, (start, end) in spans.items()}


def _is_finite(tensor: Tensor) -> bool:
    if tensor.element_size() == 1:  # e4m3, or its bytes: no infinity, and one NaN of either sign
        codes = tensor.view(torch.uint8).flatten()
        return not any(bool((piece & 0x7F == 0x7F).any()) for piece in torch.split(codes, _PIECE))
    # One sum per piece and no mask; only a sum that overflows needs the exact look.
    for piece in torch.split(tensor.flatten(), _PIECE):
        if not bool(torch.isfinite(piece.sum(dtype=torch.float32))) and not bool(torch.isfinite(piece).all()):
            return False
    return True


def _some(names: set[str]) -> str:
    first = sorted(names)[:3]
    more = f" and {len(names) - len(first)} more" if len(names) > len(first) else ""
    return ", ".join(repr(name) for name in first) + more
