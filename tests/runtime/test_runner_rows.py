"""Rows that resume, replay, jump, ask for log-probabilities, fail; and operators that cannot redirect."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forkpoint.cache.layout import CacheLayout
from forkpoint.errors import BlockTableError, StepFailedError
from forkpoint.models.context import ForwardContext
from forkpoint.models.decoder import Model
from forkpoint.models.head import OutputHead
from forkpoint.ops.metadata import KeySplits
from forkpoint.ops.select import torch_table
from forkpoint.ops.table import STATE_OPERATORS, OpTable
from forkpoint.params import SamplingParams
from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.runtime.batch import Batch
from forkpoint.runtime.step_inputs import StepBuilder, StepShape
from forkpoint.sched.plan import LAST_SAMPLED, AddedRow, ReplacedPrefix, StepPlan
from tests.plans import Row, decode, plan_of
from tests.runtime.driver import GREEDY, VOCAB, Driver, ints, tiny_hybrid, tokens

PENALISED = SamplingParams(
    temperature=0.8, repetition_penalty=1.5, presence_penalty=0.9, frequency_penalty=0.4, top_p=0.95, max_tokens=None
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return tiny_hybrid(folder)


def generate(driver: Driver, row: int, ids: np.ndarray, count: int, params: SamplingParams, **changes: object) -> int:
    """Prefill a row in one chunk and sample `count` tokens. Returns its slot."""
    slot = driver.slot()
    chunk = driver.chunk(row, 0, len(ids), -1, slot, samples=True)
    driver.run([chunk], added=[driver.added(row, ids, params, **changes)])
    for i in range(count - 1):
        driver.run([driver.decode(row, len(ids) + i, slot, slot)])
    return slot


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), PENALISED])
def test_a_resumed_row_goes_on_as_before(model: Model, params: SamplingParams) -> None:
    prompt = tokens(100)
    driver = Driver.create(model)
    generate(driver, 0, prompt, 9, params, seed=11)
    expected = driver.outputs[0]
    known = np.concatenate([prompt, ints(*expected[:4])])
    driver = Driver.create(model)
    generate(driver, 3, known, 5, params, seed=11, num_prompt_tokens=100)
    assert driver.outputs[3] == expected[4:]


def test_replayed_tokens_sample_nothing_until_the_last(model: Model) -> None:
    prompt = tokens(100)
    driver = Driver.create(model)
    generate(driver, 0, prompt, 5, PENALISED, seed=3)
    expected = driver.outputs[0]
    driver = Driver.create(model)
    slot, known = driver.slot(), np.concatenate([prompt, ints(*expected[:3])])
    row = driver.added(0, known, PENALISED, seed=3, num_prompt_tokens=100)
    driver.run([driver.chunk(0, 0, 100, -1, slot)], added=[row])
    for i in range(2):
        column = replace(driver.decode(0, 100 + i, slot, slot, token=expected[i]), samples=False)
        assert len(driver.run([column]).token_ids) == 0
    driver.run([driver.decode(0, 102, slot, slot, token=expected[2])])
    driver.run([driver.decode(0, 103, slot, slot)])
    assert driver.outputs[0] == expected[3:]


def test_samples_do_not_depend_on_the_batch(model: Model) -> None:
    prompts = [tokens(40 + 9 * i, i) for i in range(3)]
    alone = []
    for i, prompt in enumerate(prompts):
        driver = Driver.create(model)
        generate(driver, 0, prompt, 5, PENALISED, seed=i)
        alone.append(driver.outputs[0])
    driver = Driver.create(model)
    slots = [driver.slot() for _ in prompts]
    chunks = [driver.chunk(i, 0, len(p), -1, slots[i], samples=True) for i, p in enumerate(prompts)]
    driver.run(chunks, added=[driver.added(i, p, PENALISED, seed=i) for i, p in enumerate(prompts)])
    for step in range(4):
        driver.run([driver.decode(i, len(prompts[i]) + step, slots[i], slots[i]) for i in (2, 0, 1)])
    assert [driver.outputs[i] for i in range(3)] == alone


def test_a_row_jumps_onto_a_longer_prefix(model: Model) -> None:
    prompt = tokens(200)
    driver = Driver.create(model)
    saved, slot = driver.slot(), driver.slot()
    first = driver.chunk(0, 0, 200, -1, driver.slot(), [(192, saved)], samples=True)
    early = driver.chunk(1, 0, 64, -1, slot)
    driver.run([first, early], added=[driver.added(0, prompt), driver.added(1, prompt)])
    jump = ReplacedPrefix(1, first.new_blocks[:3])
    driver.run([replace(driver.chunk(2, 192, 200, saved, slot, samples=True), row=1)], replaced=(jump,))
    assert driver.outputs[1] == driver.outputs[0]
    assert driver.last.num_tokens == 8


def test_prompt_logprobs_in_one_chunk_and_in_several(model: Model) -> None:
    prompt = tokens(150)
    params = SamplingParams(temperature=0.0, prompt_logprobs=3)
    whole, cut = Driver.create(model), Driver.create(model)
    generate(whole, 0, prompt, 1, params, wants_prompt_logprobs=True)
    entries = dict(whole.last.prompt_logprobs[0])
    assert sorted(entries) == list(range(1, 150))
    assert [entries[i].token_id for i in range(1, 150)] == prompt[1:].tolist()
    slot, found = cut.slot(), {}
    row = cut.added(0, prompt, params, wants_prompt_logprobs=True)
    generate(cut, 1, tokens(20, 5), 1, GREEDY)
    other = cut.decode(1, 20, cut.slot() - 2, cut.slot() + 3)
    for start, end in ((0, 64), (64, 128), (128, 150)):
        chunk = cut.chunk(0, start, end, slot if start else -1, slot, samples=end == 150)
        result = cut.run([chunk, other] if start == 0 else [chunk], [row] if start == 0 else [])
        found.update(dict(result.prompt_logprobs[0]))
    for i in range(1, 150):
        assert (found[i].rank, found[i].top_ids) == (entries[i].rank, entries[i].top_ids)
        assert found[i].logprob == pytest.approx(entries[i].logprob, abs=1e-4)
    for length in (1, 70, 149):
        driver = Driver.create(model)
        generate(driver, 0, prompt[:length], 1, SamplingParams(temperature=0.0, logprobs=3))
        assert driver.last.logprobs[0][0].top_ids == entries[length].top_ids
        assert driver.last.logprobs[0][0].top_logprobs == pytest.approx(entries[length].top_logprobs, abs=1e-4)


class FaultyHead:
    """An output head that makes NaN in the rows it is told."""

    def __init__(self, head: OutputHead) -> None:
        self.nan_rows: list[int] = []
        self.whole, self.likeliest, self._own = head.whole, head.likeliest, head.own

    def own(self, hidden: Tensor) -> Tensor:
        logits = self._own(hidden).clone()
        logits[self.nan_rows, VOCAB // 2] = torch.nan
        return logits


class Faulty:
    """A model that raises when told to, with a head that makes NaN."""

    def __init__(self, model: Model) -> None:
        self.config, self.layer_specs, self.vision = model.config, model.layer_specs, None
        self.fold_constants, self.fails = model.fold_constants, False
        self.head = FaultyHead(model.head)
        self._model = model

    def forward(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        if self.fails:
            raise RuntimeError("out of luck")
        return self._model.forward(token_ids, context)


def test_a_failed_step_and_those_submitted_before_it_was_seen(model: Model) -> None:
    faulty: Any = Faulty(model)
    driver = Driver.create(faulty)
    expected = Driver.create(model)
    for each in (driver, expected):
        generate(each, 0, tokens(50), 2, GREEDY)
    faulty.fails = True
    slot, lost = driver.slot(), driver.slot()
    chunk = driver.chunk(1, 0, 50, -1, lost, samples=True)
    failed = driver.runner.submit(plan_of(9, [replace(chunk, tokens=tokens(50))], added=(driver.added(1, tokens(50)),)))
    faulty.fails = False
    follower = driver.runner.submit(plan_of(10, [driver.decode(1, 50, lost, lost)]))
    with pytest.raises(RuntimeError, match="out of luck"):
        failed.result()
    with pytest.raises(StepFailedError, match="step 10"):
        follower.result()
    again = driver.chunk(2, 0, 50, -1, slot, samples=True)
    driver.run([again], added=[driver.added(2, tokens(50))], removed=(1,))
    assert driver.outputs[2] == expected.outputs[0][:1]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=1)])
def test_rows_with_non_finite_logits_are_named(model: Model, params: SamplingParams) -> None:
    faulty: Any = Faulty(model)
    driver = Driver.create(faulty)
    slots = [driver.slot(), driver.slot()]
    chunks = [driver.chunk(row + 4, 0, 30, -1, slots[row], samples=True) for row in range(2)]
    faulty.head.nan_rows = [1]
    result = driver.run(chunks, added=[driver.added(row + 4, tokens(30), params) for row in range(2)])
    assert result.failed_rows == (5,)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=1)])
@pytest.mark.parametrize(
    ("num_right", "fails"), [(0, False), (1, False), (2, True), (3, True)]
)  # of three drafts, where the logits behind the second are not finite
def test_a_window_fails_by_what_counts_of_it(model: Model, params: SamplingParams, num_right: int, fails: bool) -> None:
    plain = Driver.create(model)
    generate(plain, 0, tokens(30), 5, params)
    faulty: Any = Faulty(model)
    driver = Driver.create(faulty, max_num_drafts=3)
    slot = generate(driver, 0, tokens(30), 1, params)
    drafts = plain.outputs[0][1:4]
    drafts[num_right:] = [(token + 1) % VOCAB for token in drafts[num_right:]]
    faulty.head.nan_rows = [2]
    window = Row(0, 30, [LAST_SAMPLED, *drafts], slot, slot, num_drafts=3, decodes=True)
    result = driver.runner.submit(plan_of(driver.step, [window])).result()
    assert result.failed_rows == ((0,) if fails else ())
    assert fails or result.token_ids.tolist() == plain.outputs[0][1 : 2 + num_right]


def test_a_plan_that_overfills_a_row_is_refused(model: Model) -> None:
    driver = Driver.create(model)
    with pytest.raises(BlockTableError, match="holds 32"):
        generate(driver, 0, tokens(2049), 1, GREEDY)


def test_a_step_without_tokens(model: Model) -> None:
    driver = Driver.create(model)
    generate(driver, 0, tokens(30), 1, GREEDY)
    result = driver.run(removed=(0,))
    assert (len(result.token_ids), result.num_tokens) == (0, 0)


def in_place(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def checked(*args: Any) -> Tensor:
        (index,) = [arg for arg in args if hasattr(arg, "src")]
        assert torch.equal(index.src, index.dst)
        return operator(*args)

    return checked


def without_redirect(name: str) -> OpTable:
    table = torch_table()
    changes: dict[str, Any] = {name: in_place(getattr(table, name)), "redirects": table.redirects - {name}}
    return replace(table, **changes)


@pytest.mark.parametrize("name", STATE_OPERATORS)
def test_an_operator_that_cannot_redirect_finds_its_state_in_place(model: Model, folder: Path, name: str) -> None:
    ops = without_redirect(name)
    outputs = []
    for table, each in ((torch_table(), model), (ops, tiny_hybrid(folder, ops))):
        driver = Driver.create(each, table)
        prompt, running, saved, fresh = tokens(126), driver.slot(), driver.slot(), driver.slot()
        first = driver.chunk(0, 0, 126, -1, running, [(64, saved)], samples=True)
        driver.run([first], added=[driver.added(0, prompt)])
        for i in range(3):
            driver.run([driver.decode(0, 126 + i, running, running)])
        again = driver.chunk(1, 64, 126, saved, driver.slot(), samples=True)
        driver.run(
            [again, driver.decode(0, 129, running, fresh)],
            [driver.added(1, prompt, block_ids=first.new_blocks[:1])],
        )
        outputs.append((driver.outputs[0], driver.outputs[1]))
        copied = driver.last.slot_bytes_copied
    assert outputs[0] == outputs[1]
    tensors = [tensor for spec in driver.runner.arena.layout.states for tensor in spec.tensors]
    assert copied == sum(tensor.num_bytes() for tensor in tensors if name in (tensor.operators or ()))


def test_256_decode_rows_cost_little_python(model: Model) -> None:
    """The bound is loose for busy machines; a quiet one takes about 0.4 ms."""
    layout = CacheLayout.create(model.layer_specs)
    count = 256
    batch = Batch(layout, count, 8192, VOCAB, CpuPlatform())
    builder = StepBuilder(batch.table, layout.has_kv, KeySplits())
    ids, blocks = np.zeros(5000, np.int32), np.ones(79, np.int32)
    row = AddedRow(0, "r", ids, len(ids), GREEDY, 0, (), blocks)
    batch.update(StepPlan(0, added=tuple(replace(row, row=i) for i in range(count))))
    plan = plan_of(1, [decode(i, 5000, i, i, LAST_SAMPLED) for i in range(count)])

    def once() -> float:
        started = time.process_time()
        batch.update(plan)
        builder.build(plan, StepShape.of(plan), recorded=False)
        return time.process_time() - started

    assert min(once() for _ in range(50)) < 0.002
