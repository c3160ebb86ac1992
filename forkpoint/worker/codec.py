"""Plans and results as bytes: dataclasses as msgpack, arrays as their own bytes.

A large array in shared memory is sent as the place where it is. The sender keeps it until the receiver has it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, get_origin

import msgspec
import numpy as np

from forkpoint import errors
from forkpoint.errors import EngineStoppedError, ForkpointError, text_with_notes
from forkpoint.shared_arrays import LEAST_SHARED_BYTES, OpenedMemory, Place, place_of

MAX_ERROR_LENGTH = 1000  # characters; some libraries put whole tensors into their messages


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """An error on its way to the other process: the name of its class in `errors`, and its message."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        text = text_with_notes(error)
        if len(text) > MAX_ERROR_LENGTH:
            text = text[:MAX_ERROR_LENGTH] + "..."
        if isinstance(error, ForkpointError):
            return cls(type(error).__name__, text)
        return cls(EngineStoppedError.__name__, f"{type(error).__name__}: {text}")

    def error(self) -> ForkpointError:
        kind = getattr(errors, self.kind, EngineStoppedError)
        assert issubclass(kind, ForkpointError)
        return kind(self.text)


def encoder() -> Callable[[Any], bytes]:
    return msgspec.msgpack.Encoder(enc_hook=_plain).encode


def decoder(kind: Any) -> Callable[[bytes], Any]:
    """Return a decoder of one type or union.

    It raises msgspec.DecodeError for bytes that do not fit it, and OSError if shared memory cannot be opened.
    """
    return msgspec.msgpack.Decoder(kind, dec_hook=partial(_from_plain, OpenedMemory())).decode


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.nbytes >= LEAST_SHARED_BYTES and (place := place_of(value)) is not None:
            return value.dtype.str, value.shape, tuple(place)
        data = value.data if value.flags.c_contiguous and value.nbytes else value.tobytes()  # without a copy of images
        return value.dtype.str, value.shape, data
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be sent to another process")


def _from_plain(memory: OpenedMemory, kind: Any, value: Any) -> Any:
    if kind is not np.ndarray and get_origin(kind) is not np.ndarray:
        raise TypeError(f"{kind} cannot come from another process")
    dtype, shape, data = value
    if isinstance(data, list):
        return memory.array(Place(*data), dtype, tuple(shape))
    return np.ndarray(shape, dtype, bytearray(data))  # writable, like the array that was sent
