"""The version that pip installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """forkpoint's version; in a source tree that is not installed, that it is one."""
    try:
        return version("forkpoint")
    except PackageNotFoundError:
        return "(a source tree that is not installed)"
