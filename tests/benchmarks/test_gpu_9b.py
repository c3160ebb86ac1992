"""The protocol of the 9B benchmark on a model that a CPU runs, and the arithmetic of its floors."""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu_9b import drafts, lines, measures
from benchmarks.gpu_9b.__main__ import main
from benchmarks.gpu_9b.copies import CopySizes, Load, loads
from benchmarks.gpu_9b.drafts import accept_by_chance
from benchmarks.gpu_9b.first_token import ChildFailedError, measure_first_token
from benchmarks.gpu_9b.floor import Floor, decode_work, prefill_work
from benchmarks.gpu_9b.measures import Client, ProtocolError, Sizes
from benchmarks.gpu_9b.options import engine_options
from benchmarks.gpu_9b.profile import Profiler
from benchmarks.gpu_9b.shape import (
    SHAPE_9B,
    attention_flops_per_pair,
    kv_bytes_per_token,
    matrices,
    state_bytes,
    write_config,
)
from benchmarks.gpu_9b.table import Goal, Line
from benchmarks.model131m import HybridShape
from forkpoint.cache.layout import CacheLayout
from forkpoint.config import BLOCK_SIZE
from forkpoint.engine.llm import LLM
from forkpoint.models.attention import AttentionConfig
from forkpoint.models.registry import load_config, load_model
from forkpoint.ops.rows.columns import SpanColumns
from forkpoint.ops.select import torch_table
from forkpoint.runtime.draft_spans import NO_DRAFT, DraftSpans
from forkpoint.runtime.sampler import Sampled

SHAPE = HybridShape(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    num_key_heads=2,
    num_value_heads=4,
    state_dim=32,
    max_position_embeddings=4096,
)
SIZES = Sizes(
    prompt=512,
    extension=64,
    chat_start=200,
    chat_end=300,
    chat_answer=8,
    chat_new=20,
    decode_prompt=64,
    decode_tokens=4,
    decode_batches=(1, 4),
    conversations=3,
    shared=128,
    own=100,
    turns=3,
    turn_answer=6,
    turn_new=40,
    repeats=2,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("9b") / "model", SHAPE)


@pytest.fixture
def client(model: Path) -> Any:
    with LLM(str(model), **engine_options("cpu", False)) as llm:
        yield Client(llm, SHAPE.vocab_size)


def test_the_shape_counts_what_the_model_and_its_layout_count(model: Path) -> None:
    loaded = load_model(model, ops=torch_table(), load_format="dummy")
    layout = CacheLayout.create(loaded.layer_specs)
    assert kv_bytes_per_token(SHAPE) * BLOCK_SIZE == layout.block_bytes
    assert state_bytes(SHAPE) == layout.slot_bytes
    assert attention_flops_per_pair(SHAPE) == loaded.config.flops_per_pair
    # The model's estimate leaves out the two gates of a head and the gate of attention.
    products = 2 * sum(rows * columns for rows, columns in matrices(SHAPE))
    assert products == pytest.approx(loaded.config.flops_per_token, rel=0.05)


def test_the_9b_shape_is_as_large_as_it_should_be(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, SHAPE_9B))
    assert len(config.layers) == 32 and sum(isinstance(part, AttentionConfig) for part in config.parts) == 8
    weights = sum(rows * columns for rows, columns in matrices(SHAPE_9B)) + 2 * config.vocab_size * config.hidden_size
    assert 8.1e9 < weights < 8.2e9  # the released model has a larger vocabulary and a vision tower
    assert state_bytes(SHAPE_9B) == pytest.approx(49.1 * 2**20, rel=0.01)


def test_every_part_of_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, numbers = tmp_path / "page.md", tmp_path / "lines.json"
    parts = "ttft,chat,decode,agent"
    flags = ["--device", "cpu", "--only", parts, "--repeats", "2", "--page", str(page), "--json", str(numbers)]
    assert main(flags, SHAPE, SIZES) == 0
    found = json.loads(numbers.read_text())["lines"]
    assert [line["name"].split(",")[0].split(":")[0] for line in found] == [
        "time to first token",
        "the same prompt + 64 tokens",
        "chat turns at 200 to 300 tokens (8 generated + 20 new each)",
        "decode",
        "decode",
        "agent loop",
        "the same",
    ]
    assert all(len(line["samples"]) == 2 and line["floor"] > 0 for line in found)
    # Four decoded tokens are a difference of two times: on a busy machine it can have either sign.
    assert all(line["value"] > 0 for line in found if not line["name"].startswith("decode"))
    cached = found[-1]
    assert 0.6 * cached["floor"] <= cached["value"] <= cached["floor"] + 1e-9, "beyond what any cache can hold"
    assert "counters agreed after 32 calls" in capsys.readouterr().err
    text = page.read_text()
    assert all(line["name"] in text for line in found) and str(tmp_path) not in text


