"""`forkpoint collect-env`: prints the versions and devices that a bug report needs."""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("forkpoint", "torch", "transformers", "tokenizers", "safetensors", "numpy", "jinja2", "triton", "ninja")


def collect_env(options: argparse.Namespace) -> int:
    import torch
    from torch.utils.collect_env import get_pretty_env_info

    from forkpoint.platforms.table import num_devices

    print(get_pretty_env_info(), end="\n\n")  # type: ignore[no-untyped-call]
    print(*(f"{name}: {_version(name)}" for name in PACKAGES), sep="\n")
    print(f"torch threads: {torch.get_num_threads()}, CPU capability: {torch.backends.cpu.get_cpu_capability()}")
    print(*(f"devices of the kind {kind}: {count}" for kind, count in num_devices().items()), sep="\n")
    return 0


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
