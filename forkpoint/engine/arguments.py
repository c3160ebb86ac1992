"""Checks the arguments of `LLM`'s methods, and turns one value for all prompts into one for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
from tqdm import tqdm

from forkpoint.checks import Checker, plain_members, shown
from forkpoint.engine.conversation import Message
from forkpoint.engine.inputs import Prompt, PromptInput
from forkpoint.errors import InvalidParamsError, InvalidPromptError
from forkpoint.params import SamplingParams, checked_priority

ParamsInput: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
Conversations: TypeAlias = Sequence[Message] | Sequence[Sequence[Message]]
T = TypeVar("T")

PROMPTS = "a prompt (a text, a list of token ids, a dict with 'prompt' or 'prompt_token_ids') or a list of prompts"
MESSAGES = "a conversation (a list of dicts with 'role' and 'content') or a list of conversations"


def split_prompts(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    """Return one prompt (a text, a list of token ids, a dict or a Prompt), or a list of prompts, as a list.

    The prompts themselves are not checked. Raises InvalidPromptError for anything else.
    """
    if isinstance(prompts, str | Mapping | Prompt):
        return [prompts]
    items = _listed(prompts)
    if items is None:
        raise InvalidPromptError(f"prompts={shown(prompts)} is not allowed; give {PROMPTS}")
    if items and all(issubclass(kind, int | np.integer) for kind in set(map(type, items))):
        return [items]
    return items


def split_conversations(messages: Conversations) -> list[Sequence[Message]]:
    """Return one conversation, or a list of conversations, as a list. An empty list has no conversations.

    Messages are not checked. Raises InvalidPromptError for anything else.
    """
    items = _listed(messages)
    if items is None or any(isinstance(item, str) for item in items):
        raise InvalidPromptError(f"messages={shown(messages)} is not allowed; give {MESSAGES}")
    if items and isinstance(items[0], Mapping):
        return [items]
    return items


def check_chat_options(
    messages: object, tools: object, variables: object, **flags: object
) -> tuple[list[Any], list[Any]]:
    """Check the options that one conversation is rendered with; each of `flags` must be a bool.

    Returns the messages and the tools as lists. Raises InvalidPromptError.
    """
    check = Checker(InvalidPromptError)
    listed_messages = _listed(messages)
    if listed_messages is None:
        check.refuse("messages", messages, MESSAGES)
    ok = variables is None or (isinstance(variables, Mapping) and all(isinstance(key, str) for key in variables))
    check.require(ok, "chat_template_kwargs", variables, "None or a dict with names of variables as its keys")
    for name, value in flags.items():
        check.flag(name, value)
    return listed_messages, listed_tools(tools)


def check_unsupported(lora_request: object, tokenization_kwargs: object) -> None:
    """Raise InvalidParamsError if one of these arguments of vLLM's asks for something; None asks for nothing."""
    adapters = _listed(lora_request)
    if any(each is not None for each in ([lora_request] if adapters is None else adapters)):
        raise InvalidParamsError("lora_request is not allowed, because adapters are not supported; leave it out")
    if tokenization_kwargs:
        raise InvalidParamsError(
            f"tokenization_kwargs={shown(tokenization_kwargs)} is not allowed; give prompts as token ids, which "
            "get_tokenizer() can encode in any way, and truncate_prompt_tokens in SamplingParams"
        )


def with_image_settings(prompts: list[PromptInput], settings: Mapping[str, Any] | None) -> list[PromptInput]:
    """Return the prompts, in which each dict without settings of images gets these."""
    if settings is None:
        return prompts
    name = "mm_processor_kwargs"
    return [
        {**each, name: settings} if isinstance(each, Mapping) and each.get(name) is None else each for each in prompts
    ]


def bar_of(use_tqdm: bool | Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the function that creates the progress bar; None for no bar. Raises InvalidParamsError."""
    if callable(use_tqdm):
        return use_tqdm
    allowed = "True, False, or a function that creates the bar"
    return tqdm if Checker(InvalidParamsError).flag("use_tqdm", use_tqdm, allowed) else None


def listed_tools(tools: object) -> list[Any]:
    """Return the tools as a list, empty for None. Raises InvalidPromptError for anything else."""
    if tools is None:
        return []
    found = _listed(tools)
    if found is None:
        Checker(InvalidPromptError).refuse("tools", tools, "None or a list of tools")
    return found


def one_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """Return checked copies of sampling parameters for each of `count` prompts: of one for all, or of a list's.

    Raises InvalidParamsError for a list of another length and for other values.
    """
    if isinstance(params, SamplingParams):
        return [params.clone()] * count
    items = _listed(params)
    if items is None or not all(isinstance(item, SamplingParams) for item in items):
        raise InvalidParamsError(
            f"sampling_params={shown(params)} is not allowed; give SamplingParams(...), a list of them, or None"
        )
    return [item.clone() for item in _of_count(items, count, "sampling parameters")]


def priorities(priority: int | Sequence[int] | None, count: int) -> list[int]:
    """Return a priority for each of `count` prompts: one for all (None: 0), or a list's. Raises InvalidParamsError."""
    items = _listed(priority)
    if priority is None:
        priority = 0
    if items is None:
        items = [priority] * count
    return [checked_priority(item) for item in _of_count(items, count, "priorities")]


def _of_count(items: list[T], count: int, what: str) -> list[T]:
    if len(items) != count:
        raise InvalidParamsError(
            f"there are {len(items)} {what} for {count} prompts; give one for all, or one for each"
        )
    return items


def _listed(given: Any) -> list[Any] | None:
    """Return the members of a list or another iterable; None for a text, a mapping and values without members."""
    if isinstance(given, str | bytes | bytearray | Mapping):
        return None
    try:
        return list(plain_members(given))
    except TypeError:
        return None
