"""Videos through `LLM.generate`: logits against transformers' full model, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forkpoint import SamplingParams
from forkpoint.errors import InvalidPromptError
from forkpoint.image_families.qwen3_5 import Qwen35Images
from forkpoint.image_families.table import read_image_settings
from tests.engine.test_images import TOLERANCE
from tests.image_models import CHAT_IDS, Part, Watched, picture, write_chat_model

IMAGE, VIDEO, START, END = CHAT_IDS.values()
RNG = np.random.default_rng(2)
INTRO, QUESTION, OTHER = (RNG.integers(2, 250, count).tolist() for count in (50, 40, 30))
FPS = 3.0


def video(seed: int, num_frames: int, height: int = 192, width: int = 256) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (num_frames, height, width, 3), dtype=np.uint8)


def video_prompt(parts: Sequence[Part]) -> dict[str, Any]:
    ids: list[int] = []
    for part in parts:
        ids += part if isinstance(part, list) else [START, VIDEO, END]
    videos = [(part, {"fps": FPS}) for part in parts if not isinstance(part, list)]
    return {"prompt_token_ids": ids, "multi_modal_data": {"video": videos}}


def patches(frames: np.ndarray[Any, Any]) -> tuple[Tensor, list[int]]:
    """What transformers' processor makes of frames that need not be resized."""
    count, height, width, _ = frames.shape
    x = (torch.from_numpy(frames).float() / 255 - torch.tensor([0.5, 0.4, 0.5])) / 0.5
    if count % 2:
        x, count = torch.cat([x, x[-1:]]), count + 1
    x = x.permute(0, 3, 1, 2).reshape(count // 2, 2, 3, height // 32, 2, 16, width // 32, 2, 16)
    return x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 1536), [count // 2, height // 16, width // 16]


class VideoOracle:
    """Transformers' logits, with its times of frames."""

    def __init__(self) -> None:
        self.encode: Any = None

    @torch.no_grad()
    def __call__(self, model: Any, parts: Sequence[Part], outputs: Sequence[int] = ()) -> tuple[list[int], Tensor]:
        from transformers import Qwen3VLProcessor

        ids: list[int] = []
        types: list[int] = []
        made: list[tuple[Tensor, list[int]]] = []
        for part in parts:
            if isinstance(part, list):
                ids += part
                types += [0] * len(part)
                continue
            made.append(patches(part))
            num_tokens = part.shape[1] * part.shape[2] // 1024
            for time in Qwen3VLProcessor._calculate_timestamps(None, list(range(len(part))), FPS, 2):  # type: ignore[arg-type]
                text = [*self.encode(f"<{time:.1f} seconds>", add_special_tokens=False), START]
                ids += [*text, *[VIDEO] * num_tokens, END]
                types += [0] * len(text) + [2] * num_tokens + [0]
        inputs: dict[str, Any] = {}
        if made:
            inputs["pixel_values_videos"] = torch.cat([values for values, _ in made])
            inputs["video_grid_thw"] = torch.tensor([grid for _, grid in made])
        x = torch.tensor([[*ids, *outputs]])
        kinds = torch.tensor([types + [0] * len(outputs)])
        return x[0].tolist(), model(input_ids=x, mm_token_type_ids=kinds, use_cache=False, **inputs).logits[0].float()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    pytest.importorskip("PIL.Image")
    folder: Path = tmp_path_factory.mktemp("video")
    theirs, expected = write_chat_model(folder), VideoOracle()
    options: dict[str, Any] = {"skip_tokenizer_init": False, "max_num_batched_tokens": 192, "max_num_seqs": 1}
    found = Watched(folder, theirs, video_prompt, expected, checkpoint_interval=64, **options)
    expected.encode = found.llm._engine.inputs.tokenizer.encode  # type: ignore[attr-defined]
    yield found
    found.llm.close()


def test_pairs_of_frames_are_spans_of_their_own(watched: Watched) -> None:
    """A video that parts from another in its third pair of frames reuses the first two."""
    first, other = video(1, 8), video(1, 8)
    other[5:] = video(2, 3)
    cold = watched.ask([INTRO, first, QUESTION], 20)
    assert (cold.cached, cold.num_runs) == (0, 4)
    again = watched.ask([INTRO, first, OTHER], 4)
    assert again.cached >= 256 and again.num_runs == 0
    parted = watched.ask([INTRO, other, QUESTION], 4)
    assert 128 <= parted.cached < 200 and parted.num_runs == 2
    two = watched.ask([INTRO, first, QUESTION, video(3, 5, 64, 96), OTHER], 4)
    assert two.cached >= again.cached and two.num_runs == 3, "the fifth frame is its own partner"
    assert max(each.error for each in (cold, again, parted, two)) <= TOLERANCE


def test_frames_may_be_pictures_or_arrays(watched: Watched) -> None:
    """Without metadata there are two frames a second; `frames_indices` and `fps` name other times."""
    pillow = pytest.importorskip("PIL.Image")
    frames = video(4, 4, 64, 64)
    inputs = watched.llm._engine.inputs  # type: ignore[attr-defined]

    def prompt(given: Any) -> tuple[list[int], list[bytes]]:
        found = inputs.prompt({"prompt_token_ids": [5, VIDEO, 6], "multi_modal_data": {"video": given}})
        return found.token_ids.tolist(), [image.digest for image in found.images]

    want = prompt(frames)
    assert prompt([frames]) == prompt(list(frames)) == prompt([pillow.fromarray(frame) for frame in frames]) == want
    assert prompt((frames, {"fps": 4.0, "frames_indices": [0, 2, 4, 6]})) == want != prompt((frames, {"fps": 30}))
    text = inputs.tokenizer.decode(want[0], skip_special_tokens=False)
    assert text.count("seconds>") == 2 and "<0.2 seconds>" in text and "<1.2 seconds>" in text


def test_conversations_show_videos_next_to_images(watched: Watched) -> None:
    """Typed placeholders stay text; a video equals its frames in `generate`."""
    inputs = watched.llm._engine.inputs  # type: ignore[attr-defined]
    frames, image = video(4, 4, 64, 64), picture(5, 96, 96)
    parts: list[Any] = [
        {"type": "text", "text": "I type <|video_pad|> and <|image_pad|>. "},
        {"type": "video", "video": (frames, {"fps": 4.0})},
        {"type": "image_pil", "image_pil": image},
        {"type": "text", "text": "What happens?"},
    ]
    prompt = watched.llm.render_chat([{"role": "user", "content": parts}])
    ids = prompt.token_ids.tolist()
    assert [span.num_tokens for span in prompt.images] == [4, 4, 9]
    assert (ids.count(VIDEO), ids.count(IMAGE)) == (1 + 8, 1 + 9)
    given = {"prompt_token_ids": [VIDEO], "multi_modal_data": {"video": (frames, {"fps": 4.0})}}
    alone = inputs.prompt(given).token_ids.tolist()
    start = prompt.images[0].start - alone.index(VIDEO)
    assert ids[start : start + len(alone)] == alone
    assert {prompt.images[1].end + 1, prompt.images[2].end} <= set(prompt.breakpoints)
    (output,) = watched.llm.chat([{"role": "user", "content": parts}], SamplingParams(max_tokens=1), use_tqdm=False)
    assert list(output.prompt_token_ids) == ids
    for wrong in ("clip.mp4", None):
        with pytest.raises(InvalidPromptError, match="is not a video"):
            watched.llm.render_chat([{"role": "user", "content": [{"type": "video", "video": wrong}]}])


def test_sizes_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    write_chat_model(tmp_path)
    settings = read_image_settings(tmp_path, {"max_pixels": 1 << 24})
    assert isinstance(settings, Qwen35Images) and settings.video is not None
    for count, height, width in [(1, 10, 500), (768, 1080, 1920), *np.random.default_rng(0).integers(2, 900, (40, 3))]:
        if max(height, width) <= 200 * min(height, width):
            bounds = {"min_pixels": settings.video.min_pixels, "max_pixels": settings.video.max_pixels}
            want = smart_resize(max(count, 2), height, width, factor=32, **bounds)
            assert settings.video.resized(count, height, width) == want


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("clip.mp4", "'clip.mp4' is not a video; give an array"),
        ("data:image/png;base64," + "iVBOR" * 20, "^a text of 122 characters is not a video; give an array"),
        (["data:image/png;base64,iVBOR"] * 2, "^a list of 2 items is not a video; give an array"),
        (video(1, 2).astype(np.float32), "dtype float32 is not a video; give an array"),
        ([video(1, 1)[0], video(1, 1, 64, 64)[0]], "is not a video|differ in size"),
        ((video(1, 2), {"fps": 0}), "have fps=0; a positive number is needed"),
        ((video(1, 2), {"frames_indices": [1]}), "a number for each of the 2 frames is needed"),
        (video(1, 769, 1, 1), "have 769 frames with 769 pixels; at most 768 frames"),
        ([video(1, 2, 64, 64)] * 2, "1 placeholders for videos .token id 311. and 2 videos"),
        (video(1, 2, 32, 6432), "its longer side may be at most 200 times the shorter one"),
    ],
)
def test_what_is_refused_says_why(watched: Watched, given: Any, says: str) -> None:
    with pytest.raises(InvalidPromptError, match=says):
        watched.llm.generate({"prompt_token_ids": [5, VIDEO, 6], "multi_modal_data": {"video": given}}, use_tqdm=False)
