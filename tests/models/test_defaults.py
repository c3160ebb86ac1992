"""A field that config.json leaves out has the value that transformers takes for it."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from forkpoint.errors import ForkpointError
from forkpoint.models.config import ModelConfig
from forkpoint.models.registry import load_config
from tests.checkpoints import FAMILIES


def read(config: dict[str, Any], folder: Path) -> Any:
    """What forkpoint makes of it; what is wrong with it, where it is refused."""
    file = folder / "config.json"
    file.unlink(missing_ok=True)  # ext4 flushes a file that is cut to nothing and written again, in milliseconds
    file.write_text(json.dumps(config))
    try:
        return load_config(folder)
    except ForkpointError as error:
        return type(error)


def without(config: dict[str, Any], *path: str) -> dict[str, Any]:
    config = deepcopy(config)
    inner = config
    for name in path[:-1]:
        inner = inner[name]
    del inner[path[-1]]
    return config


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_left_out(family: str, tmp_path: Path) -> None:
    model = FAMILIES[family]()
    kept = {"architectures": [type(model).__name__]}
    full = json.loads(json.dumps({**model.config.to_dict(), **kept}))
    assert isinstance(read(full, tmp_path), ModelConfig)
    paths = [(name,) for name in full if name not in ("architectures", "model_type")]
    paths += [("text_config", name) for name in full.get("text_config", ())]
    paths += [("rope_parameters", name) for name in full.get("rope_parameters") or ()]
    wrong = {}
    for path in paths:
        partial = without(full, *path)
        try:
            theirs = type(model.config).from_dict(deepcopy(partial)).to_dict()
        except Exception:  # transformers needs the field, or refuses the rest without it
            continue
        want, got = read(json.loads(json.dumps({**theirs, **kept})), tmp_path), read(partial, tmp_path)
        if got != want:
            wrong[path] = (got, want)
    assert not wrong


def test_olmo_has_no_positions_only_where_the_base_is_null(tmp_path: Path) -> None:
    full = {**FAMILIES["olmo_hybrid"]().config.to_dict(), "architectures": ["OlmoHybridForCausalLM"]}
    rotaries = []
    for said in ({"rope_parameters": {"rope_theta": None}}, {"rope_theta": None}, {"rope_parameters": None}, {}):
        rotaries.append(read({**without(full, "rope_parameters"), **said}, tmp_path).rotary.dim)
    assert rotaries == [0, 0, 16, 16]
