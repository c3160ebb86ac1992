"""Starts processes that run code of this package."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any


def python_process(run: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that runs the code `run`, with `options` of Popen. It can import what this process can import.

    Ctrl-C in a terminal does not reach it. Raises OSError if it cannot be started.
    """
    path = [each or os.getcwd() for each in sys.path if isinstance(each, str)]  # Python ignores others
    return subprocess.Popen(
        [sys.executable, "-P", "-c", run, *arguments],
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        **options,
    )
