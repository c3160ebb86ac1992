"""The metrics under /metrics: vLLM's names and labels after a prefix, and forkpoint's own of states and checkpoints."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from forkpoint.engine.inputs import Prompt
from forkpoint.engine.outputs import RequestState
from forkpoint.errors import ForkpointError
from forkpoint.outputs import CacheReport
from forkpoint.server.errors import CLIENT_LEFT

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
SECONDS: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
TOKEN_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
REQUEST_SECONDS: Final = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
TOKENS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
STEP_TOKENS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
LABELS: Final = ("model_name", "engine")
ENGINE: Final = "0"
HTTP_LABELS: Final = ("handler", "method", "status")  # the labels of FastAPI's instrumentators
METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
# (name of the metric, help, key of the figure that `text` receives). For a figure that is a mapping, a label follows
# whose values are the mapping's keys.
GAUGES: Final = (
    ("num_requests_open", "Requests being answered.", "num_requests_open"),
    ("num_requests_running", "Completions in the batch.", "num_running"),
    ("num_requests_waiting", "Completions that wait for room.", "num_waiting"),
    ("kv_cache_usage_perc", "Share of the arena that requests hold, from 0 to 1.", "share_held"),
    ("arena_usage_perc", "Share of the arena in use, cached entries included.", "share_used"),
    ("state_slots_usage_perc", "Slots in use, as a share of an arena full of slots.", "share_slots"),
    ("state_slots_running", "Slots that requests read or write.", "num_slots_held"),
    ("state_slots_used", "Slots in use, checkpoints included.", "num_slots_used"),
    ("checkpoints", "Checkpoints kept.", "num_checkpoints"),
    ("cached_blocks", "Blocks of the prefix tree.", "num_cached_blocks"),
    ("host_tier_checkpoints", "Checkpoints kept in the host tier.", "num_host_checkpoints"),
    ("host_tier_blocks", "Blocks kept in the host tier.", "num_host_blocks"),
    ("disk_tier_checkpoints", "Checkpoints kept in the disk tier.", "num_disk_checkpoints"),
    ("disk_tier_blocks", "Blocks kept in the disk tier.", "num_disk_blocks"),
)
COUNTERS: Final = (
    ("log_lines_lost", "Log lines that could not be written.", "log_lines_lost"),
    ("num_preemptions", "Requests that were preempted and ran again.", "num_preemptions"),
    ("prefix_cache_queries", "Prompt tokens that were looked up.", "query_tokens"),
    ("prefix_cache_hits", "Prompt tokens that were reused.", "hit_tokens"),
    ("host_tier_hits", "Reused prompt tokens that were copied from the host tier.", "host_hit_tokens"),
    ("host_tier_stored_bytes", "Bytes of evicted entries that were copied to the host tier.", "host_stored_bytes"),
    ("host_tier_loaded_bytes", "Bytes that were copied back from the host tier.", "host_loaded_bytes"),
    ("host_tier_skipped", "Evicted entries that were worth too little for the host tier.", "host_skipped"),
    ("disk_tier_hits", "Reused prompt tokens that were read from the disk tier.", "disk_hit_tokens"),
    ("disk_tier_stored_bytes", "Bytes of evicted entries that went to the disk tier.", "disk_stored_bytes"),
    ("disk_tier_loaded_bytes", "Bytes that came back from the disk tier.", "disk_loaded_bytes"),
    ("disk_tier_skipped", "Evicted entries that the disk tier did not store.", "disk_skipped"),
    ("disk_tier_failed_reads", "Entries of the disk tier that were damaged or could not be read.", "disk_failed_reads"),
    ("disk_tier_failed_writes", "Entries that could not be written to the disk tier.", "disk_failed_writes"),
    ("peer_hits", "Reused prompt tokens that another engine computed.", "peer_hit_tokens"),
    ("peer_offered_bytes", "Bytes of computed prompts that were copied for other engines.", "peer_offered_bytes"),
    ("peer_fetched_bytes", "Bytes of prompts that were fetched from other engines.", "peer_fetched_bytes"),
    ("peer_failed_fetches", "Prompts of other engines that were computed here.", "peer_failed_fetches"),
    ("blocks_evicted", "Blocks that were evicted.", "blocks_evicted"),
    ("arena_moves", "Blocks and slots moved to make room.", "moves"),
    ("steps", "Forward passes.", "num_steps"),
    ("model_tokens", "Tokens that entered the model.", "num_model_tokens"),
    ("spec_decode_num_drafts", "Times that a row of a step had drafts.", "num_drafts"),
    ("spec_decode_num_draft_tokens", "Tokens that were drafted.", "num_draft_tokens"),
    ("spec_decode_num_accepted_tokens", "Drafts that were accepted.", "num_accepted_tokens"),
    ("images_encoded", "Images that the vision tower encoded.", "num_images_encoded"),
    ("image_tokens_encoded", "Tokens that the vision tower computed.", "num_image_tokens_encoded"),
    ("encoded_images_reused", "Times that an image's kept embeddings were used again.", "num_images_kept"),
    ("encoded_image_tokens_reused", "Tokens of images whose embeddings were kept.", "num_image_tokens_kept"),
    ("images_fetched", "Images fetched by URL.", "num_images_fetched"),
    ("image_fetch_bytes", "Bytes of images fetched by URL.", "image_fetch_bytes"),
    ("image_fetch_seconds", "Seconds that fetching them took, added up.", "image_fetch_seconds"),
)
LABELLED_COUNTERS: Final = (
    ("prefix_lost_tokens", "Reusable prompt tokens that were computed again.", "lost_tokens", "reason"),
    ("checkpoints_saved", "Checkpoints stored.", "checkpoints_saved", "origin"),
    ("checkpoint_hits", "Checkpoints that a request started from.", "checkpoint_hits", "origin"),
    ("checkpoints_evicted", "Checkpoints that were evicted.", "checkpoints_evicted", "origin"),
    ("checkpoints_skipped", "Checkpoints for which there was no room.", "checkpoints_skipped", "origin"),
    (
        "spec_decode_num_accepted_tokens_per_pos",
        "Accepted drafts by their place after the newest token.",
        "num_accepted_tokens_per_pos",
        "position",
    ),
)


class Metrics:
    """Collects all metrics. It is the engine's `engine.outputs.Observer`; `text` adds the engine's own figures."""

    def __init__(self, prefix: str, model_name: str) -> None:
        self._prefix = prefix
        self._labels = (model_name, ENGINE)
        self._registry = CollectorRegistry(auto_describe=False)
        self._http = Counter(
            "http_requests", "Answers, by route, method and status.", HTTP_LABELS, registry=self._registry
        )
        ProcessCollector(registry=self._registry)
        self._figures: Mapping[str, Any] = {}  # as `text` received them last
        self._config: Mapping[str, Any] = {}
        self._registry.register(self)
        self.num_prompt_tokens = 0  # since the start, for the log of the load
        self.num_output_tokens = 0
        counter, histogram = self._counter, self._histogram
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens, cached ones included.")
        self._prompt_tokens_cached = counter("prompt_tokens_cached", "Prompt tokens that were reused.")
        self._images = counter("images", "Images of prompts.")
        self._image_tokens = counter("image_tokens", "Tokens of images in prompts.")
        self._image_tokens_cached = counter("image_tokens_cached", "Tokens of images in prompts that were reused.")
        self._image_bytes = counter("image_bytes", "Bytes of images after they were resized.")
        self._image_seconds = counter("image_read_seconds", "Seconds of decoding and resizing.")
        self._output_tokens = counter("generation_tokens", "Generated tokens.")
        self._misses = counter("prefix_miss", "Completions by why their prompt was not reused further.", "reason")
        self._success = counter("request_success", "Completions that ended, by why.", "finished_reason")
        self._refused = counter("request_refused", "Requests that the engine refused, by why.", "reason")
        self._first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.", SECONDS)
        self._inter_token = CountedHistogram(
            prefix + "inter_token_latency_seconds", "Between tokens of one completion.", TOKEN_SECONDS, self._labels
        )
        self._registry.register(self._inter_token)
        self._per_token = histogram(
            "request_time_per_output_token_seconds", "Mean over a completion, first token apart.", TOKEN_SECONDS
        )
        self._whole = histogram("e2e_request_latency_seconds", "From arrival to the last token.", REQUEST_SECONDS)
        self._queue = histogram("request_queue_time_seconds", "From arrival to the first step.", REQUEST_SECONDS)
        self._prefill = histogram("request_prefill_time_seconds", "From first step to first token.", REQUEST_SECONDS)
        self._decode = histogram("request_decode_time_seconds", "From first to last token.", REQUEST_SECONDS)
        self._inference = histogram("request_inference_time_seconds", "From first step to last token.", REQUEST_SECONDS)
        self._prompt_length = histogram("request_prompt_tokens", "Prompt tokens per request.", TOKENS)
        self._output_length = histogram("request_generation_tokens", "Tokens per completion.", TOKENS)
        self._longest_output = histogram("request_max_num_generation_tokens", "Longest output per request.", TOKENS)
        self._step_tokens = histogram("iteration_tokens_total", "Tokens per step.", STEP_TOKENS)

    def step(self, num_tokens: int) -> None:
        if num_tokens:
            self._step_tokens.observe(num_tokens)

    def first_token(self, prompt: Prompt, cache: CacheReport, elapsed_s: float) -> None:
        """Count a completion's first token, which came `elapsed_s` after its request, and its prompt."""
        num_prompt_tokens = len(prompt.token_ids)
        self.num_prompt_tokens += num_prompt_tokens
        self.num_output_tokens += 1
        self._first_token.observe(elapsed_s)
        self._prompt_tokens.inc(num_prompt_tokens)
        self._prompt_tokens_cached.inc(cache.num_cached_tokens)
        if prompt.images:
            self._image_tokens.inc(prompt.num_image_tokens)
            self._image_tokens_cached.inc(prompt.num_image_tokens_before(cache.num_cached_tokens))
        self._output_tokens.inc()
        if cache.miss is not None:
            self._misses.labels(*self._labels, cache.miss.value).inc()

    def images_read(self, prompt: Prompt) -> None:
        """Count the images of a prompt that a reader has read."""
        self._images.inc(len(prompt.images))
        self._image_bytes.inc(sum(image.pixels.nbytes for image in prompt.images))
        self._image_seconds.inc(prompt.images_s)

    def next_tokens(self, elapsed_s: Sequence[float]) -> None:
        """Count a step's tokens, one for each completion. `elapsed_s`: seconds since that completion's last token."""
        self.num_output_tokens += len(elapsed_s)
        self._output_tokens.inc(len(elapsed_s))
        for value, count in Counts(elapsed_s).items():  # completions that are in every step share one value
            self._inter_token.add(value, count)

    def finished(self, state: RequestState) -> None:
        """Count a request all of whose completions have ended."""
        self._prompt_length.observe(len(state.prompt.token_ids))
        for completion in state.completions:
            self._output_length.observe(completion.num_tokens)
            if completion.finish_reason is not None:
                self._success.labels(*self._labels, completion.finish_reason.value).inc()
        longest = max(completion.num_tokens for completion in state.completions)
        self._longest_output.observe(longest)
        times = state.metrics
        if times.finished_s is None:
            return
        self._whole.observe(times.finished_s - times.arrival_s)
        if times.first_scheduled_s is None or times.first_token_s is None:
            return
        self._queue.observe(times.first_scheduled_s - times.arrival_s)
        self._prefill.observe(times.first_token_s - times.first_scheduled_s)
        self._decode.observe(times.finished_s - times.first_token_s)
        self._inference.observe(times.finished_s - times.first_scheduled_s)
        if longest > 1:
            self._per_token.observe((times.finished_s - times.first_token_s) / (longest - 1))

    def refused(self, error: ForkpointError) -> None:
        self._refused.labels(*self._labels, type(error).__name__).inc()

    def http_answer(self, handler: str, method: str, status: int) -> None:
        """Count an answer of the route declared as `handler`. Status 0: the client left before an answer began."""
        self._http.labels(handler, method if method in METHODS else "other", str(status or CLIENT_LEFT)).inc()

    def text(self, own: Mapping[str, float], stats: Mapping[str, Any], config: Mapping[str, Any]) -> bytes:
        """Return all metrics in Prometheus' text format.

        `own`: figures of the API process, such as `num_requests_open`. `stats`: counters and gauges of the engine,
        empty while it is not ready. `config`: options and sizes of the engine.
        """
        self._figures, self._config = {**own, **_with_shares(stats)}, config
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *others: str) -> Counter:
        """Return a counter with this model's labels, or a family of counters with `others` that are still to be set."""
        family = Counter(self._prefix + name, text, (*LABELS, *others), registry=self._registry)
        return family if others else family.labels(*self._labels)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(self._prefix + name, text, LABELS, registry=self._registry, buckets=buckets).labels(
            *self._labels
        )

    def collect(self) -> Iterable[Metric]:
        """Yield the figures that `text` received, as gauges and counters. Called by the registry."""
        labels, figures = self._labels, self._figures
        if self._config:
            names = (*LABELS, *self._config)
            info = GaugeMetricFamily(self._prefix + "cache_config_info", "Options of the engine.", labels=names)
            info.add_metric((*labels, *map(str, self._config.values())), 1)
            yield info
        for kind, table in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, text, key in table:
                if key in figures:
                    family = kind(self._prefix + name, text, labels=LABELS)
                    family.add_metric(labels, figures[key])
                    yield family
        for name, text, key, label in LABELLED_COUNTERS:
            if key in figures:
                family = CounterMetricFamily(self._prefix + name, text, labels=(*LABELS, label))
                for value, count in figures[key].items():
                    family.add_metric((*labels, value), count)
                yield family


class CountedHistogram:
    """A histogram that can observe the same value several times at once, unlike prometheus_client's."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str]) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._bounds = (*bounds, math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def add(self, value: float, count: int) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=LABELS)
        totals = accumulate(self._counts)
        names = [*map(str, map(float, self._bounds[:-1])), "+Inf"]
        family.add_metric(self._labels, list(zip(names, totals, strict=True)), self._sum)
        yield family


def _with_shares(stats: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the engine's stats with the shares of its arena that are in use (0 to 1); empty stats stay so."""
    if not stats:
        return stats
    pages = max(1, stats["num_pages"] - 1)
    slots = pages * stats["slots_per_page"]
    shares = {
        "share_held": stats["num_pages_held"] / pages,
        "share_used": 1 - stats["num_free_pages"] / pages,
        "share_slots": stats["num_slots_used"] / max(1, slots),
    }
    return {**stats, **shares}
