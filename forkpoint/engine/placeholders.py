"""Replaces the placeholders of images and videos in a prompt by the tokens that stand for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from forkpoint.engine.image_processor import ImageProcessor
from forkpoint.engine.resized_pictures import Parts
from forkpoint.engine.tokenizer import Tokenizer
from forkpoint.engine.videos import SizedVideo
from forkpoint.errors import InvalidPromptError
from forkpoint.images import ImageSpan
from forkpoint.sched.plan import IntArray


@dataclass(frozen=True, slots=True)
class Expansion:
    """The replacement of tokens `[start, end)` of a prompt: token ids, and spans, whose tokens are `token_id`."""

    start: int
    end: int
    parts: Parts
    token_id: int


def image_expansions(
    token_ids: IntArray,
    processor: ImageProcessor,
    pictures: Sequence[Any],
    places: Sequence[int] | None = None,
    details: Sequence[object] = (),
) -> list[Expansion]:
    """Return what replaces the placeholders of images: the tokens at `places`, or all image tokens if None.

    `details` are the pictures' own `detail`. Raises InvalidPromptError if there are more or fewer placeholders than
    `pictures`, or one cannot be read.
    """
    token_id = processor.settings.image_token_id
    at = _places(token_ids, token_id, places)
    _check_count("images", len(at), len(pictures), token_id)
    parts = processor.parts_of(pictures, details)
    covered = (processor.settings.covered(token_ids, place) for place in at)
    return [Expansion(*around, own, token_id) for around, own in zip(covered, parts, strict=True)]


def _places(token_ids: IntArray, token_id: int, given: Sequence[int] | None) -> list[int]:
    if given is not None:
        return list(given)
    return [int(place) for place in np.flatnonzero(token_ids == token_id)]


def video_expansions(
    token_ids: IntArray,
    processor: ImageProcessor,
    videos: Sequence[SizedVideo],
    tokenizer: Tokenizer | None,
    places: Sequence[int] | None = None,
) -> list[Expansion]:
    """Return what replaces the placeholders of videos: the tokens at `places`, or all video tokens if None.

    Each frame gets the tokens around it that a template writes around the placeholder, which are replaced too. Raises
    InvalidPromptError if their numbers differ, or without a model that reads videos and its tokenizer.
    """
    settings = processor.settings.video
    if settings is None or tokenizer is None:
        raise InvalidPromptError("videos need a model that reads them, and its tokenizer, which writes their times")
    at = _places(token_ids, settings.token_id, places)
    _check_count("videos", len(at), len(videos), settings.token_id)
    processor.check_count(0, len(videos))
    encode = partial(tokenizer.encode, add_special_tokens=False)
    around, expansions = [settings.start_id, settings.token_id, settings.end_id], list[Expansion]()
    for place, video in zip(at, videos, strict=True):
        start, end = place, place + 1
        if token_ids[max(start - 1, 0) : end + 1].tolist() == around:
            start, end = start - 1, end + 1
        resize = partial(video.parts, settings, encode)
        if video.digest is None:
            parts = resize()
        else:
            parts = processor.kept.get(video.digest, processor.settings, resize)
        expansions.append(Expansion(start, end, parts, settings.token_id))
    return expansions


def _check_count(kind: str, num_placeholders: int, num_given: int, token_id: int) -> None:
    if num_placeholders != num_given:
        raise InvalidPromptError(
            f"the prompt has {num_placeholders} placeholders for {kind} (token id {token_id}) and {num_given} {kind}; "
            f"give one placeholder for each of the {kind}"
        )


@dataclass(frozen=True, slots=True)
class Expanded:
    """Token ids, the spans of images among them, and the positions where the expansions end.

    `positions[i]` is where token `i` of the original prompt begins.
    """

    token_ids: IntArray
    images: tuple[ImageSpan, ...]
    ends: tuple[int, ...]
    positions: npt.NDArray[Any]


def expand(token_ids: IntArray, expansions: Iterable[Expansion]) -> Expanded:
    """Return a prompt's ids with `expansions`, which do not overlap, in place of the tokens that they replace."""
    images, ends = list[ImageSpan](), list[int]()
    pieces, done, num_tokens = list[npt.ArrayLike](), 0, 0
    counts = np.ones(len(token_ids), np.int64)
    for each in sorted(expansions, key=lambda expansion: expansion.start):
        pieces.append(token_ids[done : each.start])
        num_tokens += each.start - done
        begin = num_tokens
        for part in each.parts:
            if isinstance(part, int):
                pieces.append([part])
                num_tokens += 1
            else:
                image = replace(part, start=num_tokens)
                images.append(image)
                pieces.append([each.token_id] * image.num_tokens)
                num_tokens = image.end
        counts[each.start : each.end] = 0
        counts[each.start] = num_tokens - begin
        done = each.end
        ends.append(num_tokens)
    pieces.append(token_ids[done:])
    whole = np.concatenate([np.asarray(piece, np.int32) for piece in pieces])
    return Expanded(whole, tuple(images), tuple(ends), np.concatenate(([0], np.cumsum(counts))))
