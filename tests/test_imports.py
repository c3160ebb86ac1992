"""What `from forkpoint import LLM` brings along, and how long it takes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

# Of the server, of structured outputs, and of what a model's folder needs.
LATER = (
    "aiohttp",
    "fastapi",
    "httptools",
    "huggingface_hub",
    "jinja2",
    "llguidance",
    "msgspec",
    "prometheus_client",
    "pydantic",
    "safetensors",
    "starlette",
    "tokenizers",
    "transformers",
    "uvicorn",
    "uvloop",
    "xxhash",
    "zmq",
)
MOST_S = 0.4
ROUNDS = 2


# Versions that vLLM 0.33.0 pins or limits, of what forkpoint needs too. It needs llguidance below 1.8: see
# docs/dependencies.md.
WITH_VLLM = {
    "torch": "2.14.0",
    "transformers": "5.20.2",
    "fastapi": "0.136.0",
    "tokenizers": "0.23.2",
    "safetensors": "0.6.2",
    "pydantic": "2.12.0",
    "pillow": "13.0.0",
}
RANGES = {
    "torch": (["2.11.0", "2.12.1", "2.13.0", "2.14.0"], ["2.10.0", "2.15.0"]),
    "transformers": (["5.20.0", "5.24.0"], ["5.19.0"]),
}


def requirements() -> dict[str, Requirement]:
    """Return forkpoint's own requirements by name."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    return {found.name: found for found in map(Requirement, project["dependencies"])}


@pytest.mark.parametrize("name", WITH_VLLM)
def test_versions_of_vllm_are_allowed(name: str) -> None:
    assert WITH_VLLM[name] in requirements()[name].specifier


@pytest.mark.parametrize("name", RANGES)
def test_ranges_of_versions(name: str) -> None:
    allowed, others = RANGES[name]
    specifier = requirements()[name].specifier
    assert list(specifier.filter(allowed + others)) == allowed


def test_the_server_and_structured_outputs_are_imported_when_they_are_used() -> None:
    code = f"import sys; from forkpoint import LLM; print([name for name in {LATER!r} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_importing_llm_takes_little_after_torch() -> None:
    """Seconds of this process, not of the clock: what else runs costs them little. The least of several."""
    code = (
        "import time, torch; start = time.process_time(); from forkpoint import LLM; print(time.process_time() - start)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code]  # the first run compiles
    times = [float(subprocess.check_output(command, text=True, env=environment)) for _ in range(ROUNDS)]
    assert min(times) <= MOST_S, times


def test_reading_a_config_leaves_out_what_models_of_transformers_need() -> None:
    """In each process of an engine: this takes more than a second of its start."""
    later = ("sympy", "torch.distributed.tensor", "transformers.activations", "transformers.modeling_utils")
    code = (
        "import sys; from forkpoint.models.fields import class_defaults; class_defaults('llama.LlamaConfig'); "
        f"print([name for name in ('torch', *{later!r}) if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "['torch']"


def test_packages_of_transformers_read_their_files_when_others_import_them(tiny_model: Path, tmp_path: Path) -> None:
    """Reading them takes half a second of each process's start. Programs next to forkpoint find every name."""
    code = """
import json, pathlib, sys
from forkpoint.engine.tokenizer_files import read_tokenizer
from forkpoint.models.fields import class_defaults
from forkpoint.quick_imports import TOKENIZERS, transformers_delayed
def are_there(): return [name in sys.modules for name in ("transformers", "transformers.models")]
path = pathlib.Path(sys.argv[1], "tokenizer_config.json")
values = json.loads(path.read_text())
for name in ("TokenizersBackend", *TOKENIZERS):
    class_defaults("qwen3_next.Qwen3NextConfig")
    path.write_text(json.dumps({**values, "tokenizer_class": name}))
    backend = type(read_tokenizer(sys.argv[1]))
    print(*are_there())
with transformers_delayed():
    import transformers
    from transformers import tokenization_utils_base, __version__
    from transformers.models import gemma
    same = [getattr(transformers, name) for name in TOKENIZERS]
    print(tokenization_utils_base is transformers.tokenization_utils_base, hasattr(transformers, "__all__"))
    print(transformers.MistralConfig.__name__, gemma.GemmaConfig.__name__, hasattr(transformers.models, "Absent"))
print(*are_there())
import transformers, transformers.models
from transformers.tokenization_utils_fast import PreTrainedTokenizerFast
print(transformers.__version__ == __version__, [getattr(transformers, name) for name in TOKENIZERS] == same)
print(transformers.GemmaConfig is gemma.GemmaConfig, PreTrainedTokenizerFast is backend)
print(transformers.AutoTokenizer.from_pretrained(sys.argv[1]).name_or_path == sys.argv[1])
"""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    shown = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    early, late = ["False False"] * 4, ["True False", "MistralConfig GemmaConfig False", "True True"]
    assert shown.stdout.splitlines() == [*early, *late, "True True", "True True", "True"]
