"""Runs the engine in a process of its own: receives commands, runs steps and sends reports. It never sees a text."""

from __future__ import annotations

import gc
import time
from concurrent.futures import Future, ThreadPoolExecutor

import zmq

from forkpoint.cache.peer_offers import chosen_lease
from forkpoint.config import EngineConfig
from forkpoint.engine import messages
from forkpoint.engine.core import EngineCore, leave_collection_to_steps
from forkpoint.errors import EngineStoppedError, ForkpointError, RequestError, RequestFailedError
from forkpoint.grammar.compiler import GrammarCompiler
from forkpoint.grammar.masks import TokenRules
from forkpoint.obs.logs import LOGGER
from forkpoint.quick_imports import collection_paused
from forkpoint.sched.request import Request, RequestUpdate
from forkpoint.worker.child import EXIT_FAILED, begin_child
from forkpoint.worker.codec import Failure, decoder, encoder

MAX_TAKING_S = 0.01  # seconds for commands between two steps; thousands that come at once are spread over several steps
IDLE_POLL_MS = 1000  # how often an idle engine checks that its worker's processes are alive
NUM_COMPILERS = 16  # threads; grammars were compiled once elsewhere before, so these are quick
STARTING_POLL_MS = 2  # how often an idle engine checks whether a grammar has been compiled


def run_engine(config: EngineConfig, commands: str, reports: str) -> None:
    """Run the engine process: load the model, serve `commands` until Stop, and report on `reports` (ZeroMQ addresses).

    After an error it sends a Died report and exits with code 1 (SystemExit). It ends at once when its parent does.
    """
    begin_child()  # the parent decides when the engine ends
    with collection_paused():
        from forkpoint.engine.build import build_parts, load_tokenizer  # imports torch, which the parent does not need

    encode = encoder()
    with zmq.Context() as context, context.socket(zmq.PULL) as inbox, context.socket(zmq.PUSH) as outbox:
        inbox.bind(commands)
        outbox.connect(reports)
        try:
            tokenizer = load_tokenizer(config)
            gc.freeze()  # so that no collection examines what was imported, which takes a tenth of a second
            core, inputs = build_parts(config, tokenizer)
            try:
                inputs.grammars.prepare()
                leave_collection_to_steps()
                outbox.send(encode(messages.Ready(inputs.vocab_size, inputs.max_model_len, core.metrics())))
                EngineLoop(core, inputs.grammars, inbox, outbox).run()
            finally:
                core.close()
        except Exception as error:
            if not isinstance(error, ForkpointError):
                LOGGER.exception("the engine stops")
            outbox.send(encode(messages.Died(Failure.of(error))))
            raise SystemExit(EXIT_FAILED) from None


