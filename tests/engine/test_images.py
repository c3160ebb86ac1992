"""Images through `LLM.generate`: logits against transformers' full model, cold, in chunks, after hits and decoding."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from forkpoint import LLM, SamplingParams
from forkpoint.errors import InvalidPromptError
from forkpoint.images import ImageSpan
from forkpoint.runtime.graphs import graph_shapes
from forkpoint.runtime.step_inputs import StepShape
from forkpoint.sched.draft_length import DraftLength
from tests.image_models import (
    IMAGE,
    TOLERANCE,
    Asked,
    Operators,
    Part,
    Watched,
    oracle,
    picture,
    prompt_of,
    write_vision_checkpoint,
)
from tests.lfm2_vl_models import Lfm2VlOracle, lfm2_vl_prompt, write_lfm2_vl
from tests.ling_vl_models import ling_vl_oracle, write_ling_vl
from tests.nemotron_omni_models import nemotron_omni_oracle, write_nemotron_omni
from tests.runtime.test_graphs import RecordingPlatform

RNG = np.random.default_rng(1)
INTRO, QUESTION, OTHER = (RNG.integers(2, IMAGE, count).tolist() for count in (100, 40, 70))
SPAN = (101, 241)  # tokens of the first picture, after the intro and the token before it


@pytest.fixture(scope="module", params=["dense", "moe", "lfm2_vl", "lfm2_vl_moe", "nemotron_omni", "ling_vl"])
def watched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param.startswith("lfm2_vl"):
        theirs = write_lfm2_vl(folder, moe=request.param == "lfm2_vl_moe")
        found = Watched(folder, theirs, lfm2_vl_prompt, Lfm2VlOracle(folder), checkpoint_interval=64)
    elif request.param == "ling_vl":
        found = Watched(folder, write_ling_vl(folder), prompt_of, ling_vl_oracle, checkpoint_interval=64)
    elif request.param == "nemotron_omni":
        theirs = write_nemotron_omni(folder)
        found = Watched(folder, theirs, lfm2_vl_prompt, nemotron_omni_oracle, checkpoint_interval=64)
    else:
        theirs = write_vision_checkpoint(folder, moe=request.param == "moe")
        found = Watched(folder, theirs, checkpoint_interval=64)
    yield found
    found.llm.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A dense model, and transformers' instance of it."""
    place = tmp_path_factory.mktemp("plain")
    return place, write_vision_checkpoint(place)


@pytest.fixture
def ask(watched: Watched) -> Callable[..., Asked]:
    """Ask an engine whose caches are empty."""
    watched.llm.reset_prefix_cache()
    watched.forget_images()

    def asked(parts: list[Part], num_outputs: int = 1) -> Asked:
        found = watched.ask(parts, num_outputs)
        assert found.error <= TOLERANCE
        return found

    return asked


def test_hits_before_behind_and_inside_an_image(ask: Callable[..., Asked]) -> None:
    image, second = picture(1, 320, 448), picture(2, 200, 130)
    cold = ask([INTRO, image, QUESTION])
    assert (cold.cached, cold.num_runs) == (0, 1) and cold.num_tokens in (282, 283), "Ling writes a newline"
    behind = ask([INTRO, image, QUESTION])
    assert behind.cached == 256 > SPAN[1] and behind.num_runs == 0
    inside = ask([INTRO, image, OTHER])
    assert SPAN[0] < inside.cached == 192 < SPAN[1] and inside.num_runs == 0
    before = ask([INTRO, picture(3, 320, 448), QUESTION])
    assert before.cached == 64 < SPAN[0] and before.num_runs == 1
    both = ask([INTRO, image, QUESTION, second, OTHER])
    assert both.cached == 256 and both.num_runs == 1
    swapped = ask([INTRO, second, QUESTION, image, OTHER])
    assert swapped.cached == 64 and swapped.num_runs == 0
    assert ask([INTRO, image, QUESTION]).cached == 256


def test_a_hit_inside_an_image_runs_the_tower_again_once_embeddings_are_dropped(
    watched: Watched, ask: Callable[..., Asked]
) -> None:
    image = picture(1, 320, 448)
    ask([INTRO, image, QUESTION])
    watched.forget_images()
    assert ask([INTRO, image, QUESTION]).num_runs == 0, "no token of the image was computed"
    inside = ask([INTRO, image, OTHER])
    assert inside.cached == 192 and inside.num_runs == 1


def test_an_image_at_another_place_or_twice_is_no_hit(ask: Callable[..., Asked]) -> None:
    image = picture(1, 320, 448)
    ask([INTRO, image, QUESTION])
    assert ask([[*INTRO, 7], image, QUESTION]).cached == 64
    twice = ask([INTRO, image, image, QUESTION])
    assert twice.cached == 192 and twice.num_runs == 0


