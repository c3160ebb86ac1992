"""Draws the contents of the cache after a conversation and its fork: docs/images/cache.svg, from a run of the demo
model.

    python -m scripts.draw_cache [--output FILE]

Blocks, checkpoints and reused tokens are read from the engine's prefix tree and from its answers. Nothing is made up.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from forkpoint import LLM, RequestOutput, SamplingParams
from forkpoint.cache.tree import Node
from forkpoint.demo.conversation import STORIES, system_prompts
from forkpoint.demo.model import default_model

BLOCK = 64
OUTPUT = Path(__file__).parents[1] / "docs" / "images" / "cache.svg"
FIRST = "My name is Nora. My lucky number is 42."
STORY_A, STORY_B = (" ".join(STORIES[first:] + STORIES) for first in (1, 2))  # they part at a dish
LAST = "What is my name?"

LEFT, UNIT = 118, 41  # pixels before the first token, and for each block
COLOURS = {"shared": "#2f7d4f", "a": "#4878a8", "b": "#8a5fa8", "state": "#d9822b", "new": "#c9d3dc"}
STYLE = (
    "text{font:13px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#24292f}"
    ".head{font-size:15px;font-weight:600}.dim{fill:#57606a}.on{fill:#fff}"
)


@dataclass(frozen=True)
class Asked:
    """One request: who asked it, and the engine's counts."""

    name: str
    branch: str
    output: RequestOutput

    @property
    def num_tokens(self) -> int:
        return len(self.output.prompt_token_ids)


@dataclass(frozen=True)
class Kept:
    """One block of the tree: its place from the root, its conversations, and whether the state after it is kept."""

    depth: int
    branch: str  # "shared", "a" or "b"
    has_checkpoint: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    output = parser.parse_args().output
    with LLM(default_model(), dtype="float32", log_level="error") as llm:
        asked = converse(llm)
        kept = list(read_tree(llm, asked))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(draw(asked, kept))


def converse(llm: LLM) -> list[Asked]:
    """Run conversation A with three turns, and B, which continues from A's first answer with other messages."""
    asked: list[Asked] = []

    def ask(branch: str, messages: list[dict[str, str]], text: str) -> list[dict[str, str]]:
        messages = [*messages, {"role": "user", "content": text}]
        (output,) = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=16), use_tqdm=False)
        asked.append(Asked(f"{branch.upper()}, turn {len(messages) // 2}", branch, output))
        return [*messages, {"role": "assistant", "content": output.outputs[0].text}]

    start = ask("a", [{"role": "system", "content": system_prompts()[0].text}], FIRST)
    a = ask("a", start, STORY_A)
    b = ask("b", start, STORY_B)
    ask("a", a, LAST)
    ask("b", b, LAST)
    return asked


def read_tree(llm: LLM, asked: Sequence[Asked]) -> Iterator[Kept]:
    """Yield the blocks in the engine's tree. A block belongs to the conversations whose tokens it holds."""
    scheduler: Any = llm._engine.core.scheduler
    ids = {branch: tokens_of([one for one in asked if one.branch == branch][-1]) for branch in "ab"}
    for node in scheduler.cache.store.tree.nodes():
        path: list[Node] = node.path()
        held = np.frombuffer(b"".join(one.tokens for one in path), np.int32)
        owners = [branch for branch, known in ids.items() if np.array_equal(known[: len(held)], held[: len(known)])]
        yield Kept(node.depth, "shared" if len(owners) == 2 else owners[0], node.checkpoint is not None)


def tokens_of(asked: Asked) -> np.ndarray:
    return np.array([*asked.output.prompt_token_ids, *asked.output.outputs[0].token_ids], np.int32)


def fork_of(asked: Sequence[Asked]) -> int:
    """Return the index of the first token in which the two conversations differ."""
    a, b = (tokens_of([one for one in asked if one.branch == branch][-1]) for branch in "ab")
    size = min(len(a), len(b))
    return int(np.argmax(a[:size] != b[:size]))


