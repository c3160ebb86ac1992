"""What the vision towers of all families have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.errors import ModelFolderError
from forkpoint.image_families.settings import ImageSettings
from forkpoint.models.weights import WeightSource

Operator: TypeAlias = Callable[[Tensor], Tensor]
WITHOUT_TOWER: Final = "start with --language-model-only to run the text model without images"


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig(ABC):
    """Sizes of a family's tower.

    `out_size` is the text model's hidden size. If a token of an image has three rotary positions, `axes` says which of
    them rotates each pair of a text head's dims: 0 time, 1 row, 2 column. Otherwise `axes` is empty, and the token is
    rotated like one of text.
    """

    settings: ImageSettings
    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    out_size: int
    axes: tuple[int, ...] = ()

    @abstractmethod
    def build(self, weights: WeightSource) -> VisionTower:
        """Load the tower. Raises ModelFolderError for weights that are missing or of a wrong shape."""


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
        """Return the embeddings `[tokens, out_size]` of an image `[height, width, 3]` uint8, row after row.

        A tower that reads videos also takes frames `[frames, height, width, 3]`.
        """

    def normalised(self, pixels: Tensor) -> Tensor:
        """Return pixels `[..., 3]` in fp32, normalised by channel, on the tower's device."""
        return (pixels.to(self.device).float() / 255 - self._mean) / self._std


@dataclass(frozen=True, slots=True)
class TowerReader:
    """Reads the parts of a tower, whose weights' names start with `prefix`. All methods raise ModelFolderError."""

    weights: WeightSource
    prefix: str

    @classmethod
    def find(cls, weights: WeightSource, prefixes: Sequence[str], name: str) -> TowerReader:
        """Return a reader for the first of the prefixes before `name` that the folder has."""
        prefix = next((prefix for prefix in prefixes if weights.has(prefix + name)), None)
        if prefix is None:
            raise ModelFolderError(
                "config.json describes a vision tower, but the folder holds no tensor "
                f"'{prefixes[0]}{name}'; {WITHOUT_TOWER}"
            )
        return cls(weights, prefix)

    def get(self, name: str, *shape: int) -> Tensor:
        return self.weights.get(self.prefix + name, shape)

    def linear(self, name: str, out: int, width: int, *, bias: bool = True) -> Operator:
        weight = self.get(f"{name}.weight", out, width)
        added = self.get(f"{name}.bias", out) if bias else None
        return lambda x: F.linear(x, weight, added)

    def layer_norm(self, name: str, size: int, eps: float) -> Operator:
        weight, bias = self.get(f"{name}.weight", size), self.get(f"{name}.bias", size)
        return lambda x: F.layer_norm(x, (size,), weight, bias, eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerLayer:
    """Attention over all patches of an image, both ways, then an MLP. Each is preceded by a norm.

    `qkv` makes queries, keys and values `[patches, hidden]`, each in a tensor of its own or side by side.
    """

    num_heads: int
    before_attention: Operator
    qkv: Sequence[Operator]
    out: Operator
    before_mlp: Operator
    up: Operator
    down: Operator

    def __call__(self, x: Tensor, rotate: Operator | None = None) -> Tensor:
        """Return `[patches, hidden]` from such an `x`. `rotate` turns queries and keys `[heads, patches, dims]`."""
        normed, hidden = self.before_attention(x), x.shape[1]
        parts = [part for project in self.qkv for part in torch.split(project(normed), hidden, dim=1)]
        q, k, v = (part.view(len(x), self.num_heads, -1).transpose(0, 1) for part in parts)
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        mixed = F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        x = x + self.out(mixed.transpose(0, 1).flatten(1))
        return x + self.down(F.gelu(self.up(self.before_mlp(x)), approximate="tanh"))
