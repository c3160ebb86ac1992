"""Plans by hand: a small driver around ModelRunner that gives rows blocks and slots and records results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from forkpoint.cache.layout import CacheLayout
from forkpoint.config import SchedulerConfig
from forkpoint.models.decoder import Model
from forkpoint.models.registry import load_model
from forkpoint.ops.select import torch_table
from forkpoint.ops.table import OpTable
from forkpoint.params import SamplingParams
from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.runtime.loaded import Loaded
from forkpoint.runtime.runner import ModelRunner
from forkpoint.sched.plan import LAST_SAMPLED, AddedRow, IntArray, StepResult
from tests.plans import Lags, Row, decode, plan_of

GREEDY = SamplingParams(temperature=0.0)
VOCAB = 96


def ints(*values: int) -> IntArray:
    return np.asarray(values, np.int32)


def tiny_hybrid(
    folder: Path,
    ops: OpTable | None = None,
    num_recurrent: int = 3,
    num_groups: int = 2,
    device: torch.device | None = None,
    mtp: bool = False,
) -> Model:
    """A Qwen3.5 of recurrent layers and one attention layer, two heads a group, fp32, with made-up weights."""
    config = transformers.Qwen3_5TextConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=num_recurrent + 1,
        layer_types=["linear_attention"] * num_recurrent + ["full_attention"],
        num_attention_heads=2 * num_groups,
        num_key_value_heads=num_groups,
        head_dim=16,
        linear_num_key_heads=num_groups,
        linear_num_value_heads=2 * num_groups,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=2048,
        dtype="float32",
        architectures=["Qwen3_5ForCausalLM"],
    )
    config.save_pretrained(folder)
    options = {"device": device or torch.device("cpu"), "mtp": mtp}
    return load_model(folder, ops=ops or torch_table(), load_format="dummy", **options)


def tokens(count: int, seed: int = 0) -> IntArray:
    return np.random.default_rng(seed).integers(0, VOCAB, count).astype(np.int32)


@dataclass(slots=True)
class Driver:
    """Slots and blocks are handed out in order; pages below 100 hold blocks, the others slots."""

    runner: ModelRunner
    step: int = 0
    outputs: dict[int, list[int]] = field(default_factory=dict)
    results: list[StepResult] = field(default_factory=list)
    lags: Lags = field(default_factory=Lags)
    _next_block: int = 0
    _next_slot: int = 0
    _lengths: dict[int, int] = field(default_factory=dict)  # tokens that a row's blocks hold

    @classmethod
    def create(
        cls,
        model: Model,
        ops: OpTable | None = None,
        force_state_copy: bool = False,
        **options: Any,
    ) -> Driver:
        platform, ops = options.pop("platform", CpuPlatform()), ops or torch_table()
        sizes = platform.traits(platform.device).kernel_block_sizes
        layout = CacheLayout.create(model.layer_specs, kernel_block_sizes=sizes)
        sched = SchedulerConfig(max_num_seqs=8)
        ops = replace(ops, redirects=frozenset()) if force_state_copy else ops
        loaded = Loaded(model, ops, layout, sched, platform, **options)
        runner = ModelRunner(loaded, 200)
        runner.arena.data.fill_(0xFF)  # NaN in every dtype: what nobody wrote must not be read
        lags = Lags(loaded.state_write_interval)
        return cls(runner, lags=lags, _next_block=layout.blocks_per_page, _next_slot=100 * layout.slots_per_page)

    @property
    def last(self) -> StepResult:
        return self.results[-1]

    def slot(self) -> int:
        self._next_slot += 1
        return self._next_slot - 1

    def blocks(self, count: int) -> IntArray:
        first = self._next_block
        self._next_block += count
        return np.arange(first, first + count, dtype=np.int32)

    def chunk(
        self,
        row: int,
        start: int,
        end: int,
        read_slot: int,
        write_slot: int,
        saves: Sequence[tuple[int, int]] = (),
        samples: bool = False,
    ) -> Row:
        """Known tokens through the prefill kernels; `run` fills in which."""
        return Row(row, start, range(start, end), read_slot, write_slot, self._grow(row, start, end), saves, samples)

    def decode(self, row: int, start: int, read_slot: int, write_slot: int, token: int = LAST_SAMPLED) -> Row:
        (block,) = [*self._grow(row, start, start + 1).tolist()] or [-1]
        return decode(row, start, read_slot, write_slot, token, block)

    def _grow(self, row: int, start: int, end: int) -> IntArray:
        """New blocks of a row."""
        held = self._lengths.get(row, start)
        self._lengths[row] = max(end, held)
        return self.blocks(max(0, -(-end // 64) - -(-held // 64)))

    def added(self, row: int, ids: IntArray, params: SamplingParams = GREEDY, **changes: object) -> AddedRow:
        base = AddedRow(row, f"r{row}", ids, len(ids), params, 0, (), ints())
        return replace(base, **changes)  # type: ignore[arg-type]

    def run(self, rows: Sequence[Row] = (), added: Sequence[AddedRow] = (), **changes: object) -> StepResult:
        known = {**{row: item.token_ids for row, item in self.runner.batch.rows.items()}}
        known |= {item.row: item.token_ids for item in added}
        rows = [row if row.decodes else replace(row, tokens=known[row.row][row.start : row.end]) for row in rows]
        plan = plan_of(self.step, [self.lags.of(row) for row in rows], added=tuple(added), **changes)
        self.step += 1
        result = self.runner.submit(plan).result()
        self.results.append(result)
        for row, token in zip(plan.sampled_rows.tolist(), result.token_ids.tolist(), strict=True):
            self.outputs.setdefault(row, []).append(token)
        return result
