"""Base types of request bodies and answers, with OpenAI's names. The OpenAPI document is generated from them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from types import MappingProxyType, NoneType
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator

from forkpoint.checks import MAX_INTEGER
from forkpoint.media_limits import MediaKind
from forkpoint.params import MAX_INT32
from forkpoint.server.errors import HTTPError

MAX_SHOWN: Final = 64  # characters of an unknown name that the log shows
MAX_UNUSED: Final = 16  # unknown fields of one request that are kept, so that the log can name them
SCALAR: Final = re.compile(r"-?(0|[1-9][0-9]{0,19})(\.[0-9]{1,19})?([eE][+-]?[0-9]{1,3})?|[tT]rue|[fF]alse")
MAX_WHOLE: Final = 2.0**64  # larger than any integer that a field takes
RULES_TEXT: Final = files("forkpoint.server").joinpath("fields.yaml").read_text("utf-8")
RULES: Final[Mapping[str, Any]] = MappingProxyType(
    yaml.load(RULES_TEXT, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # the loader in C is ten times as fast
)


class Body(BaseModel):
    """A part of a request. Unknown members are kept, since chat templates may read them."""

    model_config = ConfigDict(extra="allow", strict=True)


def at_most(most: int) -> BeforeValidator:
    """Return a validator that refuses a mapping of more than `most` entries. It runs before each entry is validated."""

    def check(given: object) -> object:
        if isinstance(given, Mapping) and len(given) > most:
            raise ValueError(f"at most {most} entries")
        return given

    return BeforeValidator(check)


class FirstError(FailFast):
    """pydantic's FailFast, made hashable: pydantic hashes the members of a union."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


T = TypeVar("T")
Many = Annotated[list[T], FirstError()]  # a list that may be long; checking stops at its first wrong element


def _without_empty(given: object) -> object:
    """Return stop strings without empty ones and nulls, which clients send for none."""
    if isinstance(given, list):
        return [text for text in given if text not in ("", None)]
    return given or None


