"""A plugin for pytest in the environment of triton-ascend (`-p tests.ascend.lowered_plugin`): Triton kernels run as
their Ascend IR on x86. Fails the session where a launch touched memory beside its buffers."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "0"

import pytest

from tests.ascend.execution import GUARD, ORDER, RAN
from tests.ascend.lowering import LAUNCHES

# Tests of kernels that an NPU does not launch, by a part of their names. `DeviceExperts` and `DeviceLinear` avoid the
# first two, whose loads would lose their masks. `in_turns` avoids the next two, and `Loaded.key_splits` the last one.
NOT_LAUNCHED = (
    "paired",
    "test_gated_products_in_two_parts",
    "test_a_row_of_no_tokens_leaves_nothing_behind",
    "test_order_of",
    "test_tokens_of_a_row_whose_keys_are_read_together",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(name in item.name for name in NOT_LAUNCHED):
            item.add_marker(pytest.mark.skip(reason="an NPU does without that kernel"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    RAN.test = item.nodeid


def pytest_sessionfinish(session: pytest.Session) -> None:
    if RAN.faults:
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    say = terminalreporter.write_line
    say(f"{len(LAUNCHES.seen)} specialisations lowered, {LAUNCHES.crashes} crashes of the adapter tried again, ")
    guarded = f", {sum(RAN.guarded.values())} of them guarded {GUARD}" if GUARD else f" {ORDER}"
    say(f"{sum(RAN.launches.values())} launches on x86{guarded}, {len(RAN.faults)} beside their buffers")
    for fault in RAN.faults:
        say(f"  {fault.kernel}: {fault.where} ({fault.test})")
