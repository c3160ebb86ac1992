"""The step loop: plan, run, apply."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from forkpoint.engine.request_log import RequestLog
from forkpoint.errors import EngineStoppedError, StepFailedError
from forkpoint.params import FinishReason
from forkpoint.sched.plan import Runner, SubmittedStep
from forkpoint.sched.request import Request, RequestUpdate
from forkpoint.sched.scheduler import Scheduler

if TYPE_CHECKING:  # it brings sockets and a codec along
    from forkpoint.engine.events import EventPublisher

MIDDLE_EVERY = 64  # steps between collections of the middle generation of objects
FULL_EVERY = 1 << 16  # and of everything, which finds hardly a cycle and takes a tenth of a second
CLOSED = "the engine is closed; make a new one"
LOOK_AHEAD = 2  # steps in flight with async scheduling: one runs, one is planned


class EngineCore:
    """Drives a scheduler and a runner. One thread calls it; requests are checked and aborted at `scheduler`.

    With `async_scheduling` step n+1 is planned and submitted before the result of step n is applied; with `drafts`,
    where it may have to wait for that result, at least before what it says is told. The requests of a step that raises
    are tried again one at a time; one whose own step raises ends with the error, and all others go on as if nothing had
    happened. `on_close` is called once the runner has been closed and let go; `check` raises EngineStoppedError where
    it is gone, which without steps nobody sees.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        async_scheduling: bool = False,
        drafts: bool = False,
        on_close: Callable[[], None] = lambda: None,
        check: Callable[[], None] = lambda: None,
        events: EventPublisher | None = None,
        log: RequestLog | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._runner: Runner | None = runner
        self._on_close, self.check = on_close, check
        self._events, self._log = events, log
        self._depth = LOOK_AHEAD if async_scheduling else 1
        self._submits_early = async_scheduling and drafts
        self._in_flight: deque[tuple[int, SubmittedStep]] = deque()
        self._closed = False
        self.num_model_tokens = 0  # tokens that entered the model, over all steps
        self.slot_bytes_copied = 0
        self.num_replayed_steps = 0  # that a recorded graph served

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestTooLargeError, QueueFullError, InvalidPromptError, EngineStoppedError."""
        if self._closed:
            raise EngineStoppedError(CLOSED)
        self.scheduler.add(request)

    def end(self, request_id: str, reason: FinishReason) -> None:
        """End a request where it stands; nothing happens if it has ended."""
        request = self.scheduler.abort(request_id)
        if self._log is not None and request is not None:
            self._log.write(request, reason)

    def has_unfinished(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_unfinished()

    def step(self, meanwhile: Callable[[], None] | None = None) -> list[RequestUpdate]:
        """Run one step to its end and return the news; empty when there is nothing to do.

        `meanwhile` is called when all that can be submitted is, while the device works.
        """
        if self._closed or self._runner is None:
            raise EngineStoppedError(CLOSED)
        self._closed = True  # torn in the middle, if it raises: what was planned and what has run may differ
        self._submit_steps(self._runner)
        updates: list[RequestUpdate] = []
        if self._in_flight:
            if meanwhile is not None:
                meanwhile()
            updates = self._finish_oldest()
            if self._log is not None:
                self._log.write_ends(updates)
            if self._submits_early:
                self._submit_steps(self._runner)
        elif self.scheduler.has_unfinished():
            raise EngineStoppedError("the scheduler has unfinished requests but plans no step; the engine stops")
        self._publish()
        self._closed = False
        return updates

    def _submit_steps(self, runner: Runner) -> None:
        """Plan and submit as many steps as may be in flight."""
        while len(self._in_flight) < self._depth:
            plan = self.scheduler.schedule()
            if plan is None:
                break
            try:
                self._in_flight.append((plan.step, runner.submit(plan)))
            except EngineStoppedError:  # no step can run any more
                raise
            except Exception as error:  # what the model raises comes with the result; this is a plan gone wrong
                raise EngineStoppedError(f"step {plan.step} was refused and the engine stops: {error}") from error
            collect_garbage(plan.step)

    def drain(self) -> None:
        """Finish the steps in flight without planning new ones; none where the engine is closed or torn."""
        while self._in_flight and not self._closed:
            self._finish_oldest()

    def reset_prefix_cache(self) -> bool:
        """Nothing cached so far is found again."""
        done = self.scheduler.reset_prefix_cache()
        self._publish()
        return done

    def _publish(self) -> None:
        if self._events is not None:
            self._events.publish()

    def metrics(self) -> dict[str, Any]:
        """Counters and gauges since the start, by name."""
        stats = asdict(self.scheduler.stats())
        return {
            **stats.pop("cache"),
            **stats.pop("drafts"),
            **stats,
            "num_model_tokens": self.num_model_tokens,
            "slot_bytes_copied": self.slot_bytes_copied,
            "num_replayed_steps": self.num_replayed_steps,
        }

    def close(self) -> None:
        """Release the runner; harmless a second time."""
        self._closed = True
        self._in_flight.clear()
        if self._runner is not None:
            self._runner.close()
            self._runner = None
            self._on_close()
            if self._events is not None:
                self._events.close()

    def _finish_oldest(self) -> list[RequestUpdate]:
        step, pending = self._in_flight[0]
        try:
            result = pending.result()
        except EngineStoppedError:  # no step can run any more
            raise
        except Exception as error:
            return self._fail(step, error)
        self._in_flight.popleft()
        self.num_model_tokens += result.num_tokens
        self.slot_bytes_copied += result.slot_bytes_copied
        self.num_replayed_steps += result.replayed
        return self.scheduler.apply(result)

    def _fail(self, step: int, error: Exception) -> list[RequestUpdate]:
        """Undo `step` and all later ones, which built on it; their results are waited for and dropped."""
        self._in_flight.popleft()
        while self._in_flight:
            with suppress(Exception):  # they ran on what the failed step left behind; its error is the one reported
                self._in_flight.popleft()[1].result()
        told = str(error) if isinstance(error, StepFailedError) else f"{type(error).__name__}: {error}"
        failure = StepFailedError(f"step {step} failed: {told}")
        failure.__cause__ = error
        return self.scheduler.fail(step, failure)


def collect_garbage(step: int) -> None:
    """Run Python's cycle collector a little, after `step` was submitted.

    Left to itself Python collects when enough new objects have piled up, which takes milliseconds and falls into
    planning as likely as not; after each step there are only a few hundred to look at.
    """
    gc.collect(2 if step % FULL_EVERY == FULL_EVERY - 1 else int(step % MIDDLE_EVERY == MIDDLE_EVERY - 1))
