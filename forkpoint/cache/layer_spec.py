"""The tensors that a layer keeps of each token and of each sequence, and their bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from forkpoint.cache.page_size import aligned
from forkpoint.errors import UnsupportedModelError

# Operations of the chunked delta rule per token and value of its matrix (the floors of docs/benchmarks/gpu_ops.md).
DELTA_RULE_OPERATIONS: Final = 11
# Operations of Mamba-2 per token and value: chunks of 64 tokens with heads of 64 by 128 take two products with the
# state and two within the chunk.
STATE_SPACE_OPERATIONS: Final = 7
FP8: Final = "float8_e4m3fn"
DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, FP8: 1}


@dataclass(frozen=True, slots=True)
class Recording:
    """How decode rows leave records of their tokens instead of updating a tensor at once.

    The operator `decode` first folds earlier records into the tensor, then computes the step's tokens and writes
    `records` of each, in this order. The operator `fold` only folds, for rows that leave the batch.
    """

    decode: str
    fold: str
    records: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor that a layer keeps. Its name is unique in the layer.

    A tensor of tokens has the `shape` `(heads, dim)`, one of a sequence any shape. `operators` names the operators that
    update a sequence's tensor: for decode rows, then for prefill segments. With `drafts` the layer can verify drafts:
    its operators take a VerifyIndex. With `spaced` the tensor can be written every few tokens only: its operators take
    a RecordIndex. A `single` record is read only by the program that writes it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    operators: tuple[str, str] | None = None
    drafts: Recording | None = None
    spaced: Recording | None = None
    single: bool = False

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    def num_bytes(self, count: int = 1) -> int:
        """Return the bytes of `count` such tensors in a row, padded to ALIGNMENT_BYTES at the end."""
        return aligned(count * self.num_values * DTYPE_BYTES[self.dtype])


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The tensors that a layer keeps of each token, in blocks: keys and values, or a latent of both.

    `takes_fp8`: the operators that write and read it also take the form that `in_fp8` returns. Tensors named in `exact`
    keep their dtype there. With `window` a token attends only to the last `window` tokens, itself included.
    """

    tensors: tuple[TensorSpec, ...]
    takes_fp8: bool = False
    window: int | None = None
    exact: tuple[str, ...] = ()

    @classmethod
    def of(cls, num_heads: int, key_dim: int, value_dim: int, dtype: str, takes_fp8: bool = False) -> KVSpec:
        """Return the spec of softmax attention: tensors `k` and `v` with `num_heads` heads, whose dims may differ."""
        kept = (TensorSpec("k", (num_heads, key_dim), dtype), TensorSpec("v", (num_heads, value_dim), dtype))
        return cls(kept, takes_fp8)

    def in_fp8(self) -> KVSpec:
        """Return the spec in 8 bits. After the tensors come `NAME_scale`: a fp32 factor per token and head of NAME.

        Tensors that are `exact` stay as they are.

        Raises UnsupportedModelError if the layer's operators do not take it.
        """
        if not self.takes_fp8:
            names = " and ".join(tensor.name for tensor in self.tensors)
            raise UnsupportedModelError(
                f"kv_cache_dtype='fp8' is not possible for this model: attention over {names} reads the model's dtype; "
                "give 'auto'"
            )
        narrow = [tensor for tensor in self.tensors if tensor.name not in self.exact]
        scales = (TensorSpec(f"{tensor.name}_scale", (tensor.shape[0], 1), "float32") for tensor in narrow)
        kept = (replace(tensor, dtype=FP8) if tensor in narrow else tensor for tensor in self.tensors)
        return KVSpec((*kept, *scales), window=self.window)

    @property
    def num_heads(self) -> int:
        return self.tensors[0].shape[0]

    def block_bytes(self, block_size: int) -> int:
        return sum(tensor.num_bytes(block_size) for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The tensors that a layer keeps of each sequence, in a slot: a convolution's window, a recurrence's matrix.

    `flops_per_token` counts the recurrence's own operations, without products with weights.
    """

    tensors: tuple[TensorSpec, ...]
    flops_per_token: int = 0

    @property
    def slot_bytes(self) -> int:
        return sum(tensor.num_bytes() for tensor in self.tensors)


# The specs of one layer: none, keys and values, a state, or some of both.
LayerSpec: TypeAlias = tuple[KVSpec | StateSpec, ...]


def keys_in_fp8(layer: LayerSpec) -> LayerSpec:
    """Return the layer with keys and values in 8 bits. Raises UnsupportedModelError if its attention cannot."""
    return tuple(spec.in_fp8() if isinstance(spec, KVSpec) else spec for spec in layer)
