"""`forkpoint demo`."""

from __future__ import annotations

import argparse
import sys

from forkpoint.cli.model import choose_model
from forkpoint.cli.options import engine_options
from forkpoint.demo import drafts
from forkpoint.demo.scenarios import run_demo
from forkpoint.demo.shown import aligned, table, transcript

LONG = 10  # factor of the answer length for measuring drafts


def demo(options: argparse.Namespace) -> int:
    """Run the demo on the given model, or the checkout's, and print it. Return 1 if an output differs, otherwise 0."""
    engine = engine_options(options)
    talks = "model" not in engine
    model = choose_model(engine)
    engine.pop("model", None)
    engine.setdefault("dtype", "float32")
    engine.setdefault("log_level", "warning")
    _say("Answering prompts with the cache on and off. A first run compiles C++ operators before that.")
    chat, others = run_demo(model, max_tokens=options.max_tokens, options=engine)
    if talks:
        print("A small model, trained for this, under a system prompt that it has not seen before:\n")
        print(transcript(chat), end="\n\n")
    rows = [*chat, *others]
    print(table(rows), end="\n\n")
    _say("Measuring drafts ...")
    drafted = drafts.run_drafts(model, max_tokens=LONG * options.max_tokens, options=engine, say=_say)
    print(f"One long answer, with up to {drafts.NUM_DRAFTS} drafts a step:\n")
    print(*aligned(drafts.cells(drafted)), sep="\n")
    identical = [*(row.identical for row in rows), *(row.identical for row in drafted)]
    return int(not all(identical))


def _say(text: str) -> None:
    print(text, file=sys.stderr)
