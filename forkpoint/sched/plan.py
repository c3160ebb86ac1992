"""The plan that a runner is sent (StepPlan) and its answer (StepResult). This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from forkpoint.cache.arena import PEER_ROUTES as PEER_ROUTES
from forkpoint.cache.arena import Move as Move
from forkpoint.cache.arena import MoveKind as MoveKind
from forkpoint.cache.arena import MoveRoute as MoveRoute
from forkpoint.cache.layout import NO_SLOT as NO_SLOT
from forkpoint.cache.peer_offers import Fetch as Fetch
from forkpoint.cache.peer_offers import FetchReport as FetchReport
from forkpoint.cache.tier_entries import TierReport as TierReport
from forkpoint.images import ImageSpan
from forkpoint.params import SamplingParams

IntArray: TypeAlias = npt.NDArray[np.int32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

NO_ROW = -1  # no row of the batch: padding, or a request that waits
LAST_SAMPLED = -1  # as a token id: the id that this row sampled last, which may still be on the device
TO_DRAFT = -2  # as a draft: the model's MTP layer guesses it, and all other drafts of the row


@dataclass(frozen=True, slots=True)
class AddedRow:
    """A request enters the batch at `row`.

    `token_ids` are the prompt and the outputs of an earlier run of the request. `block_ids` are the blocks of the
    prefix hit; blocks for later tokens come with the steps that compute them. They are those of the first of
    `layout.groups`; `more_block_ids` are those of the other groups: as many each, and 0 for blocks behind the window.
    """

    row: int
    request_id: str
    token_ids: IntArray
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    stop_token_ids: tuple[int, ...]  # ids that `min_tokens` forbids, the end-of-sequence ids included
    block_ids: IntArray
    wants_prompt_logprobs: bool = False
    images: tuple[ImageSpan, ...] = ()  # images of the prompt
    more_block_ids: tuple[IntArray, ...] = ()


def _no_ints() -> IntArray:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step, in columns.

    Element `i` of a column belongs to row `i`, and so does the part `[ptr[i], ptr[i + 1])` of a column that a pointer
    column divides. First the row's block table gets its `new_blocks`, and its tables of further groups `more_blocks`,
    which the same pointers divide.

    The row computes its tokens `[start, start + num_tokens)`. The last `num_drafts` of them are drafts: the runner
    accepts those that equal what it samples itself, up to the first that does not, and rejects the rest. A decode row
    has one other token. Rows with `samples` set sample from the logits of their last token and of the token before each
    draft.

    The row reads the state before `start` from `read_slot`, and writes the state after its last accepted token to
    `write_slot`. A runner may write that state in a later step and keep records of the tokens until then. States that
    are written every few tokens have `written` tokens of the row. Other states lack the last `pending` ones. The
    row also saves the state after exactly `save_positions[j]` tokens in `save_slots[j]`. The position lies in
    `(start, end]` before any draft, or in `(start of the row's last step, start]` if that step had drafts.

    An `optimistic` row was planned as if every draft in flight were accepted: the runner subtracts the rejected ones
    from its `start` and `pending`. If the row then starts before a position to be saved, that slot's contents are void.
    """

    row: IntArray  # [N], like the next columns
    start: IntArray
    num_tokens: IntArray
    num_drafts: IntArray
    read_slot: IntArray  # NO_SLOT: the zero state
    write_slot: IntArray
    written: IntArray
    pending: IntArray  # the tokens of the row's last step if it had drafts; otherwise 0
    samples: BoolArray
    tokens: IntArray  # [T], row after row; LAST_SAMPLED and TO_DRAFT if only the runner knows the id
    block_ptr: IntArray  # [N + 1]
    new_blocks: IntArray
    save_ptr: IntArray  # [N + 1]
    save_positions: IntArray
    save_slots: IntArray
    optimistic: BoolArray  # [N]
    more_blocks: tuple[IntArray, ...] = ()

    def __len__(self) -> int:
        return len(self.row)

    @classmethod
    def empty(cls) -> StepRows:
        none, pointers = _no_ints(), np.zeros(1, np.int32)
        empty = np.empty(0, np.bool_)
        columns = (none,) * 8
        return cls(*columns, empty, none, pointers, none, pointers, none, none, empty)


