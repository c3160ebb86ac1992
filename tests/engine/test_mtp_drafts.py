"""Drafts of the MTP layer: those of one pass over the text, however the engine came to it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from evaluation.suite import DEMO_MODEL
from evaluation.tasks import make_training_dialogue
from forkpoint.cache.lease import Lease
from forkpoint.config import CacheConfig
from forkpoint.engine.llm import LLM
from forkpoint.models.mtp import MTPHead
from forkpoint.ops.cpu.build import load_operators
from forkpoint.params import SamplingParams
from forkpoint.runtime.draft_graphs import DraftGraphs
from forkpoint.sched.drafter import Drafter
from forkpoint.sched.plan import TO_DRAFT, IntArray, StepPlan
from forkpoint.sched.request import Request
from tests.engine.real import ModelBank, Options, RealEngine, start
from tests.runtime.test_graphs import RecordingPlatform
from train.data import encode
from train.delta_rule import torch_delta_rule
from train.loss import ahead
from train.model import make_rows
from train.storage import load_model

DEPTH = 3
CPP = load_operators().module is not None
PARTING = 128
PROMPT = 140  # tokens of the text that the model did not say


class Always(Drafter):
    """Every row has as many drafts of the model's as it may."""

    def draft(self, request: Request, lease: Lease, most: int) -> IntArray | None:
        return np.full(min(most, DEPTH), TO_DRAFT, np.int32)


class GoingAhead(Always):
    """Nor do they wait for anything."""

    def plans_early(self, request: Request, lease: Lease) -> bool:
        return True


@contextmanager
def noting(drafts: DraftGraphs) -> Iterator[dict[tuple[int, int], list[int]]]:
    """What is drafted, by row and position of the row's newest token."""
    found: dict[tuple[int, int], list[int]] = {}
    fill = drafts.filled

    def filled(plan: StepPlan, must_know: bool) -> StepPlan:
        plan = fill(plan, must_know)
        rows, end = plan.rows, np.cumsum(plan.rows.num_tokens)
        for i in np.flatnonzero(rows.num_drafts):
            key = int(rows.row[i]), int(rows.start[i])
            found[key] = rows.tokens[end[i] - rows.num_drafts[i] : end[i]].tolist()
        return plan

    drafts.filled = filled  # type: ignore[method-assign]
    yield found


def drafts_of(run: RealEngine, prompt: list[int]) -> dict[int, list[int]]:
    runner = run.probe.inner
    assert runner._drafts is not None
    with noting(runner._drafts) as found:
        run.ask(prompt, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
    return {position: ids for (_, position), ids in found.items()}


@pytest.mark.parametrize("model", ["qwen3_next", "qwen3_next_moe"])
def test_drafts_are_those_of_a_cold_run(bank: ModelBank, model: str) -> None:
    """In chunks of any size, after a hit, and where another prompt parted a token before, at and after a block."""
    options = Options(model, "cpp" if CPP else "torch", deterministic=True, max_num_drafts=DEPTH, mtp=True)
    cold = replace(options, cache=CacheConfig(enable_prefix_caching=False))
    prompt = [4 + (j * j + 3 * j) % 250 for j in range(200)]
    want = drafts_of(start(bank, cold, Always()), prompt)
    assert len(want) > 5 and {len(ids) for ids in want.values()} >= {1, 2, 3}
    for budget in (72, 140):  # chunks of 64 and 128, on the grid
        assert drafts_of(start(bank, replace(cold, budget=budget), Always()), prompt) == want
    for parting in (PARTING - 1, PARTING, PARTING + 1):
        run = start(bank, options, Always())
        drafts_of(run, [*prompt[:parting], *(5 + (token + 1) % 200 for token in prompt[parting:])])
        assert drafts_of(run, prompt) == want
    assert drafts_of(run, prompt) == want
    assert run.sched.stats().cache.hit_tokens >= 3 * 64
    run.check_nothing_leaked()


def draft_well(run: RealEngine, answers: dict[int, list[int]]) -> None:
    """Correct most of the layer's drafts on the device. `answers` are keyed by the length of the prompt."""
    runner, chance = run.probe.inner, np.random.default_rng(5)
    drafts, records = runner._drafts, runner._records
    assert isinstance(drafts, DraftGraphs) and records is not None
    make = drafts._draft

    def made(row: IntArray, start: IntArray, counts: IntArray, *rest: IntArray) -> None:
        make(row, start, counts, *rest)
        firsts = start - records.num_rejected.numpy()[rest[-1]]
        for r, first, count in zip(row.tolist(), firsts.tolist(), counts.tolist(), strict=True):
            num_prompt = int(runner.batch.num_prompt_tokens[r])
            for i, token in enumerate(answers[num_prompt][first + 1 - num_prompt :][:count]):
                drafts.drafted[r, i] = token + int(chance.random() > 0.8)

    drafts._draft = made  # type: ignore[method-assign]


FREE: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.9}]
PENALISED = [{"repetition_penalty": 1.3, "frequency_penalty": 0.4, **kind} for kind in FREE]
STOPS_LATE = [{"min_tokens": 30, "stop_token_ids": list(range(20, 400)), **kind} for kind in FREE]


