"""Measures the 9B shape on one GPU next to its floor in one run: `python -m benchmarks.gpu_9b`.

It uses dummy weights, `LLM.generate`, one process, one set of flags, wall-clock time and medians. Decode rates are
batch x 128 over t(129 tokens) - t(1 token). With --profile it prints where the time of each kind of step goes instead.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.gpu_9b import copies
from benchmarks.gpu_9b.copies import CopySizes
from benchmarks.gpu_9b.first_token import measure_first_token
from benchmarks.gpu_9b.floor import Floor, measure_floor
from benchmarks.gpu_9b.lines import PARTS, Plan, measure
from benchmarks.gpu_9b.measures import Client, Sizes, warm_up
from benchmarks.gpu_9b.options import engine_options
from benchmarks.gpu_9b.profile import Profiler
from benchmarks.gpu_9b.shape import SHAPE_9B, write_config
from benchmarks.gpu_9b.table import HEAD, Goal, Line, write_json, write_page
from benchmarks.model131m import HybridShape
from benchmarks.peers.protocol import repository_root
from forkpoint.engine.llm import LLM
from forkpoint.platforms.table import resolve_platform

STARTUP = "startup"
NOTES = (
    "vLLM's column is of one other card of the kind, beside forkpoint (docs/benchmarks/gpu_9b.md says how).",
    "Floor: the matrix products of the work by the vendor's library in a CUDA graph, with weights of every layer; "
    "states, keys and values at the copy rate; attention's products at the matrix rate; all timed in the same run.",
    "After every call the engine's counters were held against its reports: tokens that entered the model = prompt "
    "tokens - cached tokens + tokens decoded, and no bytes of states copied.",
)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_9b", description=(__doc__ or "").strip())
    every = (*PARTS, STARTUP)
    parser.add_argument("--only", default=",".join(every), help=f"parts, separated by commas: {', '.join(every)}")
    parser.add_argument("--repeats", type=int, default=Sizes().repeats)
    parser.add_argument("--enforce-eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--max-num-batched-tokens", type=int, help="token budget of a step, if not the default")
    parser.add_argument("--quantization", choices=("fp8",), help="weights in FP8; the floor stays that of bf16")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--profile", action="store_true", help="print where the time of each kind of step goes, and end"
    )
    parser.add_argument("--copies", action="store_true", help="print what copying states first would cost, and end")
    parser.add_argument("--num-kernels", type=int, default=14, help="lines for each kind of step with --profile")
    parser.add_argument(
        "--kernel-cache", type=Path, default=None, help="folder of compiled kernels (default: Triton's)"
    )
    page = repository_root() / "docs" / "benchmarks" / "gpu_9b.md"
    parser.add_argument("--page", type=Path, default=page, help="where the page is written")
    parser.add_argument("--json", type=Path, default=None, help="where all samples are written")
    parser.add_argument("--commit", default="", help="what to name as the commit where there is no repository")
    return parser


def startup_lines(model: Path, options: list[str], warm_cache: Path) -> Iterator[Line]:
    """Measure from process start to first token, with an empty folder of compiled kernels and then with the filled
    one."""
    for state, goal in (("empty", Goal("171 s", 60.0)), ("warm", Goal("", 20.0))):
        seconds, parts = measure_first_token(model, warm_cache, options)
        yield Line(
            f"process start to first token, kernel cache {state} ({parts})", "s", seconds, None, goal, (seconds,)
        )


def run(args: argparse.Namespace, shape: HybridShape, sizes: Sizes, folder: Path) -> Iterator[Line]:
    """Run the chosen parts in order: start-up in separate processes, the floor, then the engine."""
    parts = args.only.split(",")
    model = write_config(folder / "model", shape)
    device = resolve_platform(args.device).device
    if STARTUP in parts:
        flags = ["--device", args.device, *(["--enforce-eager"] if args.enforce_eager else [])]
        flags += [] if args.quantization is None else ["--quantization", args.quantization]
        yield from startup_lines(model, flags, args.kernel_cache or folder / "kernels")
    plan = Plan(sizes, _budget(args), [part for part in parts if part != STARTUP])
    if not plan.parts:
        return
    floor = measure_floor(shape, device, plan.floor_tokens, plan.floor_rows)
    _say_floor(floor)
    with start(model, args) as llm:
        client = Client(llm, shape.vocab_size)
        began = time.perf_counter()
        warm_up(client, sizes)
        print(f"# warmed up in {time.perf_counter() - began:.1f} s", file=sys.stderr)
        yield from measure(client, plan, floor)
        print(f"# counters agreed after {client.num_checked} calls", file=sys.stderr)


def flags_of(args: argparse.Namespace) -> dict[str, Any]:
    return engine_options(args.device, args.enforce_eager, args.max_num_batched_tokens, args.quantization)


def start(model: Path, args: argparse.Namespace) -> LLM:
    began = time.perf_counter()
    llm = LLM(str(model), **flags_of(args))
    print(f"# engine started in {time.perf_counter() - began:.1f} s", file=sys.stderr)
    return llm


def profile(args: argparse.Namespace, shape: HybridShape, sizes: Sizes, folder: Path) -> None:
    """Print a profile of each kind of step."""
    with start(write_config(folder / "model", shape), args) as llm:
        client = Client(llm, shape.vocab_size)
        warm_up(client, sizes)
        for found in Profiler(llm, client.ids, sizes).run():
            print("\n".join(found.lines(args.num_kernels)), flush=True)


def compare_copies(args: argparse.Namespace, shape: HybridShape, sizes: CopySizes, folder: Path) -> None:
    """Print the table of loads with states read in place, and with states copied first."""
    model = write_config(folder / "model", shape)

    def started(copied: bool) -> tuple[Client, Callable[[], None]]:
        options = {
            **flags_of(args),
            "force_state_copy": copied,
        }
        llm = LLM(str(model), **options)
        return Client(llm, shape.vocab_size, copies=copied), llm.close

    print(copies.HEAD)
    for load in copies.compare(started, sizes):
        print(load.cells, flush=True)


def about(args: argparse.Namespace) -> dict[str, Any]:
    """Return what was run, where and when, with the command without this machine's paths."""
    flags = ["--only", args.only, "--repeats", str(args.repeats)]
    flags += ["--enforce-eager"] if args.enforce_eager else []
    budget = args.max_num_batched_tokens
    flags += [] if budget is None else ["--max-num-batched-tokens", str(budget)]
    flags += [] if args.quantization is None else ["--quantization", args.quantization]
    on_gpu = resolve_platform(args.device).device.type != "cpu"
    return {
        "command": shlex.join(["python", "-m", "benchmarks.gpu_9b", *flags]),
        "date": machine.today(),
        "commit": args.commit or machine.commit_hash(),
        "machine": torch.cuda.get_device_name() if on_gpu else machine.cpu_model(),
        "software": f"Python {platform.python_version()}, torch {torch.__version__}",
        "options": ", ".join(f"{k}={v}" for k, v in flags_of(args).items()),
        "repeats": args.repeats,
    }


