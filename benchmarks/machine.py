"""Describes the machine, the commit and the date for a benchmark page."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path

ISA_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "sve")


def cpu_model() -> str:
    """Return the processor's name and family numbers, as lscpu shows them."""
    fields = _lscpu()
    name = fields.get("Model name", "unknown processor")
    numbers = [f"{key.lower()} {fields[key]}" for key in ("CPU family", "Model", "Stepping") if key in fields]
    return f"{name} ({', '.join(numbers)})" if numbers else name


def cpu_isa() -> str:
    """Return the processor's vector extensions that matter to matrix products."""
    flags = set(_lscpu().get("Flags", "").split())
    return " ".join(flag for flag in ISA_FLAGS if flag in flags)


def num_cpus() -> int:
    return len(os.sched_getaffinity(0))


def load_average() -> float:
    """Return the load average of the last minute, which shows whether other programs run."""
    return os.getloadavg()[0]


def commit_hash() -> str:
    """Return the checked-out commit, with a note if the package differs from it."""
    root = Path(__file__).resolve().parents[1]
    head = _output("git", "-C", str(root), "rev-parse", "--short", "HEAD") or "unknown"
    changed = _output(
        "git", "-C", str(root), "status", "--porcelain", "--untracked-files=no", "forkpoint", "benchmarks"
    )
    return f"{head} with local changes" if changed else head


def today() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d")


def _lscpu() -> dict[str, str]:
    pairs = (line.split(":", 1) for line in _output("lscpu").splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
