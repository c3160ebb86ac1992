"""Times the kernels of the other state layers: `python -m benchmarks.gpu_families [--only NAME]`.

The shapes are those of Nemotron-3-Nano (Mamba-2), Kimi-Linear (KDA, latent attention) and Jamba-1.5-Mini (Mamba-1).
Times are medians inside CUDA graphs, as in `benchmarks.gpu_ops`. Steps stand next to the time of copying what they read
and write. Prompts stand next to the kernels of flash-linear-attention and mamba-ssm on the same tokens, if these can be
imported:

    pip install fla-core einops; tar xf mamba_ssm-*.tar.gz   # its Triton files alone, so on PYTHONPATH, not built
    nvcc ... benchmarks/peers/selective_scan.cu              # says how; named by --selective-scan

Their kernels are tuned at their first call.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata, util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_ops import (
    DEVICE,
    DTYPE,
    OPS,
    Call,
    Case,
    ceilings,
    ints,
    median_seconds,
    print_cases,
    randn,
    segments,
    turns,
    verify_indices,
)
from benchmarks.indices import attention_index
from benchmarks.machine import commit_hash, today
from forkpoint.ops.metadata import DecodeIndex, KeySplits
from forkpoint.ops.parameters import ConvTaps, Recurrence, RecurrenceInputs, RecurrenceParams, ScanInputs, ScanParams
from forkpoint.platforms.platform import DeviceTraits

SSD = Recurrence(8, 64, 128, 64, delta=False)  # of Nemotron-3-Nano
KDA = Recurrence(32, 32, 128, 128, per_key=True)  # of Kimi-Linear
GDN = Recurrence(16, 32, 128, 128)  # of Qwen3-Next
CHANNELS, VALUES = 8192, 16  # of Jamba's scan
HEADS, RANK, SHARED = 32, 512, 64  # of Kimi-Linear's latent attention
OWN, VALUE = 128, 128  # dims of a head's key and value before they are moved to latents
WIDTH, TOKENS = 4, 8192
ROWS = (1, 32, 128)
DRAFTED, WINDOW = (1, 8, 32, 128), 4  # rows, and their tokens, three of which are folded
LATENTS = ((1, 16384), (32, 4096), (128, 1024), (128, 4096))
QUERIES = ((128, 16384), (512, 16384), (8192, 8192), (8192, 16384))
SPLITS = KeySplits(wanted=DeviceTraits().num_decode_programs)


@dataclass(frozen=True, slots=True)
class Pair:
    """The same work by our operators and by a peer's. Both return the outputs `[T, ..]`."""

    peer: str
    ours: Callable[[], Tensor]
    theirs: Callable[[], Tensor]


def params_of(spec: Recurrence) -> RecurrenceParams:
    heads = spec.num_v_heads
    rates, bias = torch.rand(heads, device=DEVICE) * -3, torch.rand(spec.num_decays, device=DEVICE) - 2
    return RecurrenceParams(spec, rates, bias, None if spec.delta else torch.rand(heads, device=DEVICE))


def scan_params() -> ScanParams:
    rates = -torch.rand(CHANNELS, VALUES, device=DEVICE) - 0.1
    return ScanParams(rates, torch.rand(CHANNELS, device=DEVICE) - 2, torch.rand(CHANNELS, device=DEVICE))


def scan_inputs(tokens: int) -> ScanInputs:
    wide, narrow = (tokens, CHANNELS), (tokens, VALUES)
    return ScanInputs(randn(*wide), randn(*wide), randn(*narrow), randn(*narrow), randn(*wide))


def slots(count: int, rows: int) -> list[DecodeIndex]:
    return [DecodeIndex(at, at) for at in (ints(list(range(i * rows, (i + 1) * rows))) for i in range(count))]


