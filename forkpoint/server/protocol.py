"""What bodies of requests and answers share, with OpenAI's names. The OpenAPI document is made of these types.

What is not read of a request is refused, so that nobody counts on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from importlib.resources import files
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator

from forkpoint.params import MAX_INT32
from forkpoint.server.errors import HTTPError

MAX_SHOWN: Final = 64  # characters of an unknown name, in an error
RULES_TEXT: Final = files("forkpoint.server").joinpath("fields.yaml").read_text("utf-8")
RULES: Final[Mapping[str, Any]] = MappingProxyType(
    yaml.load(RULES_TEXT, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # ten times as fast in C
)


class Body(BaseModel):
    """A part of a request. Members that are not known are left alone: templates may read them."""

    model_config = ConfigDict(extra="allow", strict=True)


def at_most(most: int) -> BeforeValidator:
    """Counts a mapping before its entries are looked at, each of which could be an error of its own."""

    def check(given: object) -> object:
        if isinstance(given, Mapping) and len(given) > most:
            raise ValueError(f"at most {most} entries are allowed, not {len(given)}")
        return given

    return BeforeValidator(check)


class FirstError(FailFast):
    """pydantic's own cannot be hashed, as the members of a union are."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


T = TypeVar("T")
Many = Annotated[list[T], FirstError()]  # a list that may be long: its first wrong element is error enough
TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
MaxTokens = Annotated[int, Field(ge=1, le=MAX_INT32)]


class RequestBody(Body):
    """The body of a request to those of fields.yaml's `apis` that are named. A field that is unknown is refused with
    the nearest one that is known."""

    no_effect: ClassVar[frozenset[str]]
    refused: ClassVar[Mapping[str, Any]]

    def __init_subclass__(cls, *, apis: tuple[str, ...] = (), **options: Any) -> None:
        super().__init_subclass__(**options)
        if apis:
            cls.no_effect = frozenset(" ".join(RULES[api].get("no_effect", "") for api in apis).split())
            cls.refused = {name: rule for api in apis for name, rule in RULES[api].get("refused", {}).items()}

    @model_validator(mode="after")
    def _check_fields(self) -> RequestBody:
        for name, value in (self.model_extra or {}).items():
            if name not in self.no_effect:
                self._check_field(name, value)
        return self

    @classmethod
    def _check_field(cls, name: str, value: object) -> None:
        rule = cls.refused.get(name)
        if rule is None:
            near = get_close_matches(name[:MAX_SHOWN], [*cls.model_fields, *cls.no_effect], n=1)
            hint = f"did you mean {near[0]!r}?" if near else "leave it out; /docs lists those that there are"
            raise HTTPError(400, f"there is no field {name[:MAX_SHOWN]!r}; {hint}", param=name[:MAX_SHOWN])
        if value is not None and value not in rule.get("neutral", ()):
            raise HTTPError(400, f"{name} is not supported; {rule['do']}", param=name)

    @classmethod
    def document(cls, schema: dict[str, Any]) -> None:
        """Name in the OpenAPI document what is accepted without effect, and that nothing else is."""
        schema["additionalProperties"] = False
        for name in sorted(cls.no_effect - set(cls.model_fields)):
            schema["properties"][name] = {"description": "accepted; changes nothing in the answer's text"}

    model_config = ConfigDict(json_schema_extra=lambda schema, cls: cls.document(schema))


class Reply(BaseModel):
    """An answer."""


class PromptTokensDetails(Reply):
    cached_tokens: int


class Usage(Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None


class CacheInfo(Reply):
    """What the prefix cache did for a prompt: `num_tokens` were reused, keys and values alone reached
    `kv_num_tokens`, and `miss` says why not all of the reusable prompt was reused."""

    num_tokens: int
    kv_num_tokens: int
    miss: Literal["cold", "short", "no_checkpoint", "evicted", "bypassed"] | None


class SpeculationInfo(Reply):
    """Under --speculative-config: tokens that were drafted for an answer, and how many of them were what the model
    said."""

    num_draft_tokens: int
    num_accepted_tokens: int


class ErrorInfo(Reply):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(Reply):
    error: ErrorInfo


class ModelCard(Reply):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "forkpoint"
    root: str
    max_model_len: int


class ModelList(Reply):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class VersionReply(Reply):
    version: str


class DoneReply(Reply):
    """What cannot be done is answered with an error, so `done` is always true."""

    done: bool
