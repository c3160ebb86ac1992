"""Writes tool calls of earlier turns as text, in the notation that the model itself uses."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

from forkpoint.engine.tokenizer import Tokenizer

Call: TypeAlias = Mapping[str, Any]  # with `id` and `function`: `name`, and `arguments` as a mapping
CallWriter: TypeAlias = Callable[[Sequence[Call]], str]
NotationName: TypeAlias = Literal[
    "hermes", "qwen_xml", "ling", "lfm2", "olmo3", "kimi", "granite", "nemotron", "jamba", "mistral", "llama"
]

LING_TAG: Final = "<arg_key>"
QWEN_XML_TAG: Final = "<function="
# Tags that show which notation a chat template uses, in the order in which they are searched.
TEMPLATE_TAGS: Final[Mapping[str, NotationName]] = {
    LING_TAG: "ling",
    QWEN_XML_TAG: "qwen_xml",
    "<tool_call>": "hermes",
    "<|tool_call_start|>": "lfm2",
    "<function_calls>": "olmo3",
    "<|tool_calls_section_begin|>": "kimi",
    "<TOOLCALL>": "nemotron",
    "<tool_calls>": "jamba",
    "<|tool_call|>": "granite",
    "[TOOL_CALLS]": "mistral",
    "<|python_tag|>": "llama",
}
# Tags that are tokens only in the vocabularies of these families.
VOCABULARY_TAGS: Final = (
    "<|tool_call_start|>",
    "<|tool_calls_section_begin|>",
    "<|tool_call|>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
)
PARSERS: Final[Mapping[str, NotationName]] = {
    "lfm2": "lfm2",
    "olmo3": "olmo3",
    "kimi_k2": "kimi",
    "ling3": "ling",
    "glm45": "ling",
    "glm47": "ling",
    "qwen3_coder": "qwen_xml",
    "qwen3_xml": "qwen_xml",
    "granite": "granite",
    "nemotron_json": "nemotron",
    "jamba": "jamba",
    "mistral": "mistral",
    "llama3_json": "llama",
    "pythonic": "llama",
}


def notation_name(parser: str, tokenizer: Tokenizer | None, template: str) -> NotationName:
    """Return the notation of `--tool-call-parser`; for `auto` and `none`, what the template or vocabulary shows.

    Returns `hermes` if neither shows one.
    """
    if parser not in ("auto", "none"):
        return PARSERS.get(parser, "hermes")
    for tag, name in TEMPLATE_TAGS.items():
        if tag in template:
            return name
    for tag in VOCABULARY_TAGS:
        if tokenizer is not None and tokenizer.backend.token_to_id(tag) is not None:
            return TEMPLATE_TAGS[tag]
    return "hermes"


def _hermes(call: Call) -> str:
    return f"<tool_call>\n{_named(call)}\n</tool_call>"


def _qwen_xml(call: Call) -> str:
    parameters = (
        f"<parameter={key}>\n{_plain(value)}\n</parameter>\n" for key, value in call["function"]["arguments"].items()
    )
    return f"<tool_call>\n<function={call['function']['name']}>\n{''.join(parameters)}</function>\n</tool_call>"


def _ling(call: Call) -> str:
    pairs = (
        f"\n<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>"
        for key, value in call["function"]["arguments"].items()
    )
    return f"<tool_call>{call['function']['name']}{''.join(pairs)}\n</tool_call>"


def _kimi(call: Call) -> str:
    arguments = _json(call["function"]["arguments"])
    return f"<|tool_call_begin|>{call['id']}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def _llama(call: Call) -> str:
    return _json({"name": call["function"]["name"], "parameters": call["function"]["arguments"]})


def _named(call: Call) -> str:
    return _json({"name": call["function"]["name"], "arguments": call["function"]["arguments"]})


def _python(call: Call) -> str:
    arguments = [
        f"{key}={value!r}" if key.isidentifier() else f"**{ {key: value}!r}"
        for key, value in call["function"]["arguments"].items()
    ]
    return f"{call['function']['name']}({', '.join(arguments)})"


def _plain(value: object) -> str:
    return value if isinstance(value, str) else _json(value)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _writer(write: Callable[[Call], str], begin: str, between: str, end: str) -> CallWriter:
    return lambda calls: begin + between.join(map(write, calls)) + end


WRITERS: Final[Mapping[NotationName, CallWriter]] = {
    "hermes": _writer(_hermes, "", "\n", ""),
    "qwen_xml": _writer(_qwen_xml, "", "\n", ""),
    "ling": _writer(_ling, "", "\n", ""),
    "lfm2": _writer(_python, "<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "olmo3": _writer(_python, "<function_calls>", "\n", "</function_calls>"),
    "kimi": _writer(_kimi, "<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
    "granite": _writer(_named, "<|tool_call|>[", ", ", "]"),
    "nemotron": _writer(_named, "<TOOLCALL>[", ", ", "]</TOOLCALL>"),
    "jamba": _writer(_named, "<tool_calls>[", ", ", "]</tool_calls>"),
    "mistral": _writer(_named, "[TOOL_CALLS][", ", ", "]"),
    "llama": _writer(_llama, "", "; ", ""),
}
