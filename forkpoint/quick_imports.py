"""Makes imports of large packages take less time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from types import MappingProxyType, ModuleType
from typing import Any, Final

TRANSFORMERS: Final = "transformers"
ACTIVATIONS: Final = "transformers.activations"
MODELS: Final = "transformers.models"
VALIDATORS: Final = "transformers.utils.type_validators"
# The modules of the classes that most tokenizer_config.json name, which AutoTokenizer looks up in the package.
TOKENIZERS: Final = MappingProxyType(
    {
        "PreTrainedTokenizerFast": "transformers.tokenization_utils_tokenizers",
        "GPT2Tokenizer": "transformers.models.gpt2.tokenization_gpt2",
        "Qwen2Tokenizer": "transformers.models.qwen2.tokenization_qwen2",
    }
)


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


@contextmanager
def transformers_delayed() -> Iterator[None]:
    """Delay the code of transformers and of its package of models, while single modules of them are imported.

    Each of these packages reads 3,000 files to know its modules' names, which takes a quarter of a second. Tokenizers
    and configurations need none of it. A name that is not a module's runs that code, and so does the next import
    afterwards.
    """
    with collection_paused():
        delayed = [package for package in (TRANSFORMERS, MODELS) if _delay(package)]
        try:
            _import_validators()
            yield
        finally:
            for package in delayed:
                if isinstance(sys.modules.get(package), _DelayedPackage):
                    sys.modules.pop(package, None)  # another thread may have begun the real import


def _import_validators() -> None:
    """Import transformers' module of validators. Does nothing if it was imported before.

    It imports the activation functions to know these functions' names. In a process with torch, that import brings in
    the loading of checkpoints, torch.distributed.tensor and sympy, which takes more than a second. The validators get
    an empty table instead, with which they do not check a name. They get it in a process without torch too, and
    `Fields` checks the names that forkpoint knows.
    """
    if VALIDATORS in sys.modules or ACTIVATIONS in sys.modules:
        return
    empty = ModuleType(ACTIVATIONS)
    empty.__dict__["ACT2FN"] = {}
    sys.modules[ACTIVATIONS] = empty
    try:
        with suppress(ImportError):  # a transformers that has no such module
            import_module(VALIDATORS)
    finally:
        del sys.modules[ACTIVATIONS]  # the next import of this name is that of the real module


class _DelayedPackage(ModuleType):
    """A package that runs its own code only for names that are not those of its modules."""

    def __getattr__(self, name: str) -> Any:
        package = self.__name__
        if name == "__version__":
            return version(package)
        if name.startswith("__"):
            raise AttributeError(name)
        if find_spec(f"{package}.{name}") is not None:
            return import_module(f"{package}.{name}")
        if name in TOKENIZERS:
            return getattr(import_module(TOKENIZERS[name]), name)
        if sys.modules.get(package) is self:
            sys.modules.pop(package, None)  # another thread may have done so
        return getattr(import_module(package), name)


def _delay(package: str) -> bool:
    """Put a delayed package in place of one that was not imported yet. Return whether there is one now."""
    if package in sys.modules or (spec := find_spec(package)) is None:
        return False
    delayed = _DelayedPackage(package)
    delayed.__spec__, delayed.__file__, delayed.__package__ = spec, spec.origin, package
    delayed.__path__ = spec.submodule_search_locations or []
    sys.modules[package] = delayed
    return True