def test_equal_bytes_in_another_shape_are_another_image(ask: Callable[..., Asked]) -> None:
    pixels = np.random.default_rng(1).bytes(3 * 256 * 256)
    assert ask([INTRO, Image.frombytes("RGB", (256, 256), pixels), QUESTION]).num_runs == 1
    other = ask([INTRO, Image.frombytes("RGB", (512, 128), pixels), QUESTION])
    assert other.cached == 64 and other.num_runs == 1


def test_decoding_goes_on_at_the_shifted_positions(ask: Callable[..., Asked]) -> None:
    parts = [INTRO, picture(1, 320, 448), QUESTION, picture(2, 200, 130), OTHER]
    first = ask(parts, 40)
    assert ask(parts, 40).outputs == first.outputs


def test_a_prompt_may_begin_and_end_with_an_image(ask: Callable[..., Asked]) -> None:
    """Ling's first rows have negative positions there."""
    ask([picture(4, 640, 64), INTRO, picture(1, 96, 96)], 8)


@pytest.mark.parametrize("budget", [64, 128, 192])
@pytest.mark.parametrize("cache_size", [1 << 15, 0], ids=["kept", "dropped"])
def test_chunks_end_inside_images(folder: tuple[Path, Any], budget: int, cache_size: int) -> None:
    """The tower runs again in every chunk if nothing is kept, and the prompt ends."""
    ask_in_chunks(Watched(*folder, max_num_batched_tokens=budget, max_num_seqs=1, encoder_cache_size=cache_size))


def ask_in_chunks(watched: Watched) -> None:
    parts = [INTRO, picture(1, 320, 448), QUESTION, picture(2, 480, 640), OTHER]
    for number in range(2):
        found = watched.ask(parts, 4)
        assert found.error <= TOLERANCE
        assert found.cached == (640 if number else 0)
    watched.llm.close()


@pytest.mark.parametrize(("budget", "cache_size"), [(64, 1 << 15), (128, 0), (192, 1 << 15)])
def test_chunks_end_inside_images_of_a_tower_with_a_norm_behind_it(
    tmp_path_factory: pytest.TempPathFactory, budget: int, cache_size: int
) -> None:
    place = tmp_path_factory.mktemp("nemotron_omni")
    theirs = write_nemotron_omni(
        place, architecture="NemotronH_Super_Omni_Reasoning_V3", num_nextn_predict_layers=1, moe_latent_size=16
    )
    options = {"max_num_batched_tokens": budget, "max_num_seqs": 1, "encoder_cache_size": cache_size}
    ask_in_chunks(Watched(place, theirs, lfm2_vl_prompt, nemotron_omni_oracle, **options))


def completions(llm: LLM, prompts: list[list[Part]], num_outputs: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True)
    found = llm.generate([prompt_of(parts) for parts in prompts], params, use_tqdm=False)
    assert all(output.outputs[0].error is None for output in found)
    return [list(output.outputs[0].token_ids) for output in found]


def bits(llm: LLM, prompts: list[list[Part]], num_outputs: int) -> list[Any]:
    """The outputs' tokens and the log-probabilities of the likeliest ones, which show every bit of the logits."""
    params = SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True, logprobs=5)
    found = llm.generate([prompt_of(parts) for parts in prompts], params, use_tqdm=False)
    return [output.outputs[0].logprobs for output in found]


def scored(llm: LLM, prompts: list[list[Part]], num_outputs: int) -> list[tuple[list[int], list[float]]]:
    """The greedy outputs and their log-probabilities."""
    best = [
        [max(step.items(), key=lambda each: each[1].logprob) for step in row] for row in bits(llm, prompts, num_outputs)
    ]
    return [([token for token, _ in row], [found.logprob for _, found in row]) for row in best]


def assert_same(found: list[tuple[list[int], list[float]]], want: list[tuple[list[int], list[float]]]) -> None:
    """Compare outputs of `scored`. Wrong positions behind an image seldom change a token, but all log-probabilities."""
    for (ids, own), (same_ids, other) in zip(found, want, strict=True):
        assert ids == same_ids and np.abs(np.subtract(own, other)).max() < 1e-3


def num_spans() -> int:
    """The number of images that something holds, other tests' engines included."""
    gc.collect()
    return sum(type(each) is ImageSpan for each in gc.get_objects())


