"""Runs `bench serve`, from options to the printed result."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from tqdm import tqdm

from forkpoint.bench.datasets import sharegpt_requests, synthetic, trace_requests
from forkpoint.bench.load import STYLES, Load, Outcome
from forkpoint.bench.metrics import figures
from forkpoint.bench.options import DatasetOptions, LoadOptions, ReportOptions, TargetOptions
from forkpoint.bench.report import about_run, details, lines, require_folder, result_path, write_result
from forkpoint.bench.request import BenchRequest, checked
from forkpoint.bench.vocabulary import Vocabulary
from forkpoint.client.server import ServedModel, Server
from forkpoint.engine.hub import HUB_ID, model_folder
from forkpoint.engine.tokenizer import Tokenizer
from forkpoint.errors import ConfigError, ServerUnreachableError

WARMUP_SEED = 2**31  # added to the seed, so that warm-up prompts differ from measured ones
READY_POLL_S = 0.5  # seconds between checks
LONG_TRACE_S = 60.0  # a trace that takes longer prints a hint


GROUPS: Final[Mapping[str, type[Any]]] = MappingProxyType(
    {"server": TargetOptions, "load": LoadOptions, "dataset": DatasetOptions, "report": ReportOptions}
)


@dataclass(frozen=True, slots=True)
class ServeBench:
    """The options of one run of `bench serve`."""

    server: TargetOptions
    load: LoadOptions
    dataset: DatasetOptions
    report: ReportOptions

    def run(self) -> int:
        """Send the load, print the figures and write the result. Return 1 if a request failed, otherwise 0.

        Raises ServerError or ConfigError before anything is measured, and ConfigError if the result cannot be written.
        """
        return asyncio.run(self._run())

    async def _run(self) -> int:
        target, load = self.server, self.load
        if self.dataset.dataset_name == "random-mm" and target.backend != "openai-chat":
            raise ConfigError("dataset_name=random-mm needs backend=openai-chat, since completions take no images")
        if self.report.folder is not None:
            require_folder(self.report.folder, self.report.result_filename)
        async with Server(target.url, api_key=target.api_key, headers=target.headers) as server:
            await self._wait_until_ready(server)
            model = await server.model(target.model)
            folder = _tokenizer_folder(target.tokenizer, model)
            vocabulary = Vocabulary(Tokenizer.load(folder))
            body = {"model": model.id, **load.sampling_body()}
            style = STYLES[target.backend](vocabulary)
            requests = self._requests(vocabulary, load.num_prompts, load.seed, model.max_model_len)
            await self._warm_up(Load(server, target.path, style, body), vocabulary)
            with tqdm(total=len(requests), unit="req", disable=load.disable_tqdm or not sys.stderr.isatty()) as bar:
                most, start = load.max_concurrency, time.perf_counter()
                run = Load(server, target.path, style, body, max_concurrency=most, on_end=lambda _: bar.update())
                outcomes = await run.run(requests, self._arrivals(requests))
                duration = time.perf_counter() - start
        self._report(outcomes, duration, model.id, folder)
        return int(any(outcome.error is not None for outcome in outcomes))

    def _report(self, outcomes: Sequence[Outcome], duration_s: float, model: str, tokenizer: str) -> None:
        report = self.report
        metrics, percentiles = report.metrics, report.percentiles
        found = figures(outcomes, duration_s, metrics=metrics, percentiles=percentiles, limits_ms=report.limits_ms)
        print("\n".join(lines(found, self.load, report)))
        errors = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
        for error, count in errors.most_common(5):
            print(f"error: {count} of {len(outcomes)} requests: {error}", file=sys.stderr)
        if report.folder is not None:
            about = about_run(model, tokenizer, self.server, self.load, report, datetime.now())
            about["dataset_name"] = self.dataset.dataset_name
            path = result_path(report.folder, about, report)
            extra = details(outcomes) if report.save_detailed else {}
            write_result({**about, **found, **extra}, path, append=report.append_result)
            print(f"result written to {path}", file=sys.stderr)

    async def _wait_until_ready(self, server: Server) -> None:
        if not self.server.ready_check_timeout_sec:
            return
        deadline = time.perf_counter() + self.server.ready_check_timeout_sec
        while not await server.is_healthy():
            if time.perf_counter() > deadline:
                raise ServerUnreachableError(
                    f"{server.url} was not healthy within {self.server.ready_check_timeout_sec:g} s"
                )
            await asyncio.sleep(READY_POLL_S)

    async def _warm_up(self, load: Load, vocabulary: Vocabulary) -> None:
        """Send `num_warmups` requests; synthetic ones differ from the measured. Raises ConfigError if one fails."""
        if self.load.num_warmups:
            requests = self._requests(vocabulary, self.load.num_warmups, self.load.seed + WARMUP_SEED, None)
            outcomes = await load.run(requests, [0.0] * len(requests))
            failed = next((outcome.error for outcome in outcomes if outcome.error is not None), None)
            if failed is not None:
                raise ConfigError(f"a warm-up request failed, so nothing was measured: {failed}")

    def _requests(self, vocabulary: Vocabulary, count: int, seed: int, max_model_len: int | None) -> list[BenchRequest]:
        dataset = self.dataset
        make = {"sharegpt": sharegpt_requests, "trace": trace_requests}.get(dataset.dataset_name, synthetic)
        found = make(dataset, vocabulary, count, seed)
        fitting = found
        if make is trace_requests:
            fitting = without_too_long(found, max_model_len)
        if len(fitting) < len(found):
            print(f"left out {len(found) - len(fitting)} requests longer than {max_model_len} tokens", file=sys.stderr)
        return checked(fitting)

    def _arrivals(self, requests: Sequence[BenchRequest]) -> list[float]:
        """Return each request's arrival in seconds: the dataset's, or drawn if a rate is given or it has none.

        Requests that follow another one get 0.0 if drawn. Prints a hint for long traces.
        """
        first = [request for request in requests if request.after is None]
        if math.isinf(self.load.request_rate) and any(request.arrival_s is not None for request in first):
            times = [request.arrival_s or 0.0 for request in requests]
            if max(times) > LONG_TRACE_S:
                hint = "--trace-speed or --request-rate shorten that"
                print(f"the arrivals of the trace take {max(times):,.0f} s; {hint}", file=sys.stderr)
            return times
        rng = np.random.default_rng(self.load.seed)
        drawn = iter(arrival_times(len(first), self.load.request_rate, self.load.burstiness, rng))
        return [next(drawn) if request.after is None else 0.0 for request in requests]


def without_too_long(requests: Sequence[BenchRequest], max_model_len: int | None) -> list[BenchRequest]:
    """Return the requests that fit `max_model_len` tokens (None: all).

    A request that followed a removed one then follows that one's predecessor.
    """
    if max_model_len is None:
        return list(requests)
    kept: list[BenchRequest] = []
    places: list[int | None] = []
    for request in requests:
        after = None if request.after is None else places[request.after]
        if request.num_content_tokens + request.num_output_tokens > max_model_len:
            places.append(after)
            continue
        places.append(len(kept))
        kept.append(replace(request, after=after))
    return kept


def _tokenizer_folder(given: str | None, model: ServedModel) -> str:
    name = given or model.root or ""
    if given is None and not Path(name).is_dir() and not HUB_ID.fullmatch(name):
        raise ConfigError(
            f"the server's model {model.id!r} is not a folder on this machine; give --tokenizer (a folder or a hub id) "
            "to create prompts with"
        )
    return model_folder(name, weights=False)


def arrival_times(count: int, rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """Return `count` arrivals in seconds after the start, sorted; all 0 for an infinite `rate` (requests a second).

    Gaps are gamma-distributed with shape `burstiness` (1: a Poisson process). They are scaled so that the last request
    comes at `count / rate`, which gives every seed the same load.
    """
    if math.isinf(rate):
        return [0.0] * count
    times = np.cumsum(rng.gamma(burstiness, 1.0 / (rate * burstiness), count))
    times[-1] = times[-1] or 1.0  # if all gaps underflow to 0, only the last arrival is left
    return [float(time) for time in times / times[-1] * (count / rate)]
