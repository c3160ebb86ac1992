"""Qwen3.8-Flash-Next: gated delta net, attention to the keys that an index chooses, and n-grams of the last tokens.

The hidden state is several streams, which each part reads and writes through gates (hyper-connections).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Final

from torch import Tensor

from forkpoint.errors import ModelFolderError, UnsupportedModelError
from forkpoint.models.attention import AttentionConfig
from forkpoint.models.config import Build, ModelConfig, MTPNames, PartConfig
from forkpoint.models.context import ForwardContext
from forkpoint.models.decoder import Model
from forkpoint.models.fields import Fields
from forkpoint.models.gated_delta_net import GDNConfig
from forkpoint.models.gated_streams import GatedStreams, gated_mixer, read_join
from forkpoint.models.indexed_attention import IndexedAttentionConfig
from forkpoint.models.key_index import POOL_OPERATORS, IndexConfig
from forkpoint.models.moe import MoEConfig
from forkpoint.models.mtp import draft_layer
from forkpoint.models.ngrams import NGramConfig
from forkpoint.models.qwen3_next import Qwen35
from forkpoint.models.stream_mtp import StreamMTPHead
from forkpoint.models.streams import StreamLayer

MOST_HEADS: Final = 2**10  # of n-grams, each of which needs a prime of its own
MOST_TAPS: Final = 16  # of the C++ operators
LINEAR: Final = "linear_attention"
ATTENTION: Final = ("indexed_attention", "full_attention", "qwen_sparse_attention")  # names of one kind of layer
MTP_NAMES: Final = MTPNames(
    embedding_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    join="mtp.fc_hidden",
    norm="mtp.hyper_connection_mixer",
    blocks=(
        ("mtp.layers.0.attn_hyper_connection", "mtp.layers.0"),
        ("mtp.layers.0.mlp_hyper_connection", "mtp.layers.0"),
    ),
    centred=True,
    unused=("mtp.layers.0.self_attn.indexer.",),
)


class Qwen4Exp(Model):
    """`Qwen4ExpForConditionalGeneration`, of which the text part runs, and `Qwen4ExpForCausalLM`."""

    architectures: ClassVar = ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration")
    config_class: ClassVar = "qwen4_exp.Qwen4ExpTextConfig"
    unneeded_fields: ClassVar = (  # fields of n-grams are read if layers have some
        *("heads_per_ngram", "make_ngram_vocab_size_divisible_by", "mtp", "ngram_size", "ngram_vocab_size_base"),
        *("number_of_conv_states", "ple_conv_kernel_size", "ple_embed_dim", "seed", "split_ngram_parts"),
    )
    defers_sums: ClassVar = False  # streams are read by more than norms
    waiting: ClassVar = (*POOL_OPERATORS, "host_rows")

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
        # The head attends to all keys, so that drafts need neither index keys nor their states. Up to indexer_budget
        # tokens these are the keys that its index would choose.
        drafting = AttentionConfig.read(fields, gated=True, centred=True)
        return ModelConfig.of(
            fields,
            layers,
            rotary,
            streams=streams,
            draft_layer=draft_layer(fields, drafting, mlp, num_streams=streams.count),
            mtp_names=MTP_NAMES,
        )

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        return super().forward(token_ids, replace(ctx, token_ids=token_ids))

    def build_layer(self, build: Build, layer: int) -> StreamLayer:
        name, parts = f"model.layers.{layer}", build.config.layers[layer]
        *before, mixer, mlp = [part.build(build, f"{name}.{part.name}", layer) for part in parts]
        first, second = (gated_mixer(build, f"{name}.{part}_hyper_connection") for part in ("attn", "mlp"))
        return StreamLayer([(first, mixer), (second, mlp)], before[0] if before else None)

    def build_drafts(self, build: Build) -> StreamMTPHead:
        return StreamMTPHead(build)

    def build_end(self, build: Build) -> Callable[[Tensor, Tensor | None], Tensor]:
        join = read_join(build, "model.hyper_connection_mixer")
        return lambda streams, residual: join(streams)[0]


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
