"""What families say of a text model: its sizes, and the parts of each layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from torch import Tensor

from forkpoint.cache.layout import LayerSpec, keys_in_fp8
from forkpoint.errors import ConfigError
from forkpoint.models.context import ForwardContext
from forkpoint.models.fields import Fields
from forkpoint.models.quantization import Fp8Format
from forkpoint.models.rotary import NO_POSITIONS, Rotary
from forkpoint.models.weights import WeightSource
from forkpoint.ops.ranks import Ranks
from forkpoint.ops.table import OpTable

# `x[T, H] -> [T, H]`, reading and writing the caches that the context names.
Block: TypeAlias = Callable[[Tensor, ForwardContext], Tensor]


class PartConfig(ABC):
    """One part of a layer: attention, a recurrence, an MLP. `name` is what the weights call it."""

    name: str

    @abstractmethod
    def build(self, build: Build, name: str, layer: int) -> Block:
        """The part of layer `layer`, whose weights' names start with `name`."""

    @abstractmethod
    def num_weights(self, hidden_size: int) -> int:
        """Weights of matrices that one token meets."""

    def kept(self, dtype: str, state_dtype: str) -> LayerSpec:
        """What it keeps of tokens and sequences; `dtype` is the model's, `state_dtype` that of recurrent matrices."""
        return ()

    def cut(self, ranks: Ranks) -> PartConfig:
        """A rank's own part of a layer, by heads, channels or inner features; `build` says how its weights are cut for
        it. Raises ConfigError."""
        raise ConfigError(f"tensor_parallel_size={ranks.size}: {type(self).__name__} layers cannot be cut; give 1")

    def flops_per_pair(self) -> int:
        """Operations for one query that attends to one key."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A text model's sizes. `layers[i]` are the parts of layer i."""

    architecture: str
    dtype: str
    vocab_size: int
    hidden_size: int
    rms_norm_eps: float
    max_model_len: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    layers: tuple[tuple[PartConfig, ...], ...]
    rotary: Rotary = NO_POSITIONS
    state_dtype: str = "float32"
    quantization: Fp8Format | None = None
    num_draft_layers: int = 0  # stored behind the others, for guesses of further tokens, and not read
    draft_layer: tuple[PartConfig, ...] = ()  # of the MTP head, where it is to draft
    fp8_keys: bool = False  # keys and values are kept in 8 bits
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    unknown_fields: tuple[str, ...] = field(default=(), compare=False)  # of config.json, of which nothing is known

    @classmethod
    def of(
        cls,
        fields: Fields,
        layers: Sequence[tuple[PartConfig, ...]],
        rotary: Rotary = NO_POSITIONS,
        **more: Any,
    ) -> ModelConfig:
        """With what all families write alike; `more` is what only some have."""
        config = cls(
            architecture=fields.values["architectures"][0],
            dtype=fields.dtype(),
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            rms_norm_eps=fields.real("rms_norm_eps", 1e-6),
            max_model_len=max(fields.integer("max_position_embeddings"), rotary.max_len),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            num_draft_layers=fields.integer("num_nextn_predict_layers", 0, low=0),
            eos_token_ids=fields.token_ids("eos_token_id"),
            layers=tuple(layers),
            rotary=rotary,
        )
        return replace(config, **more)

    def shared_by(self, ranks: Ranks) -> ModelConfig:
        """What one rank builds. Raises ConfigError for what cannot be cut."""
        if ranks.size == 1:
            return self

        def own(parts: Sequence[PartConfig]) -> tuple[PartConfig, ...]:
            return tuple(part.cut(ranks) for part in parts)

        kept_hidden, drafting = self.draft_layer[:1], self.draft_layer[1:]  # hidden states are whole on every rank
        return replace(self, layers=tuple(map(own, self.layers)), draft_layer=(*kept_hidden, *own(drafting)))

    @property
    def parts(self) -> list[PartConfig]:
        """Of all layers."""
        return [part for layer in self.layers for part in layer]

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """What each layer keeps, that of the MTP head last. Raises UnsupportedModelError for keys that cannot be kept
        in 8 bits."""
        all_layers = (*self.layers, self.draft_layer) if self.draft_layer else self.layers
        layers: Iterable[LayerSpec] = (
            tuple(spec for part in layer for spec in part.kept(self.dtype, self.state_dtype)) for layer in all_layers
        )
        return tuple(map(keys_in_fp8, layers) if self.fp8_keys else layers)

    @property
    def flops_per_token(self) -> int:
        """Matrix-product operations per prompt token, attention scores and the output head apart."""
        return 2 * sum(part.num_weights(self.hidden_size) for part in self.parts)

    @property
    def flops_per_pair(self) -> int:
        """Operations per (query token, key token) pair, all layers together."""
        return sum(part.flops_per_pair() for part in self.parts)


@dataclass(frozen=True, slots=True)
class Build:
    """What every layer is built from; `config` and `weights` are of this rank's share."""

    config: ModelConfig
    weights: WeightSource
    ops: OpTable
    cos_sin: Tensor | None  # None: no rotary embedding
    defers: bool = False  # parts may leave the last sum of what they give to the norm behind them (`ops.unmade`)
    # What parts tell of a layer's tensors by name: what their states are folded by beside records.
    fold_constants: dict[tuple[int, str], Sequence[Tensor]] = field(default_factory=dict)

    @property
    def ranks(self) -> Ranks:
        return self.weights.ranks

    @property
    def leaves_parts(self) -> bool:
        """Whether such a sum may be left as `unmade.Parts`."""
        alone = self.ranks.size == 1
        return self.defers and (alone or self.ranks.takes_parts(self.config.hidden_size, self.weights.dtype))


@dataclass(frozen=True, slots=True)
class ParallelConfig(PartConfig):
    """Parts that see the same input, and whose outputs are added up. Names may be empty."""

    parts: Sequence[PartConfig]
    name: str = ""

    def build(self, build: Build, name: str, layer: int) -> Block:
        build = replace(build, defers=False)
        names = ((part, f"{name.removesuffix('.')}.{part.name}".removesuffix(".")) for part in self.parts)
        first, *others = (part.build(build, inner, layer) for part, inner in names)

        def together(x: Tensor, ctx: ForwardContext) -> Tensor:
            total = first(x, ctx)
            for block in others:
                total = total + block(x, ctx)
            return total

        return together

    def kept(self, dtype: str, state_dtype: str) -> LayerSpec:
        return tuple(spec for part in self.parts for spec in part.kept(dtype, state_dtype))

    def cut(self, ranks: Ranks) -> ParallelConfig:
        return replace(self, parts=[part.cut(ranks) for part in self.parts])

    def num_weights(self, hidden_size: int) -> int:
        return sum(part.num_weights(hidden_size) for part in self.parts)

    def flops_per_pair(self) -> int:
        return sum(part.flops_per_pair() for part in self.parts)
