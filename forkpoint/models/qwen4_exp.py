"""Qwen3.8-Flash-Next: gated delta net, attention to the keys that an index chooses, and n-grams of the last tokens.

The hidden state is several streams, which each part reads and writes through gates (hyper-connections).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import torch
from torch import Tensor

from forkpoint.errors import ModelFolderError, UnsupportedModelError
from forkpoint.models.config import Build, ModelConfig, PartConfig, StreamsConfig
from forkpoint.models.context import ForwardContext
from forkpoint.models.decoder import Model
from forkpoint.models.fields import Fields
from forkpoint.models.gated_delta_net import GDNConfig
from forkpoint.models.indexed_attention import IndexedAttentionConfig
from forkpoint.models.key_index import IndexConfig
from forkpoint.models.layers import read_projection
from forkpoint.models.moe import MoEConfig
from forkpoint.models.ngrams import NGramConfig
from forkpoint.models.qwen3_next import Qwen35
from forkpoint.models.streams import Mixer, StreamLayer, repeated, weighted
from forkpoint.ops.activation.reference import sigmoid, silu
from forkpoint.ops.norm.reference import rmsnorm

MOST_HEADS: Final = 2**10  # of n-grams, each of which needs a prime of its own
MOST_TAPS: Final = 16  # of the C++ operators
LINEAR: Final = "linear_attention"
ATTENTION: Final = ("indexed_attention", "full_attention", "qwen_sparse_attention")  # names of one kind of layer


class Qwen4Exp(Model):
    """`Qwen4ExpForConditionalGeneration`, of which the text part runs, and `Qwen4ExpForCausalLM`."""

    architectures: ClassVar = ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration")
    config_class: ClassVar = "qwen4_exp.Qwen4ExpTextConfig"
    unneeded_fields: ClassVar = (  # fields of n-grams are read if layers have some
        *("heads_per_ngram", "make_ngram_vocab_size_divisible_by", "mtp", "ngram_size", "ngram_vocab_size_base"),
        *("number_of_conv_states", "ple_conv_kernel_size", "ple_embed_dim", "seed", "split_ngram_parts"),
    )
    defers_sums: ClassVar = False  # streams are read by more than norms
    recordable: ClassVar = False  # pools are chosen by lengths that the host has

    @classmethod
    def parse(cls, fields: Fields) -> ModelConfig:
        fields.require("output_gate_type", "silu", "sigmoid")
        streams = GatedStreams(fields.integer("hc_count", low=2), fields.integer("hc_lowrank"))
        every = fields.integer("full_attention_interval", 4)
        kinds = fields.layer_types((LINEAR, *ATTENTION), lambda i: ATTENTION[0] if (i + 1) % every == 0 else LINEAR)
        linear = GDNConfig.read(
            fields, wide=Qwen35.wide, narrow=Qwen35.narrow, sigmoid=fields.values.get("output_gate_type") == "sigmoid"
        )
        attention, mlp = _attention(fields), MoEConfig.read(fields)
        rotary = fields.rotary(attention.head_dim, 1.0)
        if rotary.dim > attention.index.dim:
            raise ModelFolderError(
                f"{fields.where}: {rotary.dim} rotary dims do not fit in index heads of {attention.index.dim}"
            )
        ngrams = _ngrams(fields, streams.count)
        layers = list[tuple[PartConfig, ...]]()
        for layer, kind in enumerate(kinds):
            before = ngrams.pop(layer + 1, None)
            if before is not None and kind != LINEAR:
                raise UnsupportedModelError(
                    f"{fields.where}: ple_layer_ids names layer {layer + 1}, which is attention; forkpoint runs "
                    f"n-grams in layers of type {LINEAR}"
                )
            mixer: PartConfig = linear if kind == LINEAR else attention
            layers.append((before, mixer, mlp) if before is not None else (mixer, mlp))
        if ngrams:
            raise ModelFolderError(f"{fields.where}: ple_layer_ids names {[*ngrams]}, of {len(kinds)} layers")
        return ModelConfig.of(fields, layers, rotary, streams=streams)

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        return super().forward(token_ids, replace(ctx, token_ids=token_ids))

    def build_layer(self, build: Build, layer: int) -> StreamLayer:
        name, parts = f"model.layers.{layer}", build.config.layers[layer]
        *before, mixer, mlp = [part.build(build, f"{name}.{part.name}", layer) for part in parts]
        first, second = (gated_mixer(build, f"{name}.{part}_hyper_connection") for part in ("attn", "mlp"))
        return StreamLayer([(first, mixer), (second, mlp)], before[0] if before else None)

    def build_end(self, build: Build) -> Callable[[Tensor, Tensor | None], Tensor]:
        join, _ = read_join(build, "model.hyper_connection_mixer")
        return lambda streams, residual: join(streams)[0]

    def enter(self, x: Tensor) -> Tensor:
        assert self.config.streams is not None, "the family has streams"
        return repeated(x, self.config.streams.count)


def _attention(fields: Fields) -> IndexedAttentionConfig:
    if fields.integer("indexer_kv_heads") != 1:
        raise UnsupportedModelError(f"{fields.where} has indexer_kv_heads other than 1; forkpoint runs one")
    heads, dim = fields.integer("indexer_n_heads"), fields.integer("indexer_head_dim")
    size, num_keys = fields.integer("indexer_compress_ratio"), fields.integer("indexer_budget")
    index = IndexConfig.of(fields, heads, dim, size, num_keys)
    return IndexedAttentionConfig.read(fields, gated=True, centred=True, index=index)


def _ngrams(fields: Fields, num_streams: int) -> dict[int, NGramConfig]:
    """Return the n-grams of each layer that has some, by its number from 1.

    Raises as Fields does, and ModelFolderError or UnsupportedModelError for fields that do not fit together.
    """
    numbers = sorted(set(fields.indices("ple_layer_ids") or []))
    if not numbers:
        return {}
    ends, hidden = fields.token_ids("eos_token_id"), fields.integer("hidden_size")
    if not ends:
        raise ModelFolderError(f"{fields.where} lacks eos_token_id, which n-grams need")
    longest, heads = fields.integer("ngram_size", low=2), fields.integer("heads_per_ngram")
    if len(numbers) * (longest - 1) * heads > MOST_HEADS:
        raise ModelFolderError(
            f"{fields.where}: {len(numbers)} layers with n-grams of 2 to {longest} tokens and {heads} heads each; "
            f"at most {MOST_HEADS} heads together are allowed"
        )
    width = fields.integer("ple_conv_kernel_size", low=2)
    if (width - 1) * longest >= MOST_TAPS:
        raise UnsupportedModelError(
            f"{fields.where}: {width} taps that are ngram_size={longest} tokens apart (ple_conv_kernel_size) reach "
            f"over more than the {MOST_TAPS} tokens that convolutions have"
        )
    first = NGramConfig(
        number=0,
        longest=longest,
        heads=heads,
        least_rows=fields.integer("ngram_vocab_size_base"),
        multiple=fields.integer("make_ngram_vocab_size_divisible_by"),
        num_shards=fields.integer("split_ngram_parts"),
        dim=fields.multiple("ple_embed_dim", (longest - 1) * heads, "heads of n-grams", hidden),
        vocab_size=fields.integer("vocab_size"),
        seed=fields.integer("seed", low=0),
        end_token=ends[0],
        conv_width=width,
        num_streams=num_streams,
        hidden_size=hidden,
    )
    return {layer: replace(first, number=i) for i, layer in enumerate(numbers)}


@dataclass(frozen=True, slots=True)
class GatedStreams(StreamsConfig):
    """Streams that are joined by gates. The gates are computed through a latent of `rank`."""

    rank: int


def read_join(build: Build, name: str) -> tuple[Callable[[Tensor], tuple[Tensor, Tensor]], int]:
    """Read the function from streams `[T, N, H]` to their gated mean `[T, H]` and the normalised streams `[T, N * H]`.

    Also returns the size of the normalised streams.
    """
    streams, hidden = build.config.streams, build.config.hidden_size
    assert isinstance(streams, GatedStreams), "the family's own"
    count, width, eps = streams.count, streams.count * hidden, build.config.rms_norm_eps
    norm = 1 + build.weights.get(f"{name}.hc_norm.weight", (width,), torch.float32, (-0.1, 0.1)).view(count, hidden)
    down = read_projection(build, f"{name}.input_mix_weight_down", streams.rank, width)
    up = read_projection(build, f"{name}.input_mix_weight_up", width, streams.rank)

    def join(states: Tensor) -> tuple[Tensor, Tensor]:
        normed = rmsnorm(states, norm, eps)
        latent = silu(down(normed.flatten(1)).float() / count).to(states.dtype)
        gates = sigmoid(torch.unflatten(up(latent), 1, (count, hidden)).float())
        return (weighted(normed, gates) / count).to(states.dtype), normed.flatten(1)

    return join, width


def gated_mixer(build: Build, name: str) -> Mixer:
    """Read the mixer of one part, which adds the part's output to each stream with a weight of its own."""
    (join, width), streams = read_join(build, name), build.config.streams
    assert streams is not None
    count = streams.count
    inject = read_projection(build, f"{name}.block_inject_weight", count, width)

    def mix(states: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        joined, normed = join(states)
        weights = 2 * sigmoid(inject(normed).float() / count)

        def put_back(out: Tensor) -> Tensor:
            return (states.float() + out.unsqueeze(1).float() * weights.unsqueeze(-1)).to(states.dtype)

        return joined, put_back

    return mix
