"""The tokenizer, chat template and limits of a reader, and the kind of function that a reader runs.

Each endpoint with a body has a body model and a pure function `prepare(texts, data)`. A reader calls it with the raw
body. The function parses, checks, renders and tokenises. It returns a small frozen dataclass with all that the event
loop needs to answer (token ids as int32 arrays, but no messages), or raises the error to answer with.
`Service.prepare(prepare_x, request)` runs it, and is cancelled when the client leaves.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, Final, Generic, TypeAlias, TypeVar

import numpy as np

from forkpoint.config import EngineConfig
from forkpoint.engine.call_writing import NotationName, notation_name
from forkpoint.engine.chat import ChatTemplate
from forkpoint.engine.generation_config import log_sampling_defaults, sampling_defaults
from forkpoint.engine.image_processor import ImageProcessor
from forkpoint.engine.inputs import InputProcessor, Prompt
from forkpoint.engine.media_urls import num_media, remote_urls
from forkpoint.engine.tokenizer import Tokenizer, eos_token_ids
from forkpoint.errors import ConfigError, InvalidPromptError, PromptTooLongError, QueueFullError, RequestTooLargeError
from forkpoint.media_limits import MediaKind
from forkpoint.obs.notices import Notices
from forkpoint.params import THINK_END, THINKING_END, SamplingParams
from forkpoint.server.body import parse
from forkpoint.server.calls.reader import Notation
from forkpoint.server.config import ServerConfig
from forkpoint.server.errors import HTTPError
from forkpoint.server.notations import NOTATIONS
from forkpoint.server.protocol import RequestBody

B = TypeVar("B", bound=RequestBody)
T = TypeVar("T")
MAX_SHOWN_CHARS: Final = 200  # characters of an unknown model's name that an error shows


@dataclass(frozen=True, slots=True)
class Facts:
    """The engine's sizes, against which requests are checked."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class LoadedTexts:
    """What the API process needs of the tokenizer and the processor of images.

    `tokenizer` is its `tokenizers` form as JSON; None without a tokenizer. `eos_token_ids` end a completion. `media`
    are the kinds of media that prompts may have.
    """

    tokenizer: str | None
    eos_token_ids: frozenset[int]
    media: tuple[MediaKind, ...]


@dataclass(frozen=True, slots=True)
class Room:
    """The number of completions that the server answers now, and its limit."""

    num_open: int
    limit: int

    def check(self, num_more: int) -> None:
        """Raise QueueFullError if `num_more` completions do not fit now, RequestTooLargeError if they never do."""
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


class MissingImages(Exception):
    """Images of a request have to be fetched before it can be read."""

    def __init__(self, urls: tuple[str, ...]) -> None:
        super().__init__(urls)
        self.urls = urls


