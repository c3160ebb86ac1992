"""`python -m train.card RUN`: put the model of a run in its place, with its card and its loss curve.

RUN is the output folder of `python -m train`. Needs matplotlib (`pip install forkpoint[plots]`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from evaluation.score import Count
from evaluation.suite import DEMO_MODEL
from train.loss import MTP_WEIGHT, WEIGHTS
from train.run import REPORT

PLOT = "loss.png"
CURVES = (
    ("answers", "loss_scored"),
    ("answers, MTP head", "mtp_loss_scored"),
    ("other replies", "loss_said"),
    ("other replies, MTP head", "mtp_loss_said"),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m train.card", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--into", type=Path, default=DEMO_MODEL)
    options = parser.parse_args()
    report = json.loads((options.run / REPORT).read_text(encoding="utf-8"))
    tokenizer = hashlib.sha256((DEMO_MODEL / "tokenizer.json").read_bytes()).hexdigest()
    if tokenizer != report["tokenizer_sha256"]:
        parser.error(f"{options.run} was trained with another tokenizer than the one in {DEMO_MODEL}")
    options.into.mkdir(parents=True, exist_ok=True)
    for old in options.into.glob("model-*.safetensors"):
        old.unlink()
    for path in (*options.run.glob("model*.safetensors*"), options.run / "config.json"):
        shutil.copyfile(path, options.into / path.name)
    plot(options.into / PLOT, report["log"])
    (options.into / "README.md").write_text(card(report), encoding="utf-8")


def plot(path: Path, log: list[dict[str, Any]]) -> None:
    """Draw cross entropies, averaged over some steps each, against the tokens seen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, key in CURVES:
        axes.plot([r["num_tokens"] / 1e6 for r in log], [max(r[key], 1e-4) for r in log], label=name, linewidth=1)
    axes.set(xlabel="million tokens", ylabel="cross entropy, nats per token", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=100, metadata={"Software": ""})


def card(report: dict[str, Any]) -> str:
    """Return the model card in Markdown."""
    options, last = report["options"], report["log"][-1]
    start = f" --from {options['start_from']}" if options["start_from"] else ""
    rates = f"Muon ({options['matrix_rate']}) for matrices, AdamW ({options['other_rate']}) for all else"
    weights = ", ".join(f"{kind.name.lower()} tokens {weight}" for kind, weight in WEIGHTS.items() if weight)
    return f"""---
license: apache-2.0
library_name: transformers
tags: [hybrid, gated-delta-net, mtp]
---
# A small hybrid model

A Qwen3-Next-architecture model of {report["num_parameters"]:,} parameters (bf16), trained from scratch on dialogues
that forkpoint's own generator writes. It remembers facts, follows corrections, keeps totals and tracks positions in
conversations of up to 8,192 tokens. It exists so that a wrong state in a cache shows up as a wrong answer. It is no
general assistant: outside of its few kinds of sentences it is lost.

- 12 layers, three gated delta nets to one gated attention; hidden size 256, dense MLPs of 768.
- Delta nets: 2 key and 4 value heads of 64. Attention: 4 query and 2 KV heads of 64, a quarter of each rotated.
- Byte-level BPE, tied embeddings, ChatML template; `mtp.*` holds a head that drafts the token after next (one attention
  layer, Qwen3-Next's layout; the model's own embedding and output layer).

## Training
| | |
|---|---|
| data | generated while training, seed {options["seed"]}; no dialogue twice; held-out facts in none of them |
| steps | {last["step"]:,} of {options["tokens_per_batch"]:,} tokens: {last["num_tokens"] / 1e6:,.0f} M tokens |
| row lengths | 512 to 1,024 tokens first, up to 8,192 in the last quarter |
| time | {last["elapsed_s"]:.0f} s on one {report["device"]}, compilation included |
| optimiser | {rates}; linear decay to zero |
| loss | {weights}; and {MTP_WEIGHT} of the MTP head's |

To repeat it on a GPU: `python -m train --output RUN --seed {options["seed"]} --num-steps {last["step"]}{start}`, then
`python -m train.card RUN`. That follows the same plan by steps instead of by the clock; a GPU's sums differ from run to
run, and with them the weights' last digits.

![Loss]({PLOT})

## Scores
Greedy, from a cold state, exact match of the whole answer on held-out dialogues. Columns: tokens from the newest fact
that the answer depends on.

Every answer in {report["dialogues"]["num_dialogues"]} whole dialogues, by what is asked for:

{_scores(report["dialogues"])}

The suite of single questions ({report["suite"]["num_dialogues"]} of them, `python -m evaluation`), by task:

{_scores(report["suite"])}

## The MTP head
`python -m train.mtp --from RUN --output HEAD --time-limit-s 120` teaches it to draft several tokens one after the
other; the rest of the model stays as it is. Before that, this is the share of its first drafts that are the model's
own next token. The first token of a message is never drafted.

| along | accepted |
|---|---|
| the model's own greedy answers | {_count(report["dialogues"]["answer_drafts"])} |
| all assistant messages of the dialogues | {_count(report["dialogues"]["turn_drafts"])} |
"""


def _scores(scores: dict[str, Any]) -> str:
    groups = scores["by_group"]
    bounds = sorted({int(bound) for buckets in groups.values() for bound in buckets})
    lines = ["| | " + " | ".join(f"to {bound:,}" for bound in bounds) + " |", "|---" * (len(bounds) + 1) + "|"]
    sums = {str(bound): [0, 0] for bound in bounds}
    for group, buckets in groups.items():
        lines.append(_row(group.replace("_", " "), buckets, bounds))
        for bound, (right, num) in buckets.items():
            sums[bound] = [sums[bound][0] + right, sums[bound][1] + num]
    return "\n".join([*lines, _row("all", sums, bounds)])


def _row(name: str, buckets: dict[str, list[int]], bounds: list[int]) -> str:
    cells = (buckets.get(str(bound)) for bound in bounds)
    shown = (f"{100 * cell[0] / cell[1]:.1f} % of {cell[1]}" if cell and cell[1] else "" for cell in cells)
    return f"| {name} | " + " | ".join(shown) + " |"


def _count(pair: list[int]) -> str:
    return str(Count(*pair))


if __name__ == "__main__":
    main()
