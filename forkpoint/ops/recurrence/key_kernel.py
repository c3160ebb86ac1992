"""The delta rule with a decay for each key (KDA) in Triton; reference.py has the formulas.

As in prefill_kernel.py chunks are made ready, by key_chunk_kernel.py, before a state is carried through them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.launch import await_inputs, overlap
from forkpoint.ops.launch_table import segments
from forkpoint.ops.metadata import SegmentIndex
from forkpoint.ops.parameters import Out, RecurrenceInputs, RecurrenceParams
from forkpoint.ops.recurrence.gates import result
from forkpoint.ops.recurrence.key_chunk_kernel import ready_chunks
from forkpoint.ops.recurrence.solve import CHUNK, first_chunk

SCAN_VALUES = 32  # value rows of a program that carries a state through a prompt


@triton.jit
def _scan_kernel(
    mixed,
    inverses,
    scores,
    keys,
    wholes,
    pool,
    out,
    cu_seqlens,
    src,
    dst,
    save_ptr,
    save_pos,
    save_dst,
    mixed_stride,
    slot_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILES_V: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """BLOCK_V value rows of one head's state, `[K, V]`, through all chunks of one segment."""
    await_inputs(OVERLAP)
    pid = tl.program_id(0)
    head, segment = (pid // TILES_V) % H, pid // (TILES_V * H)
    kind = inverses.dtype.element_ty
    row, col, at = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), (pid % TILES_V) * BLOCK_V + tl.arange(0, BLOCK_V)
    start = tl.load(cu_seqlens + segment)
    length = tl.load(cu_seqlens + segment + 1) - start
    in_state = (col < K)[:, None] & (at < V)[None, :]
    in_keys = (row >= 0)[:, None] & (col < K)[None, :]
    in_slot = head * (V * K) + at[None, :] * K + col[:, None]
    source = tl.load(src + segment).to(tl.int64)
    state = tl.load(pool + source * slot_stride + in_slot, mask=in_state & (source >= 0), other=0.0).to(tl.float32)
    save, last_save = tl.load(save_ptr + segment), tl.load(save_ptr + segment + 1)
    entry = first_chunk(cu_seqlens, segment).to(tl.int64) * H + head
    values = mixed + start.to(tl.int64) * mixed_stride + (2 * H * K + head * V + at)[None, :]
    out_at = out + (start.to(tl.int64) * H + head) * V + at[None, :]
    square = row[:, None] * CHUNK + row[None, :]
    num_chunks = tl.cdiv(length, CHUNK)
    for e in range(save, last_save + 1):
        # From the state stored before up to the next: Triton 3.6 and 3.7 take a `begin = end` below for a constant.
        begin, end, target = num_chunks * 0, num_chunks, tl.load(dst + segment)
        if e > save:
            begin = tl.cdiv(tl.load(save_pos + e - 1), CHUNK)
        if e < last_save:
            end, target = tl.cdiv(tl.load(save_pos + e), CHUNK), tl.load(save_dst + e)
        for i in range(begin, end):
            own = entry + i * H
            token = i * CHUNK + row
            in_values = (token < length)[:, None] & (at < V)[None, :]
            key_at = keys + own * (3 * CHUNK * K) + row[:, None] * K + col[None, :]
            past_k = tl.load(key_at, mask=in_keys, other=0.0)
            past_q = tl.load(key_at + CHUNK * K, mask=in_keys, other=0.0)
            new_k = tl.load(key_at + 2 * CHUNK * K, mask=in_keys, other=0.0)
            whole = tl.load(wholes + own * K + col, mask=col < K, other=0.0)
            v = tl.load(values + token.to(tl.int64)[:, None] * mixed_stride, mask=in_values, other=0.0)
            inverse = tl.load(inverses + own * CHUNK * CHUNK + square)
            score = tl.load(scores + own * CHUNK * CHUNK + square)
            old = state.to(kind)
            rest = v.to(tl.float32) - tl.dot(past_k, old, input_precision="ieee")
            fresh = tl.dot(inverse, rest.to(kind), input_precision="ieee").to(kind)
            answer = tl.dot(past_q, old, input_precision="ieee") + tl.dot(score, fresh, input_precision="ieee")
            state = state * whole[:, None] + tl.dot(tl.trans(new_k), fresh, input_precision="ieee")
            state = state.to(pool.dtype.element_ty).to(tl.float32)  # as if it were stored and resumed from here
            place_at = out_at + token.to(tl.int64)[:, None] * (H * V)
            tl.store(place_at, answer.to(out.dtype.element_ty), mask=in_values)
        if target >= 0:
            slot = pool + target.to(tl.int64) * slot_stride + in_slot
            tl.store(slot, state.to(pool.dtype.element_ty), mask=in_state)


def key_prefill(
    inputs: RecurrenceInputs, params: RecurrenceParams, pool: Tensor, index: SegmentIndex, out: Out = None
) -> Tensor:
    """`recurrence_prefill` where each key has its own decay: `a[T, H * K]`. Scratch memory is about
    `T * H * (3 K + 128)` elements of the inputs' dtype and `T * H * (K + 64)` in fp32."""
    spec, mixed, out = params.spec, inputs.mixed, result(inputs, params, pool, out)
    heads, dim, value_dim = spec.num_v_heads, spec.key_dim, spec.value_dim
    block_k = max(16, triton.next_power_of_2(dim))
    scratch = ready_chunks(inputs, params, index, block_k)
    block_v = max(16, min(SCAN_VALUES, triton.next_power_of_2(value_dim)))
    tiles_v = triton.cdiv(value_dim, block_v)
    options = {"H": heads, "K": dim, "V": value_dim, "BLOCK_K": block_k, "BLOCK_V": block_v, "TILES_V": tiles_v}
    options |= {"num_warps": 4, "num_stages": 1 if mixed.dtype == torch.float32 else 3}
    options |= overlap(mixed.device, mixed.shape[0])
    strides = (mixed.stride(0), pool.stride(0))
    for count, (inverses, scores, keys, wholes, *columns) in segments(index, heads * tiles_v, scratch, heads):
        given = (mixed, inverses, scores, keys, wholes, pool, out, *columns, *strides)
        _scan_kernel[(count * heads * tiles_v,)](*given, **options)
    return out
