"""Measures what the server costs over the engine alone, with the same requests through both, in turns, in one run.

    python -m benchmarks.server_overhead

The engine alone runs in this process, through `LLM.generate`. The server runs as people run it, and as many clients
read streams at once as there are rows. CPU seconds per process show how much other programs delay the wall clock.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import msgspec

from benchmarks.machine import commit_hash, cpu_model, load_average, num_cpus, today
from benchmarks.random_model import make_random_model
from forkpoint.engine.llm import LLM
from forkpoint.params import SamplingParams

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Work:
    """The requests. Their prompts differ from the first character on, so that nothing is cached."""

    num_requests: int
    num_streams: int
    prompt_length: int
    num_tokens: int

    def prompts(self, turn: int) -> list[str]:
        return [f"{turn}/{i} ".ljust(self.prompt_length, "lorem ipsum "[i % 12]) for i in range(self.num_requests)]


@dataclass(frozen=True, slots=True)
class Turn:
    """One pass over the requests. `api_cpu_s` is None for the engine alone."""

    elapsed_s: float
    num_steps: int
    engine_cpu_s: float
    api_cpu_s: float | None = None


class ServerUnderTest:
    """A server process, its engine process, and the CPU time of both."""

    def __init__(self, model: str, options: list[str], folder: Path) -> None:
        log_path = folder / "server.log"
        command = [sys.executable, "-m", "forkpoint.cli.main", "serve", model, "--port", "0", *options]
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(command, stderr=log)
        self.url = self._wait_ready(log_path)
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        self._engine = max(map(int, children), key=cpu_seconds)

    def cpu_seconds(self) -> tuple[float, float]:
        """Return the CPU seconds (of the API process, of the engine process)."""
        return cpu_seconds(self._process.pid), cpu_seconds(self._engine)

    def num_steps(self) -> int:
        with urllib.request.urlopen(f"{self.url}/metrics") as reply:
            found = re.search(r"^forkpoint_steps_total{.*} (\S+)$", reply.read().decode(), re.MULTILINE)
        assert found is not None
        return int(float(found[1]))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)

    def _wait_ready(self, log_path: Path) -> str:
        while self._process.poll() is None:
            found = re.search(r"ready: \S+ on (http://\S+)", log_path.read_text())
            if found is not None:
                return found[1]
            time.sleep(0.05)
        raise SystemExit(log_path.read_text())


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def engine_turn(llm: LLM, work: Work, turn: int) -> Turn:
    params = SamplingParams(max_tokens=work.num_tokens, ignore_eos=True, temperature=0)
    steps = llm.get_metrics()["num_steps"]
    started, cpu = time.perf_counter(), time.process_time()
    outputs = llm.generate(work.prompts(turn), params, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == work.num_tokens for output in outputs)
    elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu
    return Turn(elapsed, llm.get_metrics()["num_steps"] - steps, cpu)


def server_turn(server: ServerUnderTest, work: Work, turn: int) -> Turn:
    before, steps = server.cpu_seconds(), server.num_steps()
    started = time.perf_counter()
    asyncio.run(_stream_all(server.url, work, turn))
    elapsed = time.perf_counter() - started
    api, engine = (now - then for now, then in zip(server.cpu_seconds(), before, strict=True))
    return Turn(elapsed, server.num_steps() - steps, engine, api)


async def _stream_all(url: str, work: Work, turn: int) -> None:
    waiting = iter(work.prompts(turn))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as session:
        await asyncio.gather(*(_stream_one_after_another(session, waiting, work) for _ in range(work.num_streams)))


async def _stream_one_after_another(session: aiohttp.ClientSession, waiting: Any, work: Work) -> None:
    for prompt in waiting:
        body = {"prompt": prompt, "max_tokens": work.num_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        last = b""
        async with session.post("/v1/completions", json=body) as reply:
            assert reply.status == 200, await reply.text()
            async for data in reply.content.iter_any():
                last = (last + data)[-2000:]
        *_, usage, done = last.strip().split(b"\n\n")
        assert done == b"data: [DONE]"
        told = msgspec.json.decode(usage.removeprefix(b"data: "))["usage"]["completion_tokens"]
        assert told == work.num_tokens


def table(work: Work, alone: list[Turn], served: list[Turn]) -> list[str]:
    """Return Markdown rows. The loss is the median over pairs of neighbouring turns."""
    tokens = work.num_requests * work.num_tokens

    def speed(turns: list[Turn]) -> float:
        return tokens / median(turn.elapsed_s for turn in turns)

    def fastest(turns: list[Turn]) -> float:
        return tokens / min(turn.elapsed_s for turn in turns)

    def cost(values: list[float]) -> float:
        return median(values) / tokens * 1e6

    losses = [1 - a.elapsed_s / s.elapsed_s for a, s in zip(alone, served, strict=True)]
    api = [turn.api_cpu_s for turn in served if turn.api_cpu_s is not None]
    return [
        "| | engine alone | server |",
        "|---|---|---|",
        f"| generated tokens/s, fastest turn of {len(alone)} | {fastest(alone):,.0f} | {fastest(served):,.0f} |",
        f"| generated tokens/s, median | {speed(alone):,.0f} | {speed(served):,.0f} |",
        f"| steps, median | {median([t.num_steps for t in alone]):.0f} | {median([t.num_steps for t in served]):.0f} |",
        f"| engine CPU per token, µs | {cost([t.engine_cpu_s for t in alone]):.0f} | "
        f"{cost([t.engine_cpu_s for t in served]):.0f} |",
        f"| API CPU per token, µs | | {cost(api):.0f} |",
        f"| throughput lost, median of pairs (all pairs) | | {median(losses):.1%} "
        f"({', '.join(f'{loss:.1%}' for loss in losses)}) |",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="a model folder (default: the demo model)")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt-length", type=int, default=128, help="characters")
    parser.add_argument("--tokens", type=int, default=128, help="per answer")
    parser.add_argument("--cpu-ops", default="auto")
    options = parser.parse_args()
    model = options.model or str(make_random_model())
    work = Work(options.requests, options.streams, options.prompt_length, options.tokens)
    engine: dict[str, Any] = {
        "max_model_len": 1024,
        "max_num_seqs": work.num_streams,
        "kv_cache_memory_bytes": 2**30,
        "cpu_ops": options.cpu_ops,
        "num_threads": 1,
    }
    flags = [word for name, value in engine.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with tempfile.TemporaryDirectory() as folder, LLM(model, **engine, log_level="warning") as llm:
        server = ServerUnderTest(model, flags, Path(folder))
        try:
            engine_turn(llm, work, -1), server_turn(server, work, -1)
            pairs = [(engine_turn(llm, work, turn), server_turn(server, work, turn)) for turn in range(options.turns)]
        finally:
            server.close()
    print(f"{today()}, commit {commit_hash()}, {cpu_model()}, {num_cpus()} CPUs, load {load_average():.1f}")
    print(
        f"{work.num_requests} requests, {work.num_streams} at once, prompts of {work.prompt_length} characters, "
        f"{work.num_tokens} tokens each, one engine thread"
    )
    print("\n".join(table(work, [alone for alone, _ in pairs], [served for _, served in pairs])))


if __name__ == "__main__":
    main()
