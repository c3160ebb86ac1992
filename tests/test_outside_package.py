"""What an installed package of others adds by its entry points: `tests/outside`, installed by pip, named on the
command line, in Python and in the simulator."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks.random_model import _write_tokenizer, make_random_model
from forkpoint.cli.main import main
from tests.conftest import TINY
from tests.server.running import start_server

OUTSIDE = Path(__file__).parent / "outside"
POLICIES = ("--eviction-policy", "oldest-first", "--capture-policy", "every-128")
PROMPT = [(7 * i * i + i) % 200 for i in range(200)]
OFFLINE = """
import json, sys
from forkpoint import LLM, SamplingParams
from forkpoint_outside.operators import NUM_NORMS

options = {"cpu_ops": "counted", "eviction_policy": "oldest-first", "capture_policy": "every-128"}
prompt = {"prompt_token_ids": json.loads(sys.argv[1])}
params = SamplingParams(temperature=0.0, max_tokens=8)
for folder in sys.argv[2:]:
    with LLM(folder, skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 24, **options) as llm:
        outputs = [llm.generate(prompt, params, use_tqdm=False)[0] for _ in range(2)]
    found = {"tokens": [list(o.outputs[0].token_ids) for o in outputs], "cached": outputs[1].num_cached_tokens}
    print(json.dumps({**found, "counted": next(NUM_NORMS) > 0}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PYTHONPATH with the package, beside what it was."""
    target, source = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("source") / "outside"
    shutil.copytree(OUTSIDE, source)  # pip builds in the folder
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True)
    return os.pathsep.join(filter(None, (str(target), str(Path(__file__).parents[1]))))


@pytest.fixture(scope="module")
def arcee(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A folder, and the tokens that transformers continues PROMPT with."""
    torch.manual_seed(0)
    config = transformers.ArceeConfig(
        vocab_size=404,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=403,
    )
    model = transformers.ArceeForCausalLM(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, 1.0 if weight.dim() == 1 else 0.0, 0.1 if weight.dim() == 1 else 0.3)
    folder = tmp_path_factory.mktemp("arcee")
    model.save_pretrained(folder)
    _write_tokenizer(folder)
    ids = torch.tensor([PROMPT])
    found = model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=False)[0, len(PROMPT) :]
    return folder, found.tolist()


def run(installed: str, *words: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "PYTHONPATH": installed, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=given, check=False)


def test_offline(installed: str, arcee: tuple[Path, list[int]], tmp_path: Path) -> None:
    folder, want = arcee
    hybrid = make_random_model(tmp_path / "hybrid", TINY)
    shown = run(installed, "-c", OFFLINE, json.dumps(PROMPT), str(folder), str(hybrid))
    assert shown.returncode == 0, shown.stderr
    assert "counted" in shown.stderr, "the log names what serves each operator"
    first, second = map(json.loads, shown.stdout.splitlines())
    assert first == {"tokens": [want, want], "cached": 192, "counted": True}
    assert second["cached"] == 128, "the one state of this capture policy"


def test_serve(installed: str, arcee: tuple[Path, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, want = arcee
    monkeypatch.setenv("PYTHONPATH", installed)
    server = start_server(folder, tmp_path, "--cpu-ops", "counted", "--kv-cache-memory-bytes", str(1 << 24), *POLICIES)
    try:
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        with server.wait_ready().client() as client:
            answer = client.post("/v1/completions", json=body)
        assert answer.json()["choices"][0]["token_ids"] == want, server.log
        assert "counted" in server.log
    finally:
        server.stop()


def test_simulate(installed: str, arcee: tuple[Path, list[int]]) -> None:
    words = ["-m", "forkpoint", "simulate", "chat:sessions=2,turns=2", "--memory", "1", "--jobs", "1"]
    shown = run(installed, *words, "--model", str(arcee[0]), "--systems", "forkpoint")
    assert shown.returncode == 0 and "forkpoint" in shown.stdout, shown.stderr
    system = "forkpoint:eviction=oldest-first,capture=every-128"
    shown = run(installed, *words, "--systems", system)
    assert shown.returncode == 0 and system in shown.stdout, shown.stderr


@pytest.mark.parametrize("name", ["RwkvForCausalLM", "RecurrentGemmaForCausalLM", "ArceeForCausalLM"])
def test_an_unknown_name_is_told_before_anything_is_parsed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], "num_hidden_layers": "many"}))
    assert main(["simulate", "chat:sessions=2", "--model", str(tmp_path)]) != 0
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"is of a {name}; forkpoint runs " in line and "OlmoHybridForCausalLM" in line
