"""Tool calls written as Python: `[f(x=1, y="a"), g()]`, or a call on each line."""

from __future__ import annotations

import ast
import json
import warnings
from typing import Any

from forkpoint.server.tool_call import Body, Call

WORDS = {"true": True, "false": False, "null": None}  # JSON's, which models mix in


def read_python(body: Body) -> list[Call]:
    """Raises ValueError, and what `ast.parse` raises, for what is not all calls with named, constant arguments."""
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
    return [_call(call) for call in calls]


def _call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        raise ValueError("a call names its function and all arguments")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("a call names all arguments")
        arguments[keyword.arg] = _value(keyword.value)
    told = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    told.encode()  # half a character is none
    return Call(ast.unparse(node.func), told)


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=word) if word in WORDS:
            return WORDS[word]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
            if len(names) == len(keys):
                return dict(zip(names, map(_value, values), strict=True))
    raise ValueError("an argument is a constant")
