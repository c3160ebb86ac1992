"""Flags out of a file."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from forkpoint.cli.parser import build_parser
from forkpoint.cli.vllm_flags import notice_lines

FILE = """
model: from/file
port: 8001
served_model_name: [one, two]
api-key: secret
enable-prefix-caching: false
access-log: true
enable_dev_endpoints: false
kv-cache-memory-bytes: 512MiB
structured-outputs-config: {backend: xgrammar, disable_any_whitespace: true}
pipeline-parallel-size: 1
chat-template: "-starts with a dash"
"""


def parse(tmp_path: Path, text: str, *arguments: str) -> argparse.Namespace:
    path = tmp_path / "flags.yaml"
    path.write_text(text)
    return build_parser().parse_args(["serve", *arguments, "--config", str(path)])


def test_a_file_stands_for_its_flags(tmp_path: Path) -> None:
    options = vars(parse(tmp_path, FILE))
    assert ("config" not in options and "enable_dev_endpoints" not in options) or not options["enable_dev_endpoints"]
    expected = {
        "model": "from/file",
        "port": 8001,
        "served_model_name": ("one", "two"),
        "api_key": ("secret",),
        "enable_prefix_caching": False,
        "access_log": True,
        "kv_cache_memory_bytes": 512 * 2**20,
        "structured_outputs_config": '{"backend": "xgrammar", "disable_any_whitespace": true}',
        "chat_template": "-starts with a dash",
    }
    assert {name: options.get(name) for name in expected} == expected


def test_the_command_line_wins(tmp_path: Path) -> None:
    options = parse(tmp_path, FILE, "my/model", "--port", "9", "--served-model-name", "three", "--no-access-log")
    assert (options.model_tag, "model" in vars(options)) == ("my/model", False)
    assert (options.port, options.served_model_name, options.access_log) == (9, ("three",), False)
    assert options.api_key == ("secret",)


def test_flags_that_change_nothing_are_told_wherever_they_are_given(tmp_path: Path) -> None:
    options = parse(tmp_path, "block-size: 16\nswap-space: 9", "--swap-space", "4", "--trust-remote-code")
    assert [line.split()[0] for line in notice_lines(options)] == [
        "--swap-space",
        "--trust-remote-code",
        "--block-size",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_modl_len: 5", "'max_modl_len' is not a flag of this command; did you mean max-model-len?"),
        ("access-log: 'false'", "access-log='false' is not allowed; give true or false"),
        ("access-log: 1", "access-log=1 is not allowed; give true or false"),
        ("port: true", "port: true is not allowed; give a text or a number"),
        ("port:", "port: null is not allowed"),
        ("port: [1, 2]", "invalid int value: '[1, 2]'"),
        ("pipeline-parallel-size: 2", "2 is not possible here"),
        ("config: other.yaml", "is not a flag"),
        ("- port", "holds a list"),
        ("port: {", "is not YAML"),
        ("1: 2", "is not a flag"),
    ],
)
def test_what_a_file_says_wrongly_is_one_line(
    tmp_path: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(tmp_path, text)
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.startswith("error: ") and error.count("\n") == 1 and says in error, error


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    for path, says in (("/nowhere/x.yaml", "No such file"), ("flags.json", "ends in .yaml")):
        with pytest.raises(SystemExit):
            build_parser().parse_args(["serve", "--config", path])
        assert says in capsys.readouterr().err
