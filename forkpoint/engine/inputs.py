"""Turns prompts and sampling parameters into scheduler requests, and checks everything before anything runs."""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NotRequired, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from forkpoint.checks import Checker, one_or_more, plain_members, shown
from forkpoint.engine.image_processor import ImageProcessor, why_no_images
from forkpoint.engine.placeholders import Expansion, expand, image_expansions, video_expansions
from forkpoint.engine.tokenizer import Tokenizer
from forkpoint.engine.videos import EXAMPLE as VIDEO_EXAMPLE
from forkpoint.engine.videos import Video, read_videos
from forkpoint.errors import InvalidParamsError, InvalidPromptError, PromptTooLongError
from forkpoint.grammar.compiler import GrammarCompiler
from forkpoint.images import ImageSpan
from forkpoint.json_options import StructuredOutputsConfig
from forkpoint.params import MAX_SALT_CHARS, MAX_SEED, SamplingParams, checked_priority
from forkpoint.sched.plan import IntArray
from forkpoint.sched.request import Request


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A tokenised prompt.

    `breakpoints` are positions in tokens that the caller gave. `num_dropped` tokens were cut off at the beginning. The
    placeholder tokens of `images` are among the token ids. Decoding and resizing the images took `images_s` seconds.
    `cache_salt` takes precedence over that of the parameters, unless it is empty.
    """

    token_ids: IntArray
    text: str | None = None
    breakpoints: tuple[int, ...] = ()
    num_dropped: int = 0
    images: tuple[ImageSpan, ...] = ()
    images_s: float = 0.0
    cache_salt: str = ""

    @property
    def num_image_tokens(self) -> int:
        return self.num_image_tokens_before(len(self.token_ids))

    def num_image_tokens_before(self, position: int) -> int:
        """Return the number of image tokens among the first `position` tokens."""
        return sum(max(0, min(image.end, position) - image.start) for image in self.images)

    def last(self, count: int) -> Prompt:
        """Return the prompt's last `count` tokens, with its text unchanged; itself if it has no more.

        Raises InvalidPromptError if tokens of a prompt with images would be cut off.
        """
        cut = len(self.token_ids) - count
        if cut <= 0:
            return self
        if self.images:
            raise InvalidPromptError(
                f"a prompt with images cannot be truncated to {count} of its {len(self.token_ids)} tokens; shorten it "
                "or leave truncate_prompt_tokens out"
            )
        breakpoints = tuple(position - cut for position in self.breakpoints if position > cut)
        return replace(
            self, token_ids=self.token_ids[cut:], breakpoints=breakpoints, num_dropped=self.num_dropped + cut
        )


class PromptOptions(TypedDict, total=False):
    """Members that any prompt dict may have. `cache_salt` takes the place of the one of the parameters."""

    multi_modal_data: Mapping[str, Any] | None
    mm_processor_kwargs: Mapping[str, Any] | None
    cache_salt: str | None


class TextPrompt(PromptOptions):
    """A prompt dict with a text. Names are vLLM's."""

    prompt: str


