"""A request inside an emulated engine, and the interface of an emulated cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from forkpoint.cache.hashing import HashChain, TokenIds
from forkpoint.sim.tokens import TokenSpans
from forkpoint.sim.trace import TraceRequest

GRID = 64  # all that emulations cut prompts into is a multiple of it


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's state, written by EmulatedScheduler.

    `chain` names all its tokens, including those still to be generated. While it decodes, step number `t`
    computes position `decode_base + t`.
    """

    request: TraceRequest
    tokens: TokenIds
    chain: HashChain
    order: int
    num_prompt_tokens: int
    num_tokens: int  # prompt and all outputs
    num_computed: int = 0
    prefill_end: int = 0
    decode_base: int | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    kv_num_tokens: int = 0
    junction: int = 0  # where keys and values alone reached; 0: no further than the hit
    epoch: int = 0  # rises when the sequence leaves the batch: events of an earlier epoch are void

    @classmethod
    def of(cls, request: TraceRequest, order: int) -> Sequence:
        tokens = TokenSpans.join([request.prompt, request.output]).array()
        chain = HashChain("")
        chain.extend(tokens)
        prompt = request.prompt.num_tokens
        return cls(request, tokens, chain, order, prompt, len(tokens), prefill_end=prompt)

    @property
    def last_computed(self) -> int:
        """The tokens computed when the last output is sampled."""
        return self.num_tokens - 1


@dataclass(frozen=True, slots=True)
class EmulatedHit:
    """A hit. `num_tokens` are reused. Keys and values alone reach `kv_num_tokens`."""

    num_tokens: int
    kv_num_tokens: int


@dataclass(frozen=True, slots=True)
class EmulatedChunk:
    """The effects of a planned chunk besides computation: states stored, and bytes copied before or after the step."""

    num_saves: int = 0
    copied_bytes: int = 0


@dataclass(slots=True)
class EmulatedCounts:
    """Counts, written by an emulated cache."""

    states_evicted: int = 0
    blocks_evicted: int = 0


class EmulatedCache(Protocol):
    """The rules of one engine: what is found, where chunks end, what is kept and what is evicted."""

    counts: EmulatedCounts
    max_num_seqs: int

    def can_ever_fit(self, sequence: Sequence) -> bool: ...

    def lookup(self, sequence: Sequence, num_known_tokens: int) -> EmulatedHit:
        """Return what a request would reuse now. Changes only what a lookup in that engine changes."""

    def start(self, sequence: Sequence, hit: EmulatedHit, end: int) -> bool:
        """Take the hit, and room for a first chunk that ends at `end`. Return False, and hold nothing, if there is no
        room."""

    def chunk_end(self, sequence: Sequence, start: int, end: int, budget: int) -> int:
        """Return where a chunk that could end at `end` ends; `start` if it has to wait."""

    def grow(self, sequence: Sequence, end: int) -> bool:
        """Take room up to `end` tokens for a running sequence. Return False, and keep what it held, if there is
        none."""

    def chunk_done(self, sequence: Sequence, start: int, end: int) -> EmulatedChunk:
        """Note that a prefill chunk is computed."""

    def next_event(self, position: int) -> int:
        """Return the first position from `position` on at which `decode_event` must be called before decoding."""

    def decode_event(self, sequence: Sequence, position: int) -> EmulatedChunk | None:
        """Prepare to decode the token at `position`. Return None if there is no room."""

    def end_step(self, num_decodes: int) -> bool:
        """Note that a step with this many decodes was planned. Return False if there is no room for their tokens."""

    def free(self, sequence: Sequence, num_computed: int, finished: bool) -> None:
        """Release the sequence, which leaves the batch after this many computed tokens."""


@dataclass(slots=True)
class StepPlanned:
    """A step under construction in EmulatedScheduler."""

    budget: int
    first_tokens: list[Sequence] = field(default_factory=list)
    prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    num_segments: int = 0
    num_saves: int = 0
    copied_bytes: int = 0

    def add_chunk(self, start: int, end: int, chunk: EmulatedChunk) -> None:
        self.budget -= end - start
        self.prefill_tokens += end - start
        self.prefill_pairs += (end - start) * (start + end) / 2
        self.num_segments += 1
        self.num_saves += chunk.num_saves
        self.copied_bytes += chunk.copied_bytes
