"""Parameters of one request and their bounds, which hold for Python and HTTP alike."""

from __future__ import annotations

import enum
import json as jsonlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from types import MappingProxyType
from typing import Any, Final, Literal, Self, TypeAlias

from forkpoint.checks import Bounds, Checker, checked_fields, is_text, option
from forkpoint.errors import InvalidParamsError
from forkpoint.vllm_params import OF_SAMPLING, OF_STRUCTURED_OUTPUTS, taking_absent

MAX_N: Final = 256  # pass@k is measured with 200 completions; an API process adds them in one go
MAX_SEED: Final = 2**63 - 1
MAX_LOGPROBS: Final = 20
MAX_INT32: Final = 2**31 - 1  # token ids, positions and counts of them are int32 on the device
MIN_PRIORITY: Final = -(2**31)
MAX_TEMPERATURE: Final = 1e6
PENALTIES: Final = Bounds(-2.0, 2.0)
REPETITION_PENALTIES: Final = Bounds(0.01, 100.0)  # outside, logits could overflow
LOGIT_BIASES: Final = Bounds(-100.0, 100.0)
MODEL: Final = "the model's, else "  # prefix of help texts whose default comes from the model
# Lists are bounded, because they cost time in each step, which other requests share.
MAX_BIASED_TOKENS: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 4096
MAX_ALLOWED_TOKEN_IDS: Final = 2**18  # every id of the largest vocabularies; all `n` completions together
MAX_BREAKPOINTS: Final = 4096
MAX_STOPS: Final = 64  # OpenAI takes 4
MAX_STOP_CHARS: Final = 4096  # all stop strings together; this much text may be held back while one could begin in it
MAX_BAD_WORDS: Final = 1024
MAX_BAD_WORD_CHARS: Final = 16384  # all bad words together
MAX_SALT_CHARS: Final = 1024
MAX_THINKING_END_CHARS: Final = 1024

# Thinking stands at the start of an answer and ends with `</think>`. "none": the answer has no thinking. "optional":
# it has thinking if it begins with `<think>`. "open": it begins inside thinking, which the prompt has opened.
Thinking: TypeAlias = Literal["none", "optional", "open"]
THINK: Final = "<think>"
THINK_END: Final = "</think>"
THINKING_END: Final = f"\n{THINK_END}\n\n"  # the end of thinking as most chat templates write it

_CHECK: Final = Checker(InvalidParamsError, "sampling parameter ")
# What errors call the descriptions of an output. Each API has a field of its own for the schema.
OUTPUT_WORDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "json": "the JSON schema",
        "json_object": "the JSON schema",
        "regex": "the regular expression",
        "choice": "the list of choices",
        "grammar": "the grammar",
        "structural_tag": "the structural tag",
    }
)
CHOICES: Final = "a list of texts (valid Unicode), not all of them empty"
LAST_TOKENS: Final = f"None, -1 (as many as have room) or an integer from 1 to {MAX_INT32}"


@enum.unique
class FinishReason(enum.StrEnum):
    """Why a completion ended. The values are those of OpenAI's API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@enum.unique
class RequestOutputKind(enum.Enum):
    """What each output of `LLM.stream` has. `LLM.generate` and `LLM.chat` always return whole outputs."""

    CUMULATIVE = 0  # all of the output so far
    DELTA = 1  # only what is new
    FINAL_ONLY = 2  # all of the output, once it is whole


@taking_absent(OF_STRUCTURED_OUTPUTS)
@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """A constraint on the output. Exactly one form is given. Names are vLLM's.

    `json` is a JSON schema (a mapping becomes its text), `json_object` allows any JSON object, `regex` and
    `grammar` (GBNF or Lark) match the whole output, `choice` lists texts, `structural_tag` is xgrammar's
    description (a mapping becomes its text) of free text with constrained parts, such as tool calls.
    With `disable_any_whitespace`, JSON has the form of `json.dumps`, without line breaks; the engine's
    `structured_outputs_config` can set it for all requests.
    Raises InvalidParamsError for none, several, or values of a wrong type.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        for name in ("json", "structural_tag"):
            if isinstance(value := getattr(self, name), Mapping):
                object.__setattr__(self, name, _json_text(name, value))
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        if isinstance(self.choice, Collection) and not isinstance(self.choice, str | Mapping):
            with suppress(TypeError):  # a zero-dimensional array, which is refused below
                object.__setattr__(self, "choice", tuple(self.choice))
        names = [item.name for item in fields(self) if item.name != "disable_any_whitespace"]
        given = [name for name in names if getattr(self, name) is not None]
        _CHECK.require(len(given) == 1, "structured_outputs", given, f"exactly one of {names}")
        (name,) = given
        value = getattr(self, name)
        if name == "choice":
            ok, allowed = isinstance(value, tuple) and all(map(is_text, value)) and any(value), CHOICES
        elif name == "json_object":
            ok, allowed = value is True, "True"
        else:
            ok, allowed = is_text(value) and bool(value), "a text of valid Unicode that is not empty"
            if name == "json":
                allowed = "a JSON schema as a dict, such as Model.model_json_schema(), or as a text"
        _CHECK.require(ok, f"structured_outputs.{name}", value, allowed)
        _CHECK.flag("structured_outputs.disable_any_whitespace", self.disable_any_whitespace)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallsParams:
    """A constraint on the tool calls in an output: `structure` matches what follows the token `opening`.

    Other text is free, and so is the text after a call.
    """

    opening: str
    structure: StructuredOutputsParams


