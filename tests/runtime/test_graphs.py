"""Recorded steps: shapes, padding, and equality with steps that were not recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forkpoint.models.decoder import Model
from forkpoint.models.moe import MoEConfig
from forkpoint.models.registry import load_config
from forkpoint.ops.metadata import MAX_PARTS, KeySplits, tile_table
from forkpoint.ops.ranks import Ranks
from forkpoint.ops.select import torch_table
from forkpoint.params import SamplingParams
from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.platforms.packing import Tensors
from forkpoint.runtime.block_table import BlockTable
from forkpoint.runtime.graphs import Graphs, ShapeTable, graph_shapes, longest_worth_recording
from forkpoint.runtime.step_inputs import StepBuilder, StepShape
from forkpoint.sched.plan import TO_DRAFT, StepPlan
from tests.ops.triton_cases import ON_GPU, triton_ops
from tests.plans import Row, decode, plan_of
from tests.runtime.driver import Driver, tiny_hybrid, tokens

HUB_CONFIGS = Path(__file__).parents[1] / "models" / "hub_configs"


class RecordingPlatform(CpuPlatform):
    """A CPU that keeps its memory apart and whose graphs do the work again, on the inputs filled in since."""

    def __init__(self, has_memory: bool = True) -> None:
        super().__init__()
        self.shares_memory, self.has_graphs = False, True
        self.has_memory, self.num_records = has_memory, 0

    def record_graph(self, run: Callable[[], None]) -> Callable[[], None]:
        self.num_records += 1
        if not self.has_memory:
            raise torch.OutOfMemoryError("no memory is left")
        return run

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array.copy())


counts = st.integers(0, 40)


@given(st.integers(1, 300), st.sampled_from([1024, 4096]), counts, st.integers(0, 4200), counts)
def test_the_smallest_shape_that_fits_is_found(
    num_rows: int, max_tokens: int, decodes: int, tokens: int, segments: int
) -> None:
    if bool(tokens) != bool(segments) or segments > tokens or not decodes + segments or decodes + segments > num_rows:
        return
    shapes = graph_shapes(num_rows, max_prefill_tokens=max_tokens)
    assert all(shape.num_segments <= num_rows for shape in shapes), "a segment is a row's"
    exact = StepShape(decodes, tokens, segments)
    found = ShapeTable(shapes).find(exact)
    fitting = [
        s
        for s in shapes
        if s.num_decodes >= decodes
        and s.num_prefill_tokens >= tokens
        and s.num_segments >= segments
        and bool(s.num_segments) == bool(segments)
    ]
    assert (found is None) == (not fitting)
    if found is not None:
        assert found in fitting and found.num_tokens == min(s.num_tokens for s in fitting)
    elif not segments:
        raise AssertionError("every decode batch has a shape")


@pytest.mark.parametrize(
    ("name", "num_ranks", "longest"),
    [
        ("qwen3.5-35b-a3b", 1, 6144),
        ("qwen3.5-35b-a3b", 2, 8704),
        ("nemotron-3-nano-30b-a3b", 1, 5120),
        ("granite-4.0-h-tiny", 1, 8704),  # its experts run next to an MLP
        ("qwen3.5-9b", 1, 1024),
        ("qwen3.5-9b", 2, 2048),
    ],
)
def test_steps_that_launch_longer_than_they_run_are_recorded(
    name: str, num_ranks: int, longest: int, tmp_path: Path
) -> None:
    """Only where launches take longer: otherwise padding to a shape would cost time."""
    (tmp_path / "config.json").write_bytes((HUB_CONFIGS / f"{name}.json").read_bytes())
    config = load_config(tmp_path).shared_by(Ranks(0, num_ranks))
    num_sparse = len(config.all_of(MoEConfig))
    sizes = (config.flops_per_token, len(config.layers) - num_sparse, num_sparse)
    shapes = graph_shapes(256, max_prefill_tokens=longest_worth_recording(*sizes, 8192))
    assert max(shape.num_tokens for shape in shapes) == longest
    assert len({shape for shape in shapes if shape.num_tokens > 1024}) <= 47


def test_a_full_step_of_decode_rows_and_prompts_has_a_shape() -> None:
    shapes = graph_shapes(256, max_prefill_tokens=longest_worth_recording(1, 40, 0, 2048))
    for exact in (StepShape(30, 2018, 2), StepShape(250, 1798, 3)):
        found = ShapeTable(shapes).find(exact)
        assert found is not None and found.num_tokens == 2560


def test_a_whole_batch_with_drafts_has_a_shape_beside_prompts() -> None:
    exact = StepShape(3 * 125, 640, 3, 125)
    found = ShapeTable(graph_shapes(128, max_num_drafts=2)).find(exact)
    assert found is not None and found.num_verified == 128 and found.num_tokens == 1024


@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=6), st.sampled_from([None, 1, 7, 64]))
def test_parts_cover_each_row_once(kv_lens: list[int], wanted: int | None) -> None:
    splits, longest = KeySplits(64, wanted), -(-max(kv_lens) // 64)
    parts, pointers = splits.table(np.asarray(kv_lens, np.int32))
    assert len(parts) == pointers[-1] <= splits.most(len(kv_lens), longest) <= len(kv_lens) * MAX_PARTS
    for row, length in enumerate(kv_lens):
        own = parts[pointers[row] : pointers[row + 1]]
        assert (own[:, 0] == row).all() and (own[:, 1] < own[:, 2]).all()
        assert own[0, 1] == 0 and own[-1, 2] == -(-length // 64) and (own[1:, 1] == own[:-1, 2]).all()


@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=6))
def test_parts_of_a_row_are_the_same_whatever_is_beside_it(kv_lens: list[int]) -> None:
    parts, pointers = KeySplits().table(np.asarray(kv_lens, np.int32))
    for row, length in enumerate(kv_lens):
        own = parts[pointers[row] : pointers[row + 1]]
        alone, _ = KeySplits().table(np.asarray([length], np.int32))
        assert (own[:, 1:] == alone[:, 1:]).all()
        assert (own[:, 1] % (2 if length <= 512 else 4) == 0).all()


def test_rows_of_a_small_batch_have_more_parts() -> None:
    splits = KeySplits(64, 64)

    def counts(*kv_lens: int) -> list[int]:
        return np.diff(splits.table(np.asarray(kv_lens, np.int32))[1]).tolist()

    assert counts(300) == [3] and counts(4096) == [32] and counts(16_384) == [64]
    assert counts(*[320] * 128) == [1] * 128
    many = counts(*[320] * 127, 16_384)
    assert many[:127] == [1] * 127 and 15 <= many[127] <= 20


@given(st.lists(st.integers(1, 300), max_size=5))
def test_tiles_cover_each_row_once(lens: list[int]) -> None:
    tiles = tile_table(np.asarray(lens, np.int32), 3)
    want = [(3 + row, offset) for row, length in enumerate(lens) for offset in range(0, length, 64)]
    assert [tuple(tile) for tile in tiles.tolist()] == want


def chunk(row: int, start: int, end: int, saves: Sequence[tuple[int, int]] = (), samples: bool = True) -> Row:
    return Row(row, start, range(start, end), 5 + row, 9 + row, (), saves, samples)


@given(st.integers(0, 4), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 90)), max_size=3), st.data())
@settings(max_examples=60)
def test_padding_changes_nothing_but_adds_rows_that_do_nothing(
    num_decodes: int, extents: list[tuple[int, int]], data: st.DataObject
) -> None:
    if not num_decodes + len(extents):
        return
    table = BlockTable(8, 6, 64, CpuPlatform())
    for row in range(8):
        table.add(row, np.arange(6 * row, 6 * row + 6, dtype=np.int32))
    samples = data.draw(st.lists(st.booleans(), min_size=num_decodes, max_size=num_decodes))
    decodes = [replace(decode(i, 100 + i, i, i + 1, i - 1), samples=draws) for i, draws in enumerate(samples)]
    chunks = tuple(
        chunk(4 + i, 64 * start, 64 * start + length, [(64 * start + length, 30 + i)], bool(i % 2))
        for i, (start, length) in enumerate(extents)
    )
    plan = plan_of(0, [*decodes, *chunks])
    exact = StepShape.of(plan)
    tokens = -(-exact.num_prefill_tokens // 64) * 64 + 64
    more = data.draw(st.integers(0, 1))
    shape = StepShape(num_decodes + 2, tokens, len(chunks) + more) if chunks else StepShape(num_decodes + 2, 0, 0)
    builder = StepBuilder(table, has_kv=True, splits=KeySplits(), copies=True)
    own = builder.build(plan, exact, recorded=False)
    wide = builder.build(plan, shape, recorded=True)
    empty = builder.build(StepPlan(0), shape, recorded=True)
    assert all(wide[name].shape == array.shape for name, array in empty.items() if name != "parts")
    assert list(own) == list(wide) and list(wide)[-1] == "parts"
    gap, real = shape.num_decodes - num_decodes, np.arange(exact.num_tokens)
    places = np.where(real < num_decodes, real, real + gap)
    for name in ("token_ids", "positions", "key_places"):
        assert (wide[name][places] == own[name]).all()
    assert (np.delete(wide["key_places"], places) == -1).all()
    for name in ("decode_src", "decode_placed", "decode_dst"):
        assert (wide[name][:num_decodes] == own[name]).all() and (wide[name][num_decodes:] == -1).all()
    for name in ("prefill_src", "prefill_placed", "prefill_dst"):
        assert (wide[name][: len(chunks)] == own[name]).all() and (wide[name][len(chunks) :] == -1).all()
    count = len(plan.sampled_rows)
    assert (wide["sampled_rows"][:count] == own["sampled_rows"]).all() and (wide["sampled_rows"][count:] == 8).all()
    assert (wide["token_ids"][wide["sampled"][:count]] == own["token_ids"][own["sampled"]]).all()
    queries = np.diff(wide["cu_queries"])
    assert queries[: shape.num_decodes].tolist() == [1] * shape.num_decodes
    assert queries[shape.num_decodes :].tolist() == [c.end - c.start for c in chunks] + [0] * (
        shape.num_segments - len(chunks)
    )
    assert (wide["kv_lens"][num_decodes : shape.num_decodes] == 0).all()
    assert (wide["parts"] == own["parts"]).all() and wide["part_ptr"][-1] == len(own["parts"])
    for name, shift in (("segment_tiles", 0), ("query_tiles", gap)):
        filled = wide[name][wide[name][:, 0] >= 0]
        assert (filled - [shift, 0] == own[name]).all() and len(wide[name]) >= len(own[name])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model]:
    """The same weights under Triton's operators and under torch's, with as few programs as can be."""
    folder = tmp_path_factory.mktemp("model")
    return tiny_hybrid(folder, triton_ops(), 1, 1), tiny_hybrid(folder, torch_table(), 1, 1)


def play(driver: Driver) -> list[list[int]]:
    """Prefills with saved states, decodes, both in one step, and a row that goes on from another's state."""
    first, second = tokens(66, 1), tokens(3, 2)
    saved, slots = driver.slot(), [driver.slot() for _ in range(3)]
    chunk = driver.chunk(0, 0, 66, -1, slots[0], [(64, saved)], samples=True)
    driver.run([chunk], added=[driver.added(0, first)])
    own = driver.chunk(1, 0, 3, -1, slots[1], samples=True)
    driver.run(
        [own, driver.decode(0, 66, slots[0], slots[0])],
        [driver.added(1, second, SamplingParams(temperature=0.9, top_k=20))],
    )
    fork = replace(driver.chunk(2, 64, 66, saved, slots[2], samples=True), new_blocks=driver.blocks(1))
    added = driver.added(2, first, block_ids=chunk.new_blocks[:1])
    driver.run([fork, driver.decode(1, 3, slots[1], slots[1])], [added])
    for i in range(2):
        driver.run([driver.decode(r, at + i, slots[r], slots[r]) for r, at in ((0, 67), (1, 4), (2, 66))])
    return [driver.outputs[row] for row in range(3)]