class TokensPrompt(PromptOptions):
    """A prompt dict with token ids. Outputs repeat the text in `prompt`. Names are vLLM's."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str | None]


PromptInput: TypeAlias = "str | Sequence[int] | Mapping[str, object] | Prompt"
NO_EFFECT: Final = {"media_io_kwargs", "multi_modal_uuids", "prompt_token_offsets", "token_type_ids"}  # vLLM's


@dataclass(frozen=True, slots=True)
class InputProcessor:
    """Creates requests from prompts and parameters, and checks both against the model.

    Its requests have no grammar yet. The engine that runs them starts one with `grammars`.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    seed: int
    structured_outputs: StructuredOutputsConfig = field(default_factory=StructuredOutputsConfig)
    images: ImageProcessor | None = None  # None: the model reads no images
    grammars: GrammarCompiler = field(init=False, repr=False, compare=False)
    tool_call_token_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        compact = self.structured_outputs.disable_any_whitespace
        grammars = GrammarCompiler(self.tokenizer, self.vocab_size, self.eos_token_ids, compact=compact)
        object.__setattr__(self, "grammars", grammars)
        found: frozenset[int] = frozenset()
        if self.tokenizer is not None:
            found = self.tokenizer.tool_call_token_ids
        object.__setattr__(self, "tool_call_token_ids", found)

    def prompt(self, given: PromptInput, params: SamplingParams | None = None) -> Prompt:
        """Return a prompt tokenised, truncated as `params` say, with its images read, and checked.

        Raises a RequestError, which says what was given and what is allowed.
        """
        if isinstance(given, Mapping):
            return self._prompt_of_mapping(given, params)
        if isinstance(given, Prompt):
            prompt = given
        elif isinstance(given, str):
            if self.tokenizer is None:
                raise InvalidPromptError("the engine was started without a tokenizer; give token ids, not text")
            prompt = Prompt(np.asarray(self.tokenizer.encode(given), np.int32), given)
        else:
            ids = _integers(given)
            self._check_ids(ids)
            prompt = Prompt(ids.astype(np.int32))
        prompt = self._cut(prompt, params)
        self._check_ids(prompt.token_ids)
        self._check_length(prompt)
        return prompt

    def _cut(self, prompt: Prompt, params: SamplingParams | None) -> Prompt:
        if params is None or (keep := params.truncate_prompt_tokens) is None:
            return prompt
        if keep == -1:
            keep = max(1, self.max_model_len - (params.max_tokens or 1))
        if keep >= self.max_model_len:
            raise InvalidParamsError(
                f"sampling parameter truncate_prompt_tokens={keep} is not allowed; with max_model_len="
                f"{self.max_model_len} give at most {self.max_model_len - 1}, or -1"
            )
        return prompt.last(keep)

    def requests(
        self, request_id: str, prompt: Prompt, params: SamplingParams, *, priority: int, number: int, arrival_s: float
    ) -> list[Request]:
        """Return the `n` requests of one prompt, with ids `request_id` for the first and `request_id#i` for the others.

        `number` counts the engine's requests. It makes the seeds of requests differ if the caller gives none.
        `arrival_s` is a reading of the caller's clock. Raises InvalidParamsError if `params` do not fit the prompt or
        the vocabulary.
        """
        room = self.max_model_len - len(prompt.token_ids)
        priority = checked_priority(priority)
        if prompt.cache_salt:
            params = replace(params, cache_salt=prompt.cache_salt)
        stops = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= self.eos_token_ids
        self._check_params(prompt, params, room, stops)
        own = {position - prompt.num_dropped for position in params.cache_breakpoints if position > prompt.num_dropped}
        breakpoints = tuple(sorted({*prompt.breakpoints, *own}))
        base = params.seed
        if base is None:
            base = derive_seed(self.seed, number)
        each = [(params, base)]
        if params.n > 1:
            others = replace(params, prompt_logprobs=None)  # only the first request reports those of the prompt
            each += [(others, derive_seed(base, index)) for index in range(1, params.n)]
        return [
            Request(
                id=sequence_id(request_id, index),
                prompt_token_ids=prompt.token_ids,
                params=own_params,
                max_tokens=min(params.max_tokens or room, room),
                seed=seed,
                stop_token_ids=stops,
                breakpoints=breakpoints,
                priority=priority,
                arrival_s=arrival_s,
                tool_call_token_ids=self.tool_call_token_ids,
                images=prompt.images,
            )
            for index, (own_params, seed) in enumerate(each)
        ]

    def _prompt_of_mapping(self, given: Mapping[str, object], params: SamplingParams | None) -> Prompt:
        """Return the prompt of a dict, expanded and checked, with its images, videos and salt.

        Raises InvalidPromptError.
        """
        key = next((key for key in ("prompt_token_ids", "prompt") if given.get(key) is not None), None)
        if key is None:
            hint = "; give its 'input_ids'" if "input_ids" in given else ""  # as a tokenizer of transformers returns
            raise InvalidPromptError(
                f"a prompt dict needs 'prompt' or 'prompt_token_ids'; it has {shown(list(given))}{hint}"
            )
        allowed = TokensPrompt.__annotations__
        for name in given.keys() - allowed.keys() - NO_EFFECT:
            if given[name] is not None:
                raise InvalidPromptError(f"a prompt dict has no member {shown(name)}; give {', '.join(allowed)}")
        salt = given.get("cache_salt")
        salt = Checker(InvalidPromptError).text("cache_salt", "" if salt is None else salt, MAX_SALT_CHARS)
        prompt = self._prompt_with_media(given[key], given, params)
        prompt = replace(prompt, cache_salt=salt or prompt.cache_salt)
        if isinstance(text := given.get("prompt"), str):
            prompt = replace(prompt, text=text)
        return prompt

    def _prompt_with_media(self, inner: Any, given: Mapping[str, object], params: SamplingParams | None) -> Prompt:
        """Return the prompt `inner` of a dict with its images and videos. Raises InvalidPromptError.

        A placeholder counts as one token until it is expanded.
        """
        pictures, videos = _media(given.get("multi_modal_data"))
        if not pictures and not videos:
            return self.prompt(inner, params)
        if self.images is None:
            raise InvalidPromptError(why_no_images())
        processor = self.images.with_kwargs(processor_kwargs(given.get("mm_processor_kwargs")))
        prompt, started_s = self.prompt(inner), time.perf_counter()
        expansions = list[Expansion]()
        if pictures:
            expansions += image_expansions(prompt.token_ids, processor, pictures)
        if videos:
            expansions += video_expansions(prompt.token_ids, processor, videos, self.tokenizer)
        return self.prompt(expanded(prompt, expansions, started_s), params)

    def _check_ids(self, token_ids: np.ndarray[tuple[int, ...], np.dtype[np.integer]]) -> None:
        if not len(token_ids):
            raise InvalidPromptError("the prompt is empty; give at least one token")
        if token_ids.min() < 0 or token_ids.max() >= self.vocab_size:
            unknown = token_ids[(token_ids < 0) | (token_ids >= self.vocab_size)]
            raise InvalidPromptError(
                f"token id {int(unknown[0])} is unknown; the model has ids 0 to {self.vocab_size - 1}"
            )

    def _check_length(self, prompt: Prompt) -> None:
        count = len(prompt.token_ids)
        if count >= self.max_model_len:
            raise PromptTooLongError.of(count, self.max_model_len - 1, "tokens", self.max_model_len)

    def _check_params(self, prompt: Prompt, params: SamplingParams, room: int, stops: frozenset[int]) -> None:
        if params.min_tokens > room:
            raise InvalidParamsError(
                f"sampling parameter min_tokens={params.min_tokens} is not allowed; a prompt of "
                f"{len(prompt.token_ids)} tokens leaves room for {room} (max_model_len={self.max_model_len})"
            )
        if params.stop and self.tokenizer is None:
            raise InvalidParamsError("stop strings need a tokenizer; give stop_token_ids instead")
        if params.bad_words and self.tokenizer is None:
            raise InvalidParamsError("bad_words need a tokenizer; give allowed_token_ids or logit_bias instead")
        allowed = params.allowed_token_ids or ()
        for name, ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", tuple(params.logit_bias)),
            ("allowed_token_ids", allowed),
        ):
            bad = [token for token in ids if token >= self.vocab_size]
            if bad:
                raise InvalidParamsError(
                    f"sampling parameter {name} names token id {bad[0]}; the model has ids 0 to {self.vocab_size - 1}"
                )
        every = stops.issuperset(allowed or range(self.vocab_size))
        if params.min_tokens and every and params.structured_outputs is None:
            raise InvalidParamsError(
                f"sampling parameter min_tokens={params.min_tokens} is not allowed where every id that may come is in "
                "stop_token_ids, since no token could come; leave one of the two out"
            )
        length = len(prompt.token_ids) + prompt.num_dropped
        beyond = [position for position in params.cache_breakpoints if position > length]
        if beyond:
            raise InvalidParamsError(
                f"sampling parameter cache_breakpoints names position {beyond[0]}; the prompt ends at {length}"
            )


