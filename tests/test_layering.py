"""Imports point one way; docs/architecture.md draws it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import forkpoint

ROOT = Path(forkpoint.__file__).parent
VALUES = {"errors", "checks", "config", "json_options", "image_families"}
VALUES |= {"transfer_options", "media_limits", "option_rules", "images", "params", "outputs", "plugins", "version"}
VALUES |= {
    "sizes",
    "vllm_options",
    "vllm_params",
    "foreign_files",
    "freed_memory",
    "python_process",
    "quick_imports",
    "shared_arrays",
}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "checks": {"errors", "foreign_files"},
    "params": {"checks", "errors", "vllm_params"},
    "vllm_params": {"checks", "errors"},
    "outputs": {"params"},
    "config": {"checks", "errors", "image_families", "json_options", "media_limits", "option_rules", "plugins"}
    | {"transfer_options"},
    "sizes": {"errors"},
    "vllm_options": {"checks", "config", "errors", "sizes"},
    "media_limits": {"checks", "errors", "json_options"},
    "option_rules": {"errors"},
    "transfer_options": {"checks", "errors", "json_options"},
    "json_options": {"checks", "errors"},
    "images": set(),
    "quick_imports": set(),
    "foreign_files": set(),
    "freed_memory": set(),
    "shared_arrays": set(),
    "python_process": set(),
    "image_families": {"checks", "errors"},
    "plugins": {"errors"},
    "cache": VALUES,
    "sched": {"cache"} | VALUES,
    "routing": {"cache", "obs"} | VALUES,
    "sim": {"sched", "cache", "routing.router"} | VALUES,
    "platforms": VALUES,
    "ops": {"platforms.table"} | VALUES,
    "models": {"ops", "cache.layer_spec"} | VALUES,
    "disk": {"cache.tier_entries"},
    "peer": {"cache.tier_entries", "cache.peer_offers", "disk.namespace", "python_process", "shared_arrays"},
    "runtime": {
        "platforms",
        "models",
        "ops",
        "cache.layout",
        "cache.tier_entries",
        "disk.store",
        "peer.link",
        "peer.offered",
        "peer.ring",
    }
    | {"cache.layer_spec", "sched.plan"}
    | VALUES,
    "obs": {"cache.layout", "cache.counters"} | VALUES,
    "grammar": {"sched.plan", "sched.request", "engine.tokenizer"} | VALUES,
    "worker": {"platforms", "sched", "cache.layout", "cache.tier_entries", "cache.tree", "disk", "runtime", "models"}
    | {"ops", "obs", "peer", "cache.layer_spec", "cache.peer_offers"}
    | VALUES,
    "engine": {"worker", "grammar", "sched", "cache", "models.registry", "obs", "routing.wire"} | VALUES,
    "server": {"engine", "worker.child", "obs", "cache.hashing", "routing.wire"} | VALUES,
    "client": VALUES,
    "demo": {"engine"} | VALUES,
    "bench": {"client", "engine.hub", "engine.tokenizer", "sim"} | VALUES,
    "fleet": {"routing", "server", "worker.child", "obs", "cache.peer_offers"} | VALUES,
    "cli": {"platforms.table", "client", "engine", "models", "demo", "server", "sim", "bench", "obs"}
    | {"fleet", "routing.router"}
    | VALUES,
    "__init__": {"engine", "cache.policies", "models.registry", "ops.select"} | VALUES,
    "__main__": {"cli"},
}
DEVICE_WORD = re.compile(r"'(cpu|cuda|hip|npu|xpu|mps|musa|hpu)(:.*)?'")
DEVICE_MODULE = re.compile(r"torch\.(cuda|npu|xpu|mps|version)|.*\.is_(cuda|cpu|npu|xpu|mps)|tl\.extra\.\w+")
GDC = {f"tl.extra.cuda{name}" for name in ("", ".gdc_wait", ".gdc_launch_dependents")}  # where launches overlap
NO_TORCH = ("cache", "sched", "sim", "routing")
OUTSIDE = {"benchmarks", "evaluation", "studies", "train", "scripts", "tests"}  # folders of a checkout, never installed


def modules() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> Iterator[str]:
    """Dotted names under `forkpoint` that a file imports, wherever in the file it does."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    part = part_of(path)
    allowed = ALLOWED[part] | {part}
    for name in imports(path):
        assert name.partition(".")[0] not in OUTSIDE, f"the package may not import {name}"
        if not name.startswith("forkpoint."):
            continue
        inner = name.removeprefix("forkpoint.")
        assert any(inner == a or inner.startswith(a + ".") for a in allowed), f"{part} may not import {inner}"