@taking_absent(OF_SAMPLING)
@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How to sample, and when to stop. Names and defaults are vLLM's. Fields may be changed: each call checks its copy.

    `temperature` 0 is greedy; `top_k` 0 or -1 keeps all tokens; `logprobs` and `prompt_logprobs` are how many
    alternatives to report per token (0: only the chosen one). `cache_breakpoints` are prompt positions, in
    tokens, at which another prompt is expected to part from this one (the end of a system prompt, say).
    Under `structured_outputs` the output matches a grammar and ends with it, `min_tokens` or not.
    `bad_words` are texts that the output must not contain, at the start of a word or within one; of ids other than
    `allowed_token_ids` none comes. `truncate_prompt_tokens` keeps so many of the prompt's last tokens, -1 as many as
    leave room for `max_tokens`.
    `thinking` says whether the answer begins with thinking: `open` if the prompt has opened `<think>`, `optional` if
    the model may. Stop strings and `structured_outputs` then concern only what follows `</think>`.
    Thinking ends after `thinking_token_budget` tokens (None or -1: no limit): `thinking_end`, a text with `</think>`,
    then follows, whatever the model would say. Tokens of the tags and of that text do not count.
    `call_openings` are texts that open a tool call. An output that begins with one of them, after any thinking, need
    not match `structured_outputs`. Without `structured_outputs`, `calls` constrains the tool calls in the output.
    `kv_transfer_params` are those with which vLLM's proxies split a request between a prefill and a decode engine.
    Without `detokenize` outputs have ids and no text. `skip_reading_prefix_cache` computes the whole prompt, and caches
    it as usual. `output_kind` says what the outputs of `LLM.stream` have.
    None is taken for an empty text, list or mapping, -1 for a random seed, True for one alternative of `logprobs`,
    numpy's numbers for Python's, and a mapping for StructuredOutputsParams. Raises InvalidParamsError for values of a
    wrong type or out of range, and for fields of vLLM's that ask for what is missing here.
    """

    n: int = option(1, bounds=Bounds(1, MAX_N))
    temperature: float = option(1.0, "0 takes the most likely token", Bounds(0.0, MAX_TEMPERATURE), origin=MODEL)
    top_p: float = option(
        1.0, "sample among the most likely tokens that make up this share", Bounds(0.0, 1.0, above=True), origin=MODEL
    )
    top_k: int = option(
        0,
        "sample among so many most likely tokens; 0 or -1 takes all",
        Bounds(-1, MAX_INT32),
        origin=MODEL,
        allowed=f"-1 or 0 (all) or an integer up to {MAX_INT32}",
    )
    min_p: float = option(
        0.0, "drop tokens less likely than this share of the most likely one", Bounds(0.0, 1.0), origin=MODEL
    )
    presence_penalty: float = option(0.0, "subtracted once from tokens already in the answer", PENALTIES)
    frequency_penalty: float = option(0.0, "subtracted per occurrence from tokens already in the answer", PENALTIES)
    repetition_penalty: float = option(
        1.0, "divides the scores of tokens already seen", REPETITION_PENALTIES, origin=MODEL
    )
    seed: int | None = option(None, bounds=Bounds(0, MAX_SEED))
    max_tokens: int | None = option(16, "longest answer, in tokens", Bounds(1, MAX_INT32))
    min_tokens: int = option(0, "tokens before which nothing ends the answer", Bounds(0, MAX_INT32))
    stop: str | Sequence[str] = option((), "end the answer before this text; may be given several times")
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = option(False, "go on after the end-of-sequence token")
    include_stop_str_in_output: bool = False
    logprobs: int | None = option(None, bounds=Bounds(0, MAX_LOGPROBS))
    prompt_logprobs: int | None = option(None, bounds=Bounds(0, MAX_LOGPROBS))
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    cache_salt: str = option("", "prompts share cached prefixes only under the same salt", Bounds(0, MAX_SALT_CHARS))
    cache_breakpoints: Sequence[int] = ()
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    truncate_prompt_tokens: int | None = option(None, bounds=Bounds(-1, MAX_INT32), allowed=LAST_TOKENS)
    thinking: Thinking = "none"
    thinking_token_budget: int | None = option(
        None,
        bounds=Bounds(-1, MAX_INT32),
        allowed=f"None or -1 (no limit) or an integer from 0 to {MAX_INT32}",
    )
    thinking_end: str = option(THINKING_END, bounds=Bounds(1, MAX_THINKING_END_CHARS))
    call_openings: Sequence[str] = ()
    calls: CallsParams | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    detokenize: bool = True
    skip_reading_prefix_cache: bool | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self._set(_respelled(self))
        self._set({**checked_fields(self, _CHECK, "None or "), **_lists(self)})
        _CHECK.require(self.truncate_prompt_tokens != 0, "truncate_prompt_tokens", 0, LAST_TOKENS)
        least, most = self.min_tokens, self.max_tokens
        _CHECK.require(most is None or least <= most, "min_tokens", least, f"at most max_tokens={most}")
        ends = THINK_END in self.thinking_end
        _CHECK.require(ends, "thinking_end", self.thinking_end, f"a text with {THINK_END}")
        value = self.structured_outputs
        ok = value is None or isinstance(value, StructuredOutputsParams)
        _CHECK.require(ok, "structured_outputs", value, "None or StructuredOutputsParams(...)")
        ok = self.calls is None or (isinstance(self.calls, CallsParams) and value is None)
        _CHECK.require(ok, "calls", self.calls, "None, or CallsParams(...) without structured_outputs")
        if self.stop and not self.detokenize:
            _CHECK.refuse("detokenize", False, "True with stop, whose strings are found in the text, or stop_token_ids")
        if self.kv_transfer_params is not None:
            self._set({"kv_transfer_params": _json_copy("kv_transfer_params", self.kv_transfer_params)})

    def _set(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def clone(self) -> Self:
        """Return a copy. Raises InvalidParamsError if a field was changed to a value that is not allowed."""
        return replace(self)

    @classmethod
    def from_optional(cls, **given: Any) -> Self:
        """Create parameters as vLLM does from optional fields: None stands for the default."""
        return cls(**{name: value for name, value in given.items() if value is not None})

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def restricts_tokens(self) -> bool:
        """Whether some token ids may be excluded, so that the request needs TokenRules."""
        named = self.allowed_token_ids is not None or bool(self.bad_words)
        return self.structured_outputs is not None or self.calls is not None or named or self.limits_thinking

    @property
    def limits_thinking(self) -> bool:
        """Whether the answer may think, but only for a number of tokens."""
        return self.thinking != "none" and self.thinking_token_budget not in (None, -1)

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


def checked_priority(value: object) -> int:
    """Return a request's priority; the smallest runs first. Raises InvalidParamsError for a wrong one."""
    return Checker(InvalidParamsError).integer("priority", value, MIN_PRIORITY, MAX_INT32)


