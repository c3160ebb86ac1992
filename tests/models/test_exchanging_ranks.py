"""Two processes with half of a model each, whose kernels exchange results as on two GPUs of one host."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from forkpoint.models.layers import Unsummed
from forkpoint.models.registry import load_model
from forkpoint.ops.exchange import rows_kernel
from forkpoint.ops.exchange.rank_exchange import RankExchange, inbox_words
from forkpoint.ops.ranks import ALONE, Ranks
from forkpoint.ops.unmade import Parts
from tests.checkpoints import write_checkpoint
from tests.driver import Driver, Work
from tests.ops.triton_cases import IS_INTERPRETED, relative_error, triton_ops

SIZE, CPU = 2, torch.device("cpu")
MOST_ROWS = 64  # in an inbox, as containers have little shared memory
# long enough that the outputs of experts are left to the norm
PROMPT = torch.randint(2, 256, (34,), generator=torch.Generator().manual_seed(0)).tolist()


def logits(folder: Path, ranks: Ranks) -> Tensor:
    """Return the logits of a prompt and of one more token, computed by the kernels of GPUs."""
    model = load_model(folder, ops=triton_ops(), ranks=ranks, dtype="bfloat16")
    driver = Driver(model, num_blocks=8, num_slots=4)
    row = driver.row()
    return torch.cat([driver.prefill(row, PROMPT), driver.run([Work(row, [5], decode=True)])[0]])


def run(rank: int, folder: Path, inboxes: list[Tensor]) -> None:
    rows_kernel.MOST_ROWS = MOST_ROWS
    place = (folder / "ranks").as_uri()
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=SIZE)
    exchange = RankExchange(rank, [inbox.data_ptr() for inbox in inboxes], CPU, inboxes)
    torch.save(logits(folder / "model", Ranks(rank, SIZE, exchange=exchange)), folder / f"{rank}.pt")
    dist.barrier()


@pytest.mark.skipif(not IS_INTERPRETED, reason="the two processes share memory of the host")
def test_kernels_exchange_what_two_halves_of_a_model_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_kernel, "MOST_ROWS", MOST_ROWS)
    layers = ["linear_attention", "full_attention"]
    write_checkpoint(
        tmp_path / "model", "qwen3_next_moe", initializer_range=0.3, num_hidden_layers=2, layer_types=layers
    )
    inboxes = [torch.zeros(inbox_words(SIZE), dtype=torch.int64).share_memory_() for _ in range(SIZE)]
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=run, args=(rank, tmp_path, inboxes)) for rank in range(SIZE)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        process.kill()
    want = logits(tmp_path / "model", ALONE)
    for rank in range(SIZE):
        assert relative_error(torch.load(tmp_path / f"{rank}.pt"), want) < 4e-2


def test_what_is_left_to_a_norm_keeps_its_parts() -> None:
    parts = Parts.of(torch.ones(3, 2, 8), torch.ones(3, 2))
    assert Unsummed.of(parts).own is parts
