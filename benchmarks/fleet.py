"""Replays a synthetic workload on running replicas, and prints the simulator's prediction next to it.

python -m benchmarks.fleet agents:sessions=16 --url http://127.0.0.1:8000 --model demo_model --memory 0.0625
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import numpy.typing as npt

from forkpoint.cli.model_shape import read_shape
from forkpoint.config import SchedulerConfig
from forkpoint.sim.cases import Case, run_case
from forkpoint.sim.cost import H200
from forkpoint.sim.trace import Trace, TraceRequest
from forkpoint.sim.workload import make_workload

ROUTERS = ("prefix-aware", "round-robin")
FIRST_ID, VOCAB = 3, 250  # ids that every tokenizer here has
SPREAD = 2654435761  # consecutive invented ids become ids that look drawn


@dataclass(frozen=True, slots=True)
class Served:
    """The outcome of one request. Its time is that of the whole answer."""

    num_prompt_tokens: int
    num_cached_tokens: int
    seconds: float


class Replay:
    """Runs conversations in closed loops. Each turn repeats the answers so far and adds the new tokens of the trace."""

    def __init__(self, trace: Trace, url: str) -> None:
        self._trace = trace
        self._url = url
        self._followers: dict[str | None, list[TraceRequest]] = {}
        for request in trace.requests:
            self._followers.setdefault(request.after, []).append(request)

    async def run(self) -> list[Served]:
        served: list[Served] = []
        timeout = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as group:
            for first in self._followers[None]:
                group.create_task(self._converse(session, first, served))
        return served

    async def _converse(self, session: aiohttp.ClientSession, request: TraceRequest, served: list[Served]) -> None:
        await asyncio.sleep(request.arrival_s)
        history: list[int] = []  # as it was served; the trace has other outputs of the same lengths
        while True:
            history += ids(request.prompt.array()[len(history) :])
            answered, output = await self._ask(session, history, request)
            served.append(answered)
            history += output
            followers = self._followers.get(request.id, [])
            if not followers:
                return
            (request,) = followers
            await asyncio.sleep(request.think_s)

    async def _ask(
        self, session: aiohttp.ClientSession, prompt: list[int], request: TraceRequest
    ) -> tuple[Served, list[int]]:
        body = {
            "prompt": prompt,
            "max_tokens": request.output.num_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "return_token_ids": True,
            "cache_breakpoints": list(request.breakpoints),
        }
        start = time.perf_counter()
        async with session.post(f"{self._url}/v1/completions", json=body) as response:
            response.raise_for_status()
            answer = await response.json()
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Served(len(prompt), cached, time.perf_counter() - start), answer["choices"][0]["token_ids"]


def ids(invented: npt.NDArray[np.int32]) -> list[int]:
    found: list[int] = (FIRST_ID + (invented.astype(np.int64) * SPREAD >> 9) % (VOCAB - FIRST_ID)).tolist()
    return found


def hit_rate(served: Iterable[Served]) -> float:
    found = list(served)
    return sum(each.num_cached_tokens for each in found) / sum(each.num_prompt_tokens for each in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("workload", help="one whose turns extend each other, as agents:sessions=16")
    parser.add_argument("--url", help="default: simulate only")
    parser.add_argument("--model", default="demo_model")
    parser.add_argument("--memory", type=float, default=1 / 16, metavar="GIB", help="of each replica")
    parser.add_argument("--max-tokens", type=int, default=8000, help="of a request, its output included")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    args = parser.parse_args()
    trace = make_workload(args.workload).within(args.max_tokens)
    shape, scheduler = read_shape(Path(args.model)), SchedulerConfig(max_num_batched_tokens=args.max_num_batched_tokens)
    for router in ROUTERS:
        memory = int(args.memory * 2**30)
        case = Case(trace, shape, H200, "forkpoint", memory, scheduler, args.replicas, router)
        result = run_case(case)
        print(f"simulated, {router:<13} {result.hit_rate:7.1%}  of {result.prompt_tokens:,} tokens", flush=True)
    if args.url is not None:
        start = time.perf_counter()
        served = asyncio.run(Replay(trace, args.url).run())
        times = np.asarray([each.seconds for each in served])
        print(
            f"served {len(served)} requests in {time.perf_counter() - start:.0f} s: {hit_rate(served):.1%} hits, "
            f"an answer takes {np.median(times):.2f} s, 95th percentile {np.percentile(times, 95):.2f} s"
        )


if __name__ == "__main__":
    main()
