"""--help: an overview that fits a screen or so, and ways to every option."""

from __future__ import annotations

import functools
import re

import pytest

from forkpoint.cli.parser import build_parser
from forkpoint.vllm_options import TABLE

LARGE = ("serve", "deploy", "generate", "chat", "run-batch", "bench serve")


parser = functools.cache(build_parser)


def shown(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(line.split())
    out, err = capsys.readouterr()
    assert (ended.value.code, err) == (0, ""), err
    return out


def flags(text: str) -> set[str]:
    return set(re.findall(r"^  (?:-\w+(?: \w+)?, )?(--[\w-]+)", text, re.MULTILINE)) - {"--help"}


@pytest.fixture(autouse=True)
def width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.mark.parametrize("command", LARGE)
def test_the_overview_is_short_and_the_groups_have_everything(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    overview, everything = shown(f"{command} --help", capsys), shown(f"{command} --help=all", capsys)
    assert command != "serve" or "--kv-cache-dtype" in flags(overview)
    assert len(overview.splitlines()) <= 60 < len(everything.splitlines())
    assert f"{len(flags(everything)) - len(flags(overview))} more options" in overview
    (groups,) = re.findall(r"--help=GROUP .*: (.*)", overview)
    listed = shown(f"{command} --help=listgroup", capsys)
    together: set[str] = set()
    for group in groups.split(", "):
        assert re.search(rf"^  {group} ", listed, re.MULTILINE)
        found = flags(shown(f"{command} --help={group}", capsys))
        assert found and not found & together
        together |= found
    assert together == flags(everything)


def test_the_overview_names_what_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    overview, everything = shown("run-batch --help", capsys), shown("run-batch --help=all", capsys)
    assert {"--input-file", "--output-file"} <= flags(overview)
    for text in (overview, everything):
        assert text.startswith("usage: forkpoint run-batch -i PATH -o PATH [options]\n")
    assert shown("compile --help", capsys).startswith("usage: forkpoint compile [MODEL] [options]\n")


def test_a_word_finds_options_by_name_and_description(capsys: pytest.CaptureFixture[str]) -> None:
    assert flags(shown("serve --help=max_model_len", capsys)) == {"--max-model-len"}
    assert {"--max-num-seqs", "--max-num-batched-tokens"} <= flags(shown("serve --help=max-num", capsys))
    assert "--uds" in shown("serve --help=unix", capsys)
    assert shown("serve -h", capsys) == shown("serve --help=", capsys) == shown("serve M --port 1 --help", capsys)


@pytest.mark.parametrize(("word", "meant"), [("max-modl-len", "max-model-len"), ("cp-ops", "cpu-ops")])
def test_a_word_of_nothing_is_an_error(word: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(["serve", f"--help={word}"])
    told = capsys.readouterr().err
    assert ended.value.code == 2 and f"did you mean {meant}?" in told and "scheduler" in told


def test_a_flag_of_vllm_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert "refused: --max-open-requests bounds all" in shown("serve --help=max-num-queued-reqs", capsys)
    text = " ".join(shown("run-batch --help=block_size", capsys).split())
    assert "--block-size BLOCK_SIZE vLLM's; accepts any value, without effect: a block has 64 tokens" in text
    assert "--mamba-block-size" not in text and "vLLM's" not in shown("serve --help=max-num", capsys)


def test_every_flag_of_vllm_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    table = shown("serve --help=vllm", capsys)
    assert table == shown("run-batch --help=vllm", capsys) and max(map(len, table.splitlines())) <= 80
    for name in (flag.split("/")[0] for row in TABLE for flag in row.flags.split()):
        assert name in shown(f"serve --help={name}", capsys) and name in table.split()


def test_similar_flags_are_those_that_help_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """A flag of vLLM's is named only if it is nearly the given one, and no flag of one letter is."""
    for given, similar in (
        ("--block-sizes", "did you mean --block-size?"),
        ("--speculative-model", "did you mean --speculative-config?"),
        ("-m", "arguments: -m (see"),
    ):
        with pytest.raises(SystemExit):
            parser().parse_args(["serve", given])
        assert similar in capsys.readouterr().err


def test_small_commands_show_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert "collect-env" in shown("--help", capsys)
    assert "more options" not in shown("collect-env --help", capsys)
