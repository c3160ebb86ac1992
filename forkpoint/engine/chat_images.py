"""The images of a conversation, on their way through message rewriting and a chat template.

Rewriting works on texts, so an image is a character there that no text of the conversation has. Before the template
renders, the character becomes an image part again, for which the template writes the model's placeholder. A placeholder
that somebody typed is another character meanwhile, so it stays text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final

from forkpoint.engine.conversation import Message
from forkpoint.engine.image_processor import ImageProcessor
from forkpoint.engine.inputs import Prompt, with_images
from forkpoint.engine.pictures import NONE_FETCHED, detail_of, image_parts, picture_of
from forkpoint.engine.rewriting import Rewritten
from forkpoint.errors import InvalidPromptError

PRIVATE_USE: Final = range(0xE000, 0xF900)  # characters that have no meaning of their own


class ChatImages:
    """Reads the images of one conversation, in their order."""

    def __init__(
        self,
        messages: Sequence[Message],
        processor: ImageProcessor,
        placeholder: str,
        fetched: Mapping[str, bytes] = NONE_FETCHED,
    ) -> None:
        """`placeholder` is what the template writes for an image. `fetched` has the files behind URLs.

        Raises InvalidPromptError for too many images.
        """
        processor.check_count(sum(1 for message in messages for _ in image_parts(message)))  # before any is read
        self._processor, self._placeholder, self._fetched = processor, placeholder, fetched
        self._pictures: list[Any] = []
        self._details: list[object] = []
        used = set().union(*map(set, _texts(list(messages))))
        unused = (character for character in map(chr, PRIVATE_USE) if character not in used)
        try:
            self._mark, self._typed = islice(unused, 2)
        except ValueError:
            raise InvalidPromptError(
                "the conversation has all private-use characters; leave some of them out"
            ) from None

    def take(self, part: Mapping[str, Any]) -> str:
        """Remember the picture of an image part, and return the character that stands for it. Raises
        InvalidPromptError."""
        self._pictures.append(picture_of(part, self._fetched))
        self._details.append(detail_of(part))
        return self._mark

    def in_parts(self, rewritten: Rewritten) -> Rewritten:
        """Return the conversation with image parts, and without typed placeholders."""
        return replace(
            rewritten,
            conversation=tuple(
                replace(placed, message=self._with_parts(self._hidden(placed.message)))
                for placed in rewritten.conversation
            ),
        )

    def _hidden(self, value: Any) -> Any:
        """Replace placeholders in all texts."""
        if isinstance(value, str):
            return value.replace(self._placeholder, self._typed)
        if isinstance(value, Mapping):
            return {name: self._hidden(each) for name, each in value.items()}
        return [self._hidden(each) for each in value] if isinstance(value, list | tuple) else value

    def _with_parts(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message["content"]
        texts = [part["text"] for part in content] if isinstance(content, list) else [content]
        if not any(self._mark in text for text in texts):
            return message
        parts: list[dict[str, str]] = []
        for text in texts:
            first, *others = text.split(self._mark)
            parts += _text_part(first)
            for other in others:
                parts += [{"type": "image"}, *_text_part(other)]
        return {**message, "content": parts}

    def shown_text(self, rendered: str) -> str:
        """Return the text of the prompt, with typed placeholders in their places."""
        return rendered.replace(self._typed, self._placeholder)

    def shown_at(self, rendered: str, at: int) -> int:
        """Return where a position of `rendered` is in the text of the prompt."""
        return at + (len(self._placeholder) - 1) * rendered.count(self._typed, 0, at)

    def prompt(self, prompt: Prompt, rendered: str, offsets: Sequence[tuple[int, int]]) -> Prompt:
        """Return the prompt of a conversation with the tokens of its images. `offsets` are those of its tokens in its
        text. Raises InvalidPromptError if the template does not show all images."""
        places = []
        at = rendered.find(self._placeholder)
        while at >= 0:
            places.append(self.shown_at(rendered, at))
            at = rendered.find(self._placeholder, at + len(self._placeholder))
        if len(places) != len(self._pictures):
            raise InvalidPromptError(
                f"the chat template shows {len(places)} of the {len(self._pictures)} images of the conversation; put "
                "images where it shows them, such as in the last user message"
            )
        starts = [start for start, _ in offsets]
        tokens = [bisect_left(starts, place) for place in places]
        token_id = self._processor.settings.image_token_id
        if any(token >= len(starts) or prompt.token_ids[token] != token_id for token in tokens):
            raise InvalidPromptError(f"the tokenizer does not read {self._placeholder!r} as token {token_id}")
        return with_images(prompt, self._processor, self._pictures, tokens, self._details)


def has_images(messages: Sequence[Message]) -> bool:
    """Whether any message has an image."""
    return any(True for message in messages for _ in image_parts(message))


def _text_part(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}] if text else []


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for name, each in value.items() if name not in ("image_url", "image") for text in _texts(each))
    elif isinstance(value, list | tuple):
        yield from (text for each in value for text in _texts(each))
