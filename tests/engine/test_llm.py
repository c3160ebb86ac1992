from __future__ import annotations

import dataclasses
import itertools
import math
import os
import signal
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from forkpoint.engine.detokenize import Detokenizer
from forkpoint.engine.llm import LLM
from forkpoint.engine.tokenizer import Tokenizer
from forkpoint.errors import (
    ConfigError,
    EngineStoppedError,
    InvalidParamsError,
    InvalidPromptError,
    ModelFolderError,
    RequestTooLargeError,
)
from forkpoint.outputs import RequestOutput
from forkpoint.params import FinishReason, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
LONG = "the catalogue lists every map of the town, by year and by shelf. " * 4


def generate(llm: LLM, prompt: Any, params: SamplingParams | None = None, **changes: Any) -> RequestOutput:
    params = dataclasses.replace(params or GREEDY, **changes)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output


def test_greedy_tokens_are_those_of_transformers(llm: LLM, tiny_model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    output = generate(llm, LONG, max_tokens=24)
    ids = torch.tensor([output.prompt_token_ids])
    expected = oracle.generate(ids, max_new_tokens=24, do_sample=False, use_cache=False)[0, ids.shape[1] :]
    assert list(output.outputs[0].token_ids) == expected.tolist()


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["a" * size for size in (200, 3, 90, 17)]
    params = [dataclasses.replace(GREEDY, max_tokens=count) for count in (2, 9, 4, 7)]
    outputs = llm.generate(prompts, params, use_tqdm=False, priority=[3, 0, 2, 1])
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 9, 4, 7]
    assert all(output.finished for output in outputs)
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_every_form_of_a_prompt(llm: LLM) -> None:
    ids = list(b"hello")
    forms: list[Any] = ["hello", ids, {"prompt": "hello"}, {"prompt_token_ids": ids}]
    outputs = [generate(llm, form) for form in forms] + llm.generate(forms, GREEDY, use_tqdm=False)
    assert all(output.outputs == outputs[0].outputs for output in outputs)
    assert all(output.prompt_token_ids == ids for output in outputs)


def test_a_second_sighting_is_served_from_the_cache(llm: LLM) -> None:
    cold, warm = generate(llm, LONG), generate(llm, LONG)
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens == (len(LONG) - 1) // 64 * 64
    assert warm.outputs == cold.outputs
    times = warm.metrics
    assert times.queued_ts == times.arrival_s < times.scheduled_ts < times.first_token_ts < times.last_token_ts
    assert times.first_token_latency == times.first_token_ts - times.arrival_s
    assert warm.outputs[0].finished()


def test_reset_forgets(llm: LLM) -> None:
    generate(llm, LONG)
    assert llm.reset_prefix_cache()
    assert generate(llm, LONG).num_cached_tokens == 0


def test_n_completions_differ_and_are_repeatable(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, max_tokens=8, seed=11)
    first, again = generate(llm, LONG, params), generate(llm, LONG, params)
    texts = [completion.text for completion in first.outputs]
    assert [completion.index for completion in first.outputs] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert [completion.token_ids for completion in again.outputs] == [c.token_ids for c in first.outputs]
    alone = generate(llm, LONG, params, n=1)
    assert alone.outputs[0].token_ids == first.outputs[0].token_ids


