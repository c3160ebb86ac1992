"""Serve prompts on a pretended Hopper GPU, whose launches are not compiled. Print the variants of kernels that run and
were not compiled in parallel at the start: `python -m tests.worker.untried FOLDER MAX_MODEL_LEN [OPTIONS]`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from forkpoint.engine.llm import LLM
from forkpoint.ops.rows import kernel as rows
from forkpoint.ops.sampling import choose_kernel, kernel
from forkpoint.params import SamplingParams
from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.worker.trial import SAMPLINGS
from tests.ascend.sm90 import HOPPER, Absent

SHORT = (2, 5, 12, 15, 18, 20, 24, 40, 50)  # lengths of prompts that come alone
LENGTHS = (20, 333, 1100)  # lengths of prompts that come together, with one that is nearly as long as possible
WAYS: tuple[dict[str, Any], ...] = ({"top_k": 5, "min_p": 0.1}, {"allowed_token_ids": [3, 5]}, *SAMPLINGS)
PRETENDED: dict[str, Any] = {
    "traits": staticmethod(lambda device: replace(HOPPER, has_warpgroups=True, state_write_interval=8)),
    "operators": lambda self, cpu_ops: "triton",
    "arena_bytes": lambda self, utilization: 1 << 30,
    "has_graphs": True,
    "shares_memory": False,
    "upload": staticmethod(lambda array: torch.from_numpy(array.copy())),
}


def is_launched() -> bool:
    """Whether a GPU would run the launches now, and not only compile their kernels."""
    return JITFunction.run.__name__ == "bind"


def settled(sample: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The same with answers that may be gone on with, though no launch wrote them."""

    def run(*args: Any) -> tuple[Tensor, Tensor]:
        ids, finite = sample(*args)
        if is_launched():
            ids.fill_(5), finite.fill_(True)
        return ids, finite

    return run


def caught_up(catch_up: Callable[..., None]) -> Callable[..., None]:
    """The same with ids that may be gone on with."""

    def run(ids: Any, *late: Any) -> None:
        catch_up(ids, *late)
        if is_launched():
            ids.ids.clamp_(min=0)

    return run


def main() -> None:
    compiled, met = set[str](), set[str]()

    def bind(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        *_, binder = self.device_caches[0]
        (compiled if warmup else met).add(f"{self.fn.__name__}: {binder(*args, **options)[1:]}")

    driver.set_active(Absent())
    JITFunction.run = bind
    for name, value in PRETENDED.items():
        setattr(CpuPlatform, name, value)
    torch.nn.functional.linear = lambda x, weight, bias=None: x.new_zeros(len(x), len(weight))  # in no time
    kernel.greedy, choose_kernel.sample_rows = settled(kernel.greedy), settled(choose_kernel.sample_rows)
    rows.catch_up = caught_up(rows.catch_up)
    common: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "log_level": "error", "max_num_seqs": 16}
    folder, longest, *options = sys.argv[1:]
    common |= {"max_num_batched_tokens": 8192, "max_model_len": int(longest), **json.loads("".join(options) or "{}")}
    lengths = (*LENGTHS, int(longest) - 100)
    with LLM(folder, **common) as llm:
        for length in SHORT:  # graphs serve no prompts with log-probabilities
            llm.generate([[2] * length], SamplingParams(**{"max_tokens": 1, **SAMPLINGS[-1]}), use_tqdm=False)
        for way in WAYS:
            params = SamplingParams(**{"max_tokens": 3, "ignore_eos": True, **way})
            for count in (1, 5):
                prompts = [[2 + (count + i) % 99] * length for i, length in enumerate(count * lengths)]
                llm.generate(prompts, params, use_tqdm=False)
    print(*sorted(met - compiled), sep="\n", end="")


if __name__ == "__main__":
    main()
