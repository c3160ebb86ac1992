"""Plays the cases on vLLM's own scheduler and writes the result file. Runs under a Python that has vLLM 0.33.

$VLLM_ENV/bin/python -m benchmarks.hits.vllm
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from vllm import __version__

from benchmarks.hits.cases import cases, studies
from benchmarks.hits.results import ROOT, Setting, VllmResults, write
from benchmarks.hits.vllm_engine import H200, VllmEngine
from benchmarks.machine import today

CONFIGS: Final = ROOT / "tests" / "models" / "hub_configs"
MODEL: Final = "qwen3.5-35b-a3b"
OTHERS: Final = ("qwen3.5-9b",)
MTP: Final = shlex.join(["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 1})])
FINEST: Final = f"--prefix-match-unit 1 --enable-mamba-shared-prefix-checkpoint {MTP}"
SETTINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "defaults": "",
        "finest": FINEST,
        "finest_retained": f"{FINEST} --prefix-cache-retention-interval None",
        "unit_1": "--prefix-match-unit 1",
        "unit_64": "--prefix-match-unit 64",
        "retained": "--prefix-cache-retention-interval None",
        "triton": "--gdn-prefill-backend triton",
    }
)


def measure(flags: str) -> Setting:
    """Start vLLM with these flags and play all cases."""
    engine = VllmEngine((CONFIGS / f"{MODEL}.json").read_text(), shlex.split(flags))
    played = {case.key: engine.play(case) for case in (*cases(), *studies())}
    setting = Setting(flags, engine.block_tokens, engine.match_unit, played)
    engine.close()
    return setting


def block_tokens(model: str, flags: str) -> int:
    engine = VllmEngine((CONFIGS / f"{model}.json").read_text(), shlex.split(flags))
    engine.close()
    return engine.block_tokens


def main() -> None:
    """Write the result file. Exits if another version is installed: the replaced parts are those of 0.33."""
    if not __version__.startswith("0.33."):
        raise SystemExit(f"vLLM {__version__} is installed and 0.33 is needed; give a Python with vllm==0.33.0")
    results = VllmResults(
        version=__version__,
        command="python -m benchmarks.hits",
        date=today(),
        card=H200.get_device_name(),
        model=f"tests/models/hub_configs/{MODEL}.json",
        settings={name: measure(flags) for name, flags in SETTINGS.items()},
        blocks={
            model: {name: block_tokens(model, SETTINGS[name]) for name in ("defaults", "triton")} for model in OTHERS
        },
    )
    write(results)
