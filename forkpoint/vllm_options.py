"""Options as vLLM takes them: other spellings of values, and those that change nothing or are missing here.

vllm_flags.yaml lists the latter.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

import yaml

from forkpoint.checks import shown
from forkpoint.config import CacheConfig, EngineConfig, SchedulerConfig
from forkpoint.errors import ConfigError
from forkpoint.sizes import num_bytes, num_tokens

ON, OFF = "on", "off"
ANY: Final = "any"
DEFAULT: Final = "None"  # vLLM's text for the default of an option that may be None
TOKENS: Final = ("max_model_len", "max_num_batched_tokens")  # options whose numbers may have units, or be "auto"
# Values of vLLM that are called otherwise here, by the option's name.
OTHER_VALUES: Final = {
    ("dtype", "float"): "float32",
    ("kv_cache_dtype", "fp8_e4m3"): "fp8",
    ("load_format", "hf"): "auto",
    ("mamba_ssm_cache_dtype", "auto"): "float32",
}
NO_FLOAT16: Final = "nothing here computes in float16; give bfloat16, or float32, as auto does for float16 weights"
# Values of vLLM that are missing here, and what to give instead.
MISSING_VALUES: Final = {("dtype", "half"): NO_FLOAT16, ("dtype", "float16"): NO_FLOAT16}
# Options of vLLM's LLM that belong to the server here.
OF_SERVERS: Final = (
    "allowed_media_domains",
    "disable_log_stats",
    "max_logprobs",
    "reasoning_parser",
    "scheduling_policy",
    "served_model_name",
)


@dataclass(frozen=True, slots=True)
class VllmFlags:
    """A row of the table. The table's file describes the fields."""

    flags: str
    why: str
    values: str = ""
    is_logged: bool = False
    switch: bool = False
    nargs: str | None = None

    def takes(self, value: str) -> bool:
        return self.values == ANY or value in self.values.split()

    def logs(self, value: str) -> bool:
        """Return whether the log says that the value, which the row takes, changes nothing."""
        return (self.is_logged or self.values == ANY) and not (self.switch and value == OFF)

    def explanation(self) -> str:
        """Return which values of vLLM's flag are accepted, and why."""
        if not self.values:
            return f"vLLM's; refused: {self.why}"
        values = "any value, without effect" if self.values == ANY else " or ".join(self.values.split())
        return f"vLLM's; accepts {values}: {self.why}"

    def refusal(self, value: str) -> str:
        """Return why `value` is not possible, and which values are."""
        others = ""
        if self.values and not self.switch:
            others = f"give {' or '.join(self.values.split())}, or "
        return f"{value} is not possible here: {self.why}; {others}leave it out"


TABLE_TEXT: Final = files("forkpoint").joinpath("vllm_flags.yaml").read_text("utf-8")
LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast in C
TABLE: Final = tuple(VllmFlags(**row) for row in yaml.load(TABLE_TEXT, LOADER))


def known_choice(name: str, choices: Collection[str], text: str) -> str:
    """Return the choice of the option `name` that `text` is another spelling of, or else `text` itself.

    Raises ConfigError for a value of vLLM's that is missing here.
    """
    lower = text.lower()
    if (name, lower) in MISSING_VALUES:
        raise ConfigError(f"{name}={text} is not possible: {MISSING_VALUES[name, lower]}")
    return next((value for value in (text, lower, OTHER_VALUES.get((name, lower), lower)) if value in choices), text)


def plain_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the options that `EngineConfig.from_flat` takes, as it spells them, and log lines about the others.

    None stands for the default. Raises ConfigError for an option of vLLM's that asks for what is missing here.
    """
    kinds, rows = _kinds(), {name: row for row in TABLE for name in _names(row)}
    found: dict[str, Any] = {}
    lines = []
    for name, value in options.items():
        if value is None:
            continue
        if name in kinds:
            found[name] = _spelled(name, kinds[name], value)
        elif name in OF_SERVERS:
            lines.append(f"{name} changes nothing here: it is an option of `forkpoint serve`")
        elif name in rows:
            lines += _check(name, value, rows[name])
        else:
            found[name] = value  # from_flat names it as unknown
    return {name: value for name, value in found.items() if value is not None}, lines


def _names(row: VllmFlags) -> list[str]:
    """Return the names in Python of a row's flags."""
    return [flag.split("/")[0].removeprefix("--").replace("-", "_") for flag in row.flags.split()]


@cache
def _kinds() -> dict[str, Any]:
    """Return the type of each option."""
    return {
        name: kind
        for each in (SchedulerConfig, CacheConfig, EngineConfig)
        for name, kind in get_type_hints(each).items()
    }


def _spelled(name: str, kind: Any, value: Any) -> Any:
    """Return the value of an option as EngineConfig spells it; None for the default."""
    if name in TOKENS and (isinstance(value, str) or value == -1):
        return num_tokens(str(value))
    if name.endswith("_bytes") and isinstance(value, str):
        return num_bytes(value)
    choices = next((get_args(each) for each in (kind, *get_args(kind)) if get_origin(each) is Literal), None)
    if choices is None:
        return value
    if type(value).__module__ == "torch":  # a dtype
        value = str(value).removeprefix("torch.")
    return known_choice(name, choices, value) if isinstance(value, str) else value


def _check(name: str, value: Any, row: VllmFlags) -> list[str]:
    """Return the log line of a given option that changes nothing, if it has one. Raises ConfigError."""
    if value in ("", [], {}, ()) or (value is False and not row.switch):  # as good as left out
        return []
    text = json.dumps(value, default=str) if isinstance(value, Mapping) else str(value)
    if isinstance(value, bool):
        text = ON if value else OFF
    if not row.takes(text):
        raise ConfigError(row.refusal(f"{name}={shown(value)}"))
    return [f"{name} changes nothing here: {row.why}"] if row.logs(text) else []