def recurrence_step(name: str, spec: Recurrence, rows: int) -> Case:
    slot = 4 * spec.num_v_heads * spec.value_dim * spec.key_dim
    token = 2 * (spec.mixed_dim + spec.num_decays + spec.num_v_heads * (spec.value_dim + spec.delta))

    def make() -> list[Call]:
        count = turns(rows * slot)
        pool = torch.randn(count * rows, spec.num_v_heads, spec.value_dim, spec.key_dim, device=DEVICE)
        mixed, a, params = randn(rows, spec.mixed_dim), randn(rows, spec.num_decays), params_of(spec)
        b = randn(rows, spec.num_v_heads) if spec.delta else None
        given, indices = RecurrenceInputs(mixed, a, b), slots(count, rows)
        return [lambda i=i: OPS.recurrence_decode(given, params, pool, i) for i in indices]  # type: ignore[misc]

    return Case(f"{name}, {rows} rows", rows * (2 * slot + token), 0, make)


def scan_step(rows: int) -> Case:
    slot, token = 4 * CHANNELS * VALUES, 2 * (4 * CHANNELS + 2 * VALUES)

    def make() -> list[Call]:
        count = turns(rows * slot)
        inputs, params = scan_inputs(rows), scan_params()
        pool = torch.randn(count * rows, CHANNELS, VALUES, device=DEVICE)
        return [lambda i=i: OPS.scan_decode(inputs, params, pool, i) for i in slots(count, rows)]  # type: ignore[misc]

    return Case(f"Mamba-1 step, {rows} rows", rows * (2 * slot + token), 0, make)


def key_window(rows: int) -> Case:
    """Return the case of a KDA layer in a step of rows with drafts."""
    total, size = rows * WINDOW, (KDA.num_v_heads, KDA.value_dim)
    slot, record = 4 * KDA.key_dim * size[0] * size[1], 4 * 3 * size[0] * size[1]

    def make() -> list[Call]:
        count = turns(rows * slot)
        pool = torch.randn(count * rows, *size, KDA.key_dim, device=DEVICE)
        mixed, a, b = (randn(total, n) for n in (KDA.mixed_dim, KDA.num_decays, KDA.num_v_heads))
        params, records = params_of(KDA), [torch.zeros(2 * rows, WINDOW, *size, device=DEVICE) for _ in range(3)]
        indices = verify_indices(count, rows, WINDOW)
        given = RecurrenceInputs(mixed, a, b)
        return [lambda i=i: OPS.recurrence_verify(given, params, pool, i, records) for i in indices]  # type: ignore[misc]

    return Case(f"KDA with drafts, {rows} rows", rows * (2 * slot + (2 * WINDOW - 1) * record), 0, make)


def scan_window(rows: int) -> Case:
    """Return the case of a Mamba-1 layer in a step of rows with drafts."""
    slot, record, token = 4 * CHANNELS * VALUES, 2 * (2 * CHANNELS + VALUES), 2 * (4 * CHANNELS + 2 * VALUES)

    def make() -> list[Call]:
        count = turns(rows * slot)
        inputs, params = scan_inputs(rows * WINDOW), scan_params()
        pool = torch.randn(count * rows, CHANNELS, VALUES, device=DEVICE)
        records = [randn(2 * rows, WINDOW, size) for size in (CHANNELS, CHANNELS, VALUES)]
        indices = verify_indices(count, rows, WINDOW)
        return [lambda i=i: OPS.scan_verify(inputs, params, pool, i, records) for i in indices]  # type: ignore[misc]

    moved = rows * (2 * slot + (2 * WINDOW - 1) * record + WINDOW * token)
    return Case(f"Mamba-1 with drafts, {rows} rows", moved, 0, make)


def conv_step(name: str, dim: int, rows: int) -> Case:
    slot = 2 * (WIDTH - 1) * dim

    def make() -> list[Call]:
        count = turns(rows * slot)
        x, weight, pool = randn(rows, dim), randn(WIDTH, dim).t(), randn(count * rows, WIDTH - 1, dim)
        return [lambda i=i: OPS.conv_update(x, ConvTaps(weight, None, True), pool, i) for i in slots(count, rows)]  # type: ignore[misc]

    return Case(f"{name}, {rows} rows", rows * (2 * slot + 4 * dim), 0, make)


