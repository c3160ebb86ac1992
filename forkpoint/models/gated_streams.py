"""Residual streams that are joined by gates (the hyper-connections of Qwen3.8-Flash-Next)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from forkpoint.models.config import Build, StreamsConfig
from forkpoint.models.layers import read_projection
from forkpoint.models.streams import Mixer
from forkpoint.models.sums import weighted
from forkpoint.ops.activation.reference import sigmoid, silu
from forkpoint.ops.norm.reference import rmsnorm


@dataclass(frozen=True, slots=True)
class GatedStreams(StreamsConfig):
    """Streams that are joined by gates. The gates are computed through a latent of `rank`."""

    rank: int


def read_join(build: Build, name: str) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Read the function from streams `[T, N, H]` to (gated mean `[T, H]`, normalised streams `[T, N * H]`)."""
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

    return join


def gated_mixer(build: Build, name: str) -> Mixer:
    """Read the mixer of one part, which adds the part's output to each stream with a weight of its own."""
    join, streams = read_join(build, name), build.config.streams
    assert streams is not None
    count = streams.count
    inject = read_projection(build, f"{name}.block_inject_weight", count, count * build.config.hidden_size)

    def mix(states: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        joined, normed = join(states)
        weights = 2 * sigmoid(inject(normed).float() / count)

        def put_back(out: Tensor) -> Tensor:
            return (states.float() + out.unsqueeze(1).float() * weights.unsqueeze(-1)).to(states.dtype)

        return joined, put_back

    return mix
