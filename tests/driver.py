"""A minimal runner for tests of models: it owns pools and block tables, and runs hand-made batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.indices import attention_index, segment_index
from forkpoint.cache.layer_spec import KVSpec, LayerSpec
from forkpoint.cache.layout import CacheLayout
from forkpoint.models.context import ForwardContext, LayerCache
from forkpoint.models.decoder import Model
from forkpoint.ops.metadata import DecodeIndex, SegmentIndex

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BLOCK = 64
CPU = torch.device("cpu")


def ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


@dataclass
class Row:
    """One sequence. `read_slot` -1 is the zero state."""

    blocks: list[int]
    read_slot: int
    slot: int
    num_computed: int = 0


@dataclass
class Work:
    """What a row does in one pass. `decode` picks the recurrent kernels; `saves` lists (position, slot)."""

    row: Row
    tokens: list[int]
    decode: bool = False
    saves: list[tuple[int, int]] = field(default_factory=list)
    write_slot: int | None = None  # None: the row's own slot


class Driver:
    """Pools with gaps between slots and NaN everywhere, so that a stray read shows."""

    def __init__(self, model: Model, num_blocks: int = 64, num_slots: int = 24, device: torch.device = CPU) -> None:
        self.model, self.device = model, device
        self.layout = CacheLayout.create(model.layer_specs)
        self.caches = tuple(_caches(layer, num_blocks, num_slots, device) for layer in model.layer_specs)
        # Handed out from the back and every other one, so that a row's blocks are not neighbours.
        self._blocks = list(range(0, num_blocks, 2)) + list(range(1, num_blocks, 2))
        self._slots = list(range(num_slots))

    def row(self) -> Row:
        """A new, empty sequence."""
        return Row([], -1, self._slots.pop())

    def fork(self, row: Row, slot: int, num_tokens: int) -> Row:
        """A new sequence that shares the first `num_tokens` (a multiple of 64) of `row`, from the state in `slot`."""
        return Row(row.blocks[: num_tokens // BLOCK], slot, self._slots.pop(), num_tokens)

    def slot(self) -> int:
        """A free slot."""
        return self._slots.pop()

    def zero_state(self, row: Row) -> None:
        """Forget the recurrent state of a sequence."""
        row.read_slot = -1

    def context(self, work: Sequence[Work]) -> ForwardContext:
        """Index tensors for one pass; decode rows must come first."""
        num_decodes = sum(w.decode for w in work)
        assert all(w.decode for w in work[:num_decodes])
        positions: list[int] = []
        slots: list[int] = []
        for w in work:
            end = w.row.num_computed + len(w.tokens)
            while len(w.row.blocks) * BLOCK < end:
                w.row.blocks.append(self._blocks.pop())
            own = range(w.row.num_computed, end)
            positions += own
            slots += [w.row.blocks[p // BLOCK] * BLOCK + p % BLOCK for p in own]
        lens = [len(w.tokens) for w in work]
        kv_lens = [w.row.num_computed + n for w, n in zip(work, lens, strict=True)]
        width = max(len(w.row.blocks) for w in work)
        table = ints([b for w in work for b in w.row.blocks + [0] * (width - len(w.row.blocks))]).to(self.device)
        mapping, at = (torch.tensor(values, device=self.device) for values in (slots, positions))
        attention = attention_index(lens, kv_lens, table.view(len(work), width), mapping, num_decodes)
        names = self.layout.state_operators
        decode = dict.fromkeys(names, _decode_index(work[:num_decodes], self.device))
        prefill = dict.fromkeys(names, _segment_index(work[num_decodes:], self.device))
        return ForwardContext(at, num_decodes, attention, decode, prefill, self.caches)

    @torch.no_grad()
    def run(self, work: Sequence[Work]) -> list[Tensor]:
        """One forward pass; the fp32 logits `[tokens, vocab]` of each row."""
        tokens = torch.tensor([t for w in work for t in w.tokens], device=self.device)
        logits = self.model.logits(self.model.forward(tokens, self.context(work))).float().cpu()
        for w in work:
            w.row.num_computed += len(w.tokens)
            w.row.read_slot = _write_slot(w)
        return list(logits.split([len(w.tokens) for w in work]))

    def prefill(self, row: Row, tokens: list[int], cuts: Sequence[int] = ()) -> Tensor:
        """Logits of all tokens of one sequence, cut at `cuts` (counted from the first of `tokens`)."""
        ends = [*cuts, len(tokens)]
        starts = [0, *cuts]
        return torch.cat([self.run([Work(row, tokens[a:b])])[0] for a, b in zip(starts, ends, strict=True)])


def _caches(layer: LayerSpec, num_blocks: int, num_slots: int, device: torch.device) -> LayerCache:
    pools = {}
    for spec in layer:
        for tensor in spec.tensors:
            if isinstance(spec, KVSpec):
                heads, dim = tensor.shape
                pools[tensor.name] = _pool(num_blocks, (heads, BLOCK, dim), tensor.dtype, device)
            else:
                pools[tensor.name] = _pool(num_slots, tensor.shape, tensor.dtype, device)
    return pools


def _pool(count: int, shape: tuple[int, ...], dtype: str, device: torch.device) -> Tensor:
    size = int(torch.tensor(shape).prod())
    arena = torch.full((count, size + 48), float("nan"), dtype=DTYPES[dtype], device=device)
    return arena[:, 16 : 16 + size].view(count, *shape)


def _write_slot(work: Work) -> int:
    return work.row.slot if work.write_slot is None else work.write_slot


def _decode_index(work: Sequence[Work], device: torch.device) -> DecodeIndex:
    src, dst = [w.row.read_slot for w in work], [_write_slot(w) for w in work]
    return DecodeIndex(ints(src).to(device), ints(dst).to(device))


def _segment_index(work: Sequence[Work], device: torch.device) -> SegmentIndex:
    return segment_index(
        [len(w.tokens) for w in work],
        [w.row.read_slot for w in work],
        [_write_slot(w) for w in work],
        [list(w.saves) for w in work],
        device,
    )
