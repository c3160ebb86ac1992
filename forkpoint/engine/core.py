"""The step loop: plans steps, runs them and applies their results."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from forkpoint.engine.request_log import RequestLog
from forkpoint.errors import EngineStoppedError, ForkpointError, StepFailedError
from forkpoint.obs.logs import LOGGER
from forkpoint.params import FinishReason
from forkpoint.sched.plan import Runner, SubmittedStep
from forkpoint.sched.request import Request, RequestUpdate
from forkpoint.sched.scheduler import Scheduler

if TYPE_CHECKING:  # it imports sockets and a codec
    from forkpoint.engine.events import EventPublisher

MIDDLE_EVERY = 64  # steps between collections of the middle garbage generation
FULL_EVERY = 1 << 16  # steps between full collections, which take a tenth of a second and rarely find a cycle
CLOSED = "the engine is closed; create a new one"
SAVE_S = 10.0  # time to store the cache in the disk tier when the engine closes
MOST_IN_FLIGHT = 2  # steps in flight with async scheduling: one runs, the next is planned


class EngineCore:
    """Drives a scheduler and a runner. Only one thread may call it.

    With `async_scheduling` step n+1 is planned and submitted before the result of step n is applied. With `drafts` that
    plan may need the result. Step n+1 is then submitted after the result is applied and before it is returned. If a
    step raises, its requests are retried one at a time. A request whose own step raises ends with the error, and all
    others continue unaffected. `on_close` is called once, after the runner is closed and released. `check` raises
    EngineStoppedError if the runner has died, which is not noticed otherwise while no steps run. `prepare` is
    `Worker.prepare`.
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
        prepare: Callable[[], bool] = lambda: False,
        events: EventPublisher | None = None,
        log: RequestLog | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._runner: Runner | None = runner
        self._on_close, self.check, self.prepare = on_close, check, prepare
        self._events, self._log = events, log
        self._depth = MOST_IN_FLIGHT if async_scheduling else 1
        self._submits_early = async_scheduling and drafts
        self._in_flight: deque[tuple[int, SubmittedStep]] = deque()
        self._closed = False
        self.num_model_tokens = 0  # tokens that entered the model, over all steps
        self.slot_bytes_copied = 0
        self.num_replayed_steps = 0  # steps that a recorded graph ran

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestTooLargeError, QueueFullError, or EngineStoppedError once it is closed."""
        if self._closed:
            raise EngineStoppedError(CLOSED)
        self.scheduler.add(request)

    def end(self, request_id: str, reason: FinishReason) -> None:
        """End a request at once with the tokens it has, without an update. Do nothing if it has ended.

        `reason` is for the request log. A row and a lease that a step in flight uses come back after that step.
        """
        request = self.scheduler.abort(request_id)
        if self._log is not None and request is not None:
            self._log.write(request, reason)

    def end_offer(self, lease: int | None) -> None:
        """Let no other engine wait for an offer under a lease that a proxy chose. None: it chose none."""
        peers = self.scheduler.cache.tiers.peers
        if peers is not None and lease is not None:
            peers.end_lease(lease)

    def has_unfinished(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_unfinished()

    def step(self, meanwhile: Callable[[], None] | None = None) -> list[RequestUpdate]:
        """Wait for the result of one step, and return the updates; empty if there is nothing to do.

        `meanwhile` is called while the device works, after all possible steps are submitted. Raises EngineStoppedError
        if the engine is closed or cannot go on; it is then closed. Errors of the model become updates.
        """
        if self._closed or self._runner is None:
            raise EngineStoppedError(CLOSED)
        self._closed = True  # until the step is complete; if it raises, plan and device state may differ
        self._submit_steps(self._runner)
        updates: list[RequestUpdate] = []
        if self._in_flight:
            if meanwhile is not None:
                meanwhile()
            updates = self._finish_oldest()
            if self._log is not None:
                self._log.write_ends(updates)
            if self._submits_early and not self.scheduler.has_copies_alone:  # an answer does not wait for them
                self._submit_steps(self._runner)
        elif self.scheduler.has_unfinished():
            raise EngineStoppedError("the scheduler has unfinished requests but plans no step; the engine stops")
        if self._events is not None:
            self._events.publish()
        self._closed = False
        return updates

    def _submit_steps(self, runner: Runner) -> None:
        """Plan and submit as many steps as may be in flight. Raises EngineStoppedError."""
        while len(self._in_flight) < self._depth:
            plan = self.scheduler.schedule()
            if plan is None:
                break
            try:
                self._in_flight.append((plan.step, runner.submit(plan)))
            except EngineStoppedError:  # no further step can run
                raise
            except Exception as error:  # errors of the model come with the result; this error is in the plan
                raise EngineStoppedError(f"step {plan.step} was refused and the engine stops: {error}") from error
            collect_garbage(plan.step)

    def send_copies(self) -> None:
        """Run the steps that only copy prompts for other engines, after the last requests have ended.

        A caller that runs steps until there is nothing to do need not call it.
        """
        while not self._closed and self.scheduler.has_copies_alone:
            self.step()

    def drain(self) -> None:
        """Finish the steps in flight without planning new ones; their updates are lost. Does nothing if closed."""
        while self._in_flight and not self._closed:
            self._finish_oldest()

    def reset_prefix_cache(self) -> None:
        """Let no later request find what is cached now, and publish that."""
        self.scheduler.reset_prefix_cache()
        if self._events is not None:
            self._events.publish()

    def metrics(self) -> dict[str, Any]:
        """Return counters since the start and gauges as they are now, by name."""
        stats = asdict(self.scheduler.stats())
        return {
            **stats.pop("cache"),
            **stats.pop("drafts"),
            **stats.pop("encoder"),
            **stats,
            "num_model_tokens": self.num_model_tokens,
            "slot_bytes_copied": self.slot_bytes_copied,
            "num_replayed_steps": self.num_replayed_steps,
        }

    def close(self) -> None:
        """Store the cache in the disk tier, if there is one, and release the runner. Calling it again does nothing."""
        if not self._closed:
            self.drain()
            self._save()
        self._closed = True
        self._in_flight.clear()
        if self._runner is not None:
            self._runner.close()
            self._runner, self.prepare = None, lambda: False
            self._on_close()
            if self._events is not None:
                self._events.close()

    def _save(self) -> None:
        """Store what the cache holds in the disk tier, as far as SAVE_S allows. A failure is logged."""
        start, runner = time.monotonic(), self._runner
        while runner is not None and time.monotonic() - start < SAVE_S:
            plan = self.scheduler.plan_save()
            if plan is None:
                return
            try:
                self.scheduler.apply(runner.submit(plan).result())
            except ForkpointError as error:
                LOGGER.warning("the cache is not stored in the disk tier: %s", error)
                return

    def _finish_oldest(self) -> list[RequestUpdate]:
        step, submitted = self._in_flight[0]
        try:
            result = submitted.result()
        except EngineStoppedError:  # no further step can run
            raise
        except Exception as error:
            return self._fail(step, error)
        self._in_flight.popleft()
        self.num_model_tokens += result.num_tokens
        self.slot_bytes_copied += result.slot_bytes_copied
        self.num_replayed_steps += result.replayed
        return self.scheduler.apply(result)

    def _fail(self, step: int, error: Exception) -> list[RequestUpdate]:
        """Undo `step`, the oldest in flight, and all later ones. Their results are waited for and dropped.

        Returns the updates of requests that end with it.
        """
        self._in_flight.popleft()
        while self._in_flight:
            with suppress(Exception):  # they ran on the failed step's state, so only its error is reported
                result = self._in_flight.popleft()[1].result()
                self.scheduler.cache.tiers.apply_reports(result.tier_report, result.fetch_report)
        described = str(error)
        if not isinstance(error, StepFailedError):
            described = f"{type(error).__name__}: {error}"
        failure = StepFailedError(f"step {step} failed: {described}")
        failure.__cause__ = error
        return self.scheduler.fail(step, failure)


def leave_collection_to_steps() -> None:
    """Let `collect_garbage` alone collect from now on.

    A full collection would examine all imported objects, which takes a tenth of a second. They are left out."""
    gc.collect()
    gc.freeze()
    gc.disable()


def collect_garbage(step: int) -> None:
    """Run Python's cycle collector briefly, after `step` was submitted.

    Automatic collection starts when enough new objects exist, takes milliseconds and may delay planning. After each
    step only a few hundred new objects have to be examined.
    """
    generation = 0
    if step % FULL_EVERY == FULL_EVERY - 1:
        generation = 2
    elif step % MIDDLE_EVERY == MIDDLE_EVERY - 1:
        generation = 1
    gc.collect(generation)
