"""Plans by hand on a small hybrid model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from forkpoint.models.decoder import Model
from forkpoint.models.registry import load_model
from forkpoint.ops.select import torch_table
from forkpoint.params import SamplingParams
from forkpoint.sched.plan import AddedRow, Move, MoveKind, TokenLogprobs
from tests.checkpoints import write_checkpoint
from tests.runtime.driver import Driver, ints, tiny_hybrid, tokens

TOP = SamplingParams(temperature=0.0, logprobs=20)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny_hybrid(tmp_path_factory.mktemp("model"))


def one_chunk(model: Model, prompt: np.ndarray, num_outputs: int = 1) -> tuple[list[int], TokenLogprobs]:
    """Outputs of a run without cache, and the log-probabilities of the last."""
    driver = Driver.create(model)
    slot = driver.slot()
    chunk = driver.chunk(0, 0, len(prompt), -1, slot, samples=True)
    driver.run([chunk], added=[driver.added(0, prompt, TOP)])
    for i in range(num_outputs - 1):
        driver.run([driver.decode(0, len(prompt) + i, slot, slot)])
    return driver.outputs[0], driver.last.logprobs[0][0]


def assert_same(got: TokenLogprobs, expected: TokenLogprobs) -> None:
    assert got.token_id == expected.token_id
    assert got.top_ids[:3] == expected.top_ids[:3]
    np.testing.assert_allclose(got.top_logprobs, expected.top_logprobs, atol=1e-4)


@pytest.mark.parametrize("force", [False, True])
def test_chunks_with_saves_then_a_continuation_from_a_save(model: Model, force: bool) -> None:
    prompt = tokens(200)
    expected, logprobs = one_chunk(model, prompt, 4)
    driver = Driver.create(model, force_state_copy=force)
    running, at_64, at_128 = driver.slot(), driver.slot(), driver.slot()
    saves = [(64, at_64), (128, at_128)]
    first = driver.chunk(0, 0, 192, -1, running, saves)
    driver.run([first], added=[driver.added(0, prompt, TOP)])
    driver.run([driver.chunk(0, 192, 200, running, running, samples=True)])
    for i in range(3):
        driver.run([driver.decode(0, 200 + i, running, running)])
    assert driver.outputs[0] == expected
    assert_same(driver.last.logprobs[0][0], logprobs)
    before = [pool[at_128].clone() for *_, pool in driver.runner.arena.states]

    own = driver.slot()
    again = driver.added(1, prompt, TOP, block_ids=first.new_blocks[:2])
    driver.run([driver.chunk(1, 128, 200, at_128, own, samples=True)], added=[again])
    copied = driver.last.slot_bytes_copied
    assert (copied == driver.runner.arena.layout.slot_bytes) if force else (copied == 0)
    assert driver.last.num_tokens == 72
    for i in range(3):
        driver.run([driver.decode(1, 200 + i, own, own)])
    assert driver.outputs[1] == expected
    assert_same(driver.last.logprobs[1][0], logprobs)
    after = [pool[at_128] for *_, pool in driver.runner.arena.states]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_a_zeroed_state_would_be_noticed(model: Model) -> None:
    prompt = tokens(200)
    _, logprobs = one_chunk(model, prompt)
    driver = Driver.create(model)
    running, saved = driver.slot(), driver.slot()
    first = driver.chunk(0, 0, 200, -1, running, [(192, saved)], samples=True)
    driver.run([first], added=[driver.added(0, prompt, TOP)])
    again = driver.added(1, prompt, TOP, block_ids=first.new_blocks[:3])
    driver.run([driver.chunk(1, 192, 200, -1, driver.slot(), samples=True)], added=[again])
    off = abs(np.subtract(driver.last.logprobs[1][0].top_logprobs[:5], logprobs.top_logprobs[:5])).max()
    assert off > 0.05


@pytest.mark.parametrize("force", [False, True])
def test_decode_rows_and_chunks_share_steps(model: Model, force: bool) -> None:
    prompts = [tokens(70, 1), tokens(33, 2), tokens(130, 3)]
    expected = [one_chunk(model, prompt, 6)[0] for prompt in prompts]
    driver = Driver.create(model, force_state_copy=force)
    slots = [driver.slot() for _ in prompts]
    lengths = [len(prompt) for prompt in prompts]
    added: list[AddedRow] = [driver.added(row, prompt) for row, prompt in enumerate(prompts)]
    driver.run([driver.chunk(0, 0, 70, -1, slots[0], samples=True)], added=added[:1])
    first = driver.chunk(2, 0, 64, -1, slots[2])
    driver.run(
        [driver.chunk(1, 0, 33, -1, slots[1], samples=True), first, driver.decode(0, 70, slots[0], slots[0])],
        added[1:],
    )
    rows = [driver.decode(1, 33, slots[1], slots[1]), driver.decode(0, 71, slots[0], slots[0])]
    driver.run([driver.chunk(2, 64, 130, slots[2], slots[2], samples=True), *rows])
    while any(len(driver.outputs[row]) < 6 for row in range(3)):
        wanted = [row for row in (2, 0, 1) if len(driver.outputs[row]) < 6]
        starts = {row: lengths[row] + len(driver.outputs[row]) - 1 for row in wanted}
        driver.run([driver.decode(row, starts[row], slots[row], slots[row]) for row in wanted])
    assert [driver.outputs[row] for row in range(3)] == expected


@pytest.mark.parametrize("force", [False, True])
def test_decode_switches_slots_and_leaves_the_old_one(model: Model, force: bool) -> None:
    prompt = tokens(126)
    expected, _ = one_chunk(model, prompt, 6)
    driver = Driver.create(model, force_state_copy=force)
    old, new = driver.slot(), driver.slot()
    first = driver.chunk(0, 0, 126, -1, old, samples=True)
    driver.run([first], added=[driver.added(0, prompt, TOP)])
    for i in range(2):
        driver.run([driver.decode(0, 126 + i, old, old)])
    kept = [pool[old].clone() for *_, pool in driver.runner.arena.states]
    driver.run([driver.decode(0, 128, old, new)])
    assert (driver.last.slot_bytes_copied > 0) == force
    for i in range(2):
        driver.run([driver.decode(0, 129 + i, new, new)])
        assert driver.last.slot_bytes_copied == 0
    assert driver.outputs[0] == expected
    assert all(torch.equal(a, pool[old]) for a, (*_, pool) in zip(kept, driver.runner.arena.states, strict=True))
    ids = np.concatenate([prompt, ints(*expected[:4])])
    branch = driver.added(1, ids, TOP, block_ids=first.new_blocks[:2])
    driver.run([driver.chunk(1, 128, 130, old, driver.slot(), samples=True)], added=[branch])
    assert driver.outputs[1] == expected[4:5]


def test_moves_carry_contents(model: Model) -> None:
    prompt = tokens(150)
    expected, _ = one_chunk(model, prompt, 4)
    driver = Driver.create(model)
    slot = driver.slot()
    first = driver.chunk(0, 0, 150, -1, slot, samples=True)
    driver.run([first], added=[driver.added(0, prompt)])
    block, far_slot = int(first.new_blocks[1]), driver.slot() + 50
    target = block + 60
    arena = driver.runner.arena
    moves = (Move(MoveKind.BLOCK, block, target), Move(MoveKind.SLOT, slot, far_slot))
    driver.run([driver.decode(0, 150, far_slot, far_slot)], moves=moves)
    for view in arena.block_views:
        view[block] = torch.nan
    for i in range(2):
        driver.run([driver.decode(0, 151 + i, far_slot, far_slot)])
    assert driver.outputs[0] == expected


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "olmo_hybrid"])
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, family: str, force: bool) -> None:
    oracle = write_checkpoint(tmp_path, family)
    driver = Driver.create(load_model(tmp_path, ops=torch_table()), force_state_copy=force)
    prompts = [tokens(130, 1), tokens(65, 2), tokens(1, 3)]
    slots = [driver.slot() for _ in prompts]
    added = [driver.added(row, prompt) for row, prompt in enumerate(prompts)]
    first = [driver.chunk(row, 0, len(p), -1, slots[row], samples=True) for row, p in enumerate(prompts) if row]
    driver.run([driver.chunk(0, 0, 64, -1, slots[0]), *first], added=added)
    driver.run([driver.chunk(0, 64, 130, slots[0], slots[0], samples=True)])
    for step in range(23):
        driver.run([driver.decode(row, len(prompts[row]) + step, slots[row], slots[row]) for row in (2, 0, 1)])
    distinct = set()
    for row, prompt in enumerate(prompts):
        ids = torch.tensor([[*prompt.tolist(), *driver.outputs[row]]])
        with torch.no_grad():
            expected = oracle(ids).logits[0, len(prompt) - 1 : -1].argmax(dim=-1).tolist()
        assert driver.outputs[row] == expected
        distinct |= set(expected)
    assert len(distinct) >= 20
