"""The disk store: entries that it wrote are found again whole, and an engine goes on when its files fail."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import shutil
import signal
import stat
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forkpoint.cache.tier_entries import BLOCK, RECORD, SLOT
from forkpoint.disk.journal import Journal
from forkpoint.disk.slab import Slab
from forkpoint.disk.store import open_store
from tests.disk.stores import (
    LAYOUT,
    NAMESPACE,
    NUM_PAGES,
    WAIT_S,
    contents_of,
    count_right,
    found,
    name_of,
    open_now,
    opened,
    read,
    settled,
    write,
)

LOAD_S = 0.5  # for the journal of 100,000 entries, and as much for the tree; both together are asked to take that long


def test_entries_outlive_the_process_that_wrote_them(tmp_path: Path) -> None:
    store = open_now(tmp_path / "new" / "folder")
    write(store, name_of(1), 2, 1)
    write(store, name_of(2, SLOT), 6, 2)
    assert settled(store, {1, 2}).done == (1, 2)
    assert read(store, name_of(1), 2) == contents_of(name_of(1))
    store.close()
    store = open_now(tmp_path / "new" / "folder")
    assert found(store) == {(BLOCK, 2): name_of(1), (SLOT, 6): name_of(2, SLOT)}
    assert count_right(store) == 2
    assert store.facts.window_bytes == LAYOUT.stored_bytes(BLOCK) + LAYOUT.stored_bytes(SLOT)
    store.close()
    files = list((tmp_path / "new" / "folder").iterdir())
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE((tmp_path / "new" / "folder").stat().st_mode) == 0o700


def test_an_entry_is_read_under_its_own_name_alone(tmp_path: Path) -> None:
    store = open_now(tmp_path)
    write(store, name_of(1), 2, 1)
    assert read(store, name_of(2), 2, 2) is None
    assert read(store, name_of(1), 3, 3) is None
    assert read(store, name_of(1), 2, 4) is not None
    store.close()


def test_a_read_of_what_is_still_being_written_waits_for_it(tmp_path: Path) -> None:
    store = open_now(tmp_path)
    for number in range(1, 30):  # all to one unit: a read must see the write before it and none after it
        write(store, name_of(number), 2, 2 * number)
        store.submit_read(name_of(number), 2, 2 * number + 1)
    store.submit_copy(BLOCK, 2, 5)
    store.submit_read(name_of(29), 5, 60)
    assert not settled(store, set(range(2, 61))).failed
    for number, ticket in (*((number, 2 * number + 1) for number in range(1, 30)), (29, 60)):
        _, buffer = store.take(ticket)
        assert buffer[: LAYOUT.block_bytes] == contents_of(name_of(number))
    store.close()


def test_copies_of_entries_that_are_gone_give_their_buffers_back(tmp_path: Path) -> None:
    """On a device, memory that was pinned for a buffer stays pinned until the end."""
    store, sizes = open_now(tmp_path), list[int]()

    def allocate(num_bytes: int) -> mmap.mmap:
        sizes.append(num_bytes)
        return mmap.mmap(-1, num_bytes)

    store.allocate = allocate
    for unit in range(2, 8):
        store.submit_copy(BLOCK, unit, unit + 1)
    write(store, name_of(1), 2, 1)
    settled(store, {1})
    assert len(sizes) <= 2  # one for all copies, one for the write
    store.close()


def test_a_page_holds_entries_of_one_kind(tmp_path: Path) -> None:
    store = open_now(tmp_path)
    write(store, name_of(1), 2, 1)  # page 1
    write(store, name_of(2), 4, 2)  # page 2
    write(store, name_of(3, SLOT), 4, 3)  # page 1
    settled(store, {1, 2, 3})
    assert read(store, name_of(1), 2) is None
    store.close()
    store = open_now(tmp_path)
    assert set(found(store).values()) == {name_of(2), name_of(3, SLOT)}
    store.close()


def test_the_journal_names_a_unit_only_while_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It forgets what a write is about to overwrite, and learns of the new entry afterwards."""
    store = open_now(tmp_path)
    for ticket, unit in ((1, 2), (2, 3), (3, 4)):
        write(store, name_of(ticket), unit, ticket)
    settled(store, {1, 2, 3})
    right, named = Slab.write, list[list[int]]()

    def looking(slab: Slab, *given: Any) -> None:
        shutil.copy(tmp_path / "journal.0", tmp_path / "copy")
        journal = Journal(tmp_path / "copy", NAMESPACE)
        named.append(sorted(journal.entries["unit"].tolist()))
        journal.close()
        right(slab, *given)

    monkeypatch.setattr(Slab, "write", looking)
    write(store, name_of(4), 2, 4)
    store.submit_copy(BLOCK, 2, 4)
    write(store, name_of(6, SLOT), 4, 6)  # in the page of the units 2 and 3
    settled(store, {4, 6})
    store.close()
    assert named == [[3, 4], [2, 3], [4]]


