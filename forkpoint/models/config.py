"""The description of a text model that each family reads from config.json: sizes, and the parts of each layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import torch.nn.functional as F
from torch import Tensor

from forkpoint.cache.layer_spec import LayerSpec, StateSpec, keys_in_fp8
from forkpoint.errors import ConfigError
from forkpoint.models.context import ForwardContext
from forkpoint.models.fields import Fields
from forkpoint.models.quantization import WeightFormat
from forkpoint.models.rotary import NO_POSITIONS, Rotary
from forkpoint.models.states import LayerState
from forkpoint.models.vision import VisionConfig
from forkpoint.models.weights import WeightSource
from forkpoint.ops.ranks import Ranks
from forkpoint.ops.table import OpTable

# Maps `x[T, H]` to `[T, H]`, and reads and writes the caches that the context names.
Block: TypeAlias = Callable[[Tensor, ForwardContext], Tensor]


class PartConfig(ABC):
    """One part of a layer: attention, a recurrence or an MLP. `name` is its name in the weights. It can be hashed."""

    name: str

    @abstractmethod
    def build(self, build: Build, name: str, layer: int) -> Block:
        """Read the weights of layer `layer`'s part, whose names start with `name`, and return its function."""

    @abstractmethod
    def num_weights(self, hidden_size: int) -> int:
        """Return the number of matrix weights that one token is multiplied with, on one rank if the part is cut."""

    def kept(self, dtype: str, state_dtype: str) -> LayerSpec:
        """Return the specs of what the part stores for tokens and sequences; () if it stores nothing.

        `dtype` is the model's. `state_dtype` is the dtype of recurrent matrices.
        """
        return ()

    def cut(self, ranks: Ranks) -> PartConfig:
        """Return one rank's part, split by heads, channels or inner features; `build` then reads its share of weights.

        Raises ConfigError if the part cannot be split.
        """
        raise ConfigError(f"tensor_parallel_size={ranks.size}: {type(self).__name__} layers cannot be split; give 1")

    def flops_per_pair(self) -> int:
        """Return the operations for one query token that attends to one key token; 0 without attention."""
        return 0


