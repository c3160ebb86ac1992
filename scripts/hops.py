"""Measures how far one steady decode step goes: distinct functions, files, and changes of file from call to call.

It counts the package's own code outside `models` and `ops`, in a step of one greedy request of the demo model on the
CPU. `--calls` lists the calls in their order.

    python -m scripts.hops [--calls]
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from types import FrameType

import forkpoint
from forkpoint import LLM, SamplingParams

ROOT = Path(forkpoint.__file__).parent
MODEL = Path(__file__).parent.parent / "demo_model"
COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")  # part of the function that has them
WARM_UP = 20  # steps: past the prefill, in the middle of a block


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=str(MODEL), help="a model folder")
    parser.add_argument("--calls", action="store_true", help="list the calls")
    args = parser.parse_args()
    llm = LLM(args.model, device="cpu", cpu_ops="torch", log_level="error", async_scheduling=False)
    engine, params = llm._engine, SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    engine.add_request(engine.inputs.prompt("Tell me about the sea.", params=params), params)
    for _ in range(WARM_UP):
        engine.advance()
    calls: list[tuple[str, str, int]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        path, code = Path(frame.f_code.co_filename), frame.f_code
        if code.co_name in COMPREHENSIONS:
            return
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] not in ("models", "ops"):
            calls.append((str(path.relative_to(ROOT)), code.co_qualname, code.co_firstlineno))

    sys.setprofile(note)
    engine.advance()
    sys.setprofile(None)
    if args.calls:
        for path, name, _ in calls:
            print(f"{path:<32} {name}")
    files = [path for path, _, _ in calls]
    changes = sum(before != after for before, after in itertools.pairwise(files))
    print(f"{len(set(calls))} functions, {len(set(files))} files, {changes} changes of file, {len(calls)} calls")


if __name__ == "__main__":
    main()