Stops = Annotated[str | Many[str] | None, BeforeValidator(_without_empty)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
MaxTokens = Annotated[int, Field(ge=1, le=MAX_INTEGER)]  # above MAX_INT32 there is no limit
TransferParams = Annotated[
    dict[str, Any] | None, Field(description="from a proxy that splits requests between prefill and decode engines")
]


class RequestBody(Body):
    """The body of a request. The sections `apis` of fields.yaml say how fields without a meaning here are treated.

    A null field counts as missing. A field that this server does not know is ignored, and `unused_fields` reports it.
    A field is refused if the answer would be wrong without it. `path` is the address that takes the body.
    """

    path: ClassVar[str]
    no_effect: ClassVar[frozenset[str]]
    other_names: ClassVar[Mapping[str, str]]
    other_values: ClassVar[Mapping[str, Mapping[object, object]]]
    ignored: ClassVar[Mapping[str, str]]
    refused: ClassVar[Mapping[str, Any]]

    def __init_subclass__(cls, *, path: str = "", apis: tuple[str, ...] = (), **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.path = path
        if apis:
            cls.no_effect = frozenset(" ".join(RULES[api].get("no_effect", "") for api in apis).split())
            cls.ignored = {name: do for api in apis for name, do in RULES[api].get("ignored", {}).items()}
            cls.other_names = {name: own for api in apis for name, own in RULES[api].get("other_names", {}).items()}
            cls.other_values = {name: own for api in apis for name, own in RULES[api].get("other_values", {}).items()}
            cls.refused = {name: rule for api in apis for name, rule in RULES[api].get("refused", {}).items()}

    @model_validator(mode="before")
    @classmethod
    def _drop_unused(cls, given: object) -> object:
        """Leave out nulls, and unknown fields beyond `MAX_UNUSED`: pydantic's time grows with their number squared.

        Other names of a field become its own name, and other values its own. Raises HTTPError if a request gives both
        names with different values.
        """
        if not isinstance(given, dict):
            return given
        fields = {name: value for name, value in given.items() if value is not None}
        for name in cls.other_names.keys() & fields.keys():
            own, value = cls.other_names[name], fields.pop(name)
            if fields.setdefault(own, value) != value:
                raise HTTPError(
                    400, f"{name} is another name of {own}, which is given too; give one of them", param=name
                )
        for name in _scalar_fields(cls).keys() & fields.keys():
            fields[name] = _scalar(fields[name], is_flag=_scalar_fields(cls)[name])
        for name in cls.other_values.keys() & fields.keys():
            if isinstance(value := fields[name], str | int) and not isinstance(value, bool):
                fields[name] = cls.other_values[name].get(value, value)
        known = cls.model_fields.keys() | cls.no_effect | cls.ignored.keys() | cls.refused.keys()
        unknown = [name for name in fields if name not in known]
        for name in unknown[MAX_UNUSED:]:
            del fields[name]
        return fields

    @model_validator(mode="after")
    def _check_refused(self) -> RequestBody:
        given = self.model_extra or {}
        for name, rule in self.refused.items():
            if name in given and given[name] not in rule.get("neutral", ()):
                text = f"{name} is not supported; {rule['do']}"
                raise HTTPError(rule.get("status", 400), text, param=name, code=rule.get("code"))
        return self

    def unused_fields(self) -> list[str]:
        """Return a sentence for the log about each ignored field that may matter to the client."""
        known = self.no_effect | self.refused.keys()
        return [self._unused(name) for name in self.model_extra or {} if name not in known]

    @classmethod
    def _unused(cls, name: str) -> str:
        if name in cls.ignored:
            return f"requests to {cls.path} have the field {name!r}, which is ignored; {cls.ignored[name]}"
        shown = name[:MAX_SHOWN]
        near = get_close_matches(shown, cls.model_fields, n=1, cutoff=0.8)
        hint = f"did you mean {near[0]!r}?" if near else "/docs lists the fields that have a meaning"
        return f"requests to {cls.path} have the field {shown!r}, which is unknown there and ignored; {hint}"

    @classmethod
    def document(cls, schema: dict[str, Any]) -> None:
        """Add to the OpenAPI document's `schema` what other servers' clients may send."""
        for name in sorted(_scalar_fields(cls)):
            _also(schema["properties"][name], {"type": "string", "pattern": f"^({SCALAR.pattern})$"})
        for name in sorted(cls.other_values.keys() & cls.model_fields):
            _also(schema["properties"][name], {"enum": list(cls.other_values[name])})
        for name in sorted(cls.no_effect - set(cls.model_fields)):
            schema["properties"][name] = {"description": "accepted; changes nothing in the answer's text"}
        for name, own in sorted(cls.other_names.items()):
            schema["properties"][name] = {"description": f"another name of {own}"}
        for name, do in sorted(cls.ignored.items()):
            schema["properties"].setdefault(name, {"description": f"accepted and ignored; {do}"})

    model_config = ConfigDict(json_schema_extra=lambda schema, cls: cls.document(schema))


@cache
def _scalar_fields(body: type[BaseModel]) -> Mapping[str, bool]:
    """Return the fields that take only numbers or truth values, and whether a field takes truth values alone."""
    types = {name: _types(field.annotation) - {NoneType} for name, field in body.model_fields.items()}
    return {name: found == {bool} for name, found in types.items() if found <= {int, float, bool}}


def _types(annotation: Any) -> set[Any]:
    """Return the types of an optional field, without their bounds."""
    return {getattr(each, "__origin__", each) for each in get_args(annotation) or (annotation,)}


def _also(schema: dict[str, Any], other: dict[str, Any]) -> None:
    """Let a field of the OpenAPI document be what `other` describes, too."""
    described = {name: schema.pop(name) for name in schema.keys() - {"title", "description", "default", "anyOf"}}
    schema.setdefault("anyOf", [described]).append(other)


def _scalar(given: object, *, is_flag: bool) -> object:
    """Return the number or truth value that a text spells, and a whole number as an integer; else `given`.

    `is_flag`: 0 and 1 are truth values.
    Clients that fill in forms or templates send texts, and some languages have no integers. vLLM takes them too.
    """
    if isinstance(given, str) and SCALAR.fullmatch(given):
        given = json.loads(given.lower())
    if isinstance(given, float) and given.is_integer() and abs(given) < MAX_WHOLE:
        given = int(given)
    if is_flag and type(given) is int and given in (0, 1):
        return bool(given)
    return given


class ReplyModel(BaseModel):
    """A part of an answer."""


class PromptTokensDetails(ReplyModel):
    cached_tokens: int
    image_tokens: int


class CompletionTokensDetails(ReplyModel):
    reasoning_tokens: int


class CompletionUsage(ReplyModel):
    """Token counts. Only chat completions count reasoning tokens, in `completion_tokens_details`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None
    completion_tokens_details: CompletionTokensDetails | None = None


class CacheInfo(ReplyModel):
    """What the prefix cache did for a prompt.

    `num_tokens` tokens were reused, `num_image_tokens` of them tokens of images. Keys and values alone were cached for
    `kv_num_tokens`. `miss` says why not all of the reusable prompt was reused.
    `num_restored_tokens` of the reused tokens were copied from the host tier, the disk tier or another engine, and
    `num_peer_tokens` of them from another engine.
    """

    num_tokens: int
    kv_num_tokens: int
    num_image_tokens: int
    num_restored_tokens: int
    num_peer_tokens: int
    miss: Literal["cold", "short", "no_checkpoint", "evicted", "bypassed"] | None


class SpeculationInfo(ReplyModel):
    """The number of an answer's draft tokens, and how many were accepted. Only with --speculative-config."""

    num_draft_tokens: int
    num_accepted_tokens: int


class ErrorInfo(ReplyModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(ReplyModel):
    error: ErrorInfo


class ModelCard(ReplyModel):
    """A served model, with the fields of OpenAI's API, of vLLM's and of Anthropic's.

    `created` is in seconds, `created_at` in the form of RFC 3339. `input_modalities` are the kinds of content that its
    prompts may have.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "forkpoint"
    root: str
    max_model_len: int
    input_modalities: list[Literal["text"] | MediaKind]
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int


class ModelList(ReplyModel):
    """All served models. `has_more`, `first_id` and `last_id` are for Anthropic's clients, which read in pages."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    has_more: Literal[False] = False
    first_id: str
    last_id: str


class VersionReply(ReplyModel):
    version: str


class LoadReply(ReplyModel):
    """The number of prompts that the engine answers and of requests that are being read."""

    server_load: int


class DoneReply(ReplyModel):
    """The answer to an operation without a result. `done` is always true, as a failure is answered with an error."""

    done: bool
