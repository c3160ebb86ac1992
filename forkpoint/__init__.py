"""An inference engine for hybrid language models with exact, fine-grained, copy-free prefix caching."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forkpoint.cache.policies import register_capture_policy, register_eviction_policy
    from forkpoint.engine.inputs import TextPrompt, TokensPrompt
    from forkpoint.engine.llm import LLM
    from forkpoint.errors import *
    from forkpoint.models.registry import register_model
    from forkpoint.ops.select import register_operators
    from forkpoint.outputs import *
    from forkpoint.params import *

__all__ = [
    "LLM",
    "BlockTableError",
    "BrokenAnswerError",
    "CacheReport",
    "CompletionOutput",
    "ConfigError",
    "EngineNotReadyError",
    "EngineStoppedError",
    "FinishReason",
    "ForkpointError",
    "InvalidParamsError",
    "InvalidPromptError",
    "Logprob",
    "MissReason",
    "ModelFolderError",
    "NonFiniteLogitsError",
    "PromptTooLongError",
    "QueueFullError",
    "RequestError",
    "RequestFailedError",
    "RequestOutput",
    "RequestOutputKind",
    "RequestTimings",
    "RequestTooLargeError",
    "SamplingParams",
    "ServerError",
    "ServerRefusedError",
    "ServerUnreachableError",
    "StepFailedError",
    "StructuredOutputError",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "TraceError",
    "UnsupportedModelError",
    "register_capture_policy",
    "register_eviction_policy",
    "register_model",
    "register_operators",
]
_MODULES = {
    "LLM": "engine.llm",
    "TextPrompt": "engine.inputs",
    "TokensPrompt": "engine.inputs",
    "register_capture_policy": "cache.policies",
    "register_eviction_policy": "cache.policies",
    "register_model": "models.registry",
    "register_operators": "ops.select",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used. AttributeError for any other name.

    `LLM` imports torch, which takes seconds. The command line must be able to print and to react to Ctrl-C before.
    """
    if name == "__version__":
        return import_module("forkpoint.version").installed_version()
    if name in __all__:
        for module in (_MODULES[name],) if name in _MODULES else ("errors", "params", "outputs"):
            found = getattr(import_module(f"forkpoint.{module}"), name, None)
            if found is not None:
                return found
    raise AttributeError(f"module 'forkpoint' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return all names, also those that are not imported yet, for `dir` and completion in a shell."""
    return sorted({*globals(), *__all__, "__version__"})
