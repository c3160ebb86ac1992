"""Shows the progress bar of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from tqdm import tqdm

from forkpoint.outputs import RequestOutput


class Progress:
    """A progress bar of `total` prompts, with the throughput of prompt and output tokens.

    `make_bar` creates the bar and takes tqdm's arguments.
    """

    def __init__(self, total: int, make_bar: Callable[..., Any] = tqdm) -> None:
        self._bar = make_bar(total=total, desc="Processed prompts", dynamic_ncols=True)
        self._num_input = self._num_output = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, output: RequestOutput) -> None:
        self._num_input += len(output.prompt_token_ids)
        self._num_output += sum(len(completion.token_ids) for completion in output.outputs)
        elapsed_s = max(self._bar.format_dict["elapsed"], 1e-9)
        speeds = f"input: {self._num_input / elapsed_s:.1f} toks/s, output: {self._num_output / elapsed_s:.1f} toks/s"
        self._bar.set_postfix_str(speeds, refresh=False)
        self._bar.update(1)