@dataclass(frozen=True, slots=True)
class StateFlush:
    """A removed row leaves a state in `slot` that others may resume from: the runner folds the row's records into it.

    The row had `num_tokens` tokens. `written` and `pending` say how far the state lags, as in StepRows.
    """

    row: int
    slot: int  # its id before the plan's moves
    num_tokens: int
    written: int
    pending: int


@dataclass(frozen=True, slots=True)
class ReplacedPrefix:
    """The row's block table becomes `block_ids`.

    The row jumped onto a longer cached prefix, or gave up blocks that the tree has too. Its old table is void from the
    start of the step: moves may write to those blocks.
    """

    row: int
    block_ids: IntArray
    more_block_ids: tuple[IntArray, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The ids that rows under a grammar may sample.

    `bits[i]`, `[ceil(V / 32)]` int32, are for the sampled position `rows[i]`. A sampled row has one position and one
    more for each of its drafts, in their order. Id `t` is allowed if bit `t % 32` of word `t // 32` is 1.
    """

    rows: IntArray
    bits: IntArray


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass, and what the runner does before it.

    The effect is that of `flushes`, `removed` rows, `dropped_images`, `moves`, `added` and `replaced` rows, and `rows`,
    in this order. `fetches` begin with the plan and end later.
    `moves` run one after the other: compaction and copies from and to the tiers depend on their order. All other block
    and slot ids are those after the moves. A plan without rows has copies alone. The first `num_decodes` rows go
    through the decode kernels, the others through the prefill kernels, whose results differ in their last bits.
    """

    step: int
    removed: tuple[int, ...] = ()
    flushes: tuple[StateFlush, ...] = ()  # states that removed rows leave
    dropped_images: tuple[bytes, ...] = ()  # digests whose embeddings the runner keeps no longer
    moves: tuple[Move, ...] = ()
    added: tuple[AddedRow, ...] = ()
    replaced: tuple[ReplacedPrefix, ...] = ()
    rows: StepRows = field(default_factory=StepRows.empty)
    num_decodes: int = 0
    num_tokens: int = 0  # tokens of all rows
    sampled_rows: IntArray = field(default_factory=_no_ints)  # the rows that sample, in the order of `rows`
    masks: TokenMasks | None = None  # None: every row may sample any id
    waits_for_tiers: bool = False  # whether the result of a plan without work waits briefly for tiers or fetches
    fetches: tuple[Fetch, ...] = ()  # orders to get prompts from other engines

    def prefill_work(self) -> tuple[int, float]:
        """Return the tokens of the rows in prefill, and their pairs of a query and a key."""
        start, lens = self.rows.start[self.num_decodes :].astype(np.int64), self.rows.num_tokens[self.num_decodes :]
        return int(lens.sum()), float((lens * (2 * start + lens)).sum() / 2)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the next token, with its rank from 1, and of the likeliest tokens."""

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step.

    `token_ids` were sampled for `plan.sampled_rows`, row after row: `counts[i]` tokens for row `i`, which are its
    accepted drafts and one more, or one token for each row without `counts`. The rows `failed_rows` had non-finite
    logits, and their tokens are meaningless. `logprobs` has an entry for each token of a row that wants them.
    `prompt_logprobs` lists `(position, entry)` by row: the entry is about the prompt token at that position.
    `num_tokens` entered the model. `slot_bytes_copied` counts bytes of states that were moved other than by a state
    operator: 0 on the copy-free path, compaction apart.
    """

    step: int
    token_ids: IntArray
    counts: IntArray | None = None
    failed_rows: tuple[int, ...] = ()
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[tuple[int, TokenLogprobs], ...]] = field(default_factory=dict)
    num_tokens: int = 0
    slot_bytes_copied: int = 0
    replayed: bool = False  # whether a recorded graph ran the step
    tier_report: TierReport | None = None  # what ended since the last result
    fetch_report: FetchReport | None = None


class SubmittedStep(Protocol):
    """A step that the runner was given, whose result may be still to come."""

    def result(self) -> StepResult:
        """Wait for the step and return its result. Raises what the forward pass raised."""


class Runner(Protocol):
    """Executes plans in the order of submission; a later plan sees all effects of an earlier one."""

    def submit(self, plan: StepPlan) -> SubmittedStep: ...

    def close(self) -> None: ...
