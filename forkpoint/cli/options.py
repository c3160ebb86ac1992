"""Command-line flags, generated from the option dataclasses so that the two never differ."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Container, Sequence
from dataclasses import MISSING, Field, fields
from functools import partial, update_wrapper
from typing import Any, Final, Literal, NoReturn, get_args, get_origin, get_type_hints

from forkpoint.checks import one_or_more
from forkpoint.cli.config_file import file_arguments
from forkpoint.cli.help import about, nearest, nearest_flag, overview
from forkpoint.cli.spellings import known_arguments
from forkpoint.config import CacheConfig, EngineConfig, SchedulerConfig
from forkpoint.engine.generation_config import sampling_defaults
from forkpoint.errors import ConfigError
from forkpoint.params import SamplingParams
from forkpoint.sizes import num_bytes, num_tokens
from forkpoint.vllm_options import DEFAULT, TOKENS, known_choice

METAVARS: Final = {"model": "PATH", "tokenizer": "PATH"}  # of options whose texts are paths
GROUPS: Final = (
    ("engine options", EngineConfig),
    ("cache options", CacheConfig),
    ("scheduler options", SchedulerConfig),
)


class Parser(argparse.ArgumentParser):
    """A parser that reports usage errors in one line, and takes --help=TOPIC, --config, and other spellings of flags.

    `fill` adds the flags of a subcommand when it is named, so that other commands do not import what these flags need.
    """

    fill: Callable[[Any], None] | None = None

    def parse_known_args(  # type: ignore[override]  # argparse's overloads are about the kind of namespace
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse, and add the flags of a --config file. No argument is left unknown.

        Unknown ones end in SystemExit(2) here already, with the subcommand's most similar flags. --help=TOPIC ends in
        SystemExit(0).
        """
        if args is None:
            args = sys.argv[1:]
        if self.fill is not None:
            fill, self.fill = self.fill, None
            fill(self)
        try:
            args = known_arguments(args, self._option_string_actions)
        except ConfigError as error:
            self.error(str(error))
        topic = next((each.partition("=")[2] for each in args if each.startswith("--help=")), None)
        if topic is not None and self._subparsers is None:
            self._show_help(topic)
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = [each.partition("=")[0] for each in unknown if each.startswith("-")]
            near = filter(None, (nearest_flag(flag, self._option_string_actions) for flag in flags))
            hint = ", ".join(near)
            hint = f"; did you mean {hint}?" if hint else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return self._with_file(found), unknown

    def _get_option_tuples(self, option_string: str) -> list[tuple[argparse.Action, str, str | None]]:
        """Return what a shortened flag may stand for: flags that --help shows, and not vLLM's that change nothing."""
        found = super()._get_option_tuples(option_string)
        if not option_string.startswith("--"):
            return found  # a flag of one letter with its value, such as -O3
        return [each for each in found if each[0].help != argparse.SUPPRESS]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise argparse.ArgumentError, with the most similar choice, if the value is not a choice of the action."""
        if value is None:
            return  # the default, see `_optional`
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = difflib.get_close_matches(str(value), map(str, action.choices or ()), n=1)
            error.message += "".join(f"; did you mean {each}?" for each in near)
            raise

    def _with_file(self, found: argparse.Namespace) -> argparse.Namespace:
        """Add the flags of the file that --config names, unless they are given. SystemExit(2) for a wrong file."""
        path = getattr(found, "config", None)
        if not isinstance(path, str):
            return found
        given = set(vars(found))
        if getattr(found, "model_tag", None) is not None:
            given.add("model")
        try:
            arguments = file_arguments(path, self._option_string_actions, given)
        except ConfigError as error:
            self.error(str(error))
        del found.config
        from_file = vars(super().parse_known_args(arguments)[0])
        for name, value in from_file.items():
            if name not in vars(found):
                setattr(found, name, value)
        return found

    def print_help(self, file: Any = None) -> None:
        """Print about a screen of help, and how to see the rest."""
        print(overview(self), end="", file=file)

    def _show_help(self, topic: str) -> NoReturn:
        text = about(self, topic)
        if text is None:
            self.error(nearest(self, topic))
        print(text, end="")
        raise SystemExit(0)

    def error(self, message: str) -> NoReturn:
        print(f"error: {' '.join(message.split())} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add every option of EngineConfig and its parts. Only given options end up in the namespace."""
    for title, kind in GROUPS:
        add_option_group(parser, title, kind)


