"""Times a prefill/decode pair on two GPUs of one host: `python -m benchmarks.gpu_pair`.

Two engines of the 9B shape with dummy weights run in processes of their own, one on each GPU. The time to the first
token of a long prompt is measured on the first engine's GPU alone and through the pair: one engine after the other,
over shared memory and over TCP, and both asked at once. Each prompt comes after a pause. Without one, a GPU at its
power limit would slow down from prompt to prompt. Then streams decode on the second GPU: alone, while prompts arrive
that the first engine computed before, while prompts arrive that it computes meanwhile, and while prompts are computed
next to the streams.

With one GPU, both engines run there, and no streams run while the first engine computes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import machine
from benchmarks.gpu_9b.options import engine_options
from benchmarks.gpu_9b.shape import SHAPE_9B, write_config
from benchmarks.gpu_tiers import CheckFailedError, Ids
from benchmarks.model131m import HybridShape
from forkpoint.cache.peer_offers import LEAST_ASKED_LEASE
from forkpoint.engine.core import leave_collection_to_steps
from forkpoint.engine.engine import Engine
from forkpoint.engine.llm import LLM
from forkpoint.outputs import RequestOutput
from forkpoint.params import SamplingParams
from forkpoint.runtime.runner import ModelRunner

GIB = 1 << 30
PREFILL, DECODE = "kv_producer", "kv_consumer"
ASKS = {"do_remote_decode": True}
START_S = 240.0  # for an engine to start and to compile
ANSWER_S = 120.0  # for an answer of an engine
HELD_BYTES = 8e9  # prompts that one engine holds for the other one, all arrivals at once
MAY_TAKE_MS, MAY_SLOW = 15.0, 1.1  # asked: more time to the first token, and p99 of the streams against alone


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSizes:
    """Lengths in tokens, and counts."""

    prompt: int = 16_384
    repeats: int = 7
    pause_s: float = 1.0  # before each prompt whose first token is timed
    stream_prompt: int = 256  # the first stream's; others have a token less each, so that blocks do not end together
    num_streams: int = 64
    num_arrivals: int = 12  # of prompts next to the streams
    every_s: float = 0.8  # from one arrival to the next
    arena_gib: float = 14.0
    max_num_seqs: int = 72


@dataclass(frozen=True, slots=True)
class Timed:
    """An answer: when it was asked for and when its first token came, by the host's clock."""

    start_s: float
    first_token_s: float
    num_peer_tokens: int
    offer: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Pauses:
    """The time between two tokens of streams, in seconds, and what arrived meanwhile."""

    p50: float
    p99: float
    longest: float
    num_peer_tokens: int
    first_tokens: tuple[float, ...]  # seconds from arriving here to the first token


# --- in the process of an engine


class PairEngine:
    """Answers the calls that come over a connection, one at a time."""

    def __init__(self, llm: LLM, connection: Connection) -> None:
        self._engine: Engine = llm._engine
        self._connection = connection
        self._llm = llm
        self._streams = dict[str, float]()  # name -> when its last token came
        self._arrived = dict[str, float]()  # name -> when it arrived

    def serve(self) -> None:
        while (call := self._connection.recv()) is not None:
            name, *given = call
            try:
                self._connection.send(getattr(self, name)(*given))
            except Exception as error:
                self._connection.send(error)
                raise

    def share_memory(self, shares: bool) -> None:
        """Fetch prompts from the other engine's memory if it is on this machine, or always over TCP."""
        runner = self._engine.core._runner
        assert isinstance(runner, ModelRunner) and runner.arena.peers is not None
        runner.arena.peers.fetching.shares_memory = shares

    def ask(self, prompt: Ids, params: Mapping[str, Any] | None) -> Timed:
        """Compute the first token of a prompt."""
        wanted = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, kv_transfer_params=params)
        start = time.perf_counter()
        [output] = self._llm.generate([prompt], wanted, use_tqdm=False)
        _check(output)
        first = output.metrics.first_token_s or 0.0
        return Timed(start, first, output.cache.num_peer_tokens, output.kv_transfer_params)

    def start_streams(self, prompts: list[Ids], max_tokens: int) -> None:
        wanted = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        for prompt in prompts:
            self._streams[self._add(prompt, wanted)] = 0.0
        while not all(self._streams.values()):
            self._advance([])

    def measure(self) -> Pauses:
        """Run the streams until the connection says "stop". It may bring prompts to answer meanwhile."""
        pauses, firsts, num_peer_tokens, is_open = list[float](), list[float](), 0, True
        while is_open or self._arrived:
            while self._connection.poll():
                message = self._connection.recv()
                if message == "stop":
                    is_open = False
                    break
                wanted = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, kv_transfer_params=message[1])
                now = time.perf_counter()
                self._arrived[self._add(message[0], wanted)] = now
            for output in self._advance(pauses):
                firsts.append((output.metrics.first_token_s or 0.0) - self._arrived.pop(output.request_id))
                num_peer_tokens += output.cache.num_peer_tokens
        p50, p99, longest = np.percentile(pauses, [50, 99, 100]).tolist()
        return Pauses(p50, p99, longest, num_peer_tokens, tuple(firsts))

    def stop_streams(self) -> None:
        for name in self._streams:
            self._engine.abort(name)
        while self._engine.has_unfinished():
            self._engine.advance()
        self._streams.clear()

    def _add(self, prompt: Ids, params: SamplingParams) -> str:
        return self._engine.add_request(self._engine.inputs.prompt(prompt, params=params), params)

    def _advance(self, pauses: list[float]) -> list[RequestOutput]:
        """Run a step, note the streams' pauses, and return the answers that have ended."""
        changed, ended = self._engine.advance(), list[RequestOutput]()
        now = time.perf_counter()
        for state in changed:
            name = state.request_id
            if name in self._streams:
                if state.finished:
                    raise CheckFailedError("a stream ended before the measurement")
                if self._streams[name]:
                    pauses.append(now - self._streams[name])
                self._streams[name] = now
            elif state.finished:
                ended.append(state.output())
                _check(ended[-1])
        return ended


