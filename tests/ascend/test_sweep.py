"""Every Triton kernel that is launched is lowered for an NPU, or NEVER_LAUNCHED has the reason why not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forkpoint
from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.platforms.npu import npu_traits
from forkpoint.platforms.table import traits_of
from tests.ascend.shapes import KEYED, ODD, SHIPPED, SSD, calls
from tests.ops.triton_cases import ON_GPU

ROOT = Path(forkpoint.__file__).parent
MASKS = "its loads would lose their masks"
PACKED = "weights in 4 bits are widened there while they load"
NEVER_LAUNCHED = {  # by what their names begin with
    "ops.linear.fp8_kernel._narrow_kernel": "activations are not rounded to FP8, which it does not multiply",
    "ops.linear.packed_kernel.": PACKED,
    "ops.linear.fragments_kernel.": PACKED,
    "ops.linear.unpack_kernel.": PACKED,
    "ops.moe.fragment_prompt_kernel.": PACKED,
    "ops.moe.kernel._pair_out_kernel": MASKS,
    "ops.moe.order_kernel._few_kernel": MASKS,
    "ops.norm.mix_kernel.": "torch mixes residuals there: `ops/turns.py`",
    "ops.recurrence.record_kernel._record_kernel": "has tuples; `straight_record_kernel` takes its place",
    "ops.rows.": "which ids and positions a step has is said in torch there: `ops/turns.py`",
    "ops.sampling.kernel._rank_kernel": "torch sorts the likeliest ids there: `ops/turns.py`",
    "ops.sampling.shortlist_kernel.": "multiplies FP8 by FP8",
    "ops.exchange.": "no kernel there writes to another card's memory",
    "ops.attention.image_kernel.": "torch attends to the patches of images there: `ops/turns.py`",
    "ops.norm.layer_kernel.": "torch adds and normalises in the towers of images there: `ops/turns.py`",
    "ops.attention.pool_": "torch chooses pools of keys and attends to them there: `ops/turns.py`",
    "ops.attention.store_kernel.": "torch stores the keys of pools there: `ops/turns.py`",
    "ops.attention.partial_kernel.": "torch computes each rank's part of attention there: `ops/turns.py`",
    "ops.attention.expanded_kernel._expanded_kernel": "keys are not made of latents there: `ops/turns.py`",
}


def _kernels() -> Iterator[str]:
    """Yield `module.kernel` of every Triton function whose name ends in `kernel`. Only these are launched."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
    others: set[str] = set()
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(x) for x in node.decorator_list):
                if node.name.endswith("kernel"):
                    yield ".".join([*path.relative_to(ROOT).with_suffix("").parts, node.name])
                else:
                    others.add(node.name)
    calls = (node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.Call))
    launched = {ast.unparse(call.func.value) for call in calls if isinstance(call.func, ast.Subscript)}
    assert not launched & others


@pytest.mark.skipif(ON_GPU, reason="launches are told by the interpreter")
def test_every_launch_is_among_those_that_are_lowered_or_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import GridExecutor

    found: set[str] = set()

    def launch(self: Any, *args: Any, **options: Any) -> None:
        found.add(f"{self.fn.__module__}.{self.fn.__name__}".removeprefix("forkpoint."))

    monkeypatch.setattr(GridExecutor, "__call__", launch)
    monkeypatch.setattr(CpuPlatform, "traits", classmethod(lambda cls, device: npu_traits(24)))
    traits_of.cache_clear()
    for shape in (SHIPPED, ODD, KEYED, SSD):  # all kinds of layers
        for _, call in calls(shape):
            call()
    traits_of.cache_clear()
    launched = set(_kernels())
    assert len(launched) > 40
    without = {name: [start for start in NEVER_LAUNCHED if name.startswith(start)] for name in launched - found}
    assert {name for name, starts in without.items() if not starts} == set()
    assert {start for starts in without.values() for start in starts} == set(NEVER_LAUNCHED)
    assert found <= launched
