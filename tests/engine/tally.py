"""What random runs did, counted, so that none of it can silently stop being drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from forkpoint.params import FinishReason
from forkpoint.sched.request import Request
from tests.engine.compare import not_finite
from tests.engine.drafters import RandomDrafter
from tests.engine.real import Options, RealEngine
from tests.engine.sampling_oracle import is_forced


@dataclass
class Tally:
    """Counts by name. Those of several runs add up."""

    seen: Counter[str] = field(default_factory=Counter)

    def note(self, **counts: int | bool) -> None:
        for name, count in counts.items():
            self.seen[name] += int(count)

    def add_run(self, run: RealEngine, drafter: RandomDrafter | None) -> None:
        """Count what happened in a run that has ended."""
        requests = [request for group in run.requests.values() for request in group]
        self._add_options(run.options)
        self._add_cache(run, requests)
        self._add_tiers(run)
        self._add_windows(run)
        self._add_drafts(run, requests, drafter)
        self._add_ranks(run, requests)
        self._add_dealt(run, requests)
        self._add_outputs(run, requests)
        self._add_images(run, requests)

    def _add_options(self, options: Options) -> None:
        self.note(
            examples=1,
            fp8_keys=options.kv_cache_dtype == "fp8",
            fp8_keys_deterministic=options.kv_cache_dtype == "fp8" and options.deterministic,
            bfloat16_states=options.state_dtype == "bfloat16",
            no_caching=not options.cache.enable_prefix_caching,
            no_checkpoints=options.cache.mamba_cache_mode == "none",
            deterministic=options.deterministic,
            async_scheduling=options.async_scheduling,
            cpp=options.cpu_ops == "cpp",
            fp8=options.model.endswith((":block", ":channel", ":load")),
            fp8_by_matrix=options.model.endswith(":modelopt"),
            four_bits=options.model.endswith(":gptq"),
        )

    def _add_cache(self, run: RealEngine, requests: Sequence[Request]) -> None:
        options, stats = run.options, run.sched.stats()
        records = options.state_write_interval > 1
        resumed = [request.resume_cache for request in requests if request.resume_cache is not None]
        hits = sum(request.cache.num_cached_tokens for request in requests)
        if not run.sched.cache.enabled:
            assert hits == 0
        self.note(
            hits=hits > 0,
            moves=stats.cache.moves,
            evictions=stats.cache.blocks_evicted + sum(stats.cache.checkpoints_evicted.values()),
            preemptions=stats.num_preemptions,
            resumed_from_cache=sum(report.num_cached_tokens > 0 for report in resumed),
            replaced_tables=run.probe.replaced,
            copied=run.core.slot_bytes_copied > 0,
            scrubbed=run.scrub,
            states_recorded=records and sum(stats.cache.checkpoints_saved.values()),
            states_recorded_with_drafts=records and stats.drafts.num_accepted_tokens,
            states_recorded_deterministic=records and options.deterministic,
            **{f"kept_{origin}": count for origin, count in stats.cache.checkpoints_saved.items()},
            **{f"hit_{origin}": count for origin, count in stats.cache.checkpoint_hits.items()},
        )

    def _add_tiers(self, run: RealEngine) -> None:
        options, cache = run.options, run.sched.stats().cache
        self.note(
            stored=cache.host_stored_bytes,
            restored=cache.host_hit_tokens,
            restored_deterministic=options.deterministic and cache.host_hit_tokens,
            restored_with_drafts=options.max_num_drafts and cache.host_hit_tokens,
            restored_by_ranks=(options.num_ranks > 1) * cache.host_hit_tokens,
            streamed=(options.host_streams > 0) * cache.host_hit_tokens,
            read=cache.disk_hit_tokens,
            read_by_streams=(options.host_streams > 0) * cache.disk_hit_tokens,
            read_deterministic=options.deterministic and cache.disk_hit_tokens,
            read_with_drafts=options.max_num_drafts and cache.disk_hit_tokens,
            read_by_ranks=(options.num_ranks > 1) * cache.disk_hit_tokens,
            sunk=(options.host_tokens > 0) * cache.disk_stored_bytes,
        )

    def _add_windows(self, run: RealEngine) -> None:
        """Count what tiers did for a model whose layers with windows give blocks back."""
        options, cache = run.options, run.sched.stats().cache
        if run.layout.windows:
            self.note(
                windows_restored=cache.host_hit_tokens,
                windows_restored_deterministic=options.deterministic * cache.host_hit_tokens,
                windows_restored_with_drafts=(options.max_num_drafts > 0) * cache.host_hit_tokens,
                windows_restored_by_streams=(options.host_streams > 0) * cache.host_hit_tokens,
                windows_read=cache.disk_hit_tokens,
                windows_read_deterministic=options.deterministic * cache.disk_hit_tokens,
                windows_sunk=(options.host_tokens > 0) * cache.disk_stored_bytes,
            )

    def _add_drafts(self, run: RealEngine, requests: Sequence[Request], drafter: RandomDrafter | None) -> None:
        options, drafts = run.options, run.sched.stats().drafts
        drafted = [request for request in requests if request.num_draft_tokens > 0]
        self.note(
            drafts_accepted=drafts.num_accepted_tokens,
            drafts_rejected=drafts.num_draft_tokens - drafts.num_accepted_tokens,
            drafts_deterministic=options.deterministic and drafts.num_accepted_tokens,
            drafts_by_mtp=options.mtp and drafts.num_draft_tokens,
            drafts_under_rules=sum(request.grammar is not None for request in drafted),
            drafts_preempted=sum(request.num_preemptions > 0 for request in drafted),
            drafts_of_siblings=sum(len(r) > 1 and r[-1].num_draft_tokens > 0 for r in run.requests.values()),
            four_bits_with_drafts=options.model.endswith(":gptq") and drafts.num_accepted_tokens,
        )
        if drafter is not None:
            self.note(drafts_of_past_outputs=drafter.num_of_past, drafts_far_crossings=drafter.num_far_crossings)

    def _add_ranks(self, run: RealEngine, requests: Sequence[Request]) -> None:
        options, stats = run.options, run.sched.stats()
        if options.num_ranks > 1:
            self.note(
                ranks=1,
                ranks_deterministic=options.deterministic,
                ranks_fp8_keys=options.kv_cache_dtype == "fp8",
                ranks_drafts=stats.drafts.num_accepted_tokens,
                ranks_under_rules=sum(request.grammar is not None for request in requests),
                ranks_preempted=stats.num_preemptions,
                ranks_failed=sum(not_finite(c) for output in run.outputs.values() for c in output.outputs),
            )

    def _add_dealt(self, run: RealEngine, requests: Sequence[Request]) -> None:
        """Count what happened where ranks share the tokens of a KV head."""
        options, stats = run.options, run.sched.stats()
        if options.context_size > 1:
            self.note(
                dealt=1,
                dealt_deterministic=options.deterministic,
                dealt_hits=sum(request.cache.num_cached_tokens for request in requests),
                dealt_moves=stats.cache.moves,
                dealt_preempted=stats.num_preemptions,
                dealt_drafts=stats.drafts.num_accepted_tokens,
                dealt_fp8_keys=options.kv_cache_dtype == "fp8",
            )

    def _add_outputs(self, run: RealEngine, requests: Sequence[Request]) -> None:
        outputs = [completion for output in run.outputs.values() for completion in output.outputs]
        self.note(
            tokens=sum(len(c.token_ids) for c in outputs),
            stop_strings=sum(isinstance(c.stop_reason, str) for c in outputs),
            stop_ids=sum(isinstance(c.stop_reason, int) for c in outputs),
            eos=sum(c.finish_reason is FinishReason.STOP and c.stop_reason is None for c in outputs),
            banned=sum(bool(request.params.bad_words) for request in requests),
            ends_of_thinking=sum(is_forced(run.engine.inputs, request) for request in requests),
            allowed=sum(request.params.allowed_token_ids is not None for request in requests),
            prompt_logprobs=sum(output.prompt_logprobs is not None for output in run.outputs.values()),
            failed=sum(map(not_finite, outputs)),
        )

    def _add_images(self, run: RealEngine, requests: Sequence[Request]) -> None:
        """Count what happened to requests with images."""
        options = run.options
        with_images = [request for request in requests if request.images]
        inside = 0
        for request in with_images:
            cached = request.cache.num_cached_tokens
            inside += any(image.start < cached < image.end for image in request.images)
        encoders = [runner._encoded for runner in (run.probe.inner, *run.probe.others)]
        self.note(
            images=len(with_images),
            image_hits=sum(request.cache.num_cached_tokens > request.images[0].start for request in with_images),
            image_hits_inside=inside,
            images_preempted=sum(request.num_preemptions > 0 for request in with_images),
            images_under_schemas=sum(request.params.structured_outputs is not None for request in with_images),
            image_drafts_accepted=sum(request.num_accepted_tokens for request in with_images),
            image_drafts_by_mtp=options.mtp * sum(request.num_draft_tokens for request in with_images),
            image_ranks=options.num_ranks > 1,
            tower_runs=sum(encoder.num_runs for encoder in encoders if encoder is not None),
        )
