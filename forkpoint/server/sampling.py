"""Fields that all kinds of completion accept, their translation to SamplingParams, and the prepared request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from forkpoint.engine.inputs import Prompt
from forkpoint.params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_BIASED_TOKENS,
    MAX_BREAKPOINTS,
    MAX_INT32,
    MAX_STOP_TOKEN_IDS,
    MIN_PRIORITY,
    SamplingParams,
    StructuredOutputsParams,
)
from forkpoint.server.errors import HTTPError
from forkpoint.server.protocol import (
    MAX_SHOWN,
    MAX_UNUSED,
    Body,
    Many,
    RequestBody,
    Stops,
    TokenId,
    TransferParams,
    at_most,
)
from forkpoint.server.texts import Texts
from forkpoint.vllm_params import OF_STRUCTURED_OUTPUTS

MAX_REQUEST_ID_LENGTH: Final = 128  # characters, as for the header X-Request-Id


def bounded(name: str, help: str | None = None) -> Any:
    """Return an optional body field with the bounds of the field `name` of SamplingParams, and its help by default."""
    given = SamplingParams.__dataclass_fields__[name].metadata
    low, high, above = given["bounds"]
    least: dict[str, Any] = {"gt" if above else "ge": low}
    return Field(None, **least, le=high, description=help or given["help"])


class StreamOptions(Body):
    """OpenAI's `stream_options`, with vLLM's `continuous_usage_stats`: every chunk has the usage so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class UsageOptions(Body):
    """OpenRouter's option for the usage at the end of a stream."""

    include: bool | None = None


class SampledBody(RequestBody):
    """Fields that all APIs but Anthropic's accept: OpenAI's, and extensions of other engines."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = bounded("temperature")
    top_p: float | None = bounded("top_p")
    top_k: int | None = bounded("top_k")
    min_p: float | None = bounded("min_p")
    presence_penalty: float | None = bounded("presence_penalty")
    frequency_penalty: float | None = bounded("frequency_penalty")
    repetition_penalty: float | None = bounded("repetition_penalty")
    logit_bias: Annotated[dict[str, float] | None, at_most(MAX_BIASED_TOKENS)] = Field(
        None, max_length=MAX_BIASED_TOKENS
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**64, description="the highest of its 64 bits is ignored")
    stop: Stops = None
    min_tokens: int | None = bounded("min_tokens")
    ignore_eos: bool | None = None
    cache_salt: str | None = Field(None, description="prompts share cached prefixes only under the same salt")
    priority: int | None = Field(None, ge=MIN_PRIORITY, le=MAX_INT32, description="a smaller value runs first")


class ResponseFormat(Body):
    """OpenAI's `response_format`. The type json_schema needs `json_schema: {"name", "schema"}`.

    `schema` and `strict` may stand in the format itself, also with the type json_object, because other servers take
    them there. The type structural_tag has xgrammar's fields.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: dict[str, Any] | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @property
    def is_strict(self) -> bool:
        return bool((self.json_schema or {}).get("strict", self.strict))


