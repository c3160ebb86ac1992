"""The `forkpoint` command."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from forkpoint.errors import ForkpointError, text_with_notes

USAGE_ERROR, INTERRUPTED = 2, 130


def main(arguments: Sequence[str] | None = None, parser: Callable[[], argparse.ArgumentParser] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 (it ran and failed), 2 (a one-line error), 130 (Ctrl-C).

    An unexpected error is a bug of forkpoint or of a plug-in, and is printed with its traceback.

    `parser` creates a parser other than the `forkpoint` command's; its default for `command` is the function to run.
    Raises SystemExit, as argparse does, for --help and for wrong usage.
    """
    options = argparse.Namespace()
    try:
        _prepare_streams()
        from forkpoint.cli.parser import build_parser  # imported here, so that Ctrl-C during the import is handled

        options = (parser or build_parser)().parse_args(arguments)
        command: Callable[..., int] = options.command
        code = command(options)
        sys.stdout.flush()
        return code
    except ForkpointError as error:
        return _fail(_one_line(error), options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output has closed it
        _drop_output()
        return 0
    except OSError as error:
        _drop_output()
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or _one_line(error)}", options)
    except Exception as error:
        if _was_interrupted(error):
            return INTERRUPTED
        return _fail(f"unexpected {type(error).__name__}: {_one_line(error)}", options, trace=True)


def run(parser: Callable[[], argparse.ArgumentParser] | None = None) -> NoReturn:
    """Run `main` as a process and exit with its code (SystemExit). Later Ctrl-Cs cannot interrupt the exit."""
    sys.path.append("")  # options may name modules of the working directory, as with `python -m`
    code = main(parser=parser)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise SystemExit(code)


def _prepare_streams() -> None:
    """Replace closed streams, and let the others accept text that the locale cannot encode."""
    # Undecodable input is refused later as a prompt. Output that the locale cannot encode is escaped.
    escape = "backslashreplace"
    for name, mode, errors in (("stdin", "r", "surrogateescape"), ("stdout", "w", escape), ("stderr", "w", escape)):
        stream = getattr(sys, name)
        if stream is None:
            empty = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115
            os.set_inheritable(empty.fileno(), True)  # it has the number of the closed stream, the lowest free one
            setattr(sys, name, empty)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _was_interrupted(error: BaseException | None) -> bool:
    """Return whether Ctrl-C caused `error`. Python wraps a KeyboardInterrupt that comes while a class is created."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _drop_output() -> None:
    """Discard the rest of standard output, so that flushing it at exit cannot fail (again)."""
    with contextlib.suppress(OSError, io.UnsupportedOperation):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, options: argparse.Namespace, trace: bool = False) -> int:
    if trace or getattr(options, "log_level", "") == "debug":
        import traceback

        traceback.print_exc()
    print(f"error: {message}", file=sys.stderr)
    return USAGE_ERROR


def _one_line(error: BaseException) -> str:
    return " ".join(text_with_notes(error).split())


if __name__ == "__main__":
    run()
