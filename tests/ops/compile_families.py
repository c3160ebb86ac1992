"""Compile the kernels of scans, latent attention, decays for each key and drafts for a Hopper GPU, absent or not.

Prints a line for each: its name, and its instructions of the matrix units.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.language import NVMMASharedLayout

from forkpoint.ops.attention import (
    expanded_kernel,
    latent_kernel,
    latent_step_kernel,
    partial_kernel,
    pool_attention_kernel,
    pool_choice_kernel,
    prefill_warps_kernel,
)
from forkpoint.ops.conv1d import verify_kernel as conv_verify
from forkpoint.ops.launch import AT_ONCE
from forkpoint.ops.linear import kernel as linear
from forkpoint.ops.recurrence import decode_kernel, heads_kernel, key_kernel, record_kernel
from forkpoint.ops.recurrence.state_rows import LANES, Sizes
from forkpoint.ops.scan import kernel as scan
from forkpoint.ops.scan import prefill_kernel as scan_prefill

HALF = (
    "x",
    "dt",
    "b",
    "c",
    "z",
    "q",
    "cache",
    "out",
    "mixed",
    "values",
    "taps",
    "windows",
    "a",
    "latent",
    "q_rope",
    "inverses",
    "scores",
    "keys",
)
HALF += ("inputs", "bias", "own_q", "shared_q", "up", "past_x", "past_dt", "past_b")
WIDE = ("rates", "dt_bias", "skip", "pool", "a_log", "acc_ptr", "l_ptr", "m_ptr", "weight", "cos_sin", "wholes")
WIDE += ("updates", "decays", "systems", "states", "totals", "vectors", "gates", "scales")
INTS = ("src", "dst", "cu_seqlens", "save_ptr", "save_pos", "save_dst", "items", "part_ptr", "cu_queries", "kv_lens")
INTS += (
    "table_rows",
    "block_table",
    "tiles",
    "cu_tokens",
    "pending",
    "mark",
    "mark_dst",
    "read",
    "write",
    "line",
    "written",
    "held",
)
HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    **dict.fromkeys(HALF, "*bf16"),
    **dict.fromkeys(WIDE, "*fp32"),
    **dict.fromkeys(INTS, "*i32"),
    **dict.fromkeys(("positions", "key_places"), "*i64"),
    **dict.fromkeys(("scale", "eps"), "fp32"),
    "records": ("*fp32", "*bf16", "*fp32", "*fp32"),
    "index": ("*i32",) * 8,
}


def compiled(name: str, function: Any, num_warps: int, target: GPUTarget = HOPPER, **constants: Any) -> Any:
    constants = {
        "OVERLAP": True,
        "STRAIGHT": False,
        "GATE_LIMIT": None,
        "UP_LIMIT": None,
        "FIRST": 0,
        "PARTIAL": False,
        **constants,
    }
    constants = {arg: value for arg, value in constants.items() if arg in function.arg_names}
    signature = {arg: "constexpr" if arg in constants else POINTERS.get(arg, "i32") for arg in function.arg_names}
    places = {arg: (place,) for place, arg in enumerate(function.arg_names)}
    source = (GluonASTSource if isinstance(function, GluonJITFunction) else ASTSource)(
        fn=function, signature=signature, constexprs={places[arg]: value for arg, value in constants.items()}
    )
    made = triton.compile(source, target=target, options={"num_warps": num_warps, "num_stages": 1})
    code = made.asm["ptx"] if target == HOPPER else made.asm["amdgcn"]
    print(name, sum(code.count(word) for word in ("wgmma.mma_async", "mma.sync", "v_mfma")))
    return made


def pools() -> None:
    """Compile the choice of pools of keys and the attention to them."""
    POINTERS.update(chosen="*i32", k_cache="*bf16", v_cache="*bf16", gate="*bf16", scores="*i32", weights="*fp32")
    sizes = {"HEADS": 2, "GROUP": 8, "D": 64, "DV": 64, "BLOCK": 64, "SIZE": 4, "MOST": 8, "BLOCK_M": 16, "KEYS": 32}
    sizes["FIRST"] = 0
    plain = dict.fromkeys(("k_scales", "v_scales", "scale_block"))
    for decode in (False, True):
        compiled("pool_attend", pool_attention_kernel._attend_kernel, 4, **sizes, **plain, SHARED=decode, DECODE=decode)
        form = {**sizes, "WIDE": 16, "QUERIES": 2 - decode, "DECODE": decode}
        POINTERS["out"] = "*i32"
        compiled("pool_scores", pool_choice_kernel._scores_kernel, 4, **form)
        compiled("pool_choice", pool_choice_kernel._choice_kernel, 4, **form, POOLS=64)
        POINTERS["out"] = "*bf16"
    compiled("pool_join", pool_attention_kernel._join_kernel, 2, **sizes)
    POINTERS["scores"] = "*bf16"


def assembled(code: str) -> str:
    """Return what the assembler reports about a kernel's PTX."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
        ptx.write(code)
        ptx.flush()
        command = [triton.knobs.nvidia.ptxas.path, "-arch=sm_90a", "-v", ptx.name, "-o", os.devnull]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def warps() -> None:
    """Compile prompt attention with groups of warps. Its products must not wait for one another or for spills."""
    boxes = f"tensordesc<bf16[1, 1, 64, 64],{NVMMASharedLayout(128, 16, 4)!r}>"
    POINTERS.update(out="*bf16", gate="*bf16", key_tiles=boxes, value_tiles=boxes)
    sizes = {"HEADS": 4, "GROUP": 4, "QUERIES": 32}
    for dim, keys, stages, split in ((256, 64, 2, False), (256, 64, 2, True), (128, 128, 2, True), (128, 64, 4, False)):
        form = {**sizes, "D": dim, "KEYS": keys, "STAGES": stages, "SPLIT": split}
        made = compiled("prefill_warps", prefill_warps_kernel.prefill_warps_kernel, 4, **form)
        assert made.metadata.shared <= 227 * 1024, "more shared memory than a processor has"
        report = assembled(made.asm["ptx"])
        assert " 0 bytes spill stores" in report and "serialized" not in report, report


