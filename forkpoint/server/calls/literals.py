"""Turns whole values, which models write as JSON or as Python literals, into strict JSON."""

from __future__ import annotations

import ast
import json
import warnings
from typing import Final

from forkpoint.server.calls.incoming import Incoming
from forkpoint.server.calls.json_text import JsonText, strict_json

NOT_JSON: Final = object()
JSON_WORDS: Final = {"true": True, "false": False, "null": None}
MAX_PYTHON_CHARACTERS = 65_536  # Python's own parser needs a hundred times the memory of the text


def literal_json(text: str) -> str | None:
    """Return a literal of JSON or Python as JSON, or None if `text` is not a literal. JSON is returned unchanged."""
    if is_json(text):
        return text
    return _loose_json(text) or _python_json(text)


def is_json(text: str) -> bool:
    return strict_json(text, NOT_JSON) is not NOT_JSON


def _loose_json(text: str) -> str | None:
    source, value = Incoming(), JsonText()
    source.append(text)
    source.finish(cut=False)
    written = "".join(part for part in value.read(source) if part is not None)
    if not value.done or not value.sound or source.text[source.at :].strip():
        return None
    return written


def _python_json(text: str) -> str | None:
    if len(text) > MAX_PYTHON_CHARACTERS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns about unknown escapes
            tree = ast.parse(text.strip(), mode="eval").body
        value = ast.literal_eval(_Words().visit(tree))
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        written.encode()  # raises for lone surrogates
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return written


class _Words(ast.NodeTransformer):
    """Replaces JSON's words, which models mix in, by constants, and sets by lists. Checks that keys are strings."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(JSON_WORDS[node.id]) if node.id in JSON_WORDS else node

    def visit_Set(self, node: ast.Set) -> ast.expr:
        return ast.List([self.visit(element) for element in node.elts], ast.Load())

    def visit_Dict(self, node: ast.Dict) -> ast.expr:
        if not all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in node.keys):
            raise ValueError("an object has a key that is not a string")
        self.generic_visit(node)
        return node
