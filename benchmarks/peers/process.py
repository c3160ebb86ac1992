"""Runs a peer in a process that is stopped while another peer is measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Answer, Job, PeerOptions, option_args, repository_root
from forkpoint.errors import ForkpointError


class PeerFailedError(ForkpointError):
    """Raised if a peer's process ended or could not start."""


class PeerProcess:
    """Starts `python -m module` and sends it jobs. Idle peers are stopped, so that their threads use no CPU."""

    def __init__(
        self, name: str, python: str, module: str, options: PeerOptions, log: Path, env: Mapping[str, str]
    ) -> None:
        self.name = name
        self._log = log
        path = [str(repository_root()), *filter(None, [env.get("PYTHONPATH", os.environ.get("PYTHONPATH"))])]
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [python, "-m", module, *option_args(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **env, "PYTHONPATH": os.pathsep.join(path)},
                start_new_session=True,
            )
        self.description = str(self._read()["peer"])
        self._freeze()

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, job: Job) -> Answer:
        """Run a job. Raises PeerFailedError, naming the log, if the process has ended."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        try:
            print(json.dumps(asdict(job)), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._failed() from None
        answer = Answer(**self._read())
        self._freeze()
        return answer

    def close(self) -> None:
        """End the process and its children."""
        if self._process.poll() is None:
            self._signal(signal.SIGCONT)
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
                self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failed()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failed(self) -> PeerFailedError:
        return PeerFailedError(f"the {self.name} peer ended; see its log, {self._log}")

    def _freeze(self) -> None:
        self._signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)
