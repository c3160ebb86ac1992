"""Makes imports of large packages take less time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

ACTIVATIONS: Final = "transformers.activations"
MODELS: Final = "transformers.models"
VALIDATORS: Final = "transformers.utils.type_validators"


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause garbage collection, for work that makes next to no garbage: each collection would examine what it made.

    The imports of torch and transformers take an eighth less time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def import_transformers() -> None:
    """Import what transformers' tokenizers and configurations need. Does nothing if they were imported before.

    Their module of validators imports the activation functions to know these functions' names. In a process with
    torch, that import brings in the loading of checkpoints, torch.distributed.tensor and sympy, which takes more than a
    second. The validators get an empty table instead, with which they do not check a name. They get it in a process
    without torch too, and `Fields` checks the names that forkpoint knows.
    """
    if VALIDATORS in sys.modules or ACTIVATIONS in sys.modules:
        return
    with collection_paused():
        _delay_models()
    empty = ModuleType(ACTIVATIONS)
    empty.__dict__["ACT2FN"] = {}
    sys.modules[ACTIVATIONS] = empty
    try:
        with collection_paused(), suppress(ImportError):  # a transformers that has no such module
            import_module(VALIDATORS)
    finally:
        del sys.modules[ACTIVATIONS]  # the next import of this name is that of the real module


class _DelayedModels(ModuleType):
    """The package of transformers' models, which runs its own code only for names that are not those of its modules."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if find_spec(f"{MODELS}.{name}") is not None:
            return import_module(f"{MODELS}.{name}")
        if sys.modules.get(MODELS) is self:
            del sys.modules[MODELS]
        return getattr(import_module(MODELS), name)


def _delay_models() -> None:
    """Delay the code of the package of transformers' models, which reads 3,000 files to know each module's names.

    That takes a quarter of a second. Modules of single models need none of it.
    """
    spec = find_spec(MODELS)
    if spec is None or MODELS in sys.modules:
        return
    package = _DelayedModels(MODELS)
    package.__spec__, package.__file__, package.__package__ = spec, spec.origin, MODELS
    package.__path__ = spec.submodule_search_locations or []
    sys.modules[MODELS] = package