def _respelled(given: Any) -> dict[str, Any]:
    """Return the fields of SamplingParams that have other spellings, in their own. Raises InvalidParamsError."""
    found: dict[str, Any] = {}
    if given.cache_salt is None:
        found["cache_salt"] = ""
    if isinstance(given.seed, Integral) and given.seed == -1:
        found["seed"] = None
    found |= {name: 1 for name in ("logprobs", "prompt_logprobs") if getattr(given, name) is True}
    kinds: Mapping[str, RequestOutputKind] = RequestOutputKind.__members__
    if isinstance(wanted := given.structured_outputs, Mapping):
        found["structured_outputs"] = StructuredOutputsParams(**{str(name): value for name, value in wanted.items()})
    name = str(getattr(given.output_kind, "name", ""))  # vLLM's own members have the same names
    if name not in kinds:
        _CHECK.refuse("output_kind", given.output_kind, f"a member of RequestOutputKind: {', '.join(kinds)}")
    return {**found, "output_kind": kinds[name]}


def _lists(given: SamplingParams) -> dict[str, Any]:
    """Return the checked lists. Scripts for vLLM append to some of them."""
    stop_token_ids = _CHECK.integers("stop_token_ids", given.stop_token_ids, MAX_STOP_TOKEN_IDS, 0, MAX_INT32)
    return {
        "stop": list(_texts("stop", given.stop, MAX_STOPS, MAX_STOP_CHARS)),
        "stop_token_ids": list(stop_token_ids),
        "cache_breakpoints": tuple(
            sorted(set(_CHECK.integers("cache_breakpoints", given.cache_breakpoints, MAX_BREAKPOINTS, 0, MAX_INT32)))
        ),
        "logit_bias": _logit_bias(given.logit_bias),
        "call_openings": _texts("call_openings", given.call_openings, MAX_STOPS, MAX_STOP_CHARS),
        "bad_words": list(_texts("bad_words", given.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)),
        "allowed_token_ids": _allowed(given),
    }


