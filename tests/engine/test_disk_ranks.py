"""The disks and the links of several ranks as one."""

from __future__ import annotations

import numpy as np

from forkpoint.cache.tier_entries import RECORD, DiskFacts, Records
from forkpoint.sched.plan import FetchReport, TierReport
from forkpoint.worker.disk_ranks import TierTickets, common_disk
from forkpoint.worker.peer_ranks import MOST_OPEN, FetchTickets


def test_a_ticket_counts_once_all_ranks_have_reported_it() -> None:
    tickets = TierTickets(2)
    assert tickets.merge([TierReport((1, 2, 3))]) is None
    assert tickets.merge([TierReport((2,), (1,))]) == TierReport((2,), (1,)), "one rank has not read it"
    assert tickets.merge([]) is None
    assert tickets.merge([TierReport((3,), writes=False)]) == TierReport((3,), (), writes=False)


def test_a_fetch_counts_once_all_ranks_have_their_share() -> None:
    tickets = FetchTickets(2)
    assert tickets.merge([FetchReport((1, 2), (3,), (3,)), None]) is None
    assert tickets.merge([None, FetchReport((1, 3), (2,))]) == FetchReport((1,), (2, 3), (3,))
    assert tickets.merge([FetchReport((4,)), FetchReport((4,))]) == FetchReport((4,))


def test_an_entry_has_arrived_once_all_ranks_have_their_share() -> None:
    tickets = FetchTickets(2)
    assert tickets.merge([FetchReport(arrived=((1, 3),)), None]) is None
    assert tickets.merge([None, FetchReport(arrived=((1, 2),))]) == FetchReport(arrived=((1, 2),))
    assert tickets.merge([FetchReport((1,)), None]) is None, "nothing new of the second rank"
    assert tickets.merge([None, FetchReport(arrived=((1, 5),))]) == FetchReport(arrived=((1, 5),))
    assert tickets.merge([None, FetchReport((1,))]) == FetchReport((1,))
    assert not tickets._open


def test_fetches_that_end_on_one_rank_alone_are_dropped_in_time() -> None:
    tickets = FetchTickets(2)
    for ticket in range(MOST_OPEN + 9):
        assert tickets.merge([FetchReport(failed=(ticket,), unreachable=(ticket,)), None]) is None
    assert len(tickets._open) == MOST_OPEN
    assert tickets.merge([None, FetchReport((0, MOST_OPEN))]) == FetchReport((), (MOST_OPEN,), (MOST_OPEN,))


def records(*named: tuple[int, bytes, bytes]) -> Records:
    made = np.zeros(len(named), RECORD)
    for record, (unit, name, found) in zip(made, named, strict=True):
        record["unit"], record["kind"], record["live"] = unit, 1, 1
        record["hash"], record["sum"] = np.void(name.ljust(16)), np.void(found.ljust(16))
    return made


def test_only_what_all_ranks_have_in_one_unit_is_found() -> None:
    first = DiskFacts(9, records((1, b"a", b"x"), (2, b"b", b"x"), (3, b"c", b"x"), (4, b"d", b"x")), 5.0, 100)
    second = DiskFacts(9, records((1, b"a", b"y"), (5, b"b", b"y"), (3, b"other", b"y"), (4, b"d", b"y")), 6.0, 50)
    common = common_disk([first, second])
    assert common is not None and common.entries["unit"].tolist() == [1, 4]
    assert (common.window_start_s, common.window_bytes) == (6.0, 100)
    assert common_disk([first, None]) is None