@pytest.mark.parametrize(
    ("deterministic", "interval", "host", "kinds"),
    [
        (True, 1, False, FREE),
        (False, 1, False, FREE),
        (False, 8, False, FREE),
        (True, 1, True, FREE),
        (False, 1, True, FREE),
        (True, 1, False, PENALISED),
        (True, 1, False, STOPS_LATE),
    ],
)
def test_a_device_plans_before_its_results(
    bank: ModelBank, deterministic: bool, interval: int, host: bool, kinds: list[dict[str, Any]]
) -> None:
    """The device computes where a step starts when it verifies the drafts before it.

    Ids and log-probabilities are equal bit for bit, or ids alone. The next turns resume from states that were saved at
    boundaries which a step might not have reached. Rows whose parameters need the number of outputs wait for it.
    """
    params = [SamplingParams(seed=5, max_tokens=60, ignore_eos=True, logprobs=2, **kind) for kind in kinds]
    prompts = [[4 + (j * j + 3 * j + i) % 250 for j in range(50 + 31 * i)] for i in range(2)]
    ops = "cpp" if host and CPP else "torch"
    options = Options("qwen3_next", ops, deterministic=deterministic, async_scheduling=True, max_num_seqs=3)
    found, later = list[list[Any]](), list[list[Any]]()
    for num_drafts in (0, DEPTH):
        platform = RecordingPlatform() if num_drafts and not host else None
        if platform is not None:
            platform.has_graphs = False
        own = replace(options, max_num_drafts=num_drafts, mtp=num_drafts > 0, state_write_interval=interval)
        run = start(bank, own, GoingAhead() if num_drafts else None, platform)
        if num_drafts:
            draft_well(run, {len(ids): list(answer.token_ids) for ids, answer in zip(prompts, found[0], strict=True)})
        plans = list[StepPlan]()
        run.probe.before_step = plans.append
        names = [run.add(*pair) for pair in zip(prompts, params, strict=True)]
        run.run()
        found.append([run.outputs[name].outputs[0] for name in names])
        drafts, rows = run.sched.stats().drafts, np.concatenate([plan.rows.optimistic for plan in plans])
        turns = [[*ids, *answer.token_ids] for ids, answer in zip(prompts, found[0], strict=True)]
        if run.sched._drafting is not None:
            run.sched._drafting._drafter = Drafter()
        next_turn = [run.outputs[run.ask(ids, SamplingParams(temperature=0.0, max_tokens=5))] for ids in turns]
        later.append([(output.num_cached_tokens, output.outputs[0].token_ids) for output in next_turn])
    ids = [[answer.token_ids for answer in own] for own in found]
    assert found[0] == found[1] if deterministic else ids[0] == ids[1]
    assert deterministic or later[0] == later[1]
    assert 10 < drafts.num_accepted_tokens < drafts.num_draft_tokens - 10
    assert kinds is not FREE or rows.sum() > len(rows) * (1 / 3 if deterministic else 0.6)
    run.check_nothing_leaked()