def test_an_unknown_part_is_an_error() -> None:
    with pytest.raises(SystemExit):
        main(["--only", "speed"], SHAPE, SIZES)


def test_counters_that_contradict_the_report_stop_the_run(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.ask([client.ids(70)], 2)
    honest = client._llm.get_metrics
    for name, said in (("num_model_tokens", "entered the model"), ("slot_bytes_copied", "were copied")):
        calls: list[None] = []

        def lying(name: str = name, calls: list[None] = calls) -> dict[str, Any]:
            calls.append(None)
            return {**honest(), name: honest()[name] + len(calls)}

        monkeypatch.setattr(client._llm, "get_metrics", lying)
        with pytest.raises(ProtocolError, match=said):
            client.ask([client.ids(70)], 2)


def test_a_chat_turn_hits_all_but_its_tail(client: Client) -> None:
    turns = measures.chat_turns(client, replace(SIZES, repeats=1))
    assert len(turns) == SIZES.num_chat_turns == 3
    for series in turns:
        assert SIZES.chat_new < series.num_computed <= SIZES.chat_new + SIZES.chat_answer + 64


def test_floors() -> None:
    floor = Floor(SHAPE, copy_rate=1e6, matrix_rate=1e9, products_s={4: 1.0, 512: 8.0}, head_s={1: 0.5, 4: 0.25})
    states, keys = 8 * state_bytes(SHAPE) / 1e6, 40 * kv_bytes_per_token(SHAPE) / 1e6
    assert floor.step_s(decode_work(4, 10)) == pytest.approx(1.25 + states + keys)
    prompt = prefill_work(0, 512)
    assert prompt.num_pairs == 512 * 513 / 2
    pairs = prompt.num_pairs * attention_flops_per_pair(SHAPE) / 1e9
    keys = 512 * kv_bytes_per_token(SHAPE) / 1e6
    whole = 8.5 + max(pairs, keys) + states / 4
    assert floor.step_s(prompt) == pytest.approx(whole)
    assert lines.cold_floor_s(floor, 512, 512) == pytest.approx(whole)
    assert lines.cold_floor_s(floor, 1024, 512) > 2 * whole - 1
    assert prefill_work(512, 576).num_pairs == sum(range(513, 577))


def test_the_agent_loop_cannot_be_cached_beyond_this() -> None:
    floor = Floor(SHAPE_9B, 4.3e12, 790e12, {8192: 0.172, 32: 0.0045}, {1: 0.0003, 32: 0.0003})
    seconds, cached = lines.agent_floor_s(floor, Sizes(), 8192)
    assert 0.88 < cached < 0.89
    assert 9.5 < seconds < 11.5


def test_a_goal_has_a_direction() -> None:
    assert Goal("", 10.0).is_met(9.0) and not Goal("", 10.0).is_met(11.0)
    assert Goal("", 10.0, more_is_better=True).is_met(11.0)
    line = Line("decode", "tok/s", 180.0, 231.0, Goal("187 tok/s", 215.0, more_is_better=True))
    assert line.cells == "| decode | 187 tok/s | 231.0 tok/s | 180.0 tok/s | 215.0 tok/s or more | **no** |"


def test_a_profile_accounts_for_the_time_of_a_step(client: Client) -> None:
    profiles = list(Profiler(client._llm, client.ids, SIZES).run())
    assert [found.name for found in profiles] == [
        "decode, 1 rows of 64 tokens",
        "decode, 4 rows of 64 tokens",
        "decode, 3 rows of 274 tokens",
        "cold prompt",
        "warm prompt",
        "chat turn",
    ]
    for found in profiles:
        assert found.phases_s["submit"] > 0 and found.phases_s["schedule"] > 0
        assert sum(found.phases_s.values()) <= found.wall_s * 1.5
        assert found.lines(3)[0].startswith(found.name)
    client.ask([client.ids(70)], 2)  # the engine is as it was


def test_copies_are_counted_and_compared(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = CopySizes(
        trunk=200,
        branches=3,
        branch_new=20,
        branch_answer=2,
        conversations=2,
        first=100,
        turns=2,
        turn_new=8,
        turn_answer=4,
        rows=2,
        decode_prompt=60,
        decode_tokens=8,
        repeats=1,
    )
    assert main(["--device", "cpu", "--copies"], SHAPE, SIZES, sizes) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| load | copy-free |") and len(lines) == 2 + 3
    assert lines[2].startswith("| 3 branches of 20 tokens off a 200-token prompt |")
    assert Load("a", 0.5, 0.6, 2 * 10**9).cells == "| a | 500.0 ms | 600.0 ms | +20.0% | 2.00 GB |"


def test_every_load_copies_states_when_told_to(model: Path) -> None:
    """Each fork, each turn and each boundary starts from a state that somebody else keeps."""
    small = CopySizes(trunk=200, branches=3, branch_new=20, conversations=2, first=100, turns=2, rows=2)
    small = replace(small, decode_prompt=60, decode_tokens=8)
    with LLM(str(model), **engine_options("cpu", False), force_state_copy=True) as llm:
        client = Client(llm, SHAPE.vocab_size, copies=True)
        for name, run in loads(small).items():
            before = client.slot_bytes_copied
            assert run(client) > 0
            assert client.slot_bytes_copied - before >= 2 * state_bytes(SHAPE), name


@pytest.mark.slow
def test_a_process_of_its_own_tells_its_first_token(model: Path, tmp_path: Path) -> None:
    seconds, parts = measure_first_token(model, tmp_path, ["--device", "cpu"])
    assert 0 < seconds < 120 and "imports" in parts and "token" in parts
    with pytest.raises(ChildFailedError, match="exit code"):
        measure_first_token(tmp_path / "nowhere", tmp_path, ["--device", "cpu"])


def test_rates_are_measured_on_this_device() -> None:
    from benchmarks.gpu_9b.floor import measure_floor

    floor = measure_floor(SHAPE, torch.device("cpu"), {1, 64}, {1})
    assert floor.copy_rate > 1e8 and floor.matrix_rate > 1e7
    assert floor.products_s[64] > 0 and floor.head_s[1] > 0


@pytest.mark.parametrize("same", [True, False])
def test_ids_with_drafts_that_are_others_end_the_benchmark(same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, wanted = SimpleNamespace(get_metrics=lambda: defaultdict(int)), [(1, 2)] * drafts.COMPARED
    answers = iter([wanted, [*wanted[1:], (1, 2 if same else 3)]])
    monkeypatch.setattr(drafts, "start", lambda *_, **__: nullcontext(llm))
    monkeypatch.setattr(drafts, "ask", lambda *_: (1.0, next(answers)))
    monkeypatch.setattr(drafts, "set_drafter", lambda *_: None)
    with nullcontext() if same else pytest.raises(SystemExit, match="error"):
        drafts.compare(Path(), drafts.build_parser().parse_args([]))


def test_drafts_count_by_chance() -> None:
    """Whatever was sampled, up to a row's last position."""
    sizes = np.asarray([4, 1, 2, 4], np.int32)
    starts, found = np.cumsum(sizes, dtype=np.int32) - sizes, torch.arange(11)
    drafts = np.full(11, 99, np.int32)
    drafts[np.cumsum(sizes) - 1] = NO_DRAFT
    where = (torch.from_numpy(x).long() for x in (drafts, np.arange(4), starts, sizes, np.zeros(5), np.zeros(5)))
    columns = SpanColumns(*where)
    runner: Any = SimpleNamespace(_ops=torch_table(), _span_columns=lambda *_: columns)
    for rates, counts in (((1.0, 1.0, 0.0), [3, 1, 2, 3]), ((), [1, 1, 1, 1]), ((1.0,) * 5, [4, 1, 2, 4])):
        spans, sampled = DraftSpans(sizes, starts, drafts), Sampled(found, torch.ones(11) > 0)
        told, _ = accept_by_chance(rates)(runner, spans, np.arange(4, dtype=np.int32), sampled)
        assert told[:11].tolist() == found.tolist() and told[11:].tolist() == counts
