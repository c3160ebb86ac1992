"""Runs lm-eval against a server with a cold cache and with a warm one. Every score has to be the same.

    forkpoint serve MODEL --port 8000 --enable-dev-endpoints
    python -m scripts.lm_eval_cold_warm --url http://127.0.0.1:8000 --tokenizer MODEL

It runs `local-completions` (choices scored by the log-probabilities of an echoed prompt, and generation) and
`local-chat-completions` (generation) on tasks that it writes itself. The exit code is 1 if a score, a log-probability
or an answer differs, if the warm run reused nothing, or if scoring read the cache. Needs `pip install lm-eval[api]`.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

NUM_DOCS = 12
CONTEXT = "Answer the question. The animals of the farm are a cow, a hen, a pig and a dog, and each has a name. " * 2
CHOICE_TASK = """
task: forkpoint_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
GENERATE_TASK = """
task: forkpoint_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{target}}}}"
generation_kwargs: {{until: ["###"], max_gen_toks: 16, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""


def write_tasks(folder: Path) -> None:
    """Write two tasks over the same questions, which share a long beginning."""
    docs = [
        {
            "question": f"{CONTEXT}Question {i}: which animal says {sound}?\nAnswer:",
            "choices": [" cow", " hen", " pig", " dog"],
            "answer": i % 4,
            "target": ["cow", "hen", "pig", "dog"][i % 4],
        }
        for i, sound in enumerate(["moo", "cluck", "oink", "woof"] * (NUM_DOCS // 4))
    ]
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (folder / "choice.yaml").write_text(CHOICE_TASK.format(data=data))
    (folder / "generate.yaml").write_text(GENERATE_TASK.format(data=data))


def evaluate(kind: str, task: str, folder: Path, url: str, tokenizer: str) -> dict[str, Any]:
    """Return the scores, and the measurements or answers of each question."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    endpoint = "chat/completions" if kind == "local-chat-completions" else "completions"
    arguments = (
        f"base_url={url}/v1/{endpoint},model={model_name(url)},tokenizer={tokenizer},num_concurrent=4,max_retries=1"
    )
    results = simple_evaluate(
        model=kind,
        model_args=arguments,
        tasks=[task],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        apply_chat_template=kind == "local-chat-completions",
        bootstrap_iters=0,
        log_samples=True,
    )
    scores = {name: value for name, value in results["results"][task].items() if isinstance(value, float)}
    return {"scores": scores, "answers": [sample["resps"] for sample in results["samples"][task]]}


def model_name(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models") as reply:
        return str(json.load(reply)["data"][0]["id"])


def reset_cache(url: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(f"{url}/reset_prefix_cache", method="POST")) as reply:
        assert json.load(reply) == {"done": True}


def hits(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics") as reply:
        found = re.search(r"^forkpoint_prefix_cache_hits_total{.*} (\S+)$", reply.read().decode(), re.MULTILINE)
    assert found is not None
    return float(found[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", required=True)
    parser.add_argument("--tokenizer", required=True, help="the model folder")
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder)
        for kind, task in (
            ("local-completions", "forkpoint_choice"),
            ("local-completions", "forkpoint_generate"),
            ("local-chat-completions", "forkpoint_generate"),
        ):
            reset_cache(options.url)
            cold = evaluate(kind, task, folder, options.url, options.tokenizer)
            before = hits(options.url)
            warm = evaluate(kind, task, folder, options.url, options.tokenizer)
            reused = hits(options.url) - before
            equal, scored = cold == warm, task == "forkpoint_choice"
            failed |= not equal or (reused == 0) != scored
            print(
                f"{kind} {task}: {cold['scores']}, warm {'the same' if equal else warm['scores']}, reused {reused:.0f}"
            )
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
