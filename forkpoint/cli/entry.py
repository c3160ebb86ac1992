"""The process of the `forkpoint` command. It imports nothing slow, so that Ctrl-C is always handled."""

from __future__ import annotations

import signal


def run() -> None:
    """Run the command and exit. Ctrl-C during imports ends the process without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from forkpoint.cli.main import run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
