"""Exchanges of ranks that wait for each other, as streams of one GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

if torch.cuda.is_available():
    from forkpoint.ops.exchange import kernel as few
    from forkpoint.ops.exchange import rows_kernel as many
    from forkpoint.ops.exchange.rank_exchange import RankExchange, inbox_words
    from forkpoint.ops.norm.kernel import rmsnorm

DEVICE = torch.device("cuda", 0)
NUM_SUMS, REPLAYS = 15, 20
HEAD = 512  # dims of a head whose parts are merged


@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (128, 4096), (500, 2048)])
def test_graphs_of_two_ranks(rows: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "PROGRAMS", 100)  # so that the GPU has room for both ranks
    inboxes = [torch.zeros(inbox_words(2), dtype=torch.int64, device=DEVICE) for _ in range(2)]
    ranks = [RankExchange(rank, [inbox.data_ptr() for inbox in inboxes], DEVICE) for rank in range(2)]
    weight = torch.rand(width, device=DEVICE) + 0.5
    xs = [torch.randn(rows, width, device=DEVICE).bfloat16() for _ in range(2)]
    heads = [torch.randn(rows, 2, 2, HEAD + 1, device=DEVICE) for _ in range(2)]  # what a rank found for both ranks
    # Kernels are loaded while nobody waits in this process: of no rows, they would not be.
    for exchange, inbox, x, own in zip(ranks, inboxes, xs, heads, strict=True):
        calls: list[Callable[[], Tensor]] = [
            partial(exchange.sum, x),
            partial(exchange.gather, x),
            partial(exchange.sum_add_rmsnorm, x, x.clone(), weight, 1e-6),
            partial(exchange.merge, own, x.new_empty(rows, 2, HEAD)),
        ]
        for call in calls:
            inbox[: few.inbox_words(2)] = int(exchange._few.numbers[0]) + 1 << 32
            inbox[few.inbox_words(2) :].view(torch.int32).fill_(int(exchange._many.numbers[0]) + 1)
            call()
        torch.cuda.synchronize()
    for inbox in inboxes:
        inbox.zero_()
    for exchange in ranks:
        exchange._few.numbers.zero_()
        exchange._many.numbers.zero_()
    streams, graphs, found = [torch.cuda.Stream() for _ in range(2)], [], list[tuple[Tensor, ...]]()
    for exchange, x, own, stream in zip(ranks, xs, heads, streams, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = x
            for _ in range(NUM_SUMS):
                y = exchange.sum(y) * 0.5
            residual = x * 0
            normed = exchange.sum_add_rmsnorm(y, residual, weight, 1e-6)
            merged = exchange.merge(own, x.new_empty(rows, 2, HEAD))
            found.append((y, exchange.gather(x), residual, normed, merged))
        graphs.append(graph)
    for _ in range(REPLAYS):
        for x in (*xs, *heads):
            x.copy_(torch.randn(x.shape, device=DEVICE))
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        one, other = xs
        for _ in range(NUM_SUMS):
            one = other = (one + other) * 0.5
        parts = torch.stack(heads)
        want = (parts[..., :-1] * parts[..., -1:].softmax(0)).sum(0)
        for rank, (total, beside, residual, normed, merged) in enumerate(found):
            torch.testing.assert_close(merged.float(), want[:, rank], atol=2e-2, rtol=2e-2)
            assert torch.equal(total, one) and torch.equal(beside, torch.cat(xs, -1))
            assert torch.equal(residual, one + other)
            torch.testing.assert_close(normed, rmsnorm(one + other, weight, 1e-6), atol=3e-2, rtol=2e-2)