def test_a_damaged_batch_and_all_after_it_are_dropped(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", NAMESPACE)
    record = np.zeros(1, RECORD)
    record["kind"], record["live"] = BLOCK, 1
    sizes = list[int]()
    for unit in (1, 2, 3):
        record["unit"], record["hash"] = unit, np.void(bytes([unit]) * 16)
        journal.append(record, 100, time.time(), 1e9)
        sizes.append((tmp_path / "journal").stat().st_size)
    journal.close()
    whole = (tmp_path / "journal").read_bytes()
    for offset in range(sizes[0], sizes[1]):  # in the second batch
        data = bytearray(whole)
        data[offset] ^= 1
        (tmp_path / "journal").write_bytes(data)
        journal = Journal(tmp_path / "journal", NAMESPACE)
        assert journal.entries["unit"].tolist() == [1] and journal.window_bytes == 100, offset
        journal.close()


def test_removed_entries_do_not_come_back(tmp_path: Path) -> None:
    store = open_now(tmp_path)
    for number in range(1, 5):
        write(store, name_of(number), number + 1, number)
    store.submit_removal(name_of(2))
    assert read(store, name_of(2), 3) is None
    store.close()
    journal = tmp_path / "journal.0"
    journal.write_bytes(journal.read_bytes() + b"damage")  # what comes after the removal does not undo it
    store = open_now(tmp_path)
    assert set(found(store).values()) == {name_of(number) for number in (1, 3, 4)}
    store.submit_removal(None)
    store.close()
    store = open_now(tmp_path)
    assert not found(store)
    store.close()


def test_another_namespace_finds_nothing(tmp_path: Path) -> None:
    store = open_now(tmp_path)
    write(store, name_of(1), 2, 1)
    store.close()
    store = open_now(tmp_path, b"other namespace!")
    assert not found(store)
    store.close()
    store = open_now(tmp_path, NAMESPACE)
    assert not found(store), "the files belong to the other namespace now"
    store.close()


def test_a_sum_of_another_namespace_is_wrong(tmp_path: Path) -> None:
    """Even if a journal says that the slab is its own."""
    store = open_now(tmp_path)
    write(store, name_of(1), 2, 1)
    store.close()
    journal = Journal(tmp_path / "journal.0", NAMESPACE)
    entries = journal.entries
    journal.close()
    (tmp_path / "journal.0").unlink()
    journal = Journal(tmp_path / "journal.0", b"other namespace!")
    journal.rewrite(entries)
    journal.close()
    store = open_now(tmp_path, b"other namespace!")
    assert found(store) and count_right(store) == 0
    store.close()


def test_a_smaller_slab_keeps_what_fits(tmp_path: Path) -> None:
    store = open_now(tmp_path)
    write(store, name_of(1), 2, 1)
    write(store, name_of(2), 2 * NUM_PAGES - 1, 2)
    store.close()
    store = open_now(tmp_path, num_pages=4)
    assert set(found(store).values()) == {name_of(1)} and count_right(store) == 1
    store.close()
    assert (tmp_path / "slab.0").stat().st_size == 4 * LAYOUT.page_bytes


def test_a_second_engine_goes_on_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forkpoint.disk.store.LOCK_WAIT_S", 0.0)
    store = open_now(tmp_path)
    with caplog.at_level(logging.WARNING, "forkpoint"):
        assert opened(tmp_path) is None
    assert "another engine of the same model" in caplog.text
    store.close()
    open_now(tmp_path).close()


def test_a_closed_store_is_free_for_the_next_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a program that uses it has forked, as data loaders do, and the child goes on."""
    monkeypatch.setattr("forkpoint.disk.store.LOCK_WAIT_S", 0.0)
    store = open_now(tmp_path)
    child = os.fork()
    if not child:
        time.sleep(WAIT_S)
        os._exit(0)
    try:
        store.close()
        open_now(tmp_path).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_ranks_share_a_folder_and_no_file(tmp_path: Path) -> None:
    stores = [open_store(tmp_path, LAYOUT, 2 * NUM_PAGES * LAYOUT.page_bytes, NAMESPACE, rank, 2) for rank in (0, 1)]
    for number, store in enumerate(stores):
        assert store is not None and store.facts.num_pages == NUM_PAGES, "they share the bytes too"
        write(store, name_of(number), 2, 1)
        settled(store, {1})
    for number, store in enumerate(stores):
        assert store is not None and read(store, name_of(number), 2) == contents_of(name_of(number))
        store.close()


def no_room(*given: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("what", ["slab", "journal"])
def test_a_full_disk_ends_writing_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    store = open_now(tmp_path)
    write(store, name_of(1), 2, 1)
    settled(store, {1})
    with caplog.at_level(logging.WARNING, "forkpoint"):
        if what == "slab":
            monkeypatch.setattr(Slab, "write", no_room)
        else:
            monkeypatch.setattr(Journal, "append", no_room)
        monkeypatch.setattr(Journal, "rewrite", no_room)
        for ticket in (2, 3):
            write(store, name_of(ticket), ticket + 1, ticket)
        news = settled(store, {2, 3})
        assert news.failed == (2, 3) and not news.writes
        assert read(store, name_of(1), 2) == contents_of(name_of(1)), "reads go on"
        store.submit_removal(name_of(1))  # a wrong entry must go even if there is no room to say so
        assert read(store, name_of(1), 2) is None
    assert len(caplog.records) == 1 and "nothing is written until the next start" in caplog.text
    store.close()
    monkeypatch.undo()
    store = open_now(tmp_path)
    assert not found(store)
    store.close()


@pytest.mark.parametrize("how", ["I/O error", "its bytes are not those that were written"])
def test_a_disk_that_cannot_be_read_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    store = open_now(tmp_path)
    write(store, name_of(1), 2, 1)
    settled(store, {1})
    fails = (_ for _ in ()).throw if how == "I/O error" else lambda error: False
    with caplog.at_level(logging.WARNING, "forkpoint"), monkeypatch.context() as broken:
        broken.setattr(Slab, "read", lambda *given: fails(OSError(errno.EIO, how)))
        assert read(store, name_of(1), 2, 7) is None
        assert read(store, name_of(1), 2, 8) is None
    assert len(caplog.records) == 1 and f"computed instead: {how}" in caplog.text.replace("[Errno 5] ", "")
    assert read(store, name_of(1), 2, 9) is not None
    store.close()


@pytest.mark.parametrize("num_left", [0, 3])
def test_entries_of_pages_that_the_slab_lost_are_gone(
    tmp_path: Path, num_left: int, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_now(tmp_path)
    for unit in (2, 8):
        write(store, name_of(unit), unit, unit)
    settled(store, {2, 8})
    store.close()
    os.truncate(tmp_path / "slab.0", num_left * LAYOUT.page_bytes)
    store = open_now(tmp_path)
    assert len(found(store)) == count_right(store) == (num_left > 0)
    assert f"{2 - (num_left > 0)} of 2 entries of earlier runs are not in its file {tmp_path}/slab.0" in caplog.text
    store.close()


def test_a_slab_that_does_not_fit_takes_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def half(fd: int, start: int, num_bytes: int) -> None:
        os.ftruncate(fd, num_bytes // 2)
        no_room()

    monkeypatch.setattr(os, "posix_fallocate", half)
    assert opened(tmp_path) is None and (tmp_path / "slab.0").stat().st_size == 0
    assert "No space left on device; free space there" in caplog.text


def test_a_slab_that_is_no_file_is_no_tier(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "slab.0").mkdir()
    assert opened(tmp_path) is None
    assert "Is a directory" in caplog.text and "free space" not in caplog.text


def open_files(folder: Path) -> list[str]:
    """Return the folder's files that this process has open."""
    links = [Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    files = [str(link.resolve()) for link in links]  # also of one that is closed meanwhile
    return [file for file in files if file.startswith(str(folder))]


def test_a_disk_that_is_full_at_the_start_keeps_its_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_now(tmp_path)
    write(store, name_of(1), 2, 1)
    settled(store, {1})
    store.close()
    with monkeypatch.context() as full:
        full.setattr("forkpoint.disk.journal._write_all", lambda fd, data: no_room())
        assert opened(tmp_path) is None
    assert "its journal" in caplog.text and "cannot be written: " in caplog.text
    assert not open_files(tmp_path), "a file stayed open"
    store = open_now(tmp_path)
    assert found(store) == {(BLOCK, 2): name_of(1)} and count_right(store) == 1
    store.close()


@pytest.mark.parametrize("what", ["folder", "journal", "slab", "end of the slab"])
def test_files_that_vanish_end_writing(tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str) -> None:
    folder = tmp_path / "gone"
    store = open_now(folder)
    write(store, name_of(1), 2, 1)
    settled(store, {1})
    if what == "folder":
        shutil.rmtree(folder)
    elif what == "end of the slab":
        os.truncate(folder / "slab.0", (NUM_PAGES - 1) * LAYOUT.page_bytes)
    else:
        (folder / f"{what}.0").unlink()
    with caplog.at_level(logging.WARNING, "forkpoint"):
        write(store, name_of(2), 3, 2)
        write(store, name_of(3), 4, 3)
        assert not settled(store, {2, 3}).writes
    assert len(caplog.records) == 1 and "removed" in caplog.text
    assert read(store, name_of(1), 2) is not None
    store.close()


def test_a_folder_that_cannot_be_made_is_no_tier(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "forkpoint"):
        assert opened(tmp_path / "file" / "folder") is None
    assert "the disk tier is off" in caplog.text


def test_the_journal_stays_short(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", NAMESPACE)
    record = np.zeros(1, RECORD)
    record["kind"], record["live"], record["unit"] = BLOCK, 1, 1
    for number in range(10_000):
        record["hash"] = np.void(number.to_bytes(16, "big"))
        journal.append(record, 1, time.time(), 1e9)
        if journal.is_long(1):
            journal.rewrite(record)
    assert (tmp_path / "journal").stat().st_size < 5000 * 100
    journal.close()
    journal = Journal(tmp_path / "journal", NAMESPACE)
    assert len(journal.entries) == 1 and journal.window_bytes == 10_000
    journal.close()


def test_a_long_journal_loads_quickly(tmp_path: Path) -> None:
    records = np.zeros(100_000, RECORD)
    records["unit"], records["kind"], records["live"] = np.arange(100_000) + 1, BLOCK, 1
    records["hash"] = np.frombuffer(np.random.default_rng(0).bytes(1_600_000), "V16")
    journal = Journal(tmp_path / "journal", NAMESPACE)
    for start in range(0, len(records), 32):
        journal.append(records[start : start + 32], 1, 0.0, 1.0)
    journal.close()
    start_s = time.process_time()
    journal = Journal(tmp_path / "journal", NAMESPACE)
    assert time.process_time() - start_s < LOAD_S
    assert (journal.entries == records).all()
    journal.close()
