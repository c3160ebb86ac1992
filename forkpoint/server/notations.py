"""Tool calls in the text of an answer, and the notations in which families write them."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn, TypeAlias

import regex

from forkpoint.engine.call_writing import NotationName, notation_name
from forkpoint.engine.tokenizer import Tokenizer

# A call in JSON, up to its arguments.
FORCED = regex.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
# What a notation's `read` raises for what is no call: reading Python raises all of these.
NO_CALL: Final = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)

Tools: TypeAlias = Mapping[str, Any]  # parameter schemas by name of the function

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION_END = "</function>"
KIMI_CALL, KIMI_ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"

# A parameter, whose end may be missing.
QWEN_PARAMETER = regex.compile(r"\s*<parameter=([^>\n]+)>(.*?)(</parameter>|\Z)", regex.DOTALL)
LING_PARAMETER = regex.compile(r"\s*<arg_key>([^<\n]+)</arg_key>\s*<arg_value>(.*?)(</arg_value>|\Z)", regex.DOTALL)
QWEN_HEAD = regex.compile(r'\s*(?:(?=\{\s*")|<function=([^>\n]+)>)')
LING_HEAD = regex.compile(r"\s*([\w.-]{1,256})(?:\s|\\n)*(?=<arg_key>|</tool_call>)")  # it writes line ends as \n too
KIMI_HEAD = regex.compile(
    rf"\s*{regex.escape(KIMI_CALL)}\s*(?:functions\.)?([^\s<>:]{{1,256}}):\d{{1,9}}\s*{regex.escape(KIMI_ARGUMENTS)}"
)
JSON_WORDS: Final = {"true": True, "false": False, "null": None}
PYTHON_HEAD = regex.compile(r"\s*(?=\[|[^\W\d])")


@dataclass(frozen=True, slots=True)
class Call:
    """`arguments` is the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Body:
    """What stands behind a `head`, up to a closing tag, or up to the answer's end where it is not `closed`."""

    head: regex.Match[str]
    text: str
    tools: Tools
    closed: bool


@dataclass(frozen=True, slots=True)
class Notation:
    """How a family writes calls. `head`: how what follows the opening tag begins; `section`: the tags of a further call
    behind the closing one, and of the end of all.

    `read` makes calls of a body: none where the closing tag is part of a value. It raises one of NO_CALL for what is
    no call.
    """

    opening: str
    closing: str
    head: regex.Pattern[str]
    read: Callable[[Body], list[Call]]
    section: tuple[str, str] | None = None


def strict_json(text: str) -> Any:
    """JSON and nothing beyond it. Raises ValueError."""
    return json.loads(text, parse_constant=_refuse)


def is_json(text: str) -> bool:
    try:
        strict_json(text)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _read_parameters(parameter: regex.Pattern[str], body: Body) -> list[Call]:
    """One parameter after the other, each between tags of its own."""
    function, members, position = body.head[1].strip(), [], 0
    while found := parameter.match(body.text, position):
        key, text, end = found.groups()
        if CALL in text.partition(CALL_END)[2]:
            raise ValueError("another call began")
        if not end:
            return []
        value = _value(body, function, key.strip(), text.removeprefix("\n").removesuffix("\n"))  # the notation's own
        members.append(f"{json.dumps(key.strip(), ensure_ascii=False)}: {value}")
        position = found.end()
    rest = body.text[position:].strip()
    if rest != FUNCTION_END and (rest or not body.closed):
        raise ValueError("a call ends with its last parameter")
    return [Call(function, "{" + ", ".join(members) + "}")]


