"""Structured outputs through whole engines: every text matches, whatever the scheduling does to its request."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from forkpoint.engine.llm import LLM
from forkpoint.errors import InvalidParamsError
from forkpoint.outputs import CompletionOutput
from forkpoint.params import FinishReason, SamplingParams, StructuredOutputsParams
from tests.engine.real import ModelBank, Options, RealEngine, start

PATTERN = r'\{"id": [0-9]{1,9}, "name": "[a-z]{70,90}"\}'


def asking(pattern: str = PATTERN, **options: Any) -> SamplingParams:
    wanted = StructuredOutputsParams(regex=pattern)
    return SamplingParams(**{"max_tokens": 200, "seed": 3, "structured_outputs": wanted, **options})


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "random": {"top_p": 0.9, "n": 3},
    "penalised": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logprobs": 2},
    "long": {"min_tokens": 150, "top_k": 9},
}


def serve(bank: ModelBank, options: Options) -> tuple[RealEngine, dict[str, list[CompletionOutput]]]:
    """All kinds at once beside one request without a grammar, twice, so that the second time finds cached prefixes."""
    run = start(bank, options)
    found = {}
    for again in ("", " again"):
        names = {}
        for i, (kind, chosen) in enumerate(KINDS.items()):
            names[kind + again] = run.add([*bank.ids(0, 130), *bank.ids(i, 20 + i)], asking(**chosen))
        free = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        names["free" + again] = run.add(bank.ids(9, 100), free)
        run.run()
        found |= {kind: list(run.outputs[name].outputs) for kind, name in names.items()}
        assert again == "" or run.outputs[names["greedy again"]].num_cached_tokens == 128
    run.check_nothing_leaked()
    return run, found


def token_ids(found: dict[str, list[CompletionOutput]]) -> dict[str, list[tuple[int, ...]]]:
    return {kind: [output.token_ids for output in outputs] for kind, outputs in found.items()}


@pytest.fixture(scope="module")
def plain(bank: ModelBank) -> dict[str, list[CompletionOutput]]:
    return serve(bank, Options(deterministic=True))[1]


def test_every_text_matches(plain: dict[str, list[CompletionOutput]]) -> None:
    for kind, outputs in plain.items():
        if kind.startswith("free"):
            continue
        for output in outputs:
            assert output.finish_reason is FinishReason.STOP
            assert re.fullmatch(PATTERN, output.text), (kind, output.text)
            assert 70 <= len(json.loads(output.text)["name"]) <= 90
    assert len({output.text for output in plain["random"]}) == 3, "the completions of one prompt go their own ways"
    logprobs = plain["penalised"][0].logprobs
    assert logprobs is not None
    assert len(logprobs) == len(plain["penalised"][0].token_ids)


def test_cached_prefixes_change_nothing(plain: dict[str, list[CompletionOutput]]) -> None:
    by_kind = token_ids(plain)
    for kind in [*KINDS, "free"]:
        assert by_kind[kind] == by_kind[f"{kind} again"]


@pytest.mark.parametrize(
    "options",
    [
        Options(deterministic=True, async_scheduling=True),
        Options(deterministic=True, budget=192, max_num_seqs=3),
        Options(deterministic=True, async_scheduling=True, model="qwen3_next", force_state_copy=True),
    ],
    ids=["async", "narrow", "copied states"],
)
def test_scheduling_changes_nothing(
    bank: ModelBank, plain: dict[str, list[CompletionOutput]], options: Options
) -> None:
    assert token_ids(serve(bank, options)[1]) == token_ids(plain)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_preemption_changes_nothing(
    bank: ModelBank, plain: dict[str, list[CompletionOutput]], async_scheduling: bool
) -> None:
    run = start(bank, Options(deterministic=True, async_scheduling=async_scheduling))
    names = {}
    for i, (kind, chosen) in enumerate(KINDS.items()):
        names[kind] = run.add([*bank.ids(0, 130), *bank.ids(i, 20 + i)], asking(**chosen))
    while run.engine.has_unfinished():
        for _ in range(7):
            run.step()
        running = run.sched._running.requests
        if running and run.sched.stats().num_preemptions < 20:
            run.sched._departures.preempt(running[len(running) // 2])
    for kind, name in names.items():
        assert [output.token_ids for output in run.outputs[name].outputs] == token_ids(plain)[kind], kind
    assert sum(run.outputs[name].num_preemptions for name in names.values()) > 10
    run.check_nothing_leaked()


def test_the_public_way(tiny_model: Path) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    choices = StructuredOutputsParams(choice=["yes", "no, never"])
    with LLM(str(tiny_model), max_model_len=512, log_level="warning", seed=7, async_scheduling=True) as llm:
        wanted = [
            SamplingParams(structured_outputs=choices),
            SamplingParams(structured_outputs=StructuredOutputsParams(regex="(ab){3}"), ignore_eos=True),
            SamplingParams(max_tokens=4),
            SamplingParams(structured_outputs=choices, max_tokens=1, temperature=0.0),
        ]
        outputs = [found.outputs[0] for found in llm.generate(["Answer:"] * 4, wanted, use_tqdm=False)]
        assert outputs[0].text in ("yes", "no, never")
        assert outputs[1].text == "ababab"
        assert outputs[0].finish_reason is outputs[1].finish_reason is FinishReason.STOP
        assert outputs[0].stop_reason is None
        assert outputs[3].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        before = llm.get_metrics()["num_model_tokens"]
        for bad in ({"regex": "("}, {"json": {**schema, "not": {}}}):
            refused = SamplingParams(structured_outputs=StructuredOutputsParams(**bad))  # type: ignore[arg-type]
            with pytest.raises(InvalidParamsError, match=r"^the (regular expression|JSON schema) "):
                llm.generate(["fine", "not"], [SamplingParams(), refused], use_tqdm=False)
        assert llm.get_metrics()["num_model_tokens"] == before