def engine(folder: Path, **options: Any) -> LLM:
    sizes = {"max_model_len": 1024, "kv_cache_memory_bytes": 1 << 26}
    plain = {"skip_tokenizer_init": True, "device": "cpu", "cpu_ops": "torch", "log_level": "error"}
    return LLM(str(folder), **{**sizes, **plain, **options})


def test_preempted_requests_go_on_as_if_alone(folder: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside an image, behind it and while they decode."""
    prompts = [[INTRO[i:], picture(i, 320, 448), QUESTION] for i in range(2)]
    with engine(folder[0], max_num_batched_tokens=66, max_num_seqs=2) as llm:
        alone = [scored(llm, [parts], 20)[0] for parts in prompts]
        llm.reset_prefix_cache()
        scheduler: Any = llm._engine.core.scheduler  # type: ignore[attr-defined]
        schedule, steps = scheduler.schedule, count()

        def schedule_or_preempt() -> Any:
            running = scheduler._running.requests
            if running and next(steps) % 3 == 2:
                scheduler._departures.preempt(running[-1])
            return schedule()

        monkeypatch.setattr(scheduler, "schedule", schedule_or_preempt)
        assert_same(scored(llm, prompts, 20), alone)
        assert llm.get_metrics()["num_preemptions"] > 8


def test_a_batch_of_texts_and_images_gives_what_each_gives_alone(folder: tuple[Path, Any]) -> None:
    image, other = picture(1, 320, 448), picture(2, 96, 160)
    prompts: list[list[Part]] = [[INTRO, image, OTHER], [OTHER], [INTRO[:9], other, [5, 6], image, INTRO], [INTRO]]
    with engine(folder[0]) as llm:
        alone = [scored(llm, [parts], 30)[0] for parts in prompts]
        llm.reset_prefix_cache()
        runs = llm._engine.core._runner._encoded.num_runs  # type: ignore[attr-defined]
        assert_same(scored(llm, prompts, 30), alone)
        assert llm._engine.core._runner._encoded.num_runs == runs + 2, "requests share an encoded image"  # type: ignore[attr-defined]
    with engine(folder[0], tensor_parallel_size=2) as llm:  # two processes, each of which runs the whole tower
        runner: Any = llm._engine.core._runner  # type: ignore[attr-defined]
        send, num_bytes = runner._send, list[int]()
        runner._send = lambda data: (num_bytes.append(len(data)), send(data))[1]
        assert_same(scored(llm, prompts, 30), alone)
        assert max(num_bytes) < image.width * image.height, "its pixels are not in messages"


def test_an_image_without_finite_embeddings_fails_alone(
    folder: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others in the step go on, and its embeddings are not kept for the next request."""
    broken, good = picture(1, 96, 96), picture(2, 96, 96)
    prompts: list[list[Part]] = [[INTRO, broken, QUESTION], [INTRO, good, QUESTION], [OTHER]]
    with engine(folder[0]) as llm:
        alone = completions(llm, prompts, 8)
        llm.reset_prefix_cache()
        encoded: Any = llm._engine.core._runner._encoded  # type: ignore[attr-defined]
        tower, bad = encoded._tower, float(np.array(broken).sum())

        def failing(pixels: Any) -> Any:
            found = tower(pixels)
            return found * float("nan") if float(pixels.sum()) == bad else found

        monkeypatch.setattr(encoded, "_tower", failing)
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        found = [output.outputs[0] for output in llm.generate([prompt_of(each) for each in prompts], params)]
        assert "non-finite logits" in str(found[0].error)
        assert [list(each.token_ids) for each in found[1:]] == alone[1:]
        monkeypatch.setattr(encoded, "_tower", tower)
        assert completions(llm, prompts, 8) == alone


def test_drafts_change_no_token(tmp_path: Path) -> None:
    write_vision_checkpoint(tmp_path, mtp=True)
    prompts = [[INTRO, picture(1, 320, 448), QUESTION], [INTRO, picture(1, 320, 448), QUESTION], [OTHER]]
    with engine(tmp_path) as llm:
        alone = [completions(llm, [parts], 24)[0] for parts in prompts]
    options = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}
    for more in ({}, {"async_scheduling": True}):
        with engine(tmp_path, **options, **more) as llm:
            assert completions(llm, prompts, 24) == alone
            assert llm.get_metrics()["num_draft_tokens"] > 0


