"""Drafts change no token: every parameter, every drafter, with and without --deterministic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forkpoint.engine.llm import LLM
from forkpoint.errors import ConfigError
from forkpoint.ops.cpu.build import load_operators
from forkpoint.outputs import CompletionOutput
from forkpoint.params import SamplingParams, StructuredOutputsParams
from forkpoint.sched.plan import StepPlan
from tests.engine.compare import Oracle, answer, compare
from tests.engine.drafters import KnownDrafter, RandomDrafter
from tests.engine.real import ModelBank, Options, RealEngine, start

PLAIN = Options(cpu_ops="cpp" if load_operators().module is not None else "torch", deterministic=True)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "random, siblings": {"top_p": 0.9, "n": 2, "logprobs": 0},
    "penalised": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "logprobs": 3},
    "cut": {"min_p": 0.02, "top_k": 9, "logit_bias": {7: 2.0, 9: -3.0}},
    "stops late": {"min_tokens": 20, "stop_token_ids": list(range(4, 200)), "temperature": 1.4},
    "stop string": {"stop": ["e", "an", "th"], "min_tokens": 11},
    "grammar": {"structured_outputs": StructuredOutputsParams(regex="[a-z]{1,9} [0-9]{20,40}"), "max_tokens": 60},
    "bad words": {"bad_words": ["the", "e", "on"], "temperature": 0.0},
}


def serve(
    bank: ModelBank, options: Options, drafter: Any = None, ahead: set[str] | None = None
) -> tuple[RealEngine, dict[str, CompletionOutput]]:
    """All kinds at once; their completions by the sequence's id. `ahead` collects the sequences with a row that was
    planned before it was known which drafts of its last step were accepted."""
    run = start(bank, options, drafter)
    if ahead is not None:

        def note(plan: StepPlan) -> None:
            ahead.update(run.probe.rows[row] for row in plan.rows.row[plan.rows.optimistic].tolist())

        run.probe.before_step = note
    for i, chosen in enumerate(KINDS.values()):
        params = SamplingParams(**{"max_tokens": 45, "seed": i, "ignore_eos": True, **chosen})
        run.add([4 + (7 * i + j * j) % 250 for j in range(40 + 9 * i)], params)
    run.run()
    pairs = [pair for name, own in run.requests.items() for pair in zip(own, run.outputs[name].outputs, strict=True)]
    return run, {request.id: completion for request, completion in pairs}


def ids_of(found: dict[str, CompletionOutput]) -> dict[str, tuple[int, ...]]:
    return {name: completion.token_ids for name, completion in found.items()}


@pytest.mark.parametrize("chance", [0.6, 1.0, None])
def test_outputs_are_those_of_plain_decoding(bank: ModelBank, chance: float | None) -> None:
    """Ids, log-probabilities, texts and why they ended; bit for bit. None: random ids and what is in the cache."""
    plain, wanted = serve(bank, PLAIN)
    for most in (1, 4):
        drafter = (
            RandomDrafter(most, most, bank.vocab_size)
            if chance is None
            else KnownDrafter(ids_of(wanted), most, chance, bank.vocab_size)
        )
        run, found = serve(bank, replace(PLAIN, max_num_drafts=most), drafter)
        assert found == wanted
        drafts = run.sched.stats().drafts
        assert drafts.num_draft_tokens > 50 and (
            chance != 1.0 or run.sched.stats().num_steps < plain.sched.stats().num_steps
        )
        per_position = list(drafts.num_accepted_tokens_per_pos.values())
        assert per_position == sorted(per_position, reverse=True) and sum(per_position) == drafts.num_accepted_tokens
        assert all(request.num_draft_tokens for own in run.requests.values() for request in own)
        run.check_nothing_leaked()


@pytest.mark.parametrize("model", ["kimi_linear", "jamba", "falcon_mamba"])
def test_so_are_those_of_other_states(bank: ModelBank, model: str) -> None:
    options = replace(PLAIN, model=model)
    _, wanted = serve(bank, options)
    run, found = serve(bank, replace(options, max_num_drafts=4), KnownDrafter(ids_of(wanted), 4, 0.7, bank.vocab_size))
    assert found == wanted
    assert run.sched.stats().drafts.num_accepted_tokens > 50
    run.check_nothing_leaked()


@pytest.mark.parametrize(("interval", "most"), [(8, 3), (2, 9)])
def test_states_are_written_every_few_tokens_with_drafts_too(bank: ModelBank, interval: int, most: int) -> None:
    """Equal to rounding, which is too little here to change an id."""
    exact = replace(PLAIN, deterministic=False)
    _, wanted = serve(bank, exact)
    drafter = KnownDrafter(ids_of(wanted), most, 0.7, bank.vocab_size)
    run, found = serve(bank, replace(exact, max_num_drafts=most, state_write_interval=interval), drafter)
    assert ids_of(found) == ids_of(wanted)
    assert run.sched.stats().drafts.num_accepted_tokens > 50
    run.check_nothing_leaked()


BOUNDARY_CASES = [
    (first, 4, beyond, model, interval)
    for model, interval in [("qwen3_next", 1), ("qwen3_next", 8), ("kimi_linear", 1), ("falcon_mamba", 1)]
    for beyond in (0, 30)
    for first in (100, 101, 102, 103)
]
# The boundary comes after 7 to 16 tokens of a window.
BOUNDARY_CASES += [(first, 15, 30, model, 1) for model in ("qwen3_next", "jamba") for first in (105, 111, 113, 121)]


@pytest.mark.parametrize(("first", "most", "beyond", "model", "interval"), BOUNDARY_CASES)
def test_a_state_at_a_boundary_is_kept_when_its_last_tokens_were_drafts(
    bank: ModelBank, first: int, most: int, beyond: int, model: str, interval: int
) -> None:
    """The request ends with 128 tokens computed, the last of them in one window, or goes on from there, now with a
    window that ends at 128 and now with one that has it inside; the next turn resumes at 128."""
    options = replace(PLAIN, model=model, deterministic=False, max_num_drafts=most, state_write_interval=interval)
    prompt = [4 + j * j % 251 for j in range(first)]
    params = SamplingParams(temperature=0.0, max_tokens=129 - first + beyond, ignore_eos=True)
    alone = start(bank, replace(PLAIN, model=model))
    known = list(alone.outputs[alone.ask(prompt, params)].outputs[0].token_ids)
    run = start(bank, options, KnownDrafter({"req-0": known, "req-1": ()}, most, 1.0, bank.vocab_size))
    sequence = run.requests[run.ask(prompt, params)][0]
    assert sequence.output_token_ids == known and sequence.num_accepted_tokens
    again = run.ask([*prompt, *known, 5, 6, 7], replace(params, max_tokens=3))
    assert run.outputs[again].num_cached_tokens == 128
    compare(answer(run, again), Oracle(bank).solve(options, answer(run, again)), exact=False)


def test_rows_whose_drafts_are_in_flight_are_penalised_like_others(bank: ModelBank) -> None:
    """Rows with penalties are planned before it is known which drafts of their last step were accepted."""
    _, wanted = serve(bank, PLAIN)
    drafter = KnownDrafter(ids_of(wanted), 3, 0.8, bank.vocab_size, ahead=True)
    options = replace(PLAIN, max_num_drafts=3, async_scheduling=True)
    ahead = set[str]()
    run, found = serve(bank, options, drafter, ahead)
    penalised = [own[0].id for own in run.requests.values() if own[0].params.has_penalties]
    assert found == wanted and penalised and ahead.issuperset(penalised)


def test_a_row_may_have_drafts_in_one_step_and_none_in_the_next(bank: ModelBank) -> None:
    _, wanted = serve(bank, PLAIN)
    known = KnownDrafter(ids_of(wanted), 3, 0.8, bank.vocab_size)
    count = iter(range(10**6))
    draft = known.draft
    known.draft = lambda *given: draft(*given) if next(count) % 2 else None  # type: ignore[method-assign]
    assert serve(bank, replace(PLAIN, max_num_drafts=3), known)[1] == wanted


def test_the_option(tiny_model: Path) -> None:
    options: dict[str, Any] = {"max_model_len": 1024, "log_level": "warning", "seed": 7, "deterministic": True}
    params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    prompts = [{"prompt_token_ids": [5 + i % (7 + n) for i in range(50)]} for n in range(3)]
    with LLM(str(tiny_model), **options) as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    for method in ("ngram", "suffix", "cache"):
        config = f'{{"method": "{method}", "num_speculative_tokens": 3, "prompt_lookup_min": 2}}'
        with LLM(str(tiny_model), speculative_config=config, **options) as llm:
            found = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
            assert found == wanted
            assert llm.get_metrics()["num_draft_tokens"] > 0
    with LLM(str(tiny_model), state_write_interval=16, **options) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)] == wanted
    for interval, wrong in ((16, "not possible"), (3, "must be 1, 2")):
        with pytest.raises(ConfigError, match=wrong):
            LLM(str(tiny_model), speculative_config=config, state_write_interval=interval, **options)
    with pytest.raises(ConfigError, match="redirect"):
        LLM(str(tiny_model), speculative_config=config, force_state_copy=True, **options)
