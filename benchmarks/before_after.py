"""Times the cases of the operator pages in several checkouts on one card, in turns.

    python benchmarks/before_after.py ../before . . [--pages gpu_ops gpu_attention]

A checkout that is named twice shows how much times vary by chance. Each checkout has its own process, which compiles
and records every case and stays. Then each process replays its graph for 20 ms, one after another, in several rounds.
The table has the median time of a call, and by how much the others are slower than the first. Cases that are more than
1 % slower are repeated below the table.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

PAGES = ("gpu_ops", "gpu_attention", "products")
ROWS = (1, 8, 32, 128, 2048)
Make = Callable[[], list[Callable[[], object]]]


def products() -> Iterator[tuple[str, Make]]:
    """Yield the matrix products and experts of `benchmarks.gpu_linear`, in both modes."""
    page: Any = import_module("benchmarks.gpu_linear")
    for mode, deterministic in (("", False), (", deterministic", True)):
        table = page.select_table("triton", deterministic, False)
        for product in page.PRODUCTS[:-1]:

            def make(rows: int, product: Any = product, table: Any = table) -> list[Callable[[], object]]:
                call, x = page.ours(product, table), page.randn(rows, product.width)
                shape = product.num_outputs, product.width
                return [
                    partial(call, x, page.PackedLinear(page.randn(*shape), None))
                    for _ in range(page.turns(product.num_bytes))
                ]

            yield from ((f"{product.name}, {rows} rows{mode}", partial(make, rows)) for rows in ROWS)

        def experts(tokens: int, table: Any = table) -> list[Callable[[], object]]:
            sizes = (page.EXPERTS, 2 * page.INNER, page.HIDDEN), (page.EXPERTS, page.HIDDEN, page.INNER)
            packed, x = page.PackedExperts(*(page.randn(*size) for size in sizes)), page.randn(tokens, page.HIDDEN)
            routes = [table.route(page.randn(tokens, page.EXPERTS), page.RULE) for _ in range(4)]
            return [partial(table.experts, x, packed, *route) for route in routes]

        yield from ((f"experts, {tokens} tokens{mode}", partial(experts, tokens)) for tokens in ROWS)


def cases(pages: list[str], pattern: str) -> dict[str, Make]:
    found: dict[str, Make] = {}
    for page in pages:
        if page == "products":
            found |= dict(products())
        else:
            found |= {case.name: case.make for case in import_module(f"benchmarks.{page}").cases()}
    return {name: make for name, make in found.items() if re.search(pattern, name)}


def serve(known: dict[str, Make], share: tuple[int, int]) -> None:
    """Serve one checkout in a process of its own: compile every case of a share by a call, or time the cases asked
    for."""
    import torch

    def made(name: str) -> list[Callable[[], object]]:
        torch.manual_seed(0)
        calls = known[name]()
        for call in calls:
            call()
        torch.cuda.synchronize()
        return calls

    if share[1]:
        for name in list(known)[share[0] :: share[1]]:
            made(name)
        return
    print(json.dumps(list(known)), flush=True)
    kept, graph, count = list[Callable[[], object]](), torch.cuda.CUDAGraph(), 0
    for line in sys.stdin:
        what, name = json.loads(line)
        if what == "make":
            kept.clear()
            graph = torch.cuda.CUDAGraph()
            torch.cuda.empty_cache()
            kept += made(name)
            count = len(kept) * -(-16 // len(kept))
            with torch.cuda.graph(graph):
                for i in range(count):
                    kept[i % len(kept)]()
            graph.replay()
            torch.cuda.synchronize()
            print("0", flush=True)
            continue
        took, spent = list[float](), 0.0
        while spent < 20:
            marks: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(9)]  # type: ignore[no-untyped-call]
            marks[0].record()
            for mark in marks[1:]:
                graph.replay()
                mark.record()
            torch.cuda.synchronize()
            own = [marks[i].elapsed_time(marks[i + 1]) for i in range(8)]
            took += own
            spent += sum(own)
        print(median(took) / count * 1e3, flush=True)


class Checkout:
    def __init__(self, root: Path, options: argparse.Namespace) -> None:
        chosen = ["--pages", *options.pages, "--only", options.only]
        self._command = [sys.executable, "-P", __file__, "--serve", *chosen]
        self._env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}

    def compiling(self, share: int, shares: int) -> subprocess.Popen[str]:
        return subprocess.Popen([*self._command, "--share", f"{share}", f"{shares}"], env=self._env, text=True)

    def start(self) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process: Any = subprocess.Popen(self._command, env=self._env, text=True, **pipes)

    def say(self, what: str, name: str) -> None:
        self._process.stdin.write(json.dumps([what, name]) + "\n")
        self._process.stdin.flush()

    def heard(self) -> Any:
        """Read what a process sends: the names of its cases first, then the result of each command."""
        return json.loads(self._process.stdout.readline())

    def microseconds(self, name: str) -> float:
        self.say("time", name)
        return float(self.heard())

    def stop(self) -> None:
        self._process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkouts", nargs="*", type=Path)
    parser.add_argument("--pages", nargs="+", choices=PAGES, default=list(PAGES))
    parser.add_argument("--only", default="", help="a pattern that a case's name has")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--share", nargs=2, type=int, default=(0, 0), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(cases(options.pages, options.only), tuple(options.share))
    roots = [root.resolve() for root in options.checkouts]
    every = [Checkout(root, options) for root in roots]
    compiling = [Checkout(root, options).compiling(i, 6) for root in dict.fromkeys(roots) for i in range(6)]
    for process in compiling:
        process.wait()
    for checkout in every:
        checkout.start()
    known = [checkout.heard() for checkout in every]
    names = [name for name in known[0] if all(name in others for others in known)]
    print(f"| µs | {' | '.join(map(str, options.checkouts))} |\n|---|{'---|' * len(every)}")
    slower: list[str] = []
    for name in names:
        for checkout in every:
            checkout.say("make", name)
        assert [checkout.heard() for checkout in every]
        rounds = [[checkout.microseconds(name) for checkout in every] for _ in range(options.rounds)]
        own = [median(times) for times in zip(*rounds, strict=True)]
        cells = [f"{own[0]:.2f}", *(f"{time:.2f} ({time / own[0] - 1:+.1%})" for time in own[1:])]
        line = f"| {name} | {' | '.join(cells)} |"
        print(line, flush=True)
        slower += [line] if max(own[1:]) > 1.01 * own[0] else []
    print(f"\n{len(slower)} of {len(names)} take over 1 % longer somewhere:", *slower, sep="\n")
    for checkout in every:
        checkout.stop()


if __name__ == "__main__":
    main()
