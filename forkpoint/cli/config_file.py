"""`--config FILE.yaml`: flags in a file, as in vLLM. The command line takes precedence."""

from __future__ import annotations

import argparse
import json
from collections.abc import Container
from pathlib import Path
from typing import Any

import yaml

from forkpoint.cli.help import nearest_flag
from forkpoint.cli.spellings import known_name
from forkpoint.errors import ConfigError

FLAG = "--config"


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        FLAG,
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="YAML file of flags, without their dashes; the command line takes precedence",
    )


def file_arguments(path: str, flags: dict[str, argparse.Action], given: Container[str]) -> list[str]:
    """Return the command-line arguments in a file, except those whose destination is in `given`.

    `flags` maps known names to their actions. Raises ConfigError for a file that cannot be read, unknown keys (with the
    most similar known one), and values of a wrong JSON type.
    """
    arguments: list[str] = []
    for key, value in _read(path).items():
        flag = known_name("--" + str(key).replace("_", "-"), flags)
        action = flags.get(flag)
        if action is None or flag in (FLAG, "--help"):
            near = nearest_flag(flag, flags)
            hint = f"; did you mean {near.removeprefix('--')}?" if near else ""
            raise ConfigError(f"{path}: {key!r} is not a flag of this command{hint}")
        if action.dest not in given:
            arguments += _arguments(f"{path}: {key}", flag, action, value)
    return arguments


def _read(path: str) -> dict[Any, Any]:
    if not path.endswith((".yaml", ".yml")):
        raise ConfigError(f"{FLAG} {path!r} is not allowed; give a file that ends in .yaml or .yml")
    try:
        found = yaml.safe_load(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{FLAG} {path!r}: {error.strerror}; give a YAML file of flags") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{FLAG} {path!r} is not YAML: {error}") from error
    if found is not None and not isinstance(found, dict):
        raise ConfigError(f"{path} holds a {type(found).__name__}; give lines of 'flag: value'")
    return found or {}


def _arguments(where: str, flag: str, action: argparse.Action, value: Any) -> list[str]:
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{where}={value!r} is not allowed; give true or false")
        if value:
            return [flag]
        if flag.startswith("--no-"):
            return ["--" + flag.removeprefix("--no-")]
        return ["--no-" + flag.removeprefix("--")]
    if isinstance(value, list) and action.nargs == "+":
        return [f"{flag}={_text(where, item)}" for item in value]
    if isinstance(value, dict | list):
        return [f"{flag}={json.dumps(value)}"]  # flags that take no JSON refuse it themselves
    return [f"{flag}={_text(where, value)}"]


def _text(where: str, value: Any) -> str:
    """Return a scalar as it is written on the command line. Raises ConfigError for other values, also booleans."""
    if value is None or isinstance(value, bool | dict | list):
        raise ConfigError(f"{where}: {json.dumps(value)} is not allowed; give a text or a number")
    return str(value)
