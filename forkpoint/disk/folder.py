"""The disk tier's folder. Each namespace, a model with its options, has a folder of its own in it."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import time
from pathlib import Path
from typing import Final

MOST_NAMESPACES: Final = 4  # namespaces that one folder keeps; their sizes add up
NAME: Final = re.compile("[0-9a-f]{32}")
FILE_NAMES: Final = ("slab.*", "journal.*", "lock.*")
LOGGER: Final = logging.getLogger("forkpoint")


def namespace_folder(root: Path, namespace: bytes) -> Path:
    """Return the path of a namespace's folder in `root`, which it need not have yet."""
    return root / namespace.hex()


def remove_old_namespaces(own: Path) -> None:
    """Remove folders of other namespaces next to `own` until MOST_NAMESPACES are left, that one included.

    The folder that was unused for the longest time goes first. Folders in use stay, and so does everything else. One
    line in the log says what is removed or left. After an error, too much is left.
    """
    others: list[Path] = []
    with contextlib.suppress(OSError):
        others = [path for path in own.parent.iterdir() if NAME.fullmatch(path.name) and path.name != own.name]
    others.sort(key=_last_used_s)
    num_removed = 0
    for path in others:
        if len(others) - num_removed < MOST_NAMESPACES:
            break
        num_removed += _remove(path)
    if num_removed:
        LOGGER.warning(
            "disk tier: files of %d other models or options in %s are removed, because a folder keeps those of the "
            "last %d",
            num_removed,
            own.parent,
            MOST_NAMESPACES,
        )
    elif others and not own.exists():
        LOGGER.warning(
            "disk tier: %s has entries of another model, or of options that give other numbers; they stay, and this "
            "engine begins without entries",
            own.parent,
        )


def lock_file(path: Path, wait_s: float) -> int | None:
    """Lock a file until `unlock` gets its descriptor, which is returned. None: another process has locked it.

    The file's time becomes now. Waits up to `wait_s`. Raises OSError.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.utime(fd)
            return fd
        except BlockingIOError:
            if time.monotonic() > until:
                os.close(fd)
                return None
            time.sleep(0.05)


def unlock(fd: int) -> None:
    """Give up a lock, and close its file.

    A child process that was forked meanwhile has the descriptor too, so closing it would not suffice.
    """
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def names_open_file(path: Path, fd: int, num_bytes: int = 0) -> bool:
    """Return whether the path still names the open file, and that has at least so many bytes."""
    try:
        found = os.stat(path)
        return os.path.samestat(found, os.fstat(fd)) and found.st_size >= num_bytes
    except OSError:
        return False


def _last_used_s(folder: Path) -> float:
    return max((path.stat().st_mtime for path in folder.glob("lock.*")), default=0.0)


def _remove(folder: Path) -> bool:
    """Remove a namespace's files and its folder. Returns False if an engine uses it or something cannot be removed."""
    try:
        lock = lock_file(folder / "lock.0", 0.0)
        if lock is None:
            return False
        try:
            for pattern in FILE_NAMES:
                for path in folder.glob(pattern):
                    path.unlink()
        finally:
            unlock(lock)
        folder.rmdir()
    except OSError:
        return False
    return True