class EngineLoop:
    """Serves commands of `inbox` between steps, and reports on `outbox`. Only one thread may call it."""

    def __init__(
        self, core: EngineCore, grammars: GrammarCompiler, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]
    ) -> None:
        self._core = core
        self._grammars = grammars
        self._compilers = ThreadPoolExecutor(NUM_COMPILERS, thread_name_prefix="grammars")
        # id -> sequence whose grammar is being compiled
        self._starting: dict[str, tuple[Request, Future[TokenRules | None]]] = {}
        self._inbox = inbox
        self._outbox = outbox
        self._decode = decoder(messages.Command)
        self._encode = encoder()
        self._open: dict[str, bool] = {}  # id of each open sequence -> whether its cache report was sent
        self._refused: list[tuple[str, Failure]] = []

    def run(self) -> None:
        """Serve commands until Stop. Raises EngineStoppedError if the engine cannot continue."""
        try:
            while self._take_commands():
                self._take_started()
                if self._core.has_unfinished():
                    self._step()
                elif self._refused:
                    self._report([], 0)
        finally:
            self._compilers.shutdown(wait=False, cancel_futures=True)

    def _take_commands(self) -> bool:
        """Carry out the commands that have arrived, for at most MAX_TAKING_S while there is work.

        Waits for one if there is nothing else to do. Returns False for Stop. Raises EngineStoppedError if a worker
        died.
        """
        is_idle = not self._core.has_unfinished() and not self._refused
        while is_idle and not self._inbox.poll(0) and self._core.prepare():
            pass  # the worker has recorded another graph
        if is_idle and not self._inbox.poll(STARTING_POLL_MS if self._starting else IDLE_POLL_MS):
            self._core.check()
        until = time.perf_counter() + MAX_TAKING_S
        while not self._core.has_unfinished() or time.perf_counter() < until:
            try:
                data = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return True
            command = self._decode(data)
            if isinstance(command, messages.Stop):
                return False
            self._carry_out(command)
        return True

    def _carry_out(self, command: messages.Command) -> None:
        match command:
            case messages.AddSequence(request):
                if request.images:
                    self._outbox.send(self._encode(messages.ImagesTaken(request.id)))
                if request.params.restricts_tokens:
                    start = self._compilers.submit(self._grammars.start, request.params, request.stop_token_ids)
                    self._starting[request.id] = (request, start)
                else:
                    self._queue(request)
            case messages.EndSequences():
                self._end(command)
            case messages.EndOffer(lease):
                self._core.end_offer(lease)
            case messages.Call():
                self._send(self._answer(command))

    def _take_started(self) -> None:
        """Queue the sequences whose grammars have been compiled; refuse those whose grammar failed."""
        for name, (request, grammar) in list(self._starting.items()):
            if not grammar.done():
                continue
            del self._starting[name]
            try:
                request.grammar = grammar.result()
            except Exception as error:
                self._refuse(request, error)
            else:
                self._queue(request)

    def _queue(self, request: Request) -> None:
        try:
            self._core.add(request)
        except EngineStoppedError:
            raise
        except Exception as error:
            self._refuse(request, error)
        else:
            self._open[request.id] = False

    def _refuse(self, request: Request, error: Exception) -> None:
        """Refuse a sequence with the next report. Any error that one sequence raises ends only that sequence."""
        if not isinstance(error, RequestError):
            LOGGER.error("a request could not be processed", exc_info=error)
            error = RequestFailedError(f"the request could not be processed: {type(error).__name__}: {error}")
        self._core.end_offer(chosen_lease(request.params.kv_transfer_params))
        self._refused.append((request.id, Failure.of(error)))

    def _end(self, command: messages.EndSequences) -> None:
        for name in command.ids:
            if name in self._starting:
                request, grammar = self._starting.pop(name)
                grammar.cancel()
                self._core.end_offer(chosen_lease(request.params.kv_transfer_params))
            elif name in self._open:  # otherwise it has ended by itself in the meantime
                self._core.end(name, command.reason)
                del self._open[name]

    def _answer(self, call: messages.Call) -> messages.CallReply:
        try:
            match call.name:
                case "stats":
                    return messages.CallReply(call.number, self._core.metrics())
                case "reset_prefix_cache":
                    self._core.reset_prefix_cache()
                case "check_integrity":
                    self._core.scheduler.check_integrity()
        except AssertionError as error:
            return messages.CallReply(call.number, failure=Failure.of(error))
        return messages.CallReply(call.number)

    def _step(self) -> None:
        before = self._core.num_model_tokens
        updates = self._core.step()
        self._report(updates, self._core.num_model_tokens - before)

    def _report(self, updates: list[RequestUpdate], num_tokens: int) -> None:
        ids: list[str] = []
        token_ids: list[int] = []
        news: list[messages.SequenceNews] = []
        drafts: dict[str, tuple[int, int]] = {}
        for update in updates:
            name, num_drafts = update.request.id, update.request.num_draft_tokens
            if name not in self._open:
                continue  # ended by the API process after this step was issued
            if num_drafts:
                drafts[name] = (num_drafts, update.request.num_accepted_tokens)
            plain = update.logprobs is None and update.finish_reason is None and not update.prompt_logprobs
            if plain and update.token_id is not None and self._open[name]:
                ids.append(name)
                token_ids.append(update.token_id)
            else:
                news.append(self._news(update))
        refused, self._refused = self._refused, []
        if ids or news or refused or num_tokens:
            is_full = self._core.scheduler.is_full
            self._send(messages.StepReport(ids, token_ids, news, refused, num_tokens, drafts, is_full))

    def _news(self, update: RequestUpdate) -> messages.SequenceNews:
        request = update.request
        self._open[request.id] = True
        if update.finish_reason is not None:
            del self._open[request.id]
        return messages.SequenceNews(
            id=request.id,
            token_id=update.token_id,
            finish_reason=update.finish_reason,
            stop_token_id=update.stop_token_id,
            cache=request.cache,
            first_scheduled_s=request.first_scheduled_s,
            num_preemptions=request.num_preemptions,
            logprobs=update.logprobs,
            prompt_logprobs=update.prompt_logprobs,
            failure=Failure.of(update.error) if update.error is not None else None,
            kv_transfer_params=request.kv_transfer_params,
        )

    def _send(self, report: messages.Report) -> None:
        self._outbox.send(self._encode(report))
