"""What a reader knows, and the functions that it runs.

Each endpoint with a body has a body model and a pure function `prepare(texts, data)`, which a reader calls with the
raw body: it parses, checks, renders and tokenises, and returns a small frozen dataclass with all that the answering
half in the event loop needs (token ids as int32 arrays, no message, no tool schema that is not asked again), or raises
what is to be answered. `Service.prepare(prepare_x, request)` runs it and is cancelled when the client leaves.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np

from forkpoint.config import EngineConfig
from forkpoint.engine.chat import ChatTemplate
from forkpoint.engine.generation_config import log_sampling_defaults, sampling_defaults
from forkpoint.engine.image_processor import ImageProcessor
from forkpoint.engine.inputs import InputProcessor, Prompt
from forkpoint.engine.tokenizer import Tokenizer, eos_token_ids
from forkpoint.errors import ConfigError, InvalidPromptError, QueueFullError, RequestTooLargeError
from forkpoint.params import THINK_END, SamplingParams
from forkpoint.server.body import parse
from forkpoint.server.calls.reader import Notation
from forkpoint.server.config import ServerConfig
from forkpoint.server.errors import HTTPError
from forkpoint.server.notations import find_notation
from forkpoint.server.notices import Notices
from forkpoint.server.protocol import RequestBody

B = TypeVar("B", bound=RequestBody)
T = TypeVar("T")
MAX_SHOWN_CHARS: Final = 200  # of an unknown model's name, in an error


@dataclass(frozen=True, slots=True)
class Facts:
    """What the engine has told: the sizes that requests are checked against."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Room:
    """How many completions the server answers now, and how many it may answer at once."""

    num_open: int
    limit: int

    def check(self, num_more: int) -> None:
        """Raises QueueFullError if so many more do not fit now, and RequestTooLargeError if they never do."""
        if num_more > self.limit:
            raise RequestTooLargeError(
                f"the request asks for {num_more} completions, more than max_open_requests={self.limit}: send fewer "
                "prompts or a smaller n"
            )
        if self.num_open + num_more > self.limit:
            raise QueueFullError(
                f"{self.num_open} completions are open, {num_more} more exceed max_open_requests={self.limit}; "
                "try again later"
            )


