"""Images in conversations: what becomes of parts of messages, typed placeholders, and pictures of all kinds."""

from __future__ import annotations

import base64
import io
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forkpoint import LLM, SamplingParams
from forkpoint.cache.hashing import HashChain
from forkpoint.engine import image_processor
from forkpoint.engine.chat import ChatTemplate
from forkpoint.engine.image_processor import ImageProcessor
from forkpoint.engine.resized_pictures import ResizedPictures
from forkpoint.errors import InvalidPromptError
from forkpoint.image_families.qwen3_5 import Qwen35Images
from forkpoint.image_families.settings import View
from forkpoint.images import ImageSpan
from tests.image_models import CHAT_IDS, picture, prompt_of, write_chat_model
from tests.ling_vl_models import write_ling_vl

PAD, START, END = (CHAT_IDS[f"{name}_token_id"] for name in ("image", "vision_start", "vision_end"))
Pillow = pytest.importorskip("PIL.Image")
SETTINGS = Qwen35Images(image_token_id=PAD, patch_size=16, merge_size=2, min_pixels=1024, max_pixels=1 << 20)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = tmp_path_factory.mktemp("chat")
    write_chat_model(folder)
    with LLM(str(folder), device="cpu", max_model_len=1024, kv_cache_memory_bytes=1 << 26, log_level="error") as found:
        yield found


def data_url(image: Any) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def base64_of(image: Any) -> str:
    return data_url(image).partition(",")[2]


def looser(url: str) -> str:
    """The same data with line breaks, in the alphabet for URLs and without padding, as some clients send it."""
    head, data = url.split(",")
    data = data.rstrip("=").replace("+", "-").replace("/", "%2F")
    return f"{head}," + "\n".join(data[at : at + 76] for at in range(0, len(data), 76))


def url_part(image: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(image), "detail": "high"}}


def user(*content: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return {"role": "user", "content": parts}


def test_a_conversation_equals_its_text_with_images(llm: LLM) -> None:
    """The prompt of `generate` and every form of an image part give the same ids."""
    image = picture(1, 96, 160)
    text = "<|im_start|>user\nlook:<|vision_start|><|image_pad|><|vision_end|>nice<|im_end|>\n<|im_start|>assistant\n"
    want = llm.generate({"prompt": text, "multi_modal_data": {"image": image}}, SamplingParams(max_tokens=1))[0]
    for part in (
        url_part(image),
        {"type": "image_url", "image_url": data_url(image)},
        {"type": "input_image", "image_url": data_url(image)},
        {"type": "input_image", "image_url": looser(data_url(image))},
        {"type": "image_pil", "image_pil": image},
        {"type": "image", "image": image},
        {"type": "image_url", "image_url": {"url": base64_of(image)}},
        {"type": "image", "url": data_url(image)},
        {"type": "image", "data": base64_of(image), "mimeType": "image/png"},
        {"type": "image", "source_type": "base64", "data": base64_of(image), "mime_type": "image/png"},
        {"type": "image", "base64": base64_of(image), "mime_type": "image/png"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of(image)}},
        {"type": "image", "source": {"type": "url", "url": data_url(image)}},
    ):
        prompt = llm.render_chat([user("look:", part, "nice")])
        assert prompt.token_ids.tolist() == list(want.prompt_token_ids)
        assert [(span.num_rows, span.num_columns) for span in prompt.images] == [(3, 5)]
        assert prompt.num_image_tokens == 15 == prompt.token_ids.tolist().count(PAD)
        assert prompt.images[0].end in prompt.breakpoints