def _value(body: Body, function: str, key: str, text: str) -> str:
    """`text` as JSON: as the function's schema declares `key`, else as what it looks like."""
    schema = body.tools.get(function) or {}
    declared = (schema.get("properties") or {}).get(key) if isinstance(schema, Mapping) else None
    kind = declared.get("type") if isinstance(declared, Mapping) else None
    if kind == "string":
        return json.dumps(text, ensure_ascii=False)
    if kind == "boolean" and text in ("True", "False"):  # as templates show those of earlier calls
        return text.lower()
    try:
        return json.dumps(strict_json(text), ensure_ascii=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def _read_json(body: Body) -> list[Call]:
    """An object with the function's name and its arguments."""
    call = _json_object(body.text)
    if call is None:
        return []
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
    if not isinstance(name, str) or not name:
        raise ValueError("a call names its function")
    head = FORCED.match(body.text)
    if head is not None and isinstance(arguments, dict):  # as it was written: numbers keep their digits
        return [Call(name, body.text[head.end() : json.JSONDecoder().raw_decode(body.text, head.end())[1]])]
    if isinstance(arguments, str):
        arguments = strict_json(arguments or "{}")
    if arguments is not None and not isinstance(arguments, dict):
        raise ValueError("arguments are an object")
    return [Call(name, json.dumps(arguments or {}, ensure_ascii=False))]


def _json_object(text: str) -> dict[str, Any] | None:
    """None where `text` ends within a string, which may go on. Raises ValueError for what is no object."""
    try:
        value = strict_json(text)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string"):
            return None
        raise
    if not isinstance(value, dict):
        raise ValueError("a call is an object")
    return value


def _read_qwen(body: Body) -> list[Call]:
    """JSON (Hermes, Qwen3), or the function and its parameters between tags (Qwen3-Coder, Qwen3.5)."""
    return _read_json(body) if body.head[1] is None else _read_parameters(QWEN_PARAMETER, body)


def _read_kimi(body: Body) -> list[Call]:
    """The arguments behind an id that names the function; empty for none."""
    text = body.text.strip() or "{}" * body.closed
    return [] if _json_object(text) is None else [Call(body.head[1], text)]


def _read_python(body: Body) -> list[Call]:
    """`[f(x=1, y="a"), g()]`, or a call on each line: all with named, constant arguments."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that Python does not know
        statements = ast.parse(body.text.strip()).body
    calls: list[ast.expr] = []
    for statement in statements:
        if not isinstance(statement, ast.Expr):
            raise ValueError("a statement is no call")
        calls += statement.value.elts if isinstance(statement.value, ast.List) else [statement.value]
    if not calls:
        raise ValueError("there is no call")
    return [_python_call(call) for call in calls]


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        raise ValueError("a call names its function and all arguments")
    arguments = {keyword.arg: ast.literal_eval(_Words().visit(keyword.value)) for keyword in node.keywords}
    if None in arguments:
        raise ValueError("a call names all arguments")
    told = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    told.encode()  # half a character is none
    return Call(ast.unparse(node.func), told)


class _Words(ast.NodeTransformer):
    """Makes constants of JSON's words, which models mix in; names in objects are texts, as in JSON."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(JSON_WORDS[node.id]) if node.id in JSON_WORDS else node

    def visit_Dict(self, node: ast.Dict) -> ast.expr:
        if not all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in node.keys):
            raise ValueError("an object has a name that is no text")
        self.generic_visit(node)
        return node


QWEN: Final = Notation(CALL, CALL_END, QWEN_HEAD, _read_qwen)
LING: Final = Notation(CALL, CALL_END, LING_HEAD, partial(_read_parameters, LING_PARAMETER))
LFM2: Final = Notation("<|tool_call_start|>", "<|tool_call_end|>", PYTHON_HEAD, _read_python)
OLMO3: Final = Notation("<function_calls>", "</function_calls>", PYTHON_HEAD, _read_python)
KIMI: Final = Notation(
    "<|tool_calls_section_begin|>",
    "<|tool_call_end|>",
    KIMI_HEAD,
    _read_kimi,
    section=(KIMI_CALL, "<|tool_calls_section_end|>"),
)


NOTATIONS: Final[Mapping[NotationName, Notation]] = {
    "hermes": QWEN,
    "qwen_xml": QWEN,
    "ling": LING,
    "lfm2": LFM2,
    "olmo3": OLMO3,
    "kimi": KIMI,
}


def find_notation(parser: str, tokenizer: Tokenizer | None, template: str) -> Notation:
    """Return the notation of `--tool-call-parser`; for `auto`, the one that the template or the vocabulary shows."""
    return NOTATIONS[notation_name(parser, tokenizer, template)]