def test_requests_without_a_seed_differ_from_each_other(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8)
    outputs = llm.generate(["same", "same"], params, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids != outputs[1].outputs[0].token_ids


def test_a_stop_string_cuts_the_text(llm: LLM) -> None:
    whole = generate(llm, LONG).outputs[0].text
    stop = whole[4:7]
    cut = generate(llm, LONG, stop=stop).outputs[0]
    at = whole.find(stop)
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (whole[:at], FinishReason.STOP, stop)
    assert len(cut.token_ids) == at + 3
    kept = generate(llm, LONG, stop=[stop], include_stop_str_in_output=True).outputs[0]
    assert kept.text == whole[: at + 3]
    late = generate(llm, LONG, stop=stop, min_tokens=at + 4).outputs[0]
    assert late.text.startswith(whole[: at + 4])


def test_a_stop_token_ends_and_is_not_shown(llm: LLM) -> None:
    whole = generate(llm, LONG).outputs[0]
    token = whole.token_ids[5]
    at = whole.token_ids.index(token)
    cut = generate(llm, LONG, stop_token_ids=[token]).outputs[0]
    assert (cut.finish_reason, cut.stop_reason) == (FinishReason.STOP, token)
    assert cut.token_ids == whole.token_ids[: at + 1]
    assert cut.text == whole.text[:at]
    late = generate(llm, LONG, stop_token_ids=[token], min_tokens=at + 3).outputs[0]
    assert len(late.token_ids) >= at + 3 and token not in late.token_ids[: at + 3]


def test_the_end_of_sequence_token_ends_unless_ignored(llm: LLM) -> None:
    eos = 257
    ended = generate(llm, "hi", logit_bias={eos: 100}).outputs[0]
    assert (ended.token_ids, ended.text) == ([eos], "")
    assert (ended.finish_reason, ended.stop_reason) == (FinishReason.STOP, None)
    ignored = generate(llm, "hi", logit_bias={eos: 100}, ignore_eos=True).outputs[0]
    assert (len(ignored.token_ids), ignored.finish_reason) == (12, FinishReason.LENGTH)
    assert f"{ignored.finish_reason}" == "length", "scripts compare and print texts, as vLLM's are"


def test_logprobs_tell_the_chosen_token_first(llm: LLM) -> None:
    completion = generate(llm, LONG, logprobs=3).outputs[0]
    assert completion.logprobs is not None and completion.cumulative_logprob is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    for token, entries in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(entries)) == token and len(entries) == 3
        assert entries[token].rank == 1 and entries[token].decoded_token == chr(token)
        assert sum(math.exp(entry.logprob) for entry in entries.values()) <= 1.0 + 1e-5
    total = sum(
        entries[token].logprob for token, entries in zip(completion.token_ids, completion.logprobs, strict=True)
    )
    assert completion.cumulative_logprob == pytest.approx(total)


def test_prompt_logprobs_skip_the_first_token(llm: LLM) -> None:
    output = generate(llm, "hello there", prompt_logprobs=2, n=2, temperature=1.0)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len("hello there") and output.prompt_logprobs[0] is None
    for token, entries in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert entries is not None and next(iter(entries)) == token and 2 <= len(entries) <= 3


def test_scoring_a_prompt_with_a_single_output_token(llm: LLM) -> None:
    output = generate(llm, LONG, prompt_logprobs=0, max_tokens=1, logprobs=0)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert all(output.prompt_logprobs[1:])
    assert output.outputs[0].logprobs is not None and len(output.outputs[0].logprobs) == 1


def test_no_limit_means_the_rest_of_the_context(tiny_model: Path) -> None:
    with LLM(str(tiny_model), max_model_len=96, log_level="warning") as llm:
        output = generate(llm, "x" * 70, max_tokens=None, ignore_eos=True)
        assert len(output.outputs[0].token_ids) == 26
        assert output.outputs[0].finish_reason is FinishReason.LENGTH


BAD = [
    ("", {}, InvalidPromptError, "empty"),
    ([], {}, InvalidPromptError, "empty"),
    ("a\udcff", {}, InvalidPromptError, "character 1 of the prompt is the lone surrogate U.DCFF"),
    ([1, 999], {}, InvalidPromptError, "token id 999 is unknown"),
    ([1, -5], {}, InvalidPromptError, "unknown"),
    ([1, "two"], {}, InvalidPromptError, "not a token id"),
    ("x" * 1024, {}, InvalidPromptError, "1024 tokens > 1023 maximum"),
    ({"text": "x"}, {}, InvalidPromptError, "prompt_token_ids"),
    ("x", {"stop_token_ids": [999]}, InvalidParamsError, "stop_token_ids names token id 999"),
    ("x", {"logit_bias": {999: 1.0}}, InvalidParamsError, "logit_bias names token id 999"),
    ("x", {"cache_breakpoints": [5]}, InvalidParamsError, "position 5"),
    ("x" * 1000, {"min_tokens": 100, "max_tokens": 100}, InvalidParamsError, "leaves room for 24"),
]


