"""What the vision towers of all families have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.errors import ModelFolderError
from forkpoint.image_families.settings import ImageSettings
from forkpoint.models.field_rules import unknown_fields
from forkpoint.models.fields import Fields, class_defaults
from forkpoint.models.weights import WeightSource
from forkpoint.ops.table import ImageAttention, OpTable

Operator: TypeAlias = Callable[[Tensor], Tensor]
GELU_TANH: Final[Operator] = partial(F.gelu, approximate="tanh")
# (x, what is added to it) -> (norm of the sum, sum). Without the second there is no sum, and x is returned.
SumNorm: TypeAlias = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
WITHOUT_TOWER: Final = "start with --language-model-only to run the text model without images"


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig(ABC):
    """Sizes of a family's tower.

    `out_size` is the text model's hidden size. If a token of an image has three rotary positions, `axes` says which of
    them rotates each pair of a text head's dims: 0 time, 1 row, 2 column. Otherwise `axes` is empty, and the token is
    rotated like one of text. `centred`: see `images.rope_positions`.
    """

    unused: ClassVar[Mapping[str, str]] = {}  # starts of names of weights it does not read -> descriptions
    settings: ImageSettings
    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    out_size: int
    axes: tuple[int, ...] = ()
    centred: bool = False

    @property
    def joined_size(self) -> int:
        """The number of values of a token's patches together."""
        return self.hidden_size * self.settings.merge_size**2

    @abstractmethod
    def build(self, weights: WeightSource, ops: OpTable) -> VisionTower:
        """Load the tower. Raises ModelFolderError for weights that are missing or of a wrong shape."""


class VisionFields(Fields):
    """The object `vision_config` of a config.json, with the defaults of transformers' `config_class`."""

    def __init__(self, fields: Fields, config_class: str) -> None:
        self._given, where = fields.inner("vision_config"), f"{fields.where}: vision_config"
        self._defaults, pairs = class_defaults(config_class)
        super().__init__(Fields(self._given, where).translated({}, self._defaults, pairs).values, where)

    def refuse_unknown(self, *unneeded: str) -> None:
        """Raise UnsupportedModelError for a field that changes the tower and is neither read nor `unneeded`."""
        unknown_fields(self._given, self.values.read, self._defaults, unneeded, self.where)


class VisionTower(ABC):
    """A tower's weights. It reads one image at a time, so that the bits of an image depend on nothing else."""

    def __init__(self, weights: WeightSource, config: VisionConfig) -> None:
        self.config: VisionConfig = config
        self.device, self.dtype = weights.device, weights.dtype
        settings = config.settings
        self._mean, self._std = (torch.tensor(each, device=self.device) for each in (settings.mean, settings.std))

    @property
    def bytes_per_token(self) -> int:
        return self.config.out_size * self.dtype.itemsize

    @abstractmethod
    def __call__(self, pixels: Tensor) -> Tensor:
        """Return the embeddings `[tokens, out_size]` of an image `[height, width, 3]`, row after row.

        Pixels have the `pixel_type` of the settings, and white is 255. A tower that reads videos also takes frames
        `[frames, height, width, 3]`.
        """

    def normalised(self, pixels: Tensor) -> Tensor:
        """Return pixels `[..., 3]` in fp32, normalised by channel, on the tower's device."""
        return (pixels.to(self.device).float() / 255 - self._mean) / self._std

    def patches(self, pixels: Tensor) -> Tensor:
        """Return the normalised patches `[rows, columns, patch_size, patch_size, 3]` of an image, in fp32."""
        patch = self.config.settings.patch_size
        height, width, _ = pixels.shape
        return self.normalised(pixels).view(height // patch, patch, width // patch, patch, 3).transpose(1, 2)

    def joined(self, x: Tensor, num_rows: int, num_columns: int) -> Tensor:
        """Return patches `[rows * columns, hidden]`, row after row, as `[tokens, joined_size]`."""
        merge = self.config.settings.merge_size
        x = x.view(num_rows // merge, merge, num_columns // merge, merge, -1).transpose(1, 2)
        return x.reshape(-1, self.config.joined_size)


@dataclass(frozen=True, slots=True)
class TowerReader:
    """Reads the parts of a tower, whose weights' names start with `prefix`. All methods raise ModelFolderError."""

    weights: WeightSource
    ops: OpTable
    prefix: str

    @classmethod
    def find(cls, weights: WeightSource, ops: OpTable, prefixes: Sequence[str], name: str) -> TowerReader:
        """Return a reader for the first of the prefixes before `name` that the folder has."""
        prefix = next((prefix for prefix in prefixes if weights.has(prefix + name)), None)
        if prefix is None:
            raise ModelFolderError(
                "config.json describes a vision tower, but the folder holds no tensor "
                f"'{prefixes[0]}{name}'; {WITHOUT_TOWER}"
            )
        return cls(weights, ops, prefix)

    def get(self, name: str, *shape: int) -> Tensor:
        return self.weights.get(self.prefix + name, shape)

    def linear(self, name: str, out: int, width: int, *, bias: bool = True) -> Operator:
        weight = self.get(f"{name}.weight", out, width)
        added = self.get(f"{name}.bias", out) if bias else None
        return lambda x: F.linear(x, weight, added)

    def layer_norm(self, name: str, size: int, eps: float) -> Operator:
        weight, bias = self.get(f"{name}.weight", size), self.get(f"{name}.bias", size)
        return lambda x: F.layer_norm(x, (size,), weight, bias, eps)

    def sum_norm(self, name: str, size: int, eps: float) -> SumNorm:
        """Return the layer norm of a sum."""
        weight, bias = self.get(f"{name}.weight", size), self.get(f"{name}.bias", size)

        def norm(x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
            if added is None:
                return F.layer_norm(x, (size,), weight, bias, eps), x
            return self.ops.add_layer_norm(x, added, weight, bias, eps)

        return norm


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerLayer:
    """Attention over all patches of an image, both ways, then an MLP. Each is preceded by a norm.

    `qkv` makes queries, keys and values `[patches, hidden]`, each in a tensor of its own or side by side.
    """

    num_heads: int
    attention: ImageAttention
    before_attention: SumNorm
    qkv: Sequence[Operator]
    out: Operator
    before_mlp: SumNorm
    up: Operator
    down: Operator
    activation: Operator = GELU_TANH

    def __call__(self, x: Tensor, added: Tensor | None, cos_sin: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (x, what the next norm adds to it), both `[patches, hidden]`, from those of the layer before.

        With `cos_sin`, queries and keys are rotated.
        """
        normed, x = self.before_attention(x, added)
        q, k, v = (part for project in self.qkv for part in torch.split(project(normed), x.shape[1], dim=1))
        normed, x = self.before_mlp(x, self.out(self.attention(q, k, v, self.num_heads, cos_sin)))
        return x, self.down(self.activation(self.up(normed)))


def run_layers(layers: Sequence[TowerLayer], x: Tensor, norm: SumNorm, cos_sin: Tensor | None = None) -> Tensor:
    """Return the norm of what the layers make of `x[patches, hidden]`."""
    added: Tensor | None = None
    for layer in layers:
        x, added = layer(x, added, cos_sin)
    return norm(x, added)[0]
