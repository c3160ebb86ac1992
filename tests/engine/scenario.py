"""Random runs: engines, prompts that share histories, parameters, and what happens while they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from forkpoint.cache.layout import CacheLayout
from forkpoint.config import CacheConfig
from forkpoint.engine.inputs import Prompt
from forkpoint.errors import RequestTooLargeError
from forkpoint.images import ImageSpan
from forkpoint.ops.cpu.build import load_operators
from forkpoint.params import SamplingParams, StructuredOutputsParams
from tests.engine.compare import Oracle, answer, check_restrictions, check_tokens_entered, compare
from tests.engine.drafters import RandomDrafter
from tests.engine.real import LATENT, MODELS, SEEING, UNCUT, UNDEALT, WITH_MTP, ModelBank, Options, start
from tests.engine.tally import Tally
from tests.image_models import IMAGE

LONGEST_PROMPTS = (130, 300, 700)  # of an example; with the shortest, requests outgrow a tight arena as they decode
MOST_OUTPUTS = (160, 60, 60)
FAILING = 0.08  # of the requests one whose logits are not finite, at most one in an example
PREEMPTED = 0.03  # of the steps of the model with images those before which a request is preempted
NEXT_TURN = 40  # tokens by which a next turn may be longer than any first one
FIRST_PLAIN_ID = 4  # ids below are special tokens
BAD_WORDS = ("the", "e", " d", "sleeps", "in", "on", "a", "fox", "or", "t", "s", "th", "er", "an", "é", "京", "w", "m")
IMAGE_SIDES = ((32, 32), (96, 160), (320, 448), (64, 512))  # height and width in pixels: 1 to 140 tokens
STOPS = ("e", "th", "an", " the", "o", "do", "s")


class Draw:
    """Random choices of one example."""

    def __init__(self, seed: int, models: Sequence[str], dealt: tuple[int, int] | None = None) -> None:
        """`dealt` gives the number of ranks, and how many of them keep tokens in turn."""
        self.rng = np.random.default_rng([20, seed])
        self._thoughts = np.random.default_rng([23, seed])  # drawn apart, so that the rest is what it was
        self.seed, self.models, self.dealt = seed, models, dealt
        self.longest, self.most_outputs = self.pick(*zip(LONGEST_PROMPTS, MOST_OUTPUTS, strict=True))

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def pick(self, *values: Any) -> Any:
        return values[int(self.rng.integers(len(values)))]

    def between(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def ids(self, count: int, vocab: int) -> list[int]:
        return [int(i) for i in self.rng.integers(FIRST_PLAIN_ID, vocab, count)]

    def length(self) -> int:
        kind = self.pick("edge", "edge", "short", "any")
        if kind == "edge":
            return max(1, 64 * self.between(0, self.longest // 64) + int(self.pick(-1, 0, 1, 63)))
        return self.between(1, 80 if kind == "short" else self.longest)

    def options(self) -> Options:
        """Models and operators take turns; the rest is free."""
        cpp = load_operators().module is not None
        sees = not SEEING.keys().isdisjoint(self.models)
        varied = len(self.models) > 1 or sees
        form = ("", ":block", "", ":channel", "")[self.seed % 5] if varied else ""
        if form and sees:
            form = ":load"
        elif varied and not sees and self.seed // 5 % 2:
            form = ("", ":gptq", "", ":channel", ":modelopt")[self.seed % 5]
        cache = CacheConfig(
            enable_prefix_caching=not self.chance(0.08),
            mamba_cache_mode="none" if self.chance(0.08) else "align",
            eviction_policy=self.pick("cost", "lru"),
            checkpoint_interval=self.pick(0, 64, 128, 512),
            num_ghosts=self.pick(0, 3, 1000),
        )
        tier = np.random.default_rng([23, self.seed])  # drawn apart, like the next two
        streams = (0.0, 0.3, 0.9)[np.random.default_rng([24, self.seed]).integers(3)]
        host_tokens, loaded_at_once = (0, 300, 2000, 20000)[tier.integers(4)], (0, 1)[tier.integers(2)]
        disk_tokens = (0, 2000, 20000)[tier.integers(3)]
        kept_by = np.random.default_rng([21, self.seed])  # drawn apart, so that the rest is what it was
        deterministic = self.chance(0.4)
        model = self.models[self.seed % len(self.models)] + form
        by_block = form in (":block", ":load")
        can_be_cut = varied and model not in UNCUT and (deterministic or not by_block)
        num_ranks = 2 if can_be_cut and self.seed % 6 in (3, 4) else 1
        interleave, context_size = (0, 8, 1, 0, 4)[self.seed // 3 % 5], 1
        if num_ranks > 1 and model.partition(":")[0] not in UNDEALT:
            context_size = 2 if self.seed % 5 else 1
        if self.dealt is not None:
            num_ranks, context_size = self.dealt
        return Options(
            model=model,
            num_ranks=num_ranks,
            context_size=context_size,
            interleave=interleave * (context_size > 1),
            cpu_ops="cpp" if cpp and self.seed // len(self.models) % 2 else "torch",
            deterministic=deterministic,
            kv_cache_dtype="fp8" if kept_by.random() < 0.4 and not LATENT.intersection(self.models) else "auto",
            state_dtype="bfloat16" if kept_by.random() < 0.3 and not deterministic else "float32",
            force_state_copy=self.chance(0.25),
            async_scheduling=self.chance(0.4),
            budget=self.pick(128, 192, 320, 500, 2048),
            max_num_seqs=self.pick(3, 5, 8),
            cache=cache,
            max_num_drafts=(3, 0, 15, 1)[self.seed // 2 % 4],
            host_tokens=host_tokens,
            loaded_at_once=loaded_at_once,
            host_streams=streams,
            disk_tokens=disk_tokens,
            kernel_block_sizes=((), (16,), (128, 32) if context_size < 4 else (128, 8))[kept_by.integers(3)],
            encoder_budget=(None, 1, 150)[kept_by.integers(3)],
            encoder_cache_size=(1 << 15, 100, 0)[kept_by.integers(3)],
        )

    def params(self, prompt_len: int, vocab: int) -> SamplingParams:
        rng = self.rng
        max_tokens = self.between(1, 16) if self.chance(0.6) else self.between(40, self.most_outputs)
        chosen: dict[str, Any] = {
            "max_tokens": max_tokens,
            "n": self.pick(1, 1, 1, 2, 3),
            "temperature": self.pick(0.0, 0.0, 0.7, 1.0, 1.4),
            "seed": self.pick(None, self.between(0, 5), 2**63 - 1),
            "ignore_eos": self.chance(0.5),
            "logprobs": self.pick(None, None, 0, 3, 20),
            "prompt_logprobs": self.pick(*[None] * 6, 0, 2),
            "cache_salt": self.pick("", "", "", "b"),
        }
        if self.chance(0.4):
            chosen |= {
                "top_p": self.pick(1.0, 0.9, 0.5),
                "top_k": self.pick(0, -1, 1, 7),
                "min_p": self.pick(0.0, 0.02),
            }
        if self.chance(0.3):
            chosen |= {
                "presence_penalty": float(rng.uniform(-1, 1)),
                "frequency_penalty": float(rng.uniform(-1, 1)),
                "repetition_penalty": float(rng.uniform(0.8, 1.5)),
            }
        if self.chance(0.2):
            ids = [1, *self.ids(3, vocab)]
            chosen["logit_bias"] = {token: float(rng.uniform(-3, 3)) for token in ids}
        if self.chance(0.3):
            chosen["stop_token_ids"] = self.ids(self.pick(3, 30), vocab)
        if self.chance(0.3):
            chosen |= {"stop": [self.pick(*STOPS), self.pick(*STOPS)], "include_stop_str_in_output": self.chance(0.5)}
        if self.chance(0.3):
            chosen["min_tokens"] = self.between(0, max_tokens)
        if self.chance(0.15):
            chosen["bad_words"] = [self.pick(*BAD_WORDS) for _ in range(self.pick(1, 30))]
        if self.chance(0.15):
            chosen["allowed_token_ids"] = self.ids(self.pick(20, 200), vocab)
        if not SEEING.keys().isdisjoint(self.models) and self.chance(0.15):
            chosen["structured_outputs"] = StructuredOutputsParams(regex="[a-z ]{2,40}[.]")
        if self._thoughts.random() < 0.15:
            chosen |= {"thinking": "open", "thinking_token_budget": int(self._thoughts.integers(90))}
        if self.chance(0.1):
            chosen["truncate_prompt_tokens"] = self.pick(-1, 100, self.between(1, prompt_len + 20))
        if self.chance(0.3):
            chosen["cache_breakpoints"] = [self.between(0, prompt_len) for _ in range(2)]
        return SamplingParams(**chosen)


@dataclass(frozen=True)
class Mixed:
    """Token ids, and the images whose placeholders are among them."""

    ids: list[int]
    images: tuple[ImageSpan, ...] = ()

    def first(self, count: int) -> Mixed:
        """Return the first `count` tokens. Placeholders of an image that is cut off are text."""
        return Mixed(self.ids[:count], tuple(image for image in self.images if image.end <= len(self.ids[:count])))

    def __add__(self, other: Mixed) -> Mixed:
        moved = (replace(image, start=image.start + len(self.ids)) for image in other.images)
        return Mixed(self.ids + other.ids, (*self.images, *moved))

    def with_image(self, start: int, number: int) -> Mixed:
        """Return the tokens with one of a few images in the place of some of them."""
        height, width = IMAGE_SIDES[number]
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        image = ImageSpan.of(start, pixels, 32)
        ids = [*self.ids[:start], *[IMAGE] * image.num_tokens, *self.ids[image.end :]]
        return Mixed(ids[: len(self.ids)], self.images + (image,) * (image.end <= len(self.ids)))


@dataclass(frozen=True)
class Arrival:
    prompt: Mixed
    params: SamplingParams
    priority: int


class Example:
    """One engine, its requests, and everything that is checked about them."""

    def __init__(
        self,
        bank: ModelBank,
        oracle: Oracle,
        seed: int,
        tally: Tally,
        models: Sequence[str] = tuple(MODELS),
        dealt: tuple[int, int] | None = None,
    ) -> None:
        self.draw = Draw(seed, models, dealt)
        self.bank, self.oracle, self.tally = bank, oracle, tally
        options = self.draw.options()
        self.tight = self.draw.chance(0.75)
        self._images = np.random.default_rng([23, seed])  # drawn apart, so that texts are what they were
        self._sees = not SEEING.keys().isdisjoint(models)
        self.trunk = self._mixed(self.draw.ids(self.draw.longest, bank.vocab_size))
        layout = CacheLayout.create(bank.model(options).layer_specs, dealt_to=options.context_size)
        if options.force_state_copy:
            options = replace(options, max_num_drafts=0)
        most = options.max_num_drafts
        # With both, drafts change no bits.
        interval = 1 if (most and options.deterministic) or not layout.spaces_writes else (16, 8)[seed % 2]
        options = replace(options, state_write_interval=interval)
        options = replace(options, mtp=most > 0 and options.model.partition(":")[0] in WITH_MTP)
        self.drafter = RandomDrafter(seed, most, bank.vocab_size, options.mtp) if most else None
        self.run = start(bank, self._with_room(options), self.drafter)
        self.run.scrub = self.draw.chance(0.7)
        self.ended_early: set[str] = set()
        self._faults = np.random.default_rng([22, seed])  # drawn apart, so that the rest is what it was
        self.jumps = 0
        self._count_jumps()

    def _with_room(self, options: Options) -> Options:
        """Tight: an arena that holds the longest request and little else."""
        if not self.tight:
            return options
        layout = start(self.bank, options).layout
        tokens = self.draw.longest + NEXT_TURN + self.draw.most_outputs + self.draw.pick(0, 0, 100)
        pages = layout.num_pages_for(tokens, self.draw.pick(1, 1, 2, 4)) + 1
        return replace(options, num_pages=pages)

    def _count_jumps(self) -> None:
        jump = self.run.sched.cache.jump

        def counted(lease: Any, hit: Any) -> None:
            jump(lease, hit)
            self.jumps += 1

        self.run.sched.cache.jump = counted  # type: ignore[method-assign]

    def arrivals(self) -> list[Arrival]:
        """One prompt, or a group that shares most of one."""
        draw, vocab = self.draw, self.bank.vocab_size
        if draw.chance(0.3):
            return self._burst()
        prompt, salt = self._prompt()
        params = replace(draw.params(len(prompt.ids), vocab), cache_salt=salt)
        priority = draw.pick(0, 0, 1, 2)
        kind = draw.pick("one", "one", "copies", "siblings")
        group = [Arrival(prompt, params, priority)]
        for _ in range(0 if kind == "one" else draw.between(1, 3)):
            other = prompt
            if kind != "copies":
                other = (prompt + Mixed(draw.ids(draw.between(1, 150), vocab))).first(draw.longest)
            group.append(Arrival(other, draw.params(len(other.ids), vocab), priority))
        return group

    def _mixed(self, ids: list[int]) -> Mixed:
        """Return the ids, some of which images replace if the model sees."""
        found, start = Mixed(ids), 0
        while self._sees and (start := start + int(self._images.integers(1, 150))) < len(ids):
            found = found.with_image(start, int(self._images.integers(len(IMAGE_SIDES))))
            if found.images:
                start = max(start, found.images[-1].end)
        return found

    def _burst(self) -> list[Arrival]:
        """Copies short enough that none waits for another: the later ones catch up in the middle of their prefill. With
        many outputs they outgrow a tight arena."""
        prompt = self._mixed(self.draw.ids(self.draw.between(129, 250), self.bank.vocab_size)[: self.draw.longest])
        outputs = self.draw.pick(8, self.draw.most_outputs)
        params = SamplingParams(n=4, max_tokens=outputs, temperature=0.9, seed=self.draw.seed, ignore_eos=True)
        return [Arrival(prompt, params, priority=0)]

    def _prompt(self) -> tuple[Mixed, str]:
        """A prompt and its salt: off the trunk, or off what an earlier request has so far, be it the next turn or a
        fork in the middle."""
        draw = self.draw
        own = self._mixed(draw.ids(draw.length(), self.bank.vocab_size))
        if not self.run.requests or draw.chance(0.35):
            shared = draw.pick(0, draw.between(0, draw.longest), 64 * draw.between(1, 9))
            return (self.trunk.first(shared) + own).first(draw.longest), draw.pick("", "", "", "b")
        request = draw.pick(*draw.pick(*self.run.requests.values()))
        history = Mixed(request.all_token_ids().tolist(), request.images)
        if draw.chance(0.5):
            cut = draw.between(0, len(history.ids))
            history = history.first(max(0, cut if draw.chance(0.5) else cut // 64 * 64 + draw.pick(-1, 0, 1)))
        room = draw.longest + NEXT_TURN
        return (history.first(room - 20) + own).first(room), request.params.cache_salt

    def play(self, groups: int) -> None:
        """Requests arrive, some are aborted, until all are done; then everything is checked."""
        draw, run = self.draw, self.run
        while groups or run.engine.has_unfinished():
            if groups and (not run.engine.has_unfinished() or draw.chance(0.3)):
                groups -= 1
                for arrival in self.arrivals():
                    self._add(arrival)
            if draw.chance(0.004):
                run.engine.core.scheduler.reset_prefix_cache()
            if draw.chance(0.006):
                self._abort_one()
            if self._sees and self._images.random() < PREEMPTED:
                self._preempt_one()
            run.step()
        flips = self.check()
        self.tally.note(flips=0 if run.options.rounds_what_is_kept else flips, jumps=self.jumps)
        self.tally.add_run(run, self.drafter)

    def _add(self, arrival: Arrival) -> None:
        run = self.run
        params, prompt = arrival.params, Prompt(np.asarray(arrival.prompt.ids, np.int32), images=arrival.prompt.images)
        if prompt.images:
            params = replace(params, truncate_prompt_tokens=None)
        kept = run.engine.inputs.prompt(prompt, params=params)
        total = len(kept.token_ids) + params.max_tokens  # type: ignore[operator]
        try:
            name = run.add(prompt, params, arrival.priority)
        except RequestTooLargeError:
            assert not run.sched.cache.room.ever_fits(total)
            self.tally.note(refused=1)
            return
        if not run.probe.failing and self._faults.random() < FAILING:
            run.probe.failing = run.requests[name][0].id
            run.probe.failing_after = int(self._faults.integers(1, 12))

    def _abort_one(self) -> None:
        open_ids = [name for name in self.run.requests if name not in self.run.outputs]
        open_ids += [name for name, output in self.run.outputs.items() if not output.finished]
        if open_ids:
            name = self.draw.pick(*open_ids)
            self.run.abort(name)
            self.ended_early.add(name)
            self.tally.note(aborted=1, aborted_midway=any(c.token_ids for c in self.run.outputs[name].outputs))

    def _preempt_one(self) -> None:
        """Preempt a request as if memory were short, which it seldom is for this model."""
        running = self.run.sched._running.requests
        if running and not self.run.sched._issued:
            self.run.sched._departures.preempt(self._images.choice(running))

    def check(self) -> int:
        """Compare every request with the oracle. Returns how many tokens differ by a tie."""
        run, options = self.run, self.run.options
        flips = 0
        for name in run.requests:
            check_restrictions(run, name)
            mine = answer(run, name)
            assert mine.output.finished, f"{name} never finished"
            flips += compare(mine, self.oracle.solve(options, mine), options.has_equal_bits)
            check_tokens_entered(run, name)
        assert options.force_state_copy or run.core.slot_bytes_copied == 0
        run.check_nothing_leaked()
        return flips
