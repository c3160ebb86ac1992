"""An inference engine for hybrid language models with exact, fine-grained, copy-free prefix caching."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forkpoint.errors import (
    BlockTableError,
    CheckpointError,
    ConfigError,
    EngineStoppedError,
    ForkpointError,
    InvalidParamsError,
    InvalidPromptError,
    NonFiniteLogitsError,
    QueueFullError,
    RequestError,
    RequestFailedError,
    RequestTooLargeError,
    StepFailedError,
    UnsupportedModelError,
)
from forkpoint.outputs import CacheReport, CompletionOutput, Logprob, MissReason, RequestOutput, RequestTimings
from forkpoint.params import FinishReason, SamplingParams

if TYPE_CHECKING:
    from forkpoint.engine.llm import LLM

__all__ = [
    "LLM",
    "BlockTableError",
    "CacheReport",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "EngineStoppedError",
    "FinishReason",
    "ForkpointError",
    "InvalidParamsError",
    "InvalidPromptError",
    "Logprob",
    "MissReason",
    "NonFiniteLogitsError",
    "QueueFullError",
    "RequestError",
    "RequestFailedError",
    "RequestOutput",
    "RequestTimings",
    "RequestTooLargeError",
    "SamplingParams",
    "StepFailedError",
    "UnsupportedModelError",
]


def __getattr__(name: str) -> Any:
    """`LLM` brings torch along, which the cache, the scheduler and the command line's help do without."""
    if name == "LLM":
        from forkpoint.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'forkpoint' has no attribute {name!r}")
