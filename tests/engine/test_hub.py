"""Models named by their hub ids, fetched from a hub of our own."""

from __future__ import annotations

import importlib
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import constants

from forkpoint.cli.main import main
from forkpoint.engine.hub import model_folder
from forkpoint.engine.llm import LLM
from forkpoint.errors import ForkpointError, ModelFolderError
from tests.hub import TOKEN, Hub, Repo, running_hub
from tests.server.running import start_server

Command = Callable[..., tuple[str, str]]
ID = "acme/tiny-hybrid"
ASK = ("generate", "--prompt", "Once upon", "--max-tokens", "4", "--temperature", "0", "--model")
UNWANTED = {
    "pytorch_model.bin": b"x",
    "original/model.safetensors": b"x",
    "consolidated.safetensors": b"x",  # a second copy of Mistral's weights
    "consolidated-00001-of-00002.safetensors": b"x",
    "model.gguf": b"x",
    "run.py": b"x",
}


@pytest.fixture
def client_after() -> Iterator[None]:
    """Let the hub's client read the environment again when `monkeypatch`, which begins later, has put it back."""
    yield
    importlib.reload(constants)


@pytest.fixture
def hub(client_after: None, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """One that has the tiny model, in the environment of the commands that a test runs."""
    with running_hub() as hub:
        hub.repos[ID] = Repo.of(tiny_model, **UNWANTED)
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        yield hub


@pytest.fixture
def forkpoint(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command in this process and return standard output and error of a command that ends with `code`."""

    def run(*words: str, code: int = 0) -> tuple[str, str]:
        importlib.reload(constants)
        ended = main(words)
        written = capsys.readouterr()
        assert ended == code, written.err
        return written.out, written.err

    return run


def fetched(name: str = ID, revision: str | None = None, weights: bool = True) -> str:
    """The folder of a model, or why there is none. The hub's client reads the environment anew."""
    importlib.reload(constants)
    try:
        return model_folder(name, revision=revision, weights=weights)
    except ForkpointError as error:
        return str(error)


def test_a_model_is_fetched_once_and_then_runs_without_a_network(
    hub: Hub, tiny_model: Path, forkpoint: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-m", "forkpoint", *ASK, ID]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    text, log = ended.stdout, ended.stderr
    assert f"model {ID} (revision main) of {hub.url}" in log
    assert hub.fetched() == {path.name for path in tiny_model.iterdir()}

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.requests.clear()
    assert forkpoint(*ASK, ID)[0] == text
    assert not hub.requests


def test_templates_by_name_are_fetched(hub: Hub) -> None:
    templates = {f"additional_chat_templates/{name}": b"{{ messages }}" for name in ("tool_use.jinja", "notes.txt")}
    hub.repos[ID].revisions["main"] |= {**templates, "other/rag.jinja": b"{{ messages }}"}
    folder = Path(fetched(weights=False))
    assert [path.name for path in folder.rglob("*.jinja") if path.parent != folder] == ["tool_use.jinja"]


def test_a_server_has_the_name_and_bench_serve_finds_the_tokenizer(
    hub: Hub, forkpoint: Command, tmp_path: Path
) -> None:
    server = start_server(Path(ID), tmp_path, "--max-model-len", "256", "--download-dir", str(tmp_path / "models"))
    try:
        server.wait_ready()
        (model,) = httpx2.get(f"{server.url}/v1/models").json()["data"]
        assert model["id"] == ID and Path(model["root"]).is_relative_to(tmp_path / "models")
        asked = ("--base-url", server.url, "--num-prompts", "2", "--random-input-len", "8", "--random-output-len", "2")
        assert "Successful requests" in forkpoint("bench", "serve", *asked, "--tokenizer", ID)[0]
        assert (tmp_path / "home" / "hub").is_dir()  # the tokenizer's files alone
        assert not list((tmp_path / "home" / "hub").rglob("*.safetensors"))
    finally:
        server.stop()


def test_python_takes_ids_and_revisions(hub: Hub) -> None:
    hub.repos[ID].revisions["v2"] = {**hub.repos[ID].revisions["main"], "generation_config.json": b'{"top_k": 7}'}
    importlib.reload(constants)
    with LLM(ID, revision="v2", log_level="error") as llm:
        assert llm.get_default_sampling_params().top_k == 7
        assert len(llm.generate([[1, 2, 3]], use_tqdm=False)) == 1


def test_the_simulator_needs_the_config_alone(hub: Hub, forkpoint: Command) -> None:
    forkpoint("simulate", "chat:sessions=2", "--model", ID, "--memory", "1")
    assert "config.json" in hub.fetched() and not any(name.endswith(".safetensors") for name in hub.fetched())


def test_a_cut_connection_is_taken_up_where_it_broke(hub: Hub) -> None:
    weights = random.Random(0).randbytes(11_000_000)
    hub.repos[ID].revisions["main"]["model.safetensors"] = weights
    hub.cuts["model.safetensors"] = 10_700_000
    assert (Path(fetched()) / "model.safetensors").read_bytes() == weights
    assert any(re.search(r"model.safetensors bytes=1\d{7}-$", line) for line in hub.requests)


def test_what_came_whole_is_kept_when_a_download_breaks_off(
    hub: Hub, forkpoint: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.cuts["tokenizer.json"], hub.cut_always = 0, True
    told = forkpoint(*ASK, ID, code=2)[1].splitlines()
    assert told[-1].startswith(f"error: fetching {ID} from {hub.url} broke off: ")
    assert told[-1].endswith("; run the same command again: complete files are kept")
    assert not any("Traceback" in line for line in told)

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # an incomplete folder is not taken for the model
    assert f"{ID} (revision main) is not, or not completely, in " in fetched()
    monkeypatch.delenv("HF_HUB_OFFLINE")

    hub.cuts.clear()
    hub.requests.clear()
    assert (Path(fetched()) / "tokenizer.json").is_file()
    assert "tokenizer.json" in hub.fetched() and "config.json" not in hub.fetched()


def test_ctrl_c_ends_a_download_at_once(hub: Hub, tmp_path: Path) -> None:
    """The other files would take minutes more: a reader that is told to stop does not wait for them."""
    hub.repos[ID].revisions["main"]["model.safetensors"] = bytes(60_000_000)
    hub.bytes_per_s = 3_000_000
    command = [sys.executable, "-m", "forkpoint", *ASK, ID]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        deadline = time.monotonic() + 60
        while not list((tmp_path / "home").rglob("*.incomplete")):
            assert time.monotonic() < deadline and running.poll() is None
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        assert running.wait(15) == 130


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("./nothing", "there is no model folder './nothing'; give the folder of a downloaded model, or a model's id"),
        ("/no/where", "there is no model folder '/no/where'"),
        ("some/where/else", "there is no model folder 'some/where/else'"),
        ("nothing", "there is no model folder 'nothing'"),
        ("~/model", "there is no model folder '~/model'"),
        (__file__, f"{__file__} is a file; give the folder with the model's config.json and safetensors files"),
    ],
)
def test_what_looks_like_a_path_is_no_matter_of_the_hub(name: str, told: str) -> None:
    with pytest.raises(ModelFolderError, match=re.escape(told)):
        model_folder(name)


def test_a_folder_wins_over_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ID).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert model_folder(ID) == ID


class TestRefusals:
    def test_no_such_model(self, hub: Hub) -> None:
        told = fetched("acme/absent")
        assert f"there is no folder 'acme/absent' here and no model of that name at {hub.url}" in told

    def test_no_such_revision(self, hub: Hub) -> None:
        assert f"{ID} has no revision 'v9'; give a branch, a tag or a commit" in fetched(revision="v9")

    def test_a_gated_model(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.repos[ID].gated = True
        told = f"{ID} is gated: ask for access at {hub.url}/{ID}, then set HF_TOKEN to a token of that account"
        assert told in fetched()  # 401
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        assert told in fetched()  # 403
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        assert Path(fetched(weights=False)).is_dir()

    def test_no_hub(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        told = fetched()
        assert f"{ID} cannot be fetched from http://127.0.0.1:{port}: " in told and "refused" in told
        assert "; check the network, set HF_ENDPOINT to a mirror, or give a model folder; " in told

    def test_offline(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert "HF_HUB_OFFLINE prevents fetching it" in fetched()
        assert not hub.requests

    def test_a_model_that_cannot_run_is_told_before_its_weights_come(self, hub: Hub) -> None:
        hub.repos[ID].revisions["main"]["config.json"] = b'{"architectures": ["RwkvForCausalLM"]}'
        assert "RwkvForCausalLM" in fetched()
        assert not any(name.endswith(".safetensors") for name in hub.fetched())

    def test_no_safetensors(self, hub: Hub, tiny_model: Path) -> None:
        """Repositories of GGUF files look so; some have the original's config.json."""
        config = (tiny_model / "config.json").read_bytes()
        for name, lost, files in (
            ("acme/quants", "safetensors files", {"config.json": config}),
            ("acme/bare", "config.json", {}),
            ("acme/mistral", "safetensors files", {"config.json": config, "consolidated.safetensors": b"x"}),
        ):
            hub.repos[name] = Repo({"main": {"model-Q4_K_M.gguf": b"x", "README.md": b"x", **files}})
            assert fetched(name) == (
                f"{name} holds no {lost} as transformers writes them; give the id of a model that does, such as the "
                "one that was converted to GGUF or another format"
            )

    def test_adapters(self, hub: Hub) -> None:
        hub.repos["acme/lora"] = Repo({"main": {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}})
        assert fetched("acme/lora") == (
            "acme/lora holds no config.json, only 'adapter_config.json': adapters (LoRA) do not run; merge this one "
            "into its base model, with peft's merge_and_unload"
        )

    def test_other_options_are_looked_at_first(self, hub: Hub, forkpoint: Command) -> None:
        assert "max_num_seqs=0" in forkpoint(*ASK, ID, "--max-num-seqs", "0", code=2)[1]
        assert not hub.requests
