"""What the documentation names is there: files, tests, modules, commands, flags."""

from __future__ import annotations

import argparse
import ast
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import forkpoint
from forkpoint.cli.options import Parser
from forkpoint.cli.parser import build_parser

ROOT = Path(forkpoint.__file__).parents[1]
WIDTH = 100
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```\w*\n(.*?)^```|((?:^ {4} *\S[^\n]*\n)+)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
PROGRAMS = r"(?:forkpoint|benchmarks|evaluation|scripts|studies|train)\b"
COMMAND = re.compile(
    rf"^ *(?:\$ |[A-Z_]+=\S+ |[^|\n]+\| )*(?:\$\w+/bin/)?"
    rf"(forkpoint|python -m {PROGRAMS}[\w.]*|python {PROGRAMS}[\w/]*\.py)((?: +[^|\s].*)?)$",
    re.MULTILINE,
)
INLINE = re.compile(r"`((?:[^`\n]|\n(?!\s*\n))+)`")  # on one line of a paragraph or more
RUN = re.compile(rf"python -m ({PROGRAMS}[\w.]*)")
BY_PATH = re.compile(rf"python ({PROGRAMS}[\w/]+\.py)")
ALONE = ("benchmarks/before_after.py",)  # imports nothing of the checkout itself
FILE = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*/?")
# Files of checkpoints, of other projects and of users.
ELSEWHERE = frozenset({"config.json", "generation_config.json", "tokenizer.json", "block_table.py"})
SUFFIXES = (".py", ".md", ".json", ".cpp", ".yaml")
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@EACH_PAGE
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if "://" not in target and not target.startswith("#"):
            found = (page.parent / target.partition("#")[0]).resolve()
            assert found.exists(), target
            assert page.parent == ROOT or found.is_relative_to(ROOT / "docs"), f"{target} is no page of the site"


@EACH_PAGE
def test_lines_are_wrapped(page: Path) -> None:
    """Rows of tables, which cannot be, are left out, and lines of one link alone."""
    for line in page.read_text().splitlines():
        alone = re.fullmatch(r"\s*(?:[-*] )?!?\[[^\]]*\]\(\S+\)\S?", line)
        assert len(line) <= WIDTH or line.startswith("|") or alone, line


@EACH_PAGE
def test_files_that_are_named_exist(page: Path) -> None:
    """A name with a slash starts at the root, the package or the page's folder. A bare name is a file of the
    repository or one of ELSEWHERE."""
    for name in CODE.findall(page.read_text()):
        if not (FILE.fullmatch(name) and name.endswith(SUFFIXES)):
            continue
        if "/" in name:
            assert any(any(base.glob(name)) for base in (ROOT, ROOT / "forkpoint", page.parent)), name
        else:
            assert name in ELSEWHERE or name.startswith((".", "*")) or name in repository_names(), name


def test_functions_that_are_named_exist() -> None:
    """A name after the name of a Python file is defined in that file; a method after the name of its class."""
    num_seen = 0
    for page in PAGES:
        for name, found in re.findall(r"`([\w./]+\.py)`\s+`([A-Za-z_][\w.]*)`", page.read_text()):
            tree = ast.parse((ROOT / "forkpoint" / name).read_text())
            scope: list[ast.stmt] = tree.body
            for part in found.split("."):
                inside = [node for node in scope if isinstance(node, ast.ClassDef | FUNCTIONS) and node.name == part]
                assert inside, f"{page.name}: {name} has no {found}"
                scope = inside[0].body
            num_seen += 1
    assert num_seen > 30