@pytest.mark.parametrize(("prompt", "changes", "error", "text"), BAD)
def test_bad_input_is_refused_by_name(llm: LLM, prompt: Any, changes: Any, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        llm.generate([prompt], dataclasses.replace(GREEDY, **changes), use_tqdm=False)
    assert generate(llm, "hi").finished


def test_one_bad_prompt_stops_the_batch_before_it_starts(llm: LLM) -> None:
    before = llm.get_metrics()["num_model_tokens"]
    with pytest.raises(InvalidPromptError):
        llm.generate(["good", "", "also good"], GREEDY, use_tqdm=False)
    with pytest.raises(InvalidParamsError, match="2 sampling parameters for 1 prompts"):
        llm.generate(["good"], [GREEDY, GREEDY], use_tqdm=False)
    with pytest.raises(InvalidParamsError, match="priorities"):
        llm.generate(["good"], GREEDY, use_tqdm=False, priority=[1, 2])
    assert llm.get_metrics()["num_model_tokens"] == before


def test_more_prompts_than_the_queue_holds(tiny_model: Path) -> None:
    with LLM(str(tiny_model), max_model_len=256, max_queue_len=2, max_num_seqs=2, log_level="warning") as llm:
        outputs = llm.generate([f"prompt {i}" for i in range(9)], GREEDY, use_tqdm=False)
        assert [output.prompt for output in outputs] == [f"prompt {i}" for i in range(9)]


def test_a_request_that_can_never_fit_is_refused_by_name(tiny_model: Path) -> None:
    with LLM(str(tiny_model), kv_cache_memory_bytes=400_000, log_level="warning") as llm:
        with pytest.raises(RequestTooLargeError):
            llm.generate(["fits", "y" * 1900], GREEDY, use_tqdm=False)
        assert generate(llm, "fits").finished


def test_an_answer_of_no_asked_length_ends_where_the_arena_is_full(tiny_model: Path) -> None:
    endless = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    with LLM(str(tiny_model), kv_cache_memory_bytes=400_000, log_level="warning") as llm:
        (output,) = llm.generate("short", endless, use_tqdm=False)
        answer = output.outputs[0]
        assert answer.finish_reason is FinishReason.LENGTH and len(answer.token_ids) == 443  # 7 blocks less the prompt
        with pytest.raises(RequestTooLargeError, match="shorten it or raise"):
            llm.generate("short", dataclasses.replace(endless, max_tokens=len(answer.token_ids) + 64), use_tqdm=False)


def test_an_arena_without_room_for_one_request_says_what_it_needs(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs \d+ bytes"):
        LLM(str(tiny_model), kv_cache_memory_bytes=1000, log_level="warning")


def test_a_budget_for_one_request_at_a_time_says_so(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"max_model_len": 128, "max_num_batched_tokens": 64, "log_level": "warning"}
    LLM(str(tiny_model), **options).close()
    assert "max_num_batched_tokens=64 leaves room for max_num_seqs=1" in capsys.readouterr().err
    LLM(str(tiny_model), **options, max_num_seqs=1).close()
    assert "max_num_seqs" not in capsys.readouterr().err


def test_an_arena_larger_than_the_memory_says_so(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"allocating an arena of 931322.6 GiB; lower kv_cache_memory_bytes"):
        LLM(str(tiny_model), kv_cache_memory_bytes=10**15, log_level="warning")


def test_the_tokenizer_leaves_it_to_the_engine_how_long_a_prompt_may_be(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = Tokenizer.load(str(tiny_model))
    tokenizer.hf.model_max_length = 10
    with caplog.at_level("WARNING"):
        assert len(tokenizer.encode("a prompt of more than ten tokens")) > 10
        assert len(tokenizer.encode_with_offsets("a prompt of more than ten tokens")[0]) > 10
    assert not caplog.records


def test_wrong_options_are_named(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean max_model_len"):
        LLM(str(tiny_model), max_modl_len=5)
    with pytest.raises(ModelFolderError, match="no model folder"):
        LLM(str(tmp_path / "missing"))
    with pytest.raises(ModelFolderError, match=r"config\.json"):
        LLM(str(tmp_path))


def test_without_a_tokenizer_ids_go_in_and_out(tiny_model: Path) -> None:
    with LLM(str(tiny_model), skip_tokenizer_init=True, max_model_len=256, log_level="warning") as llm:
        output = generate(llm, [104, 105], logprobs=0)
        assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 12
        with pytest.raises(InvalidPromptError, match="give token ids"):
            generate(llm, "hi")
        with pytest.raises(InvalidParamsError, match="stop_token_ids instead"):
            generate(llm, [104], stop="x")
        with pytest.raises(ConfigError, match="skip_tokenizer_init"):
            llm.chat([{"role": "user", "content": "hi"}])
        with pytest.raises(ConfigError, match="skip_tokenizer_init"):
            llm.get_tokenizer()


def test_the_tokenizer_is_that_of_transformers(llm: LLM) -> None:
    ids = llm.get_tokenizer()("once upon a time")["input_ids"]
    assert generate(llm, ids).prompt_token_ids == list(ids)


def test_a_text_that_cannot_be_told_ends_its_own_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = generate(llm, LONG).outputs[0]
    add = Detokenizer.add

    def choke(detokenizer: Detokenizer, token_id: int) -> str:
        if not detokenizer._skip:
            raise IndexError("a fault of the tokenizer")
        return add(detokenizer, token_id)

    monkeypatch.setattr(Detokenizer, "add", choke)
    bad = dataclasses.replace(GREEDY, skip_special_tokens=False, logprobs=1)
    good, broken = llm.generate([LONG, LONG + "x"], [GREEDY, bad], use_tqdm=False)
    assert good.outputs[0] == whole
    (ended,) = broken.outputs
    assert ended.finish_reason is FinishReason.ERROR and "a fault of the tokenizer" in (ended.error or "")
    assert len(ended.token_ids) == len(ended.logprobs or ()) == 1
    assert llm.get_metrics()["num_running"] == 0


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}], ids=["sync", "async"])
def test_streams_grow_to_the_whole_answer(tiny_model: Path, options: dict[str, Any]) -> None:
    with LLM(str(tiny_model), max_model_len=512, log_level="warning", **options) as llm:
        whole = generate(llm, LONG)
        seen = list(llm.stream(LONG, GREEDY))
        texts = [output.outputs[0].text for output in seen]
        assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
        assert seen[-1].finished and seen[-1].outputs == whole.outputs
        stream = llm.stream(LONG, GREEDY)
        next(stream)
        stream.close()
        assert llm.get_metrics()["num_running"] == 0
        assert llm.reset_prefix_cache()


@pytest.fixture
def pressing(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> Callable[[int], None]:
    """Ctrl-C is pressed in the middle of the step after so many."""

    def press(after: int) -> None:
        steps = itertools.count()
        step = llm._engine.core.step

        def pressed(*args: Any) -> Any:
            if next(steps) == after:
                signal.raise_signal(signal.SIGINT)
            return step(*args)

        monkeypatch.setattr(llm._engine.core, "step", pressed)

    return press


def test_ctrl_c_ends_the_open_requests_and_leaves_the_engine_usable(llm: LLM, pressing: Callable[[int], None]) -> None:
    endless = dataclasses.replace(GREEDY, max_tokens=400, ignore_eos=True)
    other = llm.stream("another prompt", GREEDY)
    next(other)
    pressing(3)
    *_, last = llm.stream(LONG, endless)
    assert last.outputs[0].finish_reason is FinishReason.ABORT and last.finished
    pressing(3)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([LONG] * 3, endless, use_tqdm=False)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    *_, last = other
    assert last.finished and len(last.outputs[0].token_ids) == 12
    assert generate(llm, LONG).finished


def test_chat_declares_message_ends(llm: LLM) -> None:
    system = {"role": "system", "content": LONG}
    first = llm.chat([system, {"role": "user", "content": "where?" * 20}], GREEDY, use_tqdm=False)[0]
    other, third = llm.chat(
        [[system, {"role": "user", "content": "when?" * 20}], [system, {"role": "user", "content": "who?"}]],
        GREEDY,
        use_tqdm=False,
    )
    assert first.num_cached_tokens == 0
    boundary = len(LONG) + len("<>system\n<>\n") - 2  # each special token counts once
    for output in (other, third):
        assert output.num_cached_tokens == boundary // 64 * 64


def test_a_closed_engine_says_so(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), max_model_len=128, log_level="warning")
    llm.close()
    llm.close()
    with pytest.raises(EngineStoppedError, match="closed"):
        llm.generate("x", GREEDY, use_tqdm=False)


def test_a_forked_process_is_refused_and_disturbs_nobody(llm: LLM) -> None:
    """The parent has a stream open meanwhile, which the child's copy of the iterator leaves alone."""
    expected = generate(llm, LONG).outputs[0].token_ids
    stream = llm.stream(LONG, GREEDY)
    next(stream)
    read_fd, write_fd = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's own warning about threads
        pid = os.fork()
    if pid == 0:
        said = b"nothing was raised"
        try:
            stream.close()
            generate(llm, LONG)
        except EngineStoppedError as error:
            llm.close()
            said = str(error).encode()
        finally:
            os.write(write_fd, said)
            os._exit(0)
    os.close(write_fd)
    with open(read_fd) as reader:
        assert "create an engine in each process" in reader.read()
    os.waitpid(pid, 0)
    assert list(stream)[-1].outputs[0].token_ids == expected
