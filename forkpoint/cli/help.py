"""Prints help for commands with many options, as in vLLM: an overview, one group, or the options that match a word."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping
from copy import copy
from typing import Final

from forkpoint.cli.vllm_flags import VllmFlag, table_text

SCREEN: Final = 30  # --help of a parser with more options shows an overview
# The options that the overview of a large parser shows, in this order.
_FIRST: Final = """
--input-file --output-file --model --prompt --system-prompt --quick --config --host --port --url --base-url
--api-key --served-model-name --max-model-len --max-num-seqs --dtype
--kv-cache-dtype --gpu-memory-utilization --tensor-parallel-size --speculative-config --max-tokens --temperature
--dataset-name --num-prompts --max-concurrency --request-rate
"""
LIST, ALL, VLLM = "listgroup", "all", "vllm"
SIMILAR, NEARLY_SAME = 0.6, 0.9  # least similarity of a flag, and of one that only --help=WORD shows (difflib's ratio)


def overview(parser: argparse.ArgumentParser) -> str:
    """Return the whole help of a small parser; of a large one, the most used options and how to see the others."""
    if len(_options(parser)) <= SCREEN:
        return parser.format_help()
    shown = [action for name in _FIRST.split() for action in _options(parser) if name in action.option_strings]
    hidden = len(_options(parser)) - len(shown)
    text = _rendered(parser, {"arguments": _positionals(parser), "most used options": shown}, heading=True)
    return (
        f"{text}\n{hidden} more options:\n  --help=all        show all of them\n"
        f"  --help=listgroup  list their groups\n  --help=GROUP      show one group: {', '.join(_groups(parser))}\n"
        "  --help=WORD       show the options with this word in their name or description\n"
    )


def about(parser: argparse.ArgumentParser, topic: str) -> str | None:
    """Return the help on a topic: `all`, `listgroup`, `vllm`, a group's name, or a word. None if nothing matches."""
    topic, groups = topic.strip().lower(), _groups(parser)
    if topic == ALL:
        if len(_options(parser)) > SCREEN:
            parser.usage = _usage(parser)
        return parser.format_help()
    if not topic:
        return overview(parser)
    if topic == LIST:
        lines = [f"  {name:<12} {title} ({len(actions)})" for name, (title, actions) in groups.items()]
        return "\n".join([f"groups of options of {parser.prog}, for --help=GROUP:", *lines, ""])
    if topic in groups:
        title, actions = groups[topic]
        return _rendered(parser, {title: actions})
    word = topic.lstrip("-").replace("_", "-")
    options = _options(parser)
    of_vllm = [_with_help(action) for action in parser._actions if isinstance(action, VllmFlag)]
    if topic == VLLM and of_vllm:
        return table_text()
    exact = [action for action in (*options, *of_vllm) if f"--{word}" in action.option_strings]
    named = [action for action in options if any(word in name for name in action.option_strings)]
    described = [action for action in options if topic in (action.help or "").lower()]
    found = exact or [action for action in options if action in named or action in described]
    found = found or [action for action in of_vllm if any(word in name for name in action.option_strings)]
    if not found:
        return None
    return _rendered(parser, {f"options with {topic!r}": found})


def _with_help(flag: VllmFlag) -> argparse.Action:
    """Return a copy of the flag that help shows."""
    shown = copy(flag)
    shown.help = flag.explanation.replace("%", "%%")
    return shown


def nearest(parser: argparse.ArgumentParser, topic: str) -> str:
    """Return the error message for a topic that `about` does not know, with the most similar one."""
    names = [LIST, ALL, *_groups(parser)]
    flag = nearest_flag(f"--{topic.lower()}", parser._option_string_actions)
    if flag is not None:
        names.append(flag.removeprefix("--"))
    near = difflib.get_close_matches(topic.lower(), names, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"--help={topic} names no option; {hint}give {ALL}, {LIST}, a word, or one of {', '.join(_groups(parser))}"


def nearest_flag(flag: str, known: Mapping[str, argparse.Action]) -> str | None:
    """Return the flag in `known` that is most similar to `flag`; None if none is, and for flags of one letter.

    A flag of vLLM's that help does not show is found only if it is nearly the same.
    """
    if not flag.startswith("--"):
        return None
    shown = [name for name, action in known.items() if action.help != argparse.SUPPRESS]
    near = difflib.get_close_matches(flag, known, n=1, cutoff=NEARLY_SAME)
    return next(iter(near or difflib.get_close_matches(flag, shown, n=1, cutoff=SIMILAR)), None)


def _options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return all options except --help and those that only the documentation lists."""
    return [action for _, actions in _groups(parser).values() for action in actions]


def _positionals(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if not action.option_strings]


def _usage(parser: argparse.ArgumentParser) -> str:
    """Return one line of usage: positional arguments, required options, and [options] for all others."""
    names = [f"[{action.metavar}]" for action in _positionals(parser)]
    needed = [f"{action.option_strings[0]} {action.metavar}" for action in _options(parser) if action.required]
    return " ".join([parser.prog, *names, *needed, "[options]"])


def _groups(parser: argparse.ArgumentParser) -> dict[str, tuple[str, list[argparse.Action]]]:
    """Return the title and the visible options of each group, by the first word of its title.

    The last word is the key if the first is taken.
    """
    found: dict[str, tuple[str, list[argparse.Action]]] = {}
    for group in parser._action_groups:
        visible = [action for action in group._group_actions if action.option_strings and action.dest != "help"]
        visible = [action for action in visible if action.help != argparse.SUPPRESS]
        title = group.title or "options"
        words = [word.strip("()") for word in title.lower().split()]
        if visible:
            found[words[-1] if words[0] in found else words[0]] = (title, visible)
    return found


def _rendered(
    parser: argparse.ArgumentParser, sections: dict[str, list[argparse.Action]], heading: bool = False
) -> str:
    formatter = parser._get_formatter()
    if heading:
        formatter.add_usage(_usage(parser), (), ())
        formatter.add_text(parser.description)
    for title, actions in sections.items():
        formatter.start_section(title)
        formatter.add_arguments(actions)
        formatter.end_section()
    return formatter.format_help()
