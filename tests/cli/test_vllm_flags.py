"""The flags that a script written for `vllm serve` carries."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

import forkpoint
from forkpoint.cli.parser import build_parser
from forkpoint.cli.vllm_flags import TABLE, notice_lines

PAGE = Path(forkpoint.__file__).parents[1] / "docs" / "server.md"
SCRIPT = """serve MODEL --host 0.0.0.0 --port 8000 --trust-remote-code --enable-auto-tool-choice
  --tool-call-parser hermes -tp 1 --pipeline-parallel-size 1 --data-parallel-size=1 --gpu-memory-utilization 0.85
  --max-model-len 4096 --dtype auto --enable-chunked-prefill --enable-prefix-caching --disable-log-requests
  --swap-space 4 --block-size 16
  --kv-cache-dtype auto --distributed-executor-backend mp --no-enable-log-requests --disable-uvicorn-access-log
  --guided-decoding-backend xgrammar --limit-mm-per-prompt {"image":0} --revision main -O3 --hf-token
  --mm-processor-cache-gb 4
  --structured-outputs-config {"backend":"xgrammar"} -sc {"method":"qwen3_5_mtp","num_speculative_tokens":2}"""


def parse(text: str) -> argparse.Namespace:
    return build_parser().parse_args(text.split())


def test_a_script_for_vllm_is_taken_and_told_what_changes_nothing() -> None:
    options = parse(SCRIPT)
    assert (options.port, options.max_model_len, options.tool_call_parser) == (8000, 4096, "hermes")
    assert notice_lines(options) == [
        "--trust-remote-code changes nothing here: no code that comes with a model is ever run",
        "--swap-space changes nothing here: nothing is swapped to the host's memory",
        "--block-size changes nothing here: a block has 64 tokens",
        "-O changes nothing here: CUDA graphs are recorded unless --enforce-eager is given",
        "--hf-token changes nothing here: the hub's token is that of HF_TOKEN, or of `hf auth login`",
        "--mm-processor-cache-gb changes nothing here: each reader keeps 64 MiB of resized images; "
        "--encoder-cache-size bounds the encoded ones",
    ]
    assert notice_lines(parse("serve MODEL --no-enable-lora -pp 1")) == []


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--data-parallel-size 2", "2 is not possible here: one engine runs the model, every layer of it on all its"),
        ("-pp=4", "4 is not possible here"),
        ("--mamba-cache-dtype float32", "float32 is not possible here: the convolutions' windows are of the model's"),
        ("--kv-cache-dtype fp8_e5m2", "invalid choice: 'fp8_e5m2' (choose from 'auto', 'bfloat16', 'fp8')"),
        ("--quantization gguf", "invalid choice: 'gguf' (choose from 'fp8', 'modelopt', 'compressed-tensors')"),
        ("--no-enable-chunked-prefill", "long prompts are always computed in chunks; leave it out"),
        ("--enable-lora", "adapters are not supported; leave it out"),
        ("--distributed-executor-backend ray", "invalid choice: 'ray' (choose from 'uni', 'mp')"),
    ],
)
def test_what_is_not_here_is_refused_in_one_line(given: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(f"serve MODEL {given}")
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.startswith("error: ") and error.count("\n") == 1 and says in error


def test_the_documentation_shows_the_table_as_it_is() -> None:
    lines = ["| flag | taken | here |", "|---|---|---|"]
    for row in TABLE:
        flags = ", ".join(f"`{name}`" for flag in row.flags.split() for name in flag.split("/"))
        lines.append(f"| {flags} | {', '.join(row.values.split()) or 'no'} | {row.why} |")
    assert "\n".join(lines) in PAGE.read_text()


def test_help_stays_readable_and_no_flag_is_there_twice() -> None:
    shown = next(action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    text = shown.choices["serve"].format_help()
    assert "--pipeline-parallel-size" not in text and "docs/server.md" in text
    flags = [flag.split("/")[0] for row in TABLE for flag in row.flags.split()]
    assert len(flags) == len(set(flags))
    assert text.splitlines()[0] == "usage: forkpoint serve [MODEL] [options]"
    titles = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert {"server options:", "HTTPS options:", "log and metrics options:", "engine options:"} <= set(titles)