def main() -> None:
    sizes = {"D": 64, "N": 16, "BLOCK_N": 16, "BLOCK": 32, "PIECES": 2}
    for kernel in (scan_prefill._own_kernel, scan_prefill._join_kernel, scan_prefill._outputs_kernel):
        compiled(f"scan{kernel.fn.__name__}", kernel, 1, **sizes)
    compiled("scan_verify", scan._step_kernel, 1, **sizes, MOST=4, COMPUTES=True)
    names = ("cu_tokens", "pending", "mark", "mark_dst", "read", "write", "num_rows", "num_tokens")
    plain = dict.fromkeys((*names, "past_x", "past_dt", "past_b", "line"))
    compiled("scan_decode", scan._step_kernel, 1, **sizes, **plain, MOST=0, COMPUTES=True)
    sizes = {"HEADS": 16, "R": 64, "P": 32, "BLOCK": 64, "KEYS": 32, "BLOCK_M": 16, "QUERIES": 1}
    for decode in (True, False):
        compiled("attend", latent_kernel.latent_kernel, 4, **sizes, DECODE=decode, SPLIT=not decode)
        compiled("write", latent_kernel._write_kernel, 4, **sizes, ROTATED=decode)
    sizes |= {"BLOCK": 32, "FIRST": 1}
    compiled("attend", latent_kernel.latent_kernel, 4, **sizes, DECODE=True, SPLIT=False, PARTIAL=True)
    POINTERS["out"] = "*fp32"
    compiled("partial", partial_kernel.partial_kernel, 2, HEADS=16, DV=64)
    POINTERS["out"] = "*bf16"
    tiles = NVMMASharedLayout(128, 16, 3)
    sizes = {"HEADS": 16, "R": 64, "P": 64, "FIRST": 1, "STAGES": 2}
    for block, partial in ((64, False), (32, True)):
        boxes = f"tensordesc<bf16[1, {block}, 64],{tiles!r}>"
        POINTERS.update(dict.fromkeys(("value_boxes", "rope_boxes"), boxes))
        compiled("attend", latent_step_kernel.latent_step_kernel, 4, **sizes, PARTIAL=partial)
    sizes = {"HEADS": 2, "K": 32, "P": 16, "V": 32, "BLOCK_M": 64}
    compiled("expanded", expanded_kernel._expanded_kernel, 8, **sizes)
    sizes = {"H": 2, "K": 32, "V": 32, "BLOCK_K": 32, "BLOCK_V": 32}
    flags = {"DOUBLE_BETA": False, "BOUND": -5.0}
    drafting = {"MOST": 4, "COMPUTES": True, "HV": 2, "DELTA": True, "LOW": 0.0, "HIGH": 0.0, "skip": None}
    for keyed in (False, True):
        compiled("verify", decode_kernel._step_kernel, 1, **sizes, **flags, **drafting, PER_KEY=keyed)
        names = ("updates", "keys", "decays", "cu_tokens", "pending", "mark", "mark_dst", "read", "write")
        plain = drafting | dict.fromkeys(names)
        compiled("decode", decode_kernel._step_kernel, 1, **sizes, **flags, **plain, PER_KEY=keyed)
    drafting |= {"INTERVAL": 8, "GROUP": 1, "LINE": 11, "LENGTH": 15, "PAST": 16, "FOUND": 16, "TF32": True}
    form = {"SIDE": LANES.value, "STRAIGHT": False, "CHANNELS": 32, "src": None, "dst": None}
    known = {**sizes, **drafting, "BLOCK_K": 64, "BLOCK_V": 16}
    for together in (False, True):
        compiled("record_heads", heads_kernel._heads_kernel, 1, **known, **flags, **form, W=0, TOGETHER=together)
    for most in (1, 4):
        known |= {"S": Sizes(*(known[name] for name in Sizes._fields)), "MOST": most}
        for pool in ("*fp32", "*bf16"):
            POINTERS["pool"] = pool
            compiled("record", record_kernel._record_kernel, 1, **known)
    known |= {"TF32": False, "OVERLAP": False}
    known["S"] = Sizes(*(known[name] for name in Sizes._fields))
    amd = GPUTarget("hip", "gfx942", 64)
    for kind in ("*fp32", "*bf16"):  # of what comes in, and of the keys that are kept of it
        POINTERS.update(pool="*fp32", mixed=kind, keys=kind)
        compiled("amd_record_heads", heads_kernel._heads_kernel, 1, amd, **known, **flags, **form, W=0, TOGETHER=True)
    compiled("amd_record", record_kernel._record_kernel, 1, amd, **known)
    window = {"D": 64, "W": 4, "BLOCK": 64, "PIECES": 1, "HAS_BIAS": True, "SILU": True}
    for takes in (False, True):
        compiled("conv_verify", conv_verify._verify_kernel, 1, **window, **drafting, TAKES=takes)
    pools()
    warps()
    made = compiled("key_scan", key_kernel._scan_kernel, 4, **sizes)
    # Each stretch of chunks starts where the one before ended; the compiler has taken that for 0.
    assert not re.search(r"scf.for %\w+ = %c0_i32\w* to", made.asm["ttgir"]), "a loop starts at a constant"
    compiled("key_chunk", key_kernel._chunk_kernel, 8, **sizes, **flags)
    compiled("key_pairs", key_kernel._pair_kernel, 8, **sizes, **flags)
    compiled("key_inverse", key_kernel._invert_kernel, 4, **sizes, **flags)
    sizes = {"OUTPUTS": 8, "WIDTH": 128, "STAGES": 2, "SCALE_ROWS": 0, "BLOCKED": False, "scales": None, "beside": None}
    alone = {"GATED": False, "SQUARED": False, "bias": None, "ids": None}
    for mode in (True, AT_ONCE.value):
        ptx = compiled("row", linear._row_kernel, 4, **sizes, **alone, OVERLAP=mode).asm["ptx"]
        wait, start = ptx.index("griddepcontrol.wait"), ptx.index("griddepcontrol.launch_dependents")
        load = re.search(r"ld\.global|cp\.async", ptx)
        assert load is not None and wait < min(start, load.start()), "something is read too early"
        assert (start < load.start()) == (mode == AT_ONCE.value), "the next launch starts at the wrong time"


if __name__ == "__main__":
    main()
