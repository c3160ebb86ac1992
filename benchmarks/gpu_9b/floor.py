"""The least time that a step can take: its matrix products as the vendor's library runs them, and its memory
traffic."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_9b.shape import attention_flops_per_pair, kv_bytes_per_token, matrices, state_bytes
from benchmarks.model131m import HybridShape


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """The work of one step, in any engine.

    `num_tokens` enter the model, `num_rows` get logits, `num_states` states are read and written, `num_keys` cached
    tokens are read, and `num_pairs` query-key pairs are scored.
    """

    num_tokens: int
    num_rows: int
    num_states: int
    num_keys: float
    num_pairs: float = 0.0


def decode_work(batch: int, context: float) -> StepWork:
    """Return the work of a step in which `batch` rows of `context` tokens decode one token each."""
    return StepWork(num_tokens=batch, num_rows=batch, num_states=batch, num_keys=batch * context)


def prefill_work(start: int, end: int, samples: bool = True) -> StepWork:
    """Return the work of a step that computes tokens `[start, end)` of one row."""
    pairs = (end * (end + 1) - start * (start + 1)) / 2
    return StepWork(num_tokens=end - start, num_rows=int(samples), num_states=1, num_keys=end, num_pairs=pairs)


@dataclass(slots=True)
class Floor:
    """Times of this device, measured once: products by number of tokens, copy rate and matrix rate.

    `copy_rate` counts bytes read and written per second. `matrix_rate` counts operations per second.
    """

    shape: HybridShape
    copy_rate: float
    matrix_rate: float
    products_s: dict[int, float] = field(default_factory=dict)  # tokens -> seconds, the output head apart
    head_s: dict[int, float] = field(default_factory=dict)  # rows -> seconds

    def step_s(self, work: StepWork) -> float:
        """Return the time of the products, of the larger of attention's operations and traffic, and of the states'
        traffic."""
        keys_s = work.num_keys * kv_bytes_per_token(self.shape) / self.copy_rate
        pairs_s = work.num_pairs * attention_flops_per_pair(self.shape) / self.matrix_rate
        states_s = 2 * work.num_states * state_bytes(self.shape) / self.copy_rate
        products = self.products_s[work.num_tokens] + (self.head_s[work.num_rows] if work.num_rows else 0.0)
        return products + max(keys_s, pairs_s) + states_s

    def per_token_s(self, num_tokens: int) -> float:
        """Return the seconds of products per token in steps of `num_tokens`."""
        return self.products_s[num_tokens] / num_tokens


def measure_floor(shape: HybridShape, device: torch.device, num_tokens: set[int], num_rows: set[int]) -> Floor:
    """Time the products of steps with each size in `num_tokens` and `num_rows`, and measure the two rates.

    This needs the model's memory once more, so run it while no model is loaded.
    """
    floor = Floor(shape, *measure_rates(device))
    layers, head = matrices(shape), (shape.vocab_size, shape.hidden_size)
    floor.products_s.update(time_products(layers, sorted(num_tokens), device))
    floor.head_s.update(time_products([head], sorted(num_rows), device))
    if device.type != "cpu":
        torch.cuda.empty_cache()
    return floor


def time_products(sizes: list[tuple[int, int]], counts: list[int], device: torch.device) -> dict[int, float]:
    """Return the seconds of one product with each of the matrices (rows, columns), by number of input rows.

    Each matrix has its own memory, so that none stays in the cache.
    """
    weights = [torch.empty(size, dtype=torch.bfloat16, device=device).normal_(0, 0.02) for size in sizes]
    found = {}
    for count in counts:
        inputs = {width: torch.randn(count, width, device=device).bfloat16() for _, width in sizes}

        def products(inputs: dict[int, Tensor] = inputs) -> None:
            for weight in weights:
                F.linear(inputs[weight.shape[1]], weight)

        found[count] = median_s(products, device)
    return found


def measure_rates(device: torch.device) -> tuple[float, float]:
    """Return (bytes that a copy reads and writes per second, bf16 operations per second of a square product)."""
    on_gpu = device.type != "cpu"
    source = torch.randn(1 << (30 if on_gpu else 22), device=device)
    target = torch.empty_like(source)
    side = 8192 if on_gpu else 256
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    # Copies are not timed in a graph, where the slower copy engines run them.
    copied = median_s(lambda: target.copy_(source), device, in_graph=False, repeats=20)
    multiplied = median_s(lambda: a @ b, device, repeats=20)
    return 2 * source.nbytes / copied, 2 * side**3 / multiplied


def median_s(call: Callable[[], object], device: torch.device, *, in_graph: bool = True, repeats: int = 7) -> float:
    """Return the median seconds of a call; on a GPU by device events, with the launches in a CUDA graph."""
    for _ in range(2):
        call()
    if device.type == "cpu":
        return statistics.median([_wall_s(call) for _ in range(repeats)])
    torch.cuda.synchronize()
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        call = graph.replay
        call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) / 1e3)
    return statistics.median(times)


def _wall_s(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
