"""Parts that run side by side: what waits for what, on a device whose streams are lists."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from forkpoint.ops.side_by_side import SideStream, one_after_other
from forkpoint.platforms.platform import DeviceTraits

CPU = torch.device("cpu")


class Stream:
    """Work in order. A stream that waits for another first has the other's work done."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.work: list[Any] = []

    def wait_stream(self, other: Stream) -> None:
        self.work.append(list(other.work))


class Streams:
    def __init__(self) -> None:
        self.current = Stream()

    Stream = Stream

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    found = Streams()
    monkeypatch.setattr("forkpoint.ops.side_by_side.traits_of", lambda device: DeviceTraits(most_overlapped_rows=512))
    monkeypatch.setattr(torch, "get_device_module", lambda device: found)
    return found


def test_both_parts_follow_what_was_issued_before_and_precede_what_comes_after(streams: Streams) -> None:
    def issue(name: str) -> None:
        streams.current.work.append(name)

    run, main = SideStream(), streams.current
    issue("before")
    run(CPU, lambda: issue("decodes"), lambda: issue("prompts"))
    issue("after")
    assert main.work == ["before", "prompts", [["before"], "decodes"], "after"]
    run(CPU, lambda: issue("more"), lambda: issue("last"))
    assert main.work[-1][-2:] == [main.work[:4], "more"], "one stream serves all layers, and waits for all before it"


def test_a_device_without_overlap_runs_one_part_after_the_other() -> None:
    issued: list[str] = []
    for run in (SideStream(), one_after_other):
        run(CPU, lambda: issued.append("decodes"), lambda: issued.append("prompts"))
    assert issued == ["decodes", "prompts"] * 2


@pytest.mark.parametrize("on_side", [True, False])
def test_streams_join_although_a_part_fails(on_side: bool, streams: Streams) -> None:
    def issue(fails: bool) -> None:
        streams.current.work.append("issued")
        assert not fails, "no memory"

    main = streams.current
    with pytest.raises(AssertionError, match="no memory"):
        SideStream()(CPU, lambda: issue(on_side), lambda: issue(not on_side))
    assert streams.current is main and main.work[-1] == [[], "issued"]
