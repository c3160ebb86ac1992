"""config.json as the hub has it, which is not as transformers writes it: the right layers, bytes and limits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from forkpoint.cache.layer_spec import KVSpec
from forkpoint.cache.layout import CacheLayout
from forkpoint.errors import ConfigError
from forkpoint.models.attention import AttentionConfig
from forkpoint.models.config import ModelConfig
from forkpoint.models.latent_attention import LatentAttentionConfig
from forkpoint.models.layers import MLPConfig, PostNormConfig
from forkpoint.models.ngrams import NGramConfig
from forkpoint.models.registry import load_config
from forkpoint.models.rotary import NO_POSITIONS
from forkpoint.ops.ranks import Ranks

FOLDER = Path(__file__).parent / "hub_configs"
# File -> parts of all layers, bytes of a token, of a checkpoint.
DELTA_NET = 3 * 8192 * 2 + 32 * 128 * 128 * 4  # the window and the matrices of a layer of Qwen's
EXPECTED: dict[str, tuple[dict[str, int], int, int]] = {
    "qwen3-next-80b-a3b": (
        {"AttentionConfig": 12, "GDNConfig": 36, "MoEConfig": 48},
        12 * 2 * 2 * 256 * 2,
        36 * DELTA_NET,
    ),
    "qwen3.5-9b": ({"AttentionConfig": 8, "GDNConfig": 24, "MLPConfig": 32}, 8 * 2 * 4 * 256 * 2, 24 * DELTA_NET),
    **dict.fromkeys(
        ("qwen3.8-27b", "qwen3.8-27b-fp8"),
        (
            {"AttentionConfig": 16, "GDNConfig": 48, "MLPConfig": 64},
            16 * 2 * 4 * 256 * 2,
            48 * (3 * 10240 * 2 + 48 * 128 * 128 * 4),
        ),
    ),
    "qwen3.5-35b-a3b": (
        {"AttentionConfig": 10, "GDNConfig": 30, "MoEConfig": 40},
        10 * 2 * 2 * 256 * 2,
        30 * DELTA_NET,
    ),
    "olmo-hybrid-7b": (
        {"AttentionConfig": 8, "GDNConfig": 24, "MLPConfig": 32},
        8 * 2 * 30 * 128 * 2,
        24 * (3 * (2 * 30 * 96 + 30 * 192) * 2 + 30 * 96 * 192 * 4),
    ),
    **dict.fromkeys(
        ("lfm2-1.2b", "lfm2.5-1.2b"),
        ({"AttentionConfig": 6, "ShortConvConfig": 10, "MLPConfig": 16}, 6 * 2 * 8 * 64 * 2, 10 * 2 * 2048 * 2),
    ),
    "lfm2-8b-a1b": (
        {"AttentionConfig": 6, "ShortConvConfig": 18, "MLPConfig": 2, "MoEConfig": 22},
        6 * 2 * 8 * 64 * 2,
        18 * 2 * 2048 * 2,
    ),
    "lfm3-1.7b": ({"PostNormConfig": 48}, 6 * 2 * 4 * 128 * 2, 13 * 6 * 2048 * 2),
    "lara-4-mini": (
        {"AttentionConfig": 20, "GDNConfig": 14, "MoEConfig": 34},
        7 * 2 * 4 * 128 * 2,
        14 * (3 * 4096 * 2 + 16 * 128 * 128 * 4),
    ),
    "aliceai-80b-a3b": (
        {"KDAConfig": 36, "AttentionConfig": 12, "MoEConfig": 48},
        12 * 2 * 2 * 256 * 2,
        36 * (3 * 12288 * 2 + 32 * 128 * 128 * 4),
    ),
    "falcon-h1-0.5b": (
        {"ParallelConfig": 36, "MLPConfig": 36},
        36 * 2 * 2 * 64 * 2,
        36 * (3 * 1792 * 2 + 24 * 64 * 128 * 4),
    ),
    "granite-4.0-h-tiny": (
        {"AttentionConfig": 4, "Mamba2Config": 36, "ParallelConfig": 40},
        4 * 2 * 4 * 128 * 2,
        36 * (3 * 3328 * 2 + 48 * 64 * 128 * 4),
    ),
    "nemotron-3-nano-30b-a3b": (
        {"AttentionConfig": 6, "Mamba2Config": 23, "MoEConfig": 23},
        6 * 2 * 2 * 128 * 2,
        23 * (3 * 6144 * 2 + 64 * 64 * 128 * 4),
    ),
    "nemotron-3-super-120b-a12b": (
        {"AttentionConfig": 8, "Mamba2Config": 40, "ParallelConfig": 40},
        8 * 2 * 2 * 128 * 2,
        40 * (3 * 10240 * 2 + 128 * 64 * 128 * 4),
    ),
    "nemotron-3-ultra-550b-a55b": (
        {"AttentionConfig": 12, "Mamba2Config": 48, "ParallelConfig": 48},
        12 * 2 * 2 * 128 * 2,
        48 * (3 * 18432 * 2 + 256 * 64 * 128 * 4),
    ),
    "nemotron-3.5-lightning-30b-a3b": (
        {"AttentionConfig": 6, "Mamba2Config": 23, "MoEConfig": 23},
        6 * 2 * 2 * 128 * 2,
        23 * (3 * 6144 * 2 + 64 * 64 * 128 * 4),
    ),
    "nemotron-h-8b": (
        {"AttentionConfig": 4, "Mamba2Config": 24, "MLPConfig": 24},
        4 * 2 * 8 * 128 * 2,
        24 * (3 * 10240 * 2 + 128 * 64 * 128 * 4),
    ),
    "granite-4.0-h-350m": (
        {"AttentionConfig": 4, "Mamba2Config": 28, "MLPConfig": 32},
        4 * 2 * 4 * 64 * 2,
        28 * (3 * 1792 * 2 + 48 * 32 * 128 * 4),
    ),
    "kimi-linear-48b-a3b": (
        {"KDAConfig": 20, "LatentAttentionConfig": 7, "MLPConfig": 1, "MoEConfig": 26},
        7 * 576 * 2,
        20 * (3 * 12288 * 2 + 32 * 128 * 128 * 4),
    ),
    "jamba-mini": (
        {"MambaConfig": 28, "AttentionConfig": 4, "MLPConfig": 16, "MoEConfig": 16},
        4 * 2 * 8 * 128 * 2,
        28 * (3 * 8192 * 2 + 8192 * 16 * 4),
    ),
    "ling-3.0-flash": (
        {"KDAConfig": 35, "LatentAttentionConfig": 7, "MLPConfig": 2, "MoEConfig": 40},
        7 * 576 * 2,
        35 * (3 * 12288 * 2 + 32 * 128 * 128 * 4),
    ),
    "ling-2.6-flash": (
        {"LightningConfig": 28, "LatentAttentionConfig": 4, "MLPConfig": 1, "MoEConfig": 31},
        4 * 576 * 2,
        28 * 32 * 128 * 128 * 4,
    ),
    "glm-5.3-flash": (
        {"KDAConfig": 34, "IndexedLatentConfig": 11, "MLPConfig": 3, "MoEConfig": 42},
        11 * (512 + 128 // 4) * 2,  # latents, and an index key for four tokens
        34 * (3 * 24576 * 2 + 64 * 128 * 128 * 4) + 11 * 3 * 256 * 2,  # inputs of the pool that is not complete
    ),
    "qwen3.8-flash-next": (
        {"GDNConfig": 36, "IndexedAttentionConfig": 12, "MoEConfig": 48, "NGramConfig": 1},
        12 * (2 * 2 * 256 + 128 // 4) * 2,  # keys and values, and an index key for four tokens
        # inputs of the pool that is not complete; inputs of the dilated convolution, and two tokens (padded)
        36 * (3 * 10240 * 2 + 48 * 128 * 128 * 4) + 12 * 3 * 128 * 2 + 9 * 4 * 2560 * 2 + 64,
    ),
    "llama-3.1-8b": ({"AttentionConfig": 32, "MLPConfig": 32}, 32 * 2 * 8 * 128 * 2, 0),
    "ministral-8b": ({"AttentionConfig": 36, "MLPConfig": 36}, 36 * 2 * 8 * 128 * 2, 0),
    "mamba2-780m": ({"Mamba2Config": 48}, 0, 48 * (3 * 3328 * 4 + 48 * 64 * 128 * 4)),  # fp32
    "mamba-codestral-7b": ({"Mamba2Config": 64}, 0, 64 * (3 * 10240 * 2 + 128 * 64 * 128 * 4)),
    "falcon-mamba-7b": ({"MambaConfig": 64}, 0, 64 * (3 * 8192 * 2 + 8192 * 16 * 4)),
}


def read(name: str, tmp_path: Path) -> ModelConfig:
    (tmp_path / "config.json").write_text((FOLDER / f"{name}.json").read_text())
    return load_config(tmp_path)


@pytest.mark.parametrize("name", EXPECTED)
def test_layers_and_bytes(name: str, tmp_path: Path) -> None:
    config = read(name, tmp_path)
    layout = CacheLayout.create(config.layer_specs, longest=config.max_model_len)
    assert not config.unknown_fields
    found = dict(Counter(type(part).__name__ for part in config.parts))
    assert (found, layout.block_bytes // 64, layout.slot_bytes) == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_layers_of_a_rank_are_told_apart_by_kind(name: str, tmp_path: Path) -> None:
    """Kernels are compiled once for all layers of a kind."""
    config = read(name, tmp_path)
    assert len(set(config.shared_by(Ranks(0, 2)).layers)) == len(set(config.layers))


@pytest.mark.parametrize(
    ("name", "num_ranks", "dealt_to"),
    [("kimi-linear-48b-a3b", 2, 2), ("ling-3.0-flash", 4, 4), ("qwen3.5-35b-a3b", 4, 2)],
)
def test_tokens_that_fit_if_keys_are_dealt_to_ranks(name: str, num_ranks: int, dealt_to: int, tmp_path: Path) -> None:
    """In an arena of 20 GiB on each rank."""
    config, fitting = read(name, tmp_path), []
    for size in (1, dealt_to):
        own = config.shared_by(Ranks(0, num_ranks, context=Ranks(0, size)))
        layout = CacheLayout.create(own.layer_specs, longest=config.max_model_len, dealt_to=size)
        fitting.append(layout.longest_request((20 << 30) // layout.page_bytes))
    assert fitting[1] >= 0.95 * dealt_to * fitting[0]


@pytest.mark.parametrize(
    ("name", "num_ranks", "says"),
    [
        ("qwen3.5-35b-a3b", 2, "and 2 KV heads: leave it out: each rank has KV heads of its own"),
        ("qwen3.5-35b-a3b", 4, "and 2 KV heads: give a size that divides 2, the ranks that hold the same KV head"),
        ("glm-5.3-flash", 2, "attention to chosen keys needs all keys on each rank; leave it out"),
        ("qwen3.8-flash-next", 2, "attention to chosen keys needs all keys on each rank; leave it out"),
    ],
)
def test_keys_that_cannot_be_dealt_to_ranks(name: str, num_ranks: int, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"decode_context_parallel_size={num_ranks} is not possible .*{says}"):
        read(name, tmp_path).shared_by(Ranks(0, num_ranks, context=Ranks(0, num_ranks)))


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in sorted(EXPECTED)
        if name.startswith(("nemotron-3-s", "nemotron-3-u", "nemotron-3.5", "ling", "qwen3", "glm", "alice"))
    ],
)
def test_published_mtp_heads_are_used(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((FOLDER / f"{name}.json").read_text())
    config = load_config(tmp_path, mtp=True)
    kinds = [type(part).__name__ for part in config.draft_layer]
    assert kinds[0] == "ShortConvConfig"
    assert kinds[1] in ("AttentionConfig", "LatentAttentionConfig", "RecentLatentConfig")
    assert config.mtp_names is not None and len(config.mtp_names.blocks) == len(kinds) - 1 == 2


def test_every_file_is_looked_at() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(EXPECTED)


def test_kimi_counts_layers_from_one(tmp_path: Path) -> None:
    layers = read("kimi-linear-48b-a3b", tmp_path).layers
    attending = [i + 1 for i, parts in enumerate(layers) if isinstance(parts[0], LatentAttentionConfig)]
    assert attending == [4, 8, 12, 16, 20, 24, 27] and isinstance(layers[0][1], MLPConfig)


def test_two_dialects_of_lfm2_say_the_same(tmp_path: Path) -> None:
    older, newer = read("lfm2-1.2b", tmp_path), read("lfm2.5-1.2b", tmp_path)
    assert older == newer and older.tie_word_embeddings and older.rotary.frequencies[16] == pytest.approx(1e-3)
    (width,) = {part.intermediate_size for part in older.parts if isinstance(part, MLPConfig)}
    assert width == 8192


def test_lfm3_has_two_kinds_of_attention(tmp_path: Path) -> None:
    config = read("lfm3-1.7b", tmp_path)
    mixers = [parts[0].parts[0] for parts in config.layers if isinstance(parts[0], PostNormConfig)]
    attention = [part for part in mixers if isinstance(part, AttentionConfig)]
    assert [part.window for part in attention] == [None, 256] * 5 + [None]
    assert all(part.head_gated and part.rotary is not None for part in attention)
    full, sliding = (part.rotary.frequencies for part in attention[:2] if part.rotary is not None)
    assert full[31] == pytest.approx(1e6 ** (-62 / 128)) and full[32:] == (0.0,) * 32
    assert sliding[63] == pytest.approx(1e4 ** (-126 / 128))


def test_lara_rotates_where_it_has_a_window(tmp_path: Path) -> None:
    mixers = [parts[0] for parts in read("lara-4-mini", tmp_path).layers]
    attention = [(part.window, part.rotary) for part in mixers if isinstance(part, AttentionConfig)]
    assert attention == [(512, None), (None, NO_POSITIONS), (512, None)] * 6 + [(512, None), (None, NO_POSITIONS)]


def test_llama_is_stretched_and_ministral_has_a_window(tmp_path: Path) -> None:
    llama, ministral = read("llama-3.1-8b", tmp_path), read("ministral-8b", tmp_path)
    slowest = 5e5 ** (-126 / 128)
    assert llama.rotary.frequencies[-1] == pytest.approx(slowest / 8) and llama.rotary.frequencies[0] == 1
    assert {spec.window for layer in ministral.layer_specs for spec in layer if isinstance(spec, KVSpec)} == {32768}


def test_ngrams_have_the_published_table(tmp_path: Path) -> None:
    (ngrams,) = (part for part in read("qwen3.8-flash-next", tmp_path).layers[1] if isinstance(part, NGramConfig))
    assert (len(ngrams.sizes), ngrams.num_rows, ngrams.dim // 16) == (16, 320_001_536, 160)  # 51 billion weights


def test_olmo_has_no_positions(tmp_path: Path) -> None:
    assert read("olmo-hybrid-7b", tmp_path).rotary.dim == 0
