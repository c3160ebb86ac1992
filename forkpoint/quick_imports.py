"""Makes imports of large packages take less time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import Final

ACTIVATIONS: Final = "transformers.activations"
VALIDATORS: Final = "transformers.utils.type_validators"


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause garbage collection. Imports make next to no garbage, and each collection would examine what they made.

    It saves an eighth of the time that torch and transformers take.
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
    empty = ModuleType(ACTIVATIONS)
    empty.__dict__["ACT2FN"] = {}
    sys.modules[ACTIVATIONS] = empty
    try:
        with collection_paused(), suppress(ImportError):  # a transformers that has no such module
            import_module(VALIDATORS)
    finally:
        del sys.modules[ACTIVATIONS]  # the next import of this name is that of the real module