P = TypeVar("P", bound=PartConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPNames:
    """The canonical names of an MTP head's weights, without ".weight".

    `blocks` has the norm of each part and the start of the part's own name. `centred`: see RMSNorm.
    """

    embedding_norm: str
    hidden_norm: str
    join: str  # of the matrix that joins the two
    norm: str  # after the last part
    blocks: tuple[tuple[str, str], ...]
    centred: bool = False
    unused: tuple[str, ...] = ()  # starts of names of weights that the head has and drafting does not read


@dataclass(frozen=True, slots=True)
class StreamsConfig:
    """The number of residual streams of a family whose hidden state has several of them: see models/streams.py."""

    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A text model's sizes and parts. `layers[i]` are the parts of layer i, one rank's after `shared_by`."""

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
    quantization: WeightFormat | None = None
    # extra layers for drafting that the checkpoint stores after the others; they are not read
    num_draft_layers: int = 0
    draft_layer: tuple[PartConfig, ...] = ()  # parts of the MTP head; empty if it is not used
    mtp_names: MTPNames | None = None  # of a family whose MTP head can be used
    fp8_keys: bool = False  # store keys and values in 8 bits
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    residual_block: int = 0  # layers whose outputs are summed into one residual; 0: all
    streams: StreamsConfig | None = None
    vision: VisionConfig | None = None  # of the vision tower, if images are to be read
    # starts of names of weights, and the part of a multimodal model that they belong to, which does not run
    other_parts: tuple[tuple[str, str], ...] = ()
    # fields of config.json that forkpoint does not know
    unknown_fields: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def of(
        cls,
        fields: Fields,
        layers: Sequence[tuple[PartConfig, ...]],
        rotary: Rotary = NO_POSITIONS,
        **more: Any,
    ) -> ModelConfig:
        """Create a config from the fields that all families share; `more` sets or replaces others.

        Raises as Fields does.
        """
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
        """Return the config of what one rank builds. Raises ConfigError for parts that cannot be split."""
        if ranks.size == 1:
            return self

        def own(parts: Sequence[PartConfig]) -> tuple[PartConfig, ...]:
            return tuple(part.cut(ranks) for part in parts)

        kept_hidden, drafting = self.draft_layer[:1], self.draft_layer[1:]  # every rank stores whole hidden states
        return replace(self, layers=tuple(map(own, self.layers)), draft_layer=(*kept_hidden, *own(drafting)))

    @property
    def parts(self) -> list[PartConfig]:
        """The parts of all layers in order, without those of the MTP head."""
        return [part for layer in self.layers for part in layer]

    def all_of(self, kind: type[P]) -> list[P]:
        """Return all parts of one kind, also those inside a ParallelConfig, without those of the MTP head."""

        def leaves(parts: Sequence[PartConfig]) -> Iterator[PartConfig]:
            for part in parts:
                yield from leaves(part.parts) if isinstance(part, ParallelConfig) else (part,)

        return [part for part in leaves(self.parts) if isinstance(part, kind)]

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """The specs of what each layer stores, with those of the MTP head, if used, last.

        Raises UnsupportedModelError for keys that cannot be stored in 8 bits.
        """
        all_layers = (*self.layers, self.draft_layer) if self.draft_layer else self.layers
        layers: Iterable[LayerSpec] = (
            tuple(spec for part in layer for spec in part.kept(self.dtype, self.state_dtype)) for layer in all_layers
        )
        return tuple(map(keys_in_fp8, layers) if self.fp8_keys else layers)

    @property
    def flops_per_token(self) -> int:
        """Matrix-product operations for each prompt token, without attention scores and the output head."""
        return 2 * sum(part.num_weights(self.hidden_size) for part in self.parts)

    @property
    def flops_per_pair(self) -> int:
        """Operations for each (query token, key token) pair, summed over all layers."""
        return sum(part.flops_per_pair() for part in self.parts)


@dataclass(frozen=True, slots=True)
class Build:
    """The inputs from which every layer is built. `config` and `weights` are this rank's."""

    config: ModelConfig
    weights: WeightSource
    ops: OpTable
    defers: bool = False  # parts may leave the last sum of their output to the next norm (`ops.unmade`)
    # (layer, tensor name) -> constants that its fold operator takes after the records. Parts add their own.
    fold_constants: dict[tuple[int, str], Sequence[Tensor]] = field(default_factory=dict)
    max_image_tokens: int = 0  # the most image tokens of a step
    _rope_tables: dict[Rotary, Tensor] = field(default_factory=dict)

    def rope_table(self, rotary: Rotary) -> Tensor | None:
        """Return cos and sin `[max_model_len, dim]` fp32, one table for equal `rotary`; None without positions.

        If image tokens have three positions, lines of 0 follow, which ImageRows fills: one for each image token of a
        step, and as many for the MTP head.
        """
        if not rotary.dim:
            return None
        if rotary not in self._rope_tables:
            table, vision = rotary.table(self.config.max_model_len), self.config.vision
            if vision is not None and vision.axes and rotary == self.config.rotary:
                heads = 2 if self.config.draft_layer else 1
                table = F.pad(table, (0, 0, 0, heads * self.max_image_tokens))
            self._rope_tables[rotary] = table.to(self.weights.device)
        return self._rope_tables[rotary]

    def state(self, layer: int, name: str) -> LayerState:
        """Return the state tensor `name` of layer `layer`; the MTP head's layer comes after the others."""
        parts = (*self.config.layers, self.config.draft_layer)[layer]
        specs = (spec for part in parts for spec in part.kept(self.config.dtype, self.config.state_dtype))
        tensors = {tensor.name: tensor for spec in specs if isinstance(spec, StateSpec) for tensor in spec.tensors}
        return LayerState(self.ops, layer, tensors[name])

    @property
    def ranks(self) -> Ranks:
        return self.weights.ranks

    @property
    def leaves_parts(self) -> bool:
        """Whether a sum over ranks that is left to the next norm may be an `unmade.Parts`."""
        alone = self.ranks.size == 1
        return self.defers and (alone or self.ranks.takes_parts(self.config.hidden_size, self.weights.dtype))


@dataclass(frozen=True, slots=True)
class ParallelConfig(PartConfig):
    """Parts that read the same input, and whose outputs are added. Names may be empty."""

    parts: tuple[PartConfig, ...]
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
        return replace(self, parts=tuple(part.cut(ranks) for part in self.parts))

    def num_weights(self, hidden_size: int) -> int:
        return sum(part.num_weights(hidden_size) for part in self.parts)

    def flops_per_pair(self) -> int:
        return sum(part.flops_per_pair() for part in self.parts)
