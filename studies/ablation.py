"""`python -m studies.ablation TRACE...`: measures what each rule of the default policies is worth.

A rule is switched off by a subclass that overrides it. Its lines are those that implement it in the package. Prints
"rule, lines, points of hit rate": the points that are lost without the rule, for each trace and size.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import sys
import textwrap
import tokenize
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from forkpoint.cache.capture import CaptureContext, CapturePolicy, DefaultCapture
from forkpoint.cache.eviction import EntryFacts, EvictionPolicy
from forkpoint.cache.hashing import BlockHash
from forkpoint.cache.hazards import HazardModel, KindHazards, ReuseClass, age_bin, next_edge
from forkpoint.cache.learnt import PRIORS, ConversationTurn, LearntPolicy, LostShare
from forkpoint.cache.tree import Checkpoint, Origin
from forkpoint.cli.simulate import add_simulate_options, make_cases, read_traces, run
from forkpoint.config import GIB, SchedulerConfig
from forkpoint.errors import ForkpointError
from forkpoint.sim.cases import Case
from forkpoint.sim.engine_replica import EngineReplica
from forkpoint.sim.named_systems import engine_options
from forkpoint.sim.replica import SimulatedReplica
from forkpoint.sim.shape import ModelShape
from forkpoint.sim.table import markdown
from forkpoint.sim.trace import Trace


class AssumedHazards(HazardModel):
    def advance(self, now: float) -> None:
        """Learn nothing."""


class AgelessHazards(HazardModel):
    def earnings(self, reuse_class: ReuseClass, age: float) -> float:
        return super().earnings(reuse_class, 0.0)


class UselessHazards(HazardModel):
    """Hazards that ignore the number of uses so far."""

    def track(self, block_hash: BlockHash, reuse_class: ReuseClass, last_used: float) -> None:
        super().track(block_hash, reuse_class._replace(uses=0), last_used)

    def earnings(self, reuse_class: ReuseClass, age: float) -> float:
        return super().earnings(reuse_class._replace(uses=0), age)


class HazardsOfTheHeld(HazardModel):
    """Hazards that forget evicted entries."""

    def waits_for(self, block_hash: BlockHash) -> bool:
        return False


class WithHazards(LearntPolicy):
    def __init__(self, hazards: type[HazardModel]) -> None:
        super().__init__()
        self.hazards = hazards(PRIORS)


class Unprotected(LearntPolicy):
    def key(self, entry: EntryFacts) -> float:
        return super().key(entry._replace(num_expected=0))


class AssumedShare(LostShare):
    def note(self, lost: bool) -> None:
        """Learn nothing."""


class WithAssumedShare(LearntPolicy):
    def __init__(self) -> None:
        super().__init__()
        self.lost = AssumedShare()


class NothingStandsIn(LearntPolicy):
    def evicted(self, checkpoint: Checkpoint, above: Checkpoint | None) -> bool:
        return False


class NobodyAwaitsTools(LearntPolicy):
    def request_ended(self, checkpoint: Checkpoint, request_note: object, *, awaits_tool: bool) -> None:
        super().request_ended(checkpoint, request_note, awaits_tool=False)


class NothingSuperseded(LearntPolicy):
    def key(self, entry: EntryFacts) -> float:
        return super().key(entry._replace(superseded=False))


class Without(CapturePolicy):
    """The default policy without one kind of state."""

    def __init__(self, kind: Origin) -> None:
        self._kind, self._default = kind, DefaultCapture()

    def positions(self, context: CaptureContext) -> Iterable[tuple[Origin, Iterable[int]]]:
        return ((kind, at) for kind, at in self._default.positions(context) if kind is not self._kind)

    def may_evict(self, origin: Origin) -> bool:
        return self._default.may_evict(origin)


class BlindCapture(DefaultCapture):
    """Ignores a part of the context."""

    def __init__(self, **unseen: Any) -> None:
        self._unseen = unseen

    def positions(self, context: CaptureContext) -> Iterable[tuple[Origin, Iterable[int]]]:
        return super().positions(replace(context, **self._unseen))


@dataclass(frozen=True)
class Rule:
    """A rule. `eviction` and `capture` are the policies without it. `code` implements it."""

    name: str
    code: tuple[Callable[..., Any] | type, ...] = ()
    eviction: Callable[[], EvictionPolicy] = LearntPolicy
    capture: Callable[[], CapturePolicy] = DefaultCapture

    @property
    def num_lines(self) -> int:
        """Code lines, without comments, docstrings and blank ones."""
        return sum(_num_code_lines(item) for item in self.code)

    def system(
        self, name: str, shape: ModelShape, memory_bytes: int, scheduler: SchedulerConfig, trace: Trace | None
    ) -> SimulatedReplica:
        """Create the engine without the rule (a `SystemFactory`)."""
        options = engine_options("", shape, memory_bytes, scheduler)
        return EngineReplica(replace(options, new_policy=self.eviction, capture=self.capture()))


RULES: Final = (
    Rule("learnt hazards", (HazardModel, KindHazards), lambda: WithHazards(AssumedHazards)),
    Rule("age", (age_bin, next_edge, LearntPolicy.next_change), lambda: WithHazards(AgelessHazards)),
    Rule("number of uses", (), lambda: WithHazards(UselessHazards)),
    Rule("evicted entries that are asked for again", (LearntPolicy.missed,), lambda: WithHazards(HazardsOfTheHeld)),
    Rule("tool calls", (ConversationTurn.end.fget,), NobodyAwaitsTools),  # type: ignore[attr-defined]
    Rule("superseded ends", (LearntPolicy.superseded,), NothingSuperseded),
    Rule("share of ends found evicted", (LostShare,), WithAssumedShare),
    Rule("stand-ins", (LearntPolicy.evicted,), NothingStandsIn),
    Rule("waiting requests protect", (), Unprotected),
    Rule("junctions", (), capture=lambda: BlindCapture(junctions=frozenset())),
    Rule("waiting junctions", (), capture=lambda: BlindCapture(waiting_junctions=frozenset())),
    Rule("near end", (), capture=lambda: Without(Origin.NEAR_END)),
    Rule("fallbacks", (), capture=lambda: Without(Origin.FALLBACK)),
    Rule("periodic", (), capture=lambda: BlindCapture(interval=0)),
)


def _num_code_lines(item: Callable[..., Any] | type) -> int:
    """Return the lines of code of a class or function, without its docstrings."""
    source = textwrap.dedent(inspect.getsource(item))
    told = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node)
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    codes = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return len({token.start[0] for token in tokens if token.type in codes} - told)


def ablate(cases: Sequence[Case], jobs: int) -> list[tuple[str, ...]]:
    """Return a row for each rule: its name, its lines, and for each case the points of hit rate that it is worth."""
    with_all = (Rule("all rules"), *RULES)
    results = run([replace(case, system=rule.name, factory=rule.system) for rule in with_all for case in cases], jobs)
    rates = [100 * result.hit_rate for result in results]
    base, rows = rates[: len(cases)], []
    for index, rule in enumerate(RULES, start=1):
        points = zip(base, rates[index * len(cases) :], strict=False)
        rows.append((rule.name, f"{rule.num_lines}", *(f"{ours - without:+.2f}" for ours, without in points)))
    places = (f"{case.trace.name} {case.memory_bytes / GIB:g}" for case in cases)
    return [("rule", "lines", *places), ("all rules: hit rate, %", "", *(f"{rate:.2f}" for rate in base)), *rows]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Bad input is reported in one line."""
    parser = argparse.ArgumentParser(prog="python -m studies.ablation", description=__doc__)
    add_simulate_options(parser)
    options = parser.parse_args(arguments)
    try:
        print(markdown(ablate(make_cases(options, read_traces(options), Rule("").system), options.jobs)))
    except ForkpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
