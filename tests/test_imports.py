"""What `from forkpoint import LLM` brings along, and how long it takes."""

from __future__ import annotations

import os
import subprocess
import sys

# Of the server, of structured outputs, and of what a model's folder needs.
LATER = (
    "aiohttp",
    "fastapi",
    "httptools",
    "huggingface_hub",
    "jinja2",
    "llguidance",
    "msgspec",
    "prometheus_client",
    "pydantic",
    "safetensors",
    "starlette",
    "tokenizers",
    "transformers",
    "uvicorn",
    "uvloop",
    "xxhash",
    "zmq",
)
MOST_S = 0.4
ROUNDS = 2


def test_the_server_and_structured_outputs_are_imported_when_they_are_used() -> None:
    code = f"import sys; from forkpoint import LLM; print([name for name in {LATER!r} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_importing_llm_takes_little_after_torch() -> None:
    """Seconds of this process, not of the clock: what else runs costs them little. The least of several."""
    code = (
        "import time, torch; start = time.process_time(); from forkpoint import LLM; print(time.process_time() - start)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code]  # the first run compiles
    times = [float(subprocess.check_output(command, text=True, env=environment)) for _ in range(ROUNDS)]
    assert min(times) <= MOST_S, times
