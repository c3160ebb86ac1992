"""The whole engine on a CUDA device: against transformers, cached against uncached, counted by the runner."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.models.mamba2.modeling_mamba2
import triton
from torch import Tensor

from benchmarks.hit_table import ROWS, TABLE_SPEC, Row, measure_row
from benchmarks.random_model import make_random_model
from benchmarks.rig import LoadedModel
from forkpoint.cache.layout import CacheLayout
from forkpoint.engine.llm import LLM
from forkpoint.models.registry import load_model
from forkpoint.ops.select import torch_table
from forkpoint.outputs import RequestOutput
from forkpoint.params import SamplingParams
from forkpoint.platforms.table import resolve_platform
from forkpoint.worker.trial import SAMPLINGS
from tests.checkpoints import FAMILIES, write_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=5)
FEW = ["qwen3_5", "olmo_hybrid", "lfm3"]


def prompt(length: int, seed: int = 7) -> list[int]:
    return torch.randint(2, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def start(folder: Path, **options: Any) -> LLM:
    common = {"device": "cuda", "skip_tokenizer_init": True, "log_level": "warning", "max_model_len": 2048}
    common["max_num_seqs"] = 16  # graphs are recorded for each number of rows
    return LLM(str(folder), **{"kv_cache_memory_bytes": 256 << 20, **common, **options})


def ask(llm: LLM, *prompts: list[int], **changes: Any) -> list[RequestOutput]:
    return llm.generate(list(prompts), replace(GREEDY, **changes), use_tqdm=False)


def tokens(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


@torch.no_grad()
def oracle(model: Any, ids: list[int]) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    return logits


@pytest.mark.parametrize("family_name", [*FEW, "kimi_linear"])
def test_no_request_waits_for_a_compiler(family_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first prompts of all lengths compile nothing, however they are sampled."""
    write_checkpoint(tmp_path, family_name, dtype=torch.bfloat16, max_position_embeddings=20000)
    compiled: list[Any] = []
    with start(tmp_path, max_model_len=20000, kv_cache_memory_bytes=1 << 30) as llm:
        monkeypatch.setattr(
            triton.knobs.runtime,
            "jit_post_compile_hook",
            lambda **told: compiled.append((told["repr"].split("[")[0], told["compile"]["constants"])),
        )
        for length in (2, 5, 12, 15, 18, 24, 40, 50, 100, 150, 300):  # graphs serve none of these
            ask(llm, prompt(length), **SAMPLINGS[-1])
        for sampling in ({"temperature": 0.7, "top_k": 5, "min_p": 0.1}, {"allowed_token_ids": [3, 5]}, *SAMPLINGS):
            for count in (1, 3, 16):
                ask(llm, *(prompt(length, count) for length in (20, 333, 1100, 17000)[:count]), **sampling)
                ask(llm, *(prompt(9, seed) for seed in range(count)), **sampling)
    assert not compiled, compiled


def prompt_errors(llm: LLM, ids: list[int], want: Tensor) -> Tensor:
    """How far the prompt's log-probabilities are from `want[T, V]`."""
    (output,) = ask(llm, ids, prompt_logprobs=0, max_tokens=1)
    assert output.prompt_logprobs is not None
    entries = [entry for entry in output.prompt_logprobs if entry is not None]
    got = torch.tensor([entry[token].logprob for entry, token in zip(entries, ids[1:], strict=True)])
    return (got - want.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]).abs()


def write_family(folder: Path, name: str) -> Any:
    """Write a checkpoint as `write_checkpoint` does. In older releases of transformers the gated norm treats all groups
    of a row as one."""
    options = {"mamba2": "n_groups", "bamba": "mamba_n_groups"}
    options |= dict.fromkeys(("granite_hybrid", "granite_moe"), "mamba_n_groups")
    norm = inspect.signature(transformers.models.mamba2.modeling_mamba2.MambaRMSNormGated)
    one_group = name in options and "group_size" not in norm.parameters
    return write_checkpoint(folder, name, **({options[name]: 1} if one_group else {}))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Any]]:
    folder = tmp_path_factory.mktemp(request.param)
    theirs = write_family(folder, request.param)
    with start(folder) as llm:
        yield llm, theirs


def test_log_probabilities_are_those_of_transformers(family: tuple[LLM, Any]) -> None:
    llm, theirs = family
    ids = prompt(330)
    assert prompt_errors(llm, ids, oracle(theirs, ids)).max() <= 1e-3


def test_greedy_tokens_are_those_of_transformers_cold_and_warm(family: tuple[LLM, Any]) -> None:
    llm, theirs = family
    before = llm.get_metrics()
    ids = prompt(200, 1)
    (cold,), (warm,) = ask(llm, ids), ask(llm, ids)
    got = tokens(cold)
    assert oracle(theirs, ids + got)[199:-1].argmax(-1).tolist() == got
    assert tokens(warm) == got and (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 192)
    after = llm.get_metrics()
    entered = after["num_model_tokens"] - before["num_model_tokens"]
    assert entered == 200 + 8 + 2 * (GREEDY.max_tokens or 0) - 2
    assert after["slot_bytes_copied"] == 0


