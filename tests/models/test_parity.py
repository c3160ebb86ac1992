"""Models against transformers' uncached single pass over the same tokens, in fp32."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.models.decoder import Model
from forkpoint.models.registry import load_config, load_model
from forkpoint.ops.select import torch_table
from tests.checkpoints import FAMILIES, HYBRID, write_checkpoint
from tests.driver import Driver, Work

TOLERANCE = 1e-4  # of the logits' standard deviation
LENGTH = 200


@dataclass
class Pair:
    family: str
    ours: Model
    theirs: Any
    tokens: list[int]
    want: Tensor


@torch.no_grad()
def oracle(model: Any, tokens: list[int]) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
    return logits


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp(request.param)
    theirs = write_checkpoint(folder, request.param)
    ours = load_model(folder, ops=torch_table())
    tokens = torch.randint(2, 256, (LENGTH,), generator=torch.Generator().manual_seed(7)).tolist()
    yield Pair(request.param, ours, theirs, tokens, oracle(theirs, tokens))


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.std())


def test_prefill_in_one_piece(pair: Pair) -> None:
    driver = Driver(pair.ours)
    assert error(driver.prefill(driver.row(), pair.tokens), pair.want) <= TOLERANCE


@pytest.mark.parametrize("cuts", [[1, 63, 64, 65, 128, 199], [2, 5, 130]])
def test_prefill_in_chunks(pair: Pair, cuts: list[int]) -> None:
    driver = Driver(pair.ours)
    assert error(driver.prefill(driver.row(), pair.tokens, cuts), pair.want) <= TOLERANCE


def test_decode(pair: Pair) -> None:
    driver = Driver(pair.ours)
    row = driver.row()
    driver.prefill(row, pair.tokens[:50])
    got = [driver.run([Work(row, [token], decode=True)])[0] for token in pair.tokens[50:70]]
    assert error(torch.cat(got), pair.want[50:70]) <= TOLERANCE


def test_decode_from_the_first_token(pair: Pair) -> None:
    driver = Driver(pair.ours)
    row = driver.row()
    got = [driver.run([Work(row, [token], decode=True)])[0] for token in pair.tokens[:6]]
    assert error(torch.cat(got), pair.want[:6]) <= TOLERANCE


def test_batches_that_mix_prefill_and_decode(pair: Pair) -> None:
    driver = Driver(pair.ours)
    sequences = [[pair.tokens[n], *pair.tokens[: 90 + n]] for n in range(3)]
    wants = [oracle(pair.theirs, sequence) for sequence in sequences]
    rows = [driver.row() for _ in sequences]
    got: list[list[Tensor]] = [[] for _ in sequences]
    # Row n starts to decode after its n-th chunk, so every pass has another mixture.
    for step in range(8):
        decodes, prefills = [], []
        for n, sequence in enumerate(sequences):
            start = rows[n].num_computed
            if step > n + 1:
                decodes.append((n, Work(rows[n], sequence[start : start + 1], decode=True)))
            else:
                prefills.append((n, Work(rows[n], sequence[start : start + 17 + 2 * n])))
        batch = decodes + prefills
        for (n, _), out in zip(batch, driver.run([work for _, work in batch]), strict=True):
            got[n].append(out)
    for n, want in enumerate(wants):
        assert error(torch.cat(got[n]), want[: rows[n].num_computed]) <= TOLERANCE


def test_resuming_from_a_saved_state(pair: Pair) -> None:
    driver = Driver(pair.ours)
    row, slot = driver.row(), driver.slot()
    driver.run([Work(row, pair.tokens, saves=[(64, driver.slot()), (128, slot)])])
    for _ in range(2):  # a slot that was read is as good as before
        fork = driver.fork(row, slot, 128)
        assert error(driver.prefill(fork, pair.tokens[128:]), pair.want[128:]) <= TOLERANCE


def test_the_state_matters(pair: Pair) -> None:
    if pair.family not in HYBRID:
        pytest.skip("no recurrent layers")
    driver = Driver(pair.ours)
    row = driver.row()
    driver.prefill(row, pair.tokens[:64])
    driver.zero_state(row)
    moved = driver.prefill(row, pair.tokens[64:72])
    assert error(moved, pair.want[64:72]) >= 0.5


def test_bfloat16_is_no_worse_than_transformers(pair: Pair, tmp_path: Path) -> None:
    exact = write_checkpoint(tmp_path, pair.family, dtype=torch.bfloat16).float()
    want = oracle(exact, pair.tokens).log_softmax(-1)
    theirs = (oracle(exact.bfloat16(), pair.tokens).log_softmax(-1) - want).abs()
    driver = Driver(load_model(tmp_path, ops=torch_table()))
    whole = driver.prefill(driver.row(), pair.tokens)
    row = driver.row()
    parts = [driver.prefill(row, pair.tokens[:130], [64])]
    parts += [driver.run([Work(row, [token], decode=True)])[0] for token in pair.tokens[130:160]]
    for got in (whole, torch.cat(parts)):
        ours = (got.log_softmax(-1) - want[: len(got)]).abs()
        # Both errors are sums of many roundings: two correct engines differ in the mean by a few per cent, and
        # routing that flips moves whole rows of a sparse model.
        assert ours.mean() <= 1.15 * theirs[: len(got)].mean()


STRETCHED = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 5000.0}
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "olmo_hybrid": [
        {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 96,
            "linear_value_head_dim": 192,
        },
        {"rope_parameters": PLAIN_ROPE},
        {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
        {"linear_allow_neg_eigval": False, "linear_conv_kernel_dim": 3},
    ],
    "qwen3_next_moe": [
        {"linear_num_key_heads": 1, "linear_num_value_heads": 3, "attention_bias": True, "tie_word_embeddings": True},
        {"decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": False, "linear_conv_kernel_dim": 2},
        {"layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"]},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}},
    ],
    "lfm2": [
        {"conv_L_cache": 4, "conv_bias": True, "block_auto_adjust_ff_dim": False},
        {"tie_word_embeddings": True, "block_ffn_dim_multiplier": 1.5, "norm_eps": 1e-3},
        {"layer_types": None, "full_attn_idxs": [0, 2], "rope_parameters": PLAIN_ROPE},
    ],
    "lfm3": [
        {"conv_L_cache": 4, "conv_bias": True, "attention_bias": True, "use_sandwich_norm": False},
        {"layer_types": None, "num_hidden_layers": 5, "use_attention_gate": False, "tie_word_embeddings": True},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.3, "factor": 2.0},
                "sliding_attention": {"rope_type": "proportional", "rope_theta": 500.0},
            }
        },
    ],
    "granite_hybrid": [
        {"position_embedding_type": "rope", "rope_theta": 5000.0, "mamba_conv_bias": False},
        {"attention_bias": True, "mamba_proj_bias": True, "layer_types": ["mamba", "attention"] * 2},
    ],
    "nemotron_h": [{"layers_block_type": None, "hybrid_override_pattern": "M*E-", "moe_latent_size": 40}],
    "falcon_h1": [
        {"mamba_rms_norm": True, "rope_parameters": PLAIN_ROPE},
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "tie_word_embeddings": True},
    ],
    "bamba": [{"attn_layer_indices": None, "mamba_d_head": "auto", "mamba_n_heads": 4}],
    "zamba2": [{"use_mem_rope": False, "use_shared_attention_adapter": False, "num_mem_blocks": 1}],
    "mamba2": [{"n_groups": 1, "conv_kernel": 3, "use_bias": True, "time_step_limit": (0.05, 0.1)}],
    "glm5_next": [{"index_topk": 16, "index_kpool": 8, "linear_lower_bound": None, "hc_mult": 2}],
    "qwen4_exp": [
        {"output_gate_type": None, "ple_layer_ids": [1], "split_ngram_parts": 1},
        {"ngram_size": 4, "ple_embed_dim": 36, "ple_conv_kernel_size": 2, "indexer_compress_ratio": 2},
    ],
    "bailing_moe_v2_5": [
        {"q_lora_rank": None, "num_attention_heads": 6, "group_norm_size": 3, "topk_group": 1},
        {
            "rope_parameters": {"rope_type": "yarn", **STRETCHED},
            "layer_group_size": 5,
            "partial_rotary_factor": 1.0,
        },
    ],
    "bailing_hybrid": [{"q_lora_rank": 40}],
}


@pytest.mark.parametrize(("family", "fields"), [(name, each) for name, many in VARIANTS.items() for each in many])
def test_variants(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    theirs = write_checkpoint(tmp_path, family, **fields)
    driver, generator = Driver(load_model(tmp_path, ops=torch_table())), torch.Generator().manual_seed(3)
    tokens = list(range(3, 133))  # from 2 on, two experts of a token would tie
    if family == "qwen4_exp":  # every few tokens is one that ends n-grams
        tokens = torch.randint(7, 13, (130,), generator=generator).tolist()
    row, want = driver.row(), oracle(theirs, tokens)
    assert error(driver.prefill(row, tokens[:100], [64, 66]), want[:100]) <= TOLERANCE
    decoded = [driver.run([Work(row, [token], decode=True)])[0] for token in tokens[100:]]
    assert error(torch.cat(decoded), want[100:]) <= TOLERANCE


def clamp(experts: Any, shared: Any, limits: tuple[float, float]) -> None:
    """Clamp silu(gate(x)) and up(x) in transformers' experts and shared expert of a layer. 0: no limit."""

    def product(gate: Tensor, up: Tensor, limit: float) -> Tensor:
        most = limit or float("inf")
        return F.silu(gate).clamp(max=most) * up.clamp(-most, most)

    def run_experts(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for token, choice in itertools.product(*map(range, ids.shape)):
            expert = ids[token, choice]
            gate, up = (experts.gate_up_proj[expert] @ x[token]).chunk(2)
            out[token] += weights[token, choice] * (experts.down_proj[expert] @ product(gate, up, limits[0]))
        return out

    experts.forward = run_experts
    shared.forward = lambda x: shared.down_proj(product(shared.gate_proj(x), shared.up_proj(x), limits[1]))


@pytest.mark.parametrize("lists", [((0, 0.02, 0, 0), (0, 0, 0, 0.01)), ((0, 0.02, None, 0.01), (0, 0.02))])
def test_ling_clamps_experts_by_layer(lists: tuple[tuple[float | None, ...], ...], tmp_path: Path) -> None:
    names = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
    theirs = write_checkpoint(tmp_path, "bailing_hybrid", **dict(zip(names, lists, strict=True)))
    model, tokens = load_model(tmp_path, ops=torch_table()), list(range(2, 132))
    assert not {*names} & {*load_config(tmp_path).unknown_fields}
    free = oracle(theirs, tokens)
    for layer in (1, 3):  # the sparse ones
        mlp = theirs.model.layers[layer].mlp
        routed, own = (each[layer] or 0.0 if layer < len(each) else 0.0 for each in lists)
        clamp(mlp.experts, mlp.shared_experts, (routed, own))
    driver, wanted = Driver(model), oracle(theirs, tokens)
    assert error(driver.prefill(driver.row(), tokens, [64, 65]), wanted) <= TOLERANCE < error(free, wanted)


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        ("llama", {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        ("llama", {"rope_type": "yarn"}),
        ("qwen3", {"rope_type": "yarn", "truncate": False, "beta_fast": 16.0, "mscale": 0.7, "mscale_all_dim": 1.3}),
        ("mistral", {"rope_type": "yarn", "attention_factor": 1.1}),
        ("qwen3_5", {"rope_type": "yarn", "partial_rotary_factor": 0.25}),
        ("qwen3_5_multimodal", {"rope_type": "yarn", "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}),
        ("lfm2", {"rope_type": "linear"}),
    ],
)
def test_stretched_positions(family: str, rope: dict[str, Any], tmp_path: Path) -> None:
    """By config.json, and by the same fields as overrides of a plain config.json."""
    rope = {**STRETCHED, **rope}
    theirs, tokens = write_checkpoint(tmp_path, family, rope_parameters=rope), list(range(2, 132))
    written = load_config(tmp_path)
    plain, overrides = write_checkpoint(tmp_path, family), {"rope_parameters": rope}
    model = load_model(tmp_path, ops=torch_table(), hf_overrides=overrides)
    if family == "qwen3_5_multimodal":
        assert load_config(tmp_path, hf_overrides={"text_config": overrides}) == model.config
    assert (model.config.rotary, model.config.max_model_len) == (written.rotary, written.max_model_len)
    driver, want = Driver(model), oracle(theirs, tokens)
    assert error(driver.prefill(driver.row(), tokens, [64]), want) <= TOLERANCE < error(oracle(plain, tokens), want)


def test_sliding_window(tmp_path: Path) -> None:
    fields = {"use_sliding_window": True, "sliding_window": 30, "max_window_layers": 2}
    theirs = write_checkpoint(tmp_path, "qwen3", **fields)
    driver, tokens = Driver(load_model(tmp_path, ops=torch_table())), list(range(2, 132))
    row = driver.row()
    got = [driver.prefill(row, tokens[:100], [70])]
    got += [driver.run([Work(row, [token], decode=True)])[0] for token in tokens[100:]]
    assert error(torch.cat(got), oracle(theirs, tokens)) <= TOLERANCE
