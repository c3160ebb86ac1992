"""The hit table on a real model: cached tokens are tokens that the model did not compute, states are not copied, and
outputs are those of an engine without a cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.hit_table import ROWS, TABLE_SPEC, Row, ids, measure_row
from benchmarks.random_model import make_random_model
from benchmarks.rig import LoadedModel, Rig, RigOptions
from forkpoint.cache.lease import Lease
from forkpoint.config import CacheConfig
from forkpoint.sched.drafter import Drafter
from forkpoint.sched.plan import TO_DRAFT, IntArray
from forkpoint.sched.request import Request
from tests.checkpoints import add_mtp

TIGHT = [row for row in ROWS if row.tight_tokens]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield LoadedModel.load(make_random_model(tmp_path_factory.mktemp("table"), TABLE_SPEC))
    torch.set_num_threads(before)


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_row(model: LoadedModel, row: Row) -> None:
    result = measure_row(model, row)
    assert result.cached >= row.asked
    assert result.computed_as_reported, "a cached token entered the model"
    assert result.slot_bytes_copied == 0
    assert result.identical
    print(f"{row.name}: {result.cached} cached, {result.held_bytes / result.cached:.1f} checkpoint bytes per token")


@pytest.mark.parametrize("row", TIGHT, ids=[row.name for row in TIGHT])
def test_row_in_a_full_arena(model: LoadedModel, row: Row) -> None:
    assert measure_row(model, row, tight=True).holds


def test_preempted_after_200_decoded_tokens(model: LoadedModel) -> None:
    rig = Rig(model, RigOptions())
    request = rig.add("long", ids(1, 1000), 300)
    while len(request.output_token_ids) < 200:
        rig.step()
    rig.sched._preempt(rig.sched._requests["long"])
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
def test_row_with_the_mtp_layer(model: LoadedModel, drafting: LoadedModel, row: Row) -> None:
    """No fewer tokens are cached, and outputs are the same."""
    plain, found = measure_row(model, row), measure_row(drafting, row)
    assert found.cached >= plain.cached >= row.asked
    assert found.identical and found.slot_bytes_copied == 0