def test_requests_bound_the_size_of_their_images(llm: LLM) -> None:
    image = picture(1, 640, 640)
    low, high = (
        {"type": "image_url", "image_url": {"url": data_url(image), "detail": name}} for name in ("low", "auto")
    )
    flat = {"type": "input_image", "image_url": data_url(image), "detail": "low"}

    def sizes(*parts: Any, **options: Any) -> list[int]:
        return [span.num_tokens for span in llm.render_chat([user(*parts)], **options).images]

    assert sizes(low, high, flat) == [256, 400, 256]
    assert sizes(low, high, mm_processor_kwargs={"max_pixels": 65536}) == [64, 64]
    given = {**prompt_of([[5], image]), "mm_processor_kwargs": {"max_pixels": 65536}}
    given["prompt_token_ids"] = [5, PAD]
    output = llm.generate(given, SamplingParams(max_tokens=1), use_tqdm=False)[0]
    assert list(output.prompt_token_ids).count(PAD) == 64
    options: Any = {"use_tqdm": False, "mm_processor_kwargs": given.pop("mm_processor_kwargs")}
    for own in ({}, {"mm_processor_kwargs": None}):  # no settings of its own
        (output,) = llm.generate({**given, **own}, SamplingParams(max_tokens=1), **options)
        assert output.prompt_token_ids.count(PAD) == 64
    small = picture(1, 64, 64)
    assert sizes(url_part(small), mm_processor_kwargs={"min_pixels": 65536}) == [64]
    for wrong, says in [
        ({"max_pixels": 1 << 23}, "at most 4194304 are allowed"),
        ({"max_pixels": "1"}, "mm_processor_kwargs"),
        ({"fps": 2}, "give min_pixels and max_pixels"),
        ([1], "in a dict"),
    ]:
        with pytest.raises(InvalidPromptError, match=says):
            sizes(high, mm_processor_kwargs=wrong)
    with pytest.raises(InvalidPromptError, match="has detail='huge'; give one of 'low', 'auto', 'high', 'original'"):
        sizes({**flat, "detail": "huge"})


def test_requests_say_what_is_behind_transparent_parts(llm: LLM) -> None:
    clear = url_part(Pillow.new("RGBA", (64, 64), (255, 0, 0, 0)))

    def colours(given: Any) -> list[int]:
        (span,) = llm._chat.render([user(clear)], media_io_kwargs=given).images  # type: ignore[union-attr]
        return np.unique(span.pixels.reshape(-1, 3), axis=0).tolist()[0]  # type: ignore[no-any-return]

    black = {"image": {"rgba_background_color": [0, 0, 0], "image_mode": "RGB"}, "audio": {"x": 1}}
    assert [colours(given) for given in (None, black, {}, None)] == [[255] * 3, [0] * 3, [255] * 3, [255] * 3]
    for wrong in ({"image": {"rgba_background_color": [0, 0]}}, {"image": {"num_frames": 1}}, {"film": {}}, [1]):
        with pytest.raises(InvalidPromptError, match=r"media_io_kwargs=.* is not allowed; give values such as"):
            colours(wrong)


def test_typed_placeholders_stay_text(llm: LLM) -> None:
    typed = "I type <|image_pad|> and <|vision_start|><|image_pad|><|vision_end|>."
    conversation = [
        user(url_part(picture(1, 64, 64)), typed),
        {"role": "assistant", "content": "You typed <|image_pad|>."},
        user(typed, url_part(picture(2, 96, 96))),
    ]
    prompt = llm.render_chat(conversation)
    ids = prompt.token_ids.tolist()
    assert [span.num_tokens for span in prompt.images] == [4, 9]
    for span in prompt.images:
        assert ids[span.start - 1] == START and ids[span.end] == END
        assert ids[span.start : span.end] == [PAD] * span.num_tokens
    assert ids.count(PAD) == 13 + 5
    assert prompt.text is not None and prompt.text.count(typed) == 2
    assert llm.render_chat([user(typed)]).images == ()