def x_of(tokens: float) -> float:
    return LEFT + tokens / BLOCK * UNIT


def draw(asked: Sequence[Asked], kept: Sequence[Kept]) -> str:
    width = round(x_of(max(one.num_tokens for one in asked)) + 176)
    lines = [*draw_tree(asked, kept), *draw_requests(asked)]
    height = 262 + 34 * len(asked)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
            "<title>What the prefix cache holds after a conversation and its fork, and what each turn reused</title>",
            f"<style>{STYLE}</style>",
            f'<rect width="{width}" height="{height}" rx="10" fill="#fff" stroke="#d0d7de"/>',
            *lines,
            "</svg>\n",
        ]
    )


def draw_tree(asked: Sequence[Asked], kept: Sequence[Kept]) -> Iterator[str]:
    rows = {"a": 84, "shared": 120, "b": 156}
    yield text(20, 32, "In the cache afterwards", "head")
    yield from legend(x_of(4.6 * BLOCK), 27)
    fork = x_of(fork_of(asked))
    for branch, name in (("shared", "shared prefix"), ("a", "conversation A"), ("b", "conversation B")):
        blocks = sorted((one for one in kept if one.branch == branch), key=lambda one: one.depth)
        y, first = rows[branch], x_of((blocks[0].depth - 1) * BLOCK)
        if branch == "shared":
            yield text(20, y + 17, name)
        else:
            yield f'<path d="M{first - 8} {rows["shared"] + 12} V{y + 12} H{first}" fill="none" stroke="#8c959f"/>'
            yield text(x_of(blocks[-1].depth * BLOCK) + 14, y + 17, name)
        for one in blocks:
            yield rect(x_of((one.depth - 1) * BLOCK), y, UNIT - 2, 24, COLOURS[branch])
    for one in kept:
        if one.has_checkpoint:
            yield circle(x_of(one.depth * BLOCK) - 1, rows[one.branch] + 12)
    yield f'<path d="M{fork:.1f} 66 V204" stroke="#cf222e" stroke-dasharray="3 3"/>'
    yield text(fork - 6, 74, f"fork at token {fork_of(asked)}", "dim", "end")


def draw_requests(asked: Sequence[Asked]) -> Iterator[str]:
    fork = fork_of(asked)
    yield text(20, 232, "What each turn reused", "head")
    for number, one in enumerate(asked):
        y, cached = 250 + 34 * number, one.output.num_cached_tokens
        yield text(20, y + 17, one.name)
        if cached:
            shared = min(cached, fork // BLOCK * BLOCK)
            yield rect(x_of(0), y, x_of(shared) - x_of(0) - 2, 24, COLOURS["shared"])
            if cached > shared:
                yield rect(x_of(shared), y, x_of(cached) - x_of(shared) - 2, 24, COLOURS[one.branch])
            yield text(x_of(shared / 2), y + 17, f"{cached} tokens reused", "on", "middle")
        yield rect(x_of(cached), y, x_of(one.num_tokens) - x_of(cached), 24, COLOURS["new"])
        if cached:
            yield circle(x_of(cached) - 1, y + 12)
        yield text(x_of(one.num_tokens) + 12, y + 17, f"{one.num_tokens - cached} of {one.num_tokens} computed")


def legend(x: float, y: float) -> Iterator[str]:
    for branch in ("shared", "a", "b"):
        yield rect(x, y - 8, 18, 13, COLOURS[branch])
        x += 20
    yield text(x + 8, y + 4, f"block: keys and values of {BLOCK} tokens", "dim")
    yield circle(x + 264, y - 1)
    yield text(x + 277, y + 4, "checkpoint: recurrent state", "dim")


def rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4" fill="{fill}"/>'


def circle(x: float, y: float) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" fill="{COLOURS["state"]}" stroke="#fff" stroke-width="2"/>'


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(content)}</text>'


if __name__ == "__main__":
    main()