@torch.no_grad()
def first_draft(folder: Path, theirs: Any, parts: list[Part], output: int) -> Any:
    """The logits of the draft after the prompt and its first output, by transformers' model of the head's layer.

    Entry `i` joins token `i` and the state of token `i - 1`, and is rotated as that token is, as in training.
    """
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5TextModel

    stored = load_file(folder / "model.safetensors")
    weights = {name.removeprefix("mtp."): value for name, value in stored.items() if name.startswith("mtp.")}
    text, seen = theirs.model.language_model, dict[str, Any]()
    hook = text.register_forward_pre_hook(lambda *given: seen.update(given[2]), with_kwargs=True)
    oracle(theirs, parts)
    hook.remove()
    hidden = text(**{**seen, "use_cache": False}).last_hidden_state[0]
    config = copy.deepcopy(text.config)
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    head = Qwen3_5TextModel(config).eval()
    head.load_state_dict({name: weight for name, weight in weights.items() if name[:5] in ("layer", "norm.")}, False)

    def normed(name: str, x: torch.Tensor) -> torch.Tensor:
        norm = Qwen3_5RMSNorm(config.hidden_size, config.rms_norm_eps)
        norm.weight.copy_(weights[f"pre_fc_norm_{name}.weight"])
        return norm(x)  # type: ignore[no-any-return]

    embedded = torch.cat([seen["inputs_embeds"][0, 1:], text.embed_tokens(torch.tensor([output]))])
    entries = torch.cat([normed("embedding", embedded), normed("hidden", hidden)], dim=-1) @ weights["fc.weight"].T
    found = head(inputs_embeds=entries[None], position_ids=seen["position_ids"], use_cache=False)
    return theirs.lm_head(found.last_hidden_state[0, -1])


@pytest.mark.parametrize("budget", [2048, 128])
def test_drafts_are_rotated_as_the_head_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    """Behind an image, cold and after hits behind and inside it, which reuse the head's keys.

    vllm#54498: the head looked its keys up by rotary positions.
    """
    monkeypatch.setattr(DraftLength, "choose", lambda self, name, most: most)  # whether they pay or not
    theirs = write_vision_checkpoint(tmp_path, mtp=True)
    drafts = {"method": "mtp", "num_speculative_tokens": 3}
    options = {"max_num_batched_tokens": budget, "max_num_seqs": 1, "checkpoint_interval": 64}
    image, params = picture(1, 320, 448), SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with engine(tmp_path, speculative_config=drafts, **options) as llm:
        model: Any = llm._engine.core._runner._model  # type: ignore[attr-defined]
        draft, calls = model.draft, list[tuple[int, torch.Tensor]]()

        def noting(ids: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
            found: tuple[torch.Tensor, torch.Tensor] = draft(ids, *rest)
            calls.append((int(ids[0]), model.logits(found[0])[0].clone()))
            return found

        model.draft = noting
        for question, cached in (QUESTION, 0), ([*QUESTION, 7], 256), (OTHER, 192):
            calls.clear()
            (output,) = llm.generate([prompt_of([INTRO, image, question])], params, use_tqdm=False)
            first, got = calls[0]
            assert output.num_cached_tokens == cached and first == output.outputs[0].token_ids[0]
            want = first_draft(tmp_path, theirs, [INTRO, image, question], first)
            assert float((got - want).abs().max() / want.std()) <= TOLERANCE


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_recorded_steps_decode_behind_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_drafts: int) -> None:
    """Steps of rows with and without images are replayed, planned before the results of earlier ones are known."""
    write_vision_checkpoint(tmp_path, mtp=True)
    prompts: list[list[Part]] = [[INTRO, picture(1, 320, 448), QUESTION], [OTHER], [picture(2, 96, 96), INTRO]]
    with engine(tmp_path) as llm:
        alone = [scored(llm, [parts], 24)[0] for parts in prompts]

    def decoding_shapes(*sizes: Any, **options: Any) -> list[StepShape]:
        """Shapes without prompts, which torch's operators on a CPU cannot pad."""
        return [shape for shape in graph_shapes(*sizes, **options) if not shape.num_segments]

    monkeypatch.setattr("forkpoint.worker.build.resolve_platform", lambda *_: RecordingPlatform())
    monkeypatch.setattr("forkpoint.worker.build.graph_shapes", decoding_shapes)
    options: dict[str, Any] = {"async_scheduling": True, "max_num_seqs": 4, "max_num_batched_tokens": 128}
    if num_drafts:
        options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": num_drafts}
    with engine(tmp_path, **options) as llm:
        assert_same(scored(llm, prompts, 24), alone)
        assert llm.get_metrics()["num_replayed_steps"] > 5


