"""The commands that talk to a server, against a real one. The Python API says what is right."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forkpoint.cli.main import main
from forkpoint.engine.llm import LLM
from forkpoint.params import SamplingParams
from tests.server.running import RunningServer

GREEDY = SamplingParams(temperature=0, max_tokens=12)
SYSTEM = "Answer in one word. " * 8


@pytest.fixture(autouse=True)
def no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")


def test_complete_prints_what_the_engine_says(
    server: RunningServer, oracle: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "complete me"
    [expected] = oracle.generate(prompt, GREEDY, use_tqdm=False)
    options = ["complete", "--url", server.url, "--prompt", prompt, "--temperature", "0", "--max-tokens", "12"]
    assert main(options) == 0
    shown = capsys.readouterr()
    assert shown.out == expected.outputs[0].text + "\n"
    assert "0 of 11 prompt tokens cached (short), first token after" in shown.err


def test_chat_reuses_its_conversation(
    server: RunningServer, oracle: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "chat with me"}]
    [expected] = oracle.chat(messages, GREEDY, use_tqdm=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO("chat with me\n/reset\nchat with me\n"))
    options = ["chat", "--url", server.url, "--system-prompt", SYSTEM, "--temperature", "0", "--max-tokens", "12"]
    assert main(options) == 0
    shown = capsys.readouterr().out
    assert shown.count(expected.outputs[0].text) == 2
    cached = [int(line[1:].split(" of ")[0]) for line in shown.splitlines() if "prompt tokens cached" in line]
    assert cached[0] < cached[1] and cached[1] % 64 == 0 and cached[1] >= 128


@pytest.mark.parametrize("local", [False, True])
def test_a_batch_gets_the_same_answers(
    server: RunningServer, tiny_model: Path, oracle: LLM, tmp_path: Path, local: bool
) -> None:
    where, role = ["--url", server.url], "assistant"
    if local:
        where, role = ["--model", str(tiny_model), "--max-model-len", "512", "--response-role", "robot"], "robot"
    prompts = [f"question {number}" for number in range(6)]
    lines = [
        {
            "custom_id": prompt,
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 12},
        }
        for prompt in prompts
    ]
    lines.append({**lines[0], "custom_id": "wrong", "body": {"model": "tiny", "prompt": "x" * 600}})
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    lines.append({"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat})
    source, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["run-batch", "-i", str(source), "-o", str(answers), *where]) == 1
    found = {entry["custom_id"]: entry for entry in map(json.loads, answers.read_text().splitlines())}
    for output in oracle.generate(prompts, GREEDY, use_tqdm=False):
        assert output.prompt is not None
        body = found[output.prompt]["response"]["body"]
        assert body["choices"][0]["text"] == output.outputs[0].text
    assert found["chat"]["response"]["body"]["choices"][0]["message"]["role"] == role
    assert found["wrong"]["response"]["status_code"] == 400 and "512" in found["wrong"]["error"]["message"]


def test_a_batch_interrupted_while_its_model_loads(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n')
    command = [sys.executable, "-m", "forkpoint", "run-batch", "-i", "in.jsonl", "-o", "out.jsonl"]
    options = {"cwd": tmp_path, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    batch = subprocess.Popen([*command, "--model", str(tiny_model)], **options)  # type: ignore[call-overload]
    while not Path(f"/proc/{batch.pid}/task/{batch.pid}/children").read_text().strip():
        time.sleep(0.01)
    os.killpg(batch.pid, signal.SIGINT)
    os.killpg(batch.pid, signal.SIGINT)
    assert (batch.wait(120), batch.stderr.read()) == (130, "")


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_the_bench_sees_branches_hit_the_cache(server: RunningServer, tmp_path: Path, backend: str) -> None:
    options = f"""--backend {backend} --base-url {server.url} --dataset-name fork --num-prompts 10 --ignore-eos
        --fork-context-len 200 --fork-num-branches 4 --fork-branch-len 20 --fork-output-len 8 --seed 3
        --save-result --save-detailed --result-dir {tmp_path} --result-filename run.json --disable-tqdm"""
    assert main(["bench", "serve", *options.split()]) == 0
    result = json.loads((tmp_path / "run.json").read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (10, 0, 80)
    assert result["output_lens"] == [8] * 10 and all(ttft > 0 for ttft in result["ttfts"])
    branches = [number for number in range(10) if number % 5]
    assert all(result["cached_lens"][number] >= 192 for number in branches)
    assert result["total_cached_tokens"] == sum(result["cached_lens"])
    if backend == "openai":
        assert [result["input_lens"][number] for number in (0, 5)] == [200, 200]
