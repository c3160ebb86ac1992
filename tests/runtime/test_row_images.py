"""Rotary positions of rows with images, and the inputs of steps that have some of their tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.cache.hashing import BLOCK_BYTES, HashChain
from forkpoint.images import DIGEST_BYTES, ImageSpan, rope_positions, rope_shift
from forkpoint.models.image_rows import ImageRows
from forkpoint.models.rotary import Rotary
from forkpoint.params import SamplingParams
from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.runtime.encoded_images import EncodedImages
from forkpoint.runtime.row_images import RowImages, StepImages
from forkpoint.sched.plan import AddedRow
from forkpoint.worker.codec import decoder, encoder
from tests.plans import Row, plan_of

LENGTH, MAX_LEN, VOCAB = 200, 400, 50


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


def table(axes: tuple[int, ...] = (0, 1, 2)) -> ImageRows:
    """A model of MAX_LEN positions and VOCAB ids, with room for LENGTH tokens of images and of the MTP head."""
    rotary = Rotary((1.0, 0.5, 0.1))
    cos_sin = F.pad(rotary.table(MAX_LEN), (0, 0, 0, 2 * LENGTH))
    return ImageRows(torch.zeros(VOCAB + LENGTH, 4), VOCAB, cos_sin, MAX_LEN, axes)


def chunks(images: RowImages, cuts: list[int], recorded: bool) -> list[tuple[int, int, StepImages]]:
    """Return the start, the end and the images of each chunk of a row."""
    extents = zip([0, *cuts], [*cuts, LENGTH], strict=True)
    return [
        (start, end, images.step(plan_of(0, [Row(1, start, [5] * (end - start), 0, 0)]).rows, recorded))
        for start, end in extents
    ]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("cuts", [[], [64, 128], [10], [34], [38], [20, 36, 71], [85], [86]])
def test_chunks_have_the_positions_of_the_whole_prompt(cuts: list[int], recorded: bool) -> None:
    """The MTP head's are those of the token before, one further."""
    rope = rope_positions(IMAGES)
    after = np.broadcast_to(np.arange(rope.shape[1], LENGTH) + rope_shift(IMAGES), (3, LENGTH - rope.shape[1]))
    whole = np.concatenate([rope, after], axis=1)
    tokens = [(image.digest, i) for image in IMAGES for i in range(image.num_tokens)]
    images, seen = RowImages(2, table(), drafts=True), list[tuple[bytes, int]]()
    images.add(ADDED)
    for start, end, found in chunks(images, cuts, recorded):
        assert set(found.columns) == {"token_ids", "rope_shift", "draft_shift"}
        place = np.arange(start, end)
        for name, want in (
            ("rope_shift", whole[:, start:end]),
            ("draft_shift", whole[:, np.maximum(place - 1, 0)] + 1),
        ):
            lines = place + found.columns[name]
            text = lines < MAX_LEN
            got = np.broadcast_to(lines, (3, len(lines))).copy()
            got[:, ~text] = found.rope[:, lines[~text] - MAX_LEN]
            first = start if name == "rope_shift" else max(start, 1)  # entry 0 of the head is never read
            assert (got[:, first - start :] == want[:, first - start :]).all()
        own = [(image.digest, i) for image, part in found.parts for i in range(image.num_tokens)[part]]
        at = np.concatenate([np.arange(image.start, image.end) for image in IMAGES])
        ids = np.full(LENGTH, 5)
        within = (at >= start) & (at < end)
        ids[at[within]] = VOCAB + np.arange(len(own))
        assert (found.columns["token_ids"] == ids[start:end]).all()
        seen += own
    assert seen == tokens


