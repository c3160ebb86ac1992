"""`forkpoint complete`."""

from __future__ import annotations

import argparse
import sys

from forkpoint.cli.generate import standard_input
from forkpoint.cli.options import sampling_fields
from forkpoint.cli.remote import Remote
from forkpoint.cli.stats import answer_line
from forkpoint.client.answer import Answer
from forkpoint.client.protocol import Delta
from forkpoint.client.server import COMPLETIONS
from forkpoint.errors import ServerError


def complete(options: argparse.Namespace) -> int:
    """Print completions on standard output as they come, cache statistics on standard error; 1 if one failed."""
    failed = False
    prompts = options.prompt or [standard_input()]
    with Remote(options.url, model_name=options.model_name, api_key=options.api_key) as remote:
        for prompt in prompts:
            answer = Answer()
            try:
                remote.stream(COMPLETIONS, {"prompt": prompt, **sampling_fields(options)}, answer, _show)
            except ServerError as error:
                failed = True
                print(f"error: {error}", file=sys.stderr)
                continue
            finally:
                print()
            print(answer_line(answer), file=sys.stderr)
    return int(failed)


def _show(delta: Delta) -> None:
    print(delta.text, end="", flush=True)
