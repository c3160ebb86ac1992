"""Shows the progress bar of a batch."""

from __future__ import annotations

from tqdm import tqdm

from forkpoint.outputs import RequestOutput


class Progress(tqdm):  # type: ignore[misc]  # mypy does not look into the library
    """A progress bar of `total` prompts, with the throughput of prompt and output tokens."""

    def __init__(self, total: int) -> None:
        super().__init__(total=total, desc="Processed prompts", dynamic_ncols=True)
        self._num_input = self._num_output = 0

    def add(self, output: RequestOutput) -> None:
        self._num_input += len(output.prompt_token_ids)
        self._num_output += sum(len(completion.token_ids) for completion in output.outputs)
        elapsed_s = max(self.format_dict["elapsed"], 1e-9)
        speeds = f"input: {self._num_input / elapsed_s:.1f} toks/s, output: {self._num_output / elapsed_s:.1f} toks/s"
        self.set_postfix_str(speeds, refresh=False)
        self.update(1)
