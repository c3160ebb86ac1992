"""`forkpoint serve` as a process of its own, as people run it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx2

READY = re.compile(r"ready: \S+ on ((?:https?://|unix:)\S+)")
START_TIMEOUT_S = 300.0


@dataclass
class RunningServer:
    process: subprocess.Popen[bytes]
    log_path: Path
    model: str = ""
    url: str = ""

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def engine_pid(self) -> int:
        """The engine process: the child that was spawned; others are forked, or multiprocessing's own."""
        return next(pid for pid, command in self._commands.items() if "spawn_main" in command)

    @property
    def has_engine(self) -> bool:
        return any("spawn_main" in command for command in self._commands.values())

    @property
    def loader_pid(self) -> int:
        """The process that starts readers: forked from the server, so that it has the same command line."""
        return next(pid for pid, command in self._commands.items() if "\0serve\0" in command)

    @property
    def reader_pids(self) -> list[int]:
        return children(self.loader_pid)

    @property
    def _commands(self) -> dict[int, str]:
        return {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in children(self.process.pid)}

    def wait_ready(self) -> RunningServer:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            found = READY.search(self.log)
            if found is not None:
                self.url = found[1]
                return self
            assert self.process.poll() is None, self.log
            time.sleep(0.05)
        raise AssertionError(f"not ready in time:\n{self.log}")

    def client(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=240)

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 120) -> int:
        """Signal the server and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the server does not stop:\n{self.log}") from None


def to_read(seconds: float) -> httpx2.Timeout:
    """A time limit for the answer alone: on a slow machine, connecting may take longer."""
    return httpx2.Timeout(240, read=seconds)


def children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def start_server(model: Path | None, folder: Path, *flags: str, name: str = "server") -> RunningServer:
    """Start without waiting; the log goes to a file in `folder`. Without `model` none is named."""
    log_path = folder / f"{name}.log"
    named = [] if model is None else [str(model)]
    command = [sys.executable, "-m", "forkpoint.cli.main", "serve", *named, "--port", "0", *flags]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stderr=log, stdout=log, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True
        )
    return RunningServer(process, log_path, "".join(named))
