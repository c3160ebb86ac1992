from __future__ import annotations

import inspect
import subprocess
import sys

import forkpoint
from forkpoint import errors
from forkpoint.version import installed_version


def test_every_public_name_is_there_and_sorted() -> None:
    assert list(forkpoint.__all__) == sorted(forkpoint.__all__, key=lambda name: (not name.isupper(), name))
    for name in forkpoint.__all__:
        assert getattr(forkpoint, name).__name__ == name


def test_a_shell_can_complete_every_public_name() -> None:
    code = "import forkpoint, sys; print(*dir(forkpoint)); print('torch' in sys.modules, forkpoint.__version__)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names, facts = shown.stdout.splitlines()
    assert {*forkpoint.__all__, "__version__"} <= {*names.split()}
    assert facts == f"False {installed_version()}"


def test_every_error_is_public_and_drawn_in_the_tree() -> None:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]
    assert errors.__doc__ is not None
    for kind in kinds:
        assert kind.__name__ in forkpoint.__all__
        line = next(line for line in errors.__doc__.splitlines() if kind.__name__ in line)
        depth = len(kind.__mro__) - len(errors.ForkpointError.__mro__)
        assert len(line) - len(line.lstrip()) == (2 + 2 * (depth - 1) if depth else 0)


def test_names_and_defaults_are_those_people_know() -> None:
    parameters = inspect.signature(forkpoint.SamplingParams).parameters
    known = {"n": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 16, "seed": None}
    assert {name: parameters[name].default for name in known} == known
    fields = forkpoint.RequestOutput.__dataclass_fields__
    assert {"request_id", "prompt", "prompt_token_ids", "outputs", "finished", "metrics"} <= set(fields)
    fields = forkpoint.CompletionOutput.__dataclass_fields__
    names = {"index", "text", "token_ids", "cumulative_logprob", "logprobs", "finish_reason", "stop_reason"}
    assert names <= set(fields)


def test_the_package_imports_without_torch() -> None:
    code = "import forkpoint, sys; forkpoint.SamplingParams(); print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"