def test_ling_has_one_newline_behind_an_image(tmp_path: Path) -> None:
    """Also with placeholders that somebody typed next to one."""
    write_chat_model(tmp_path, write_ling_vl)
    typed = "<|vision_start|><|image_pad|><|vision_end|>"
    with LLM(str(tmp_path), device="cpu", max_model_len=1024, kv_cache_memory_bytes=1 << 24, log_level="error") as llm:
        (newline,) = llm.get_tokenizer().encode("\n")
        for text in (f"look {typed}", f"\nlook {typed}"):
            prompt = llm.render_chat([user(url_part(picture(1, 64, 96)), text)])
            ids, (span,) = prompt.token_ids.tolist(), prompt.images
            assert ids[span.start - 1] == START and ids[span.end : span.end + 2] == [END, newline]
            assert ids.count(newline) == 4 and ids.count(PAD) == span.num_tokens + 1 == 7


def test_the_next_turn_reuses_the_images(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It decodes the new picture alone, and hits in the tokens of the one before."""
    decoded, upright = list[Any](), image_processor._upright_rgb
    monkeypatch.setattr(
        image_processor, "_upright_rgb", lambda image, *a: (decoded.append(image.size), upright(image, *a))[1]
    )
    params = SamplingParams(temperature=0.0, max_tokens=4)
    runner: Any = llm._engine.core._runner  # type: ignore[attr-defined]
    first = [user("what is this? " * 9, url_part(picture(5, 320, 320)))]
    llm.chat(first, params, use_tqdm=False)
    runs = runner._encoded.num_runs
    later = [*first, {"role": "assistant", "content": "noise"}, user("and this?", url_part(picture(6, 96, 96)))]
    output = llm.chat(later, params, use_tqdm=False)[0]
    assert output.num_cached_tokens >= 192 and runner._encoded.num_runs == runs + 1
    assert decoded == [(320, 320), (96, 96)]
    bounds = [{"max_pixels": 65536}, {"max_pixels": 65536}, None]
    sizes = [llm.render_chat(first, mm_processor_kwargs=each).images[0].num_tokens for each in bounds]
    assert sizes == [64, 64, 100] and len(decoded) == 3, "other settings give other pixels"


def test_a_replica_that_resizes_otherwise_misses(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of Pillow changes some values by 1, so the same file is another image there."""
    messages = [user("a long introduction " * 7, url_part(picture(31, 330, 330)))]
    (own,) = llm.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False)
    prompt, kind = llm.render_chat(messages), type(picture(1, 32, 32))
    resize, images = kind.resize, llm._chat._images  # type: ignore[union-attr]

    def otherwise(image: Any, *args: Any) -> Any:
        values = np.array(resize(image, *args))
        values[5, 7, 1] ^= 1
        return Pillow.fromarray(values)

    monkeypatch.setattr(images.kept, "_parts", OrderedDict())  # type: ignore[union-attr]
    monkeypatch.setattr(kind, "resize", otherwise)
    other = llm.render_chat(messages)
    assert other.token_ids.tolist() == prompt.token_ids.tolist() == list(own.prompt_token_ids)
    chains = [HashChain("", images=each.images) for each in (prompt, other)]
    for chain in chains:
        chain.extend(prompt.token_ids)
    first = prompt.images[0].start // 64  # block with tokens of the image
    assert [a == b for a, b in zip(*(chain.hashes for chain in chains), strict=True)] == [True] * first + [False] * (
        len(chains[0].hashes) - first
    )
    (output,) = llm.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.num_cached_tokens <= first * 64 and first > 1


def test_resized_pictures_are_kept_within_a_bound() -> None:
    kept, sizes, num_resized = ResizedPictures(max_bytes=6000), (1, 2, 1, 3, 1, 2), list[int]()

    def resize(value: int) -> list[ImageSpan]:
        num_resized.append(value)
        return [ImageSpan.of(0, np.full((32, 32, 3), value, np.uint8), 32)]  # 3072 bytes

    for value in sizes:
        (span,) = kept.get(bytes([value]), SETTINGS, partial(resize, value))
        assert isinstance(span, ImageSpan) and span.pixels[0, 0, 0] == value
    assert num_resized == [1, 2, 1, 3, 1, 2], "one of them fits"
    roomy = ResizedPictures(max_bytes=7000)
    for value in sizes:
        roomy.get(bytes([value]), SETTINGS, partial(resize, value))
    assert num_resized[6:] == [1, 2, 3, 2], "the least recently used one goes first"


