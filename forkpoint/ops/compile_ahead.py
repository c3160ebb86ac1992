"""Compiles Triton's kernels on several threads before the first of them runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
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
def compiling_only(device: torch.device, num_threads: int) -> Iterator[None]:
    """Compile the kernels that are launched inside, `num_threads` at a time, and run none of them.

    Triton keeps compiled kernels in its folder on disk, and loads them to the device. Leaving waits for the compiler
    and raises its errors. The other operators of torch run. They may use the results of kernels as indices, and kernels
    that do not run leave memory as it was, so memory is zeroed. Only one thread may launch kernels meanwhile.
    """
    from triton.runtime._async_compile import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    class CompileAndLoad(AsyncCompileMode):  # type: ignore[misc]
        def submit(self, key: Any, compile: Callable[[], Any], finalize: Callable[[Any], None]) -> Any:
            return super().submit(key, lambda: _loaded(compile()), finalize)

    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **options)

    set_device = partial(torch.accelerator.set_device_index, device.index or 0)
    # Threads are enough, because the compiler holds Python's lock for about a tenth of its time.
    with ThreadPoolExecutor(num_threads, "compiler", set_device) as pool, CompileAndLoad(pool), _ZeroedMemory():
        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = launch


def _loaded(kernel: Any) -> Any:
    """Load a compiled kernel. Triton 3.6 also compiles the C function that launches it."""
    _ = kernel.run
    return kernel
