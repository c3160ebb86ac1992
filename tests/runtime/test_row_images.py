"""Rotary positions of rows with images, and the inputs of steps that have some of their tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forkpoint.cache.hashing import BLOCK_BYTES, HashChain
from forkpoint.images import DIGEST_BYTES, ImageSpan, rope_positions, rope_shift
from forkpoint.models.context import ImageInputs
from forkpoint.params import SamplingParams
from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.runtime.encoded_images import EncodedImages
from forkpoint.runtime.row_images import RowImages
from forkpoint.sched.plan import AddedRow
from forkpoint.worker.codec import decoder, encoder
from tests.plans import Row, plan_of

LENGTH = 200


def span(start: int, rows: int, columns: int, value: int = 0) -> ImageSpan:
    return ImageSpan.of(start, np.full((rows * 32, columns * 32, 3), value, np.uint8), 32)


IMAGES = (span(10, 4, 6), span(34, 2, 2), span(70, 5, 3, 1))


NONE = np.empty(0, np.int32)
ADDED = AddedRow(1, "r", np.zeros(LENGTH, np.int32), LENGTH, SamplingParams(), 0, (), NONE, images=IMAGES)


def test_positions_are_those_of_transformers() -> None:
    from transformers import Qwen3_5Config
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model

    ids = torch.full((1, LENGTH), 5)
    for image in IMAGES:
        ids[:, image.start : image.end] = 7
    grid = torch.tensor([[1, 2 * image.num_rows, 2 * image.num_columns] for image in IMAGES])
    theirs: Any = Qwen3_5Model.__new__(Qwen3_5Model)
    torch.nn.Module.__init__(theirs)
    theirs.config = Qwen3_5Config(image_token_id=7)
    # between two images without text in between transformers sees one run of placeholders
    ids[:, 34:38] = 5
    apart = (IMAGES[0], IMAGES[2])
    want, delta = theirs.get_rope_index(ids, (ids == 7).int(), image_grid_thw=grid[[0, 2]])
    found = rope_positions(apart)
    assert (found == want[:, 0, : found.shape[1]].numpy()).all()
    assert rope_shift(apart) == int(delta)
    assert (want[0, 0, found.shape[1] :].numpy() == np.arange(found.shape[1], LENGTH) + rope_shift(apart)).all()


def test_centred_positions_are_those_of_videorope() -> None:
    """The middle of an image has its time, and the text behind it continues with the next position."""
    images = (span(1, 4, 6), span(34, 2, 2))
    found = rope_positions(images, centred=True)
    assert found[:, :2].T.tolist() == [[0, 0, 0], [1, 0, -1]]
    assert found[:, 24:26].T.tolist() == [[1, 3, 4], [2, 2, 2]]
    assert found[:, 33:].T.tolist() == [[10, 10, 10], [11, 11, 11], [11, 11, 12], [11, 12, 11], [11, 12, 12]]
    assert rope_shift(images, centred=True) == 12 - 38


def inputs_of(cuts: list[int]) -> list[tuple[int, ImageInputs | None, np.ndarray[Any, Any]]]:
    """Return the start, the inputs and the position shifts of each chunk of a row."""
    images, found = RowImages(2, has_axes=True), []
    images.add(ADDED)

    def embeddings(image: ImageSpan) -> Tensor:
        return torch.arange(image.start, image.end).unsqueeze(1).float()

    for start, end in zip([0, *cuts], [*cuts, LENGTH], strict=True):
        plan = plan_of(0, [Row(1, start, [0] * (end - start), 0, 0)])
        found.append((start, images.inputs(plan.rows, embeddings, CpuPlatform()), images.shifts(plan.rows)))
    return found


@pytest.mark.parametrize("cuts", [[], [64, 128], [10], [34], [38], [20, 36, 71], [85], [86]])
def test_chunks_have_the_positions_of_the_whole_prompt(cuts: list[int]) -> None:
    rope, tokens = rope_positions(IMAGES), {i for image in IMAGES for i in range(image.start, image.end)}
    times = np.concatenate([rope[0], np.arange(rope.shape[1], LENGTH) + rope_shift(IMAGES)])
    seen = set()
    for start, inputs, shifts in inputs_of(cuts):
        assert (np.arange(start, start + len(shifts)) + shifts == times[start : start + len(shifts)]).all()
        if inputs is None:
            continue
        assert inputs.rope is not None
        at = inputs.at.numpy() + start
        seen |= set(at.tolist())
        assert (inputs.embedded[:, 0].numpy() == at).all() and (inputs.rope.positions.numpy() == rope[:, at]).all()
        before = inputs.rope.draft_at.numpy() + start - 1  # of the token before each
        assert (inputs.rope.draft_positions.numpy() == rope[:, before] + 1).all()
        assert set(at.tolist()) <= set((before + 1).tolist())
    assert seen == tokens


def test_a_row_that_left_the_batch_leaves_no_images() -> None:
    images = RowImages(2, has_axes=True)
    images.add(ADDED)
    images.remove(1)
    plan = plan_of(0, [Row(1, 0, [0] * 50, 0, 0)])
    assert not images.shifts(plan.rows).any()
    assert images.inputs(plan.rows, lambda image: pytest.fail("no image is there"), CpuPlatform()) is None


def test_blocks_differ_by_pixels_shape_place_and_order() -> None:
    """Token ids are the same in all of them. vllm#36708: the place of an image in a block did not count."""
    ids = np.full(LENGTH, 7, np.int32)

    def hashes(*images: ImageSpan) -> tuple[bytes, ...]:
        chain = HashChain("", images=images)
        chain.extend(ids[:50])  # blocks come as they fill
        chain.extend(ids[50:])
        assert [block[:BLOCK_BYTES] for block in chain.blocks] == [ids[:64].tobytes()] * 3
        return tuple(chain.hashes)

    first, other = span(70, 2, 2), span(74, 2, 2, 1)
    cases = [
        (),
        (first,),
        (span(71, 2, 2),),
        (span(70, 2, 2, 1),),
        (span(70, 1, 4),),
        (first, other),
        (span(70, 2, 2, 1), span(74, 2, 2)),
        (span(10, 4, 40),),
    ]
    found = [hashes(*images) for images in cases]
    assert len({each[1] for each in found}) == len({each[2] for each in found}) == len(cases)
    assert {each[0] for each in found[:-1]} == {found[0][0]} and found[-1][0] != found[0][0]
    assert found[1] == hashes(span(70, 2, 2))
    digests = [first.digest, *(bytes(b ^ (i == at) for i, b in enumerate(first.digest)) for at in range(DIGEST_BYTES))]
    for same in (hashes(replace(first, digest=digest)) for digest in digests[1:]):
        assert same[0] == found[1][0] and same[1] != found[1][1], "every byte of the digest counts"


class CountingTower:
    """Returns the first value of each image."""

    def __call__(self, pixels: Tensor) -> Tensor:
        return torch.full((1, 1), float(pixels[0, 0, 0]))


def test_embeddings_are_kept_until_they_are_dropped() -> None:
    encoded = EncodedImages(CountingTower(), CpuPlatform())  # type: ignore[arg-type]
    images = {value: span(0, 1, 1, value) for value in (1, 2)}
    for value, num_runs in [(1, 1), (2, 2), (1, 2)]:
        assert float(encoded.get(images[value])[0, 0]) == value and encoded.num_runs == num_runs
    encoded.drop([images[1].digest, b"unknown"])
    for value, num_runs in [(2, 2), (1, 3)]:
        assert float(encoded.get(images[value])[0, 0]) == value and encoded.num_runs == num_runs


def test_images_reach_another_process_and_show_no_pixels() -> None:
    image = span(3, 2, 2, 200)
    (found,) = decoder(tuple[ImageSpan, ...])(encoder()((image,)))
    assert (found.start, found.num_rows, found.num_columns, found.digest) == (3, 2, 2, image.digest)
    assert (found.pixels == image.pixels).all()
    assert "200" not in repr(image) and "pixels" not in repr(image)
