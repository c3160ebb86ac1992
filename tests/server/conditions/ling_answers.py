"""Calls in the notation of Ling."""

from __future__ import annotations

from tests.server.conditions.condition import LS, PWD, called, condition


def ling(name: str, **parameters: str) -> str:
    pairs = "".join(f"\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for key, value in parameters.items())
    return f"<tool_call>{name}{pairs}\n</tool_call>"


LING = [
    condition("Ling", "ling3", ling("run", command="ls"), LS),
    condition("Ling, one line", "ling3", ling("run", command="ls").replace("\n", ""), LS),
    condition("Ling, types", "ling3", ling("weather", city="7", days="3"), called("weather", city="7", days=3)),
    condition("Ling, no arguments", "ling3", "<tool_call>now</tool_call>", called("now")),
    condition(
        "Ling, several",
        "ling3",
        f"So.\n{ling('run', command='ls')}\n{ling('run', command='pwd')}",
        LS,
        PWD,
        content="So.",
    ),
    condition(
        "Ling, tags in a value",
        "ling3",
        ling("run", command="a </tool_call> <b> </arg_value> c"),
        called("run", command="a </tool_call> <b> </arg_value> c"),
    ),
    condition(
        "Ling, example calls in a value",
        "ling3",
        f"{ling('run', command=ling('run', command='ls') + ling('now') + '!', note='x')}\n{ling('now')}",
        called("run", command=ling("run", command="ls") + ling("now") + "!", note="x"),
        called("now"),
    ),
    condition(
        "Ling, value unclosed",
        "ling3",
        "<tool_call>run\n<arg_key>command</arg_key>\n<arg_value>ls\n<arg_key>note</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
        called("run", command="ls", note="x"),
    ),
    condition("Ling, no end", "ling3", "<tool_call>run<arg_key>command</arg_key><arg_value>ls", LS),
    condition(
        "Ling, unclosed value and another call",
        "ling3",
        f"<tool_call>run<arg_key>command</arg_key><arg_value>ls</tool_call>\n{ling('now')}",
        LS,
        called("now"),
    ),
    condition("Ling, unknown function", "ling3", ling("other", a="x"), called("other", a="x")),
    condition(
        "Ling, prose",
        "ling3",
        "Say <tool_call>name</tool_call> or <tool_call>two words</tool_call>.",
        content="Say <tool_call>name</tool_call> or <tool_call>two words</tool_call>.",
    ),
    condition(
        "Ling, line ends as \\n",
        "ling3",
        "<tool_call>run\\n<arg_key>command</arg_key>\\n<arg_value>ls</arg_value>\\n</tool_call>",
        LS,
    ),
]