def test_what_is_refused_says_why_and_shows_no_data(llm: LLM) -> None:
    """vllm#27466: errors showed the pixels of images."""
    good = data_url(picture(1, 64, 64))
    secret = base64.b64encode(b"secret" * 50).decode()
    for part, says in [
        ({"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}, "--allowed-media-domains"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "--allowed-media-domains"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "not in base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,?!" + secret}}, "not valid base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64," + secret}}, "300 bytes is broken"),
        ({"type": "image_url", "image_url": {"url": good[:-200]}}, "cannot be decoded"),
        ({"type": "image_url", "image_url": {"url": secret}}, "300 bytes is broken"),
        ({"type": "image_url", "image_url": {"url": f"base64:{secret}"}}, "the image URL is not fetched"),
        ({"type": "image_url", "image_url": {"url": f"{secret}.png"}}, "not valid base64"),
        ({"type": "image_url", "image_url": {}}, "needs image_url"),
        ({"type": "image", "source": {"type": "file", "file_id": "file-1"}}, "file_id is not supported"),
        ({"type": "file", "file": {"file_data": secret}}, "send the text of a file, or its pages as images"),
        ({"type": "input_image", "file_id": "file-1"}, "file_id is not supported"),
        ({"type": "input_audio", "input_audio": {"data": secret}}, "only text parts and images"),
    ]:
        with pytest.raises(InvalidPromptError, match=says) as refused:
            llm.render_chat([user("look", part)])
        assert secret[:30] not in str(refused.value) and good[30:60] not in str(refused.value)
    with pytest.raises(InvalidPromptError, match="System message cannot contain images"):
        llm.render_chat([{**user(url_part(picture(1, 64, 64))), "role": "system"}, user("look")])
    with pytest.raises(InvalidPromptError, match="at most 32 are allowed"):
        llm.render_chat([user(*[url_part(picture(1, 32, 32))] * 33)])


def test_a_bomb_is_refused_by_its_header(llm: LLM) -> None:
    """vllm#47010: small files were decoded into pictures that took all memory."""
    for side, says in ((9_000, "9000x9000 pixels"), (15_000, "too large: from 1 to 67108864 pixels")):
        bomb = data_url(Pillow.new("1", (side, side)))
        assert len(bomb) < 100_000
        with pytest.raises(InvalidPromptError, match=says):
            llm.render_chat([user({"type": "image_url", "image_url": {"url": bomb}})])


def test_a_jpeg_of_many_scans_is_refused(llm: LLM) -> None:
    """Each of them takes as long as the whole picture, in a few bytes."""
    file = io.BytesIO()
    Pillow.new("RGB", (64, 64)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    scan = data[data.rindex(b"\xff\xda") : -2]
    for num_more, is_read in ((0, True), (80, True), (100, False)):
        url = f"data:image/jpeg;base64,{base64.b64encode(data[:-2] + scan * num_more + data[-2:]).decode()}"
        message = user({"type": "image_url", "image_url": {"url": url}})
        if is_read:
            assert llm.render_chat([message]).images
        else:
            with pytest.raises(InvalidPromptError, match=r"has 1\d\d scans; at most 100 are read"):
                llm.render_chat([message])


def test_pictures_of_a_request_are_bounded_together(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [url_part(picture(number, 64, 64)) for number in range(3)]
    monkeypatch.setattr(image_processor, "MAX_REQUEST_PIXELS", 3 * 64 * 64 - 1)
    assert len(llm.render_chat([user(*parts[:2])]).images) == 2
    with pytest.raises(InvalidPromptError, match="have 12288 pixels; at most 12287 are read"):
        llm.render_chat([user(parts[0]), user(*parts[1:])])


def test_a_template_that_leaves_images_out_is_named(llm: LLM) -> None:
    source = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% endif %}{% endfor %}"
    template = ChatTemplate(llm._chat._tokenizer, source, images=llm._chat._images)  # type: ignore[union-attr]
    assert template.render([user("text")]).token_ids.size > 0
    with pytest.raises(InvalidPromptError, match="the chat template shows 0 of the 1 images of the conversation"):
        template.render([user("text"), user("look", url_part(picture(1, 64, 64)))])


def pixels(image: Any) -> Any:
    ((found,),) = ImageProcessor(SETTINGS, 1).parts_of([image])
    assert isinstance(found, ImageSpan)
    return found.pixels


def test_pictures_are_upright_on_white_and_scaled() -> None:
    """vllm#47566: pictures given as PIL images were not turned as their EXIF data say."""
    plain = picture(1, 64, 96)
    exif = Pillow.Exif()
    exif[0x0112] = 6  # turn clockwise to see it upright
    turned = plain.transpose(Pillow.Transpose.ROTATE_90)
    file = io.BytesIO()
    turned.save(file, "PNG", exif=exif)
    assert (pixels(Pillow.open(file)) == pixels(plain)).all()
    clear = Pillow.new("RGBA", (64, 64), (255, 0, 0, 0))
    assert (pixels(clear) == 255).all() and (pixels(clear.convert("LA")) == 255).all()
    ramp = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    assert abs(int(np.median(pixels(Pillow.fromarray(ramp)))) - 128) <= 2
    for value, want in ((0, 0), (128, 0), (129, 1), (65535, 255), (-5, 0), (70000, 255), (2**31 - 1, 255)):
        assert (pixels(Pillow.fromarray(np.full((64, 64), value, np.int32))) == want).all()
    palette = plain.convert("P", palette=Pillow.Palette.ADAPTIVE)
    assert (pixels(palette) == pixels(palette.convert("RGB"))).all()
    with pytest.raises(InvalidPromptError, match="mode 'F'"):
        pixels(plain.convert("F"))
    file = io.BytesIO()
    plain.save(file, "GIF", save_all=True, append_images=[picture(2, 64, 96)])
    (animated,) = map(Pillow.open, [file])
    assert animated.n_frames == 2 and (pixels(animated) == pixels(plain.quantize().convert("RGB"))).mean() > 0.9
    grey = plain.convert("L")
    assert (pixels(grey) == pixels(grey.convert("RGB"))).all()


def test_sizes_are_those_of_transformers() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    rng = np.random.default_rng(0)
    for height, width in [(1, 1), (1, 200), (33, 6000), (5000, 5000), *rng.integers(20, 3000, (50, 2)).tolist()]:
        want = smart_resize(height, width, factor=32, min_pixels=1024, max_pixels=1 << 20)
        assert SETTINGS.layout(height, width) == [View.whole(*want)]


def test_a_model_without_a_tower_refuses_parts_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_chat_model(tmp_path)
    options: dict[str, Any] = {"device": "cpu", "kv_cache_memory_bytes": 1 << 24, "log_level": "error"}
    with LLM(str(tmp_path), language_model_only=True, max_model_len=256, **options) as llm:
        for call in (
            lambda: llm.chat([user(url_part(picture(1, 64, 64)))], use_tqdm=False),
            lambda: llm.generate(prompt_of([[5], picture(1, 64, 64)]), use_tqdm=False),
        ):
            with pytest.raises(InvalidPromptError, match=r"reads no images.*--language-model-only, .*; remove them"):
                call()
            with monkeypatch.context() as patch:
                patch.setattr(image_processor, "find_spec", lambda name: None)
                with pytest.raises(InvalidPromptError, match=r"Pillow is not installed"):
                    call()
