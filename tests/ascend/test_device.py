"""Engines on a fake NPU: the CPU's tokens, no reads of scalars in a step, and one copy to the host for each."""

from __future__ import annotations

import importlib
import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from forkpoint.engine.llm import LLM
from forkpoint.errors import ConfigError
from forkpoint.ops.select import torch_table
from forkpoint.outputs import RequestOutput
from forkpoint.params import SamplingParams, StructuredOutputsParams
from forkpoint.platforms.npu import NpuPlatform
from forkpoint.platforms.table import PLATFORMS, resolve_platform
from forkpoint.runtime.step_inputs import StepShape
from forkpoint.sched.plan import TO_DRAFT
from tests.ascend import fake_npu
from tests.ascend.operators import DRAFT_OPERATORS, STEP_OPERATORS
from tests.fp8_checkpoints import put_in_fp8
from tests.ops.triton_cases import triton_ops
from tests.plans import Row, plan_of
from tests.runtime.driver import Driver, tiny_hybrid, tokens

PROMPTS = [[1 + (7 * i + 3 * j) % 90 for j in range(70 + 40 * i)] for i in range(4)]
LISTED = StructuredOutputsParams(regex="[a-z ]{4,9}")
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, prompt_logprobs=1),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=3, max_tokens=20, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=20, structured_outputs=LISTED),
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, presence_penalty=0.5),
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
DEVICES = ("npu:0", "cpu")
DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "deterministic, copied states": {
        "deterministic": True,
        "force_state_copy": True,
    },
    "drafts": {"speculative_config": DRAFTS},
    "drafts, states written every 8 tokens": {"speculative_config": DRAFTS, "state_write_interval": 8},
    "preempted": {"kv_cache_memory_bytes": 700_000, "max_num_seqs": 8},
}


def _answers(folder: Path, device: str, **options: Any) -> tuple[list[RequestOutput], dict[str, Any]]:
    """Return the answers and the engine's counts."""
    numbers: dict[str, Any] = {
        "max_model_len": 512,
        "max_num_batched_tokens": 192,
        "max_num_seqs": 3,
        "kv_cache_memory_bytes": 8 << 20,
    } | options
    with LLM(str(folder), device=device, cpu_ops="torch", log_level="error", num_threads=1, **numbers) as llm:
        first = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        again = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        if "kv_cache_memory_bytes" in options:
            again += llm.generate([[i] * 50 for i in range(12)], replace(GREEDY, max_tokens=70), use_tqdm=False)
        return first + again, llm.get_metrics()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_an_engine_on_an_npu_answers_as_the_host_does(
    tiny_model: Path, card: fake_npu.FakeModule, options: dict[str, Any]
) -> None:
    (there, counts), (here, _) = (_answers(tiny_model, device, async_scheduling=True, **options) for device in DEVICES)
    assert fake_npu.counted()["aten::mm.out"] > 100
    assert [output.outputs[0].token_ids for output in there] == [output.outputs[0].token_ids for output in here]
    for mine, own in zip(there[1].outputs[0].logprobs or (), here[1].outputs[0].logprobs or (), strict=True):
        assert {token: entry.logprob for token, entry in mine.items()} == pytest.approx(
            {token: entry.logprob for token, entry in own.items()}, abs=1e-4
        )
    assert [output.num_cached_tokens for output in there] == [output.num_cached_tokens for output in here]
    assert options or there[-1].num_cached_tokens >= 64
    assert (counts["num_draft_tokens"] > 0) == ("speculative_config" in options)
    assert (counts["num_preemptions"] > 0) == ("kv_cache_memory_bytes" in options)


@pytest.mark.parametrize("options", [{}, {"quantization": "fp8"}], ids=["folder", "option"])
def test_weights_in_fp8_come_as_bytes(
    tiny_model: Path, tmp_path: Path, card: fake_npu.FakeModule, options: dict[str, Any]
) -> None:
    """The card refuses tensors of 8-bit floats."""
    folder = tiny_model if options else tmp_path / "fp8"
    if not options:
        put_in_fp8(tiny_model, folder, "block")
    options = {"dtype": "float32", "async_scheduling": True, **options}
    there, here = (_answers(folder, device, **options)[0] for device in DEVICES)
    assert [output.outputs[0].token_ids for output in there] == [output.outputs[0].token_ids for output in here]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8' .* give 'auto'"),
        ({"max_num_seqs": 257, "max_num_batched_tokens": 512}, "at most 65535 programs; give 256 or less"),
    ],
)
def test_what_kernels_cannot_do_there_is_refused(
    tiny_model: Path, card: fake_npu.FakeModule, options: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError, match=line):
        _answers(tiny_model, "npu", **options)


