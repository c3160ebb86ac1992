"""Calls next to thinking and in it."""

from __future__ import annotations

from tests.server.conditions.condition import LS, PWD, called, condition, hermes, tagged, xml

THINKING = [
    condition("thinking", "hermes", "hm\n</think>\n\nSo.", content="So.", reasoning="hm", inside=True),
    condition("thinking that the model opens", "hermes", "<think>\nhm\n</think>\n\nSo.", content="So.", reasoning="hm"),
    condition("thinking that never ends", "hermes", "hm", reasoning="hm", inside=True),
    condition("empty thinking", "hermes", "<think>\n\n</think>\n\nSo.", content="So."),
    condition("thinking only", "hermes", "hm</think>", reasoning="hm", inside=True),
    condition("opened twice", "hermes", "<think>hm</think>So", content="So", reasoning="hm", inside=True),
    condition("ended twice", "hermes", "hm</think>So. </think>More.", content="So. More.", reasoning="hm", inside=True),
    condition("ended without a beginning", "hermes", "a thought</think>\nthe answer", content="a thought\nthe answer"),
    condition(
        "begins again on a line", "hermes", "a</think>b\n<think>c</think>d", content="bd", reasoning="ac", inside=True
    ),
    condition(
        "prose about the tags of thinking", "hermes", "Write <think>x</think> so.", content="Write <think>x</think> so."
    ),
    condition("a quoted end in the content", "hermes", "It ends with `</think>`.", content="It ends with `</think>`."),
    condition(
        "call in the thinking", "qwen3_coder", f"I look.\n\n{tagged(xml('ls'))}", LS, reasoning="I look.", inside=True
    ),
    condition("call begins the thinking", "qwen3_coder", tagged(xml("ls")), LS, inside=True),
    condition(
        "call in thinking that the model opened",
        "qwen3_coder",
        f"<think>I look.\n{tagged(xml('ls'))}",
        LS,
        reasoning="I look.",
    ),
    condition(
        "call in the thinking, which then ends",
        "qwen3_coder",
        f"I look.\n{tagged(xml('ls'))}\n</think>\nDone",
        LS,
        reasoning="I look.",
        content="Done",
        inside=True,
    ),
    condition(
        "JSON call in the thinking", "hermes", f"I look.\n{tagged(hermes('ls'))}", LS, reasoning="I look.", inside=True
    ),
    condition(
        "call without its opening in the thinking",
        "qwen3_coder",
        f"I look.\n{xml('ls')}",
        LS,
        reasoning="I look.",
        inside=True,
    ),
    condition(
        "call behind the thinking", "qwen3_coder", f"hm</think>{tagged(xml('ls'))}", LS, reasoning="hm", inside=True
    ),
    condition(
        "prose about a call's tag in the thinking",
        "qwen3_coder",
        "The marker is `<tool_call>` here.</think>So",
        content="So",
        reasoning="The marker is `<tool_call>` here.",
        inside=True,
    ),
    condition(
        "quoted call's tags in the thinking",
        "qwen3_coder",
        "It is `<tool_call>quoted</tool_call>` here.</think>So",
        content="So",
        reasoning="It is `<tool_call>quoted</tool_call>` here.",
        inside=True,
    ),
    condition(
        "whole call of an unknown function in the thinking",
        "qwen3_coder",
        f"One writes {tagged(xml('ls', 'other'))} there.</think>So",
        content="So",
        reasoning=f"One writes {tagged(xml('ls', 'other'))} there.",
        inside=True,
    ),
    condition(
        "whole JSON call of an unknown function in the thinking",
        "hermes",
        'It is\n<tool_call>{"name": "other", "arguments": {"a": 1}}</tool_call>\nthen.</think>So',
        content="So",
        reasoning='It is\n<tool_call>{"name": "other", "arguments": {"a": 1}}</tool_call>\nthen.',
        inside=True,
    ),
    condition(
        "unknown function behind a known one in the thinking",
        "qwen3_coder",
        f"{tagged(xml('ls'))}\n{tagged(xml('ls', 'other'))}",
        LS,
        called("other", command="ls"),
        inside=True,
    ),
    condition(
        "quoted tag, then a call, in the thinking",
        "qwen3_coder",
        f"<tool_call>` quoted. {tagged(xml('ls'))}",
        LS,
        reasoning="<tool_call>` quoted.",
        inside=True,
    ),
    condition(
        "bare JSON in the thinking is none",
        "llama3_json",
        '{"name": "run", "parameters": {"command": "ls"}}</think>So',
        content="So",
        reasoning='{"name": "run", "parameters": {"command": "ls"}}',
        inside=True,
    ),
    condition(
        "thinking between calls",
        "qwen3_coder",
        f"<think>a</think>{tagged(xml('ls'))}\n<think>b</think>{tagged(xml('pwd'))}",
        LS,
        PWD,
        reasoning="ab",
    ),
    condition("prompt-closed thinking, plain answer", "hermes", "\n\nSo.", content="\n\nSo."),
]
