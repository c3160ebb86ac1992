"""Policies from outside: by name, as `module:Class`, in the engine's scheduler and in the simulator."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forkpoint.cache.capture import CaptureContext, CapturePolicy
from forkpoint.cache.eviction import EntryFacts, EvictionPolicy
from forkpoint.cache.policies import CAPTURE, EVICTION
from forkpoint.cache.policy_answers import checked_candidates
from forkpoint.cache.tree import Checkpoint, Origin
from forkpoint.cli.main import main
from forkpoint.config import CacheConfig, SchedulerConfig
from forkpoint.errors import ConfigError
from forkpoint.sim.engine_replica import EngineReplica
from forkpoint.sim.named_systems import make_system
from forkpoint.sim.shape import QWEN3_5_9B
from forkpoint.worker.codec import Failure
from tests.sched.harness import LAYOUTS, Harness, tokens

LENGTH = 3000


class TwoClasses(EvictionPolicy):
    """What conversations went on from first, then the oldest."""

    def key(self, entry: EntryFacts) -> float:
        return (0.0 if entry.superseded else 1e9) - entry.age


class EveryThousand(CapturePolicy):
    def positions(self, context: CaptureContext) -> Iterable[tuple[Origin, Iterable[int]]]:
        yield Origin.INTERVAL, range(1000, context.prompt_end, 1000)


class NotANumber(EvictionPolicy):
    def key(self, entry: EntryFacts) -> float:
        return float("nan")


class Nothing(EvictionPolicy):
    def key(self, entry: EntryFacts) -> float:
        return None  # type: ignore[return-value]  # a forgotten return in code without types


class Misspelled(EvictionPolicy):
    def keys(self, entry: EntryFacts) -> float:
        return 0.0


class WithArguments(CapturePolicy):
    def __init__(self, step: int) -> None:
        self.step = step

    def positions(self, context: CaptureContext) -> Iterable[tuple[Origin, Iterable[int]]]:
        return ()


class Broken(CapturePolicy):
    def positions(self, context: CaptureContext) -> Iterable[tuple[Origin, Iterable[int]]]:
        yield Origin.INTERVAL, range(0, context.prompt_end, 0)


EVICTION_HERE, CAPTURE_HERE = f"{__name__}:TwoClasses", f"{__name__}:EveryThousand"


def test_a_scheduler_with_policies_from_outside() -> None:
    layout = LAYOUTS["several blocks a page"]
    config = CacheConfig(eviction_policy=EVICTION_HERE, capture_policy=CAPTURE_HERE)
    harness = Harness(layout=layout, num_pages=layout.num_pages_for(2 * LENGTH, 9) + 1, cache=config)
    harness.ask("first", tokens(1, LENGTH))
    assert {c.num_tokens for c in harness.checkpoints(tokens(1, LENGTH)).values()} == {960, 1984}
    for seed in range(2, 6):
        harness.ask(f"prompt {seed}", tokens(seed, LENGTH))
    assert not harness.checkpoints(tokens(1, LENGTH)), "the oldest went"
    assert harness.ask("again", tokens(5, LENGTH)).cache.num_cached_tokens == 1984


def test_the_simulator_takes_them(capsys: pytest.CaptureFixture[str]) -> None:
    system = f"forkpoint:eviction={EVICTION_HERE},capture={CAPTURE_HERE}"
    assert main(["simulate", "chat:sessions=4,turns=2", "--memory", "4", "--systems", system, "--jobs", "1"]) == 0
    assert system in capsys.readouterr().out


def test_simulated_tiers_evict_by_the_named_policy_as_the_engines_do() -> None:
    options = f"forkpoint:eviction={EVICTION_HERE},host_memory=1,disk_memory=1"
    replica = make_system(options, QWEN3_5_9B, 1 << 30, SchedulerConfig())
    assert isinstance(replica, EngineReplica)
    cache = replica.sched.cache
    policies = [cache.store.policy, *(tier.store.policy for tier in cache.tiers.all)]
    assert [type(policy) for policy in policies] == [TwoClasses] * 3
    replica.plan(now_s=12.5)
    assert [policy.clock() for policy in policies] == [12.5] * 3, "simulated seconds"


class Noting(TwoClasses):
    def saved(self, checkpoint: Checkpoint, above: Checkpoint | None, request_note: object) -> None:
        checkpoint.note = "noted"


def test_a_note_goes_with_a_checkpoint_to_a_tier() -> None:
    layout = LAYOUTS["several blocks a page"]
    config = CacheConfig(eviction_policy=f"{__name__}:Noting")
    harness = Harness(layout=layout, num_pages=layout.num_pages_for(2 * LENGTH, 9) + 1, cache=config, num_host_pages=99)
    for seed in range(6):
        harness.ask(f"prompt {seed}", tokens(seed, LENGTH))
    (tier,) = harness.sched.cache.tiers.all
    stored = [node.checkpoint for node in tier.store.tree.nodes() if node.checkpoint is not None]
    assert stored and {checkpoint.note for checkpoint in stored} == {"noted"}


@pytest.mark.parametrize(("policy", "value"), [(NotANumber, "nan"), (Nothing, "None")])
def test_keys_without_an_order_are_refused(
    policy: type[EvictionPolicy], value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{__name__}:{policy.__name__}"
    assert main(["simulate", "chat:sessions=4", "--memory", "1", "--systems", f"forkpoint:eviction={name}"]) == 2
    says = f"error: key() of the eviction policy {name} returned {value}; return a float that is not NaN"
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (None, "returned None; give pairs of an Origin and its positions, such as (Origin.BREAKPOINT, (128, 256))"),
        ([1000], "gave 1000; give pairs"),
        ([(Origin.INTERVAL, 1000)], "gave 1000; give pairs"),
        ([("interval", (1000,))], "gave ('interval', (1000,)); give pairs"),
        ([(Origin.INTERVAL, (1000.0,))], "gave the position 1000.0; give integers, in tokens"),
        ([(Origin.INTERVAL, (None,))], "gave the position None; give integers"),
        ([(Origin.INTERVAL, ("64",))], "gave the position '64'; give integers"),
    ],
)
def test_positions_that_are_none_are_refused(answer: Any, shown: str) -> None:
    class Wrong(CapturePolicy):
        def positions(self, context: CaptureContext) -> Iterable[tuple[Origin, Iterable[int]]]:
            return answer  # type: ignore[no-any-return]

    with pytest.raises(ConfigError) as raised:
        checked_candidates(Wrong(), CaptureContext(0, 2000, 2000))
    says = str(raised.value)
    assert says.startswith("positions() of the capture policy tests.cache.test_policies:") and shown in says


def test_positions_of_numpy_are_integers() -> None:
    class OfNumpy(CapturePolicy):
        def positions(self, context: CaptureContext) -> Iterable[tuple[Origin, Iterable[int]]]:
            yield Origin.INTERVAL, np.arange(-64, 2000, 640)

    found = checked_candidates(OfNumpy(), CaptureContext(0, 2000, 2000))
    assert [(candidate.num_tokens, type(candidate.num_tokens)) for candidate in found] == [
        (at, int) for at in (576, 1216, 1856)
    ]


def test_keys_of_numpy_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TwoClasses, "key", lambda _, entry: np.float32(entry.last_used))
    layout = LAYOUTS["several blocks a page"]
    config = CacheConfig(eviction_policy=EVICTION_HERE)
    harness = Harness(layout=layout, num_pages=layout.num_pages_for(2 * LENGTH, 9) + 1, cache=config)
    for seed in range(4):
        harness.ask(f"prompt {seed}", tokens(seed, LENGTH))
    assert harness.sched.cache.store.counters.blocks_evicted


@pytest.mark.parametrize(
    ("method", "answer", "shown"),
    [
        ("next_change", None, "return a number above the age"),
        ("next_change", math.nan, "return a number above the age"),
        ("next_change", 0.0, "return a number above the age"),
        ("missed", None, "return the request's note, and one of the blocks or None"),
        ("missed", (None, b"other"), "return the request's note, and one of the blocks or None"),
    ],
)
def test_other_answers_of_eviction_policies_are_checked(
    method: str, answer: object, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TwoClasses, method, lambda *_: answer)
    harness = Harness(cache=CacheConfig(eviction_policy=EVICTION_HERE))
    with pytest.raises(ConfigError) as raised:
        harness.ask("first", tokens(1, LENGTH))
    assert str(raised.value).startswith(f"{method}() of the eviction policy {EVICTION_HERE} returned")
    assert shown in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "policy", "shown"),
    [
        ("eviction", "Misspelled", "has no method key(); write it as docs/extending.md says"),
        ("capture", "CapturePolicy", "has no method positions(); write it"),
        ("capture", "WithArguments", "cannot be created without arguments: "),
    ],
)
def test_a_policy_that_cannot_be_made_is_named(kind: str, policy: str, shown: str) -> None:
    name = f"{__name__}:{policy}"
    with pytest.raises(ConfigError, match=re.escape(f"the {kind} policy {name!r} {shown}")):
        Harness(cache=CacheConfig(**{f"{kind}_policy": name}))


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_bug_of_a_policy_is_shown_with_its_traceback(jobs: int, capsys: pytest.CaptureFixture[str]) -> None:
    system = f"forkpoint:capture={__name__}:Broken"
    assert main(["simulate", "chat:sessions=4", "--memory", "4,8", "--systems", system, "--jobs", str(jobs)]) == 2
    shown = capsys.readouterr().err
    assert "range(0, context.prompt_end, 0)" in shown, "the line that is wrong"
    said = f"raised by positions() of the capture policy {__name__}:Broken"
    assert shown.splitlines()[-1] == f"error: unexpected ValueError: range() arg 3 must not be zero; {said}"


def test_an_error_of_a_policy_names_it_to_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine process sends the error's text alone to the server."""
    monkeypatch.setattr(TwoClasses, "key", lambda _, entry: 1 / 0)
    harness = Harness(cache=CacheConfig(eviction_policy=EVICTION_HERE))
    with pytest.raises(ZeroDivisionError) as raised:
        harness.ask("first", tokens(1, LENGTH))
    said = f"ZeroDivisionError: division by zero; raised by key() of the eviction policy {EVICTION_HERE}"
    assert Failure.of(raised.value).text == said


@pytest.mark.parametrize("registry", [EVICTION, CAPTURE], ids=["eviction", "capture"])
def test_a_package_adds_one(registry: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    kind = "eviction" if registry is EVICTION else "capture"
    info = tmp_path / "outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    here = EVICTION_HERE if registry is EVICTION else CAPTURE_HERE
    (info / "entry_points.txt").write_text(f"[forkpoint.{kind}_policies]\ntheirs = {here}\n")
    found = (EVICTION if registry is EVICTION else CAPTURE).find("theirs")
    assert found is (TwoClasses if registry is EVICTION else EveryThousand)
