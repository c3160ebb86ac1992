"""The version that pip installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """Return forkpoint's version, or a note if the source tree is not installed."""
    try:
        return version("forkpoint")
    except PackageNotFoundError:
        return "(a source tree that is not installed)"
