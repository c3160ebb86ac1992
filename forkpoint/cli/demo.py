"""`forkpoint demo`."""

from __future__ import annotations

import argparse

from forkpoint.cli.options import engine_options
from forkpoint.demo import shipped
from forkpoint.demo.model import make_demo_model
from forkpoint.demo.scenarios import run_demo
from forkpoint.demo.table import table
from forkpoint.demo.transcript import transcript


def demo(options: argparse.Namespace) -> int:
    """Run the demo on the given model, or on the one that comes with forkpoint; 1 if an output differs."""
    engine = engine_options(options)
    named = engine.pop("model", None)
    talks = named is None and shipped.is_complete()
    if named is None and not talks:
        print(
            "The weights of the model that comes with forkpoint are not here (train/ makes them). A model with random"
        )
        print("weights takes its place: its answers are noise, and any wrong state changes them.\n")
    model = named or (shipped.default_model() if talks else str(make_demo_model()))
    engine.setdefault("dtype", "float32")
    engine.setdefault("log_level", "warning")
    results = run_demo(model, max_tokens=options.max_tokens, options=engine)
    if talks:
        print("The model that comes with forkpoint under a system prompt that it has not seen before:\n")
        print(transcript(results.chat), end="\n\n")
    print(table(results.rows))
    return int(not all(row.identical for row in results.rows))
