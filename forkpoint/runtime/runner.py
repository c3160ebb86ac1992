"""ModelRunner: executes StepPlans on one device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forkpoint.errors import StepFailedError
from forkpoint.ops.deal import ALL
from forkpoint.ops.metadata import KeySplits
from forkpoint.ops.rows.columns import NOT_FINITE, IdColumns, SpanColumns
from forkpoint.platforms.packing import Arrays, Tensors
from forkpoint.runtime.batch import Batch
from forkpoint.runtime.buffers import ArenaBuffer
from forkpoint.runtime.dealt_keys import HostLens
from forkpoint.runtime.draft_graphs import DraftGraphs
from forkpoint.runtime.draft_spans import NO_DRAFT, DraftSpans
from forkpoint.runtime.encoded_images import EncodedImages
from forkpoint.runtime.graphs import Graphs, ShapeTable
from forkpoint.runtime.loaded import Loaded
from forkpoint.runtime.logprobs import PROMPT_TILE_ROWS, Scores, score
from forkpoint.runtime.records import TokenRecords
from forkpoint.runtime.row_images import RowImages, StepImages
from forkpoint.runtime.row_sampling import RowSampling
from forkpoint.runtime.sampler import OptimisticRows, Sampled, Sampler
from forkpoint.runtime.state_operators import StateOperators
from forkpoint.runtime.step_inputs import StepBuilder, StepShape
from forkpoint.runtime.submitted import FailedStep, NextReports, RunningStep, Verified
from forkpoint.sched.plan import TO_DRAFT, AddedRow, IntArray, StepPlan, StepResult, StepRows, SubmittedStep

# Longest wait of a step without work for a report of a tier or a fetch. It delays requests that arrive meanwhile, and
# the decision to compute a prefix whose load is too slow.
TIER_WAIT_S = 0.002


class StepOutputs(NamedTuple):
    """The outputs for the sampled rows, padded.

    `own` are this rank's logits `[S, its ids]`. `likeliest` are the likeliest ids `[S]` int64 and whether their logits
    are finite `[S]` bool; None if no row wants them.
    """

    own: Tensor
    likeliest: tuple[Tensor, Tensor] | None


class ModelRunner:
    """Implements `sched.plan.Runner` on one device. Owns the arena's bytes and the batch.

    `submit` issues a step and does not wait for it. Before the model runs, states are copied for
    the operators that `ops.redirects` does not name.

    On a device with graphs, a step that fits one of the `shapes` replays a graph. The first such step records it,
    unless `record_next` did. If a step raises, its rows and blocks are updated all the same. Steps that are submitted
    before `result()` has raised that error are not run and raise StepFailedError.
    """

    def __init__(self, loaded: Loaded, num_pages: int, num_host_pages: int = 0) -> None:
        """Allocate arena and batch; a host tier too with `num_host_pages`. `num_pages` includes page 0."""
        model, ops, layout, platform = loaded.model, loaded.ops, loaded.layout, loaded.platform
        num_rows, most = loaded.sched.max_num_seqs, loaded.max_num_drafts
        self.platform, self._model, self._ops = platform, model, ops
        self.arena = ArenaBuffer(layout, num_pages, platform, num_host_pages)
        images: RowImages | None = None
        self._encoded: EncodedImages | None = None
        if model.vision is not None and model.images is not None:
            assert model.images.most_tokens >= loaded.sched.max_num_batched_tokens, "a step's images have no room"
            images = RowImages(num_rows, model.images, model.vision.config.centred, bool(model.config.draft_layer))
            self._encoded = EncodedImages(model.vision, model.images, platform)
        dealt = loaded.dealt_keys()
        deal = ALL if dealt is None else dealt.deal
        config = model.config
        self.batch = Batch(layout, num_rows, config.max_model_len, config.vocab_size, platform, images, deal)
        self._states = StateOperators(self.arena, ops, platform)
        self._sampler = Sampler(ops, self.platform)
        splits: KeySplits | None = None
        if not platform.shares_memory:
            splits = loaded.key_splits()
        self._records: TokenRecords | None = None
        self._has_drafts = most > 0
        self._drafts: DraftGraphs | None = None
        if most or loaded.state_write_interval > 1:
            sizes = (num_rows, 1 + most, loaded.state_write_interval)
            self._records = TokenRecords(self.arena, ops, *sizes, platform, model.fold_constants)
            if most and model.config.draft_layer:
                self._drafts = DraftGraphs(loaded, self.batch, self._records, dealt)
        self._builder = StepBuilder(
            self.batch.table,
            bool(layout.kv),
            splits,
            copies=self._states.copies,
            records=self._records,
            most_drafts=most if self._drafts else 0,
            images=self.batch.images,
            tables={group.window: table for group, table in zip(layout.groups, self.batch.tables, strict=False)},
            dealt=dealt,
        )
        self._shapes = ShapeTable(loaded.shapes)
        padding = {shape: self._builder.padding(shape) for shape in loaded.shapes}
        self._graphs: Graphs[StepShape, StepOutputs] = Graphs(platform, padding, loaded.runs_before_recording)
        self._failure: Exception | None = None

    def issue_all(self) -> None:
        """Issue the work of all graphs, and the kernels that run outside graphs, without recording any."""
        with torch.inference_mode():
            self._graphs.issue_all(self._issue)
            if self._drafts is not None:
                self._drafts.issue_all()
            self._prepare_records()

    def record_largest(self) -> None:
        """Record the graph of the largest step, whose memory the others share; load the kernels outside graphs."""
        with torch.inference_mode():
            self._graphs.record_largest(self._issue)
            if self._drafts is not None:
                self._drafts.record_largest()
            self._prepare_records()
        self.platform.synchronize()

    def record_next(self) -> bool:
        """Record a graph that no step has needed yet; return False if there is none. Call it between steps."""
        with torch.inference_mode():
            return self._graphs.record_next(self._issue) or (self._drafts is not None and self._drafts.record_next())

    def _prepare_records(self) -> None:
        if self._records is not None:
            self._records.prepare()
            if self._has_drafts:
                self._prepare_spans()

    def _prepare_spans(self) -> None:
        """Let the device compile the kernels for drafts, with a span of the spare row."""
        zero = np.zeros(1, np.int32)
        sampled = Sampled(self.platform.upload(zero.astype(np.int64)), self.platform.upload(zero == 0))
        spans = DraftSpans(sizes=zero + 1, starts=zero, drafts=zero + NO_DRAFT)
        self._accept(spans, zero + self.batch.table.num_rows, sampled)

    def submit(self, plan: StepPlan) -> SubmittedStep:
        """Issue a plan, and do not wait for it.

        A failure of the model is raised by the step's `result()`, and all later steps fail because of it. Raises only
        if the plan contradicts the batch.
        """
        if not self._has_drafts:
            assert not plan.rows.num_drafts.any(), "made for plans without drafts"
            assert not plan.rows.save_ptr[plan.num_decodes], "the decode kernels save no states"
        if self._records is not None:
            self._records.flush(plan.flushes)
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
            return FailedStep(error, self._forget_failure)
        try:
            with torch.inference_mode():
                return self._run(plan)
        except Exception as error:
            self._failure = error
            return FailedStep(error, self._forget_failure)

    def close(self) -> None:
        """Wait for the device, close the tiers and the link to other engines, and drop the graphs.

        All other memory is freed with the runner.
        """
        self.platform.synchronize()
        self.arena.close()
        self._graphs.clear()
        if self._drafts is not None:
            self._drafts.close()

    def _forget_failure(self) -> None:
        self._failure = None

    def _run(self, plan: StepPlan) -> RunningStep:
        """Issue the work of a plan. Raises what the model raises."""
        if plan.added:
            self.batch.prepare(plan.added)
        next_reports: NextReports | None = None
        if self.arena.has_late_copies:
            next_reports = partial(self.arena.next_reports, TIER_WAIT_S if plan.waits_for_tiers else 0.0)
        rows = plan.sampled_rows
        if not plan.num_tokens:
            nothing = StepResult(plan.step, np.empty(0, np.int32))
            return RunningStep(nothing, self.platform.record_event(), rows, next_reports=next_reports)
        sampling = self.batch.sampling(rows)
        if self._drafts is not None:  # penalties count drafts
            plan = self._drafts.filled(plan, any(row.counts is not None for row in sampling))
        spans: DraftSpans | None = None
        if plan.rows.num_drafts.any():
            spans = DraftSpans.of(plan.rows)
            sampling = np.repeat(np.asarray(sampling, object), spans.sizes).tolist()
        plain = plan.masks is None and all(row.is_plain_greedy for row in sampling)
        partial_result, outputs, prompts = self._compute(plan, plain)
        sampled: Sampled | None = None
        if outputs is not None:
            sampled = self._sample(plan, outputs, sampling, plain, spans)
        if self._records is not None:
            self._records.issued(plan)
        if sampled is None:
            return RunningStep(
                partial_result, self.platform.record_event(), rows, prompts=prompts, next_reports=next_reports
            )
        verified: Verified | None = None
        if spans is None:
            answers = self.platform.to_host(torch.where(sampled.finite, sampled.token_ids, NOT_FINITE))
        else:
            answers, verified = self._finish_spans(plan, spans, sampling, sampled)
        event = self.platform.record_event()
        return RunningStep(partial_result, event, rows, answers, verified, sampled.logprobs, prompts, next_reports)

    def _compute(
        self, plan: StepPlan, plain: bool
    ) -> tuple[StepResult, StepOutputs | None, list[tuple[int, list[Scores]]]]:
        """Run the forward pass, from a graph if one fits.

        Returns the part of the step's result that the host has already, the outputs (None if no row is sampled), and
        the scores of prompts by row. `plain`: as in `_sample`.
        """
        exact = StepShape.of(plan, self._has_drafts and self._verifies(plan))
        to_score = self._prompts_to_score(plan, exact.num_decodes)
        shape = None if to_score else self._shapes.find(exact)
        replayed = shape is not None
        images: StepImages | None = None
        if self.batch.images is not None and self._encoded is not None:
            images = self.batch.images.step(plan.rows, recorded=replayed)
            self._encoded.place(images)
        arrays = self._builder.build(plan, shape or exact, replayed, images)
        copied = self._states.place(arrays)
        prompts: list[tuple[int, list[Scores]]] = []
        outputs: StepOutputs | None
        if shape is not None:
            outputs = self._graphs.replay(shape, arrays, self._issue)
        else:
            hidden, outputs = self._without_graph(plan, exact, arrays, plain)
            prompts = [(extent[0].row, self._prompt_scores(*extent, hidden)) for extent in to_score]
        result = StepResult(
            plan.step, np.empty(0, np.int32), num_tokens=plan.num_tokens, slot_bytes_copied=copied, replayed=replayed
        )
        return result, outputs, prompts

    def _without_graph(
        self, plan: StepPlan, shape: StepShape, arrays: Arrays, plain: bool
    ) -> tuple[Tensor, StepOutputs | None]:
        """Run the forward pass kernel by kernel.

        Returns the hidden states `[T, D]`, and the outputs; None if no row is sampled. `plain`: as in `_sample`.
        """
        tensors = self.platform.upload_all(arrays)
        most: HostLens = tuple(np.diff(arrays["cu_queries"]).tolist()), tuple(arrays["kv_lens"].tolist())
        lens = most
        if plan.rows.optimistic.any():  # only the device has the lengths
            lens = ((), ())
        hidden = self._forward(tensors, shape, lens, most)
        if not len(plan.sampled_rows):
            return hidden, None
        return hidden, self._heads(hidden, tensors, plain)

    def _verifies(self, plan: StepPlan) -> bool:
        """Return whether a step of an engine with drafts uses the operators that verify them.

        Graphs that prefill always do.
        """
        rows = plan.rows
        prefills = plan.num_decodes < len(rows)
        return (bool(self._graphs.shapes) and prefills) or bool(rows.num_drafts.any() or rows.pending.any())

    def _issue(self, tensors: Tensors, shape: StepShape) -> StepOutputs:
        """Issue a whole step on the device, with greedy sampling, and return its outputs: what a graph records."""
        return self._heads(self._forward(tensors, shape), tensors)

    def _forward(
        self,
        tensors: Tensors,
        shape: StepShape,
        host_lens: HostLens = ((), ()),
        most_lens: HostLens = ((), ()),
    ) -> Tensor:
        """Run the model. Without `host_lens` only the device has the rows' lengths, and `most_lens` are bounds."""
        caches = (self._records or self.arena).layers
        context = self._builder.context(tensors, shape, caches, self._states.sources, host_lens)
        if shape.num_decodes:  # fill in ids and positions that only the device has
            drafts: tuple[Tensor, ...] = ()
            if self._drafts is not None and "draft_at" in tensors:
                drafts = (self._drafts.drafted, tensors["draft_at"])
            ids = IdColumns(tensors["token_ids"], tensors["token_rows"], self.batch.last_sampled, *drafts)
            optimistic = self._builder.optimistic(tensors) if "rejected_at" in tensors else None
            self._ops.catch_up(ids, optimistic)
        if "token_lines" in tensors:
            context = self._builder.located(context, tensors, most_lens)
        if "rope_shift" in tensors:  # after the positions were corrected
            context = replace(context, positions=tensors["positions"] + tensors["rope_shift"])
        if "draft_shift" in tensors:
            context = replace(context, draft_positions=tensors["positions"] + tensors["draft_shift"])
        return self._model.forward(tensors["token_ids"], context)

    def _heads(self, hidden: Tensor, tensors: Tensors, greedy: bool = True) -> StepOutputs:
        """Return the logits of the sampled rows and, if `greedy`, the likeliest ids.

        The likeliest ids become the last sampled ones of the rows.
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
        spans: DraftSpans | None = None,
    ) -> Sampled:
        """Return a sample for each row of the logits: the sampled rows, or all positions of their spans.

        `sampling` has an element for each row of the logits. `plain`: all rows take the likeliest id and nothing else.
        Without spans the ids become the last sampled ones of the rows.
        """
        rows, count = plan.rows, len(sampling)
        if outputs.likeliest is not None and plain:
            token_ids, finite = outputs.likeliest
            return Sampled(token_ids[:count], finite[:count])
        ends = (rows.start + rows.num_tokens - rows.num_drafts)[rows.samples]
        num_outputs = ends - self.batch.num_prompt_tokens[plan.sampled_rows]
        if spans is not None:
            num_outputs = spans.spread(num_outputs)
        logits, optimistic = self._model.head.whole(outputs.own[:count]), self._optimistic(rows, spans)
        sampled = self._sampler.sample(logits, sampling, num_outputs, plan.masks, spans, optimistic)
        if spans is None:
            last = self.platform.upload(plan.sampled_rows.astype(np.int64))
            self.batch.last_sampled.index_copy_(0, last, sampled.token_ids)
        return sampled

    def _optimistic(self, rows: StepRows, spans: DraftSpans | None) -> OptimisticRows | None:
        """Return how many outputs optimistic rows may lack; None if the step has no such rows."""
        if self._records is None or not rows.optimistic.any():
            return None
        most_rejected = np.where(rows.optimistic, rows.pending - 1, 0)
        columns = np.stack([most_rejected, self._records.rejected_at(rows)])[:, rows.samples]
        if spans is not None:
            columns = np.repeat(columns, spans.sizes, axis=1)
        most_rejected, places = columns
        return OptimisticRows(most_rejected, self._records.num_rejected[self.platform.upload(places.astype(np.int64))])

    def _finish_spans(
        self, plan: StepPlan, spans: DraftSpans, sampling: list[RowSampling], sampled: Sampled
    ) -> tuple[Tensor, Verified]:
        """Accept or reject drafts on the device, so that the next step need not wait for the host.

        Returns what is copied to the host: the ids of all positions, and the counts in `Verified`.
        """
        found, columns = self._accept(spans, plan.sampled_rows, sampled)
        count = len(spans.drafts)
        counted = partial(spans.mask, found[count:], columns.starts, columns.sizes)
        self._sampler.count(sampling, sampled.token_ids, counted)
        on_host = self.platform.to_host(found)
        return on_host[:count], Verified(spans, on_host[count:])

    def _accept(self, spans: DraftSpans, rows: IntArray, sampled: Sampled) -> tuple[Tensor, SpanColumns]:
        """Call the operator `accept` for the spans of these rows. Returns its result, and its columns."""
        columns = self._span_columns(spans, rows)
        return self._ops.accept(sampled.token_ids, sampled.finite, columns), columns

    def _span_columns(self, spans: DraftSpans, rows: IntArray) -> SpanColumns:
        assert self._records is not None
        columns, drafted = [spans.drafts, rows, spans.starts, spans.sizes], None
        if self._drafts is not None:  # where drafts are that only the device has
            drafted = self._drafts.drafted
            at = np.repeat(rows, spans.sizes) * self._drafts.most + spans.spread(np.zeros_like(rows))
            columns.append(np.where(spans.drafts == TO_DRAFT, at, -1))
        packed = self.platform.upload(np.concatenate(columns).astype(np.int64))
        drafts, row, starts, sizes, *places = torch.split(packed, [len(column) for column in columns])
        kept = (self.batch.last_sampled, self._records.num_rejected, drafted, places[0] if places else None)
        return SpanColumns(drafts, row, starts, sizes, *kept, int(spans.sizes.max()))

    def _prompts_to_score(self, plan: StepPlan, first: int) -> list[tuple[AddedRow, int, int, int]]:
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