@cache
def repository_names() -> frozenset[str]:
    """The names, without folders, of all files that git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return frozenset(Path(line).name for line in listed.stdout.splitlines())


@cache
def source_of_tests() -> str:
    return "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))


@EACH_PAGE
def test_tests_that_are_named_exist(page: Path) -> None:
    for name in CODE.findall(page.read_text()):
        if re.fullmatch(r"test_\w+", name):
            assert f"def {name}" in source_of_tests(), name
        elif re.fullmatch(r"Test\w+", name):
            assert f"class {name}" in source_of_tests(), name


def test_modules_that_are_run_exist() -> None:
    for page in PAGES:
        for name in RUN.findall(page.read_text()):
            path = ROOT / name.rstrip(".").replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), f"{page.name}: {name}"


def test_no_file_of_a_checkout_is_run_by_its_path() -> None:
    """Python would then not find the checkout's other folders, such as `benchmarks`, which files import."""
    folders = ("benchmarks", "evaluation", "scripts", "studies", "train")
    for path in (*PAGES, *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))):
        found = BY_PATH.findall(path.read_text())
        assert not [name for name in found if name not in ALONE], f"{path}: say python -m"


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """The programs in a text's code and their words, without commands that are shortened by an ellipsis.

    Brackets around optional words are dropped, and the first of `alternatives|like|these` is taken.
    """
    blocks = "".join("".join(found) for found in FENCED.findall(text)).replace("\\\n", " ")
    inline = "\n".join(" ".join(found.split()) for found in INLINE.findall(FENCED.sub("", text)))
    for program, command in COMMAND.findall(f"{blocks}\n{inline}"):
        if "..." not in command:
            words = shlex.split(re.sub(r"[][]|(?<=\w)\|\w+", "", command), comments=True)
            yield program.removeprefix("python ").removeprefix("-m "), words


def texts() -> Iterator[tuple[Path, str]]:
    """All pages, and the docstrings of all modules that may be programs."""
    for page in (*PAGES, *ROOT.glob("*/README.md")):
        yield page, page.read_text()
    for folder in ("forkpoint", "benchmarks", "evaluation", "scripts", "studies", "train"):
        for path in (ROOT / folder).rglob("*.py"):
            yield path, f"{ast.get_docstring(ast.parse(path.read_text())) or ''}\n"


@cache
def parser_of(program: str) -> argparse.ArgumentParser:
    """The parser to which `python -m PROGRAM`, or `python PROGRAM.py`, gives its words."""
    asked: list[argparse.ArgumentParser] = []

    def stop(self: argparse.ArgumentParser, *_: object) -> None:
        asked.append(self)
        sys.exit()

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.setattr(sys, "path", [*sys.path])
        if program.endswith(".py"):
            runpy.run_path(str(ROOT / program), run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__")
    return asked[0]


@pytest.mark.filterwarnings("ignore:.* found in sys.modules:RuntimeWarning")
def test_commands_parse(capsys: pytest.CaptureFixture[str]) -> None:
    """Each option that a command gives exists. A program that is named without words is not loaded."""
    num_parsed = 0
    for path, text in texts():
        for program, words in commands(text):
            if not words:
                continue
            try:
                parser_of(program).parse_args(words)
            except SystemExit as ended:
                error = capsys.readouterr().err
                named_only = len(words) <= 2 and re.search(r"are required|expected one|choice: '[A-Z]+'", error)
                assert ended.code == 0 or named_only, f"{path}: {program} {words}: {error}"
            num_parsed += 1
    assert num_parsed > 120


def test_flags_of_the_tables_are_there() -> None:
    known = {flag for parser in all_parsers(build_parser()) for flag in parser._option_string_actions}
    num_seen = 0
    for page in PAGES:
        if page.parent.name == "benchmarks" or "simulator" in page.parts:
            continue  # they name flags of what they compare with
        for line in FENCED.sub("", page.read_text()).splitlines():
            for flag in re.findall(r"(?<![\w`-])`(--[a-z][\w-]*)", line) if line.startswith("| `--") else []:
                assert flag in known, f"{page.name}: {flag}"
                num_seen += 1
    assert num_seen > 25


def all_parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    if isinstance(parser, Parser) and parser.fill is not None:
        parser.fill(parser)
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from all_parsers(child)