class Texts:
    """Tokenizer, chat template and limits, in a reader's process.

    `load`, then `begin` (which sets `inputs` once the engine is ready) prepare them.
    """

    inputs: InputProcessor

    def __init__(self, engine: EngineConfig, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.room = Room(0, config.max_open_requests)  # room for the request that is being read
        self.fetched: Mapping[str, bytes] = {}  # the files of images that the request names by URL
        self.tokenizer: Tokenizer | None = None
        self._chat: ChatTemplate | None = None
        self.images: ImageProcessor | None = None  # None: the model reads no images
        self._max_characters = 0
        self.sampling: Mapping[str, Any] = {}  # defaults of the sampling parameters
        self.notices = Notices()

    def load(self) -> LoadedTexts:
        """Load the tokenizer and the chat template. Keeps the process from importing torch.

        Raises ModelFolderError or ConfigError.
        """
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not survive a fork
        if not self.engine.skip_tokenizer_init:
            # transformers would import torch for its models, which takes half of the time and of the memory.
            if "torch" not in sys.modules:
                sys.modules["torch"] = None  # type: ignore[assignment]
                os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # no warning that torch is missing
            import_module("llguidance")  # imported once here, as readers that compile grammars are forks
            self.tokenizer = Tokenizer.load(self.engine.tokenizer or self.engine.model)
            self.images = ImageProcessor.load(self.engine)
            if self.images is not None:
                import_module("PIL.Image")  # for all readers
            form = self.config.chat_template_content_format
            parser = self.config.tool_call_parser
            self._chat = ChatTemplate(self.tokenizer, self.engine.chat_template, form, parser, self.images)
        self.sampling = sampling_defaults(self.engine)
        log_sampling_defaults(self.engine, self.sampling)
        ends = eos_token_ids(self.engine.model, self.tokenizer, self.engine.hf_overrides)
        tokenizer = self.tokenizer.backend.to_str() if self.tokenizer is not None else None
        return LoadedTexts(tokenizer, ends, self.images.modalities if self.images is not None else ())

    def begin(self, facts: Facts) -> None:
        size, length, ends = facts.vocab_size, facts.max_model_len, facts.eos_token_ids
        self.inputs = InputProcessor(
            *(self.tokenizer, size, length, ends, self.engine.seed),
            structured_outputs=self.engine.structured_outputs_config,
            images=self.images,
        )
        if self.tokenizer is not None:
            self._max_characters = length * self.tokenizer.longest_token

    # --- for the `prepare` functions

    def parse(self, model: type[B], data: bytes) -> B:
        """Return the body as `model` and log the fields that are ignored. Raises HTTPError 400 for a wrong body."""
        body = parse(model, data)
        for text in body.unused_fields():
            self.notices.add(text)
        return body

    def served_name(self, asked: str | None) -> str:
        """Return the model name to answer with. Raises HTTPError 404 for a model that is not served."""
        return served_name(self.config.served_model_name, asked)

    def require_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises InvalidPromptError if the server has none."""
        if self.tokenizer is None:
            raise InvalidPromptError("the server was started without a tokenizer; give token ids instead of text")
        return self.tokenizer

    def relaxed(self, schema: Mapping[str, Any], matching: str) -> dict[str, Any]:
        """Return a JSON schema without the keywords that cannot be enforced. The log says what `matching` it lacks."""
        found, said = self.inputs.grammars.relaxed(schema)
        for text in said:
            self.notices.add(f"{matching} may not match the whole schema: {text}")
        return found

    @property
    def template(self) -> str:
        """The text of the chat template; empty if there is none."""
        return self._chat.source if self._chat is not None else ""

    @cached_property
    def notation_name(self) -> NotationName:
        """The notation in which the model writes tool calls."""
        return notation_name(self.config.tool_call_parser, self.tokenizer, self.template)

    @property
    def notation(self) -> Notation:
        """How calls in the model's notation are read."""
        return NOTATIONS[self.notation_name]

    @property
    def thinking_end(self) -> str:
        """The text with which the chat template ends thinking."""
        return self._chat.thinking_end if self._chat is not None else THINKING_END

    @cached_property
    def may_think(self) -> bool:
        """Whether the chat template or the vocabulary has `</think>`, so that the model may write thinking."""
        if THINK_END in self.template:
            return True
        return self.tokenizer is not None and self.tokenizer.backend.token_to_id(THINK_END) is not None

    def text_of(self, token_ids: list[int]) -> str:
        return self.require_tokenizer().decode(token_ids, skip_special_tokens=False)

    def prompt(self, given: str | list[int], params: SamplingParams, *, special: bool) -> Prompt:
        """Return a text or token ids as a prompt, truncated as `params` say and checked.

        `special`: a text gets the tokenizer's special tokens. Raises a RequestError; for a text that is far too long it
        does so without tokenising it.
        """
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
        """Return the prompt of a conversation, truncated as `params` say. `options` go to `ChatTemplate.render`.

        Raises the errors of `ChatTemplate.render`, and a RequestError for a prompt that does not fit the context.
        Without `params` only the length of the text is checked. Raises MissingImages if images are to be fetched first.
        """
        if self._chat is None:
            raise ConfigError("chat needs a tokenizer; start the server without --skip-tokenizer-init")
        limit = self.inputs.max_model_len
        if len(messages) > limit:
            raise PromptTooLongError.of(len(messages), limit, "messages", limit)
        cuts = params is not None and params.truncate_prompt_tokens is not None
        self._require_fetched(messages)
        check = None if cuts else self.check_length
        prompt = self._chat.render(messages, check_text=check, fetched=self.fetched, **options)
        return self.inputs.prompt(prompt, params=params) if params is not None else prompt

    def _require_fetched(self, messages: Sequence[dict[str, Any]]) -> None:
        """Raise MissingImages if images of the conversation have to be fetched, and may be.

        Raises InvalidPromptError if they are too many.
        """
        if self.images is None or not self.config.allowed_media_domains:
            return
        urls = [url for url in remote_urls(messages) if url not in self.fetched]
        if urls:
            self.images.check_count(*num_media(messages))
            raise MissingImages(tuple(urls))

    def check_length(self, text: str) -> None:
        """Raise PromptTooLongError for a text that cannot fit, even if each of its tokens were the longest one."""
        if len(text) > self._max_characters:
            raise PromptTooLongError.of(len(text), self._max_characters, "characters", self.inputs.max_model_len)


Prepare: TypeAlias = Callable[[Texts, bytes], T]  # a function that a reader runs; it is pickled by its name


@dataclass(frozen=True, slots=True)
class RequestReading(Generic[T]):
    """What a reader does with a request: it runs `prepare` on the body.

    `room` tells `prepare` whether its prompts fit before it tokenises them. `fetched` names the images that follow the
    body in the data: URL and number of bytes of each.
    """

    prepare: Prepare[T]
    room: Room
    fetched: tuple[tuple[str, int], ...] = ()

    def __call__(self, texts: Texts, data: bytes) -> T | MissingImages:
        """Return what `prepare` returns, or the MissingImages that it raised. Sets the texts' room and images."""
        body_bytes = at = len(data) - sum(num_bytes for _, num_bytes in self.fetched)
        texts.room, texts.fetched = self.room, (fetched := {})
        for url, num_bytes in self.fetched:
            fetched[url] = data[at : at + num_bytes]
            at += num_bytes
        try:
            return self.prepare(texts, data[:body_bytes])
        except MissingImages as missing:
            return missing
        finally:
            texts.fetched = {}


def served_name(names: Sequence[str], asked: str | None) -> str:
    """Return the model name to answer with: `asked`, or the first of `names`. Raises HTTPError 404 for any other."""
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