def add_option_group(
    parser: argparse.ArgumentParser, title: str, kind: type[Any], only: Container[str] | None = None, **defaults: Any
) -> None:
    """Add every option of the dataclass `kind` that has a help text; a group of its own follows the others.

    `only` names the options to add, None all. `defaults` replace the dataclass's. Only these and given options end up
    in the namespace.
    """
    hints = get_type_hints(kind)
    groups = {title: parser.add_argument_group(title)}
    for field in _options(kind):
        if only is not None and field.name not in only:
            continue
        each = {name: value for name, value in field.metadata.items() if name not in ("bounds", "allowed")}
        name = each.pop("group", title)
        groups[name] = groups.get(name) or parser.add_argument_group(name)
        _add_flag(groups[name], field.name, hints[field.name], defaults.get(field.name, field.default), **each)
    parser.set_defaults(**defaults)


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the engine options given on the command line, by field name, without those that are None."""
    given = [option_values(arguments, kind) for _, kind in GROUPS]
    return {name: value for part in given for name, value in part.items() if value is not None}


def sampling_params(arguments: argparse.Namespace, config: EngineConfig, **extra: Any) -> SamplingParams:
    """Return the given sampling parameters, with the model's defaults for the others and `extra` over all.

    Raises what `sampling_defaults` and SamplingParams raise.
    """
    return SamplingParams(**{**sampling_defaults(config), **option_values(arguments, SamplingParams), **extra})


def option_values(arguments: argparse.Namespace, kind: type[Any]) -> dict[str, Any]:
    """Return the options of the dataclass `kind` in the namespace, by field name."""
    names = {field.name for field in _options(kind)}
    return {name: value for name, value in vars(arguments).items() if name in names}


def _options(kind: type[Any]) -> list[Field[Any]]:
    return [field for field in fields(kind) if field.metadata.get("help")]


def _read(read: Callable[[str], Any], text: str) -> Any:
    """Return what `read` returns, for argparse, which does not know its ConfigError."""
    try:
        return read(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _optional(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a function that returns None for DEFAULT, and leaves other texts to `read`."""

    def optional(text: str) -> Any:
        return None if text == DEFAULT else read(text)

    return update_wrapper(optional, read)  # argparse's errors name the function


def _add_flag(
    group: Any,
    name: str,
    hint: Any,
    default: Any,
    help: str,
    metavar: str | None = None,
    origin: str = "",
    short: str = "",
) -> None:
    """Add a flag for an option of the type `hint`, which is in the namespace only if it is given.

    `origin` precedes the default in the help. `short` is a second name of the flag.
    """
    kinds = {hint, *get_args(hint)}
    choices = next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), None)
    help = help.replace("%", "%%")
    if default not in (None, "", (), MISSING) and "default:" not in help:
        help += f" (default: {origin}{' '.join(map(str, one_or_more(default)))})"
    extra: dict[str, Any] = {"metavar": metavar or METAVARS.get(name, "TEXT")}
    if bool in kinds:
        extra = {"action": argparse.BooleanOptionalAction}
    elif choices:
        extra = {"choices": choices, "type": partial(known_choice, name, choices)}
    elif any(get_origin(kind) in (tuple, Sequence) for kind in kinds):
        extra = {"nargs": "+", "action": _Gather, "metavar": "TEXT"}
    elif float in kinds:
        extra = {"type": float, "metavar": "FLOAT"}
    elif int in kinds and name.endswith("_bytes"):
        extra = {"type": partial(_read, num_bytes), "metavar": "BYTES"}
    elif name in TOKENS:
        extra = {"type": partial(_read, num_tokens), "metavar": "INT"}
    elif int in kinds:
        extra = {"type": int, "metavar": "INT"}
    if type(None) in kinds and "action" not in extra:
        extra["type"] = _optional(extra.get("type", str))
    names = filter(None, ("--" + name.replace("_", "-"), short))
    group.add_argument(*names, default=argparse.SUPPRESS, help=help, **extra)


class _Gather(argparse.Action):
    """A flag that may be given several times, each time with one or more values; they become one tuple."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, (*getattr(namespace, self.dest, ()), *values))