def main(
    argv: Sequence[str] | None = None,
    shape: HybridShape = SHAPE_9B,
    sizes: Sizes | None = None,
    copy_sizes: CopySizes | None = None,
) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    unknown = set(args.only.split(",")) - {*PARTS, STARTUP}
    if unknown:
        parser.error(f"--only has no part {sorted(unknown)[0]!r}; parts are {', '.join((*PARTS, STARTUP))}")
    sizes = replace(sizes or Sizes(), repeats=args.repeats)
    with tempfile.TemporaryDirectory() as temporary:
        if args.kernel_cache is not None:
            os.environ["TRITON_CACHE_DIR"] = str(args.kernel_cache)
        if args.copies:
            compare_copies(args, shape, copy_sizes or CopySizes(), Path(temporary))
            return 0
        if args.profile:
            profile(args, shape, sizes, Path(temporary))
            return 0
        print(HEAD)
        lines = []
        for line in run(args, shape, sizes, Path(temporary)):
            print(line.cells, flush=True)
            lines.append(line)
    facts = about(args)
    write_page(args.page, lines, facts, NOTES)
    if args.json is not None:
        write_json(args.json, lines, facts)
    return 0


def _budget(args: argparse.Namespace) -> int:
    return args.max_num_batched_tokens or resolve_platform(args.device).defaults.max_num_batched_tokens


def _say_floor(floor: Floor) -> None:
    products = ", ".join(f"{count}: {seconds * 1e3:.2f}" for count, seconds in floor.products_s.items())
    heads = ", ".join(f"{count}: {seconds * 1e3:.3f}" for count, seconds in floor.head_s.items())
    rates = f"copy {floor.copy_rate / 1e12:.2f} TB/s, products {floor.matrix_rate / 1e12:.0f} TFLOP/s"
    print(f"# {rates}; products by tokens (ms): {products}; head by rows (ms): {heads}", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
