"""Video files in conversations: frames as transformers samples and decodes them, and what is refused."""

from __future__ import annotations

import base64
import io
import struct
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forkpoint import LLM
from forkpoint.engine import image_processor, video_files, videos
from forkpoint.errors import ConfigError, InvalidPromptError
from forkpoint.image_families.media_io import with_media_io
from forkpoint.image_families.qwen3_5 import Qwen35Images
from forkpoint.image_families.settings import VideoSettings
from tests.image_models import CHAT_IDS, picture, write_chat_model

SETTINGS = VideoSettings(
    token_id=1,
    start_id=2,
    end_id=3,
    num_frames=2,
    side=32,
    min_pixels=4096,
    max_pixels=1 << 24,
    max_frame_pixels=1 << 20,
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = tmp_path_factory.mktemp("clips")
    write_chat_model(folder)
    with LLM(str(folder), device="cpu", max_model_len=2048, kv_cache_memory_bytes=1 << 26, log_level="error") as found:
        yield found


def clip(num_frames: int, fps: int, kind: str = "mp4", codec: str = "mpeg4") -> bytes:
    """A video file of moving noise, 96x64."""
    av = pytest.importorskip("av")
    file, rng = io.BytesIO(), np.random.default_rng(num_frames)
    small = rng.integers(0, 256, (8, 12 + num_frames, 3), dtype=np.uint8)
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for number in range(num_frames):
            part = small[:, number : number + 12].repeat(8, 0).repeat(8, 1)
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(part), format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def message(data: bytes, kind: str = "mp4") -> dict[str, Any]:
    url = f"data:video/{kind};base64,{base64.b64encode(data).decode()}"
    parts = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": "What happens?"}]
    return {"role": "user", "content": parts}


@pytest.mark.parametrize(
    ("num_frames", "fps", "kind", "codec"),
    [(40, 10, "mp4", "mpeg4"), (3, 10, "mp4", "mpeg4"), (31, 24, "webm", "libvpx-vp9"), (16, 5, "avi", "mpeg4")],
)
def test_frames_are_those_that_transformers_reads(
    llm: LLM, tmp_path: Path, num_frames: int, fps: int, kind: str, codec: str
) -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
    from transformers.video_utils import read_video_pyav

    data = clip(num_frames, fps, kind, codec)
    (tmp_path / "clip").write_bytes(data)
    defaults = SimpleNamespace(fps=2, min_frames=4, max_frames=768)

    def sampled(metadata: Any) -> Any:
        metadata.total_num_frames = num_frames  # WebM files do not say it
        return Qwen3VLVideoProcessor.sample_frames(defaults, metadata)

    frames, metadata = read_video_pyav(str(tmp_path / "clip"), sampled)
    assert metadata.fps == fps and len(frames) == min(max(4, 2 * num_frames // fps), num_frames)
    given = (frames, {"fps": metadata.fps, "frames_indices": metadata.frames_indices})
    parts = [{"type": "video", "video": given}, {"type": "text", "text": "What happens?"}]
    want = llm.render_chat([{"role": "user", "content": parts}])
    found = llm.render_chat([message(data, kind)])
    assert found.token_ids.tolist() == want.token_ids.tolist()
    assert [span.digest for span in found.images] == [span.digest for span in want.images]
    assert len(found.images) == -(-len(frames) // 2) > 0


def test_frames_are_sampled_as_by_transformers() -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    rng = np.random.default_rng(3)
    for num_frames, fps in [(1, 1), (2, 30), (5000, 24), (100_000, 60), *rng.integers(1, 900, (60, 2)).tolist()]:
        metadata = SimpleNamespace(total_num_frames=num_frames, fps=fps)
        want = Qwen3VLVideoProcessor.sample_frames(SimpleNamespace(fps=2, min_frames=4, max_frames=768), metadata)
        assert SETTINGS.sampled(num_frames, fps) == want.tolist()


@pytest.mark.parametrize(
    ("given", "num_frames"),
    [
        ({}, 8),
        ({"num_frames": 5}, 5),
        ({"num_frames": -1}, 40),
        ({"num_frames": 2000}, 40),
        ({"fps": 1}, 4),
        ({"fps": 5, "video_backend": "opencv"}, 20),
        ({"num_frames": 3, "fps": 5}, 3),
        ({"num_frames": 30, "fps": 5}, 20),
    ],
)
def test_sampling_can_be_asked_for(given: dict[str, Any], num_frames: int) -> None:
    """The video has 40 frames, 10 a second."""
    settings = Qwen35Images(
        image_token_id=0, patch_size=16, merge_size=2, min_pixels=1024, max_pixels=1 << 20, video=SETTINGS
    )
    video = with_media_io(settings, {"video": given}).video
    assert video is not None and len(video.sampled(40, 10)) == num_frames
    for wrong in ({"fps": 0}, {"num_frames": 0}, {"num_frames": True}, {"fps": "2"}, {"speed": 1}):
        with pytest.raises(ConfigError, match="media_io_kwargs"):
            with_media_io(settings, {"video": {**given, **wrong}})


def joined_frames(*frames: Any, kind: str = "JPEG") -> dict[str, Any]:
    files = [io.BytesIO() for _ in frames]
    for file, frame in zip(files, frames, strict=True):
        frame.save(file, kind)
    return joined(*(base64.b64encode(file.getvalue()).decode() for file in files))


def joined(*frames: str) -> dict[str, Any]:
    parts = [{"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{','.join(frames)}"}}]
    return {"role": "user", "content": [*parts, {"type": "text", "text": "What happens?"}]}


def test_frames_may_be_files_joined_by_commas(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are two a second, as the model's processor samples them, and the next turn decodes none of them."""
    frames = [picture(seed, 64, 96) for seed in range(5)]
    given = {"type": "video", "video": (np.stack([np.asarray(frame) for frame in frames]), {"fps": 2.0})}
    want = llm.render_chat([{"role": "user", "content": [given, {"type": "text", "text": "What happens?"}]}])
    num_decoded, upright = list[int](), image_processor._upright_rgb
    monkeypatch.setattr(image_processor, "_upright_rgb", lambda *a: (num_decoded.append(1), upright(*a))[1])
    for _ in range(2):
        found = llm.render_chat([joined_frames(*frames, kind="PNG")])
        assert found.token_ids.tolist() == want.token_ids.tolist() and len(num_decoded) == 5
        assert [span.digest for span in found.images] == [span.digest for span in want.images]
    assert len(llm.render_chat([joined_frames(*frames[:3])]).images) == 2
    for message, says in [
        (joined_frames(*frames, picture(1, 64, 64)), "differ in size"),
        (joined(*["AAAA"] * 769), "a video has 769 frames; at most 768"),
        (joined("AAAA"), "an image of 3 bytes is broken"),
        (joined(""), "an image of 0 bytes is broken"),
    ]:
        with pytest.raises(InvalidPromptError, match=says):
            llm.render_chat([message])
    monkeypatch.setattr(videos, "MAX_REQUEST_PIXELS", 5 * 64 * 96 - 1)
    with pytest.raises(InvalidPromptError, match="have 5 frames with 30720 pixels"):
        llm.render_chat([joined_frames(*frames)])


def test_a_file_is_decoded_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next turn sends it again. A file whose frames are larger than the memo is not kept, and drops no other."""
    data, num_read = clip(8, 4), []
    frames = video_files.VideoFile._frames
    monkeypatch.setattr(video_files.VideoFile, "_frames", lambda self: (num_read.append(1), frames(self))[1])
    first = llm.render_chat([message(data)])
    again = llm.render_chat([message(data), {"role": "assistant", "content": "noise"}, message(data)])
    assert len(num_read) == 1 and len(again.images) == 2 * len(first.images)
    kept = llm._chat._images.kept  # type: ignore[union-attr]
    monkeypatch.setattr(kept, "_max_bytes", 10)
    llm.render_chat([message(clip(9, 4))])
    monkeypatch.undo()
    assert [image.digest for image in llm.render_chat([message(data)]).images] == [each.digest for each in first.images]
    assert len(kept._parts) >= 1 and kept._num_bytes > 10


def test_a_video_on_its_side_is_turned_upright(llm: LLM) -> None:
    av = pytest.importorskip("av")
    upright, turned = clip(4, 2), io.BytesIO()
    with av.open(io.BytesIO(upright)) as source, av.open(turned, "w", format="mp4") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = stream
                target.mux(packet)
    data = turned.getvalue()
    # The display matrix of the track, which no muxer of PyAV writes: a quarter turn in 16.16 and 2.30 fixed point.
    plain = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    quarter = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)
    at = data.index(plain, data.index(b"tkhd"))
    rotated = data[:at] + quarter + data[at + len(plain) :]
    images = [llm.render_chat([message(each)]).images for each in (data, rotated)]
    (height, width, _), (other_height, other_width, _) = (each[0].pixels.shape[1:] for each in images)
    assert (height, width) == (other_width, other_height) == (64, 96)
    assert (np.rot90(images[0][0].pixels, -1, (1, 2)) == images[1][0].pixels).all()


def test_what_is_refused_says_why(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    data = clip(8, 4)
    secret = base64.b64encode(data).decode()[40:80]

    def refusal(*messages: dict[str, Any]) -> str:
        with pytest.raises(InvalidPromptError) as refused:
            llm.render_chat(list(messages))
        assert secret not in str(refused.value)
        return str(refused.value)

    def part(video_url: Any) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "video_url", "video_url": video_url}]}

    assert "broken, or of an unknown kind" in refusal(message(b"no video" * 30))
    assert "video" in refusal(message(data[: len(data) // 2]))
    assert "has 33 videos; at most 32 are allowed" in refusal(*[message(b"")] * 33)
    playlist = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"
    assert "of an unknown kind" in refusal(message(playlist))
    assert "of an unknown kind" in refusal(message(b"ffconcat version 1.0\nfile '/etc/passwd'\n"))
    assert "the video URL 'https://example.org/clip.mp4' is not fetched" in refusal(
        part({"url": "https://example.org/clip.mp4"})
    )
    assert "needs video_url" in refusal(part({}))
    assert "a video's data URL is not in base64" in refusal(part({"url": "data:video/mp4,abc"}))
    monkeypatch.setattr(video_files, "MAX_FRAME_PIXELS", 96 * 64 - 1)
    assert "frames of 96x64 pixels; from 1 to 6143 are read" in refusal(message(data))
    monkeypatch.undo()
    monkeypatch.setattr(videos, "MAX_DECODED_PIXELS", 2 * 8 * 96 * 64 - 1)
    assert "have 98304 pixels in all frames; at most 98303 are decoded" in refusal(message(data), message(data))
    llm.render_chat([message(data)])
    monkeypatch.undo()
    monkeypatch.setattr(videos, "MAX_FRAMES", 7)
    assert "have 8 frames" in refusal(message(data), message(data))
    monkeypatch.undo()
    monkeypatch.setattr(video_files, "MAX_FILE_FRAMES", 7)
    assert "more than 7 frames" in refusal(message(data))
    monkeypatch.undo()
    monkeypatch.setattr(video_files, "MAX_DECODED_PIXELS", 96 * 64 * 5)
    assert "grow beyond the size in its header" in refusal(message(clip(10, 4)))


def test_without_the_extra_the_error_says_what_to_install(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_files, "find_spec", lambda name: None)
    with pytest.raises(InvalidPromptError, match=r"PyAV is not installed; install forkpoint\[video\]"):
        llm.render_chat([message(b"any")])
    assert CHAT_IDS["video_token_id"] not in llm.render_chat([{"role": "user", "content": "text"}]).token_ids.tolist()