class SamplingBody(SampledBody):
    """Fields that chat and text completions accept. The `guided_*` fields are older names for `structured_outputs`."""

    n: int | None = bounded("n")
    stream_options: StreamOptions | None = None
    usage: UsageOptions | None = Field(None, description="include: true ends a stream with its usage")
    stop_token_ids: Many[TokenId] | None = Field(None, max_length=MAX_STOP_TOKEN_IDS)
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_breakpoints: Many[TokenId] | None = Field(
        None,
        max_length=MAX_BREAKPOINTS,
        description="prompt positions, in tokens, at which other prompts are expected to part from this one",
    )
    bad_words: Many[Annotated[str, Field(min_length=1)]] | None = Field(
        None,
        max_length=MAX_BAD_WORDS,
        description="texts that the answer must not contain, at the start of a word or within one",
    )
    allowed_token_ids: Many[TokenId] | None = Field(
        None, min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS, description="the answer has only these ids"
    )
    truncate_prompt_tokens: int | None = bounded(
        "truncate_prompt_tokens", "keep this many of the prompt's last tokens; -1: as many as fit"
    )
    prompt_logprobs: int | None = bounded("prompt_logprobs", "not in streams")
    return_token_ids: bool | None = Field(None, description="return the token ids of the prompt and of the answer too")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="log-probabilities have `token_id:ID` in place of each token's text"
    )
    request_id: str | None = Field(
        None, pattern=r"^[!-~]+$", max_length=MAX_REQUEST_ID_LENGTH, description="the answer's id, in printable ASCII"
    )

    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = Field(
        None, description="exactly one of json, json_object, regex, choice, grammar, structural_tag"
    )
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Many[str] | None = None
    guided_grammar: str | None = None
    kv_transfer_params: TransferParams = None

    @model_validator(mode="after")
    def _check_stream(self) -> SamplingBody:
        if self.stream_options is not None and not self.stream:
            raise HTTPError(400, "stream_options need stream: true; set it, or leave them out", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise HTTPError(
                400, "prompt_logprobs are not available in streams; leave stream out", param="prompt_logprobs"
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request as a reader has read it: what the engine is to do, and what the answer has to contain.

    `returns_ids`: the answer has token ids. `names_ids`: its log-probabilities have ids in place of tokens' texts.
    `request_id`: the id that the client has chosen for the answer, or None.
    """

    model: str
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    priority: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    returns_ids: bool
    names_ids: bool
    request_id: str | None

    @classmethod
    def of(cls, body: SamplingBody, texts: Texts, **others: Any) -> Self:
        """Create a prepared request from the fields of `body` that all APIs share, and `others`."""
        options = body.stream_options
        names_ids = body.return_tokens_as_token_ids
        if texts.tokenizer is None:
            names_ids = True  # all tokens would have the same name
        asks_usage = bool(options and options.include_usage) or bool(body.usage and body.usage.include)
        return cls(
            priority=_priority(body, texts),
            stream=bool(body.stream),
            include_usage=asks_usage or texts.config.enable_force_include_usage,
            continuous_usage=bool(options and options.continuous_usage_stats),
            returns_ids=bool(body.return_token_ids),
            names_ids=texts.config.return_tokens_as_token_ids if names_ids is None else names_ids,
            request_id=body.request_id,
            **others,
        )


def _priority(body: SamplingBody, texts: Texts) -> int:
    if body.priority and texts.config.scheduling_policy != "priority":
        texts.notices.add("requests have a priority, which --scheduling-policy fcfs ignores; 'priority' goes by it")
        return 0
    return body.priority or 0


def sampling_params(
    body: SamplingBody,
    texts: Texts,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    structured: StructuredOutputsParams | None = None,
) -> SamplingParams:
    """Return the SamplingParams of `body`. Raises HTTPError or InvalidParamsError for values out of range.

    A missing or null field takes the model's default. The model's `max_tokens` bounds that of every request. A number
    of tokens above MAX_INT32 is no limit. Both counts of log-probabilities are None if none are wanted.
    """
    most = texts.config.max_logprobs
    for name, value in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
        if value is not None and value > most:
            raise HTTPError(400, f"{name}={value} is not allowed; this server returns at most {most} (--max-logprobs)")
    same = SamplingParams.__dataclass_fields__.keys() & SamplingBody.model_fields.keys()
    given: dict[str, Any] = {name: value for name in same if (value := getattr(body, name)) is not None}
    if (body.kv_transfer_params or {}).get("do_remote_decode") is True:
        given.pop("min_tokens", None)  # some proxies ask for one token and leave the client's min_tokens in place
    if body.seed is not None:
        given["seed"] = body.seed & (2**63 - 1)  # clients send signed and unsigned 64-bit values
    limits = [limit for limit in (max_tokens, texts.sampling.get("max_tokens")) if limit and limit <= MAX_INT32]
    wanted = {
        "max_tokens": min(limits, default=None),
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "structured_outputs": structured,
    }
    return SamplingParams(**{**texts.sampling, **given, **wanted})


def structured_outputs(texts: Texts, body: SamplingBody) -> StructuredOutputsParams | None:
    """Return the grammar that `body` asks for, or None.

    Clients of several versions of vLLM give the same grammar under several names. The schema of a `response_format` is
    enforced as far as possible, unless it is strict. Raises HTTPError or InvalidParamsError if the body asks for two
    grammars or for an unknown kind.
    """
    sources = {"response_format": _from_format(body.response_format), "structured_outputs": _known(body, texts)}
    for name in ("json", "regex", "choice", "grammar"):
        if (value := getattr(body, f"guided_{name}")) is not None:
            sources[f"guided_{name}"] = {name: value}
    given = {source: wanted for source, wanted in sources.items() if wanted is not None}
    if not given:
        return None
    first, wanted = next(iter(given.items()))
    for second, other in given.items():
        if other != wanted:
            raise HTTPError(400, f"{first} and {second} exclude each other; give one", param=second)
    form = body.response_format
    if [*given] == ["response_format"] and form is not None and "json" in wanted and not form.is_strict:
        wanted = {"json": texts.relaxed(wanted["json"], "answers with a response_format that is not strict")}
    return StructuredOutputsParams(**wanted)


def _known(body: SamplingBody, texts: Texts) -> dict[str, Any] | None:
    """Return `structured_outputs` without nulls, and without unknown fields next to a grammar.

    The class of that name in vLLM has private fields, which clients send too. Without a grammar, an unknown field may
    be a misspelt one, which the error then names.
    """
    if body.structured_outputs is None:
        return None
    given = {name: value for name, value in body.structured_outputs.items() if value is not None}
    own = StructuredOutputsParams.__dataclass_fields__.keys()
    if not given.keys() & own - {"disable_any_whitespace"}:
        return given
    unknown = given.keys() - own - OF_STRUCTURED_OUTPUTS.keys()
    for name in sorted(unknown)[:MAX_UNUSED]:
        texts.notices.add(f"structured_outputs has the field {name[:MAX_SHOWN]!r}, which is unknown and ignored")
    return {name: value for name, value in given.items() if name not in unknown}


def _from_format(given: ResponseFormat | None) -> dict[str, Any] | None:
    """Return the format as `structured_outputs`; None for text. Raises HTTPError for one without a schema."""
    if given is None or given.type == "text":
        return None
    if given.type == "structural_tag":
        return {"structural_tag": given.model_dump(by_alias=True, exclude_none=True)}
    schema = (given.json_schema or {}).get("schema", given.schema_)
    if given.type == "json_object" and schema is None:
        return {"json_object": True}
    if not isinstance(schema, dict):
        raise HTTPError(400, 'response_format needs json_schema: {"name", "schema"}', param="response_format")
    return {"json": schema}
