"""The limits of memory that control groups set: those of containers, of systemd's services and of batch jobs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final


@dataclass(frozen=True, slots=True)
class _Version:
    """Names of a version of control groups. `cache`: the line of `memory.stat` with the reclaimable file cache."""

    folder: str
    limit: str
    used: str
    cache: str


V1: Final = _Version("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2: Final = _Version("", "memory.max", "memory.current", "inactive_file")


def free_group_bytes(root: Path) -> int | None:
    """Return the memory that all groups of this process leave it; None without a limit.

    `root` is where `/proc` and `/sys` are mounted. File cache that the system would reclaim counts as free, as it does
    in MemAvailable: the weights that were read are in it.
    """
    found: list[int] = []
    for version, folder in _groups(root):
        limit, used = folder / version.limit, folder / version.used
        if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
            found.append(int(text) - int(used.read_text()) + _cache_bytes(folder / "memory.stat", version.cache))
    return min(found, default=None)


def _groups(root: Path) -> Iterator[tuple[_Version, Path]]:
    """Yield the folders of this process's groups and of all groups that contain them.

    In a container `/proc/self/cgroup` may name folders that only the host has. The container's group is at the top.
    """
    paths = {V1: Path(), V2: Path()}
    own = root / "proc/self/cgroup"
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            paths[V1 if controllers else V2] = Path(path.lstrip("/"))
    for version, innermost in paths.items():
        top = root / "sys/fs/cgroup" / version.folder
        yield from ((version, top / folder) for folder in (innermost, *innermost.parents))


def _cache_bytes(stat: Path, name: str) -> int:
    if stat.exists():
        for line in stat.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0
