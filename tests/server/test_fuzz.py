"""Wild values in every field of the API, beside a stream that must not notice them."""

from __future__ import annotations

import pytest

from scripts.fuzz.run import Fuzz, run_fuzz
from tests.server.running import RunningServer

NUM_REQUESTS = 600
LIMIT_S = 300.0  # on a busy machine; a quiet one takes five seconds
SLACK_S = 1.0  # other tests run on the same cores; what freezes a server takes seconds


@pytest.mark.slow
def test_no_request_ends_the_server_or_touches_another(server: RunningServer) -> None:
    before, logged = server.engine_pid, len(server.log)
    report = run_fuzz(Fuzz(server.url, num_requests=NUM_REQUESTS, seed=1, limit_s=LIMIT_S))
    assert report.problems == [], report.text()
    assert report.counts["wild requests"] > 100 and report.counts["answered 200"] > 20, report.text()
    assert report.least_drawn > 0, report.text()
    good, wild = report.p99_s("beside good requests"), report.p99_s("beside wild requests")
    assert wild <= 2 * good + SLACK_S, report.text()
    assert server.engine_pid == before
    assert "Traceback" not in server.log[logged:], server.log
