"""Names from calls, entry points and `module:name`, and what is said where there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forkpoint.cache.policies import CAPTURE, EVICTION
from forkpoint.errors import ConfigError, ForkpointError
from forkpoint.models.registry import MODELS
from forkpoint.ops.select import select_table
from forkpoint.plugins import Registry

GROUP = "forkpoint.test_things"


def install(folder: Path, package: str, entries: str) -> None:
    """What an installed package leaves: a module and its metadata."""
    (folder / f"{package}.py").write_text("class Found: ...\nvalue = 3\n")
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{entries}\n")


def things() -> Registry[Any]:
    return Registry("test thing", GROUP, {"own": dict})


def test_names_of_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "outside_one", "theirs = outside_one:Found")
    registry = things()
    registry.add("called", list)
    assert registry.names() == ("called", "own", "theirs")
    assert (registry.find("own"), registry.find("called")) == (dict, list)
    assert registry.find("theirs") is registry.find("outside_one:Found")
    assert registry.find("collections:Counter.fromkeys").__name__ == "fromkeys"
    with pytest.raises(ConfigError, match="the test thing 'theirs' exists already"):
        registry.add("theirs", dict)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("owm", r"there is no test thing 'owm' \(did you mean own\?\); give one of broken, own, twice, or module:name"),
        ("ewn", r"there is no test thing 'ewn'; give one of broken, own, twice, or module:name"),
        ("no_such_module:X", "cannot be imported from 'no_such_module:X': No module named"),
        ("collections:X", "cannot be imported from 'collections:X'"),
        (":X", "cannot be imported from ':X'"),
        ("collections:", "cannot be imported from 'collections:'"),
        ("outside_one:value", "is 3; a class or a function is needed"),
        ("broken", "test thing 'broken' of package outside_one cannot be imported from 'outside_one:Missing'"),
        ("twice", "several packages add the test thing 'twice': uninstall all but one of outside_one, outside_two"),
    ],
)
def test_what_cannot_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "outside_one", "twice = outside_one:Found\nbroken = outside_one:Missing")
    install(tmp_path, "outside_two", "twice = outside_two:Found")
    with pytest.raises(ConfigError, match=said):
        things().find(name)


@pytest.mark.parametrize(
    ("find", "said"),
    [
        (lambda: EVICTION.find("json:dumps"), "a subclass of forkpoint.cache.eviction.EvictionPolicy is needed"),
        (lambda: CAPTURE.find("json:JSONDecoder"), "a subclass of forkpoint.cache.capture.CapturePolicy is needed"),
        (lambda: MODELS.find("json:JSONDecoder"), "a subclass of forkpoint.models.decoder.Model is needed"),
        (lambda: select_table("builtins:repr", False, False), "a function that returns an OpTable is needed"),
    ],
)
def test_things_of_another_kind(find: Callable[[], object], said: str) -> None:
    with pytest.raises(ForkpointError, match=said):
        find()