def test_batches_and_chunks_give_what_each_gives_alone(family: tuple[LLM, Any]) -> None:
    llm, _ = family
    prompts = [prompt(length, 100 + length) for length in (1, 63, 64, 65, 150, 700)]
    alone = [tokens(ask(llm, ids)[0]) for ids in prompts]
    assert llm.reset_prefix_cache()
    assert [tokens(output) for output in ask(llm, *prompts)] == alone
    completions = ask(llm, prompts[-1], n=3, temperature=1.0, seed=3)[0].outputs
    assert len({tuple(completion.token_ids) for completion in completions}) == 3


@pytest.mark.parametrize("family_name", ["qwen3_next_moe", "olmo_hybrid", "lfm3"])
def test_recorded_steps_do_what_launched_ones_do(family_name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family_name)
    prompts = [prompt(length, length) for length in (1, 63, 64, 65, 150, 400, 700)]
    mixes = [{}, {"temperature": 0.8, "top_k": 30, "seed": 5}, {"repetition_penalty": 1.3}, {"prompt_logprobs": 1}]
    answers = []
    for eager in (True, False):
        with start(tmp_path, enforce_eager=eager) as llm:
            rounds = [ask(llm, *prompts, **mix) for mix in mixes]
            longer = [ids + tokens(first) + [5] * 90 for ids, first in zip(prompts, rounds[0], strict=True)]
            rounds.append(ask(llm, *longer))
            answers.append([[tokens(output) for output in outputs] for outputs in rounds])
            metrics = llm.get_metrics()
        assert (metrics["num_replayed_steps"] == 0) == eager and metrics["slot_bytes_copied"] == 0
    assert answers[0] == answers[1]


@pytest.mark.parametrize("family_name", FEW)
def test_bfloat16_is_no_worse_than_transformers(family_name: str, tmp_path: Path) -> None:
    exact = write_checkpoint(tmp_path, family_name, dtype=torch.bfloat16).float()
    ids = prompt(400)
    want = oracle(exact, ids)
    theirs = (oracle(exact.bfloat16(), ids).log_softmax(-1) - want.log_softmax(-1)).abs()
    with start(tmp_path) as llm:
        errors = prompt_errors(llm, ids, want)
    assert errors.mean() <= 1.15 * theirs[torch.arange(399), ids[1:]].mean()


@pytest.mark.parametrize("family_name", FEW)
@pytest.mark.parametrize("force", [False, True])
def test_small_arenas_preemption_and_copies(family_name: str, force: bool, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family_name)
    model = load_model(tmp_path, ops=torch_table())
    layout = CacheLayout.create(model.layer_specs)
    prompts = [prompt(length, length) for length in (300, 310, 320, 330, 340, 350)]
    with start(tmp_path) as llm:
        want = [tokens(output) for output in ask(llm, *prompts, max_tokens=120)]
    room = (layout.num_pages_for(6 * 470, 12) // 2 + 2) * layout.page_bytes
    options = {"kv_cache_memory_bytes": room, "max_num_batched_tokens": 192, "max_num_seqs": 6}
    with start(tmp_path, force_state_copy=force, **options) as llm:
        outputs = ask(llm, *prompts, max_tokens=120)
        assert [tokens(output) for output in outputs] == want
        assert sum(output.num_preemptions for output in outputs) > 0
        assert (llm.get_metrics()["slot_bytes_copied"] > 0) == force


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family_name", ["qwen3_next_moe", "qwen3_5", "olmo_hybrid", "qwen3", "lfm3"])
def test_deterministic_bit_for_bit(family_name: str, dtype: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family_name)
    prompts = [prompt(length, length) for length in (1, 70, 130, 200, 500)]
    with start(tmp_path, deterministic=True, dtype=dtype, max_num_batched_tokens=192) as llm:
        alone = []
        for ids in prompts:
            alone.append(ask(llm, ids)[0].outputs[0].logprobs)
            assert llm.reset_prefix_cache()
        together = ask(llm, *prompts)
        warm = ask(llm, *prompts[::-1])[::-1]
    assert [output.outputs[0].logprobs for output in together] == alone
    assert [output.outputs[0].logprobs for output in warm] == alone
    assert [output.num_cached_tokens for output in warm] == [0, 64, 128, 192, 448]


def test_the_share_of_memory_decides_the_arena(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_5")
    total = torch.cuda.get_device_properties(0).total_memory
    free = resolve_platform("cuda").free_bytes()
    share = 1 - free / total + 0.05
    with start(tmp_path, kv_cache_memory_bytes=None, gpu_memory_utilization=share):
        left = resolve_platform("cuda").free_bytes()
    assert 0.04 * total <= free - left <= 0.06 * total


@pytest.fixture(scope="module")
def table_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return LoadedModel.load(make_random_model(tmp_path_factory.mktemp("table"), TABLE_SPEC), device="cuda")


@pytest.mark.parametrize(
    ("row", "tight"),
    [(row, tight) for row in ROWS for tight in (False, True) if row.tight_tokens or not tight],
    ids=lambda value: value.name if isinstance(value, Row) else "tight" if value else "ample",
)
def test_hit_table(table_model: LoadedModel, row: Row, tight: bool) -> None:
    result = measure_row(table_model, row, tight)
    assert result.holds, result