def _check(output: RequestOutput) -> None:
    error = output.outputs[0].error
    if error is not None:
        raise CheckFailedError(f"a request failed: {error}")


def run_engine(folder: Path, role: str, options: dict[str, Any], connection: Connection) -> None:
    """Run in a process of its own until the connection says None."""
    link = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_size": HELD_BYTES}
    with LLM(str(folder), kv_transfer_config=link, **options) as llm:
        leave_collection_to_steps()  # as in a server
        connection.send("ready")
        PairEngine(llm, connection).serve()


# --- in the process that measures


class RemoteEngine:
    """An engine in another process."""

    def __init__(self, folder: Path, role: str, options: dict[str, Any], device_number: str) -> None:
        self._connection, there = multiprocessing.Pipe()
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = device_number
        arguments = (folder, role, options, there)
        self._process = multiprocessing.get_context("spawn").Process(target=run_engine, args=arguments, daemon=True)
        self._process.start()
        there.close()
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before

    def receive(self, timeout_s: float = ANSWER_S) -> Any:
        if not self._connection.poll(timeout_s):
            raise CheckFailedError(f"an engine did not answer in {timeout_s:g} s")
        try:
            answer = self._connection.recv()
        except EOFError:
            raise CheckFailedError("the process of an engine has ended; its last lines say why") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def send(self, *call: Any) -> None:
        self._connection.send(call[0] if len(call) == 1 and call[0] in ("stop", None) else call)

    def call(self, *call: Any) -> Any:
        self.send(*call)
        return self.receive()

    def ask(self, prompt: Ids, params: Mapping[str, Any] | None = None) -> Timed:
        found: Timed = self.call("ask", prompt, params)
        return found

    def close(self) -> None:
        self.send(None)
        self._process.join(30)
        self._process.kill()


@contextmanager
def engines(folder: Path, sizes: PairSizes, device: str) -> Iterator[tuple[RemoteEngine, RemoteEngine]]:
    """Start both engines at the same time, and wait for them."""
    options = engine_options(device, enforce_eager=device == "cpu") | {
        "kv_cache_memory_bytes": int(sizes.arena_gib * GIB),
        "max_num_seqs": sizes.max_num_seqs,
    }
    numbers = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    numbers += numbers[:1] * 2
    first, second = (
        RemoteEngine(folder, role, options, number) for role, number in zip((PREFILL, DECODE), numbers, strict=False)
    )
    try:
        for each in (first, second):
            each.receive(START_S)
        yield first, second
    finally:
        first.close()
        second.close()


def compare_first_tokens(
    first: RemoteEngine, second: RemoteEngine, sizes: PairSizes, rng: np.random.Generator, vocab_size: int
) -> dict[str, list[float]]:
    """Return times to the first token, in ms: on the first GPU alone, its part of the pair's time, and the pair's.

    `pair` and `tcp` ask one engine after the other, `early` asks both at once.
    """
    found: dict[str, list[float]] = {"one": [], "prefill": [], "pair": [], "tcp": [], "early": []}
    for number in range(sizes.repeats + 1):
        time.sleep(sizes.pause_s)
        one = first.ask(_ids(rng, sizes.prompt, vocab_size))
        times, place = {"one": one.first_token_s - one.start_s}, dict[str, Any]()
        for name in ("pair", "tcp", "early"):
            prompt = _ids(rng, sizes.prompt, vocab_size)
            second.call("share_memory", name != "tcp")
            time.sleep(sizes.pause_s)
            if name == "early":
                lease = {"lease": LEAST_ASKED_LEASE + number}
                first.send("ask", prompt, {**ASKS, "forkpoint": lease})
                second.send("ask", prompt, {**place, "forkpoint": {**place["forkpoint"], **lease, "early": True}})
                computed, continued = first.receive(), second.receive()
            else:
                computed = first.ask(prompt, ASKS)
                continued = second.ask(prompt, computed.offer)
            if continued.num_peer_tokens < sizes.prompt - 64:
                raise CheckFailedError(f"{name}: only {continued.num_peer_tokens} tokens came from the other engine")
            place = dict(computed.offer or {})
            times[name] = continued.first_token_s - computed.start_s
            if name == "pair":
                times["prefill"] = computed.first_token_s - computed.start_s
        if number:  # the first time compiles and pins
            for name, seconds in times.items():
                found[name].append(seconds * 1e3)
    return found


