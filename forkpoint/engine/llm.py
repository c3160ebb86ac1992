"""The Python API: `LLM(model).generate(...)` and `.chat(...)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

from forkpoint.config import EngineConfig
from forkpoint.engine.arguments import (
    Conversations,
    ParamsInput,
    bar_of,
    check_chat_options,
    check_unsupported,
    listed_tools,
    one_each,
    priorities,
    split_conversations,
    split_prompts,
    with_image_settings,
)
from forkpoint.engine.chat import ChatTemplate, ContentFormat
from forkpoint.engine.conversation import Message
from forkpoint.engine.generation_config import log_sampling_defaults, sampling_defaults
from forkpoint.engine.hub import with_folders
from forkpoint.engine.image_processor import ImageProcessor
from forkpoint.engine.inputs import Prompt, PromptInput
from forkpoint.engine.interrupt import DeferredInterrupt
from forkpoint.engine.outputs import RequestState
from forkpoint.engine.progress import Progress
from forkpoint.engine.shared import Caller, SharedEngine
from forkpoint.errors import ConfigError, QueueFullError
from forkpoint.obs.logs import LOGGER
from forkpoint.outputs import RequestOutput
from forkpoint.params import RequestOutputKind, SamplingParams
from forkpoint.quick_imports import collection_paused
from forkpoint.vllm_options import plain_options
from forkpoint.vllm_params import OF_LLM
from forkpoint.worker.threads import wait_briefly


class LLM:
    """A model with its cache and scheduler. Several threads may use it at once, each with several streams.

    A process that is forked later cannot use it: its calls raise EngineStoppedError.

    `LLM("Qwen/Qwen3.5-9B", max_model_len=4096, ...)` takes a folder or a hub id, and the options of `EngineConfig`,
    `CacheConfig` and `SchedulerConfig` by name. Other options of vLLM's are named in the log, or refused. Raises
    ConfigError, ModelFolderError or UnsupportedModelError. Call `close`, or use it in a `with` statement, to release
    its memory.
    """

    def __init__(self, model: str, **options: Any) -> None:
        wait_briefly()
        with collection_paused():
            from forkpoint.engine.build import build_parts, load_tokenizer  # imports torch and the models
            from forkpoint.engine.engine import Engine

        known, lines = plain_options(options)
        self.config = with_folders(EngineConfig.from_flat(model=model, **known))
        for line in lines:
            LOGGER.info(line)
        self._defaults = sampling_defaults(self.config)
        tokenizer = load_tokenizer(self.config)
        self._chat: ChatTemplate | None = None
        if tokenizer is not None:
            images = ImageProcessor.load(self.config)
            self._chat = ChatTemplate(tokenizer, self.config.chat_template, images=images)
        self._other_chat: tuple[tuple[str | None, ContentFormat], ChatTemplate] | None = None  # of the last such call
        self._engine = Engine(*build_parts(self.config, tokenizer))
        self._metrics = self._engine.core.metrics
        self._shared = SharedEngine(self._engine)
        log_sampling_defaults(self.config, self._defaults)

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: ParamsInput = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt (text or token ids) or many. Outputs come in the order of the prompts.

        `sampling_params` (None: `get_default_sampling_params()`) and `priority` (smaller runs first) are one for all
        prompts or one for each. Raises a RequestError before anything runs if a prompt or parameter is refused. A
        completion that fails while running has `finish_reason` ERROR and an `error`; the others continue. Ctrl-C ends
        the open requests and raises KeyboardInterrupt.

        A prompt with images is a dict: `{"prompt": text, "multi_modal_data": {"image": [PIL images]}}`, or the same
        with `prompt_token_ids`. Its n-th placeholder is the n-th image. The dict may have `mm_processor_kwargs`, which
        go before those of the call.

        `use_tqdm` may create the progress bar, as tqdm does. `lora_request` and `tokenization_kwargs` are vLLM's, and
        refused unless they ask for nothing.
        """
        check_unsupported(lora_request, tokenization_kwargs)
        split = with_image_settings(split_prompts(prompts), mm_processor_kwargs)
        return self._run(split, sampling_params, priority, use_tqdm)

    def chat(
        self,
        messages: Conversations,
        sampling_params: ParamsInput = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        lora_request: None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of `{"role", "content"}`) or many, as `generate` does for prompts.

        The end of each message is a breakpoint, from which a later conversation with the same beginning can resume.
        The content of a message may have images as parts: data URLs, as in `{"type": "image_url", "image_url":
        {"url": "data:image/png;base64,..."}}`, or PIL images, as in `{"type": "image_pil", "image_pil": image}`.
        `mm_processor_kwargs` bounds their size: `{"min_pixels": .., "max_pixels": ..}`.

        `chat_template` (a file or its text) replaces the engine's for this call, and `chat_template_content_format`
        says how it takes content. Reading another template than the call before takes about a tenth of a second.
        """
        check_unsupported(lora_request, tokenization_kwargs)
        tools = listed_tools(tools)  # an iterator would be empty for the second conversation
        prompts = [
            self.render_chat(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
                mm_processor_kwargs=mm_processor_kwargs,
                chat_template=chat_template,
                chat_template_content_format=chat_template_content_format,
            )
            for conversation in split_conversations(messages)
        ]
        return self._run(prompts, sampling_params, priority, use_tqdm)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
    ) -> Prompt:
        """Render one conversation to a prompt with breakpoints, for `generate` and `stream`.

        Raises InvalidPromptError, or ConfigError without a tokenizer and for a template that cannot be read.
        """
        template = self._template(chat_template, chat_template_content_format)
        flags: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        messages, tools = check_chat_options(messages, tools, chat_template_kwargs, **flags)
        return template.render(
            messages, tools=tools, variables=chat_template_kwargs, mm_processor_kwargs=mm_processor_kwargs, **flags
        )

    def _template(self, given: str | None, form: ContentFormat) -> ChatTemplate:
        """Return the template of a call. The last one that is not the engine's own is kept for the next call."""
        if self._chat is None:
            raise ConfigError("chat needs a tokenizer; start without skip_tokenizer_init")
        if given is None and form == "auto":
            return self._chat
        other = self._other_chat
        if other is None or other[0] != (given, form):
            other = self._other_chat = (given, form), self._chat.replaced(given, form)
        return other[1]

    def stream(self, prompt: PromptInput, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt. After each step with news, yield its output so far, or as `output_kind` says.

        Ctrl-C during a step, or leaving the iteration, ends the request. After Ctrl-C the last output has
        `finish_reason` ABORT. Other streams and calls may run at the same time. The prompt and the parameters are read
        at once, and the request begins with the first output that is asked for. Raises a RequestError if the prompt or
        a parameter is refused.
        """
        (params,) = self._params_of(sampling_params, 1)
        with self._shared.held() as engine:
            checked = engine.inputs.prompt(prompt, params=params)
        return self._outputs(checked, params)

    def _outputs(self, checked: Prompt, params: SamplingParams) -> Iterator[RequestOutput]:
        """Run one request, and yield its outputs."""
        caller = Caller()
        convert: Callable[[RequestState], RequestOutput | None] = RequestState.output
        if params.output_kind is RequestOutputKind.FINAL_ONLY:
            convert = _finished_output
        try:
            self._shared.add(caller, checked, params)
            while caller.open or caller.news:
                # not while the caller handles an output, because it may never come back
                with DeferredInterrupt() as interrupt:
                    outputs = list(filter(None, self._shared.next_news(caller, convert)))
                if interrupt.requested and caller.open:
                    outputs = self._shared.abort(caller)
                yield from outputs
        finally:
            self._shared.leave(caller)

    def get_tokenizer(self) -> Any:
        """Return the transformers tokenizer of the model. Raises ConfigError if the engine was started without one."""
        if self._engine.inputs.tokenizer is None:
            raise ConfigError("there is no tokenizer; start without skip_tokenizer_init")
        return self._engine.inputs.tokenizer.hf

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a call that gives none: the model's, or neutral ones."""
        return SamplingParams(**self._defaults)

    def reset_prefix_cache(self) -> bool:
        """Drop every cached prefix. Always returns True. Running requests keep their blocks and states."""
        with self._shared.held() as engine:
            engine.core.reset_prefix_cache()
        return True

    def get_metrics(self) -> dict[str, Any]:
        """Return counters and gauges since the start, by name (tokens, pages, requests)."""
        with self._shared.held():
            return self._metrics()

    def close(self) -> None:
        """Release the memory. Later calls raise EngineStoppedError, but `get_metrics` returns its last values.

        Does nothing in a forked process.
        """
        if not self._shared.is_own:
            return
        with self._shared.held() as engine:
            last = self._metrics()
            self._metrics = lambda: last
            engine.core.close()

    if not TYPE_CHECKING:  # otherwise a type checker would accept any name

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError. For a member of vLLM's LLM the error says what to do instead."""
            do = f"; {OF_LLM[name]}" if name in OF_LLM else ""
            raise AttributeError(f"LLM has no attribute {name!r}{do}", name=name, obj=self)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self,
        prompts: Sequence[PromptInput],
        params: ParamsInput,
        priority: int | Sequence[int] | None,
        use_tqdm: bool | Callable[..., Any],
    ) -> list[RequestOutput]:
        make_bar = bar_of(use_tqdm)
        each = self._params_of(params, len(prompts))
        with self._shared.held() as engine:
            checked = [engine.inputs.prompt(given, params=own) for given, own in zip(prompts, each, strict=True)]
            todo = list(zip(checked, each, priorities(priority, len(prompts)), strict=True))
            for prompt, own, _ in todo:
                engine.check(prompt, own)
        done: dict[str, RequestOutput] = {}
        order: list[str] = []
        caller = Caller()
        try:
            with DeferredInterrupt() as interrupt, _progress(len(todo), make_bar) as progress:
                while len(done) < len(todo):
                    self._feed(caller, todo, order)
                    outputs = list(filter(None, self._shared.next_news(caller, _finished_output)))
                    done |= {output.request_id: output for output in outputs}
                    if progress is not None and outputs:
                        progress.add(outputs)
                    if interrupt.requested:
                        raise KeyboardInterrupt
        finally:
            self._shared.leave(caller)
        return [done[request_id] for request_id in order]

    def _params_of(self, given: ParamsInput, count: int) -> list[SamplingParams]:
        """Return parameters for each of `count` prompts, the default ones if none are given."""
        return one_each(self.get_default_sampling_params() if given is None else given, count)

    def _feed(self, caller: Caller, todo: Sequence[tuple[Prompt, SamplingParams, int]], order: list[str]) -> None:
        """Queue as many of the prompts not in `order` yet as the bounded queue takes, and append their ids to it.

        Raises QueueFullError if no running request could make room.
        """
        for prompt, params, priority in todo[len(order) :]:
            try:
                order.append(self._shared.add(caller, prompt, params, priority))
            except QueueFullError:
                if not self._engine.has_unfinished():
                    raise
                return


def _progress(total: int, make_bar: Callable[..., Any] | None) -> AbstractContextManager[Progress | None]:
    return nullcontext() if make_bar is None else Progress(total, make_bar)


def _finished_output(state: RequestState) -> RequestOutput | None:
    return state.output() if state.finished else None
