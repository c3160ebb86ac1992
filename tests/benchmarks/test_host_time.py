"""The host's share is small beside a device's step."""

from __future__ import annotations

from pathlib import Path

from benchmarks.host_time import HostBench


def test_the_host_takes_far_less_than_a_step_of_a_large_model(tmp_path: Path) -> None:
    found = list(HostBench(tmp_path, repeats=3, events=False).run(4096, 128, (1, 64)))
    seconds = {time.name: time.seconds for time in found}
    names = ["4,096-token prompt, cold", "the same + 128 tokens, warm", "decode step, 1 rows", "decode step, 64 rows"]
    assert list(seconds) == names
    # Several times what it takes on an idle machine, and less than such a step takes on a fast GPU.
    assert seconds["the same + 128 tokens, warm"] < 6e-3
    assert seconds["decode step, 1 rows"] < 0.5e-3 and seconds["decode step, 64 rows"] < 2e-3
