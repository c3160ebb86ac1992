"""The disk store when its files were damaged, or its process was killed: each entry is right or is gone.

`FORKPOINT_DAMAGES` and `FORKPOINT_KILLS` are the numbers of damages and of killed processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.disk.stores import count_right, found, open_now, random_writes, settled

NUM_DAMAGES = int(os.environ.get("FORKPOINT_DAMAGES", "60"))
NUM_KILLS = int(os.environ.get("FORKPOINT_KILLS", "4"))


def damage(rng: np.random.Generator, data: bytearray) -> None:
    """Cut off, flip a bit, zero a sector, or copy one over another."""
    if not data:
        return
    at, other = (int(rng.integers(len(data))) // 512 * 512 for _ in range(2))
    match rng.integers(5):
        case 0:
            del data[int(rng.integers(len(data))) :]
        case 1:
            data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        case 2:
            data[at : at + 512] = bytes(len(data[at : at + 512]))
        case 3:
            data[at : at + 512] = data[other : other + len(data[at : at + 512])]
        case 4:
            at, other = at // 4096 * 4096, other // 4096 * 4096
            data[at : at + 4096] = data[other : other + 4096]


def test_damaged_files_give_right_entries_or_none(tmp_path: Path) -> None:
    rng = np.random.default_rng(int(os.environ.get("FORKPOINT_SEED", "0")))
    folder = tmp_path / "disk"
    store = open_now(folder)
    random_writes(store, rng, 60)
    store.close()
    files = [folder / "slab.0", folder / "journal.0"]
    whole = [path.read_bytes() for path in files]
    store = open_now(folder)
    most, num_right, num_found = count_right(store), 0, 0
    assert most == len(found(store)) > 3  # of any seed
    store.close()
    for _ in range(NUM_DAMAGES):
        damaged = list(map(bytearray, whole))
        for _ in range(int(rng.integers(1, 4))):
            damage(rng, damaged[int(rng.integers(2))])
        for path, data in zip(files, damaged, strict=True):
            path.write_bytes(data)
        store = open_now(folder)
        num_found += len(found(store))
        num_right += count_right(store)
        store.close()
    print(f"{NUM_DAMAGES} damages: {num_right} entries right, {num_found - num_right} misses, 0 wrong")
    assert 0 < num_right < NUM_DAMAGES * most


@pytest.mark.parametrize("num_later", [0, 3])
@pytest.mark.parametrize("share", [0, 0.4])
def test_a_journal_that_was_cut_off_meanwhile_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, share: float, num_later: int
) -> None:
    store, path, rng = open_now(tmp_path / "disk"), tmp_path / "disk" / "journal.0", np.random.default_rng(1)
    random_writes(store, rng, 20)
    settled(store, set(range(1, 21)))
    os.truncate(path, int(path.stat().st_size * share))
    random_writes(store, rng, num_later, 100)
    store.close()
    assert not caplog.records
    for _ in range(2):  # the first start writes a new journal
        store = open_now(tmp_path / "disk")
        assert ["is incomplete" in record.message for record in caplog.records] == [True]
        assert f"; {len(found(store))} entries are left" in caplog.text
        store.close()


WRITER = """
import sys
from pathlib import Path
import numpy as np
from tests.disk.stores import count_right, found, open_now, random_writes, settled

store = open_now(Path(sys.argv[1]))
print(len(found(store)), count_right(store), flush=True)
rng, first = np.random.default_rng(), int.from_bytes(np.random.default_rng().bytes(5), "big")
while True:
    random_writes(store, rng, 64, first)
    settled(store, set(range(1, 65)))
    print("written", flush=True)
    first += 64
"""


def test_a_killed_writer_leaves_whole_entries(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    num_found = num_bad = 0
    for _ in range(NUM_KILLS):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        seen, right = map(int, process.stdout.readline().split())
        num_found, num_bad = num_found + seen, num_bad + seen - right
        assert process.stdout.readline() == "written\n"
        time.sleep(float(rng.uniform(0, 0.05)))
        process.send_signal(signal.SIGKILL)
        process.wait()
    print(f"{NUM_KILLS} kills: {num_found} entries found, {num_bad} damaged, 0 wrong")
    store = open_now(tmp_path)
    assert count_right(store) >= len(found(store)) - 1 and found(store)
    store.close()
