"""How the benchmark talks to a peer: one process per engine, one JSON line per request and per answer.

Standard library alone, because the vLLM peer runs in an environment of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Protocol


@dataclass(frozen=True, slots=True)
class Job:
    """A job: generate `num_tokens` greedy tokens, without an early stop, after each of `prompts`."""

    prompts: list[list[int]]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds from submission to the first token of all prompts, and from there to the last token.

    `cached_tokens` of the prompts were not computed. `token_ids` are those of the first prompt.
    """

    first_token_s: float
    decode_s: float
    cached_tokens: int
    token_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """The start options of every peer."""

    model: str
    threads: int
    max_model_len: int
    kv_cache_gib: int
    eager: bool


class Peer(Protocol):
    """One engine under test."""

    def describe(self) -> str:
        """Return name, version and settings in one line."""

    def run(self, job: Job) -> Answer: ...


def parse_options(argv: Sequence[str] | None = None) -> PeerOptions:
    """Parse the command line that all peers share."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--kv-cache-gib", type=int, default=2)
    parser.add_argument("--eager", action="store_true")
    return PeerOptions(**vars(parser.parse_args(argv)))


def option_args(options: PeerOptions) -> list[str]:
    """Return the arguments that `parse_options` turns into these options."""
    args = ["--model", options.model, "--threads", str(options.threads)]
    args += ["--max-model-len", str(options.max_model_len), "--kv-cache-gib", str(options.kv_cache_gib)]
    return [*args, "--eager"] if options.eager else args


def answers_stream() -> IO[str]:
    """Return the real standard output. Later prints of an engine go to standard error."""
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return stream


def serve(peer: Peer, answers: IO[str]) -> None:
    """Answer jobs from standard input until it closes."""
    print(json.dumps({"peer": peer.describe()}), file=answers, flush=True)
    for line in sys.stdin:
        answer = peer.run(Job(**json.loads(line)))
        print(json.dumps(asdict(answer)), file=answers, flush=True)


def repository_root() -> Path:
    return Path(__file__).resolve().parents[2]