class Texts:
    """Tokenizer, chat template and limits, in a reader's process. `inputs` is there once the engine is ready."""

    inputs: InputProcessor

    def __init__(self, engine: EngineConfig, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.room = Room(0, config.max_open_requests)  # for the request that is being read
        self.tokenizer: Tokenizer | None = None
        self._chat: ChatTemplate | None = None
        self.images: ImageProcessor | None = None  # None: the model reads no images
        self._max_characters = 0
        self.sampling: Mapping[str, Any] = {}  # defaults of requests
        self.notices = Notices()

    def load(self) -> tuple[str | None, frozenset[int]]:
        """Read the tokenizer and the chat template, in a process that goes on without torch.

        Returns what the API process needs of the tokenizer: its `tokenizers` form as JSON (None without one), and the
        ids that end a completion. Raises ModelFolderError or ConfigError.
        """
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not survive a fork
        if not self.engine.skip_tokenizer_init:
            if "torch" not in sys.modules:  # transformers would load it, for models: half of the time and the memory
                sys.modules["torch"] = None  # type: ignore[assignment]
                os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # it says that there is none
            import_module("llguidance")  # for all readers, of which some compile grammars
            self.tokenizer = Tokenizer.load(self.engine.tokenizer or self.engine.model)
            self.images = ImageProcessor.load(self.engine)
            if self.images is not None:
                import_module("PIL.Image")  # for all readers
            form = self.config.chat_template_content_format
            parser = self.config.tool_call_parser
            self._chat = ChatTemplate(self.tokenizer, self.engine.chat_template, form, parser, self.images)
        self.sampling = sampling_defaults(self.engine)
        log_sampling_defaults(self.engine, self.sampling)
        ends = eos_token_ids(self.engine.model, self.tokenizer)
        return self.tokenizer.backend.to_str() if self.tokenizer is not None else None, ends

    def begin(self, facts: Facts) -> None:
        size, length, ends = facts.vocab_size, facts.max_model_len, facts.eos_token_ids
        self.inputs = InputProcessor(
            *(self.tokenizer, size, length, ends, self.engine.seed),
            structured_outputs=self.engine.structured_outputs_config,
            images=self.images,
        )
        if self.tokenizer is not None:
            self._max_characters = length * self.tokenizer.longest_token

    # --- for the functions

    def parse(self, model: type[B], data: bytes) -> B:
        """Return the body as `model` and log the fields that are ignored. Raises HTTPError 400 for a wrong body."""
        body = parse(model, data)
        for text in body.unused_fields():
            self.notices.add(text)
        return body

    def served_name(self, asked: str | None) -> str:
        """The name to answer with. Raises HTTPError 404 for a model that is not served."""
        return served_name(self.config.served_model_name, asked)

    def require_tokenizer(self) -> Tokenizer:
        """Raises InvalidPromptError where there is none."""
        if self.tokenizer is None:
            raise InvalidPromptError("the server was started without a tokenizer; it knows token ids only")
        return self.tokenizer

    @cached_property
    def notation(self) -> Notation:
        """How the model writes tool calls."""
        template = self._chat.source if self._chat is not None else ""
        return find_notation(self.config.tool_call_parser, self.tokenizer, template)

    @cached_property
    def may_think(self) -> bool:
        """Whether the model writes thinking as far as its chat template or its vocabulary shows."""
        if self._chat is not None and THINK_END in self._chat.source:
            return True
        return self.tokenizer is not None and self.tokenizer.backend.token_to_id(THINK_END) is not None

    def text_of(self, token_ids: list[int]) -> str:
        return self.require_tokenizer().decode(token_ids, skip_special_tokens=False)

    def prompt(self, given: str | list[int], params: SamplingParams, *, special: bool) -> Prompt:
        """A text, with `special` tokens before it, or token ids, cut as `params` say and checked. Raises a
        RequestError; a text that cannot fit is not tokenised first."""
        if not isinstance(given, str):
            return self.inputs.prompt(given, params)
        tokenizer = self.require_tokenizer()
        if params.truncate_prompt_tokens is None:
            self.check_length(given)
        ids = np.asarray(tokenizer.encode(given, add_special_tokens=special), np.int32)
        return self.inputs.prompt(Prompt(ids, given), params)

    def render(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> Prompt:
        """The prompt of a conversation, with the options of `ChatTemplate.render`, cut as `params` say. Raises as that
        does, and a RequestError for one that cannot fit; without `params` it need not."""
        if self._chat is None:
            raise ConfigError("chat needs a tokenizer; start the server without --skip-tokenizer-init")
        limit = self.inputs.max_model_len
        if len(messages) > limit:
            raise InvalidPromptError(
                f"the conversation has {len(messages)} messages, more than max_model_len={limit} has tokens: shorten it"
            )
        cuts = params is not None and params.truncate_prompt_tokens is not None
        prompt = self._chat.render(messages, check_text=None if cuts else self.check_length, **options)
        return self.inputs.prompt(prompt, params=params) if params is not None else prompt

    def check_length(self, text: str) -> None:
        """Raises InvalidPromptError for a text of more characters than the longest tokens have, as many as fit."""
        if len(text) > self._max_characters:
            raise InvalidPromptError(
                f"the prompt has {len(text)} characters; with max_model_len={self.inputs.max_model_len} no prompt of "
                f"more than {self._max_characters} fits: shorten it or raise max_model_len"
            )


Prepare: TypeAlias = Callable[[Texts, bytes], T]  # what a reader runs, by its name


def in_room(prepare: Prepare[T], room: Room, texts: Texts, data: bytes) -> T:
    """Run `prepare`, which may ask whether there is `room` for what it is about to tokenise."""
    texts.room = room
    return prepare(texts, data)


def served_name(names: Sequence[str], asked: str | None) -> str:
    """The name to answer with, of those served. Raises HTTPError 404 for another."""
    if not asked:
        return names[0]
    if asked not in names:
        raise HTTPError(
            404,
            f"the model {asked[:MAX_SHOWN_CHARS]!r} does not exist; this server has {', '.join(names)}",
            "not_found_error",
            param="model",
            code="model_not_found",
        )
    return asked
