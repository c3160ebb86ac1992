"""The hit table on a real model: cached tokens are tokens that the model did not compute, states are not copied, and
outputs are those of an engine without a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.hit_table import OUTPUTS, ROWS, TABLE_SPEC, Row, ids, ids_alone, measure_row
from benchmarks.random_model import make_random_model
from benchmarks.rig import LoadedModel, Rig, RigOptions
from forkpoint.cache.lease import Lease
from forkpoint.config import CacheConfig
from forkpoint.engine.llm import LLM
from forkpoint.params import SamplingParams
from forkpoint.sched.drafter import Drafter
from forkpoint.sched.plan import TO_DRAFT, IntArray
from forkpoint.sched.request import Request
from tests.mtp_heads import add_mtp


@pytest.fixture(scope="module")
def model(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return LoadedModel.load(make_random_model(tmp_path_factory.mktemp("table"), TABLE_SPEC))


@pytest.fixture(scope="module")
def alone() -> Callable[..., Sequence[int]]:
    """Like `ids_alone`, but run each request once."""
    known = dict[tuple[bytes, int], Sequence[int]]()

    def ask(loaded: LoadedModel, prompt: IntArray, max_tokens: int) -> Sequence[int]:
        key = prompt.tobytes(), max_tokens
        if key not in known:
            known[key] = ids_alone(loaded, prompt, max_tokens)
        return known[key]

    return ask


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_row(model: LoadedModel, row: Row, alone: Callable[..., Sequence[int]]) -> None:
    """In a full arena, where the row must hold there."""
    result = measure_row(model, row, tight=row.tight_tokens > 0, alone=alone)
    assert result.cached >= row.asked
    assert result.computed_as_reported, "a cached token entered the model"
    assert result.slot_bytes_copied == 0
    assert result.identical


def test_preempted_after_200_decoded_tokens(model: LoadedModel) -> None:
    rig = Rig(model, RigOptions())
    request = rig.add("long", ids(1, 1000), 300)
    while len(request.output_token_ids) < 200:
        rig.step()
    rig.sched._departures.preempt(rig.sched._requests["long"])
    rig.run()
    assert request.num_preemptions == 1 and request.resume_cache is not None
    assert request.resume_cache.num_cached_tokens >= 1152
    assert rig.core.num_model_tokens == 1000 + 299 + 1199 - request.resume_cache.num_cached_tokens
    assert rig.core.slot_bytes_copied == 0
    off = Rig(model, RigOptions(cache=CacheConfig(enable_prefix_caching=False)))
    assert off.ask("alone", ids(1, 1000), 300).output_token_ids == request.output_token_ids


def test_a_state_sensitive_model(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit that starts from the zero state is noticed by its outputs."""
    monkeypatch.setattr(Lease, "read_slot", property(_forgetful))
    assert not measure_row(model, ROWS[3]).identical


def _forgetful(lease: Lease) -> int:
    return -1 if lease.read_from is not None or not lease.num_planned else lease.slot


class Always(Drafter):
    """Three drafts of the MTP layer for every row; random weights make nearly all of them wrong."""

    def draft(self, request: Request, lease: Lease, most: int) -> IntArray | None:
        return np.full(min(most, 3), TO_DRAFT, np.int32)


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = make_random_model(tmp_path_factory.mktemp("table-mtp"), TABLE_SPEC)
    add_mtp(folder)
    return replace(LoadedModel.load(folder, mtp=True), drafter=Always(), max_num_drafts=3)


@pytest.mark.parametrize("row", [row for row in ROWS if row.name.startswith(("3,000", "900"))])
def test_row_with_the_mtp_layer(
    model: LoadedModel, drafting: LoadedModel, row: Row, alone: Callable[..., Sequence[int]]
) -> None:
    """No fewer tokens are cached, and outputs are the same."""
    plain, found = measure_row(model, row, alone=alone), measure_row(drafting, row)
    assert found.cached >= plain.cached >= row.asked
    assert found.identical and found.slot_bytes_copied == 0


class Measured(Exception):
    """A row has come to its measured request, with this prompt."""

    def __init__(self, prompt: IntArray) -> None:
        super().__init__()
        self.prompt = prompt


class RowOfEngine(Rig):
    """A row's requests on an engine that plays other rows too, under a salt that hides the other rows' entries.

    Rows that begin with the same long request share it.
    """

    def __init__(self, llm: LLM, row: Row) -> None:
        self.core, self.row, self.requests = llm._engine.core, row, {}
        self.salt = next((length for length in ("20,000", "5,000") if length in row.name), row.name)

    def add(self, name: str, prompt: IntArray, max_tokens: int, breakpoints: tuple[int, ...] = ()) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, cache_salt=self.salt)
        prompt = prompt.astype(np.int32)
        request = Request(f"{self.row.name}: {name}", prompt, params, max_tokens, seed=0, breakpoints=breakpoints)
        self.core.add(request)
        self.requests[name] = request
        return request

    def ask(self, name: str, prompt: IntArray, max_tokens: int, breakpoints: tuple[int, ...] = ()) -> Request:
        is_measured = max_tokens == OUTPUTS
        if is_measured and not self.core.has_unfinished():
            raise Measured(prompt)
        request = super().ask(name, prompt, max_tokens, breakpoints)
        if is_measured:  # another request waited with it, so it is asked again after the restart
            raise Measured(prompt)
        return request


def test_rows_after_a_restart(tmp_path: Path) -> None:
    """An engine plays the rows up to their measured requests, which the next engine answers from the disk."""
    folder = make_random_model(tmp_path / "model", TABLE_SPEC)
    options: dict[str, Any] = {"max_num_batched_tokens": 2048, "max_num_seqs": 32, "num_threads": 1}
    options |= {"kv_cache_memory_bytes": 1 << 27, "kv_disk_path": str(tmp_path / "disk"), "kv_disk_size": 0.25}
    prompts = []
    with LLM(str(folder), log_level="warning", **options) as llm:
        for row in ROWS:
            with pytest.raises(Measured) as found:
                row.play(RowOfEngine(llm, row))
            prompts.append(found.value.prompt)
    with LLM(str(folder), log_level="warning", **options) as llm:
        for row, prompt in zip(ROWS, prompts, strict=True):
            cache = Rig.ask(RowOfEngine(llm, row), "measured", prompt, 1).cache
            assert cache.num_cached_tokens >= row.asked and cache.num_restored_tokens > 0, row.name