def _allowed(given: SamplingParams) -> tuple[int, ...] | None:
    if given.allowed_token_ids is None:
        return None
    most = MAX_ALLOWED_TOKEN_IDS // int(given.n)  # each completion carries a copy
    found = _CHECK.integers("allowed_token_ids", given.allowed_token_ids, most, 0, MAX_INT32)
    _CHECK.require(bool(found), "allowed_token_ids", given.allowed_token_ids, "None or at least one id")
    return found


def _texts(name: str, value: object, most: int, most_chars: int) -> tuple[str, ...]:
    """Return a text or a list of texts as a tuple. None of them may be empty."""
    items = (
        (value,) if isinstance(value, str) else _CHECK.items(name, value, most, f"a text or a list of at most {most}")
    )
    texts = tuple(_CHECK.text(name, item, most_chars, empty=False) for item in items)
    total = sum(map(len, texts))
    _CHECK.require(total <= most_chars, name, f"{total} characters", f"at most {most_chars} in all")
    return texts


def _logit_bias(given: object) -> dict[int, float]:
    """Return biases by token id. Keys may be texts, as in JSON; None is empty. Raises InvalidParamsError."""
    if given is None:
        return {}
    allowed = f"at most {MAX_BIASED_TOKENS} token ids, each with a number from -100 to 100"
    if not isinstance(given, Mapping) or len(given) > MAX_BIASED_TOKENS:
        _CHECK.refuse("logit_bias", given, allowed)
    found = {}
    for key, bias in given.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10 else key
        value = _CHECK.number("logit_bias", bias, LOGIT_BIASES)
        found[_CHECK.integer("logit_bias", token, 0, MAX_INT32, allowed)] = value
    return found


def _json_copy(name: str, given: object) -> dict[str, Any]:
    """Return a mapping as a client sends it in JSON. Its integers have at most 64 bits, which all processes take."""
    if isinstance(given, Mapping):
        with suppress(TypeError, ValueError, OverflowError, RecursionError):
            text = jsonlib.dumps(dict(given), allow_nan=False, ensure_ascii=False)
            text.encode()  # raises for lone surrogates
            copy: dict[str, Any] = jsonlib.loads(text, parse_int=_in_64_bits)
            return copy
    _CHECK.refuse(name, given, "None or a JSON object, as a prefill engine answers it")


def _in_64_bits(digits: str) -> int:
    value = int(digits)
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"{digits} does not fit in 64 bits")
    return value


def _json_text(name: str, value: Mapping[str, Any]) -> str:
    try:
        return jsonlib.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        text = f"sampling parameter structured_outputs.{name} is not JSON: {error}"
        raise InvalidParamsError(text) from error