@pytest.fixture(scope="module")
def text() -> list[int]:
    """What the shipped model says greedily after a dialogue, with its prompt."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    prompt = encode(make_training_dialogue(random.Random(5), 300), tokenizer)[0][:PROMPT]
    params = SamplingParams(temperature=0.0, max_tokens=192 - PROMPT, ignore_eos=True)
    with LLM(str(DEMO_MODEL), dtype="float32", skip_tokenizer_init=True, log_level="warning") as llm:
        output = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]
    return [*prompt, *output.outputs[0].token_ids]


@torch.no_grad()
def by_the_training_code(text: list[int]) -> Tensor:
    """`[DEPTH, T]`: drafts for the tokens at t + 2, t + 3, .. in one pass over the text."""
    device = torch.device("cpu")
    model = load_model(DEMO_MODEL, torch_delta_rule, torch.float32, device)
    tokens = torch.tensor(text)
    rows = make_rows(model.shape, 1, len(text), device)
    following = [ahead(tokens, rows, count) for count in range(1, DEPTH + 1)]
    outputs = model.drafts(model(tokens, rows), following, rows)
    return torch.stack([model.logits(output).argmax(-1) for output in outputs])


def by_the_engine(text: list[int], step: int = 1) -> dict[int, list[int]]:
    """At places of what the model said, which hits and prefill lead to, the drafts behind one token; with step 0 in
    one run, at the places where its steps begin."""
    found: dict[int, list[int]] = {}
    with LLM(
        str(DEMO_MODEL),
        dtype="float32",
        skip_tokenizer_init=True,
        log_level="warning",
        speculative_config={"method": "mtp", "num_speculative_tokens": DEPTH},
    ) as llm:
        core: Any = llm._engine.core
        core.scheduler._drafting._drafter = Always()
        with noting(core._runner._drafts) as noted:
            for place in range(PROMPT, len(text) - DEPTH - 1, step or len(text)):
                count = DEPTH + 2 if step else len(text) - place
                params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
                llm.generate({"prompt_token_ids": text[:place]}, params, use_tqdm=False)
                found |= {at: ids for (_, at), ids in noted.items() if at == place or not step}
                noted.clear()
    return found


def accepted(drafts: dict[int, list[int]], text: list[int]) -> int:
    """Drafts that are the text's next tokens, and all before them in their step."""
    num = 0
    for place, ids in drafts.items():
        for token, wanted in zip(ids, text[place + 1 :], strict=False):
            if token != wanted:
                break
            num += 1
    return num


@pytest.fixture(scope="module")
def right(text: list[int]) -> dict[int, list[int]]:
    return by_the_engine(text)


def test_acceptance_is_that_of_the_training_code(text: list[int], right: dict[int, list[int]]) -> None:
    """Token for token, as far as the drafts before were right."""
    want, got = by_the_training_code(text), right
    other = {place: want[:, place - 1].tolist() for place in got}
    assert accepted(got, text) == accepted(other, text) > len(got) // 2
    assert [ids[0] for ids in got.values()] == [ids[0] for ids in other.values()]


def test_steps_that_fold_what_was_accepted_draft_the_same(text: list[int], right: dict[int, list[int]]) -> None:
    found = by_the_engine(text, 0)
    places = sorted(right.keys() & found.keys())
    assert len(places) > 10 and any(b - a > 1 for a, b in pairwise(places))
    assert [found[place] for place in places] == [right[place] for place in places]


def swapped(self: MTPHead, embedded: Tensor, hidden: Tensor) -> Tensor:
    of_embedding, of_hidden = self._norms
    return self._join(torch.cat([of_hidden(hidden), of_embedding(embedded)], dim=-1))


def uncentred(self: MTPHead, embedded: Tensor, hidden: Tensor) -> Tensor:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (weight - 1.0)

    parts = [norm(x, n.weight) for x, n in zip((embedded, hidden), self._norms, strict=True)]
    return self._join(torch.cat(parts, dim=-1))


def forgetful(self: MTPHead, embedded: Tensor, hidden: Tensor) -> Tensor:
    of_embedding, of_hidden = self._norms
    return self._join(torch.cat([of_embedding(embedded), of_hidden(hidden.roll(1, 1))], dim=-1))


@pytest.mark.parametrize("wrong", [swapped, uncentred, forgetful])
def test_wrong_heads_guess_worse(
    text: list[int],
    right: dict[int, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    wrong: Callable[[MTPHead, Tensor, Tensor], Tensor],
) -> None:
    monkeypatch.setattr(MTPHead, "_joined", wrong)
    found = by_the_engine(text, 6)
    assert accepted(found, text) < 0.8 * accepted({place: right[place] for place in found}, text)


def test_ids_and_log_probabilities_are_those_of_plain_decoding(tmp_path: Path) -> None:
    """The shipped model with long answers, most of whose drafts count."""
    questions = [[{"role": "user", "content": text}] for text in ("Tell me about yourself.", "Count from one to ten.")]
    params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True, logprobs=1)
    found = []
    for config in (None, {"method": "mtp", "num_speculative_tokens": DEPTH}):
        with LLM(str(DEMO_MODEL), log_level="warning", deterministic=True, speculative_config=config) as llm:
            outputs = llm.chat(questions, params, use_tqdm=False)
            found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
            metrics = llm.get_metrics()
    assert found[0] == found[1]
    # How many there are depends on how long steps take; that most are right does not.
    assert metrics["num_accepted_tokens"] > metrics["num_draft_tokens"] / 2 > 0
