"""Compiles Triton's kernels on several threads before the first of them runs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from torch.overrides import TorchFunctionMode

ALLOCATING = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")  # functions of torch


class _ZeroedMemory(TorchFunctionMode):
    """Zero all memory that torch allocates."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__ in ALLOCATING:
            result.zero_()
        return result


def compiles_in_parallel() -> bool:
    """Return whether the installed Triton has a compiler, and can run it on several threads."""
    try:
        from triton import knobs
        from triton.runtime import _async_compile  # noqa: F401
    except ImportError:
        return False
    return not knobs.runtime.interpret


@contextmanager
def compiling_only(num_threads: int) -> Iterator[None]:
    """Compile the kernels that are launched inside, `num_threads` at a time, and run none of them.

    Triton keeps the compiled kernels in memory and in its folder on disk. Leaving waits for the compiler and raises its
    errors. The other operators of torch run. They may use the results of kernels as indices, and kernels that do not
    run leave memory as it was, so memory is zeroed. Only one thread of the process may launch kernels meanwhile.
    """
    from triton.runtime._async_compile import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **options)

    # The compiler holds Python's lock for about a tenth of its time.
    with ThreadPoolExecutor(num_threads, "compiler") as pool, AsyncCompileMode(pool), _ZeroedMemory():
        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = launch