def expanded(prompt: Prompt, expansions: Sequence[Expansion], started_s: float) -> Prompt:
    """Return the prompt with images and videos, and a breakpoint after each.

    Their reading began at `started_s`, by `time.perf_counter`.
    """
    found = expand(prompt.token_ids, expansions)
    moved = {int(found.positions[position]) for position in prompt.breakpoints} | set(found.ends)
    return replace(
        prompt,
        token_ids=found.token_ids,
        breakpoints=tuple(sorted(moved)),
        images=found.images,
        images_s=time.perf_counter() - started_s,
    )


def processor_kwargs(given: object) -> Mapping[str, Any] | None:
    """Return a request's image settings as they are, or None. Raises InvalidPromptError for anything else."""
    if given is not None and not isinstance(given, Mapping):
        raise InvalidPromptError(
            f"mm_processor_kwargs={shown(given)} is not allowed; give the settings of the model's images, such as "
            "max_pixels for Qwen3.5 and max_image_tokens for LFM2-VL, in a dict"
        )
    return given


def _media(data: object) -> tuple[list[Any], list[Video]]:
    """Return the images and the videos of `multi_modal_data`. Raises InvalidPromptError for data of another kind."""
    if data is None:
        return [], []
    if not isinstance(data, Mapping) or set(data) - {"image", "video"}:
        raise InvalidPromptError(
            f"multi_modal_data={shown(data)} is not understood; give {{'image': a PIL image or a list of them}}, or "
            f"{{'video': {VIDEO_EXAMPLE}}}"
        )
    found = data.get("image")
    pictures = []
    if found is not None:
        pictures = one_or_more(found)
    return pictures, read_videos(data.get("video"))


