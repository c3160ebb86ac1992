"""What the runner is told (StepPlan) and what it answers (StepResult). No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from forkpoint.cache.arena import Move as Move
from forkpoint.cache.arena import MoveKind as MoveKind
from forkpoint.cache.layout import NO_SLOT as NO_SLOT
from forkpoint.params import SamplingParams

IntArray: TypeAlias = npt.NDArray[np.int32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

NO_ROW = -1  # of the batch: padding, or a request that waits
LAST_SAMPLED = -1  # as a token: the id that this row sampled last, which may still be on the device
TO_DRAFT = -2  # as a draft: the model's MTP layer is to guess it, like all other drafts of its row


@dataclass(frozen=True, slots=True)
class AddedRow:
    """A request enters the batch at `row`.

    `token_ids` are all ids known so far: the prompt, then outputs of an earlier run of the request.
    `block_ids` are the blocks of the prefix hit; blocks for later tokens come with the steps that compute them.
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


def _no_ints() -> IntArray:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class StepRows:
    """What the rows of one step compute: element `i` of a column, and part `[ptr[i], ptr[i + 1])` of what a pointer
    column divides, are those of one row.

    A row computes its tokens `[start, start + num_tokens)`; a row that decodes has one. The last `num_drafts` of them
    are guesses: the runner confirms those that equal what it samples itself, up to the first that does not, and the
    others are as if they had never been. The state before `start` is read from `read_slot`, the state after the last
    confirmed token is written to `write_slot`. Further states are saved: the one after exactly `save_positions[j]`
    tokens in `save_slots[j]`. These positions are confirmed when the plan is made: in `(start, end]` and before any
    draft, or in `(start of the row's last step, start]` where that step confirmed several tokens. `new_blocks` are
    appended to the row's block table first. `samples`: the logits of the last token, and of the one before each draft,
    are sampled. An `optimistic` row was planned as if every draft in flight were accepted: the runner subtracts the
    rejected ones from its `start`. If the row then starts before a position to be saved, that slot's contents are void.
    """

    row: IntArray  # [N], as all that follow unless said
    start: IntArray
    num_tokens: IntArray
    num_drafts: IntArray
    read_slot: IntArray  # NO_SLOT: the zero state
    write_slot: IntArray
    samples: BoolArray
    tokens: IntArray  # [T], row after row; LAST_SAMPLED and TO_DRAFT where only the runner knows the id
    block_ptr: IntArray  # [N + 1]
    new_blocks: IntArray
    save_ptr: IntArray  # [N + 1]
    save_positions: IntArray
    save_slots: IntArray
    optimistic: BoolArray  # [N]

    def __len__(self) -> int:
        return len(self.row)

    @classmethod
    def empty(cls) -> StepRows:
        none, pointers = _no_ints(), np.zeros(1, np.int32)
        empty = np.empty(0, np.bool_)
        return cls(none, none, none, none, none, none, empty, none, pointers, none, pointers, none, none, empty)


@dataclass(frozen=True, slots=True)
class ReplacedPrefix:
    """The row's block table becomes `block_ids`: it jumps onto a longer cached prefix, or gives up blocks that
    the tree has too. The old table is void from the start of the step; moves may write to its blocks."""

    row: int
    block_ids: IntArray


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The ids that rows under a grammar may sample: `bits[i]`, `[ceil(V / 32)]` int32, are for sampled position
    `rows[i]`; a sampled row has one position, and one more for each of its drafts, in their order. Id `t` is allowed
    if bit `t % 32` of word `t // 32` is 1."""

    rows: IntArray
    bits: IntArray


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass. Order: `removed` rows, `moves`, `added` and `replaced` rows, then `rows`.

    All ids are those after the moves. The first `num_decodes` rows go through the decode kernels, the others through
    the prefill kernels: the bits of what they compute differ.
    """

    step: int
    removed: tuple[int, ...] = ()
    moves: tuple[Move, ...] = ()
    added: tuple[AddedRow, ...] = ()
    replaced: tuple[ReplacedPrefix, ...] = ()
    rows: StepRows = field(default_factory=StepRows.empty)
    num_decodes: int = 0
    num_tokens: int = 0  # of all rows
    sampled_rows: IntArray = field(default_factory=_no_ints)  # those that sample, in the order of `rows`
    masks: TokenMasks | None = None  # None: every row may sample any id


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the token that follows, its rank from 1, and of the top tokens."""

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced.

    `token_ids` were sampled for `plan.sampled_rows`, row after row: `counts[i]` for row `i`, which are the drafts
    that it confirmed and one more, or one for each row without `counts`. `failed_rows` had non-finite logits; their
    tokens are meaningless. `logprobs` has an entry for each token of a row; `prompt_logprobs` lists, by row,
    `(position, entry)` where `entry` speaks of the prompt token at `position`. `num_tokens` entered the model;
    `slot_bytes_copied` counts state bytes moved other than by a state kernel (0 on the copy-free path, compaction
    apart).
    """

    step: int
    token_ids: IntArray
    counts: IntArray | None = None
    failed_rows: tuple[int, ...] = ()
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[tuple[int, TokenLogprobs], ...]] = field(default_factory=dict)
    num_tokens: int = 0
    slot_bytes_copied: int = 0
    replayed: bool = False  # a recorded graph served it


class SubmittedStep(Protocol):
    """A submitted step."""

    def result(self) -> StepResult:
        """Wait for the step. Raises what the forward pass raised."""


class Runner(Protocol):
    """Executes plans in the order of submission; a later plan sees all effects of an earlier one."""

    def submit(self, plan: StepPlan) -> SubmittedStep: ...

    def close(self) -> None: ...
