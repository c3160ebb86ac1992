"""The host memory that loading a sharded checkpoint needs."""

from __future__ import annotations

import json
import mmap
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from forkpoint.models.cuts import Part
from forkpoint.models.shards import Shards

HIDDEN, INNER, VOCAB = 1024, 4096, 8000
NUM_LAYERS, LAYERS_PER_SHARD = 8, 2
QUANTIZATION: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "checkpoint_format": "gptq"},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}


def quantised(name: str, kind: str, rows: int, columns: int) -> dict[str, Tensor]:
    """Return the tensors of a matrix with arbitrary codes."""
    codes = torch.randint(0, 120, (rows, columns // (1 if kind == "fp8" else 2)), dtype=torch.uint8)
    if kind == "fp8":
        scales = torch.ones(rows // 128, columns // 128)
        return {f"{name}.weight": codes.view(torch.float8_e4m3fn), f"{name}.weight_scale_inv": scales}
    if kind == "nvfp4":
        scales = torch.ones(rows, columns // 16).to(torch.float8_e4m3fn)
        return {f"{name}.weight": codes, f"{name}.weight_scale": scales, f"{name}.weight_scale_2": torch.tensor(1.0)}
    return {
        f"{name}.qweight": codes.view(torch.int32).view(columns // 8, rows),
        f"{name}.qzeros": torch.full((columns // 128, rows // 8), 0x77777777, dtype=torch.int32),
        f"{name}.scales": torch.ones(columns // 128, rows, dtype=torch.float16),
        f"{name}.g_idx": torch.arange(columns, dtype=torch.int32) // 128,
    }


def layer(index: int, kind: str) -> dict[str, Tensor]:
    base = f"model.layers.{index}"
    made = {f"{base}.{norm}_layernorm.weight": torch.ones(HIDDEN) for norm in ("input", "post_attention")}
    for name in "qkvo":
        made |= quantised(f"{base}.self_attn.{name}_proj", kind, HIDDEN, HIDDEN)
    for name in ("gate", "up"):
        made |= quantised(f"{base}.mlp.{name}_proj", kind, INNER, HIDDEN)
    return made | quantised(f"{base}.mlp.down_proj", kind, HIDDEN, INNER)


def write_shards(folder: Path, kind: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": QUANTIZATION[kind]}))
    embeddings = torch.randn(VOCAB, HIDDEN, dtype=torch.bfloat16)
    # The first shard is read at the start, for the embeddings, and again at the end.
    others = {"model.embed_tokens.weight": embeddings, "lm_head.weight": embeddings + 1}
    shards = [others | {"model.norm.weight": torch.ones(HIDDEN)}]
    for first in range(0, NUM_LAYERS, LAYERS_PER_SHARD):
        shards.append({})
        for index in range(first, first + LAYERS_PER_SHARD):
            shards[-1] |= layer(index, kind)
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("shards")
    return {kind: write_shards(root / kind, kind) for kind in QUANTIZATION}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_holds_one_shard_above_the_model(folders: dict[str, Path]) -> None:
    """The largest matrix is half of the largest shard. Two copies of it would be more than the benchmark allows."""
    command = [sys.executable, "-m", "benchmarks.load_memory", *map(str, folders.values())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("largest shard") == len(folders)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_mapped_shards_stay_below_the_size_of_one(folders: dict[str, Path]) -> None:
    """Tensors that go to another device are read from mapped files."""
    shards, most, folder = Shards(folders["fp8"]), 0, folders["fp8"]
    for i, name in enumerate(shards.file_of):
        tensor = shards.read(name, Part(tuple(shards.slice(name).get_shape())), owned=False)
        assert tensor.view(torch.uint8).flatten()[:: mmap.PAGESIZE].sum() >= 0  # touch all of its pages
        del tensor
        if i % 9 == 0:
            most = max(most, resident(folder))
    assert 0 < most <= 1.1 * max(path.stat().st_size for path in folder.glob("*.safetensors"))


def resident(folder: Path) -> int:
    """Return the resident bytes of mapped files of the folder."""
    entries = re.split(r"\n(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text())
    sizes = [re.search(r"^Rss: +(\d+) kB$", entry, re.MULTILINE) for entry in entries if f" {folder}/" in entry]
    return sum(1024 * int(size[1]) for size in sizes if size)
