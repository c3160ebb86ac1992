"""Folders in 4 bits: every packing against the same weights widened, with torch's and the C++ operators."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forkpoint.errors import ModelFolderError, UnsupportedModelError
from forkpoint.models.joints import JoinedMatrix
from forkpoint.models.packings import PackedTensors, Packing
from forkpoint.models.quantization import Form, WeightFormat
from forkpoint.models.registry import load_config, load_model
from forkpoint.models.weights import DummyWeights
from forkpoint.ops.linear.packed import PackedMatrix
from forkpoint.ops.ranks import Ranks
from forkpoint.ops.select import select_table
from tests.checkpoints import write_checkpoint
from tests.driver import Driver
from tests.four_bit_checkpoints import FORMATS, GPTQ, integers, put_in_four_bits
from tests.fp8_checkpoints import SINGLE, matrix_scaled
from tests.json_files import change_json
from tests.models.test_parity import TOLERANCE, error
from tests.mtp_heads import add_mtp
from tests.ops.float_scales import every_scale, exact
from tests.thread_ranks import on_each

LIBRARIES = Path(__file__).parent / "packings.safetensors"
TOKENS = list(range(2, 102))


def logits(folder: Path, ops: str = "torch", **options: Any) -> torch.Tensor:
    driver = Driver(load_model(folder, ops=select_table(ops, False, False), **{"dtype": "float32", **options}))
    return driver.prefill(driver.row(), TOKENS, [64])


@pytest.mark.parametrize("layout", FORMATS)
def test_logits_are_those_of_the_widened_weights(layout: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "widened", "qwen3_5_moe")
    assert put_in_four_bits(tmp_path / "widened", tmp_path / "packed", layout) > 8
    want = logits(tmp_path / "widened")
    assert error(logits(tmp_path / "packed"), want) <= TOLERANCE
    assert error(logits(tmp_path / "packed", "cpp"), want) <= TOLERANCE


@dataclass(frozen=True)
class Held:
    """Tensors of one packing in LIBRARIES, called as those of a matrix `a.weight`."""

    tensors: dict[str, torch.Tensor]

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def stored_type(self, name: str) -> str:
        return {torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3"}.get(self.tensors[name].dtype, "other")

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def where(self, name: str) -> str:
        return name


@pytest.mark.parametrize(
    ("form", "packing", "digits"),
    [
        ("packed", "integers", 1e-6),
        ("packed_zeros", "integers", 1e-6),
        ("packed_floats", "floats", 2**-8),  # bfloat16
        ("gptq", "gptq", 2**-11),  # float16
        ("gptq_v2", "gptq_v2", 2**-11),
        ("awq", "awq", 2**-11),
    ],
)
def test_packings_of_libraries(form: str, packing: Packing, digits: float) -> None:
    """Matrices that compressed-tensors 0.20.1 and auto-round 0.16.1 packed, next to what they multiply by."""
    found = {
        name.replace(f"{form}.", "a.", 1): x for name, x in load_file(LIBRARIES).items() if name.startswith(f"{form}.")
    }
    tensors = PackedTensors.find(Held(found), "a.weight", packing)
    assert tensors is not None and tensors.packing == packing
    want = found["a.dense"]
    torch.testing.assert_close(tensors.read(torch.float32).dense(), want, atol=0, rtol=digits)


@pytest.mark.parametrize("layout", ["modelopt", "floats"])
def test_every_scale_of_floats(layout: Packing) -> None:
    """Scales of 0 and below the smallest normal number, and parts and experts whose scales are far apart."""
    torch.manual_seed(3)
    source = DummyWeights(dtype=torch.bfloat16, seed=0, device=torch.device("cpu"))
    joined = JoinedMatrix(source, (2, 32, 256), Form("float", 16), whole_blocks=False)
    parts = {(at, start): every_scale(16, 256, dtype=torch.bfloat16) for at in range(2) for start in (0, 16)}
    for power, ((at, start), part) in enumerate(parts.items()):
        factor = torch.tensor(2.0 ** (20 * power - 30))  # one for the stored matrix
        parts[at, start] = part = replace(part, factors=factor.repeat(16, 1))
        stored = {"a.weight_scale": part.scales.view(torch.float8_e4m3fn)}
        if layout == "modelopt":
            stored |= {"a.weight": part.words.view(torch.uint8), "a.weight_scale_2": factor}
        else:
            stored |= {"a.weight_packed": part.words.view(torch.uint8), "a.weight_global_scale": 1 / factor[None]}
        tensors = PackedTensors.find(Held(stored), "a.weight", layout)
        assert tensors is not None and tensors.packing == layout
        joined.put(tensors.read(torch.bfloat16), start, at)
    want = [torch.cat([exact(parts[at, start]) for start in (0, 16)]) for at in range(2)]
    assert isinstance(joined.matrix, PackedMatrix)
    assert torch.equal(joined.matrix.dense().double(), torch.stack(want))


@pytest.mark.parametrize(
    ("family", "layout", "plain"),
    [
        ("qwen3_5_moe", "packed_zeros", ("shared_expert.",)),  # as in Qwen's own models in GPTQ
        ("nemotron_h", "nvfp4", ("q_proj", "k_proj", "v_proj", "o_proj")),
        ("granite_hybrid", "gptq", ()),  # whose multipliers are folded into weights
        ("kimi_linear", "awq", ()),
    ],
)
def test_families_and_layers_that_are_left_out(
    family: str, layout: str, plain: tuple[str, ...], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "widened", family)
    assert put_in_four_bits(tmp_path / "widened", tmp_path / "packed", layout, plain) > 3
    want = logits(tmp_path / "widened")
    assert error(logits(tmp_path / "packed", "cpp"), want) <= TOLERANCE


@pytest.mark.parametrize("layout", ["gptq_rows", "packed_ordered", "mixed"])
def test_ranks(layout: str, tmp_path: Path) -> None:
    """Columns that are cut within a group or out of order, and deterministic ranks, whose bits are those of one."""
    write_checkpoint(tmp_path / "widened", "qwen3_5_moe")
    put_in_four_bits(tmp_path / "widened", tmp_path / "packed", layout)
    want = logits(tmp_path / "widened")

    def on_rank(ranks: Ranks) -> torch.Tensor:
        model = load_model(
            tmp_path / "packed", ops=select_table("cpp", ranks.gathers, False), ranks=ranks, dtype="float32"
        )
        driver = Driver(model)
        return driver.prefill(driver.row(), TOKENS, [64])

    for found in on_each(2, False, on_rank):
        assert error(found, want) <= TOLERANCE
    model = load_model(tmp_path / "packed", ops=select_table("cpp", True, False), dtype="float32")
    driver = Driver(model)
    alone = driver.prefill(driver.row(), TOKENS, [64])
    for found in on_each(2, True, on_rank):
        assert torch.equal(found, alone)


@pytest.mark.parametrize("form", ["gptq", "fp8"])
def test_heads(form: str, tmp_path: Path) -> None:
    """An MTP head stays plain, and a quantised output head is widened."""
    write_checkpoint(tmp_path / "widened", "qwen3_5", tie_word_embeddings=False)
    add_mtp(tmp_path / "widened", "mtp_num_hidden_layers")
    put_in_four_bits(tmp_path / "widened", tmp_path / "packed", "gptq" if form == "gptq" else "mixed", ("mtp",))
    stored, widened = load_file(tmp_path / "packed" / SINGLE), load_file(tmp_path / "widened" / SINGLE)
    head = stored.pop("lm_head.weight").float()
    if form == "gptq":
        made, widened["lm_head.weight"] = integers(head, 32, "gptq")
    else:
        codes, scale, widened["lm_head.weight"] = matrix_scaled(head)
        made = {"weight": codes, "weight_scale": scale}
    stored |= {f"lm_head.{end}": tensor.contiguous() for end, tensor in made.items()}
    save_file(stored, tmp_path / "packed" / SINGLE, {"format": "pt"})
    save_file(widened, tmp_path / "widened" / SINGLE, {"format": "pt"})
    found = logits(tmp_path / "packed", "cpp", mtp=True)
    assert error(found, logits(tmp_path / "widened", mtp=True)) <= TOLERANCE


@pytest.mark.parametrize(
    ("layout", "end", "change", "said"),
    [
        ("gptq", "qzeros", None, "holds no tensor"),
        ("gptq", "qweight", lambda x: torch.cat((x, x), 1), "if it is in 4 bits; config.json asks for"),
        ("gptq", "scales", lambda x: x * float("nan"), "NaN or infinite"),
        ("gptq", "scales", lambda x: x[:, :8], "one for each row and group is needed"),
        ("gptq", "g_idx", lambda x: torch.zeros_like(x), "are not all of 32 columns"),
        ("nvfp4", "weight_scale", lambda x: (-x.float()).to(x.dtype), "are not all positive or 0"),
        ("nvfp4", "weight_scale", lambda x: x.half(), "are stored in F16; 4-bit floats need scales in F8_E4M3"),
        ("nvfp4", "weight_scale_2", lambda x: -x, "is not positive"),
    ],
)
def test_broken_tensors_are_named(layout: str, end: str, change: Any, said: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "widened", "qwen3")
    put_in_four_bits(tmp_path / "widened", tmp_path / "packed", layout)
    stored, name = load_file(tmp_path / "packed" / SINGLE), f"model.layers.1.self_attn.q_proj.{end}"
    given = stored.pop(name)
    if change is not None:
        stored[name] = change(given).contiguous()
    save_file(stored, tmp_path / "packed" / SINGLE, {"format": "pt"})
    with pytest.raises(ModelFolderError, match=said) as caught:
        logits(tmp_path / "packed")
    assert name in str(caught.value)


def test_the_option_names_the_format_of_the_folder(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3")
    with pytest.raises(UnsupportedModelError, match=r"quantization='gptq' is not possible for .* give 'fp8'"):
        load_config(tmp_path, quantization="gptq")
    change_json(tmp_path / "config.json", quantization_config=GPTQ)
    for name in ("gptq", "gptq_marlin"):
        assert load_config(tmp_path, quantization=name).quantization == load_config(tmp_path).quantization
    with pytest.raises(UnsupportedModelError, match=r"quantization='awq' is not the format of .* give 'gptq' or"):
        load_config(tmp_path, quantization="awq")
    assert logits(tmp_path, load_format="dummy").isfinite().all()


def test_random_weights_have_the_format_of_the_folder() -> None:
    shape, cpu = (32, 64), torch.device("cpu")
    for packing, kind, group in (("gptq", "integer", 32), ("floats", "float", 16), ("modelopt", "float", 16)):
        form = WeightFormat(scales=None, packing=packing, group_size=32, plain=())  # type: ignore[arg-type]
        source = DummyWeights(dtype=torch.float32, seed=0, device=cpu, format=form)
        matrix, found = source.get_matrix("up.weight", shape), source.form("up.weight")
        assert isinstance(matrix, PackedMatrix) and found is not None
        assert (found.kind, found.group, matrix.group) == (kind, group, group)
        assert (matrix.zeros is None) == (kind == "float")


IN_NVFP4 = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
# The shapes of published configs: of nvidia/Qwen3.6-35B-A3B-NVFP4, Qwen/Qwen3.5-35B-A3B-GPTQ-Int4 and
# nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4.
PUBLISHED: dict[str, tuple[str, dict[str, Any], tuple[str | None, str | None]]] = {
    "mixed": (
        "qwen3.5-35b-a3b",
        {
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["mtp*", "mtp.layers.0*"],
            "quantized_layers": {
                "model.language_model.layers.0.mlp.experts": IN_NVFP4,
                "model.language_model.layers.3.self_attn.q_proj": {"quant_algo": "FP8"},
                "model.language_model.layers.3.self_attn.k_proj": {"quant_algo": "UNQUANTIZED"},
                "lm_head": IN_NVFP4,
            },
        },
        ("tensor", "modelopt"),
    ),
    "gptq": (
        "qwen3.5-35b-a3b",
        {
            "bits": 4,
            "group_size": 128,
            "desc_act": False,
            "sym": True,
            "lm_head": False,
            "pack_dtype": "int32",
            "quant_method": "gptq",
            "checkpoint_format": "gptq",
            "true_sequential": True,
            "meta": {"quantizer": []},
            "dynamic": {"-:.*attn.*": {}, "-:.*shared_expert.*": {}, "-:.*mtp.*": {}, "-:.*visual.*": {}},
        },
        (None, "gptq"),
    ),
    "nvfp4": (
        "nemotron-3-nano-30b-a3b",
        {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]},
        (None, "modelopt"),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name: str, tmp_path: Path) -> None:
    hub, quantization, expected = PUBLISHED[name]
    config = json.loads((Path(__file__).parent / "hub_configs" / f"{hub}.json").read_text())
    if name == "gptq":
        config["quantization_config"] = quantization
    else:
        own = {"producer": {"name": "modelopt", "version": "0.44.0"}, "quantization": quantization}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load_config(tmp_path).quantization
    assert found is not None and (found.scales, found.packing) == expected
    if name == "gptq":
        assert found.covers("model.layers.3.mlp.experts.7.up_proj.weight")
        assert not found.covers("model.layers.3.mlp.shared_expert.up_proj.weight")
