"""Turns conversations into prompts, with breakpoints where other conversations are expected to diverge."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np

from forkpoint.checks import Checker
from forkpoint.config import EngineConfig
from forkpoint.engine.bounded import OverLimitError, run_bounded
from forkpoint.engine.call_writing import notation_name
from forkpoint.engine.chat_images import ChatImages
from forkpoint.engine.conversation import Message, last_text, read_message
from forkpoint.engine.image_processor import ImageProcessor
from forkpoint.engine.inputs import Prompt, processor_kwargs
from forkpoint.engine.media_urls import NONE_FETCHED, num_media
from forkpoint.engine.rewriting import Rewrite, Rewriter, Rewritten
from forkpoint.engine.template_traits import TemplateTraits, probe_traits
from forkpoint.engine.tokenizer import PROCESSOR_TEMPLATE, Tokenizer
from forkpoint.errors import ConfigError, InvalidPromptError
from forkpoint.obs.logs import LOGGER
from forkpoint.obs.notices import Notices

FIRST_MESSAGES, LAST_MESSAGES = 8, 56  # Messages whose ends are located. Each costs one to three renderings.
# Limit on messages in all these renderings, about 0.3 s for a plain template. A longer conversation gets fewer ends.
# Otherwise, the time would grow with the product of messages and ends.
MAX_RENDERED = 20_000
NO_TEMPLATES: Final[Mapping[str, str]] = MappingProxyType({})
# Parameters of transformers' `apply_chat_template` and jinja2's `render`, which template variables must not shadow.
RESERVED = (
    *("chat_template", "conversation", "kwargs", "max_length", "messages", "padding", "return_assistant_tokens_mask"),
    *("return_dict", "return_tensors", "sanitize_control_tokens", "self", "tokenize", "tokenizer_kwargs", "truncation"),
)
ContentFormat: TypeAlias = Literal["auto", "string", "openai"]
PROBES = ("\u2020 first probe", "\u2021 other probe")  # user texts that differ in the first character
PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "probe", "parameters": {"type": "object", "properties": {}}},
}
PROBE_CPU_S, PROBE_MEMORY_BYTES = 5, 2**30  # limits for all probes together; real templates take a tenth of a second
OVER_LIMIT = (
    f"takes more than {PROBE_CPU_S} s or {PROBE_MEMORY_BYTES >> 30} GiB of memory for a conversation of a few words"
)
IGNORES_USER = "shows nothing of what a user says, so that every prompt would be the same"


class ChatTemplate:
    """Renders conversations through the tokenizer's chat template, or through a given one.

    The constructor probes which conversations the template accepts. Conversations are rewritten accordingly.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None = None,
        content_format: ContentFormat = "auto",
        tool_call_parser: str = "auto",
        images: ImageProcessor | None = None,
        *,
        in_fork: bool = True,
    ) -> None:
        """Read the template, a Jinja file or its text (None: the model's own), and probe it in a fork (`in_fork`).

        `content_format` says how the template gets content: as texts (`string`), as lists of text parts (`openai`), or
        in the form that it shows (`auto`). `tool_call_parser` names the notation of calls for a template that does not
        show them. `images` reads the images of conversations; None: they are refused.
        Raises ConfigError if a given template cannot be read, needs too much time or memory, or ignores the user, and
        for any template that shows a user's text in the other form alone. If the model's own template needs too much or
        ignores the user, all conversations are refused.
        """
        self._tokenizer = tokenizer
        self._template = read_template(template, tokenizer.templates)
        self._images, self._placeholder = images, ""
        if images is not None:
            self._placeholder = tokenizer.decode([images.settings.image_token_id], skip_special_tokens=False)
        self._fault = ""
        probed = _Probed(False, TemplateTraits(), TemplateTraits())
        if self.source:
            try:
                probe = partial(self._probe, content_format)
                limits = {"cpu_s": PROBE_CPU_S, "memory_bytes": PROBE_MEMORY_BYTES}
                probed = run_bounded(probe, **limits) if in_fork else probe()
            except OverLimitError:
                self._refuse_all(OVER_LIMIT)
        if probed.ignores_user:
            self._refuse_all(IGNORES_USER)
        if probed.only_form:
            raise ConfigError(
                f"chat_template_content_format={content_format!r} is not possible: the chat template shows content in "
                f"the form {probed.only_form!r} alone; give that, or leave the option out"
            )
        self._in_parts = probed.in_parts
        self.thinking_end = probed.without_tools.thinking_end  # the text between the thinking and the content
        notation = notation_name(tool_call_parser, tokenizer, self.source)
        self._rewriters = {
            False: Rewriter(probed.without_tools, notation),
            True: Rewriter(probed.with_tools, notation),
        }
        self._notices = Notices(logging.INFO)

    def replaced(self, template: str | None, content_format: ContentFormat) -> ChatTemplate:
        """Return a template with another text (None: the same) and form of content. It is probed in this process.

        Raises ConfigError for a text that is no template, a file that cannot be read, or a form of content that the
        template does not show, and InvalidPromptError for values of another type.
        """
        check, forms = Checker(InvalidPromptError), get_args(ContentFormat)
        check.require(content_format in forms, "chat_template_content_format", content_format, " or ".join(forms))
        check.require(isinstance(template, str | None), "chat_template", template, "None, a file or a Jinja template")
        text = read_template(template, self._tokenizer.templates)
        if text is not None and (wrong := _syntax_error(text)):
            raise ConfigError(f"chat_template {wrong}")
        return ChatTemplate(self._tokenizer, text or self._template, content_format, images=self._images, in_fork=False)

    def _refuse_all(self, reason: str) -> None:
        """Refuse all conversations and warn why, or raise ConfigError if the template is a given one."""
        if self._template is not None:
            raise ConfigError(f"the given chat_template {reason}; correct it, or leave it out")
        self._fault = f"the model's {_own_name(self._tokenizer)} {reason}; give another with --chat-template"
        LOGGER.warning("%s: %s; until then chats are refused", self._tokenizer.hf.name_or_path, self._fault)

    def _probe(self, content_format: ContentFormat) -> _Probed:
        asked = content_format == "openai"
        in_parts = next((form for form in (asked, not asked) if self._shows_user(in_parts=form)), None)
        if in_parts is None:
            in_parts = asked
            if self._ignores_user():
                return _Probed(in_parts, TemplateTraits(), TemplateTraits(), ignores_user=True)
        elif in_parts != asked and content_format != "auto":
            return _Probed(asked, TemplateTraits(), TemplateTraits(), "openai" if in_parts else "string")

        def traits(tools: Sequence[Any] | None) -> TemplateTraits:
            return probe_traits(lambda messages: self._try_text(messages, {"tools": tools}), in_parts=in_parts)

        return _Probed(in_parts, traits(None), traits([PROBE_TOOL]))

    def _shows_user(self, *, in_parts: bool) -> bool:
        text = self._try_text([_from_user(PROBES[0], in_parts)], {})
        return text is not None and PROBES[0] in text and "'type'" not in text

    def _ignores_user(self) -> bool:
        """Return whether prompts are the same whatever the user says, as those of a file that is no template."""
        pairs = [[self._try_text([_from_user(text, form)], {}) for text in PROBES] for form in (False, True)]
        return all(one == other for one, other in pairs) and any(one is not None for one, _ in pairs)

    @property
    def source(self) -> str:
        """The template's text, or those of all the model's templates; empty if there is none."""
        return self._template or "\n".join(self._tokenizer.templates.values())

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        check_text: Callable[[str], None] | None = None,
        fetched: Mapping[str, bytes] = NONE_FETCHED,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        media_io_kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Render one conversation to a prompt, with a breakpoint at the end of the tools and each message.

        `variables` go to the template. `check_text` is called with the text before it is tokenised, and may raise.
        `fetched` has the files of images that messages name by URL. `mm_processor_kwargs` bounds the size of images,
        and `media_io_kwargs` says how files are read.
        Raises InvalidPromptError without a template, for an empty or malformed conversation, and for one that the
        template refuses.
        """
        self._check(messages, variables)
        images: ChatImages | None = None
        if self._images is not None and self._placeholder and any(num_media(messages)):
            processor = self._images.with_kwargs(processor_kwargs(mm_processor_kwargs), media_io_kwargs)
            images = ChatImages(messages, processor, self._tokenizer, fetched)
        take_image = None if images is None else images.take
        read = [read_message(message, in_parts=self._in_parts, take_image=take_image) for message in messages]
        rewritten = self._rewriters[bool(tools)].rewrite(read)
        for rewrite in Rewrite:
            if rewrite in rewritten.rewrites:
                self._notices.add(f"conversations are rewritten for the chat template: {rewrite.value}")
        if images is not None:
            rewritten = images.in_parts(rewritten)
        conversation = rewritten.messages
        options = {**(variables or {}), "tools": list(tools or ()) or None}
        ending = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        try:
            text = self._text(conversation, {**options, **ending})
        except Exception as error:  # a template may raise anything
            raise self._refusal(rewritten, {**options, **ending}, error) from error
        if check_text is not None:
            check_text(text)
        cuts = self._message_ends(conversation, options, text)
        if images is None:
            return self._tokenised(text, cuts)[0]
        shown_cuts = [images.shown_at(text, cut) for cut in cuts]
        prompt, offsets = self._tokenised(images.shown_text(text), shown_cuts)
        return images.prompt(prompt, text, offsets)

    def _check(self, messages: Sequence[Message], variables: Mapping[str, Any] | None) -> None:
        if not self.source:
            raise InvalidPromptError("the model has no chat template; give one with chat_template, or use generate")
        if self._fault:
            raise InvalidPromptError(self._fault)
        reserved = sorted(name for name in variables or () if name in RESERVED)
        if reserved:
            raise InvalidPromptError(
                f"chat_template_kwargs may not name {reserved[0]!r}; that is a parameter of the renderer"
            )
        if not messages:
            raise InvalidPromptError("the conversation is empty; give at least one message")

    def _tokenised(self, text: str, cuts: Sequence[int]) -> tuple[Prompt, Sequence[tuple[int, int]]]:
        """Return the prompt of a text, with breakpoints at the characters `cuts`, and its tokens' ranges."""
        ids, offsets = self._tokenizer.encode_with_offsets(text)
        return Prompt(np.asarray(ids, np.int32), text, _token_positions(cuts, offsets)), offsets

    def _refusal(self, rewritten: Rewritten, options: Mapping[str, Any], error: Exception) -> InvalidPromptError:
        """Return the error for a conversation that the template refused.

        The error names the first message at which the template refuses the conversation.
        """
        if self._template is None and (wrong := _own_error(self._tokenizer)) is not None:
            return InvalidPromptError(wrong)
        num_taken, num_refused = 0, len(rewritten.conversation)
        while num_refused - num_taken > 1:
            middle = (num_taken + num_refused) // 2
            if self._try_text(rewritten.messages[:middle], options) is None:
                num_refused = middle
            else:
                num_taken = middle
        refused = rewritten.conversation[num_refused - 1]
        says = str(error) or type(error).__name__
        return InvalidPromptError(
            f"the chat template refused the conversation at messages[{refused.index}], of the role "
            f"{refused.role!r}: {says}"
        )

    def _text(self, conversation: Sequence[Message], options: Mapping[str, Any]) -> str:
        apply = self._tokenizer.hf.apply_chat_template
        return str(apply(list(conversation), chat_template=self._template, tokenize=False, **options))

    def _message_ends(self, conversation: Sequence[Message], options: Mapping[str, Any], text: str) -> list[int]:
        """Return sorted character positions in `text`: the end of the tool list and of each message.

        Ends that cannot be located, and those in the middle of long conversations, are left out.
        """
        counts = range(len(conversation) + 1)
        num_last = min(LAST_MESSAGES, MAX_RENDERED // len(conversation))
        looked_at = {*counts[:FIRST_MESSAGES], *counts[len(counts) - num_last :]}
        ends = {self._end_of(conversation[:count], options, text) for count in looked_at}
        return sorted(end for end in ends if 0 < end < len(text))

    def _end_of(self, prefix: Sequence[Message], options: Mapping[str, Any], text: str) -> int:
        """Return the position in `text` where `prefix` ends; 0 if the template does not show it.

        Most templates render a prefix of a conversation to a prefix of its text. Some raise instead, write something
        else at the end, or keep a system prompt for the first user message. For these, the texts of two continuations
        with different user messages are compared.
        """
        if prefix:
            alone = self._try_text(prefix, options)
            if alone is not None and text.startswith(alone) and last_text(prefix[-1]).strip() in alone:
                return len(alone)
        shown = [self._try_text([*prefix, _from_user(probe, self._in_parts)], options) for probe in PROBES]
        first, other = shown
        if first is None or other is None:
            return 0
        shared = _common_prefix(first, other)
        if not text.startswith(first[:shared]):
            return 0
        return shared

    def _try_text(self, conversation: Sequence[Message], options: Mapping[str, Any]) -> str | None:
        try:
            return self._text(conversation, options)
        except MemoryError:
            raise
        except Exception:  # templates refuse conversations with many kinds of errors, and the kind does not matter here
            return None


@dataclass(frozen=True, slots=True)
class _Probed:
    """The results of probing: the form of content, and the template's traits with tools and without."""

    in_parts: bool
    without_tools: TemplateTraits
    with_tools: TemplateTraits
    only_form: str = ""  # the only form of content that the template shows, if another one was asked for
    ignores_user: bool = False


def _from_user(text: str, in_parts: bool) -> Message:
    return read_message({"role": "user", "content": text}, in_parts=in_parts)


def _token_positions(cuts: Sequence[int], offsets: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Return the number of tokens before each cut. Cuts inside a token are left out."""
    starts = [start for start, _ in offsets]
    found = set()
    for cut in cuts:
        position = bisect_left(starts, cut)
        if 0 < position < len(offsets) and starts[position] == cut and offsets[position - 1][1] <= cut:
            found.add(position)
    return tuple(sorted(found))


def _common_prefix(first: str, other: str) -> int:
    for index, (a, b) in enumerate(zip(first, other, strict=False)):
        if a != b:
            return index
    return min(len(first), len(other))


def read_template(template: str | None, named: Mapping[str, str] = NO_TEMPLATES) -> str | None:
    """Return the text of a template that is given as one of the model's `named` ones, as a file or as itself.

    None stays None. Raises ConfigError if it is none of them, or the file is not UTF-8 text.
    """
    if template is None or "{" in template or "\n" in template:
        return template
    path = Path(template)
    if not path.is_file() and template in named:
        return named[template]
    if not path.is_file():
        names = f" The model's own templates are {', '.join(sorted(named))}." if len(named) > 1 else ""
        raise ConfigError(
            f"chat_template={template!r} is neither a file nor a Jinja template; give one of them.{names}"
        )
    try:
        return path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template={template!r} cannot be read as UTF-8 text: {error}; correct the file"
        ) from error


def check_template(config: EngineConfig, tokenizer: Tokenizer | None) -> None:
    """Raise ConfigError if a given template cannot be parsed. Log a warning if the model's own cannot."""
    given = read_template(config.chat_template, tokenizer.templates if tokenizer is not None else NO_TEMPLATES)
    if given is not None and (wrong := _syntax_error(given)):
        file = "" if given == config.chat_template else f"={config.chat_template!r}"
        raise ConfigError(f"chat_template{file} {wrong}")
    if given is None and tokenizer is not None and (wrong := _own_error(tokenizer)):
        LOGGER.warning("%s: %s; until then chats are refused", config.tokenizer or config.model, wrong)


def _own_error(tokenizer: Tokenizer) -> str | None:
    """Return what is wrong with the model's own template, with file and line; None if Jinja can parse it."""
    for name, text in tokenizer.templates.items():
        if (wrong := _syntax_error(text)) is not None:
            file = _own_name(tokenizer) if name == "default" else f"chat template {name}"
            return f"the model's {file} {wrong}; correct it, or give another with --chat-template"
    return None


def _own_name(tokenizer: Tokenizer) -> str:
    folder, name = Path(tokenizer.hf.name_or_path), "chat_template.jinja"
    if tokenizer.hf.init_kwargs.get("chat_template") is None and not (folder / name).is_file():
        name = PROCESSOR_TEMPLATE
    return name if (folder / name).is_file() else "chat_template in tokenizer_config.json"


def _syntax_error(template: str) -> str | None:
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template([], chat_template=template)  # without conversations the template is only compiled
    except TemplateSyntaxError as error:
        return f"is not a Jinja template: {error.message}, line {error.lineno}"
    return None
