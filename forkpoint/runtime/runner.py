"""ModelRunner: executes StepPlans on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from forkpoint.cache.layout import CacheLayout
from forkpoint.config import SchedulerConfig
from forkpoint.errors import StepFailedError
from forkpoint.models.attention import AttentionConfig
from forkpoint.models.context import ImageInputs
from forkpoint.models.decoder import Model
from forkpoint.ops.metadata import KeySplits
from forkpoint.ops.rows.columns import NOT_FINITE, IdColumns, WindowColumns
from forkpoint.ops.table import OpTable
from forkpoint.platforms.packing import Arrays, Tensors
from forkpoint.platforms.platform import Platform
from forkpoint.platforms.table import traits_of
from forkpoint.runtime.batch import Batch
from forkpoint.runtime.buffers import ArenaBuffer
from forkpoint.runtime.draft_graphs import DraftGraphs
from forkpoint.runtime.encoded_images import EncodedImages
from forkpoint.runtime.graphs import Graphs, ShapeTable
from forkpoint.runtime.logprobs import PROMPT_TILE_ROWS, Scores, score
from forkpoint.runtime.records import TokenRecords
from forkpoint.runtime.row_images import RowImages
from forkpoint.runtime.row_sampling import RowSampling
from forkpoint.runtime.sampler import Late, Sampled, Sampler
from forkpoint.runtime.state_operators import StateOperators
from forkpoint.runtime.step_inputs import HostLens, StepBuilder, StepShape
from forkpoint.runtime.submitted import FailedStep, RunningStep, Verified
from forkpoint.runtime.windows import NO_DRAFT, Windows
from forkpoint.sched.plan import TO_DRAFT, AddedRow, IntArray, StepPlan, StepResult, StepRows, SubmittedStep

MOST_QUERIES = 32  # query heads of one key head, over all tokens of a row for which keys are read together

DISK_WAIT_S = 0.01  # of a step without work for news of a tier; requests that arrive meanwhile wait as long


class StepOutputs(NamedTuple):
    """The outputs for the sampled rows, padded.

    `own` are this rank's logits `[S, its ids]`. `likeliest` are the likeliest ids `[S]` int64 and whether their logits
    are finite `[S]` bool; None if no row wants them.
    """

    own: Tensor
    likeliest: tuple[Tensor, Tensor] | None


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model on a device, before its arena is allocated. Graphs are recorded for `shapes`."""

    model: Model
    ops: OpTable
    layout: CacheLayout
    sched: SchedulerConfig
    platform: Platform
    shapes: Sequence[StepShape] = ()
    max_num_drafts: int = 0
    state_write_interval: int = 1