def latents(rows: int, queries: int, length: int) -> Case:
    """Return the case of latent attention over `rows` rows. Each has `queries` queries, the last of its `length`
    tokens."""
    blocks, dim, tokens = -(-length // 64), RANK + SHARED, rows * queries
    stored = 2 * rows * length * dim

    def make() -> list[Call]:
        count = turns(stored) if queries == 1 else 1
        cache = randn(count * rows * blocks, 1, 64, dim)
        tables = torch.randperm(len(cache), device=DEVICE).int().view(count, rows, blocks)
        q, none = randn(tokens, HEADS, dim), torch.empty(0, dtype=torch.int64, device=DEVICE)
        lens, decodes = ([queries] * rows, [length] * rows), rows if queries == 1 else 0
        indices = [attention_index(*lens, table, none, decodes, splits=SPLITS) for table in tables]
        scale = (OWN + SHARED) ** -0.5
        return [lambda i=i: OPS.paged_attention(q, cache, cache[..., :RANK], i, scale, None) for i in indices]  # type: ignore[misc]

    pairs = rows * (queries * (length - queries) + queries * (queries + 1) / 2)
    flops = 2 * pairs * HEADS * (dim + RANK)
    moved = stored + 2 * tokens * HEADS * (dim + RANK)
    return Case(f"latent attention, {rows} x {queries} at {length}", moved, flops, make)


def made_latents(queries: int, length: int) -> Case:
    """Return the same case for one row, with keys and values computed from the latents. That computation counts."""
    assert OPS.latent_prefill is not None
    attend, blocks, width = OPS.latent_prefill, -(-length // 64), HEADS * (OWN + VALUE)

    def make() -> list[Call]:
        cache, packed = randn(blocks, 1, 64, RANK + SHARED), OPS.prepare_linear(randn(width, RANK), None)
        table, none = torch.randperm(blocks, device=DEVICE).int().view(1, -1), torch.empty(0, dtype=torch.int64)
        index = attention_index([queries], [length], table, none, splits=SPLITS)
        own, shared = randn(queries, HEADS, OWN), randn(queries, HEADS, SHARED)
        out, scale = randn(queries, HEADS, VALUE), (OWN + SHARED) ** -0.5

        def expand(latent: Tensor) -> Tensor:
            return OPS.linear(latent, packed)

        return [lambda: attend(own, shared, cache, RANK, expand, index, 0, scale, out)]

    pairs = queries * (length - queries) + queries * (queries + 1) / 2
    flops = 2 * (pairs * HEADS * (OWN + SHARED + VALUE) + length * RANK * width)
    moved = 2 * (length * (RANK + SHARED) + queries * HEADS * (OWN + SHARED + VALUE))
    return Case(f"made of latents, 1 x {queries} at {length}", moved, flops, make)


def steps() -> Iterator[Case]:
    for rows in ROWS:
        yield recurrence_step("Mamba-2 step", SSD, rows)
        yield conv_step("its window", SSD.mixed_dim, rows)
        yield recurrence_step("KDA step", KDA, rows)
        yield conv_step("its window, KDA", KDA.mixed_dim, rows)
        yield scan_step(rows)
        yield conv_step("its window, Mamba-1", CHANNELS, rows)
    for rows in DRAFTED:
        yield key_window(rows)
        yield scan_window(rows)
    yield from (latents(rows, 1, length) for rows, length in LATENTS)
    for queries, length in QUERIES:
        yield latents(1, queries, length)
        yield made_latents(queries, length)


def recurrence_pair(spec: Recurrence, peer: Callable[..., Tensor]) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Return the pair for one prompt from one state. The peer gets `(mixed, a, b, params, state)`."""
    mixed, a, params = randn(TOKENS, spec.mixed_dim), randn(TOKENS, spec.num_decays), params_of(spec)
    b = randn(TOKENS, spec.num_v_heads) if spec.delta else None
    pool = torch.randn(1, spec.num_v_heads, spec.value_dim, spec.key_dim, device=DEVICE)
    index, start = segments([TOKENS]), pool.clone()

    def ours() -> Tensor:
        return OPS.recurrence_prefill(RecurrenceInputs(mixed, a, b), params, pool, index)

    return ours, lambda: peer(mixed, a, b, params, start)


def heads_of(spec: Recurrence, mixed: Tensor) -> list[Tensor]:
    keys = spec.num_k_heads * spec.key_dim
    parts = torch.split(mixed, [keys, keys, spec.num_v_heads * spec.value_dim], 1)
    widths = (spec.num_k_heads, spec.num_k_heads, spec.num_v_heads)
    return [torch.unflatten(x, 1, (n, -1)).unsqueeze(0).contiguous() for x, n in zip(parts, widths, strict=True)]


def prepared(make: Callable[..., Callable[[], Tensor]]) -> Callable[..., Tensor]:
    """Return a peer that lays out its inputs at its first call."""
    call: list[Callable[[], Tensor]] = []

    def peer(*inputs: Any) -> Tensor:
        if not call:
            call.append(make(*inputs))
        return call[0]()

    return peer


def gdn_peer() -> Callable[..., Tensor]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def make(mixed: Tensor, a: Tensor, b: Tensor, params: RecurrenceParams, state: Tensor) -> Callable[[], Tensor]:
        q, k, v = heads_of(params.spec, mixed)
        g = (-params.A_log.exp() * F.softplus(a.float() + params.dt_bias)).unsqueeze(0)
        beta, options = b.float().sigmoid().unsqueeze(0), {"use_qk_l2norm_in_kernel": True, "state_v_first": True}
        return lambda: chunk_gated_delta_rule(q, k, v, g, beta, None, state, True, **options)[0][0]

    return prepared(make)


def kda_peer() -> Callable[..., Tensor]:
    from fla.ops.kda import chunk_kda

    def make(mixed: Tensor, a: Tensor, b: Tensor, params: RecurrenceParams, state: Tensor) -> Callable[[], Tensor]:
        q, k, v = heads_of(params.spec, mixed)
        g = a.view(1, TOKENS, params.spec.num_v_heads, -1)
        options: dict[str, Any] = {"A_log": params.A_log, "dt_bias": params.dt_bias}
        modes = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "state_v_first")
        options |= dict.fromkeys(modes, True)
        return lambda: chunk_kda(q, k, v, g, b.unsqueeze(0), None, state, True, **options)[0][0]

    return prepared(make)


def mamba_files() -> None:
    """Make `mamba_ssm.ops.triton` importable without the package's `__init__`, which needs its compiled part."""
    found = util.find_spec("mamba_ssm")
    if found is None or found.submodule_search_locations is None:
        raise ModuleNotFoundError("No module named 'mamba_ssm'")
    package = types.ModuleType("mamba_ssm")
    package.__path__ = list(found.submodule_search_locations)
    sys.modules["mamba_ssm"] = package


def ssd_peer() -> Callable[..., Tensor]:
    mamba_files()
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    def make(mixed: Tensor, dt: Tensor, b: None, params: RecurrenceParams, state: Tensor) -> Callable[[], Tensor]:
        del b
        c, b_in, x = heads_of(params.spec, mixed)
        rates = -params.A_log.exp()
        options: dict[str, Any] = {"D": params.D, "dt_bias": params.dt_bias, "dt_softplus": True}
        options |= {"initial_states": state, "return_final_states": True}
        return lambda: mamba_chunk_scan_combined(x, dt.unsqueeze(0), rates, b_in, c, 128, **options)[0][0]

    return prepared(make)


def scan_pair(library: str) -> Pair:
    """Return the pair for Mamba-1's scan. mamba-ssm's kernel takes each channel's tokens as one row, which costs it
    nothing here."""
    call = ctypes.CDLL(library).selective_scan
    inputs, params, index = scan_inputs(TOKENS), scan_params(), segments([TOKENS])
    pool = torch.zeros(1, CHANNELS, VALUES, device=DEVICE)
    x, dt, b, c, z = (value.t().contiguous() for value in inputs)
    out, gated = torch.empty_like(x), torch.empty_like(x)
    chunks = TOKENS // 2048
    ends = torch.empty(CHANNELS, chunks, 2 * VALUES, device=DEVICE)
    operands = (x, dt, params.A, b, c, params.skip, params.dt_bias, z, out, gated, ends)

    def theirs() -> Tensor:
        places = [ctypes.c_void_p(value.data_ptr()) for value in operands]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        code = call(CHANNELS, TOKENS, VALUES, chunks, *places, stream)
        assert code == 0, f"mamba-ssm's kernel failed with {code}"
        return gated.t()

    fresh = type(index)(**{**{name: getattr(index, name) for name in index.__slots__}, "src": ints([-1])})
    return Pair("mamba-ssm", lambda: OPS.scan_prefill(inputs, params, pool, fresh), theirs)


def pairs(library: str) -> dict[str, Callable[[], Pair]]:
    fla = "flash-linear-attention"
    return {
        "Mamba-2 scan": lambda: Pair("mamba-ssm", *recurrence_pair(SSD, ssd_peer())),
        "Mamba-1 scan": lambda: scan_pair(library),
        "gated delta net": lambda: Pair(fla, *recurrence_pair(GDN, gdn_peer())),
        "KDA": lambda: Pair(fla, *recurrence_pair(KDA, kda_peer())),
    }


def compare(name: str, pair: Pair) -> str:
    with torch.no_grad():
        ours, theirs = pair.ours().float().flatten(), pair.theirs().float().flatten()
        difference = float((ours - theirs).norm() / theirs.norm())
        most = float((ours - theirs).abs().max())
        fast, slow = median_seconds([pair.ours]), median_seconds([pair.theirs])
    times = f"{fast * 1e6:.1f} | {pair.peer} | {slow * 1e6:.1f} | {slow / fast:.2f}"
    return f"| {name}, {TOKENS} tokens | {times} | {difference:.1e} | {most:.2g} |"


def versions() -> str:
    found = []
    for name in ("torch", "triton", "fla-core", "mamba-ssm"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="part of a name")
    parser.add_argument("--part", choices=("steps", "prompts", "both"), default="both")
    parser.add_argument("--selective-scan", default="./selective_scan.so", help="mamba-ssm's kernel for Mamba-1, built")
    parser.add_argument("--commit", default="", help="what to print as the commit where there is no repository")
    options = parser.parse_args()
    torch.manual_seed(0)
    copy, product = ceilings()
    print(f"{torch.cuda.get_device_name()}, {versions()}, {DTYPE}, states fp32")
    print(f"commit {options.commit or commit_hash()}, {today()}")
    print(f"ceilings: copy {copy / 1e12:.2f} TB/s, matrix product {product / 1e12:.0f} TFLOP/s\n")
    if options.part != "prompts":
        print_cases(steps(), options.only, copy, product)
    if options.part != "steps":
        print("\n| prompt | forkpoint, µs | peer | peer's, µs | ratio | relative difference | largest |")
        print("|---|---|---|---|---|---|---|")
        for name, make in pairs(options.selective_scan).items():
            try:
                if options.only in name:
                    print(compare(name, make()), flush=True)
            except (ImportError, OSError) as error:
                print(f"(not compared: {type(error).__name__}: {error})", flush=True)


if __name__ == "__main__":
    main()
