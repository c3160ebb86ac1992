"""Embeddings of the last tokens (n-grams), added to each residual stream (Qwen3.8-Flash-Next).

Each n-gram is hashed by several heads, each into a part of one table of its own size. The table may be larger than a
device's memory, so it stays in the host's. The last tokens and the window of a dilated convolution are states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from forkpoint.cache.layer_spec import LayerSpec, StateSpec
from forkpoint.errors import ModelFolderError
from forkpoint.models.config import Block, Build, PartConfig
from forkpoint.models.context import ForwardContext
from forkpoint.models.convolution import WINDOW, Convolution, LastInputs, kept_inputs, kept_window
from forkpoint.models.cuts import WHOLE, Cut
from forkpoint.models.layers import read_projection
from forkpoint.ops.activation.reference import sigmoid
from forkpoint.ops.norm.reference import rmsnorm
from forkpoint.ops.ranks import Ranks

NGRAM_CONV = "ngram_conv"
LEAST_GATE = 1e-6
MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NGramConfig(PartConfig):
    """The n-grams of one layer, of 2 to `longest` tokens, each hashed by `heads` heads.

    `number` counts the layers that have n-grams. A head's part of the table has at least `least_rows` rows. All parts
    together are padded to a multiple of `multiple`, and stored in `num_shards` tensors. `dim` is the size of all heads'
    embeddings together. Tokens before `end_token` do not count. `conv_width` is the number of taps, which are `longest`
    tokens apart.
    """

    number: int
    longest: int
    heads: int
    least_rows: int
    multiple: int
    num_shards: int
    dim: int
    vocab_size: int
    seed: int
    end_token: int
    conv_width: int
    num_streams: int
    hidden_size: int
    name: str = "ple"

    @property
    def num_heads(self) -> int:
        return (self.longest - 1) * self.heads

    @property
    def sizes(self) -> list[int]:
        """The rows of each head's part of the table: primes, each used once in the model."""
        return _primes_from(self.least_rows, (self.number + 1) * self.num_heads)[-self.num_heads :]

    @property
    def offsets(self) -> list[int]:
        """The first row of each head's part."""
        return [0, *accumulate(self.sizes)][:-1]

    @property
    def num_rows(self) -> int:
        return -(-sum(self.sizes) // self.multiple) * self.multiple

    @property
    def multipliers(self) -> list[int]:
        """The odd factors by which the hash multiplies the token at each distance."""
        half = max(1, ((1 << 63) - 1) // self.vocab_size // 2)
        seed = self.seed + 10007 * self.number
        return [2 * (_splitmix((seed + 0x9E3779B97F4A7C15 * (i + 1)) & MASK) % half) + 1 for i in range(self.longest)]

    def build(self, build: Build, name: str, layer: int) -> Block:
        return NGrams(build, name, layer, self)

    def kept(self, dtype: str, state_dtype: str) -> LayerSpec:
        width = (self.conv_width - 1) * self.longest + 1
        window = kept_window(self.num_streams * self.hidden_size, width, dtype, NGRAM_CONV)
        return (StateSpec((window, kept_inputs(1, self.longest, "float32"))),)

    def cut(self, ranks: Ranks) -> NGramConfig:
        """Every rank computes the whole part. The table's columns are split, see `NGramTable`."""
        return self

    def num_weights(self, hidden_size: int) -> int:
        return self.dim * (self.num_streams + 1) * hidden_size


class NGramTable:
    """Maps the last tokens to the embeddings of their n-grams. Each rank holds some columns of the table, if it can."""

    def __init__(self, build: Build, name: str, config: NGramConfig) -> None:
        source, self._config, self._ranks = build.weights, config, build.ranks
        self._check_stored(build, name)
        width, cut = config.dim // config.num_heads, WHOLE
        self._is_cut = build.ranks.size > 1 and width % build.ranks.size == 0
        if self._is_cut:
            width, cut = width // build.ranks.size, Cut(-1)
        stored = f"{name}.ngram_embedding"
        if source.stores(f"{stored}.shard_0.weight"):
            names = [f"{stored}.shard_{i}.weight" for i in range(config.num_shards)]
            counts = [(source.shape(shard) or (0,))[0] for shard in names]
            if sum(counts) != config.num_rows:
                raise ModelFolderError(
                    f"the tables {names[0]} to {names[-1]} have {sum(counts)} rows together; config.json asks for "
                    f"{config.num_rows}"
                )
        else:
            names, counts = [f"{stored}.weight"], [config.num_rows]
        shards = (source.get(name, (count, width), cut=cut) for name, count in zip(names, counts, strict=True))
        self._rows = build.ops.prepare_host_rows(shards, source.device)
        self._look_up = build.ops.host_rows
        self._multipliers, self._sizes = torch.tensor(config.multipliers), torch.tensor(config.sizes)
        self._offsets = torch.tensor(config.offsets)

    def _check_stored(self, build: Build, name: str) -> None:
        """Raise ModelFolderError if the checkpoint's hashes differ from those of config.json."""
        config, source = self._config, build.weights
        parts = {"layer_multipliers": config.multipliers}
        parts |= {"ngram_heads_vocab_sizes": config.sizes, "ngram_heads_offsets": config.offsets}
        for part, wanted in parts.items():
            if source.stores(f"{name}.{part}") and source.integers(f"{name}.{part}") != wanted:
                raise ModelFolderError(f"tensor {name}.{part} differs from the {wanted} that config.json asks for")

    def __call__(self, last: Tensor) -> Tensor:
        """Return embeddings `[T, dim]` of the last tokens `[T, longest]` int64, of which the newest is last."""
        config, ended = self._config, torch.zeros_like(last[:, 0], dtype=torch.bool)
        mixed, hashes = last[:, -1] * self._multipliers[0], list[Tensor]()
        for distance in range(1, config.longest):
            token = last[:, -1 - distance]
            ended = ended | (token == config.end_token)
            mixed = mixed ^ (torch.where(ended, config.end_token, token) * self._multipliers[distance])
            own = slice((distance - 1) * config.heads, distance * config.heads)
            hashes.append(mixed[:, None] % self._sizes[own] + self._offsets[own])
        found = self._look_up(self._rows, torch.cat(hashes, dim=1)).flatten(1)
        if not self._is_cut:
            return found
        whole = self._ranks.gather(found)
        return whole.view(len(last), self._ranks.size, config.num_heads, -1).transpose(1, 2).flatten(1)


class NGrams:
    """Map streams `[T, N, H]` to what the n-grams of layer `layer` add to them.

    A gate, computed from the stream and the n-grams, multiplies their value. A dilated convolution over the gated
    values adds the neighbours' values.
    """

    def __init__(self, build: Build, name: str, layer: int, config: NGramConfig) -> None:
        self._config, self._eps, self._last = config, build.config.rms_norm_eps, LastInputs(build.state(layer, WINDOW))
        count, hidden, source = config.num_streams, config.hidden_size, build.weights
        self._table = NGramTable(build, f"{name}.ple_embedding", config)
        self._key = read_projection(build, f"{name}.key_proj", count * hidden, config.dim)
        self._value = read_projection(build, f"{name}.value_proj", hidden, config.dim)
        fp32, span = torch.float32, (-0.1, 0.1)
        parts = (f"{name}.norm_{part}.weight" for part in ("key", "query", "conv"))
        norms = (1 + source.get(part, (count * hidden,), fp32, span).view(count, hidden) for part in parts)
        self._key_norm, self._query_norm, self._conv_norm = norms
        taps = source.get(f"{name}.conv1d.weight", (count * hidden, 1, config.conv_width)).squeeze(1)
        wide = taps.new_zeros(len(taps), (config.conv_width - 1) * config.longest + 1)
        wide[:, :: config.longest] = taps
        self._conv = Convolution(build.state(layer, NGRAM_CONV), wide, None)

    def __call__(self, streams: Tensor, ctx: ForwardContext) -> Tensor:
        assert ctx.token_ids is not None, "the family gives its layers the tokens"
        # zeros, which stand before the first token, are the end token
        shifted = (ctx.token_ids - self._config.end_token).float().unsqueeze(1)
        last = self._last(shifted, ctx).squeeze(2).long() + self._config.end_token
        embedded = self._table(last)
        keys = rmsnorm(torch.unflatten(self._key(embedded), 1, streams.shape[1:]), self._key_norm, self._eps)
        queries = rmsnorm(streams, self._query_norm, self._eps)
        score = (keys.float() * queries.float()).sum(-1, keepdim=True) / math.sqrt(streams.shape[2])
        gate = sigmoid(score.abs().clamp_min(LEAST_GATE).sqrt() * score.sign())
        gated = (gate * self._value(embedded).unsqueeze(1).float()).to(streams.dtype)
        normed = rmsnorm(gated, self._conv_norm, self._eps)
        return gated + self._conv(normed.flatten(1), ctx).view(gated.shape)


def _splitmix(value: int) -> int:
    """Return the next output of the generator splitmix64 from this state."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def _primes_from(low: int, count: int) -> list[int]:
    """Return the first `count` primes of at least `low`."""
    found, number = list[int](), max(2, low)
    while len(found) < count:
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            found.append(number)
        number += 1
    return found
