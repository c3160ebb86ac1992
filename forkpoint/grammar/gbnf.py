"""Converts grammars in GBNF or Lark, as requests contain them, to the syntax of llguidance's parser."""

from __future__ import annotations

import json
import re
from itertools import groupby, zip_longest
from typing import Any

from forkpoint.grammar.patterns import plain_classes
from forkpoint.grammar.schema import enforceable

_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|[\w-]+\s*::=', re.DOTALL)
# Strings, regular expressions and comments of Lark.
_LARK_TEXT = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|(?:#|//)[^\n]*')
_LARK_START = re.compile(r"^\s*[?!]?start\b[^:\n]*:(?!:)", re.MULTILINE)
# llguidance's own: what other parts of this package write, special tokens, which outputs have not, and a temperature.
_NOT_TAKEN = re.compile(r"%llguidance|@[\w-]+|<[^<>\n]*>|\btemperature\s*=")
_HEADER = re.compile(r"\s*%llguidance\s*\{\s*\}")
_SCHEMA = re.compile(rf"{_LARK_TEXT.pattern}|(?P<schema>%json\s*(?=\{{))")
_SPACES = ("whitespace_flexible", "whitespace_pattern", "item_separator", "key_separator")
_IN_REGEX = {"/": r"\/", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
_LONG_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")


def parser_grammar(text: str, *, compact: bool) -> str:
    """Return a grammar in the parser's syntax, which is a kind of Lark. Raises any Exception for one that has no start.

    A text with a rule `start: ...` is Lark and stays as it is, but for llguidance's header without options, and for its
    schemas, which become `enforceable`. Other texts are GBNF.
    """
    bare = _LARK_TEXT.sub("", text)
    if not _LARK_START.search(bare):
        return _lark_of_gbnf(text)
    text = _HEADER.sub("", text, count=1) if _HEADER.match(text) else text
    plain, schemas = _apart(text)
    if found := _NOT_TAKEN.search(_LARK_TEXT.sub("", "".join(plain))):
        raise ValueError(f"Lark may not have {found[0]!r} here; leave it out")
    enforced = (f"%json {_enforced(schema, compact)}" for schema in schemas)
    return "".join(part for pair in zip_longest(plain, enforced, fillvalue="") for part in pair)


def _apart(text: str) -> tuple[list[str], list[Any]]:
    """Return the schemas of a grammar in Lark, and the texts before, between and after them."""
    plain, schemas, begin, at = list[str](), list[Any](), 0, 0
    while (found := _SCHEMA.search(text, at)) is not None:
        at = found.end()
        if found["schema"] is not None:
            plain.append(text[begin : found.start()])
            schema, begin = json.JSONDecoder().raw_decode(text, at)
            schemas.append(schema)
            at = begin
    return [*plain, text[begin:]], schemas


def _enforced(schema: dict[str, Any], compact: bool) -> str:
    """Return a schema that is enforced as a whole, with its own white space if it has llguidance's options for it."""
    options, own = schema.get("x-guidance"), json.loads(enforceable(json.dumps(schema), compact=compact))
    if isinstance(options, dict):
        own["x-guidance"] |= {name: options[name] for name in _SPACES if name in options}
    return json.dumps(own)


def _lark_of_gbnf(text: str) -> str:
    """Return a GBNF grammar in Lark.

    Regular parts become one terminal each, as large as possible, because the parser matches terminals greedily.
    """
    from llguidance import gbnf_to_lark as gbnf

    if "::=" not in text:
        raise ValueError("it has neither a rule 'root ::= ...', as in GBNF, nor a rule 'start: ...', as in Lark")
    rules = gbnf.GrammarParser().parse(_one_line_each(text))
    if "root" not in rules:
        raise ValueError("it has no rule 'root'")
    whole = gbnf.RuleNode("whole", rules["root"].alternatives, "")
    names = {name: f"r{number}" for number, name in enumerate(rules) if name != "root"}
    for rule in rules.values():
        _rename(gbnf, rule, names)
    rules["root"].alternatives = gbnf.RuleRefNode("whole")
    rules = {rule.name: rule for rule in [*rules.values(), whole]}
    gbnf.resolve(rules)
    writer = _Writer(gbnf)
    return "\n".join(writer.rule(rule) for rule in rules.values())


def literal(text: str) -> str:
    """Return a text as a string of the parser's syntax. `/`, `#` and line breaks need no escapes."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def regex_literal(pattern: str) -> str:
    """Return a request's regular expression between slashes. Raises ValueError if it cannot be enforced."""
    plain = plain_classes(pattern)
    return "/" + re.sub(r"\\[\s\S]|[/\n\r\t]", lambda sign: _IN_REGEX.get(sign[0], sign[0]), plain) + "/"


def _one_line_each(text: str) -> str:
    """Return a grammar with each rule in brackets, inside which lines may break.

    Comments, and escapes that the converter gets wrong, are removed.
    """
    found, end, close = [], 0, ""
    for token in _TOKEN.finditer(text):
        found.append(text[end : token.start()])
        end, found_text = token.end(), token[0]
        if found_text.startswith("#"):
            continue
        if found_text.endswith("::="):
            found.append(f"{close}{found_text} (")
            close = ")\n"
        else:
            found.append(_LONG_ESCAPE.sub(_character, found_text))
    return "".join([*found, text[end:], close])


def _character(escape: re.Match[str]) -> str:
    char = chr(int(escape[2] or escape[3], 16))
    return escape[1] + (char if char.isalnum() or ord(char) > 0xFF else f"\\x{ord(char):02x}")


def _rename(gbnf: Any, node: Any, names: dict[str, str]) -> None:
    if isinstance(node, gbnf.RuleNode | gbnf.RuleRefNode):
        node.name = names.get(node.name, node.name)
    elif isinstance(node, gbnf.RegexNode):
        node.rx = plain_classes(node.rx)
    elif isinstance(node, gbnf.LiteralNode):
        node.value = re.sub(r"\\([\[\]])", r"\1", node.value)
    for child in node.children():
        _rename(gbnf, child, names)


class _Writer:
    def __init__(self, gbnf: Any) -> None:
        self._gbnf = gbnf
        self._terminals: dict[str, str] = {}

    def rule(self, rule: Any) -> str:
        if rule.rule_is_terminal:
            return f"{rule.name}: {rule.alternatives}"
        known = len(self._terminals)
        body = self._written(rule.alternatives)
        new = [f"{name}: {text}" for text, name in list(self._terminals.items())[known:]]
        return "\n".join([f"{rule.name}: {body}", *new])

    def _written(self, node: Any) -> str:
        gbnf = self._gbnf
        if node.is_terminal():
            return self._terminal(str(node))
        if isinstance(node, gbnf.RepetitionNode):
            low, high = node.min_times, node.max_times
            return f"({self._written(node.node)}){{{low},{'' if high is None else high}}}"
        if isinstance(node, gbnf.AlternativeNode):
            return "(" + " | ".join(self._written(part) for part in node.alternatives) + ")"
        if not isinstance(node, gbnf.SequenceNode):
            return str(node)
        parts: list[str] = []
        for is_regular, nodes in groupby(node.nodes, lambda part: bool(part.is_terminal())):
            if is_regular:
                parts.append(self._terminal(" ".join(str(one) if one.is_atomic() else f"({one})" for one in nodes)))
            else:
                parts += map(self._written, nodes)
        return " ".join(parts)

    def _terminal(self, text: str) -> str:
        return self._terminals.setdefault(text, f"T{len(self._terminals)}")
