"""The images and videos of a conversation, on their way through message rewriting and a chat template.

Rewriting works on texts, so an image is a character there that no text of the conversation has. Before the template
renders, the character becomes an image part again, for which the template writes the model's placeholder. A placeholder
that somebody typed is another character meanwhile, so it stays text.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

from forkpoint.checks import member
from forkpoint.engine.conversation import VIDEO_PART, VIDEO_URL_PART, Message, content_texts, is_media
from forkpoint.engine.frame_files import HEAD as FRAMES_HEAD
from forkpoint.engine.frame_files import FrameFiles
from forkpoint.engine.image_processor import ImageProcessor
from forkpoint.engine.inputs import Prompt, expanded
from forkpoint.engine.media_urls import NONE_FETCHED, num_media, url_of
from forkpoint.engine.pictures import detail_of, picture_of
from forkpoint.engine.placeholders import image_expansions, video_expansions
from forkpoint.engine.rewriting import Rewritten
from forkpoint.engine.tokenizer import Tokenizer
from forkpoint.engine.video_files import VideoFile
from forkpoint.engine.videos import SizedVideo, Video, check_videos
from forkpoint.errors import InvalidPromptError

PRIVATE_USE: Final = range(0xE000, 0xF900)  # characters that have no meaning of their own


@dataclass(frozen=True, slots=True)
class _Kind:
    """Images, or videos. A template writes `placeholder`, a token, for a part of the type `name`.

    In texts, the character `mark` stands for a part, and `typed` for a placeholder that somebody typed.
    """

    name: str
    placeholder: str
    token_id: int
    mark: str
    typed: str
    given: list[Any]  # the pictures or videos so far


class ChatImages:
    """Reads the images and videos of one conversation, in their order; `take` is called for each."""

    def __init__(
        self,
        messages: Sequence[Message],
        processor: ImageProcessor,
        tokenizer: Tokenizer,
        fetched: Mapping[str, bytes] = NONE_FETCHED,
    ) -> None:
        """`fetched` has the files behind URLs. Raises InvalidPromptError for too many images."""
        processor.check_count(*num_media(messages))  # before any is read
        self._processor, self._tokenizer, self._fetched = processor, tokenizer, fetched
        self._details: list[object] = []
        used = set().union(*(set(text) for message in messages for text in _texts(_without_media(message))))
        unused = (character for character in map(chr, PRIVATE_USE) if character not in used)
        self._kinds: dict[str, _Kind] = {}
        for name, token_id in media_token_ids(processor).items():
            try:
                mark, typed = islice(unused, 2)
            except ValueError:
                raise InvalidPromptError(
                    "the conversation has all private-use characters; leave some of them out"
                ) from None
            placeholder = tokenizer.decode([token_id], skip_special_tokens=False)
            if placeholder:
                self._kinds[name] = _Kind(name, placeholder, token_id, mark, typed, [])

    def take(self, part: Mapping[str, Any]) -> str:
        """Remember the picture or video of a part, and return the character that stands for it in texts.

        Raises InvalidPromptError.
        """
        if part.get("type") in (VIDEO_PART, VIDEO_URL_PART):
            if VIDEO_PART not in self._kinds:
                raise InvalidPromptError(f"the model reads no videos; leave parts of the type {part['type']!r} out")
            kind = self._kinds[VIDEO_PART]
            kind.given.append(self._video_of(part))
            check_videos(kind.given)
            return kind.mark
        self._kinds["image"].given.append(picture_of(part, self._fetched))
        self._details.append(detail_of(part))
        return self._kinds["image"].mark

    def _video_of(self, part: Mapping[str, Any]) -> SizedVideo:
        settings = self._processor.settings.video
        if part["type"] == VIDEO_URL_PART and settings is not None:
            url = url_of(part)
            if isinstance(url, str) and url[: len(FRAMES_HEAD)].lower() == FRAMES_HEAD:
                return FrameFiles.of_url(url, settings.fps, self._processor.settings.background)
            return VideoFile.of_part(part, settings, self._fetched)
        return Video.read(part.get("video"))

    def in_parts(self, rewritten: Rewritten) -> Rewritten:
        """Return the conversation with image and video parts in place of their characters.

        Until `shown_text`, a character stands for each placeholder that somebody typed.
        """
        return replace(
            rewritten,
            conversation=tuple(
                replace(placed, message=self._with_parts(self._hidden(placed.message)))
                for placed in rewritten.conversation
            ),
        )

    def _hidden(self, value: Any) -> Any:
        """Return a value with characters in place of the typed placeholders in its texts, however deep."""
        if isinstance(value, str):
            for kind in self._kinds.values():
                value = value.replace(kind.placeholder, kind.typed)
            return value
        if isinstance(value, Mapping):
            return {name: self._hidden(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._hidden(each) for each in value]
        return value

    def _with_parts(self, message: dict[str, Any]) -> dict[str, Any]:
        texts = content_texts(message)
        names = {kind.mark: kind.name for kind in self._kinds.values()}
        marks = re.compile(f"([{''.join(names)}])")
        if not any(marks.search(text) for text in texts):
            return message
        parts: list[dict[str, str]] = []
        for text in texts:
            for piece in marks.split(text):
                if piece in names:
                    parts.append({"type": names[piece]})
                elif piece:
                    parts.append({"type": "text", "text": piece})
        return {**message, "content": parts}

    def shown_text(self, rendered: str) -> str:
        """Return the rendered text with typed placeholders in place of their characters."""
        for kind in self._kinds.values():
            rendered = rendered.replace(kind.typed, kind.placeholder)
        return rendered

    def shown_at(self, rendered: str, at: int) -> int:
        """Return where the position `at` of `rendered` is in the text that `shown_text` returns."""
        kinds = self._kinds.values()
        return at + sum((len(kind.placeholder) - 1) * rendered.count(kind.typed, 0, at) for kind in kinds)

    def prompt(self, prompt: Prompt, rendered: str, offsets: Sequence[tuple[int, int]]) -> Prompt:
        """Return the prompt with the tokens of its images and videos in place of their placeholders.

        `offsets` are the character ranges of its tokens in its text, `rendered` what the template rendered. Raises
        InvalidPromptError if the template does not show all of them.
        """
        started_s = time.perf_counter()
        starts = [start for start, _ in offsets]
        tokens = {kind.name: self._tokens_of(kind, prompt, rendered, starts) for kind in self._kinds.values()}
        ids, processor = prompt.token_ids, self._processor
        expansions = image_expansions(ids, processor, self._kinds["image"].given, tokens["image"], self._details)
        if tokens.get(VIDEO_PART):
            videos = self._kinds[VIDEO_PART].given
            expansions += video_expansions(ids, processor, videos, self._tokenizer, tokens[VIDEO_PART])
        return expanded(prompt, expansions, started_s)

    def _tokens_of(self, kind: _Kind, prompt: Prompt, rendered: str, starts: Sequence[int]) -> list[int]:
        """Return the token indices of the placeholders that the template wrote.

        `starts` has the place of each token in the text. Raises InvalidPromptError if they are not as many as the
        images, or the tokenizer splits them.
        """
        found = [self.shown_at(rendered, match.start()) for match in re.finditer(re.escape(kind.placeholder), rendered)]
        if len(found) != len(kind.given):
            raise InvalidPromptError(
                f"the chat template shows {len(found)} of the {len(kind.given)} {kind.name}s of the conversation; put "
                f"{kind.name}s where it shows them, such as in the last user message"
            )
        tokens = [bisect_left(starts, place) for place in found]
        if any(token >= len(starts) or prompt.token_ids[token] != kind.token_id for token in tokens):
            raise InvalidPromptError(f"the tokenizer does not read {kind.placeholder!r} as token {kind.token_id}")
        return tokens


def media_token_ids(processor: ImageProcessor) -> dict[str, int]:
    """Return placeholder token ids by the type of a part: of images, and of videos if the model reads them."""
    settings = processor.settings
    found = {"image": settings.image_token_id}
    if settings.video is not None:
        found[VIDEO_PART] = settings.video.token_id
    return found


def _without_media(message: Message) -> Message:
    """Return the message without its images and videos, whose data the model does not see as text."""
    content = member(message, "content")
    if not isinstance(content, list | tuple):
        return message
    return {**message, "content": [part for part in content if not is_media(part)]}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for each in value.values() for text in _texts(each))
    elif isinstance(value, list | tuple):
        yield from (text for each in value for text in _texts(each))
