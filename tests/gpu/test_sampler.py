"""Sampling on a GPU, at a real vocabulary: nothing in it waits for the device, and it agrees with the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from forkpoint.ops.select import select_table, torch_table
from forkpoint.params import SamplingParams
from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.platforms.cuda import CudaPlatform
from forkpoint.platforms.platform import Platform
from forkpoint.runtime.logprobs import score
from forkpoint.runtime.row_sampling import RowSampling, TokenCounts
from forkpoint.runtime.sampler import Sampler
from forkpoint.sched.plan import AddedRow, TokenMasks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

VOCAB = 151_936
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"top_k": 20, "top_p": 0.95, "logprobs": 3},
    {"top_p": 0.7},
    {"min_p": 0.1, "repetition_penalty": 1.2},
    {"temperature": 0.0, "presence_penalty": 1.0, "logprobs": 0},
    {"logit_bias": {3: 2.0, 9: -5.0}},
    {"min_tokens": 3},
    {"temperature": 0.0, "frequency_penalty": 0.1},
]


def rows_on(platform: Platform) -> list[RowSampling]:
    counts = TokenCounts(len(OPTIONS), VOCAB, platform)
    added = [
        AddedRow(i, "r", np.asarray([1, 2, 3, 3], np.int32), 2, SamplingParams(**o), i, (7,), np.empty(0, np.int32))
        for i, o in enumerate(OPTIONS)
    ]
    return [RowSampling.create(row, counts) for row in added]


def test_nothing_waits_for_the_device_and_a_cpu_agrees() -> None:
    device, host = CudaPlatform(), CpuPlatform()
    table = select_table("triton", False, False)
    on_device, on_host = Sampler(table, device), Sampler(torch_table(), host)
    logits = (torch.randn(len(OPTIONS), VOCAB, generator=torch.Generator().manual_seed(0)) * 4).bfloat16()
    there = logits.to(device.device)
    bits = np.random.default_rng(0).integers(-(2**31), 2**31, (2, VOCAB // 32)).astype(np.int32)
    masks = TokenMasks(np.asarray([0, 4], np.int32), bits)
    host_rows, num_outputs = rows_on(host), np.full(len(OPTIONS), 2, np.int32)
    for compiled in (False, True):
        device.synchronize()
        torch.cuda.set_sync_debug_mode("error" if compiled else "default")
        try:
            rows = rows_on(device)
            found = [on_device.sample(there, rows, num_outputs, masks) for _ in range(3)]
            scores = score(there, found[0].token_ids, dict.fromkeys(range(len(OPTIONS)), 5), table, device)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    device.synchronize()
    for sampled in found:
        expected = on_host.sample(logits, host_rows, num_outputs, masks)
        assert sampled.token_ids.tolist() == expected.token_ids.tolist()
        assert sampled.finite.all()
        assert sampled.logprobs is not None
        assert expected.logprobs is not None
        ours, theirs = sampled.logprobs.fetch(), expected.logprobs.fetch()
        assert sorted(ours) == sorted(theirs) == [2, 5]
        assert all(ours[i].logprob == pytest.approx(theirs[i].logprob, abs=1e-4) for i in ours)
        assert all(ours[i].rank == theirs[i].rank for i in ours)
    assert len(scores.fetch()) == len(OPTIONS)