@pytest.mark.skipif(ON_GPU, reason="a graph that is run again needs the interpreter; tests/gpu has real graphs")
@pytest.mark.parametrize(("interval", "has_memory"), [(1, True), (2, True), (1, False)])
def test_recorded_steps_do_what_others_do(
    models: tuple[Model, Model], interval: int, has_memory: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The first step of each shape records it. Without memory for the graph it is issued kernel by kernel."""
    ours, plain = models
    shapes = [StepShape(0, 68, 2), StepShape(2, 6, 2), StepShape(4, 0, 0)]
    platform = RecordingPlatform(has_memory)
    driver = Driver.create(ours, triton_ops(), platform=platform, shapes=shapes, state_write_interval=interval)
    got = play(driver)
    assert platform.num_records == 3 and len(caplog.records) == 3 * (not has_memory)
    assert not driver.runner.record_next()
    assert sum(result.replayed for result in driver.results) == driver.step == 5
    assert got == play(Driver.create(plain))
    assert all(result.slot_bytes_copied == 0 for result in driver.results)


class CapturingPlatform(RecordingPlatform):
    """Calls the work once to record it, as a device does."""

    def record_graph(self, run: Callable[[], None]) -> Callable[[], None]:
        replay = super().record_graph(run)
        run()
        return replay


@pytest.mark.parametrize("runs_before_recording", [True, False])
def test_a_shape_that_could_not_be_recorded_is_recorded_again(runs_before_recording: bool) -> None:
    """Its work is issued on padding to record it, and before that only with `runs_before_recording`."""
    platform, seen = CapturingPlatform(), list[int]()
    graphs: Graphs[str, int] = Graphs(platform, {"shape": {"x": np.zeros(2, np.int32)}}, runs_before_recording)

    def issue(tensors: Tensors, shape: str) -> int:
        seen.append(int(tensors["x"][0]))
        if len(seen) == 1:
            raise RuntimeError("a launch failed")
        return len(seen)

    with pytest.raises(RuntimeError, match="a launch failed"):
        graphs.replay("shape", {"x": np.asarray([7, 7], np.int32)}, issue)
    assert graphs.replay("shape", {"x": np.asarray([8, 8], np.int32)}, issue) == len(seen)
    assert seen == ([0, 0, 0, 8] if runs_before_recording else [0, 0, 8])
    assert graphs.replay("shape", {"x": np.asarray([9, 9], np.int32)}, issue) == len(seen) and seen[-1] == 9


@pytest.mark.skipif(ON_GPU, reason="a graph that is run again needs the interpreter; tests/gpu has real graphs")
def test_recorded_steps_verify_drafts(models: tuple[Model, Model]) -> None:
    """Drafts that are right and wrong, rows without, a prefill beside them: the ids of plain decoding."""
    ours, plain = models
    prompts, others = (tokens(66, 1), tokens(3, 2)), tokens(3, 3)

    def begin(driver: Driver) -> list[int]:
        slots = [driver.slot(), driver.slot()]
        chunks = [driver.chunk(i, 0, len(ids), -1, slots[i], samples=True) for i, ids in enumerate(prompts)]
        driver.run(chunks, added=[driver.added(i, ids) for i, ids in enumerate(prompts)])
        return slots

    driver = Driver.create(plain)
    slots = begin(driver)
    for i in range(5):
        driver.run([driver.decode(r, len(ids) + i, slots[r], slots[r]) for r, ids in enumerate(prompts)])
    want = driver.outputs
    shapes = [StepShape(0, 70, 2), StepShape(5, 6, 2, 5), StepShape(6, 0, 0, 3)]
    platform = RecordingPlatform()
    driver = Driver.create(
        ours, triton_ops(), platform=platform, shapes=shapes, max_num_drafts=2, state_write_interval=2
    )
    slots, wrong = begin(driver), [(want[r][2] + 1) % 96 for r in range(2)]
    third = driver.chunk(2, 0, 3, -1, driver.slot(), samples=True)
    steps = [
        ([want[0][1], wrong[0]], [], [], [2, 1]),
        ([want[0][4 - 1], want[0][4]], [wrong[1]], [third], [3, 1, 1]),
        ([], [], [], None),
    ]
    ends = [len(ids) for ids in prompts]
    for *drafts, beside, counts in steps:
        rows = [
            Row(r, ends[r], [-1, *own], slots[r], slots[r], num_drafts=len(own), decodes=True)
            for r, own in enumerate(drafts)
        ]
        known = [replace(row, tokens=others) for row in beside]
        rows = [driver.lags.of(row) for row in rows]
        plan = plan_of(driver.step, [*rows, *known], added=tuple(driver.added(row.row, others) for row in beside))
        driver.step += 1
        result = driver.runner.submit(plan).result()
        assert result.replayed and (None if result.counts is None else result.counts.tolist()) == counts
        found = np.split(result.token_ids, np.cumsum(counts or [1, 1])[:-1])
        for r in range(2):
            driver.outputs[r] += found[r].tolist()
            ends[r] += len(found[r])
            driver.lags.reject(r, len(rows[r].tokens) - len(found[r]) if r < len(rows) else 0)
    assert [driver.outputs[r] for r in range(2)] == [want[0] + driver.outputs[0][6:], want[1][:4]]
    assert len(driver.outputs[0]) == 7


@pytest.mark.skipif(ON_GPU, reason="a graph that is run again needs the interpreter; tests/gpu has real graphs")
def test_drafts_that_stay_on_the_device_are_those_of_the_host(tmp_path: Path) -> None:
    """Windows of the MTP layer's drafts, one row with fewer, one whose penalties have to know them."""
    prompts, found = (tokens(5, 1), tokens(3, 2)), []
    shapes = [StepShape(6, 0, 0, 2)]
    sampling = (SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, repetition_penalty=1.2))
    for ops, platform, recorded in ((torch_table(), CpuPlatform(), []), (triton_ops(), RecordingPlatform(), shapes)):
        model = tiny_hybrid(tmp_path, ops, 1, 1, mtp=True)
        driver = Driver.create(model, ops, platform=platform, shapes=recorded, max_num_drafts=2)
        slots, ends = [driver.slot(), driver.slot()], [len(ids) for ids in prompts]
        chunks = [driver.chunk(i, 0, len(ids), -1, slots[i], samples=True) for i, ids in enumerate(prompts)]
        driver.run(chunks, added=[driver.added(i, ids, sampling[i]) for i, ids in enumerate(prompts)])
        outputs: list[Any] = [dict(driver.outputs)]
        for counts in ((2,), (1, 2)):
            rows = [
                Row(r, ends[r], [-1] + [TO_DRAFT] * count, slots[r], slots[r], num_drafts=count, decodes=True)
                for r, count in enumerate(counts)
            ]
            plan = plan_of(driver.step, [driver.lags.of(row) for row in rows])
            driver.step += 1
            result = driver.runner.submit(plan).result()
            assert result.counts is not None
            drafts = driver.runner._drafts
            assert drafts is not None
            complete = drafts.with_drafts(plan)
            outputs.append((result.token_ids.tolist(), result.counts.tolist(), complete.rows.tokens.tolist()))
            ends = [end + count for end, count in zip(ends, [*result.counts.tolist(), 0], strict=False)]
            for row, count in zip(rows, result.counts.tolist(), strict=True):
                driver.lags.reject(row.row, len(row.tokens) - count)
        found.append(outputs)
    assert found[0] == found[1]
