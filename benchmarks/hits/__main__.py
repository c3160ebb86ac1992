"""Writes the hit table: the page of all settings of vLLM, and the README's table.

    python -m benchmarks.hits

forkpoint's column is played by its own scheduler and cache. vLLM's columns are played by vLLM's own scheduler if vLLM
is installed for this Python, and are otherwise read from the result file.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from benchmarks.hits import forkpoint_engine
from benchmarks.hits.cases import Case, cases
from benchmarks.hits.results import ROOT, Setting, VllmResults, read
from benchmarks.pages import wrapped

README = ROOT / "README.md"
PAGE = ROOT / "docs" / "benchmarks" / "hits.md"
HEADS = {
    "defaults": "vLLM 0.33",
    "finest": "vLLM 0.33, finest",
    "finest_retained": "finest, more states",
    "unit_1": "unit 1",
    "unit_64": "unit 64",
    "retained": "more states",
    "triton": "Triton",
}
README_SETTINGS = ("defaults", "finest")


def table(results: VllmResults, ours: dict[str, int], settings: Sequence[str]) -> list[str]:
    """Return the lines of the table with these settings of vLLM."""
    heads = ["case", "forkpoint", *(HEADS[name] for name in settings)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for case in cases():
        cells = [ours[case.key], *(_cached(results.settings[name], case) for name in settings)]
        lines.append(f"| {case.text} | {' | '.join(f'{cell:,}' for cell in cells)} |")
    return lines


def readme_with(text: str, rows: Sequence[str]) -> str:
    """Return the README with these rows in place of its hit table. Raises ValueError if it has no such table."""
    lines = text.split("\n")
    starts = [i for i, line in enumerate(lines) if line.startswith("| case | forkpoint |")]
    if len(starts) != 1:
        raise ValueError(f"the README has {len(starts)} tables that start with '| case | forkpoint |'; it needs one")
    end = starts[0]
    while lines[end].startswith("|"):
        end += 1
    return "\n".join([*lines[: starts[0]], *rows, *lines[end:]])


def page(results: VllmResults, ours: dict[str, int]) -> str:
    """Return the page of all settings."""
    rows = "\n".join(table(results, ours, list(results.settings)))
    flags = "\n".join(
        f"| {HEADS[name]} | {f'`{setting.flags}`' if setting.flags else 'none'} | {setting.block_tokens:,} "
        f"| {setting.match_unit:,} |"
        for name, setting in results.settings.items()
    )
    first = {name: setting.cases["preempted"].chunks for name, setting in results.settings.items()}
    others = "; ".join(
        f"{model}: {found['defaults']:,}, with Triton {found['triton']:,}" for model, found in results.blocks.items()
    )
    return wrapped(f"""# Cached tokens beside vLLM {results.version}

    $VLLM_ENV/bin/python -m benchmarks.hits    # plays both engines
    python -m benchmarks.hits                  # vLLM's columns from docs/benchmarks/hits.json

Written by this command. vLLM's columns were played on {results.date}. A token counts as cached if the engine did not
compute it. The model is the shape of Qwen3.5-35B-A3B with fp32 states. Nothing is evicted.

{rows}

| column | flags of vLLM | tokens of a block | a hit ends at a multiple of |
|---|---|---|---|
{flags}

## What the columns say

{_comparison(results, ours)}
- Finer hits cost vLLM steps. A new prompt of 5,000 tokens takes {len(first["defaults"])} step with its defaults
  ({_sizes(first["defaults"])} tokens), {len(first["unit_64"])} with unit 64 and {len(first["finest"])} with unit 1
  ({_sizes(first["finest"])}), because the state is stored where a step ends. forkpoint takes one step.
- `--enable-mamba-shared-prefix-checkpoint` works only with MTP drafts and a match unit. It changes no row: unit 1
  without both gives the same numbers.
- The block size is vLLM's own choice. On Hopper its default prefill kernel is FlashInfer's, which asks for blocks of a
  multiple of 64. With Triton's kernel (`--gdn-prefill-backend triton`, and where FlashInfer's is not supported) they
  are a multiple of 16. Other shapes: {others}.

## How vLLM's columns are made

vLLM's own code reads the model's config.json and the flags of `vllm serve`. It chooses the block size, builds the
layers, the KV cache groups, its engine core and its scheduler, and reports the cached tokens. Three parts are replaced,
because this runs without a GPU (`benchmarks/hits/vllm_engine.py`):

- The facts of the card: vLLM sees an {results.card}, compute capability 9.0, 140 GiB.
- The kernels. They are looked up and never called, and weights have no memory.
- The worker that runs the model. It answers each step with scripted tokens and rejects all drafts.

The row of the preempted request calls the method with which each scheduler preempts when memory is full. Breakpoints
are a hint of forkpoint's. The measured speed pages count vLLM's hits on a GPU.

## vLLM's environment

    python3.11 -m venv $VLLM_ENV
    $VLLM_ENV/bin/pip install torch==2.13.0
    $VLLM_ENV/bin/pip install --no-deps vllm==0.33.0 torchvision==0.28.0
    # vllm's own requirements, less those of its kernels
    sed -n 's/^Requires-Dist: //p' $VLLM_ENV/lib/python3.11/site-packages/vllm-*/METADATA |
      grep -v 'extra ==' |
      grep -viE '^(torch|PyNv|flashinfer|tilelang|nv|quack|tokenspeed|humming)' |
      grep -vE '^(fastsafetensors|instanttensor|opencv)' > $VLLM_ENV/requirements.txt
    $VLLM_ENV/bin/pip install -r $VLLM_ENV/requirements.txt torch==2.13.0
""")


def _cached(setting: Setting, case: Case) -> int:
    return setting.cases[case.key].cached[-1]


def _sizes(chunks: Sequence[int]) -> str:
    return " + ".join(f"{chunk:,}" for chunk in chunks)


def _comparison(results: VllmResults, ours: dict[str, int]) -> str:
    """Return a list item for each of the README's settings: where vLLM reuses more than forkpoint."""
    items = []
    for name in README_SETTINGS:
        setting = results.settings[name]
        more = [
            f"{case.text} ({_cached(setting, case):,}, forkpoint {ours[case.key]:,})"
            for case in cases()
            if _cached(setting, case) > ours[case.key]
        ]
        found = f"vLLM reuses **more** than forkpoint in {len(more)} of {len(cases())} rows: {'; '.join(more)}."
        items.append(f"- {HEADS[name]}: {found if more else 'in no row does vLLM reuse more than forkpoint.'}")
    return "\n".join(items)


def main() -> None:
    argparse.ArgumentParser(prog="python -m benchmarks.hits", description=__doc__).parse_args()
    if importlib.util.find_spec("vllm") is not None:
        importlib.import_module("benchmarks.hits.vllm").main()
    results = read()
    ours = {case.key: forkpoint_engine.play(case) for case in cases()}
    write(PAGE, page(results, ours))
    write(README, readme_with(README.read_text(), table(results, ours, README_SETTINGS)))


def write(path: Path, text: str) -> None:
    path.write_text(text)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
