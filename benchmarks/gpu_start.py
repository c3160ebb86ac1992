"""Times the start of an engine on a GPU, in processes of its own, without and with compiled kernels.

    python -m benchmarks.gpu_start

`new` starts as the engine does. `old` compiles each kernel when it first runs, and records all graphs before it is
ready. Every line is a new process. `empty` begins with an empty folder of compiled kernels, and `full` with the folder
that the line before has filled. Weights are random. Both ways answer the same prompts twice: the first time the new way
records graphs meanwhile. The ids must be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu_peer import NINE
from benchmarks.peers.protocol import repository_root

MOE = Path("tests/models/hub_configs/qwen3.5-35b-a3b.json")
RESULT = "result: "
LENGTHS = (5, 20, 70, 200, 333, 600, 900, 1500)  # tokens of the prompts
NUM_TOKENS = 24
SHAPES = ("35b", "small")
PARTS = (
    ("weights loaded", "weights"),
    ("kernels compiled", "compile"),
    ("kernels tried", "try"),
    ("memory of steps measured", "measure"),
    ("graphs recorded", "record"),
)
LOGGED = re.compile(r"(.*) in ([\d.]+) s$", re.MULTILINE)


def config_of(shape: str) -> dict[str, Any]:
    """Return the config.json of a shape: Qwen3.5-35B-A3B, or 8 layers of the 9B model."""
    if shape == "35b":
        config: dict[str, Any] = json.loads((repository_root() / MOE).read_text())
        return config
    return {**NINE, "num_hidden_layers": 8, "layer_types": NINE["layer_types"][:8]}


def options_of(shape: str, gib: float) -> dict[str, Any]:
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "language_model_only": True}
    if shape == "35b":
        options |= {"quantization": "fp8", "kv_cache_memory_bytes": int(gib * 2**30)}
    return options


def measure(model: str, shape: str, way: str, gib: float, began: float) -> None:
    """Start an engine in this process and print what it took. `began` is the clock when the process was started."""
    marks = {"python": time.perf_counter() - began}
    from forkpoint import LLM, SamplingParams
    from forkpoint.worker import build

    marks["imports"] = time.perf_counter() - began
    make = build._make_runner
    if way == "old":

        def record_all(*given: Any) -> Any:
            runner = make(*given)
            with build._timed("all graphs recorded"):
                while runner.record_next():
                    pass
            return runner

        vars(build).update(compiles_in_parallel=lambda: False, _make_runner=record_all)
    llm = LLM(model, **options_of(shape, gib))
    marks["engine"] = time.perf_counter() - began
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    llm.generate([[1, 2, 3]], params, use_tqdm=False)
    marks["token"] = time.perf_counter() - began
    prompts = [[7 + (place + length) % 1000 for place in range(length)] for length in LENGTHS]
    params, loads, ids = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True), list[float](), []
    for _ in range(2):
        llm.reset_prefix_cache()
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        loads.append(time.perf_counter() - start)
        ids = [list(output.outputs[0].token_ids) for output in outputs]
    start, count = time.perf_counter(), 0
    while llm._engine.core.prepare():
        count += 1
    rest = {"graphs": count, "seconds": time.perf_counter() - start}
    print(RESULT + json.dumps({"marks": marks, "loads": loads, "rest": rest, "ids": ids}))
    llm.close()


def started(folder: Path, shape: str, way: str, kernels: Path, gib: float) -> dict[str, Any]:
    """Measure a start in a new process. Ends this one if that fails."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(kernels)}
    command = [sys.executable, "-m", "benchmarks.gpu_start", "--child", str(folder), "--shapes", shape]
    command += ["--ways", way, "--gib", str(gib), "--began", str(time.perf_counter())]
    made = subprocess.run(command, env=environment, cwd=repository_root(), capture_output=True, text=True)
    if made.returncode:
        sys.exit(f"a start failed:\n{made.stderr}")
    line = next(line for line in made.stdout.splitlines() if line.startswith(RESULT))
    found: dict[str, Any] = json.loads(line.removeprefix(RESULT))
    logged = LOGGED.findall(made.stderr)
    found["parts"] = {name: sum(float(s) for text, s in logged if text.endswith(words)) for words, name in PARTS}
    return found


def cells(found: dict[str, Any]) -> str:
    marks, parts, rest = found["marks"], found["parts"], found["rest"]
    columns = [marks["token"], marks["python"], marks["imports"] - marks["python"]]
    columns += parts.values()
    columns.append(marks["engine"] - marks["imports"] - sum(parts.values()))
    columns += [marks["token"] - marks["engine"], *found["loads"]]
    return " | ".join([*(f"{value:.1f}" for value in columns), f"{rest['graphs']} in {rest['seconds']:.1f} s"])


def lines(given: argparse.Namespace, temporary: Path) -> Iterator[str]:
    """Yield the lines of the table. Lines that would begin after `limit_s` are left out."""
    until, names = time.monotonic() + given.limit_s, [name for _, name in PARTS]
    head = ["shape, way, folder", "to first token", "python", "imports", *names, "other", "token", "load", "again"]
    yield " | ".join([*head, "graphs left"])
    for shape in given.shapes.split(","):
        folder, answers = temporary / shape, list[Any]()
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config_of(shape)))
        for way in given.ways.split(","):
            for state in ("empty", "full"):
                if time.monotonic() > until:
                    yield f"{shape}, {way}, {state} | left out: {given.limit_s} s are over"
                    continue
                found = started(folder, shape, way, temporary / f"kernels-{shape}-{way}", given.gib)
                answers.append(found["ids"])
                yield f"{shape}, {way}, {state} | {cells(found)}"
        same = sum(ids == answers[0] for ids in answers)
        yield f"{shape}: {same} of {len(answers)} starts gave the ids of the first"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"some of {', '.join(SHAPES)} (default: all)")
    parser.add_argument("--ways", default="new,old", help="new, old or both (default: both)")
    parser.add_argument("--gib", type=float, default=22.0, help="GiB of cache for the 35b shape (default: 22)")
    parser.add_argument("--limit-s", type=float, default=240.0, help="s after which no line begins (default: 240)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, default=0.0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := set(given.shapes.split(",")) - set(SHAPES):
        parser.error(f"--shapes names {', '.join(sorted(unknown))}; give some of {', '.join(SHAPES)}")
    if unknown := set(given.ways.split(",")) - {"new", "old"}:
        parser.error(f"--ways names {', '.join(sorted(unknown))}; give new, old or both")
    if given.child is not None:
        measure(given.child, given.shapes, given.ways, given.gib, given.began)
        return
    with tempfile.TemporaryDirectory() as temporary:
        for line in lines(given, Path(temporary)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
