"""The openai npm package, a second reader of the API. Skipped without node or the package."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.server.running import RunningServer

SCRIPT = Path(__file__).with_name("openai_client.mjs")


def node_modules() -> Path | None:
    """Return the folder of the package: the one that OPENAI_NODE_MODULES names, or the global one."""
    folders = [os.environ.get("OPENAI_NODE_MODULES", "")]
    if shutil.which("npm"):
        folders.append(subprocess.run(["npm", "root", "-g"], capture_output=True, text=True).stdout.strip())
    return next((Path(folder) for folder in folders if folder and (Path(folder) / "openai").is_dir()), None)


def test_the_npm_client(server: RunningServer) -> None:
    node, modules = shutil.which("node"), node_modules()
    if node is None or modules is None:
        pytest.skip("needs node and the npm package openai (in the folder that OPENAI_NODE_MODULES names)")
    done = subprocess.run([node, str(SCRIPT), str(modules), server.url], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "all good" in done.stdout
