"""Bad input gets an error with a name; requests beside it answer as if alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from forkpoint.errors import (
    ForkpointError,
    InvalidParamsError,
    InvalidPromptError,
    QueueFullError,
    RequestTooLargeError,
)
from forkpoint.params import FinishReason
from tests.engine.compare import Oracle, answer, compare, params_of
from tests.engine.real import MAX_MODEL_LEN, MODELS, ModelBank, Options, RealEngine, start

SYNC_AND_ASYNC = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
EVERY_MODEL = pytest.mark.parametrize("model", MODELS)
BAD_TOKEN = 390


def ids(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, BAD_TOKEN, (count,), generator=generator).tolist()


def check_good(run: RealEngine, oracle: Oracle, names: list[str]) -> None:
    for name in names:
        mine = answer(run, name)
        assert mine.output.finished
        compare(mine, oracle.solve(run.options, mine), exact=False)
    run.check_nothing_leaked()


def bad_additions(run: RealEngine) -> list[tuple[type[ForkpointError], Callable[[], object]]]:
    def asked(prompt: list[int], **changes: object) -> Callable[[], object]:
        return lambda: run.add(prompt, params_of(**changes))

    return [
        (InvalidPromptError, asked([])),
        (InvalidPromptError, asked(ids(0, MAX_MODEL_LEN))),
        (InvalidPromptError, asked([5, 100_000])),
        (InvalidPromptError, asked([5, -1])),
        (InvalidParamsError, asked([5], temperature=-1.0)),
        (InvalidParamsError, asked([5], temperature=float("nan"))),
        (InvalidParamsError, asked([5], top_p=0.0)),
        (InvalidParamsError, asked([5], n=0)),
        (InvalidParamsError, asked([5], stop_token_ids=[100_000])),
        (InvalidParamsError, asked([5], logit_bias={100_000: 1.0})),
        (InvalidParamsError, asked([5], cache_breakpoints=[7])),
        (InvalidParamsError, asked(ids(0, MAX_MODEL_LEN - 5), min_tokens=8)),
        (RequestTooLargeError, asked(ids(0, 1500))),
        (QueueFullError, asked([5], n=5)),
    ]


@SYNC_AND_ASYNC
def test_refused_requests_leave_no_trace(bank: ModelBank, oracle: Oracle, async_scheduling: bool) -> None:
    run = start(bank, Options(async_scheduling=async_scheduling, num_pages=10, max_num_seqs=2, max_queue_len=4))
    good = [run.add(ids(1, 200), params_of(max_tokens=30))]
    run.step()
    good.append(run.add(ids(1, 150) + ids(2, 80), params_of(max_tokens=30)))
    for error, add in bad_additions(run):
        with pytest.raises(error, match=r"empty|\d"):
            add()
        run.step()
    run.run()
    check_good(run, oracle, good)


@EVERY_MODEL
@pytest.mark.parametrize(("when", "async_scheduling"), [("prefill", False), ("decode", True)])
def test_non_finite_values_of_one_request(
    bank: ModelBank, oracle: Oracle, model: str, async_scheduling: bool, when: str
) -> None:
    """NaN in one request's keys, values, states and logits reaches nobody else, then or later."""
    run = start(bank, Options(model, async_scheduling=async_scheduling, budget=192))
    embedding = run.probe.inner._model._embedding
    kept = embedding[BAD_TOKEN].clone()
    shared, never = ids(3, 140), params_of(max_tokens=20, logit_bias={BAD_TOKEN: -100.0})
    try:
        embedding[BAD_TOKEN] = torch.nan
        good = [run.add(shared + ids(4, 60), never)]
        if when == "prefill":
            bad = run.add([*shared, BAD_TOKEN, *ids(5, 100)], params_of())
        else:
            bad = run.add(shared, params_of(logit_bias={BAD_TOKEN: 100.0}))
        good.append(run.add(shared[:100], never))
        run.run()
        (completion,) = run.outputs[bad].outputs
        assert completion.finish_reason is FinishReason.ERROR
        assert completion.error is not None and "non-finite" in completion.error
        good.append(run.ask(shared + ids(6, 30), never))
    finally:
        embedding[BAD_TOKEN] = kept
    check_good(run, oracle, good)


@pytest.mark.parametrize(
    ("model", "poison", "async_scheduling"),
    [*((model, "tokens", False) for model in MODELS), ("qwen3_next", "sampling", True)],
)
def test_a_step_that_raises(
    bank: ModelBank,
    oracle: Oracle,
    model: str,
    async_scheduling: bool,
    poison: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request whose fault it is ends with the error; those beside it and after it answer as if alone."""
    run = start(bank, Options(model, async_scheduling=async_scheduling, budget=192, max_num_seqs=2))
    inner = run.probe.inner
    prompts = [ids(7, 300), ids(7, 300), ids(7, 200) + ids(8, 50)]
    names = [run.add(prompt, params_of(max_tokens=20)) for prompt in prompts]
    if poison == "tokens":
        forward = inner._model.forward
        bad = run.add([*ids(7, 100), BAD_TOKEN], params_of(max_tokens=20))

        def choke(token_ids: torch.Tensor, *rest: object) -> torch.Tensor:
            hidden = forward(token_ids, *rest)  # type: ignore[arg-type]
            if (token_ids == BAD_TOKEN).any():
                raise RuntimeError("the device caught fire")
            return hidden

        monkeypatch.setitem(inner._model.__dict__, "forward", choke)
        said = "RuntimeError: the device caught fire"
    else:
        bad = run.add(ids(7, 100), params_of(max_tokens=20, logit_bias={5: 1.0}))
        run.requests[bad][0].params.logit_bias["five"] = 1.0  # type: ignore[index]
        said = "TypeError"
    run.run()
    ended = run.outputs[bad].outputs[0]
    assert ended.finish_reason is FinishReason.ERROR and said in (ended.error or "")
    del run.requests[bad]
    names += [run.ask(prompt, params_of(max_tokens=20)) for prompt in prompts]
    check_good(run, oracle, names)


def test_n_sequences_do_not_half_enter_a_full_queue(bank: ModelBank, oracle: Oracle) -> None:
    run = start(bank, Options(max_queue_len=3, max_num_seqs=1))
    good = [run.add(ids(9, 70), params_of(n=2))]
    with pytest.raises(QueueFullError, match="max_queue_len=3"):
        run.add(ids(9, 70), params_of(n=2))
    assert run.sched.stats().num_waiting == 2
    good.append(run.add(ids(9, 90), params_of()))
    run.run()
    check_good(run, oracle, good)
