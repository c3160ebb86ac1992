"""Measures the host memory that loading models on a CPU needs, next to the models as kept and their largest shards.

    python -m benchmarks.load_memory FOLDER [FOLDER ...]

It counts all resident pages, also those of mapped files. The exit code is 1 if a load needed more than its limit.
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forkpoint.freed_memory import return_freed_memory
from forkpoint.models.registry import load_model
from forkpoint.ops.select import select_table
from forkpoint.ops.table import OpTable

MIB = 2**20


@dataclass(frozen=True, slots=True)
class LoadMemory:
    """Bytes of a load: all shards, the largest of them, the model as kept, and the highest resident memory."""

    stored: int
    largest_shard: int
    kept: int
    peak: int

    @property
    def limit(self) -> int:
        return self.kept + self.largest_shard

    @property
    def line(self) -> str:
        sizes = {"stored": self.stored, "largest shard": self.largest_shard, "kept": self.kept, "peak": self.peak}
        parts = (f"{name} {size / MIB:,.0f} MiB" for name, size in (*sizes.items(), ("limit", self.limit)))
        return ", ".join(parts)


def measure(folder: Path, ops: OpTable) -> LoadMemory:
    """Load the model in this process. Libraries must be resident already."""
    shards = [path.stat().st_size for path in folder.glob("*.safetensors")]
    before = _trimmed()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    model = load_model(folder, ops=ops)
    peak, after = _status("VmHWM"), _trimmed()
    del model
    return LoadMemory(stored=sum(shards), largest_shard=max(shards), kept=after - before, peak=peak - before)


def _trimmed() -> int:
    """Give freed memory back to the system and return the resident bytes."""
    gc.collect()
    return_freed_memory()
    return _status("VmRSS")


def _status(name: str) -> int:
    """Return the bytes of a field of this process's status."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, f"Linux has {name} in /proc/self/status"
    return int(found[1]) * 1024


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="folders with safetensors weights")
    folders = parser.parse_args(argv).folders
    ops = select_table("auto", deterministic=False, force_state_copy=False)
    load_model(folders[0], ops=ops)  # makes libraries resident
    found = [measure(folder, ops) for folder in folders]
    for folder, memory in zip(folders, found, strict=True):
        print(f"{folder.name}: {memory.line}")
    return int(any(memory.peak > memory.limit for memory in found))


if __name__ == "__main__":
    sys.exit(main())
