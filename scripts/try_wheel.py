"""Builds the wheel, installs it into an environment of its own, and uses it: `python -m scripts.try_wheel`.

The new environment sees the packages of the interpreter that runs this, except forkpoint, so that nothing is fetched.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "forkpoint")
PAGE = "forkpoint/server/static"
MOST_BYTES = 1_500_000  # the chat page's libraries take 0.4 MB of it, a model or a data set would exceed it
READY = re.compile(r"ready: \S+ on (http://\S+)")
START_S = 300.0


def build(folder: Path) -> Path:
    """Build the wheel of the working tree from a copy, because setuptools leaves the files of a build next to its
    sources."""
    copy = folder / "sources"
    copy.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    command = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, copy)
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode:
        raise SystemExit(f"the wheel does not build:\n{built.stdout}{built.stderr}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """Create an environment with the wheel, and return its folder of commands."""
    subprocess.run((sys.executable, "-m", "venv", "--without-pip", folder), check=True)
    commands = folder / "bin"
    # A folder that a .pth file names is searched, but its own .pth files, those of editable installs, are not read.
    shared = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages" / "shared.pth"
    shared.write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = (sys.executable, "-m", "pip", "--python", commands / "python", "install", "--quiet")
    subprocess.run((*pip, "--no-deps", "--no-index", "--force-reinstall", wheel), check=True)
    return commands


def run(*command: str | Path, cwd: Path, code: int = 0) -> str:
    """Return what a command prints. Exit with it if the command does not end with `code`."""
    ended = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True)
    said = ended.stdout + ended.stderr
    if ended.returncode != code:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {ended.returncode}, not {code}:\n{said}")
    return said


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def serve_one(command: Path, folder: Path) -> str:
    """Return the answer of `forkpoint serve` to one request."""
    log = folder / "server.log"
    with log.open("wb") as file:
        arguments = (command, "serve", ROOT / "demo_model", "--port", "0")
        server = subprocess.Popen(arguments, cwd=folder, env=environment(), stderr=file)
    try:
        deadline = time.monotonic() + START_S
        while (ready := READY.search(log.read_text())) is None:
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start:\n{log.read_text()}")
            time.sleep(0.1)
        messages = [{"role": "user", "content": "Hello!"}]
        body = json.dumps({"model": str(ROOT / "demo_model"), "messages": messages, "temperature": 0}).encode()
        request = urllib.request.Request(f"{ready[1]}/v1/chat/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=START_S) as response:
            return str(json.load(response)["choices"][0]["message"]["content"])
    finally:
        server.terminate()
        server.wait(60)


def check_demo(shown: str) -> None:
    """Check that the demo's trained model answers rightly, and the same without the cache and with drafts."""
    lines = shown.splitlines()
    check("9 of 9 answers right" in lines, shown)
    check("14 of 14 outputs identical with the cache on and off" in lines, shown)
    drafts = [(line.split()[0], line.split()[-1]) for line in lines if line.startswith(("none ", "ngram ", "mtp "))]
    check(drafts == [("none", "yes"), ("ngram", "yes"), ("mtp", "yes")], shown)
    print("it runs the demo of this checkout: its answers are right, and identical with drafts")


def check(holds: bool, problem: str) -> None:
    if not holds:
        raise SystemExit(problem)


def main() -> None:
    argparse.ArgumentParser(prog="python -m scripts.try_wheel", description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build(folder)
        size = wheel.stat().st_size
        check(size <= MOST_BYTES, f"{wheel.name} has {size:,} bytes, more than {MOST_BYTES:,}")
        print(f"{wheel.name}: {size:,} bytes")
        files = zipfile.ZipFile(wheel).namelist()
        page = [str(path.relative_to(ROOT)) for path in (ROOT / PAGE).rglob("*") if path.is_file()]
        check(bool(page) and set(page) <= set(files), f"{wheel.name} lacks files of the chat page")
        commands = install(wheel, folder / "environment")
        forkpoint, empty = commands / "forkpoint", folder / "empty"
        empty.mkdir()
        place = run(commands / "python", "-c", "import forkpoint; print(forkpoint.__file__)", cwd=empty)
        check(place.startswith(str(folder)), f"forkpoint is imported from {place}")
        check("serve" in run(forkpoint, "--help", cwd=empty), "--help does not name serve")
        refused = run(forkpoint, "generate", "--prompt", "x", cwd=empty, code=2)
        check(refused.startswith("error: no model was given") and refused.count("\n") == 1, refused)
        answer = serve_one(forkpoint, empty)
        check(answer == "Hello! What shall I remember?", f"the server answered {answer!r}")
        print(f"it serves: {answer}")
        check_demo(run(forkpoint, "demo", "--max-tokens", "12", cwd=ROOT))


if __name__ == "__main__":
    main()
