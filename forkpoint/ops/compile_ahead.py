"""Compiles Triton's kernels on several threads before the first of them runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Functions of torch by their name: those that return memory as it is, and those that take indices.
ALLOCATING = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
INDEXING = frozenset({"embedding", "gather", "index_select", "take_along_dim", "__getitem__", "__setitem__"})
INDEXING |= {"index_add", "index_copy", "index_fill", "index_put", "scatter", "scatter_add"}


class _ValidIndices(TorchFunctionMode):
    """Let torch's functions run on what kernels should have written and have not.

    Allocated memory is zeroed, and so are copies of the indices that a function gets, because an index out of range
    ends the process on a GPU. Results have the right shapes and no meaning.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        if name in INDEXING or name.removesuffix("_") in INDEXING:
            data = () if name == "embedding" else args[:1]  # an embedding's indices come first
            args, kwargs = (*data, *_zeroed(args[len(data) :])), _zeroed(kwargs)
        result = func(*args, **kwargs)
        if name in ALLOCATING:
            result.zero_()
        return result


def _zeroed(value: Any) -> Any:
    """Return nested arguments with zeros in place of the integers of tensors."""
    if isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64):
        return torch.zeros_like(value)
    if isinstance(value, tuple | list):
        zeroed = map(_zeroed, value)
        return tuple(zeroed) if isinstance(value, tuple) else list(zeroed)
    if isinstance(value, dict):
        return {name: _zeroed(each) for name, each in value.items()}
    return value


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
    and raises its errors. Torch's own operators run, see `_ValidIndices`. Only one thread may launch kernels meanwhile.
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
    with ThreadPoolExecutor(num_threads, "compiler", set_device) as pool, CompileAndLoad(pool), _ValidIndices():
        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = launch


def _loaded(kernel: Any) -> Any:
    """Load a compiled kernel. Triton 3.6 also compiles the C function that launches it."""
    _ = kernel.run
    return kernel
