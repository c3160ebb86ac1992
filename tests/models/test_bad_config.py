"""A config.json with a wrong value anywhere: read, or refused in words, and never by an error that nobody named."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forkpoint.cli.model_shape import read_shape
from forkpoint.errors import ForkpointError, ModelFolderError
from forkpoint.models.fields import Fields, class_defaults
from forkpoint.models.registry import FAMILIES
from forkpoint.plugins import Registry

WRONG: list[Any] = ["x", -1, 3, float("inf"), [None], {"a": 1}]
# What no config here has, and some family reads.
RARE = (
    "attn_layer_indices",
    "compression_config",
    "full_attn_idxs",
    "hybrid_override_pattern",
    "kda_lower_bound",
    "layer_types",
    "layers_block_type",
    "linear_attn_config",
    "mlp_layer_types",
    "mlp_multipliers",
    "mlp_only_layers",
    "partial_rotary_factor",
    "quantization_config",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "ssm_multipliers",
    "text_config",
    "time_step_limit",
)


def wrong_configs(config: dict[str, Any], others: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(field, the config with it set wrong): `others`, its own fields, and those of its inner objects."""
    for name in {**dict.fromkeys(others), **config}:
        for value in WRONG:
            yield f"{name}={value!r}", {**config, name: value}
        inner = config.get(name)
        for field in inner if isinstance(inner, dict) else ():
            for value in WRONG:
                yield f"{name}.{field}={value!r}", {**config, name: {**inner, field: value}}


def defaults(architecture: str) -> dict[str, Any]:
    family = next(family for family in FAMILIES if architecture in family.architectures)
    fields = class_defaults(family.config_class)[0] if family.config_class else {}
    return {**fields, **family.defaults, "architectures": [architecture]}


def by_architecture() -> dict[str, list[dict[str, Any]]]:
    """Published configs, and the defaults of families of which none is here."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((Path(__file__).parent / "hub_configs").glob("*.json")):
        config = json.loads(path.read_text())
        found.setdefault((config.get("architectures") or ["Mamba2ForCausalLM"])[0], []).append(config)
    others = [family.architectures[0] for family in FAMILIES if found.keys().isdisjoint(family.architectures)]
    return found | {name: [defaults(name)] for name in others}


CONFIGS = by_architecture()


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_wrong_field_is_told_in_words(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields of published configs and of other families' defaults, and those that their families have besides.

    Each is wrong once for an architecture, in the first config that has it.
    """
    monkeypatch.setattr(Registry, "_entry_points", lambda registry: [])  # which are looked up anew each time
    tried: set[str] = set()
    num_refused = 0
    for config in CONFIGS[architecture]:
        for what, wrong in wrong_configs(config, [*RARE, *defaults(architecture)]):
            if what in tried:
                continue
            tried.add(what)
            file = tmp_path / "config.json"
            file.unlink(
                missing_ok=True
            )  # ext4 flushes a file that is cut to nothing and written again, in milliseconds
            file.write_text(json.dumps(wrong))
            try:
                read_shape(tmp_path)
            except ForkpointError as error:
                num_refused += 1
                assert str(error), what
            except Exception as error:
                pytest.fail(f"{what} ends in {error!r}")
    assert num_refused > 50


def test_a_bound_that_no_float_holds_is_told_in_words() -> None:
    with pytest.raises(ModelFolderError, match="a lower and an upper bound are needed"):
        Fields({"time_step_limit": [0, 10**400]}, "config.json").limits("time_step_limit")
