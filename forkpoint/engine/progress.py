"""Shows the progress bar of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

from forkpoint.outputs import RequestOutput


class Progress:
    """A progress bar of `total` prompts, with the throughput of prompt and output tokens.

    `make_bar` creates the bar and takes tqdm's arguments.
    """

    def __init__(self, total: int, make_bar: Callable[..., Any]) -> None:
        self._bar = make_bar(total=total, desc="Processed prompts", dynamic_ncols=True)
        self._num_input = self._num_output = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, outputs: Sequence[RequestOutput]) -> None:
        """Count prompts that have ended."""
        self._num_input += sum(len(output.prompt_token_ids) for output in outputs)
        self._num_output += sum(len(each.token_ids) for output in outputs for each in output.outputs)
        elapsed_s = max(self._bar.format_dict["elapsed"], 1e-9)
        speeds = f"input: {self._num_input / elapsed_s:.1f} toks/s, output: {self._num_output / elapsed_s:.1f} toks/s"
        self._bar.set_postfix_str(speeds, refresh=False)
        self._bar.update(len(outputs))
