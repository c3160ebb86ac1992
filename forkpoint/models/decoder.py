"""The stack that all families share: embedding, layers, final norm and output head."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Final, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.cache.layer_spec import LayerSpec
from forkpoint.image_families.settings import ImageSettings
from forkpoint.models.config import Block, Build, ModelConfig
from forkpoint.models.context import ForwardContext
from forkpoint.models.cuts import Cut, padded_span
from forkpoint.models.field_rules import ROTARY, unknown_fields
from forkpoint.models.fields import Fields, class_defaults
from forkpoint.models.head import OutputHead
from forkpoint.models.image_rows import ImageRows
from forkpoint.models.layers import RMSNorm
from forkpoint.models.mtp import DraftHead, MTPHead
from forkpoint.models.vision import VisionConfig, VisionTower

# Maps `x` and `residual`, both `[T, H]`, to the same pair. The hidden state is `x + residual`, and the next norm adds
# the two. `residual` is None before the first layer, and between layers with several streams (models/streams.py).
Layer: TypeAlias = Callable[[Tensor, Tensor | None, ForwardContext], tuple[Tensor, Tensor | None]]

HEAD: Final = "lm_head.weight"
LOGGER: Final = logging.getLogger(__name__)
# Names of weights outside of layers: those of Mamba's authors, and the canonical ones.
BACKBONE: Final = (
    ("backbone.embeddings.", "model.embed_tokens."),
    ("backbone.norm_f.", "model.norm."),
    ("backbone.", "model."),
    ("model.embeddings.", "model.embed_tokens."),
    ("model.norm_f.", "model.norm."),
)


class PreNormLayer:
    """A layer of `h += block(norm(h))` for each of its blocks. See `Layer` for the arguments."""

    def __init__(self, blocks: Sequence[tuple[RMSNorm, Block]]) -> None:
        self._blocks = blocks

    def __call__(self, x: Tensor, residual: Tensor | None, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        for norm, block in self._blocks:
            x, residual = norm.add(x, residual)
            x = block(x, ctx)
        assert residual is not None, "a layer has a part"
        return x, residual


class PostNormLayer(PreNormLayer):
    """A layer of `h += norm(block(h))` for each of its blocks."""

    def __call__(self, x: Tensor, residual: Tensor | None, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        for norm, block in self._blocks:
            residual = x if residual is None else residual + x
            x = norm(block(residual, ctx))
        assert residual is not None, "a layer has a part"
        return x, residual


class Model(ABC):
    """A family of text models. A model holds only weights; all state is in the caches that a ForwardContext names.

    A family lists the `architectures` of config.json that it serves and reads their fields in `parse`. By default norm
    `norms[i]` precedes part i of a layer. Families with other layers override `build_layer`.
    """

    architectures: ClassVar[tuple[str, ...]]
    centred_norms: ClassVar[bool] = False
    field_names: ClassVar[Mapping[str, str]] = {}  # names in config.json -> common names
    vision: VisionTower | None = None
    images: ImageRows | None = None  # of a model with a vision tower
    # the transformers class whose defaults apply, as "module.Class" in `transformers.models`
    config_class: ClassVar[str] = ""
    defaults: ClassVar[Mapping[str, Any]] = {}  # defaults that the class does not have, under the common names
    # Fields that need not be read, because they have no effect in this family or belong to parts that only some models
    # have.
    unneeded_fields: ClassVar[Collection[str]] = ()
    weight_names: ClassVar[Sequence[tuple[str, str]]] = ()  # (part of a stored name, its replacement)
    norms: ClassVar[tuple[str, ...]] = ("input_layernorm", "post_attention_layernorm")
    defers_sums: ClassVar[bool] = True  # only norms read hidden states, so that they may do the all-reduce
    # operators whose torch functions wait for the device, so that no graph can record a step with them
    waiting: ClassVar[Collection[str]] = ()

    def __init__(self, build: Build) -> None:
        config, weights = build.config, build.weights
        self.config: ModelConfig = config
        self.layer_specs: tuple[LayerSpec, ...] = config.layer_specs
        shape = (config.vocab_size, config.hidden_size)
        self._embedding = weights.get("model.embed_tokens.weight", shape)
        if config.vision is not None:
            assert config.embedding_scale == 1.0, "the scale is meant for the vocabulary's embeddings alone"
            self.vision = config.vision.build(weights, build.ops)
            self._embedding = F.pad(self._embedding, (0, 0, 0, build.max_image_tokens))
            lines = build.rope_table(config.rotary), config.max_model_len
            self.images = ImageRows(self._embedding, config.vocab_size, *lines, config.vision.axes)
        self.fold_constants = build.fold_constants
        self._layers = [self.build_layer(build, layer) for layer in range(len(config.layers))]
        self._finish = self.build_end(build)
        self._drafts = self.build_drafts(build) if config.draft_layer else None
        head = self._read_head(build)
        self.head = OutputHead(build.ops, build.ranks, head, config.vocab_size, guesses=self._drafts is not None)

    def _read_head(self, build: Build) -> Tensor:
        """Return this rank's rows of the output head: the checkpoint's own if it has one, or the embeddings if tied.

        Warns if tied embeddings differ from the checkpoint's own head.
        """
        config, weights, ranks = build.config, build.weights, build.ranks
        start, end = padded_span(config.vocab_size, ranks)
        cut, shape = Cut(padded=config.vocab_size), (end - start, config.hidden_size)
        if not config.tie_word_embeddings:
            return weights.get(HEAD, shape, cut=cut)
        tied = cut.part(shape, ranks).of(self._embedding[: config.vocab_size])
        if not weights.stores(HEAD):
            return tied
        own = weights.get(HEAD, shape, cut=cut)
        if torch.equal(own, tied):
            return tied  # keep one copy in memory
        if ranks.rank == 0:
            LOGGER.warning(
                "config.json has tie_word_embeddings=true, but the weights hold a %s that differs from the "
                "embeddings; it is used",
                HEAD,
            )
        return own

    @classmethod
    @abstractmethod
    def parse(cls, fields: Fields) -> ModelConfig:
        """Read config.json. Raises ModelFolderError and UnsupportedModelError."""

    @classmethod
    def read(cls, fields: Fields) -> ModelConfig:
        """Parse the fields under all of their names, with defaults for absent ones.

        Raises what `parse` raises, and UnsupportedModelError for a field that changes the forward pass and is not read.
        """
        defaults, pairs = class_defaults(cls.config_class) if cls.config_class else ({}, [])
        config = cls.parse(fields.translated(cls.field_names, {**defaults, **cls.defaults}, pairs))
        names = [*cls.field_names.items(), *pairs, *((other, one) for one, other in pairs)]
        read = {*fields.values.read, *(theirs for theirs, ours in names if ours in fields.values.read)}
        known = defaults | {one: defaults[other] for one, other in names if one not in defaults and other in defaults}
        given = fields.values.unrecorded()
        unknown = unknown_fields(given, read, known, cls.unneeded_fields, fields.where)
        for name in ("rope_parameters", "rope_scaling"):
            unneeded, rope = {*cls.unneeded_fields, *ROTARY}, fields.inner(name)
            for where, values in {name: rope, **{k: v for k, v in rope.items() if isinstance(v, dict)}}.items():
                unknown += unknown_fields(values, read, {}, unneeded, f"{fields.where}: {where}")
        return replace(config, unknown_fields=(*config.unknown_fields, *unknown))

    @classmethod
    def read_vision(cls, fields: Fields, config: ModelConfig, settings: ImageSettings) -> VisionConfig:
        """Read the sizes of the vision tower, for a family that has one (others: NotImplementedError).

        `fields` are those of the whole config.json, and `config` is what `read` returned for the text model. Raises
        ModelFolderError and UnsupportedModelError.
        """
        raise NotImplementedError(f"{cls.__name__} has no vision tower")

    def build_layer(self, build: Build, layer: int) -> Layer:
        """Read the weights of layer `layer` of `build.config.layers`, and return its function."""
        return PreNormLayer(self.normed_blocks(build, layer, self.norms))

    def build_end(self, build: Build) -> Callable[[Tensor, Tensor | None], Tensor]:
        """Build the function from the last layer's `x` and `residual` to normed hidden states `[T, H]`."""
        norm = RMSNorm(build, "model.norm", build.config.hidden_size, self.centred_norms)
        norm.weight = norm.weight * build.config.logits_scale
        return lambda x, residual: norm.add(x, residual)[0]

    def build_drafts(self, build: Build) -> DraftHead:
        """Read the weights of the MTP head."""
        return MTPHead(build)

    def normed_blocks(self, build: Build, layer: int, names: Sequence[str]) -> list[tuple[RMSNorm, Block]]:
        """Build the parts of layer `layer`, each with the norm of the same index in `names`."""
        name, parts = f"model.layers.{layer}", build.config.layers[layer]
        build = replace(build, defers=self.defers_sums)
        hidden, centred = build.config.hidden_size, self.centred_norms
        norms = [RMSNorm(build, f"{name}.{norm}", hidden, centred) for norm in names[: len(parts)]]
        blocks = [part.build(build, f"{name}.{part.name}", layer) for part in parts]
        return list(zip(norms, blocks, strict=True))

    @contextmanager
    def few_layers(self) -> Iterator[None]:
        """Leave out layers that launch the kernels of others, for passes whose results do not matter.

        The first layer, which adds no residual, and the last one stay, as do the first two layers of each kind.
        """
        every, kinds = self._layers, Counter[Any]()
        self._layers = []
        for layer, parts in zip(every, self.config.layers, strict=True):
            kinds[parts] += 1
            if kinds[parts] <= 2 or layer is every[-1]:
                self._layers.append(layer)
        try:
            yield
        finally:
            self._layers = every

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Compute normed hidden states `[T, H]` from `token_ids[T]` int64. Writes the caches that `ctx` names."""
        x = self._embed(token_ids)
        if self.config.streams is not None:  # all streams begin as the embeddings
            x = x.unsqueeze(1).expand(-1, self.config.streams.count, -1)
        residual: Tensor | None = None
        for layer in self._layers:
            x, residual = layer(x, residual, ctx)
        hidden = self._finish(x, residual)
        if self._drafts is not None:
            # embedded again, because norms may have added to the first embeddings in place
            own = x.flatten(1) if self._drafts.reads_streams else hidden
            if ctx.draft_positions is not None:
                ctx = replace(ctx, positions=ctx.draft_positions)
            self._drafts.keep(self._embed(token_ids), own, ctx)
        return hidden

    def draft(self, token_ids: Tensor, hidden: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Run the MTP head on the newest token of each row, `[B]` int64, and the hidden state before it.

        `hidden` is the window that `forward` stores, or what the last `draft` returned second. Returns hidden states
        `[B, H]`, whose `logits` predict the token after the newest one, and the `hidden` of the next draft. Writes the
        head's keys. Needs `config.draft_layer`.
        """
        assert self._drafts is not None, "the model was loaded without its MTP layer"
        return self._drafts.draft(self._embed(token_ids), hidden, ctx)

    def _embed(self, token_ids: Tensor) -> Tensor:
        x = F.embedding(token_ids, self._embedding)
        if self.config.embedding_scale != 1.0:
            x = x * self.config.embedding_scale
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits `[R, vocab_size]`, in the model's dtype, from `hidden[R, H]`. Ranks must call it together."""
        return self.head.whole(self.head.own(hidden))
