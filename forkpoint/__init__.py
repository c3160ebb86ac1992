"""An inference engine for hybrid language models with exact, fine-grained, copy-free prefix caching."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forkpoint.errors import (
    BlockTableError,
    BrokenAnswerError,
    CheckpointError,
    ConfigError,
    EngineNotReadyError,
    EngineStoppedError,
    ForkpointError,
    InvalidParamsError,
    InvalidPromptError,
    NonFiniteLogitsError,
    QueueFullError,
    RequestError,
    RequestFailedError,
    RequestTooLargeError,
    ServerError,
    ServerRefusedError,
    ServerUnreachableError,
    StepFailedError,
    StructuredOutputError,
    TraceError,
    UnsupportedModelError,
)
from forkpoint.outputs import CacheReport, CompletionOutput, Logprob, MissReason, RequestOutput, RequestTimings
from forkpoint.params import FinishReason, SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from forkpoint.engine.llm import LLM

__all__ = [
    "LLM",
    "BlockTableError",
    "BrokenAnswerError",
    "CacheReport",
    "CheckpointError",
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
    "NonFiniteLogitsError",
    "QueueFullError",
    "RequestError",
    "RequestFailedError",
    "RequestOutput",
    "RequestTimings",
    "RequestTooLargeError",
    "SamplingParams",
    "ServerError",
    "ServerRefusedError",
    "ServerUnreachableError",
    "StepFailedError",
    "StructuredOutputError",
    "StructuredOutputsParams",
    "TraceError",
    "UnsupportedModelError",
]


def __getattr__(name: str) -> Any:
    """`LLM` brings torch along, which the cache, the scheduler and the command line's help do without."""
    if name == "LLM":
        from forkpoint.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'forkpoint' has no attribute {name!r}")
