from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import distributions
from pathlib import Path

import pytest

from benchmarks.random_model import make_random_model
from forkpoint.cli.main import main
from forkpoint.cli.options import GROUPS, engine_options, sampling_params
from forkpoint.cli.parser import build_parser
from forkpoint.config import EngineConfig
from tests.conftest import TINY


@pytest.fixture(scope="session")
def model(tiny_model: Path) -> str:
    return str(tiny_model)


@pytest.fixture(autouse=True)
def no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")


def test_every_option_has_a_flag() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "forkpoint.cli.main", "generate", "--help=all"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for _, kind in GROUPS:
        for field in fields(kind):
            if field.metadata:
                assert "--" + field.name.replace("_", "-") in shown


def test_flags_reach_the_configuration() -> None:
    line = (
        "generate --model M --no-enable-prefix-caching --mamba-cache-mode none --max-num-batched-tokens 512 "
        "--deterministic --kv-cache-memory-bytes 123 --temperature 0 --stop a --stop b --seed 5"
    )
    arguments = build_parser().parse_args(line.split())
    config = EngineConfig.from_flat(**engine_options(arguments))
    assert (config.cache.enable_prefix_caching, config.cache.mamba_cache_mode) == (False, "none")
    assert (config.scheduler["max_num_batched_tokens"], config.kv_cache_memory_bytes) == (512, 123)
    assert (config.deterministic, config.seed, config.model) == (True, 5, "M")
    params = sampling_params(arguments, config)
    assert (params.temperature, params.stop, params.max_tokens) == (0.0, ["a", "b"], 128)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("123", 123),
        ("2GiB", 2 << 30),
        ("1.5G", 3 << 29),
        ("4k", 4000),
        ("4K", 4096),
        ("3MB", 3_000_000),
        ("1 TiB", 1 << 40),
    ],
)
def test_sizes_have_units(text: str, size: int) -> None:
    for flag in ("--kv-cache-memory-bytes", "--max-body-bytes"):
        assert size in vars(build_parser().parse_args(["serve", flag, text])).values()


def test_version_and_commands_need_no_torch() -> None:
    code = "import sys; from forkpoint.cli.parser import build_parser; build_parser(); print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0


ERRORS = [
    (["generate", "--model", "/nowhere", "--prompt", "x"], "no model folder"),
    (["generate", "--model", "MODEL", "--prompt", "x", "--temperature", "-1"], "temperature"),
    (["generate", "--model", "MODEL", "--prompt", "x", "--kv-cache-memory-bytes", "10"], "needs"),
    (["generate", "--model", "MODEL", "--prompt", ""], "empty"),
    (["generate", "--model", "MODEL", "--prompt", "x", "--max-num-seqs", "0"], "max_num_seqs"),
    (["generate", "--model", "MODEL", "--prompt", "x", "--stream", "--n", "2"], "--stream"),
    (["generate", "--prompt", "x", "--max-model-length", "9"], "did you mean --max-model-len? (see forkpoint generate"),
    (["serve", "x", "--kv-disk-pth", "/y", "--max-num-sq", "3"], "did you mean --kv-disk-path, --max-num-seqs? (see"),
    (["serve", "x", "y", "--kv-disk-pth=/z"], "arguments: y --kv-disk-pth=/z; did you mean --kv-disk-path? (see"),
    (["generate", "--kv-cache-memory-bytes", "4GIG"], "'4GIG' is not a size"),
    (["generate", "--model", "MODEL", "--prompt", "x", "--chat-template", "{{ bad"], "not a Jinja template"),
    (["bench", "serve", "--save-result", "--result-dir", "/dev/null/x"], "cannot be created"),
    (["simulate", "chat", "--json", "/nowhere/x.json"], "/nowhere is not a folder"),
    (["simulate", "chat", "--json", "/"], "is a folder"),
    (["simulate", "chat", "--memory", "inf"], "--memory 'inf'"),
    (["simulate", "chat", "--replicas", "0"], "replicas=0 is not allowed; give an integer from 1"),
    (["simulate", "chat", "--max-num-seqs", "0"], "max_num_seqs=0 is not allowed; give an integer from 1"),
    (["simulate", "chat", "--max-num-batched-tokens", "63"], "max_num_batched_tokens=63 is not allowed"),
    (["simulate", "chat", "--arrival-scale", "nan"], "arrival_scale=nan is not allowed; give a number from 0"),
    (["simulate", "chat", "--think-scale", "-1"], "think_scale=-1.0 is not allowed; give a number from 0"),
    (["generate", "--model", "", "--prompt", "x"], "no config.json in ''"),
    (["serve", ""], "no config.json in ''"),
    (["fly"], "invalid choice"),
    (["sevre"], "did you mean serve?"),
    ([], "COMMAND"),
]