@pytest.fixture
def interpreted(card: fake_npu.FakeModule, monkeypatch: pytest.MonkeyPatch) -> fake_npu.FakeModule:
    """Launches reach the interpreter with the same memory as the host's, and are part of graphs."""
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    def issue(self: Any, *args: Any, **kwargs: Any) -> None:
        def launch() -> None:
            with _disable_current_modes():
                shared = {key: fake_npu.hosted(x) for key, x in kwargs.items() if isinstance(x, torch.Tensor)}
                run(self, *(fake_npu.hosted(x) if isinstance(x, torch.Tensor) else x for x in args), **kwargs | shared)

        if card.recorded is None:
            launch()
        else:
            card.recorded.calls.append(launch)

    monkeypatch.setattr(GridExecutor, "__call__", issue)
    return card


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are run by the interpreter")
def test_a_step_reads_no_scalars_and_copies_once_to_the_host(tmp_path: Path, interpreted: fake_npu.FakeModule) -> None:
    """With the Triton kernels, launched and recorded."""
    ops = triton_ops()
    model = tiny_hybrid(tmp_path, ops, 1, 1, torch.device("npu", 0))
    driver = Driver.create(model, ops, platform=NpuPlatform(), shapes=[StepShape(2, 0, 0)])
    assert driver.runner.batch.table.kernel_block_size == 32  # half of a block
    fake_npu.counted()
    got = _prefill_and_decode(driver)
    counts = fake_npu.counted()
    assert "scalar read" not in counts and "blocking copy" not in counts, counts
    operators = {name for name in counts if name.startswith("aten::")}
    assert operators <= STEP_OPERATORS, operators - STEP_OPERATORS
    assert counts["to host"] == driver.step == 4
    assert [result.replayed for result in driver.results] == [False, True, False, True]
    assert got == _prefill_and_decode(Driver.create(tiny_hybrid(tmp_path, torch_table(), 1, 1)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are run by the interpreter")
def test_copied_states_are_one_launch_for_all_layers(tmp_path: Path, interpreted: fake_npu.FakeModule) -> None:
    """The fallback of operators that cannot read one slot and write another."""
    ops, copies = triton_ops(), list[tuple[int, int]]()

    def counted(pools: list[torch.Tensor], src: torch.Tensor, dst: torch.Tensor) -> None:
        copies.append((len(pools), len(src)))
        ops.state_copy(pools, src, dst)

    counting, answers = replace(ops, state_copy=counted), []
    model = tiny_hybrid(tmp_path, counting, 2, 1, torch.device("npu", 0))
    for driver in (
        Driver.create(model, counting, platform=NpuPlatform(), force_state_copy=True),
        Driver.create(tiny_hybrid(tmp_path, torch_table(), 2, 1)),
    ):
        first, second = driver.slot(), driver.slot()
        fake_npu.counted()
        driver.run([driver.chunk(0, 0, 5, -1, first, samples=True)], added=[driver.added(0, tokens(5, 1))])
        driver.run([driver.decode(0, 5, first, second)])
        assert "scalar read" not in fake_npu.counted()
        answers.append(driver.outputs)
    assert copies == [(4, 1), (4, 1)]  # a window and a matrix of each layer
    assert answers[0] == answers[1]


def _prefill_and_decode(driver: Driver) -> list[list[int]]:
    """Two rows, of which one is sampled from its distribution."""
    slots = [driver.slot(), driver.slot()]
    driver.run([driver.chunk(0, 0, 20, -1, slots[0], samples=True)], added=[driver.added(0, tokens(20, 1))])
    driver.run([driver.decode(0, 20, slots[0], slots[0])])
    sampled = SamplingParams(temperature=0.9, top_k=20)
    own = driver.chunk(1, 0, 3, -1, slots[1], samples=True)
    driver.run([own, driver.decode(0, 21, slots[0], slots[0])], [driver.added(1, tokens(3, 2), sampled)])
    driver.run([driver.decode(row, at, slots[row], slots[row]) for row, at in ((0, 22), (1, 3))])
    return [driver.outputs[row] for row in range(2)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are run by the interpreter")
@pytest.mark.parametrize("interval", [1, 2])
def test_steps_with_drafts_read_no_scalars_either(
    tmp_path: Path, interpreted: fake_npu.FakeModule, interval: int
) -> None:
    """Drafts of which one is right, and none, launched and recorded: the ids of the host."""
    ops = triton_ops()
    model = tiny_hybrid(tmp_path, ops, 1, 1, torch.device("npu", 0))
    plain = Driver.create(tiny_hybrid(tmp_path, torch_table(), 1, 1))
    slot, ids = plain.slot(), tokens(20, 1)
    plain.run([plain.chunk(0, 0, 20, -1, slot, samples=True)], [plain.added(0, ids)])
    for at in range(20, 24):
        plain.run([plain.decode(0, at, slot, slot)])
    want = plain.outputs[0]
    options = {"max_num_drafts": 2, "state_write_interval": interval}
    driver = Driver.create(model, ops, platform=NpuPlatform(), shapes=[StepShape(3, 0, 0, 1)], **options)
    fake_npu.counted()
    slot, got, wrong = driver.slot(), list[int](), (want[2] + 1) % 96
    driver.run([driver.chunk(0, 0, 20, -1, slot, samples=True)], [driver.added(0, ids)])
    got += driver.last.token_ids.tolist()
    for drafts in ([want[1], wrong], [], [want[4], wrong]):
        row = Row(0, 19 + len(got), [-1, *drafts], slot, slot, num_drafts=len(drafts), decodes=True)
        result = driver.runner.submit(plan_of(driver.step, [driver.lags.of(row)])).result()
        driver.step += 1
        assert result.replayed
        got += result.token_ids.tolist()
        driver.lags.reject(0, len(row.tokens) - len(result.token_ids))
    assert got[:5] == want and len(got) == 6
    counts = fake_npu.counted()
    assert "scalar read" not in counts and counts["to host"] == driver.step == 4
    assert "blocking copy" not in counts, counts
    operators = {name for name in counts if name.startswith("aten::")}
    assert operators <= DRAFT_OPERATORS, operators - DRAFT_OPERATORS


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are run by the interpreter")
@pytest.mark.parametrize("recorded", [False, True])
def test_nothing_waits_for_a_step_that_is_on_its_way(
    tmp_path: Path, interpreted: fake_npu.FakeModule, monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    """Steps with the model's own drafts are planned while the step before runs. Between a step's submission and its
    result the host reads nothing. It waits only to reuse the staging memory of the third step before."""
    waits, plan_step = list[int](), 0
    monkeypatch.setattr(fake_npu.Event, "record", lambda event, stream=None: setattr(event, "step", plan_step))
    monkeypatch.setattr(fake_npu.Event, "synchronize", lambda event: waits.append(plan_step - event.step))
    monkeypatch.setattr(interpreted, "synchronize", lambda device=None: waits.append(0))
    ids, answers = tokens(5, 1), list[list[int]]()
    for ops, device in ((triton_ops(), torch.device("npu", 0)), (torch_table(), None)):
        model = tiny_hybrid(tmp_path, ops, 1, 1, device, mtp=True)
        options: dict[str, Any] = {"platform": NpuPlatform()} if device else {}
        if device and recorded:
            options["shapes"] = [StepShape(3, 0, 0, 1)]
        driver = Driver.create(model, ops, max_num_drafts=2, **options)
        while driver.runner.record_next():
            pass
        slot, ahead = driver.slot(), device is not None
        driver.run([driver.chunk(0, 0, 5, -1, slot, samples=True)], [driver.added(0, ids)])
        end, before, got = 5, None, driver.outputs[0]
        for plan_step in range(1, 7):
            row = Row(
                0, end, [-1, *[TO_DRAFT] * 2], slot, slot, num_drafts=2, decodes=True, optimistic=before is not None
            )
            waits.clear()
            fake_npu.counted()
            step = driver.runner.submit(plan_of(plan_step, [driver.lags.of(row)]))
            counts = fake_npu.counted()
            assert not {"scalar read", "blocking copy"} & set(counts) and min(waits, default=3) >= 3
            if before is not None:
                got += before.result().token_ids.tolist()
            before = step if ahead else None
            if not ahead:
                found = step.result().token_ids.tolist()
                driver.lags.reject(0, 3 - len(found))
                got += found
            end = 5 + len(got) - 1 + 3 * ahead  # as if all were right of the step that runs
        answers.append(got + (before.result().token_ids.tolist() if before else []))
    there, here = answers
    assert len(there) >= 7 and there[:7] == here[:7]


def test_absent_cards_and_packages_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="npu-smi info" if hasattr(torch, "npu") else "pip install torch-npu"):
        resolve_platform("npu")
    if hasattr(torch, "npu"):
        monkeypatch.delattr(torch, "npu")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "torch_npu" or found(name))
    monkeypatch.setattr(importlib, "import_module", _without_cann)
    with pytest.raises(ConfigError, match=r"libhccl.*set_env\.sh"):
        resolve_platform("npu:1")


def _without_cann(name: str) -> None:
    raise ImportError("libhccl.so: cannot open shared object file")


@pytest.mark.parametrize(
    ("given", "has_triton", "want"),
    [("auto", True, "triton-in-turns"), ("auto", False, "torch"), ("torch", True, "torch")],
)
def test_operators_are_those_that_triton_ascend_allows(
    card: fake_npu.FakeModule, monkeypatch: pytest.MonkeyPatch, given: str, has_triton: bool, want: str
) -> None:
    assert PLATFORMS.find("npu") is NpuPlatform
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace() if has_triton else None)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    platform = NpuPlatform()
    assert platform.operators(given) == want
    assert platform.has_graphs == ("GLIBC_TUNABLES" in os.environ) == (want != "torch")
    with pytest.raises(ConfigError, match="for CPUs"):
        platform.operators("cpp")
