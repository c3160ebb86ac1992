"""Rules for options that depend on each other."""

from __future__ import annotations

import os
from pathlib import Path

from forkpoint.errors import ConfigError


def check_disk(path: str | None, size: float | None, write_limit: float | None) -> None:
    """Raise ConfigError if kv_disk_path, kv_disk_size and kv_disk_write_limit (both in GiB) do not make a disk tier."""
    if path is None:
        for name, given in (("kv_disk_size", size), ("kv_disk_write_limit", write_limit)):
            if given is not None:
                raise ConfigError(f"{name}={given} needs a folder; give kv_disk_path, too")
        return
    if not path:
        raise ConfigError("kv_disk_path='' names no folder; give the path of one")
    folder = Path(path)
    if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
        raise ConfigError(f"kv_disk_path={path!r} is not a folder; give the path of one")
    if not folder.parent.is_dir():
        raise ConfigError(
            f"kv_disk_path={path!r} cannot be made, because {str(folder.parent)!r} is not a folder; create it, or "
            "give another path"
        )
    where = folder if folder.exists() else folder.parent
    if not os.access(where, os.W_OK | os.X_OK):
        reason = "its file system is read-only" if os.statvfs(where).f_flag & os.ST_RDONLY else "permission denied"
        raise ConfigError(f"kv_disk_path={path!r} cannot be written: {reason}; give another path")
    if size is None:
        raise ConfigError(f"kv_disk_path={path!r} needs kv_disk_size, in GiB; give both")


def check_context(size: int, interleave: int, num_ranks: int, block_size: int) -> None:
    """Raise ConfigError if the tokens of blocks cannot be dealt to `size` of the ranks, in runs of `interleave`."""
    if num_ranks % size:
        raise ConfigError(
            f"decode_context_parallel_size={size} does not divide tensor_parallel_size={num_ranks}, whose devices it "
            "uses; give 1 or another divisor"
        )
    if block_size % size:
        raise ConfigError(
            f"decode_context_parallel_size={size} does not divide a block of {block_size} tokens; give a power of 2"
        )
    own = block_size // size
    if size > 1 and own % interleave:
        raise ConfigError(
            f"cp_kv_cache_interleave_size={interleave} is not possible with decode_context_parallel_size={size}: each "
            f"device keeps {own} tokens of a block of {block_size}; give a divisor of {own}, or leave it out"
        )
