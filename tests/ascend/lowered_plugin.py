"""A plugin for pytest in the environment of triton-ascend (`-p tests.ascend.lowered_plugin`): Triton kernels run as
their Ascend IR on x86. Fails the session where a launch touched memory beside its buffers."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "0"

import pytest

from tests.ascend.execution import GUARD, ORDER, RAN, Fault
from tests.ascend.lowering import LAUNCHES

# Kernels called with tiles that do not divide the width, which `DeviceExperts` and `DeviceLinear` do not do on an NPU.
ODD_WIDTHS = (
    "test_experts[",
    "test_experts_without_a_gate[",
    "test_tokens_do_not_see_each_other[",
    "test_gated_products",
)


def pytest_runtest_setup(item: pytest.Item) -> None:
    RAN.test = item.nodeid


def unexpected() -> list[Fault]:
    return [fault for fault in RAN.faults if not any(name in fault.test for name in ODD_WIDTHS)]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if unexpected():
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    say = terminalreporter.write_line
    way = " ".join(filter(None, (GUARD and f"guarded {GUARD}", ORDER)))
    say(f"{len(LAUNCHES.seen)} specialisations lowered, {LAUNCHES.crashes} crashes of the adapter tried again, ")
    say(f"{sum(RAN.launches.values())} launches on x86 {way}, {len(RAN.faults)} beside their buffers")
    for fault in RAN.faults:
        say(f"  {fault.kernel}: {fault.where} ({fault.test})")
