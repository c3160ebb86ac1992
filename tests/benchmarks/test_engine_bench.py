"""The engine benchmark on small loads; half an arena on a real model is held to its number here too."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.engine import Line, write_page
from benchmarks.engine_loads import MixRun, Timing, draw_mix, half_pages, measure_long_prefill, run_mix
from benchmarks.hit_table import TABLE_SPEC
from benchmarks.random_model import make_random_model
from benchmarks.rig import LoadedModel, Rig, RigOptions, random_ids
from forkpoint.errors import RequestTooLargeError


@pytest.fixture(scope="module")
def model(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return LoadedModel.load(make_random_model(tmp_path_factory.mktemp("table"), TABLE_SPEC))


@pytest.mark.parametrize(("kind", "count"), [("many", 24), ("answers", 8), ("mixed", 9)])
def test_half_an_arena_on_a_real_model(model: LoadedModel, kind: str, count: int) -> None:
    """Same outputs, and half the throughput or more (CPU time; what disturbs the first run is measured again)."""
    mix = draw_mix(kind, count, 256)
    runs = list[tuple[MixRun, MixRun]]()
    while len(runs) < 2 and (not runs or ratio_of(runs) < 0.5):
        runs.append((run_mix(model, mix), run_mix(model, mix, half_pages(model, mix))))
        room, tight = runs[-1]
        assert tight.outputs == room.outputs
        assert all(len(outputs) == wanted for outputs, (_, wanted) in zip(tight.outputs, mix, strict=True))
    assert ratio_of(runs) >= 0.5


def ratio_of(runs: list[tuple[MixRun, MixRun]]) -> float:
    """The throughput with half of the room, as a share of that with ample room."""
    ample, half = (Timing.best([pair[side].timing for pair in runs]) for side in (0, 1))
    return ample.cpu_s / half.cpu_s


def test_a_request_that_can_never_fit(model: LoadedModel) -> None:
    rig = Rig(model, RigOptions(num_pages=40))
    with pytest.raises(RequestTooLargeError, match="request big"):
        rig.add("big", random_ids(1, 20_000, 256), 1)
    rig.ask("small", random_ids(1, 100, 256), 2)


def test_a_long_prefill_leaves_no_request_out(model: LoadedModel) -> None:
    found = measure_long_prefill(model, 2000, num_running=3, budget=256)
    assert found.smallest_share == 1
    assert found.num_steps == 11  # 192 tokens of the prompt beside 3 decode rows


def test_the_page(tmp_path: Path) -> None:
    lines = [Line("a case", "1", "2", True), Line("another", "3", "2", False)]
    write_page(tmp_path / "sub" / "page.md", lines, "python -m benchmarks.engine --parts hits")
    text = (tmp_path / "sub" / "page.md").read_text()
    assert "| a case | 1 | 2 | yes |" in text and "| another | 3 | 2 | **no** |" in text
    assert "--parts hits" in text and "commit" in text
