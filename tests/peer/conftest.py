"""The links of two engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forkpoint.peer.link import PeerLink, open_link
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
