"""The namespace: a digest of all that an entry's bytes depend on, besides the tokens."""

from __future__ import annotations

import enum
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import xxhash

from forkpoint.cache.tier_entries import EntryName

FORMAT: Final = 1  # number of the format of slab and journal; files of another format are foreign
WEIGHT_FILES: Final = "*.safetensors"
NAMESPACE_BYTES: Final = 16


def namespace_of(facts: Mapping[str, Any]) -> bytes:
    """Return the digest of these facts: dataclasses, mappings, sequences, sets and plain values."""
    digest = blake2b(digest_size=NAMESPACE_BYTES, person=b"forkpoint-disk")
    for part in _canonical({"format": FORMAT, **facts}):
        digest.update(f"{len(part)}:{part}".encode())
    return digest.digest()


def weights_digest(folder: Path) -> str | None:
    """Return a digest of the bytes of all weight files in a model folder, by name; None if there are none.

    Every byte is read, through the system's page cache, which has them from loading the model: about 5 GB a second.
    """
    paths = sorted(folder.rglob(WEIGHT_FILES))
    found = xxhash.xxh3_128()
    for path in paths:
        size = path.stat().st_size
        found.update(f"{path.relative_to(folder)}:{size}:".encode())
        if size:
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
                found.update(data)
    return found.hexdigest() if paths else None


def entry_sum(namespace: bytes, name: EntryName, data: memoryview) -> bytes:
    """Return the checksum of an entry's bytes, 16 bytes.

    It covers the namespace and the name, so that no other entry passes for it.
    """
    numbers = (name.kind, name.depth, name.origin, int(name.decoded))
    found = xxhash.xxh3_128(namespace + name.hash + name.parent + repr(numbers).encode())
    found.update(data)  # other threads run meanwhile
    return found.digest()


def _canonical(value: Any) -> Iterable[str]:
    """Yield the parts of a text that is equal for equal values in all processes."""
    if is_dataclass(value) and not isinstance(value, type):
        yield type(value).__name__
        for field in fields(value):
            yield field.name
            yield from _canonical(getattr(value, field.name))
    elif isinstance(value, Mapping):
        yield "{"
        for key in sorted(value, key=str):
            yield str(key)
            yield from _canonical(value[key])
        yield "}"
    elif isinstance(value, set | frozenset):
        yield from sorted(map(repr, value))
    elif isinstance(value, list | tuple):
        yield "["
        for item in value:
            yield from _canonical(item)
        yield "]"
    else:
        yield repr(value.value if isinstance(value, enum.Enum) else value)
