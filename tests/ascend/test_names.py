"""torch_npu's wheel has the names that the platform reads of `torch.npu`, and registers the operators of a step."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import forkpoint
from forkpoint.platforms.accelerator import AcceleratorPlatform
from forkpoint.platforms.npu import NpuPlatform
from tests.ascend.operators import DRAFT_OPERATORS

VERSION = "2.13.0"
FOLDER = Path(__file__).parents[2] / ".ascend" / "wheels"


@pytest.fixture(scope="module")
def wheel() -> zipfile.ZipFile:
    """Download the wheel once. It is never installed, because importing it without CANN breaks `import torch`."""
    if not FOLDER.parent.exists():
        pytest.skip("make ascend downloads torch_npu's wheel")
    if not list(FOLDER.glob("torch_npu-*.whl")):
        wanted = ["--no-deps", "--python-version", "3.11", "--only-binary", ":all:", f"torch-npu=={VERSION}"]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "-d", str(FOLDER), *wanted]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"torch_npu {VERSION} cannot be had: {done.stderr.strip().splitlines()[-1:]}")
    return zipfile.ZipFile(next(FOLDER.glob("torch_npu-*.whl")))


def test_devices_are_named_by_their_platforms_alone() -> None:
    named = re.compile(r"""torch\.(cuda|npu)\b|["'](cuda|npu)(:\d*)?["']|torch_npu""")
    package = Path(inspect.getfile(forkpoint)).parent
    files = [path for path in package.rglob("*.py") if path.parent.name != "platforms"]
    assert len(files) > 200
    assert not [path for path in files if named.search(path.read_text())]


def asked() -> set[str]:
    """Return the attributes of torch's module that the platform reads."""
    tree = ast.parse(inspect.getsource(AcceleratorPlatform))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self._torch"
    } | {NpuPlatform.graph_class, "get_device_properties", "device_count"}


def test_names_are_there(wheel: zipfile.ZipFile) -> None:
    text = wheel.read("torch_npu/npu/__init__.py").decode()
    lists = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Assign)
             and ast.unparse(node.targets[0]) == "__all__"]  # fmt: skip
    public = {name for value in lists for name in ast.literal_eval(value)}
    assert len(asked()) > 12 and asked() <= public


def test_graphs_and_events_take_what_they_are_given(wheel: zipfile.ZipFile) -> None:
    def parameters(path: str, name: str) -> set[str]:
        (node,) = (x for x in ast.walk(ast.parse(wheel.read(path))) if isinstance(x, ast.ClassDef) and x.name == name)
        made = next(x for x in node.body if isinstance(x, ast.FunctionDef) and x.name in ("__new__", "__init__"))
        return {arg.arg for arg in (*made.args.args, *made.args.kwonlyargs)}

    assert {"pool", "capture_error_mode"} <= parameters("torch_npu/npu/graphs.py", "graph")
    assert "enable_timing" in parameters("torch_npu/npu/streams.py", "Event")


def test_operators_of_a_step_are_registered(wheel: zipfile.ZipFile) -> None:
    library = wheel.read("torch_npu/lib/libtorch_npu.so")
    for name in DRAFT_OPERATORS:  # or the form that makes its own result
        forms = {name, name.removesuffix(".out"), name.removesuffix("_out")}
        assert any(form.removeprefix("aten::").encode() + b"\0" in library for form in forms), name
