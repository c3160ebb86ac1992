"""Plain words: replaced words stay away, classes share no name, and docstrings begin with a verb or a noun."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import forkpoint

ROOT = Path(forkpoint.__file__).parents[1]
FOLDERS = ("forkpoint", "benchmarks", "evaluation", "studies", "train", "scripts", "tests", "docs")
SUFFIXES = {".py", ".md", ".cpp", ".h", ".json", ".yaml"}
# (what is not said, what is said instead, where it means something else)
SYNONYMS = (
    (r"exp_(ptr|pos|dst)", "save_ptr, save_pos, save_dst", ()),
    (r"exports?|exported", "save", ("studies/emulations/vllm.py", "tests/page/", "docs/clients.md", "docs/server.md")),
    (r"recordings", "graphs", ()),
    (r"(captured|capturing) (graphs?|steps?|shapes?)|graphs captured", "recorded graphs", ()),
    (r"(?i:look[-_]ahead)", "async_scheduling", ()),
    (r"slot_mapping", "key_places", ()),
    (r"NO_UNIT", "NO_BLOCK, NO_SLOT or NO_ROW", ()),
    (r"CheckpointError", "ModelFolderError", ()),
    (r"Origin\.DECLARED|declared boundar(y|ies)|boundary declared", "breakpoint", ()),
    (r"num_told_blocks|told anew", "num_sent_blocks, sent", ()),
    (r"num_known(_tokens)?", "num_tokens_at_admission, num_tokens", ("studies/emulations/",)),
    (r"PendingSave|PendingStep", "StateSave, SubmittedStep", ()),
    (r"planned_step|num_last(?!_)", "last_step, num_last_step", ("forkpoint/engine/chat", "tests/test_layering")),
    (r"goes_ahead|planned ahead|plan(s|ning)? ahead|rows?\.ahead", "plans_early, planned early, optimistic", ()),
    (r"recurrence_settle|settle_leaving|settles? the lease", "recurrence_flush, release, DecodeBoundaries.resolve", ()),
    (r"lease\.frozen|frozen lease", "detached", ()),
    (r"refile|file_due|queue_place", "requeue, push_due, queue_number", ()),
    (r"unsaved", "skipped", ()),
    (r"WindowColumns|SyntheticWindows|windows? of drafts", "SpanColumns, span", ()),
)


@cache
def texts() -> list[tuple[str, str]]:
    paths = [ROOT / "README.md", *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")))]
    return [
        (path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
        for path in paths
        if path.suffix in SUFFIXES and path != Path(__file__)
    ]


@pytest.mark.parametrize(("word", "instead", "elsewhere"), SYNONYMS, ids=[instead for _, instead, _ in SYNONYMS])
def test_synonyms_stay_away(word: str, instead: str, elsewhere: tuple[str, ...]) -> None:
    pattern = re.compile(rf"(?<![A-Za-z])({word})(?![A-Za-z])")
    found = [
        f"{name}: {hit[0]}"
        for name, text in texts()
        for hit in pattern.finditer(text)
        if not name.startswith(elsewhere)
    ]
    assert not found, f"say {instead}"


def test_public_classes_share_no_name() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "forkpoint").rglob("*.py")):
        for name in re.findall(r"^class ([A-Za-z]\w*)", path.read_text(encoding="utf-8"), re.MULTILINE):
            homes[name].append(path.relative_to(ROOT).as_posix())
    assert len(homes) > 300
    shared = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert not shared, f"give each class a name of its own: {shared}"


def docstrings() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "forkpoint").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield f"{path.relative_to(ROOT).as_posix()}:{getattr(node, 'lineno', 1)}", text


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    """A docstring that begins with one of these words leaves out what it is about."""
    found = list(docstrings())
    assert len(found) > 2000
    riddles = [place for place, text in found if re.match(r"(Of|As|That|Which|Where|So|By)\b", text)]
    assert not riddles, "begin with a verb in the imperative, or with a noun"
