"""The links of two engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from forkpoint.peer.link import PeerLink, open_link
from forkpoint.peer.process_fetching import ProcessFetching
from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.runtime.pinned import PinnedBuffers
from tests.peer.links import SIZES, facts


@pytest.fixture(scope="module")
def prefill() -> Iterator[PeerLink]:
    link = open_link(facts(), SIZES, 3600.0, listens=True)
    yield link
    link.close()


@pytest.fixture
def decode() -> Iterator[PeerLink]:
    link = open_link(facts(engine_id="d"), SIZES, 30.0, listens=False)
    yield link
    link.close()


@pytest.fixture
def fetching() -> Iterator[ProcessFetching]:
    """A decode engine whose fetches run in a process of their own."""
    with closing(open_link(facts(engine_id="d"), SIZES, 30.0, listens=False, fetches_apart=True)) as link:
        buffers = PinnedBuffers(CpuPlatform())
        link.use_buffers(buffers.take, buffers.give)
        assert isinstance(link.fetching, ProcessFetching)
        yield link.fetching
