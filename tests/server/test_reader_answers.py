"""Answers of readers: what arrives equals what was sent, and large arrays pass the socket by."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from forkpoint.images import ImageSpan
from forkpoint.server.reader_answers import PackedAnswer, receive_answer
from forkpoint.shared_arrays import CAN_SHARE, LEAST_SHARED_BYTES, NAME, in_shared_memory
from forkpoint.worker.codec import decoder, encoder


def received(message: bytes) -> Any:
    async def receive() -> Any:
        inbox = asyncio.StreamReader()
        inbox.feed_data(message)
        inbox.feed_eof()
        return await receive_answer(inbox)

    return asyncio.run(receive())


def num_memories() -> int:
    """The number of open descriptors of answers' shared memory."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            count += NAME in os.readlink(f"/proc/self/fd/{name}")
    return count


def test_answers_arrive_as_they_were_sent() -> None:
    large = np.arange(LEAST_SHARED_BYTES, dtype=np.uint8).reshape(64, -1)
    answer = {"small": np.arange(7), "large": large, "turned": large.T[::2], "twice": [large, large], "text": "x" * 999}
    packed = PackedAnswer.of(answer)
    found = received(packed.message)
    packed.close()
    assert found["text"] == answer["text"] and found["twice"][0] is found["large"]
    for name in ("small", "large", "turned"):
        assert (found[name] == answer[name]).all()
    found["large"][0, 0] = 5  # as any array that was received


@pytest.mark.skipif(not CAN_SHARE, reason="this system has no anonymous shared memory")
def test_large_arrays_are_in_shared_memory_that_goes_with_them() -> None:
    image = np.zeros((2048, 2048, 3), np.uint8)
    gc.collect()
    before = num_memories()  # other tests have some
    packed = PackedAnswer.of((image, image.copy()))
    assert len(packed.message) < 1000
    found = received(packed.message)
    packed.close()
    assert num_memories() <= before + 2  # mmap keeps a descriptor of its own
    assert found[0].shape == image.shape and not found[1].any()
    del found
    assert num_memories() == before


@pytest.mark.skipif(not CAN_SHARE, reason="this system has no anonymous shared memory")
def test_messages_name_large_arrays_in_shared_memory() -> None:
    """The next process gets pixels of a reader without a copy, however often a message names them."""
    gc.collect()
    before = num_memories()
    decode, images = decoder(tuple[ImageSpan, ...]), [span(value) for value in (1, 2)]
    packed = PackedAnswer.of(images)
    found = received(packed.message)
    packed.close()
    own = replace(images[0], pixels=in_shared_memory(images[0].pixels))
    data = encoder()((*found, own, *found, span(3, side=64)))
    assert len(data) < 64 * 64 * 3 + 1000
    del found, own
    with pytest.raises(OSError, match=r"No such file|other memory"):
        decode(data)
    found = [replace(image, pixels=in_shared_memory(image.pixels)) for image in images]
    data = encoder()((*found, *found))
    again = decode(data)
    del found
    assert [int(image.pixels.mean()) for image in again] == [1, 2, 1, 2] and again[0].digest == images[0].digest
    assert num_memories() == before + 4, "two for each memory"
    assert len(encoder()(again)) == len(data), "it can be sent on"
    del again
    assert num_memories() == before


def span(value: int, side: int = 1024) -> ImageSpan:
    return ImageSpan.of(0, np.full((side, side, 3), value, np.uint8), 32)