def compare_pauses(
    first: RemoteEngine, second: RemoteEngine, sizes: PairSizes, rng: np.random.Generator, vocab_size: int
) -> dict[str, Pauses]:
    """Return the streams' pauses alone, next to prompts of the other engine, and next to prompts computed here."""
    lengths = range(sizes.stream_prompt, sizes.stream_prompt - sizes.num_streams, -1)
    streams = [_ids(rng, length, vocab_size) for length in lengths]
    held = [_ids(rng, sizes.prompt, vocab_size) for _ in range(sizes.num_arrivals)]
    offers = [first.ask(prompt, ASKS).offer for prompt in held]
    found: dict[str, Pauses] = {}
    for name in ("alone", "fetched", *(("pair", "one") if torch.cuda.device_count() != 1 else ())):
        second.call("start_streams", streams, 1 << 14)  # new ones, so that each phase has the same lengths
        second.send("measure")
        for number in range(sizes.num_arrivals):
            start = time.perf_counter()
            prompt = _ids(rng, sizes.prompt, vocab_size)
            if name == "fetched":
                second.send(held[number], offers[number])
            elif name == "pair":
                second.send(prompt, first.ask(prompt, ASKS).offer)
            elif name == "one":
                second.send(prompt, None)
            time.sleep(max(0.0, start + sizes.every_s - time.perf_counter()))
        second.send("stop")
        found[name] = second.receive()
        second.call("stop_streams")
    return found


def _ids(rng: np.random.Generator, count: int, vocab_size: int) -> Ids:
    found: Ids = rng.integers(1, vocab_size, count).tolist()
    return found


def run_pair(folder: Path, shape: HybridShape, sizes: PairSizes, device: str) -> dict[str, Any]:
    """Return all measurements as they are printed in JSON."""
    rng, start = np.random.default_rng(0), time.perf_counter()
    with engines(write_config(folder, shape), sizes, device) as (first, second):
        started_s = time.perf_counter() - start
        firsts = compare_first_tokens(first, second, sizes, rng, shape.vocab_size)
        medians = {name: float(np.median(each)) for name, each in firsts.items()}
        print(
            f"| first token, {sizes.prompt} tokens, one GPU | | {medians['one']:.1f} ms |\n"
            f"| first token on the first GPU of the pair | | {medians['prefill']:.1f} ms |",
            flush=True,
        )
        titles = {"pair": "one after the other", "tcp": "the same over TCP", "early": "both at once"}
        for name, title in titles.items():
            print(
                f"| first token through the pair, {title} | one GPU + {MAY_TAKE_MS:g} ms | {medians[name]:.1f} ms "
                f"({medians[name] - medians['one']:+.1f}; {min(firsts[name]):.1f} to {max(firsts[name]):.1f}) |",
                flush=True,
            )
        pauses = compare_pauses(first, second, sizes, rng, shape.vocab_size)
    alone = pauses["alone"].p99
    for name, each in pauses.items():
        asked = f"{MAY_SLOW:g} x alone" if name in ("fetched", "pair") else ""
        print(
            f"| p99 between tokens of {sizes.num_streams} streams, {name} | {asked} | {each.p99 * 1e3:.2f} ms "
            f"({each.p99 / alone:.3f} x; p50 {each.p50 * 1e3:.2f}, longest {each.longest * 1e3:.1f}) |",
            flush=True,
        )
    return {
        "started_s": started_s,
        "first_token_ms": firsts,
        "median_first_token_ms": medians,
        "pauses_s": {name: asdict(each) for name, each in pauses.items()},
        "sizes": asdict(sizes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_pair", description=(__doc__ or "").strip())
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=PairSizes().repeats, help="of each time to first token")
    parser.add_argument("--arrivals", type=int, default=PairSizes().num_arrivals, help="of prompts next to streams")
    args = parser.parse_args()
    start, card = time.perf_counter(), "no GPU"
    if torch.cuda.is_available():
        card = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    print(
        f"# {card}, {machine.commit_hash()}, {machine.today()}\n| what | asked | measured |\n|---|---|---|", flush=True
    )
    sizes = PairSizes(repeats=args.repeats, num_arrivals=args.arrivals)
    with tempfile.TemporaryDirectory() as folder:
        found = run_pair(Path(folder) / "9b", SHAPE_9B, sizes, args.device)
    print(json.dumps({**found, "total_s": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