def test_deterministic_hits_have_the_bits_of_an_uncached_run(folder: tuple[Path, Any]) -> None:
    watched = Watched(*folder, deterministic=True, checkpoint_interval=64)
    parts = [INTRO, picture(1, 320, 448), QUESTION]
    assert watched.ask(parts).error <= TOLERANCE
    cold = watched.computed()
    watched.llm.reset_prefix_cache()
    watched.ask([INTRO, picture(1, 320, 448), OTHER])
    hit = watched.ask(parts)
    assert SPAN[0] < hit.cached < SPAN[1]
    assert (watched.computed() == cold[hit.cached :]).all()
    watched.llm.close()


def test_deterministic_images_have_the_same_bits_beside_others(folder: tuple[Path, Any]) -> None:
    sizes = ((320, 448), (96, 160), (64, 64))
    prompts: list[list[Part]] = [[INTRO, picture(i, *size), OTHER] for i, size in enumerate(sizes)]
    with engine(folder[0], deterministic=True) as llm:
        alone = [bits(llm, [parts], 8)[0] for parts in prompts]
        llm.reset_prefix_cache()
        assert bits(llm, prompts, 8) == alone


def test_pixels_are_freed_with_their_request(folder: tuple[Path, Any]) -> None:
    """However it ends, and with its blocks still cached."""
    before = num_spans()
    with engine(folder[0], max_num_seqs=1) as llm:
        completions(llm, [[INTRO, picture(1, 64, 64), OTHER], [INTRO, picture(2, 64, 64)]], 4)
        stream = llm.stream(prompt_of([OTHER, picture(3, 64, 64)]), SamplingParams(max_tokens=50, ignore_eos=True))
        next(stream)
        assert num_spans() == before + 1
        stream.close()  # type: ignore[attr-defined]
        completions(llm, [[OTHER]], 1)
        assert num_spans() == before


def test_placeholders_without_images_are_text(folder: tuple[Path, Any]) -> None:
    with engine(folder[0]) as llm:
        output = llm.generate({"prompt_token_ids": [5, IMAGE, 6]}, SamplingParams(max_tokens=1), use_tqdm=False)[0]
        assert list(output.prompt_token_ids) == [5, IMAGE, 6]


def test_what_is_refused_says_why(folder: tuple[Path, Any]) -> None:
    good, wide = picture(1, 64, 64), Image.new("RGB", (6432, 32))
    huge = Image.new("1", (9000, 9000))

    def prompt(data: Any, ids: list[int] | None = None) -> dict[str, Any]:
        return {"prompt_token_ids": ids or [5, IMAGE, 6], "multi_modal_data": data}

    with engine(folder[0], limit_mm_per_prompt={"image": 2, "video": 0}) as llm:
        for given, says in [
            (prompt({"image": [good, good]}), "1 placeholders for images (token id 250) and 2 images"),
            (prompt({"image": good}, [5, 6]), "0 placeholders"),
            (
                prompt({"sound": good}),
                "is not understood; give {'image': a PIL image or a list of them}, or {'video': ",
            ),
            (prompt({"video": good}), "is not a video; give an array [frames, height, width, 3] of uint8"),
            (prompt({"image": "cat.png"}), "'cat.png' is not an image"),
            (prompt({"image": [good] * 3}, [IMAGE] * 3), "at most 2 are allowed (--limit-mm-per-prompt)"),
            (prompt({"image": wide}), "6432x32 pixels; its longer side may be at most 200 times the shorter one"),
            (prompt({"image": huge}), "9000x9000 pixels; from 1 to 67108864 are read"),
            (prompt({"image": picture(1, 1024, 1024)}), "the prompt is too long: 1026 tokens > 1023 maximum. This"),
        ]:
            with pytest.raises(InvalidPromptError) as refused:
                llm.generate(given, use_tqdm=False)
            assert says in str(refused.value)
        with pytest.raises(InvalidPromptError, match="cannot be truncated"):
            llm.generate(prompt({"image": good}), SamplingParams(truncate_prompt_tokens=3), use_tqdm=False)


def test_the_text_model_alone_loads_no_tower(folder: tuple[Path, Any]) -> None:
    """Texts have the same bits with a tower, and no operator more."""
    found = []
    alone: dict[str, Any]
    for alone in ({"language_model_only": True}, {"limit_mm_per_prompt": {"image": 0, "video": 0}}):
        with engine(folder[0], **alone) as llm:
            assert llm._engine.core._runner._model.vision is None  # type: ignore[attr-defined]
            with pytest.raises(InvalidPromptError, match="started with --language-model-only, or without images"):
                llm.generate(prompt_of([INTRO, picture(1, 64, 64)]), use_tqdm=False)
    for options in ({}, alone):
        with engine(folder[0], **options) as llm, Operators() as operators:
            found.append((bits(llm, [[INTRO]], 20), operators.counts))
    assert found[0] == found[1] and found[0][1].total() > 1000
