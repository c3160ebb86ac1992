"""Options of `forkpoint simulate`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from forkpoint.routing.router import ROUTERS
from forkpoint.sim.shape import SHAPES
from forkpoint.sim.systems import ENGINE
from forkpoint.sim.workload import WORKLOADS


def add_simulate_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    what = parser.add_argument_group("what is replayed")
    what.add_argument(
        "traces",
        nargs="*",
        metavar="TRACE",
        help=f"a file, or a made-up workload such as chat:sessions=50 ({', '.join(WORKLOADS)}); "
        "FILE@limit=1000,sessions=0.5,max_tokens=100000 reads so many requests (or conversations) only, replays a "
        "share of the sessions, and leaves out longer requests and what follows them",
    )
    what.add_argument("--arrival-scale", type=float, default=1.0, metavar="X", help="2: arrivals twice as far apart")
    what.add_argument("--think-scale", type=float, default=1.0, metavar="X", help="2: think times twice as long")
    where = parser.add_argument_group("what serves it")
    where.add_argument("--model", default="qwen3.5-9b", help=f"{', '.join(SHAPES)}, a model folder or a hub id")
    where.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "bfloat16", "fp8"),
        default="auto",
        help="of keys and values (default: auto)",
    )
    where.add_argument(
        "--mamba-ssm-cache-dtype", choices=("float32", "bfloat16"), default="float32", help="of the states' matrices"
    )
    where.add_argument(
        "--quantization", choices=("fp8",), help="of the weights; that of a model folder is read from it"
    )
    where.add_argument("--memory", default="32", metavar="GIB", help="for keys, values and states; several: 8,16,32")
    where.add_argument(
        "--systems",
        default=ENGINE,
        help=f"separated by ';': {ENGINE}, {ENGINE}:capture=NAME,eviction=NAME; with drafts also "
        f"num_speculative_tokens=3,acceptance_length=2.4 (default: {ENGINE})",
    )
    where.add_argument("--replicas", type=int, default=1, metavar="INT", help="each with that memory (default: 1)")
    where.add_argument("--router", choices=ROUTERS, default=ROUTERS[0], help=f"(default: {ROUTERS[0]})")
    where.add_argument("--max-num-batched-tokens", type=int, default=8192, metavar="INT", help="(default: 8192)")
    where.add_argument("--max-num-seqs", type=int, default=256, metavar="INT", help="(default: 256)")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="INT", help="processes (default: all CPUs)"
    )
    how.add_argument("--json", type=Path, metavar="FILE", help="write all results")
