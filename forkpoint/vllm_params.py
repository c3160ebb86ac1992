"""Fields of vLLM's parameter classes and members of its LLM that do nothing here, or ask for what is missing here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import wraps
from typing import Any, Final, TypeVar

from forkpoint.checks import shown
from forkpoint.errors import InvalidParamsError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AbsentField:
    """A field of vLLM's that is missing here. None and the `neutral` values ask for nothing and are accepted.

    `do` says what to give instead. Without it all values are accepted, because they change no output.
    """

    do: str = ""
    neutral: tuple[object, ...] = ()


BEAMS: Final = "outputs are sampled; give n for several"
OF_SAMPLING: Final[Mapping[str, AbsentField]] = {
    "spaces_between_special_tokens": AbsentField(),  # texts have no spaces but those of the tokenizer
    "stream_interval": AbsentField(),
    "skip_clone": AbsentField(),
    "output_text_buffer_length": AbsentField(),
    "routed_experts_prompt_start": AbsentField(),  # answers name no experts
    "flat_logprobs": AbsentField(),  # one dict a token, as which vLLM's FlatLogprobs is read too
    **dict.fromkeys(("early_stopping", "length_penalty"), AbsentField()),  # beam search alone reads them
    "best_of": AbsentField("give n", (1,)),
    "extra_args": AbsentField("give kv_transfer_params, which is a field of its own here", ({},)),
    "guided_decoding": AbsentField("give structured_outputs=StructuredOutputsParams(...)"),
    "logits_processors": AbsentField("give logit_bias, allowed_token_ids or bad_words", ([],)),
    "logprob_token_ids": AbsentField("give logprobs for the most likely tokens", ([],)),
    "prompt_logprob_start": AbsentField("give prompt_logprobs, which has all tokens of the prompt", (0,)),
    "prompt_logprob_token_ids": AbsentField("give prompt_logprobs for the most likely tokens", ([],)),
    "repetition_detection": AbsentField("give repetition_penalty, or stop"),
    "trace_decode_token_ids": AbsentField("give prompt_logprobs with the whole text as the prompt", ([],)),
    "use_beam_search": AbsentField(BEAMS, (False,)),
    "watermarking": AbsentField("leave it out", (False,)),
}
OF_STRUCTURED_OUTPUTS: Final[Mapping[str, AbsentField]] = {
    "disable_additional_properties": AbsentField("set additionalProperties to false in the schema", (False,)),
    "whitespace_pattern": AbsentField("give disable_any_whitespace"),
}
_TEXT: Final = "models here generate text only"
_QUEUE: Final = "give generate or chat a list, or run stream in several threads"
_SLEEP: Final = "close() releases the memory, and another LLM(...) goes on"
_WORKER: Final = "no function runs in the worker; register_model and register_operators change what it computes"
# Members of vLLM's LLM that are missing here, and what to do instead.
OF_LLM: Final[Mapping[str, str]] = {
    **dict.fromkeys(("encode", "embed", "classify", "score", "reward"), _TEXT),
    **dict.fromkeys(("enqueue", "enqueue_chat", "wait_for_completion"), _QUEUE),
    **dict.fromkeys(("sleep", "wake_up", "release_kv_cache_memory"), _SLEEP),
    **dict.fromkeys(("collective_rpc", "apply_model"), _WORKER),
    **dict.fromkeys(("llm_engine", "model_config"), "config has the options, and get_tokenizer() the tokenizer"),
    **dict.fromkeys(("start_profile", "stop_profile"), "torch.profiler records the calls of this process"),
    "beam_search": BEAMS,
    "get_world_size": "config.tensor_parallel_size has it",
    "preprocess_chat": "render_chat returns the prompt of a conversation",
    "set_tokenizer": "give tokenizer=... to LLM",
}


def taking_absent(absent: Mapping[str, AbsentField]) -> Callable[[type[T]], type[T]]:
    """Return a decorator for a dataclass, whose constructor then takes the `absent` fields, too.

    It raises InvalidParamsError for their values that ask for something, and for names of no field.
    """

    def decorate(cls: type[T]) -> type[T]:
        create, known = cls.__init__, {item.name for item in fields(cls)}  # type: ignore[arg-type]

        @wraps(create)
        def init(self: T, /, *args: Any, **given: Any) -> None:
            for name in given.keys() - known:
                _check(name, given.pop(name), absent, known)
            create(self, *args, **given)

        setattr(cls, "__init__", init)  # noqa: B010  # mypy allows no other assignment to a constructor
        return cls

    return decorate


def _check(name: str, value: object, absent: Mapping[str, AbsentField], known: set[str]) -> None:
    rule = absent.get(name)
    if rule is None:
        near = get_close_matches(name, known, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]!r}?" if near else f"the fields are {', '.join(sorted(known))}"
        raise InvalidParamsError(f"there is no field {name!r}; {hint}")
    asks = not isinstance(value, bool | float | int | list | dict | None) or value not in (None, *rule.neutral)
    if rule.do and asks:
        raise InvalidParamsError(f"{name}={shown(value)} is not supported; {rule.do}")
