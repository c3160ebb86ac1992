"""Measures prompts with images on one GPU: `python -m benchmarks.gpu_images`.

The model has the shape of Qwen3.5-9B with its vision tower, and random weights. Times are wall-clock times from the
call of `LLM.generate` to the last first token, medians over repeats. Prompts with images stand next to text of as many
tokens in the same engine. Text-only traffic stands next to the same traffic in a second engine, which runs beside the
first one with `language_model_only`; both take turns. The clock starts after pictures were resized and hashed, which
reader processes do in a server; a line of its own says how long that takes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import machine
from benchmarks.gpu_9b.measures import Answer, Client, Ids, ProtocolError, Sizes, decode_rate, time_to_first_token
from benchmarks.gpu_9b.options import engine_options
from benchmarks.gpu_9b.shape import SHAPE_9B, text_fields
from benchmarks.model131m import HybridShape
from forkpoint.engine.inputs import Prompt
from forkpoint.engine.llm import LLM
from forkpoint.platforms.table import resolve_platform

SHAPE = replace(SHAPE_9B, vocab_size=248_320, max_position_embeddings=40_960)
VISION: dict[str, int] = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
}
SIDE_OF_TOKEN = 32  # pixels
NUM_SPECIAL = 4  # the last ids of the vocabulary, which no text has: image, video, start and end of either
IMAGES, TEXT = PARTS = ("images", "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSizes:
    """Sizes of the measurements; lengths are in tokens."""

    side: int = 1024  # pixels of a square image
    text: int = 1000  # after the image
    new: int = 100  # of the next turn
    num_at_once: int = 32
    text_at_once: int = 16  # after each of the images that come at once
    text_only: Sizes = field(default_factory=lambda: Sizes(decode_batches=(1, 32, 64)))
    arena_bytes: int = 12 << 30
    max_num_seqs: int = 64

    @property
    def image_tokens(self) -> int:
        return (self.side // SIDE_OF_TOKEN) ** 2


def write_config(folder: Path, shape: HybridShape, vision: dict[str, int]) -> Path:
    """Write a folder with only the config.json of a Qwen3.5 of this shape, which `load_format="dummy"` reads."""
    text = {
        "model_type": "qwen3_5_text",
        **text_fields(shape),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 64 / shape.head_dim,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
    }
    image, video, start, end = range(shape.vocab_size - NUM_SPECIAL, shape.vocab_size)
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "vision_config": {**vision, "out_hidden_size": shape.hidden_size},
        "image_token_id": image,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "tie_word_embeddings": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


@dataclass(frozen=True, slots=True)
class Line:
    """A row of the table: seconds, or tokens per second, of what is measured and of what it stands next to."""

    name: str
    value: float
    other: float | None
    unit: str
    asked: str

    def __str__(self) -> str:
        scale = 1e3 if self.unit == "ms" else 1.0
        beside, ratio = "", ""
        if self.other is not None:
            beside, ratio = f"{self.other * scale:,.1f} {self.unit}", f"{self.value / self.other:.3f}"
        return f"| {self.name} | {self.value * scale:,.1f} {self.unit} | {beside} | {ratio} | {self.asked} |"


class Pictures:
    """Makes prompts with images of noise, and asks them."""

    def __init__(self, llm: LLM, shape: HybridShape, sizes: ImageSizes) -> None:
        from PIL import Image

        self.llm, self.sizes = llm, sizes
        self.client = client_of(llm, shape)
        self.reading_s: list[float] = []  # of each image
        self._random = np.random.default_rng(1)
        image, _, start, end = range(shape.vocab_size - NUM_SPECIAL, shape.vocab_size)
        self._placeholder = [start, image, end]
        self._from_array: Callable[[Any], Any] = Image.fromarray

    def new(self) -> Any:
        """Return a new picture."""
        side = self.sizes.side
        return self._from_array(self._random.integers(0, 256, (side, side, 3), dtype=np.uint8))

    def prompt(self, pictures: Sequence[Any], text: Ids) -> Prompt:
        """Return the prompt of pictures and the text after them, ready for the engine."""
        ids = self._placeholder * len(pictures) + text
        given = {"prompt_token_ids": ids, "multi_modal_data": {"image": list(pictures)}}
        found = self.llm._engine.inputs.prompt(given)
        self.reading_s.append(found.images_s / len(pictures))
        return found

    def ask(self, prompts: Sequence[Prompt], num_runs: int) -> Answer:
        """Ask for one token of each. Raises ProtocolError if the tower did not run `num_runs` times."""
        before = self.num_runs
        answer = self.client.ask(prompts, 1)
        if self.num_runs - before != num_runs:
            raise ProtocolError(f"the tower ran {self.num_runs - before} times instead of {num_runs}")
        return answer

    @property
    def num_runs(self) -> int:
        """The number of images that the tower encoded so far."""
        return int(self.llm.get_metrics()["num_images_encoded"])

    def forget_embeddings(self) -> None:
        encoder = self.llm._engine.core.scheduler._encoder
        assert encoder is not None
        encoder.clear()


def client_of(llm: LLM, shape: HybridShape) -> Client:
    return Client(llm, shape.vocab_size - NUM_SPECIAL)


@dataclass(frozen=True, slots=True)
class Turns:
    """Seconds to the first token: of a new prompt, of its next turn, and of the image with another question."""

    cold: float
    next_turn: float
    other_question: float


def image_turns(pictures: Pictures) -> Turns:
    """Measure a conversation with an image. Raises ProtocolError if the cache finds less than it has to."""
    sizes, client = pictures.sizes, pictures.client
    picture, text = pictures.new(), client.ids(sizes.text)
    cold = pictures.ask([pictures.prompt([picture], text)], 1)
    pictures.forget_embeddings()  # a hit behind the image needs none
    following = pictures.ask([pictures.prompt([picture], text + client.ids(sizes.new))], 0)
    _check_cached(following, sizes.image_tokens + sizes.text)
    client.forget()  # the prompts above would be junctions of this one
    first = pictures.prompt([picture], client.ids(sizes.text))
    pictures.ask([first], 1)
    other = pictures.ask([pictures.prompt([picture], client.ids(sizes.text))], 0)
    return Turns(cold.last_first_token_s, following.last_first_token_s, other.last_first_token_s)


def text_turns(client: Client, sizes: ImageSizes) -> Turns:
    """Measure a conversation of as many tokens without an image."""
    start, text = client.ids(sizes.image_tokens + 2), client.ids(sizes.text)
    cold = client.ask([start + text], 1)
    following = client.ask([start + text + client.ids(sizes.new)], 1)
    _check_cached(following, sizes.image_tokens + sizes.text)
    client.forget()
    client.ask([start + client.ids(sizes.text)], 1)
    other = client.ask([start + client.ids(sizes.text)], 1)
    return Turns(cold.last_first_token_s, following.last_first_token_s, other.last_first_token_s)


def _check_cached(answer: Answer, num_tokens: int) -> None:
    cached = answer.outputs[0].num_cached_tokens
    if cached < num_tokens - num_tokens % 64:
        raise ProtocolError(f"{cached} tokens were cached; at least {num_tokens - num_tokens % 64} are expected")


def image_lines(pictures: Pictures, repeats: int) -> Iterator[Line]:
    """Measure prompts with images next to text of as many tokens."""
    sizes, client = pictures.sizes, pictures.client
    image_turns(pictures), text_turns(client, sizes)  # to warm up
    images, texts = list[Turns](), list[Turns]()
    for _ in range(repeats):
        client.forget()
        images.append(image_turns(pictures))
        client.forget()
        texts.append(text_turns(client, sizes))
    asked = {"cold": "<= 1.3", "next_turn": "as text", "other_question": ""}
    for name, limit in asked.items():
        own, other = (float(np.median([getattr(each, name) for each in turns])) for turns in (images, texts))
        yield Line(f"{sizes.side}x{sizes.side} and {sizes.text} tokens, {name}", own, other, "ms", limit)
    yield Line("tower, one image", tower_seconds(pictures, repeats), None, "ms", "")
    yield from at_once_lines(pictures, max(3, repeats // 2))
    yield Line("reading an image, one core", float(np.median(pictures.reading_s)), None, "ms", "")


def at_once_lines(pictures: Pictures, repeats: int) -> Iterator[Line]:
    """Measure many images at once: one in each of many prompts, and all in one prompt."""
    sizes, client = pictures.sizes, pictures.client
    count = sizes.num_at_once
    for name, num_prompts, asked in (("prompts of one image", count, "<= 1.5 s"), ("images in a prompt", 1, "")):
        own, other, each = list[float](), list[float](), count // num_prompts
        for _ in range(repeats + 1):  # the first to warm up
            client.forget()
            pictures.forget_embeddings()
            prompts = [
                pictures.prompt([pictures.new() for _ in range(each)], client.ids(sizes.text_at_once))
                for _ in range(num_prompts)
            ]
            own.append(pictures.ask(prompts, count).last_first_token_s)
            client.forget()
            texts = [client.ids(len(prompt.token_ids)) for prompt in prompts]
            other.append(client.ask(texts, 1).last_first_token_s)
        yield Line(f"{count} {name}", float(np.median(own[1:])), float(np.median(other[1:])), "ms", asked)


def tower_seconds(pictures: Pictures, repeats: int) -> float:
    """Return the seconds of the tower alone for one image, with the upload of its pixels."""
    runner: Any = pictures.llm._engine.core._runner
    tower, platform = runner._encoded._tower, runner._encoded._platform
    (image,) = pictures.prompt([pictures.new()], []).images
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        tower(platform.upload(image.pixels)).float().sum().item()  # waits for the device
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds[1:]))


def text_lines(with_tower: Client, without: Client, sizes: Sizes, repeats: int) -> Iterator[Line]:
    """Measure the same text-only traffic with and without a tower, in turns."""
    once = replace(sizes, repeats=1)

    def first_tokens(client: Client) -> list[float]:
        return [series.median for series in time_to_first_token(client, once)]

    prompt = f"{sizes.prompt:,}"
    for name, value in zip(
        (f"{prompt} tokens of text, speed", f"the same and {sizes.extension} more, speed"),
        _compared(first_tokens, with_tower, without, repeats),
        strict=True,
    ):
        own, other = (sizes.prompt / seconds for seconds in value)
        yield Line(name, own, other, "tok/s", ">= 0.99")
    for batch in sizes.decode_batches:

        def decode(client: Client, batch: int = batch) -> list[float]:
            return [decode_rate(client, once, batch).median]

        ((own, other),) = _compared(decode, with_tower, without, repeats)
        yield Line(f"decode, batch {batch}", own, other, "tok/s", ">= 0.99")


def _compared(
    measure: Callable[[Client], list[float]], first: Client, second: Client, repeats: int
) -> list[tuple[float, float]]:
    """Return the medians of each measured value for both clients, which take turns at going first."""
    found: tuple[list[list[float]], list[list[float]]] = ([], [])
    for number in range(repeats + 1):
        pair = ((first, found[0]), (second, found[1]))
        for client, values in pair if number % 2 else reversed(pair):
            values.append(measure(client))
    medians = [np.median(np.asarray(values[1:]), axis=0).tolist() for values in found]
    return list(zip(*medians, strict=True))


def start(model: Path, args: argparse.Namespace, sizes: ImageSizes, **options: Any) -> LLM:
    began = time.perf_counter()
    limits = {"kv_cache_memory_bytes": sizes.arena_bytes, "max_num_seqs": sizes.max_num_seqs}
    llm = LLM(str(model), **{**engine_options(args.device, args.enforce_eager), **limits, **options})
    print(f"# engine {options} started in {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    return llm


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_images", description=(__doc__ or "").strip())
    parser.add_argument("--only", choices=PARTS, help="one of both parts")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--enforce-eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--commit", default="", help="what to print as the commit where there is no repository")
    return parser


def main(
    argv: Sequence[str] | None = None,
    shape: HybridShape = SHAPE,
    vision: dict[str, int] | None = None,
    sizes: ImageSizes | None = None,
) -> int:
    args, sizes = build_parser().parse_args(argv), sizes or ImageSizes()
    on_gpu = resolve_platform(args.device).device.type == "cuda"
    where = torch.cuda.get_device_name() if on_gpu else machine.cpu_model()
    print(f"{where}, torch {torch.__version__}, commit {args.commit or machine.commit_hash()}, {machine.today()}\n")
    print("| measure | forkpoint | next to it | ratio | asked |\n|---|---|---|---|---|")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = write_config(folder / "model", shape, vision or VISION)
        llm = stack.enter_context(start(model, args, sizes))
        if args.only != TEXT:
            for line in image_lines(Pictures(llm, shape, sizes), args.repeats):
                print(line, flush=True)
        if args.only != IMAGES:
            text_alone = stack.enter_context(start(model, args, sizes, language_model_only=True))
            clients = client_of(llm, shape), client_of(text_alone, shape)
            for line in text_lines(*clients, sizes.text_only, args.repeats):
                print(line, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
