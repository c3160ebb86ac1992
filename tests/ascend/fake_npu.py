"""A device `npu` for torch on the host's memory, and a `torch.npu` to go with it: what a card's would be asked for.

Its memory is apart from the host's (mixing the two is an error), it counts copies and reads of scalars, and its graphs
record operators and kernel launches, which are not run until the graph is. None of it is torch_npu's own code.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils import cpp_extension
from torch.utils._python_dispatch import TorchDispatchMode

SOURCE = Path(__file__).with_suffix(".cpp")
FREE_BYTES, TOTAL_BYTES = 8 << 30, 16 << 30


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self._at_s = 0.0

    def record(self, stream: object = None) -> None:
        self._at_s = time.perf_counter()

    def synchronize(self) -> None:
        """Does nothing: work is done when the call that issues it returns."""

    def elapsed_time(self, later: Event) -> float:
        return (later._at_s - self._at_s) * 1e3


class NPUGraph:
    """Calls to repeat: (function, the result's memory)."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    def replay(self) -> None:
        for call in self.calls:
            call()


class _Recorder(TorchDispatchMode):
    """Runs operators once, for the memory of their results, and again at each replay."""

    def __init__(self, graph: NPUGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name()
        assert "_local_scalar_dense" not in name, "a graph reads a scalar"
        # Ids that a launch makes are not there yet.
        first = (args[0], torch.zeros_like(args[1])) if name == "aten::embedding" else args
        result = func(*first, **kwargs)
        tensors = [x for x in (result if isinstance(result, tuple | list) else [result]) if isinstance(x, Tensor)]
        assert not any(x.device.type == "cpu" for x in tensors), f"{name} in a graph makes a tensor on the host"
        if not _views(func, args, tensors) and not name.startswith("aten::empty"):
            self._graph.calls.append(functools.partial(_again, func, args, kwargs, tensors))
        return result


def _views(func: Any, args: Any, results: list[Tensor]) -> bool:
    """Whether nothing was computed; `to`, which torch counts among views, may have."""
    if not func.is_view:
        return False
    same = args[0].untyped_storage().data_ptr()
    return all(x.untyped_storage().data_ptr() == same for x in results)


def _again(func: Any, args: Any, kwargs: Any, kept: list[Tensor]) -> None:
    result = func(*args, **kwargs)
    for place, value in zip(kept, result if isinstance(result, tuple | list) else [result], strict=True):
        if place.data_ptr() != value.data_ptr():
            place.copy_(value)


class FakeModule(ModuleType):
    """Stands in for `torch.npu`. `num_cards` is 0 outside `card()`."""

    Event, NPUGraph = Event, NPUGraph

    def __init__(self) -> None:
        super().__init__("torch.npu")
        self.num_cards = 0
        self.recorded: NPUGraph | None = None  # the graph under record

    def device_count(self) -> int:
        return self.num_cards

    def is_available(self) -> bool:
        return self.num_cards > 0

    def current_device(self) -> int:
        return 0

    def set_device(self, device: object) -> None: ...

    def synchronize(self, device: object = None) -> None: ...

    def empty_cache(self) -> None: ...

    def reset_peak_memory_stats(self, device: object = None) -> None: ...

    def manual_seed_all(self, seed: int) -> None: ...

    def _is_in_bad_fork(self) -> bool:
        return False

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        return FREE_BYTES, TOTAL_BYTES

    def memory_reserved(self, device: object = None) -> int:
        return 0

    def max_memory_reserved(self, device: object = None) -> int:
        return 256 << 20

    def get_device_properties(self, device: object = None) -> SimpleNamespace:
        return SimpleNamespace(cube_core_num=24, vector_core_num=48)

    def graph_pool_handle(self) -> tuple[int, int]:
        return 0, 1

    @contextmanager
    def graph(self, graph: NPUGraph, pool: object = None, capture_error_mode: str = "global") -> Iterator[None]:
        assert capture_error_mode == "thread_local" and self.recorded is None
        self.recorded = graph
        try:
            with _Recorder(graph):
                yield
        finally:
            self.recorded = None


@functools.cache
def load() -> FakeModule:
    """Build the device, unless that was done before (about 20 seconds), and register it with torch."""
    torch.utils.rename_privateuse1_backend("npu")
    torch.ops.load_library(str(_built()))
    torch.ops.fake_npu.install()
    module = FakeModule()
    torch._register_device_module("npu", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=False)
    return module


@contextmanager
def card() -> Iterator[FakeModule]:
    """Provide one card while the context is open."""
    module = load()
    module.num_cards = 1
    try:
        yield module
    finally:
        module.num_cards = 0


def counted() -> dict[str, int]:
    """Return the calls since the last call: operators, "to host", "to device", "blocking copy" and "scalar read"."""
    return dict(torch.ops.fake_npu.counted())


def hosted(x: Tensor) -> Tensor:
    """Return the same bytes as a tensor on the host, without counting."""
    shared: Tensor = torch.ops.fake_npu.hosted(x)
    return shared


def _built() -> Path:
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:24]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forkpoint" / "fake_npu"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{key}.so"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            part = library.with_suffix(".part")
            includes = [f"-I{path}" for path in cpp_extension.include_paths()]
            folders = [f"-L{path}" for path in cpp_extension.library_paths()]
            command = [os.environ.get("CXX", "g++"), "-O0", "-std=c++20", "-fPIC", "-shared", str(SOURCE), *includes]
            subprocess.run([*command, *folders, "-ltorch_cpu", "-lc10", "-o", str(part)], check=True)
            part.rename(library)
    return library
