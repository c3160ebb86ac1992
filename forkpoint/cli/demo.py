"""`forkpoint demo`."""

from __future__ import annotations

import argparse

from forkpoint.cli.options import engine_options
from forkpoint.demo.model import make_demo_model
from forkpoint.demo.scenarios import run_demo
from forkpoint.demo.table import table


def demo(options: argparse.Namespace) -> int:
    """Run the demo on the given model, or on one made on the spot; 1 if an output differs."""
    engine = engine_options(options)
    model = engine.pop("model", None)
    if model is None:
        model = str(make_demo_model())
        print("The demo model has random weights: its answers are noise, and any wrong state changes them.\n")
    engine.setdefault("dtype", "float32")
    engine.setdefault("log_level", "warning")
    rows = run_demo(model, max_tokens=options.max_tokens, options=engine)
    print(table(rows))
    return int(not all(row.identical for row in rows))
