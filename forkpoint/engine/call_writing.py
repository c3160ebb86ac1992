"""Writes tool calls of earlier turns as text, in the notation that the model itself uses."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

from forkpoint.engine.tokenizer import Tokenizer

Calls: TypeAlias = Sequence[Mapping[str, Any]]  # each with `id` and `function`: `name`, and `arguments` as a mapping
CallWriter: TypeAlias = Callable[[Calls], str]
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

    That is `hermes` where nothing is shown.
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


def _write_hermes(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{_json(_named(call))}\n</tool_call>" for call in calls)


def _write_qwen_xml(calls: Calls) -> str:
    texts = []
    for call in calls:
        named = _named(call)
        parameters = "".join(
            f"<parameter={key}>\n{_plain(value)}\n</parameter>\n" for key, value in named["arguments"].items()
        )
        texts.append(f"<tool_call>\n<function={named['name']}>\n{parameters}</function>\n</tool_call>")
    return "\n".join(texts)


def _write_ling(calls: Calls) -> str:
    texts = []
    for call in calls:
        named = _named(call)
        pairs = "".join(
            f"\n<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>"
            for key, value in named["arguments"].items()
        )
        texts.append(f"<tool_call>{named['name']}{pairs}\n</tool_call>")
    return "\n".join(texts)


def _write_lfm2(calls: Calls) -> str:
    return f"<|tool_call_start|>[{', '.join(map(_python, calls))}]<|tool_call_end|>"


def _write_olmo3(calls: Calls) -> str:
    return "<function_calls>" + "\n".join(map(_python, calls)) + "</function_calls>"


def _write_kimi(calls: Calls) -> str:
    texts = []
    for call in calls:
        arguments = _json(call["function"]["arguments"])
        texts.append(f"<|tool_call_begin|>{call['id']}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>")
    return "<|tool_calls_section_begin|>" + "".join(texts) + "<|tool_calls_section_end|>"


def _write_granite(calls: Calls) -> str:
    return f"<|tool_call|>{_list(calls)}"


def _write_nemotron(calls: Calls) -> str:
    return f"<TOOLCALL>{_list(calls)}</TOOLCALL>"


def _write_jamba(calls: Calls) -> str:
    return f"<tool_calls>{_list(calls)}</tool_calls>"


def _write_mistral(calls: Calls) -> str:
    return f"[TOOL_CALLS]{_list(calls)}"


def _write_llama(calls: Calls) -> str:
    functions = [call["function"] for call in calls]
    return "; ".join(_json({"name": one["name"], "parameters": one["arguments"]}) for one in functions)


def _list(calls: Calls) -> str:
    return _json([_named(call) for call in calls])


def _named(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}


def _python(call: Mapping[str, Any]) -> str:
    named = _named(call)
    arguments = [
        f"{key}={value!r}" if key.isidentifier() else f"**{ {key: value}!r}"
        for key, value in named["arguments"].items()
    ]
    return f"{named['name']}({', '.join(arguments)})"


def _plain(value: object) -> str:
    return value if isinstance(value, str) else _json(value)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


WRITERS: Final[Mapping[NotationName, CallWriter]] = {
    "hermes": _write_hermes,
    "qwen_xml": _write_qwen_xml,
    "ling": _write_ling,
    "lfm2": _write_lfm2,
    "olmo3": _write_olmo3,
    "kimi": _write_kimi,
    "granite": _write_granite,
    "nemotron": _write_nemotron,
    "jamba": _write_jamba,
    "mistral": _write_mistral,
    "llama": _write_llama,
}
