"""Compile the kernels with weights, or keys and values, in FP8 for a Hopper GPU, which need not be here.

Prints a line for each: its name, and its instructions of the matrix units.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.language import NVMMASharedLayout

from forkpoint.ops.activation import kernel as activation
from forkpoint.ops.attention.decode_kernel import decode_kernel
from forkpoint.ops.attention.inputs_kernel import _inputs_kernel
from forkpoint.ops.attention.prefill_kernel import prefill_kernel
from forkpoint.ops.linear import fp8_kernel, fragments_kernel, packed_kernel, unpack_kernel, widen_kernel
from forkpoint.ops.linear import kernel as linear
from forkpoint.ops.linear.scaled import BLOCK
from forkpoint.ops.linear.tiles import Tile, fixed_scaled_tile, one_scaled_tile, scaled_tile
from forkpoint.ops.moe import fragment_prompt_kernel, warps_kernel
from forkpoint.ops.moe import kernel as moe
from forkpoint.ops.moe.device_experts import _scaled_tiles
from forkpoint.ops.norm import kernel as norm
from forkpoint.ops.sampling import shortlist_kernel
from tests.ops.compile_families import assembled

POINTERS = {
    **dict.fromkeys(("q", "k", "v", "gate"), "*bf16"),
    **dict.fromkeys(("k_cache", "v_cache"), "*fp8e4nv"),
    **dict.fromkeys(("k_scales", "v_scales", "acc_ptr", "l_ptr", "m_ptr", "cos_sin", "q_weight", "k_weight"), "*fp32"),
    **dict.fromkeys(("parts", "part_ptr", "lead", "kv_lens", "table_rows", "block_table", "cu_queries"), "*i32"),
    **dict.fromkeys(("positions", "key_places"), "*i64"),
    **dict.fromkeys(("scale", "eps"), "fp32"),
    "weight": "*fp8e4nv",
    "gate_up": "*fp8e4nv",
    "down": "*fp8e4nv",
    "codes": "*fp8e4nv",
    "scales": "*fp32",
    "x_scales": "*fp32",
    "out_scales": "*fp32",
    "weights": "*fp32",
    "shares": "*fp32",
    "words": "*i32",
    "factors": "*fp32",
    "zeros": "*u8",
    "pairs": "*i32",
    "tiles": "*i32",
    "ids": "*i32",
    "x": "*bf16",
    "hidden": "*bf16",
    "other": "*bf16",
    "beside": "*bf16",
    "beside_out": "*bf16",
    "bias": "*bf16",
    "out": "*bf16",
}
OWN_POINTERS = {
    "norm": {"weight": "*fp32"},
    "shortlist": {"x": "*fp8e4nv", "codes": "*u8", "keys": "*i32"},
    "packed": {"scales": "*fp16"},
    "widen_packed": {"scales": "*fp16"},
    "fragments_of_integers": {"scales": "*fp16"},
    "fragments_of_floats": {"scales": "*i16"},
    "widen_integers": {"scales": "*fp16"},
    "widen_floats": {"scales": "*i16"},
    "expert_warps": {"x": "*fp8e4nv", "weights": f"tensordesc<fp8e4nv[128, 128],{NVMMASharedLayout(128, 8, 2)!r}>"},
    "choose": {"weight": "*bf16", "keys": "*i32", "token_ids": "*i64", "logits": "*fp32"},
}
ALIGNED = ("num_outputs", "width", "num_fragments", "x_stride", "out_stride", "split_width", "inner", "size", "half")
ALIGNED += ("x_scale_step", "out_scale_step")
FIXED = {"SCALE_ROWS": 128, "BLOCKED": True, "BITS": True, "STRAIGHT": False, "OVERLAP": False, "SQUARED": False}
FIXED |= {"GATE_LIMIT": None, "UP_LIMIT": None, "PARTIAL": False}


def compiled(name: str, function: Any, tile: Tile, **constants: Any) -> Any:
    constants = {arg: value for arg, value in {**FIXED, **constants}.items() if arg in function.arg_names}
    pointers = dict(POINTERS)
    for rounded in ("x", "out"):
        if f"{rounded}_scales" in function.arg_names and f"{rounded}_scales" not in constants:
            pointers[rounded] = "*fp8e4nv"
    pointers |= OWN_POINTERS.get(name, {})
    signature = {arg: "constexpr" if arg in constants else pointers.get(arg, "i32") for arg in function.arg_names}
    places = {arg: (place,) for place, arg in enumerate(function.arg_names)}
    aligned = [
        places[arg] for arg, kind in signature.items() if kind.startswith("*") or (arg in ALIGNED and kind == "i32")
    ]
    source = (GluonASTSource if isinstance(function, GluonJITFunction) else ASTSource)(
        fn=function,
        signature=signature,
        constexprs={places[arg]: value for arg, value in constants.items()},
        attrs={place: [["tt.divisibility", 16]] for place in aligned},
    )
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = made.asm["ptx"]
    print(name, ptx.count("wgmma.mma_async") + ptx.count("mma.sync"))
    return made


def expert_warps() -> None:
    """Compile products with experts by groups of warps, which must not wait for one another or for many spills."""
    for gated, kept in itertools.product((False, True), (1, warps_kernel.MOST_KEPT)):
        form = {"KEPT": kept, "GATED": gated, **({} if gated else {"out_scales": None})}
        made = compiled("expert_warps", warps_kernel.expert_warps_kernel, Tile(1, 1, 1, 4, 1), **form)
        assert made.metadata.shared <= 227 * 1024, "more shared memory than a processor has"
        report = assembled(made.asm["ptx"])
        spills = re.search(r"(\d+) bytes spill stores", report)
        assert spills and int(spills[1]) <= 64 and "serialized" not in report, report


def of_tile(tile: Tile) -> dict[str, Any]:
    flags: dict[str, Any] = {"MASK_OUTPUTS": False, "MASK_WIDTH": False, "SHARED": True, "SPLIT": False}
    if not tile.narrows:
        flags["x_scales"] = None
    sizes = {"ROWS": tile.rows, "OUTPUTS": tile.outputs, "WIDTH": tile.width}
    return {**sizes, "TURNED": tile.turned, **flags}


def main() -> None:
    expert_warps()
    bf16 = torch.bfloat16
    for gated in (False, True):
        alone: dict[str, Any] = dict.fromkeys(("out_scales", "tiles", "pairs", *(("bias",) if gated else ())))
        narrow = scaled_tile(32, 4096, 4096, gated, bf16, alone=True, narrows=True)
        for tile in (fixed_scaled_tile(128, 4096, gated, bf16), narrow):
            assert tile is not None
            compiled("linear", linear.product_kernel, tile, **of_tile(tile), **alone, GATED=gated)
        for narrows, mean_rows in ((False, 128), (True, 8 if gated else 128)):
            tile = _scaled_tiles(bf16, 300, mean_rows, narrows)[0 if gated else 1]
            flags: dict[str, Any] = {"GATED": gated, "bias": None}
            if not (gated and narrows and tile.outputs == BLOCK):
                flags["out_scales"] = None
            compiled("experts", linear.product_kernel, tile, **of_tile(tile), **flags)
    compiled("widen", widen_kernel._widen_kernel, Tile(1, 1, 1, 4, 1))
    widened = {"ROWS": packed_kernel.WIDEN_ROWS, "WIDTH": packed_kernel.WIDTH}
    for flags in ({"zeros": None, "GROUP": 16}, {"GROUP": 128}):
        for tile, into in ((packed_kernel.FEW, False), (packed_kernel.MANY, True)):
            sizes = {"ROWS": tile.rows, "OUTPUTS": tile.outputs, "WIDTH": packed_kernel.WIDTH, "INTO": into, **flags}
            launch = Tile(1, 1, 1, tile.num_warps, tile.num_stages)
            whole = {} if into else {"tiles": None, "pairs": None}
            compiled("packed", packed_kernel.packed_product_kernel, launch, **sizes, **whole, bias=None)
        compiled("widen_packed", packed_kernel.widen_packed_kernel, Tile(1, 1, 1, 4, 1), **flags, **widened)
    for form, flags in (("integers", {"GROUP": 128}), ("floats", {"GROUP": 16})):
        sizes = {**flags, "ROWS": 8, "OUTPUTS": 16, "WARPS": 4, "STAGES": 3, "GATED": True, "INTO": True, "bias": None}
        launch = Tile(1, 1, 1, 4, 3)
        product = fragments_kernel.fragments_product_kernel
        compiled(f"fragments_of_{form}", product, launch, **sizes, SPLIT=False, DEEP=True)
        compiled(
            f"fragments_of_{form}", product, launch, **{**sizes, "OUTPUTS": 64}, SPLIT=False, DEEP=False, tiles=None
        )
        sizes |= {"ROWS": 128, "OUTPUTS": 128}
        compiled(f"fragments_of_{form}", fragment_prompt_kernel.prompt_product_kernel, launch, **sizes)
        sizes = {**flags, "OUTPUTS": unpack_kernel.WIDEN_ROWS, "WARPS": 2}
        compiled(f"widen_{form}", unpack_kernel.widen_fragments_kernel, Tile(1, 1, 1, 2, 1), **sizes)
    compiled("narrow", fp8_kernel._narrow_kernel, Tile(1, 1, 1, 4, 1), ROWS=16, WIDTH=128)
    flags = {"GATED": False, "GATE_FIRST": False, "SIGMOID": False, "OWN_WEIGHTS": False, "ADD": True}
    compiled("norm", norm._norm_kernel, Tile(1, 1, 1, 8, 1), D=2560, ROWS=1, PARTS=8, **flags)
    compiled("gate", activation._silu_mul_kernel, Tile(1, 1, 1, 4, 1), gate_limit=None, up_limit=None)
    into, out_of = moe.PAIR_IN, moe.PAIR_OUT
    sizes = {"OUTPUTS": into.outputs, "WIDTH": into.width, "STAGES": into.num_stages}
    compiled("pair_in", linear._row_kernel, into, **sizes, GATED=True, bias=None, beside=None)
    sizes = {"OUTPUTS": out_of.outputs, "WIDTH": out_of.width}
    compiled("pair_out", moe._pair_out_kernel, out_of, **sizes, CHOICES=9, INNER=512)
    single = one_scaled_tile(4096)
    sizes = {"OUTPUTS": single.outputs, "WIDTH": single.width, "STAGES": single.num_stages}
    compiled("row", linear._row_kernel, single, **sizes, GATED=True, bias=None, ids=None)
    heads = {"HEADS": 2, "GROUP": 4, "D": 64, "DV": 64, "BLOCK": 64}
    flags = {"HAS_WINDOW": False, "GATED": True}
    compiled("decode", decode_kernel, Tile(1, 1, 1, 4, 2), **heads, **flags, KEYS=64, FOLDED=4)
    compiled("decode", decode_kernel, Tile(1, 1, 1, 4, 2), **heads, **flags, KEYS=64, FOLDED=1, PARTIAL=True)
    sizes = {"BLOCK_M": 64, "QUERIES": 16, "SPLIT": True}
    compiled("prefill", prefill_kernel, Tile(1, 1, 1, 4, 2), **heads, **flags, **sizes)
    for num_rows in (1, 128):
        tile = shortlist_kernel._tile(num_rows)
        sizes = {"ROWS": tile.rows, "WIDTH": tile.width, "STAGES": tile.num_stages}
        compiled("shortlist", shortlist_kernel._tile_kernel, tile, **sizes)
    sizes = {"width": 5120, "TILES": 2048, "CANDIDATES": 16, "WIDTH": 512}
    compiled("choose", shortlist_kernel._choose_kernel, Tile(1, 1, 1, 8, 1), **sizes)
    compiled("write", _inputs_kernel, Tile(1, 1, 1, 2, 1), **heads, HALF=16, NORM=True)


if __name__ == "__main__":
    main()