def test_rows_of_a_step_share_the_table() -> None:
    """Ids and lines go on from row to row, and a row without images has those of text."""
    images, other = RowImages(3, table()), span(3, 1, 2)
    images.add(ADDED)
    images.add(replace(ADDED, row=2, images=(other,)))
    rows = [Row(0, 7, [5] * 3, 0, 0), Row(1, 30, [5] * 6, 0, 0), Row(2, 0, [5] * 8, 0, 0)]
    found = images.step(plan_of(0, rows).rows, recorded=True)
    assert [(image, part.start) for image, part in found.parts] == [(IMAGES[0], 20), (IMAGES[1], 0), (other, 0)]
    ids = [5] * 3 + [VOCAB + i for i in range(6)] + [5, 5, 5, VOCAB + 6, VOCAB + 7, 5, 5, 5]
    assert found.columns["token_ids"].tolist() == ids
    lines = found.columns["rope_shift"] + [7, 8, 9, *range(30, 36), *range(8)]
    assert lines.tolist() == [7, 8, 9, *range(MAX_LEN, MAX_LEN + 6), 0, 1, 2, MAX_LEN + 6, MAX_LEN + 7, 5, 6, 7]
    positions = [rope_positions(IMAGES)[:, 30:36], rope_positions((other,))[:, 3:5]]
    assert (found.rope == np.concatenate(positions, axis=1)).all()


def test_tokens_without_axes_keep_their_positions() -> None:
    images = RowImages(2, table(()))
    images.add(ADDED)
    for _, _, found in chunks(images, [20], recorded=True):
        assert list(found.columns) == ["token_ids"] and not found.rope.size and found.parts


def test_a_row_that_left_the_batch_leaves_no_images() -> None:
    images = RowImages(2, table())
    images.add(ADDED)
    images.remove(1)
    rows = plan_of(0, [Row(1, 0, [5] * 50, 0, 0)]).rows
    found = images.step(rows, recorded=True)
    assert list(found.columns) == ["rope_shift"] and not found.columns["rope_shift"].any() and not found.parts
    assert not images.step(rows, recorded=False).columns, "texts alone have no columns of their own"


def test_lines_rotate_by_time_row_and_column() -> None:
    """Rows and columns before the first position are negative."""
    own, positions = table(), torch.tensor([[0, 7, 9], [-2, 3, 8], [-1, 3, 300]])
    own.fill_lines(positions)
    assert own._cos_sin is not None
    angles = positions.T * torch.tensor([1.0, 0.5, 0.1])
    lines = own._cos_sin[MAX_LEN : MAX_LEN + 3]
    torch.testing.assert_close(lines, torch.cat((angles.cos(), angles.sin()), dim=1))
    assert not own._cos_sin[MAX_LEN + 3 :].any()


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
    encoded = EncodedImages(CountingTower(), table(), CpuPlatform())  # type: ignore[arg-type]
    images = {value: span(0, 1, 1, value) for value in (1, 2)}
    for value, num_runs in [(1, 1), (2, 2), (1, 2)]:
        assert float(encoded.get(images[value])[0, 0]) == value and encoded.num_runs == num_runs
    encoded.drop([images[1].digest, b"unknown"])
    for value, num_runs in [(2, 2), (1, 3)]:
        assert float(encoded.get(images[value])[0, 0]) == value and encoded.num_runs == num_runs


def test_embeddings_of_a_step_follow_those_of_the_vocabulary() -> None:
    class Tower(CountingTower):
        def __call__(self, pixels: Tensor) -> Tensor:
            return pixels[0, 0, 0] + torch.arange(6).view(6, 1).expand(6, 4)

    rows = table()
    encoded = EncodedImages(Tower(), rows, CpuPlatform())  # type: ignore[arg-type]
    encoded.place(StepImages([(span(0, 2, 3, 10), slice(4, 6)), (span(0, 2, 3, 20), slice(0, 9))]))
    assert rows._embedding[VOCAB:, 0].tolist() == [14, 15, *range(20, 26)] + [0] * (LENGTH - 8)
    assert not rows._embedding[:VOCAB].any()


def test_images_reach_another_process_and_show_no_pixels() -> None:
    image = span(3, 2, 2, 200)
    (found,) = decoder(tuple[ImageSpan, ...])(encoder()((image,)))
    assert (found.start, found.num_rows, found.num_columns, found.digest) == (3, 2, 2, image.digest)
    assert (found.pixels == image.pixels).all()
    assert "200" not in repr(image) and "pixels" not in repr(image)