def sequence_id(request_id: str, index: int) -> str:
    return request_id if index == 0 else f"{request_id}#{index}"


def derive_seed(seed: int, index: int) -> int:
    """Derive an independent seed from a seed and an index. It is the same on every machine."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED


def _integers(given: object) -> npt.NDArray[np.int64]:
    allowed = "a text, a list of token ids, or a dict with 'prompt' or 'prompt_token_ids'"
    if not isinstance(given, Sequence | np.ndarray | memoryview):
        given = plain_members(given)  # a tensor's
    if isinstance(given, bytes | bytearray | memoryview) or (isinstance(given, np.ndarray) and given.ndim != 1):
        raise InvalidPromptError(f"{shown(given)} is not a prompt; give {allowed}")
    if not isinstance(given, Sequence | np.ndarray):
        raise InvalidPromptError(f"a prompt cannot be of type {type(given).__name__}; give {allowed}")
    # A subclass may have more than integers: a masked array has a number of its own where one is missing.
    if type(given) is np.ndarray and given.dtype.kind in "iu" and np.can_cast(given.dtype, np.int64):
        return given.astype(np.int64)
    try:
        # `pack` refuses values that are not integers, except bools, and is several times as fast as numpy on a list.
        ids = np.frombuffer(struct.pack(f"{len(given)}q", *given), np.int64)
    except Exception:  # struct.error, and any error that a value raises on conversion
        return _checked_integers(given, allowed)
    small = np.flatnonzero((ids == 0) | (ids == 1)).tolist()
    if any(isinstance(given[i], bool | np.bool_) for i in small):
        return _checked_integers(given, allowed)
    return ids


def _checked_integers(given: Sequence[Any] | npt.NDArray[Any], allowed: str) -> npt.NDArray[np.int64]:
    """Return the values as ids, or raise InvalidPromptError that names the first that is not an integer.

    Values too large for int64 become an id that no model has.
    """
    for value in given:
        if isinstance(value, bool | np.timedelta64) or not isinstance(value, int | np.integer):
            raise InvalidPromptError(f"{shown(value)} is not a token id; give {allowed}")
    return np.asarray([min(max(int(value), -1), 2**62) for value in given], np.int64)
