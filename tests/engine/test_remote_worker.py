"""An engine whose worker is another process answers as one that has it in its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forkpoint.engine.llm import LLM
from forkpoint.errors import ConfigError, EngineStoppedError
from forkpoint.outputs import RequestOutput
from forkpoint.params import FinishReason, SamplingParams, StructuredOutputsParams
from forkpoint.worker.remote import RemoteRunner
from tests.engine.breaking import BREAKS, BreakingPlatform

DEVICE = f"{BreakingPlatform.__module__}:{BreakingPlatform.__qualname__}"
ROOM = 5 << 18  # bytes of arena: fewer than all requests together take
HOST_TIER_GIB = 0.004
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
LONG = "the catalogue lists every map of the town, by year and by shelf. " * 4
PROMPTS = [LONG + tail for tail in ("which is the oldest?", "who drew it?", "", "and where is it kept now? " * 9)]
PARAMS = [
    replace(GREEDY, logprobs=2),
    SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=5, max_tokens=24, n=2, frequency_penalty=0.3),
    replace(GREEDY, structured_outputs=StructuredOutputsParams(regex="[a-f]{3} [0-9]{5}")),
    replace(GREEDY, prompt_logprobs=1, stop_token_ids=(3,), logit_bias={101: 4.0}, min_tokens=2),
]


def start(folder: Path, backend: str, **options: Any) -> LLM:
    sizes = {"max_model_len": 768, "kv_cache_memory_bytes": ROOM, "max_num_batched_tokens": 256, "num_threads": 1}
    sizes |= {"kv_offloading_size": HOST_TIER_GIB}
    chosen = {"device": DEVICE, "log_level": "error", "distributed_executor_backend": backend}
    return LLM(str(folder), **{**sizes, **chosen, **options})


@pytest.fixture(scope="module", params=[False, True], ids=["one step at a time", "steps planned early"])
def both(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[list[LLM]]:
    engines = [start(tiny_model, backend, async_scheduling=request.param) for backend in ("uni", "mp")]
    assert isinstance(engines[1]._engine.core._runner, RemoteRunner)
    yield engines
    for llm in engines:
        llm.close()


def told(outputs: list[RequestOutput]) -> list[Any]:
    """All but the times."""
    return [replace(output, metrics=None, request_id="") for output in outputs]  # type: ignore[arg-type]


def test_answers_log_probabilities_hits_and_preemptions_are_the_same(both: list[LLM]) -> None:
    answers, metrics = [], []
    for llm in both:
        outputs = llm.generate(PROMPTS * 2, PARAMS * 2, use_tqdm=False)
        outputs += llm.generate([f"short {i}" for i in range(12)], replace(GREEDY, max_tokens=70), use_tqdm=False)
        answers.append(told(outputs))
        metrics.append(llm.get_metrics())
    assert answers[0] == answers[1]
    assert metrics[0] == metrics[1]
    assert metrics[1]["num_preemptions"] > 0
    assert metrics[1]["host_stored_bytes"] > 0
    assert sum(output.num_cached_tokens for output in answers[1]) > 0
    assert all(completion.error is None for output in answers[1] for completion in output.outputs)


def test_a_step_that_fails_ends_the_request_at_fault_alone(both: list[LLM]) -> None:
    answers = []
    for llm in both:
        llm.reset_prefix_cache()
        params = [replace(GREEDY, logprobs=BREAKS if prompt == PROMPTS[1] else None) for prompt in PROMPTS]
        answers.append(llm.generate(PROMPTS, params, use_tqdm=False))
    assert [output.outputs[0].token_ids for output in answers[0]] == [out.outputs[0].token_ids for out in answers[1]]
    reasons = [output.outputs[0].finish_reason for output in answers[1]]
    assert reasons == [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH, FinishReason.LENGTH]
    for output in (answer[1].outputs[0] for answer in answers):
        assert output.error is not None and output.error.endswith("failed: RuntimeError: the device gave up")


def test_a_worker_that_is_killed_ends_the_requests(tiny_model: Path) -> None:
    with start(tiny_model, "mp") as llm:
        runner = llm._engine.core._runner
        assert isinstance(runner, RemoteRunner)
        stream = llm.stream(LONG, GREEDY)
        next(stream)
        runner._ranks[0].process.kill()
        with pytest.raises(EngineStoppedError, match="the worker process was killed by SIGKILL"):
            list(stream)
        with pytest.raises(EngineStoppedError):
            llm.generate(LONG, GREEDY, use_tqdm=False)
        assert llm.get_metrics()["num_running"] == 0


def test_what_the_worker_refuses_at_the_start_is_said_here(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes=1: that leaves no room for a single request"):
        start(tiny_model, "mp", kv_cache_memory_bytes=1)


SCRIPT = """
import sys
from forkpoint import LLM

if __name__ == "__main__":
    llm = LLM(sys.argv[1], distributed_executor_backend="mp", log_level="error", num_threads=1)
    print(len(llm.generate("a", use_tqdm=False)))
"""


def run_program(text: str, folder: Path, model: Path) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(text)
    command = [sys.executable, str(folder / "program.py"), str(model)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ})


def test_a_program_that_closes_nothing_ends(tiny_model: Path, tmp_path: Path) -> None:
    shown = run_program(SCRIPT, tmp_path, tiny_model)
    assert (shown.returncode, shown.stdout) == (0, "1\n"), shown.stderr


def test_a_program_that_cannot_be_imported_is_told_so_in_a_line(tiny_model: Path, tmp_path: Path) -> None:
    shown = run_program(SCRIPT.replace('__name__ == "__main__"', "True"), tmp_path, tiny_model)
    assert shown.returncode == 1
    assert shown.stderr.startswith("error: a process of this program imports the program's file")
    assert shown.stderr.count("Traceback") == 1  # of the program's own call
