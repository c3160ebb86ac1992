"""How much the objects behind an object hold: every container, found generically."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from tests.hash_runner import HashRunner

LEAVES = (str, bytes, int, float, bool, type(None), type, ModuleType, FunctionType, BuiltinFunctionType)
CONTAINERS = (dict, list, tuple, set, frozenset, deque, OrderedDict)


def container_sizes(roots: dict[str, Any]) -> Counter[str]:
    """Entries of all containers reachable from `roots`, by the class and attribute that they hang on."""
    sizes: Counter[str] = Counter()
    seen: set[int] = set()
    stack = list(roots.items())
    while stack:
        name, item = stack.pop()
        if isinstance(item, LEAVES) or id(item) in seen or isinstance(item, HashRunner):
            continue
        seen.add(id(item))
        if isinstance(item, MethodType):
            stack.append((name, item.__self__))
        elif isinstance(item, CONTAINERS):
            sizes[name] += len(item)
            members = [*item.keys(), *item.values()] if isinstance(item, dict) else list(item)
            stack += [(name, member) for member in members]
        else:
            stack += [(f"{type(item).__name__}.{key}", value) for key, value in _attributes(item)]
    return sizes


def _attributes(item: Any) -> list[tuple[str, Any]]:
    slots = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
    found = [(name, getattr(item, name)) for name in slots if not name.startswith("__") and hasattr(item, name)]
    return found + list(getattr(item, "__dict__", {}).items())
