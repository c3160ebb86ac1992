"""A kind of device that another package brings: its memory is not the host's, and its operators are torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pytest
import torch
from torch import Tensor

import forkpoint.worker.build as build
from forkpoint.config import SchedulerConfig
from forkpoint.engine.llm import LLM
from forkpoint.errors import ConfigError
from forkpoint.ops.parameters import RouteRule
from forkpoint.ops.select import operator_names, select_table, torch_table
from forkpoint.ops.table import OpTable
from forkpoint.outputs import RequestOutput
from forkpoint.params import SamplingParams, StructuredOutputsParams
from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.platforms.table import PLATFORMS

PROMPTS = [[1 + (7 * i + 3 * j) % 90 for j in range(70 + 40 * i)] for i in range(3)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20, prompt_logprobs=1),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=20, logprobs=2, presence_penalty=0.5),
    SamplingParams(temperature=0.0, max_tokens=20, structured_outputs=StructuredOutputsParams(regex="[a-z ]{4,9}")),
]


MIXTURE = {"route", "prepare_experts", "experts"}
OTHER_LAYERS = {"scan_prefill", "scan_decode", "latent_write", "linear_heads", "prepare_linear_heads"}
OF_DRAFTS = {"conv_verify", "conv_fold", "recurrence_verify", "recurrence_fold", "scan_verify", "scan_fold"}
RECORDED = {"recurrence_record", "recurrence_flush"}  # where states are written every few tokens


class AwayPlatform(CpuPlatform):
    """The host, which keeps what is said to be on the device apart from the host's arrays."""

    defaults = SchedulerConfig(max_num_batched_tokens=192, max_num_seqs=3, async_scheduling=True)

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.shares_memory = False

    @classmethod
    def num_devices(cls) -> int:
        return 2

    def operators(self, cpu_ops: str) -> str:
        return "torch"

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array.copy())


def _install(folder: Path) -> None:
    info = folder / "away-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: away\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[forkpoint.platforms]\naway = {__name__}:AwayPlatform\n")


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Operators that ran, each where a tensor made on no given device cannot be computed with."""
    names: set[str] = set()

    def watched(name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            names.add(name)
            with torch.device("meta"):
                return operator(*args, **kwargs)

        return run

    def select(*args: Any) -> OpTable:
        table = select_table(*args)
        return replace(table, **{name: watched(name, getattr(table, name)) for name in operator_names()})

    monkeypatch.setattr(build, "select_table", select)
    yield names


def _generate(folder: Path, **options: Any) -> list[RequestOutput]:
    with LLM(str(folder), max_model_len=512, log_level="error", num_threads=1, **options) as llm:
        return llm.generate(PROMPTS, PARAMS, use_tqdm=False) + llm.generate(
            PROMPTS, SamplingParams(temperature=0.0), use_tqdm=False
        )


def test_an_installed_kind_of_device_answers_as_the_host_does(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, called: set[str]
) -> None:
    _install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "away" in PLATFORMS.names()
    away = _generate(tiny_model, device="away:1", force_state_copy=True)
    assert set(operator_names()) - called == MIXTURE | OTHER_LAYERS | OF_DRAFTS | RECORDED | {
        "silu_mul"  # in linear_silu_mul
    }
    here = _generate(tiny_model, device="cpu", cpu_ops="torch", max_num_batched_tokens=192)
    assert [output.outputs[0].token_ids for output in away] == [output.outputs[0].token_ids for output in here]
    assert [output.num_cached_tokens for output in away] == [output.num_cached_tokens for output in here]
    assert away[-1].num_cached_tokens > 0
    with pytest.raises(ConfigError, match="2 devices of the kind 'away'"):
        LLM(str(tiny_model), device="away:2")


def test_experts_make_tensors_where_their_inputs_are() -> None:
    ops, x, scores = torch_table(), torch.randn(5, 8), torch.randn(5, 5)
    gate_up, down = torch.randn(5, 12, 8), torch.randn(5, 8, 6)

    def answer() -> Tensor:
        weights, ids = ops.route(scores, RouteRule(top_k=2, num_shared=1, shared="gated"))
        return ops.experts(x, ops.prepare_experts(gate_up, down), weights, ids)

    here = answer()
    with torch.device("meta"):
        assert torch.equal(answer().to(here.device), here)