@pytest.mark.parametrize(("arguments", "text"), ERRORS)
def test_errors_are_one_line_and_exit_2(
    model: str, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [model if argument == "MODEL" else argument for argument in arguments]
    try:
        code = main([*given, "--log-level", "error"] if "MODEL" in arguments else given)
    except SystemExit as ended:
        code = int(ended.code or 0)
    error = capsys.readouterr().err
    assert code == 2
    assert error.startswith("error: ") and error.count("\n") == 1 and text in error


def test_a_broken_checkpoint_is_one_line_too(tmp_path: Path) -> None:
    folder = make_random_model(tmp_path, TINY)
    (folder / "model.safetensors").write_bytes(b"garbage")
    command = [sys.executable, "-m", "forkpoint.cli.main", "generate", "--model", str(folder), "--prompt", "x"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert shown.returncode == 2
    assert shown.stderr.splitlines()[-1].startswith("error: ") and "Traceback" not in shown.stderr


def test_options_name_modules_of_the_working_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from forkpoint.cache.eviction import EvictionPolicy\n"
        "class Mine(EvictionPolicy):\n"
        "    def key(self, entry): return 0.0\n"
    )
    script = tmp_path / "bin" / "forkpoint"  # as pip writes it, beside which Python looks for modules
    script.parent.mkdir()
    script.write_text("from forkpoint.cli.entry import run\nrun()\n")
    command = [sys.executable, str(script), "simulate", "chat:sessions=1", "--systems", "forkpoint:eviction=mine:Mine"]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert shown.returncode == 0 and "mine:Mine" in shown.stdout, shown.stderr


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch, stdin: str = "") -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    return main([*arguments, "--log-level", "error"])


def test_generate_from_an_argument_and_from_standard_input(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["generate", "--model", model, "--temperature", "0", "--max-tokens", "9"]
    texts = []
    for extra, stdin in ([["--prompt", "hello"], ""], [[], "hello"], [["--prompt", "hello", "--stream"], ""]):
        assert run([*options, *extra], monkeypatch, stdin) == 0
        shown = capsys.readouterr()
        texts.append(shown.out)
        assert "0 of 5 prompt tokens cached (short)" in shown.err
    assert len(set(texts)) == 1 and len(texts[0]) == 10


def test_generate_names_several_completions(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["generate", "--model", model, "--max-tokens", "3", "--n", "2", "--prompt", "a", "--prompt", "b"]
    assert run(options, monkeypatch) == 0
    headers = [line for line in capsys.readouterr().out.splitlines() if line.startswith("---")]
    assert headers == [f"--- prompt {p}, completion {c}" for p in (0, 1) for c in (0, 1)]


def test_chat_shows_what_was_cached_and_starts_over(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["chat", "--model", model, "--temperature", "0", "--max-tokens", "20", "--system-prompt", "rules " * 40]
    assert run(options, monkeypatch, "hello\n\nagain\n/reset\nhello\n") == 0
    lines = capsys.readouterr().out.splitlines()
    statistics = [line for line in lines if "prompt tokens cached" in line]
    cached = [int(line[1:].split(" of ")[0]) for line in statistics]
    assert cached[0] == 0 and cached[1] >= 256 and cached[2] >= 256
    assert "first token after" in statistics[0] and "(new conversation)" in lines
    answers = [line for line in lines if line not in statistics and line != "(new conversation)"]
    assert answers[0] == answers[2] != answers[1]


def test_chat_goes_on_after_a_refused_message(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["chat", "--model", model, "--max-tokens", "4", "--max-model-len", "128"]
    assert run(options, monkeypatch, "x" * 300 + "\nhello\n") == 1
    shown = capsys.readouterr()
    assert "error: the prompt is too long" in shown.err and shown.out.count("prompt tokens cached") == 1


def test_chat_asks_one_thing_and_ends(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["chat", "--model", model, "--max-tokens", "4", "-q", "hello"], monkeypatch, "ignored\n") == 0
    assert capsys.readouterr().out.count("prompt tokens cached") == 1


def test_compile_starts_an_engine_and_ends(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", model, "--max-num-seqs", "4", "--log-level", "info"]) == 0
    shown = capsys.readouterr()
    assert f"the kernels for {model} with these options are compiled" in shown.out and "weights loaded" in shown.err
    assert main(["compile", model, "--max-num-seqs", "0"]) == 2


def test_collect_env_names_the_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect-env"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{name}: " in shown for name in ("Python version", "torch", "transformers"))


def test_a_folder_named_ray_is_not_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray writes its logs to /tmp/ray, and commands find modules in the working folder."""
    if any(distributions(name="ray")):
        pytest.skip("ray is installed")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "ray").mkdir()
    assert main(["deploy"]) == 2
    assert "replicas run on Ray Serve, which is not installed" in capsys.readouterr().err
