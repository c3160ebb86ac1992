"""Registries of named things that other packages can extend: model families, operator tables, policies."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any, Generic, TypeVar

from forkpoint.errors import ConfigError, ForkpointError

Thing = TypeVar("Thing", bound=Callable[..., Any])


class Registry(Generic[Thing]):
    """Classes or functions of one kind, by name.

    A name is forkpoint's own, an entry point of `group` in an installed package, or was passed to `add`. `find` also
    accepts `module:name`. The thing it imports must be a subclass of `base` or, without a base, callable.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        own: Mapping[str, Thing],
        error: type[ForkpointError] = ConfigError,
        base: type | None = None,
    ) -> None:
        self._kind, self._group, self._error, self._base = kind, group, error, base
        self._named = dict(own)

    def add(self, name: str, thing: Thing) -> None:
        """Add a name in this process only. Raises ConfigError if the name is taken."""
        if name in self.names():
            raise ConfigError(f"the {self._kind} {name!r} exists already; give another name")
        self._named[name] = thing

    def names(self) -> tuple[str, ...]:
        """Return every name, sorted."""
        return tuple(sorted({*self._named, *(point.name for point in self._entry_points())}))

    def find(self, name: str) -> Thing:
        """Return the thing of a name. Raises the registry's error for an unknown name or a failing import."""
        points = [point for point in self._entry_points() if point.name == name]
        if len(points) + (name in self._named) > 1:
            packages = ", ".join(sorted(_package(point) for point in points))
            raise self._error(f"several packages add the {self._kind} {name!r}: uninstall all but one of {packages}")
        if name in self._named:
            return self._named[name]
        if points:
            return self._load(points[0].value, f"{self._kind} {name!r} of package {_package(points[0])}")
        if ":" in name:
            return self._load(name, f"{self._kind} {name!r}")
        # Suggest only names with the same first letter, which people rarely mistype: `gpu` must not suggest `npu`.
        near = get_close_matches(name, [known for known in self.names() if known[:1] == name[:1]], n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        allowed = f"one of {', '.join(self.names())}, or module:name of one that can be imported"
        raise self._error(f"there is no {self._kind} {name!r}{hint}; give {allowed}")

    def _entry_points(self) -> EntryPoints:
        return _installed(self._group, tuple(sys.path))

    def _load(self, place: str, what: str) -> Thing:
        """Import `module:name`. Raises the registry's error, which names `what`, if it fails or does not fit."""
        module, _, path = place.partition(":")
        try:
            found: Any = import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise self._error(f"{what} cannot be imported from {place!r}: {error}") from error
        fits, needed = callable(found), "a class or a function"
        if (base := self._base) is not None:
            fits = isinstance(found, type) and issubclass(found, base)
            needed = f"a subclass of {base.__module__}.{base.__name__}"
        if not fits:
            raise self._error(f"{what} is {found!r}; {needed} is needed")
        thing: Thing = found
        return thing


@cache
def _installed(group: str, path: tuple[str, ...]) -> EntryPoints:
    """Return the entry points of the packages on `path`. This reads files of all packages."""
    return entry_points(group=group)


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.module
