"""All errors that a user can meet. Messages say what was given, what is allowed and what to do.

ForkpointError
  + ConfigError             an engine or command-line option is wrong, or two options contradict each other
  + ModelFolderError        a model folder is missing, broken, incomplete, or holds non-finite weights
  + UnsupportedModelError   config.json names an architecture or feature that forkpoint does not run
  + RequestError            one request is wrong; other requests go on
    + InvalidParamsError      a sampling parameter is out of range
    + InvalidPromptError      empty prompt, unknown token id, or images that cannot be read
      + PromptTooLongError      the prompt is too long for `max_model_len`
    + RequestTooLargeError    the arena can never hold this request
    + QueueFullError          the bounded waiting queue is full
  + RequestFailedError      a request failed while it ran
    + NonFiniteLogitsError    the model produced NaN or infinite logits for this request
    + StepFailedError         the forward pass raised when it carried this request alone
    + StructuredOutputError   no token can continue an output that matches
  + EngineStoppedError      the engine was closed or died
  + EngineNotReadyError     the engine is still loading its model
  + ServerError             a client's request to a server failed
    + ServerUnreachableError  no connection was established
    + ServerRefusedError      the server answered with an error
    + BrokenAnswerError       an answer was cut off or makes no sense
  + TraceError              a request trace cannot be read, or contradicts itself
  + BlockTableError         a row, block or position lies outside a block table
"""

from __future__ import annotations

from typing import Self


class ForkpointError(Exception):
    """Base of all errors that forkpoint raises on purpose."""


class ConfigError(ForkpointError):
    """An engine or command-line option is wrong, or two options contradict each other."""


class ModelFolderError(ForkpointError):
    """A model folder is missing, broken or incomplete."""


class UnsupportedModelError(ForkpointError):
    """config.json names an architecture or feature that forkpoint does not run."""


class RequestError(ForkpointError):
    """One request is wrong; it was not accepted and other requests go on."""


class InvalidParamsError(RequestError):
    """A sampling parameter is out of range."""


class InvalidPromptError(RequestError):
    """The prompt is empty, has an unknown token id or images that cannot be read, or is too long."""


class PromptTooLongError(InvalidPromptError):
    """The prompt is too long for `max_model_len`."""

    @classmethod
    def of(cls, given: int, most: int, unit: str, max_model_len: int) -> Self:
        """Return the error for a prompt of `given` units.

        Agents shorten a conversation when they read these words, which are Anthropic's and then OpenAI's, and read the
        numbers. A prompt that is too long in another unit has not been tokenised.
        """
        tokens = f"{given} tokens" if unit == "tokens" else f"{max_model_len} tokens or more"
        return cls(
            f"the prompt is too long: {given} {unit} > {most} maximum. This model's maximum context length is "
            f"{max_model_len} tokens (max_model_len), but the prompt resulted in {tokens}; shorten it or raise "
            "max_model_len"
        )


class RequestTooLargeError(RequestError):
    """Even an otherwise empty arena cannot hold this request at its final length."""


class QueueFullError(RequestError):
    """The bounded waiting queue is full; try again later or raise `max_queue_len`."""


class RequestFailedError(ForkpointError):
    """A request failed while it ran; other requests went on."""


class NonFiniteLogitsError(RequestFailedError):
    """The model produced NaN or infinite logits for this request."""


class StepFailedError(RequestFailedError):
    """The forward pass raised when it carried this request alone."""


class StructuredOutputError(RequestFailedError):
    """The output cannot be brought to match what the request asked for."""


class EngineStoppedError(ForkpointError):
    """The engine was closed or died; no further requests are accepted."""


class ServerError(ForkpointError):
    """A client's request to a server failed."""


class ServerUnreachableError(ServerError):
    """No connection to the server was established."""


class ServerRefusedError(ServerError):
    """The server answered with an error. `status` is the HTTP status, or None for an error inside a stream."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message if status is None else f"the server answered {status}: {message}")
        self.status = status


class BrokenAnswerError(ServerError):
    """An answer was cut off, or violates the API."""


class TraceError(ForkpointError):
    """A request trace cannot be read, or contradicts itself."""


class EngineNotReadyError(ForkpointError):
    """The engine is still loading its model; try again in a while."""


class BlockTableError(ForkpointError):
    """A row, block or position lies outside a block table."""


def text_with_notes(error: BaseException) -> str:
    """Return an error's message, followed by the notes of one line that were added to it. Others are tracebacks."""
    notes = getattr(error, "__notes__", ())
    return "; ".join([str(error), *(note for note in notes if "\n" not in note)])
