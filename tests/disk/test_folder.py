"""A folder of the disk tier keeps the files of a few models, and nothing that is in use or not its own goes."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from forkpoint.disk.folder import MOST_NAMESPACES, lock_file, namespace_folder, remove_old_namespaces
from tests.disk.stores import open_now


def used(root: Path, number: int) -> Path:
    """The folder of a namespace that was used at a time."""
    folder = namespace_folder(root, bytes([number]) * 16)
    remove_old_namespaces(folder)
    open_now(folder, bytes([number]) * 16).close()
    os.utime(folder / "lock.0", (number, number))
    return folder


def test_the_namespace_that_was_unused_the_longest_goes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "notes").mkdir()
    folders = [used(tmp_path, number) for number in range(1, MOST_NAMESPACES + 1)]
    assert all(folder.exists() for folder in folders)
    os.utime(folders[0] / "lock.0", (90, 90))
    in_use = lock_file(folders[1] / "lock.0", 0.0)
    os.utime(folders[1] / "lock.0", (2, 2))
    assert in_use is not None
    caplog.clear()
    with caplog.at_level(logging.WARNING, "forkpoint"):
        folders.append(used(tmp_path, 50))
    assert [folder.exists() for folder in folders] == [True, True, False, *[True] * (MOST_NAMESPACES - 2)]
    assert len(caplog.records) == 1 and "1 other models or options" in caplog.text
    os.close(in_use)
    assert (tmp_path / "notes").exists()


def test_foreign_files_stay(tmp_path: Path) -> None:
    folders = [used(tmp_path, number) for number in range(1, MOST_NAMESPACES + 1)]
    (folders[0] / "mine").write_text("text")
    used(tmp_path, 50)
    assert [path.name for path in folders[0].iterdir()] == ["mine"]
