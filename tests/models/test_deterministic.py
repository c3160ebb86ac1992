"""The deterministic table: a row's bits do not depend on the batch, nor on chunks cut on the 64-token grid."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from forkpoint.models.decoder import Model
from forkpoint.models.registry import load_model
from forkpoint.ops.select import torch_table
from tests.checkpoints import write_checkpoint
from tests.driver import Driver, Work

CASES = [("qwen3_next", 2), ("qwen3_5_moe", 1), ("olmo_hybrid", 1), ("qwen3", 1)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}-threads")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    family, num_threads = request.param
    path = tmp_path_factory.mktemp(family)
    write_checkpoint(path, family, hidden_size=80)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    yield path
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, folder: Path) -> Model:
    return load_model(folder, ops=torch_table(deterministic=True), dtype=request.param)


def tokens(seed: int, count: int) -> list[int]:
    found: list[int] = torch.randint(2, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return found


@pytest.mark.parametrize("cuts", [[64], [64, 128, 192, 256]])
def test_cuts_on_the_grid(model: Model, cuts: list[int]) -> None:
    driver, ids = Driver(model), tokens(1, 269)
    want = driver.prefill(driver.row(), ids)
    assert torch.equal(driver.prefill(driver.row(), ids, cuts), want)


def test_prefill_beside_neighbours(model: Model) -> None:
    driver, ids = Driver(model), tokens(2, 200)
    want = driver.prefill(driver.row(), ids)
    for seed in range(3):
        others = [driver.row() for _ in range(3)]
        for n, other in enumerate(others):
            driver.prefill(other, tokens(10 * seed + n, 3 + 40 * n))
        row = driver.row()
        got = []
        for start, end in ((0, 128), (128, 200)):
            batch = [Work(other, [7 + seed], decode=True) for other in others[: 1 + seed]]
            batch.append(Work(driver.row(), tokens(seed, 11 + seed)))
            batch.insert(1 + seed + seed % 2, Work(row, ids[start:end]))
            out = driver.run(batch)
            got.append(next(o for o, w in zip(out, batch, strict=True) if w.row is row))
        assert torch.equal(torch.cat(got), want)


def test_decode_beside_neighbours(model: Model) -> None:
    driver, lengths = Driver(model, num_slots=40), [1, 5, 63, 64, 65, 100, 130]
    prompts = [tokens(n, length) for n, length in enumerate(lengths)]
    steps = tokens(50, 4)
    want = []
    for prompt in prompts:
        row = driver.row()
        driver.prefill(row, prompt)
        want.append(torch.cat([driver.run([Work(row, [t], decode=True)])[0] for t in steps]))
    rows = [driver.row() for _ in prompts]
    for row, prompt in zip(rows, prompts, strict=True):
        driver.prefill(row, prompt)
    got: list[list[torch.Tensor]] = [[] for _ in rows]
    for step, t in enumerate(steps):
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(step)).tolist()
        batch = [Work(rows[n], [t], decode=True) for n in order]
        if step % 2:
            batch.append(Work(driver.row(), tokens(step, 70)))
        for n, out in zip(order, driver.run(batch), strict=False):
            got[n].append(out)
    for n in range(len(rows)):
        assert torch.equal(torch.cat(got[n]), want[n])


def test_resuming_from_a_saved_state(model: Model) -> None:
    driver, ids = Driver(model), tokens(3, 210)
    slot = driver.slot()
    row = driver.row()
    want = driver.run([Work(row, ids, saves=[(128, slot)])])[0]
    fork = driver.fork(row, slot, 128)
    assert torch.equal(driver.prefill(fork, ids[128:]), want[128:])