class ModelRunner:
    """Implements `sched.plan.Runner` on one device. Owns the arena's bytes and the batch.

    A plan runs in this order: removed rows, dropped embeddings, moves, added and replaced rows, state copies, forward
    pass, sampling. `submit` issues a step and does not wait for it. On a device with graphs, a step that fits one of
    the `shapes` replays a graph; `record_graphs` makes the graphs. For state operators that `ops.redirects` does not
    name, states are copied first. If a step raises, its rows and blocks are updated all the same. Steps that are
    submitted before `result()` has raised that error are not run and raise StepFailedError.
    """

    def __init__(
        self, loaded: Loaded, num_pages: int, max_model_len: int | None = None, num_host_pages: int = 0
    ) -> None:
        """Allocate arena and batch; a host tier too with `num_host_pages`.

        `num_pages` includes page 0. Sequences have at most `max_model_len` tokens; by default as many as the model
        takes.
        """
        model, ops, layout, platform = loaded.model, loaded.ops, loaded.layout, loaded.platform
        num_rows, most = loaded.sched.max_num_seqs, loaded.max_num_drafts
        shapes = loaded.shapes if platform.has_graphs else ()
        self.platform, self._model, self._ops = platform, model, ops
        self.arena = ArenaBuffer(layout, num_pages, platform, num_host_pages)
        longest = max_model_len or model.config.max_model_len
        images: RowImages | None = None
        self._encoded: EncodedImages | None = None
        if model.vision is not None:
            images = RowImages(num_rows, has_axes=bool(model.vision.config.axes))
            self._encoded = EncodedImages(model.vision, platform)
        self.batch = Batch(layout, num_rows, longest, model.config.vocab_size, platform, images)
        self._states = StateOperators(self.arena, ops.redirects)
        self._sampler = Sampler(ops, self.platform)
        splits: KeySplits | None = None
        if not platform.shares_memory:
            splits = _splits(loaded)
        self._records: TokenRecords | None = None
        self._drafts: DraftGraphs | None = None
        if most or loaded.state_write_interval > 1:
            sizes = (num_rows, 1 + most, loaded.state_write_interval)
            self._records = TokenRecords(self.arena, ops, *sizes, platform, model.fold_constants)
            if most and model.config.draft_layer:
                self._drafts = DraftGraphs(model, ops, self.batch, self._records, platform, most, shapes)
        kept = (self._states.copies, self._records, most if self._drafts else 0, self.batch.images)
        tables = {group.window: table for group, table in zip(layout.groups, self.batch.tables, strict=False)}
        self._builder = StepBuilder(self.batch.table, bool(layout.kv), splits, *kept, tables)
        self._shapes: ShapeTable | None = None  # shapes with graphs
        if shapes:
            self._shapes = ShapeTable(shapes)
        padding = {shape: self._builder.padding(shape) for shape in shapes}
        self._graphs: Graphs[StepShape, StepOutputs] = Graphs(platform, padding)
        self._failure: Exception | None = None

    def record_graphs(self, progress: Callable[[Sequence[StepShape]], Any] = lambda shapes: shapes) -> None:
        """Record all graphs, and compile what steps with records need. `progress` wraps the shapes."""
        with torch.inference_mode():
            self._graphs.record(self._issue, progress)
            if self._drafts is not None:
                self._drafts.record()
            if self._records is not None:
                self._records.prepare()
                if self._records.drafts:
                    self._prepare_windows()
        self.platform.synchronize()

    def _prepare_windows(self) -> None:
        """Let the device compile the kernels for windows, with a window of the spare row."""
        row = np.zeros(1, np.int32)
        sampled = Sampled(self.platform.upload(row.astype(np.int64)), self.platform.upload(row == 0))
        self._accept(Windows(row + 1, row, row + NO_DRAFT), row + self.batch.table.num_rows, sampled)

    def submit(self, plan: StepPlan) -> SubmittedStep:
        """Issue a plan, and do not wait for it.

        A failure of the model is raised by the step's `result()`, and all later steps fail because of it. Raises only
        if the

        plan contradicts the batch.
        """
        if self._records is None or not self._records.drafts:
            assert not plan.rows.num_drafts.any(), "made for plans without drafts"
            assert not plan.rows.save_ptr[plan.num_decodes], "the decode kernels save no states"
        if self._records is not None:
            self._records.leave(plan.removed, plan.moves)
        if self._encoded is not None:
            self._encoded.drop(plan.dropped_images)
        if plan.moves:
            self.arena.move(plan.moves, sound=self._failure is None)
        if self.arena.peers is not None:
            for fetch in plan.fetches:
                self.arena.peers.fetching.start(fetch)
        self.batch.update(plan)
        if self._failure is not None:
            error = StepFailedError(f"step {plan.step} was not run: a step before it failed with {self._failure!r}")
            return FailedStep(error, self._failure_seen)
        try:
            with torch.inference_mode():
                return self._run(plan)
        except Exception as error:
            self._failure = error
            return FailedStep(error, self._failure_seen)

    def close(self) -> None:
        """Wait for the device, close the tiers and the link to other engines, and drop the graphs.

        All other memory is freed with the runner.
        """
        self.platform.synchronize()
        self.arena.close()
        self._graphs.clear()
        if self._drafts is not None:
            self._drafts.close()

    def _failure_seen(self) -> None:
        self._failure = None

    def _run(self, plan: StepPlan) -> RunningStep:
        if plan.added:
            self.batch.prepare(plan.added)
        if not plan.num_tokens:
            nothing = StepResult(plan.step, np.empty(0, np.int32))
            wait_s = DISK_WAIT_S if plan.waits_for_tiers else 0.0
            news = self.arena.news_of_copies(wait_s)
            return RunningStep(nothing, self.platform.mark(), plan.sampled_rows, news=news)
        sampling = self.batch.sampling(plan.sampled_rows)
        if self._drafts is not None:  # penalties count drafts
            plan = self._drafts.filled(plan, any(row.counts is not None for row in sampling))
        windows: Windows | None = None
        if plan.rows.num_drafts.any():
            windows = Windows.of(plan.rows)
            sampling = np.repeat(np.asarray(sampling, object), windows.sizes).tolist()
        plain = plan.masks is None and all(row.is_plain_greedy for row in sampling)
        exact = StepShape.of(plan, self._verifies(plan))
        asking: list[tuple[AddedRow, int, int, int]] = []
        if exact.num_segments:
            asking = self._asking(plan, exact.num_decodes)
        shape: StepShape | None = None
        images = self._image_inputs(plan)
        if self._shapes is not None and not asking and images is None:
            shape = self._shapes.find(exact)
        arrays = self._builder.build(plan, shape or exact, recorded=shape is not None)
        copied = 0
        if self._states.copies:
            copied = self._states.place(arrays, self._ops, self.platform)
        prompts: list[tuple[int, list[Scores]]] = []
        outputs: StepOutputs | None
        if shape is not None:
            outputs = self._graphs.replay(shape, arrays)
        else:
            hidden, outputs = self._without_graph(plan, exact, arrays, images, plain)
            prompts = [(extent[0].row, self._prompt_scores(*extent, hidden)) for extent in asking]
        sampled: Sampled | None = None
        if outputs is not None:
            sampled = self._sample(plan, outputs, sampling, plain, windows)
        if self._records is not None:
            self._records.issued(plan)
        replayed = shape is not None
        partial_result = StepResult(
            plan.step, np.empty(0, np.int32), num_tokens=plan.num_tokens, slot_bytes_copied=copied, replayed=replayed
        )
        answers: Tensor | None = None
        verified: Verified | None = None
        logprobs: Scores | None = None
        if sampled is not None:
            logprobs = sampled.logprobs
            if windows is None:
                answers = self.platform.to_host(torch.where(sampled.finite, sampled.token_ids, NOT_FINITE))
            else:
                answers, verified = self._finish_windows(plan, windows, sampling, sampled)
        mark, rows, news = self.platform.mark(), plan.sampled_rows, self.arena.news_of_copies()
        return RunningStep(partial_result, mark, rows, answers, verified, logprobs, prompts, news)

    def _without_graph(
        self, plan: StepPlan, shape: StepShape, arrays: Arrays, images: ImageInputs | None, plain: bool
    ) -> tuple[Tensor, StepOutputs | None]:
        """Run the forward pass kernel by kernel.

        Returns the hidden states `[T, D]`, and the outputs; None if no row is sampled. `plain`: as in `_sample`.
        """
        tensors = self.platform.upload_all(arrays)
        lens: HostLens = ((), ())
        if not plan.rows.optimistic.any():  # otherwise only the device has the lengths
            lens = tuple(np.diff(arrays["cu_queries"]).tolist()), tuple(arrays["kv_lens"].tolist())
        hidden = self._forward(tensors, shape, lens, images)
        if not len(plan.sampled_rows):
            return hidden, None
        return hidden, self._heads(hidden, tensors, plain)

    def _verifies(self, plan: StepPlan) -> bool:
        """Return whether the step uses the operators that verify drafts. Graphs that prefill always do."""
        if self._records is None or not self._records.drafts:
            return False
        return (self._shapes is not None and plan.num_decodes < len(plan.rows)) or self._records.concern(plan)

    def _image_inputs(self, plan: StepPlan) -> ImageInputs | None:
        """Return the embeddings and positions of a step's image tokens; None if it has none.

        Runs the vision tower for images that are new.
        """
        if self.batch.images is None or self._encoded is None:
            return None
        return self.batch.images.inputs(plan.rows, self._encoded.get, self.platform)

    def _issue(self, tensors: Tensors, shape: StepShape) -> StepOutputs:
        """Issue a whole step on the device, with greedy sampling, and return its outputs: what a graph records."""
        return self._heads(self._forward(tensors, shape), tensors)

    def _forward(
        self,
        tensors: Tensors,
        shape: StepShape,
        host_lens: HostLens = ((), ()),
        images: ImageInputs | None = None,
    ) -> Tensor:
        caches = (self._records or self.arena).layers
        context = self._builder.context(tensors, shape, caches, self._states, host_lens)
        if shape.num_decodes:  # fill in ids and positions that only the device has
            drafts: tuple[Tensor, ...] = ()
            if self._drafts is not None and "draft_at" in tensors:
                drafts = (self._drafts.drafted, tensors["draft_at"])
            ids = IdColumns(tensors["token_ids"], tensors["token_rows"], self.batch.last_sampled, *drafts)
            self._ops.catch_up(ids, self._builder.late(tensors))
        context = self._builder.with_windows(context, tensors)
        if "rope_shift" in tensors:  # after the positions were corrected
            context = replace(context, positions=tensors["positions"] + tensors["rope_shift"], images=images)
        return self._model.forward(tensors["token_ids"], context)

    def _heads(self, hidden: Tensor, tensors: Tensors, greedy: bool = True) -> StepOutputs:
        """Return the logits of the sampled rows and, if `greedy`, the likeliest ids.

        These become the last sampled ones of the rows.
        """
        own = self._model.head.own(hidden.index_select(0, tensors["sampled"]))
        if not greedy:
            return StepOutputs(own, None)
        token_ids, finite = self._model.head.likeliest(own)
        self.batch.last_sampled.index_copy_(0, tensors["sampled_rows"], token_ids)
        return StepOutputs(own, (token_ids, finite))

    def _sample(
        self,
        plan: StepPlan,
        outputs: StepOutputs,
        sampling: list[RowSampling],
        plain: bool,
        windows: Windows | None = None,
    ) -> Sampled:
        """Return a sample for each row of the logits: the sampled rows, or all positions of their windows.

        `sampling` has an element for each row of the logits. `plain`: all rows take the likeliest id and nothing else.
        Without windows the ids become the last sampled ones of the rows.
        """
        rows, count = plan.rows, len(sampling)
        if outputs.likeliest is not None and plain:
            token_ids, finite = outputs.likeliest
            return Sampled(token_ids[:count], finite[:count])
        ends = (rows.start + rows.num_tokens - rows.num_drafts)[rows.samples]
        num_outputs = ends - self.batch.num_prompt_tokens[plan.sampled_rows]
        if windows is not None:
            num_outputs = windows.spread(num_outputs)
        logits, late = self._model.head.whole(outputs.own[:count]), self._late(rows, windows)
        sampled = self._sampler.sample(logits, sampling, num_outputs, plan.masks, windows, late)
        if windows is None:
            last = self.platform.upload(plan.sampled_rows.astype(np.int64))
            self.batch.last_sampled.index_copy_(0, last, sampled.token_ids)
        return sampled

    def _late(self, rows: StepRows, windows: Windows | None) -> Late | None:
        """Return how many outputs optimistic rows may lack; None if the step has no such rows."""
        if self._records is None or not rows.optimistic.any():
            return None
        columns = np.stack([self._records.behind(rows), self._records.late(rows)])[:, rows.samples]
        if windows is not None:
            columns = np.repeat(columns, windows.sizes, axis=1)
        behind, places = columns
        return Late(behind, self._records.missed[self.platform.upload(places.astype(np.int64))])

    def _finish_windows(
        self, plan: StepPlan, windows: Windows, sampling: list[RowSampling], sampled: Sampled
    ) -> tuple[Tensor, Verified]:
        """Accept or reject drafts on the device, so that the next step need not wait for the host.

        Returns what is copied to the host: the ids of all positions, and the counts in `Verified`.
        """
        assert self._records is not None
        found, there = self._accept(windows, plan.sampled_rows, sampled)
        count = len(windows.drafts)
        counted = partial(windows.mask, found[count:], there.starts, there.sizes)
        self._sampler.count(sampling, sampled.token_ids, counted)
        on_host = self.platform.to_host(found)
        return on_host[:count], Verified(windows, on_host[count:], partial(self._records.apply_counts, plan))

    def _accept(self, windows: Windows, rows: IntArray, sampled: Sampled) -> tuple[Tensor, WindowColumns]:
        """Call the operator `accept` for the windows of these rows. Returns its result, and its columns."""
        assert self._records is not None
        columns, drafted = [windows.drafts, rows, windows.starts, windows.sizes], None
        if self._drafts is not None:  # where drafts are that only the device has
            drafted = self._drafts.drafted
            at = np.repeat(rows, windows.sizes) * self._drafts.most + windows.spread(np.zeros_like(rows))
            columns.append(np.where(windows.drafts == TO_DRAFT, at, -1))
        packed = self.platform.upload(np.concatenate(columns).astype(np.int64))
        drafts, row, starts, sizes, *places = torch.split(packed, [len(column) for column in columns])
        kept = (self.batch.last_sampled, self._records.missed, drafted, places[0] if places else None)
        there = WindowColumns(drafts, row, starts, sizes, *kept, int(windows.sizes.max()))
        return windows.accept(self._ops.accept, sampled.token_ids, sampled.finite, there), there

    def _asking(self, plan: StepPlan, first: int) -> list[tuple[AddedRow, int, int, int]]:
        """Return the rows with prompt tokens whose log-probabilities are wanted.

        Each is (row, start, end, index of its first token in the step). The segments' tokens begin at `first`.
        """
        out, rows = list[tuple[AddedRow, int, int, int]](), plan.rows
        columns = (column[plan.num_decodes :].tolist() for column in (rows.row, rows.start, rows.num_tokens))
        for row, start, count in zip(*columns, strict=True):
            added = self.batch.rows[row]
            if added.wants_prompt_logprobs and start < added.num_prompt_tokens - 1:
                out.append((added, start, start + count, first))
            first += count
        return out

    def _prompt_scores(self, added: AddedRow, start: int, end: int, first: int, hidden: Tensor) -> list[Scores]:
        """Return scores of the prompt tokens that the row's tokens `[start, end)` predict, in tiles.

        `hidden` has the step's hidden states, the row's from index `first` on.
        """
        num_top, tiles = added.params.prompt_logprobs or 0, []
        last = min(end, added.num_prompt_tokens - 1)  # the last prompt token predicts an output
        for begin in range(start, last, PROMPT_TILE_ROWS):
            stop = min(begin + PROMPT_TILE_ROWS, last)
            logits = self._model.logits(hidden[begin + first - start : stop + first - start])
            following = self.platform.upload(added.token_ids[begin + 1 : stop + 1].astype(np.int64))
            asked = dict.fromkeys(range(begin + 1, stop + 1), num_top)
            tiles.append(score(logits, following, asked, self._ops, self.platform))
        return tiles


def _splits(loaded: Loaded) -> KeySplits:
    """Return how keys are split into parts.

    Rows of a small batch get more parts, and keys are read once for several tokens of a row, unless the bits of a row
    must not depend on the batch.
    """
    layout, config, traits = loaded.layout, loaded.model.config, traits_of(loaded.platform.device)
    if loaded.ops.deterministic or not layout.kv:
        return KeySplits(layout.kernel_block_size)
    wanted, folded = max(1, traits.num_decode_programs // layout.kv[0].num_heads), 1
    layers = (*config.layers, config.draft_layer)
    groups = [p.num_heads // p.num_kv_heads for parts in layers for p in parts if isinstance(p, AttentionConfig)]
    if len(groups) == len(layout.kv) and traits.masks_gathers:  # latents are read for each token
        most = max(1, MOST_QUERIES // max(groups))
        folded = min(1 << most.bit_length() - 1, 1 << loaded.max_num_drafts.bit_length())
    return KeySplits(layout.kernel_block_size, wanted, folded)
