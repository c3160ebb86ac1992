"""Grammars of an engine's requests on their way: several at once, none of which holds up a step or another for long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

from forkpoint.grammar.compile_trial import CompileWorkers, outcome
from forkpoint.grammar.compiler import GrammarCompiler
from forkpoint.params import SamplingParams
from forkpoint.sched.request import Grammar

NUM_THREADS = 16  # they wait for workers, and compile what a trial has shown to be quick


class Starting(Future["Grammar | None"]):
    """A grammar that will be there soon; its result raises what compiling raised."""

    _trial: Future[str] | None = None  # what it waits for
    _left = False  # nobody asks any more

    def run(self, start: Callable[[Starting], Grammar | None]) -> None:
        """Done by a thread."""
        if not self.set_running_or_notify_cancel():
            return
        try:
            self.set_result(start(self))
        except BaseException as error:
            self.set_exception(error)

    def wait_for(self, trial: Future[str]) -> None:
        """What it waits for now."""
        self._trial = trial
        if self._left:  # of two threads that write and then look, one sees what the other wrote
            trial.cancel()

    def cancel(self) -> bool:
        """End the work on it wherever it stands."""
        self._left = True
        if self._trial is not None:
            self._trial.cancel()
        return super().cancel()


class GrammarStarts:
    """Starts grammars beside the steps. What is known already waits for no trial."""

    def __init__(self, grammars: GrammarCompiler) -> None:
        self._grammars = grammars
        self._known = ThreadPoolExecutor(1, thread_name_prefix="known-grammars")
        self._new = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammars")
        self._lock = threading.Lock()
        self._workers: CompileWorkers | None = None
        self._open: set[Starting] = set()

    def start(self, params: SamplingParams, stop_token_ids: Collection[int]) -> Starting:
        starting = Starting()
        self._open = {one for one in self._open if not one.done()} | {starting}
        pool = self._known if self._grammars.is_known(params) else self._new
        pool.submit(starting.run, lambda starting: self._start(starting, params, stop_token_ids))
        return starting

    def close(self) -> None:
        """End all that is on its way; no thread goes on waiting."""
        for starting in self._open:
            starting.cancel()
        for pool in (self._known, self._new):
            pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            if self._workers is not None:
                self._workers.close()

    def _start(self, starting: Starting, params: SamplingParams, stop_token_ids: Collection[int]) -> Grammar | None:
        description = self._grammars.untried(params)
        if description is not None:
            trial = self._pool().schedule(description)
            starting.wait_for(trial)
            try:
                self._grammars.learn(description, outcome(description, trial))
            except CancelledError:
                return None  # nobody asks any more
        return self._grammars.start(params, stop_token_ids)

    def _pool(self) -> CompileWorkers:
        with self._lock:
            if self._workers is None:
                self._workers = CompileWorkers()
            return self._workers