def test_no_two_modules_import_each_other() -> None:
    """Nor three in a circle, wherever in the file they do; the folders of a checkout included."""
    folders = (ROOT, *(ROOT.parent / name for name in sorted(OUTSIDE)))
    paths = {dotted(path): path for folder in folders for path in folder.rglob("*.py")}
    graph = {
        name: {found for imported in imports(path) for found in [in_or_of(imported, paths)] if found not in ("", name)}
        for name, path in paths.items()
    }
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError, which names them


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def in_or_of(imported: str, paths: Mapping[str, Path]) -> str:
    """The module that an import names, or that has what it names; "" if it is none of ours."""
    return next((name for name in (imported, imported.rpartition(".")[0]) if name in paths), "")


@pytest.mark.parametrize("part", [part for part in NO_TORCH if (ROOT / part).is_dir()])
def test_no_torch_where_the_simulator_runs(part: str) -> None:
    names = [
        "forkpoint." + ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in modules()
        if part_of(path) == part and path.name != "__init__.py"
    ]
    code = f"import importlib, sys; [importlib.import_module(n) for n in {names!r}]; print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


def may_name_a_device(node: ast.AST) -> bool:
    """Whether it is worth the time to write the node out, which most attributes are not."""
    match node:
        case ast.Constant(value=str()) | ast.Attribute(value=ast.Attribute(attr="extra")) | ast.Attribute(attr="type"):
            return True
        case ast.Attribute(attr=name):
            return name.startswith("is_") or name in ("cuda", "npu", "xpu", "mps", "version")
    return False


def test_only_the_platforms_name_a_kind_of_device() -> None:
    """Not by a word, a module of torch's, or a look at which kind a tensor is on."""
    for path in modules():
        if part_of(path) == "platforms":
            continue
        for node in filter(may_name_a_device, nodes(path)):
            shown = ast.unparse(node)
            named = DEVICE_WORD.fullmatch(shown) or DEVICE_MODULE.fullmatch(shown) or shown.endswith("device.type")
            named = named and not (path.name == "launch.py" and shown in GDC)
            assert not named, f"{path}:{getattr(node, 'lineno', 0)} names a kind of device: {shown}"


def test_only_families_and_their_mixer_know_a_kind_of_layer() -> None:
    """What a layer keeps is read off its specs, whatever it is called."""
    for path in modules():
        if part_of(path) not in ("ops", "models"):
            found = re.findall(r"linear_attention|gdn|gated_delta", path.read_text(), re.IGNORECASE)
            assert not found, path


def test_what_runs_a_step_knows_no_state_cell() -> None:
    """Specs name the operators of a cell, so a new cell changes nothing in these folders."""
    operator = re.compile(r"(conv|recurrence|scan|window)_(prefill|update|decode|verify|record|fold|flush)")
    for path in (path for path in modules() if part_of(path) in ("cache", "sched", "runtime", "worker", "engine")):
        assert not operator.search(path.read_text()), path


# Fields of the cache's shared objects, and the only files (of cache/, but for the scheduler's) that write them.
WRITERS = {
    "children pins condemned": "tree",
    "checkpoint": "store fetched",  # fetched: of nodes that are in no tree
    "removed": "tree store",
    "last_used num_hits superseded num_readers": "store",
    "num_expected": "manager",
    "queue_number": "eviction_queue",
    "note": "manager eviction learnt",
    "num_planned num_sent_blocks num_survived_tokens hit read_from": "manager",
    "num_confirmed": "manager scheduler",
    "detached": "filing scheduler",
    "has_duplicates": "manager filing",
}


def test_shared_objects_are_written_where_they_say() -> None:
    written: dict[str, set[str]] = {}
    for path in (path for path in modules() if part_of(path) in ("cache", "sched", "engine", "obs")):
        for node in nodes(path):
            given = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in (inner for one in given if one is not None for inner in ast.walk(one)):
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) != "self":
                    written.setdefault(target.attr, set()).add(path.stem)
    for names, files in WRITERS.items():
        for name in names.split():
            assert written.get(name, set()) == set(files.split()), name
