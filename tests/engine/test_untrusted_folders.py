"""A model folder from anybody: none of its code runs, and each broken file of it is named."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from forkpoint.demo.model import default_model
from forkpoint.engine.chat import read_template
from forkpoint.engine.tokenizer import Tokenizer, eos_token_ids
from forkpoint.errors import ModelFolderError, UnsupportedModelError
from forkpoint.models.fields import class_defaults
from forkpoint.models.registry import load_config
from tests.json_files import change_json

ROOT = Path(__file__).parents[2]
FOLDERS = ("forkpoint", "benchmarks", "evaluation", "studies", "train", "scripts", "native")
PICKLES_OF_OUR_OWN = {"reader_process.py", "reader_answers.py", "bounded.py"}  # between a process and its child
CODE = """
open({marker!r}, "a").write(__name__)
from transformers import PreTrainedTokenizerFast, PretrainedConfig
class MyTokenizer(PreTrainedTokenizerFast): pass
class MyConfig(PretrainedConfig): model_type = "mine"
"""
AUTO_MAP = {
    "AutoConfig": "evil.MyConfig",
    "AutoModelForCausalLM": "evil.MyConfig",
    "AutoTokenizer": ["evil.MyTokenizer", "evil.MyTokenizer"],
}


def calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]


def test_nothing_trusts_the_code_of_a_folder() -> None:
    """Every call that could run it says that it must not, and nothing unpickles."""
    found, wrong = 0, []
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for call in calls(ast.parse(path.read_text())):
            name, given = ast.unparse(call.func), {word.arg: ast.unparse(word.value) for word in call.keywords}
            if name.endswith((".from_pretrained", ".from_config")) and "save" not in name:
                found += 1
                if given.get("trust_remote_code") != "False":
                    wrong.append(f"{path.name}: {ast.unparse(call)}")
            if name in ("pickle.load", "pickle.loads", "torch.load") and path.name not in PICKLES_OF_OUR_OWN:
                wrong.append(f"{path.name}: {ast.unparse(call)}")
    assert found >= 3 and not wrong


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(default_model(), tmp_path / "model")
    (tmp_path / "model" / "evil.py").write_text(CODE.format(marker=str(tmp_path / "marker")))
    return tmp_path / "model"


def test_code_of_a_folder_never_runs(folder: Path) -> None:
    """Not even where somebody says yes to everything that is asked."""
    kinds: dict[str, dict[str, dict[str, Any]]] = {
        "tokenizer": {"tokenizer_config.json": {"auto_map": AUTO_MAP, "tokenizer_class": "MyTokenizer"}},
        "config": {"config.json": {"auto_map": AUTO_MAP}},
        "unknown": {
            "config.json": {"auto_map": AUTO_MAP, "model_type": "mine"},
            "tokenizer_config.json": {"auto_map": AUTO_MAP, "tokenizer_class": None, "backend": None},
        },
    }
    for kind, files in kinds.items():
        shutil.copytree(folder, folder.parent / kind)
        for name, fields in files.items():
            change_json(folder.parent / kind / name, **fields)
    script = (
        "import sys\n"
        "from forkpoint import LLM, SamplingParams\n"
        "from forkpoint.engine.tokenizer import Tokenizer\n"
        "for folder in sys.argv[1:]:\n"
        "    tokenizer = Tokenizer.load(folder)\n"
        "    with LLM(folder, max_model_len=128) as llm:\n"
        "        llm.generate('Hello', SamplingParams(max_tokens=2), use_tqdm=False)\n"
        "    print('answered', tokenizer.decode(tokenizer.encode('Hello'), skip_special_tokens=True))\n"
    )
    arguments = [sys.executable, "-c", script, *(str(folder.parent / kind) for kind in kinds)]
    done = subprocess.run(arguments, input="y\n" * 20, text=True, capture_output=True, cwd=ROOT)
    assert done.stdout.splitlines() == ["answered Hello"] * len(kinds), done.stderr
    assert not (folder.parent / "marker").exists()


DEEP = '{"a":' * 100_000
BROKEN = {
    "max_position_embeddings": ({"max_position_embeddings": 2**60}, "max_position_embeddings=1152921504606846976"),
    "hidden_size": ({"hidden_size": "256"}, "hidden_size='256'; an integer from 1 to"),
    "layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
    "vocab_size": ({"vocab_size": 2**40}, "vocab_size=1099511627776"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_wrong_field_is_named_whoever_reads_the_folder(kind: str, folder: Path) -> None:
    fields, text = BROKEN[kind]
    change_json(folder / "config.json", **fields)
    with pytest.raises(ModelFolderError, match=text):
        load_config(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelFolderError, match=text):
        Tokenizer.load(str(folder))


def test_a_tokenizer_that_cannot_encode_is_refused_when_it_loads(folder: Path) -> None:
    change_json(folder / "tokenizer_config.json", model_max_length="many")
    with pytest.raises(ModelFolderError, match=r"cannot encode a text: .*correct its tokenizer_config\.json"):
        Tokenizer.load(str(folder))


def test_a_folder_without_a_tokenizer_is_refused(folder: Path) -> None:
    """Transformers makes an empty tokenizer from config.json, which encodes any text as no tokens."""
    (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 11\n")
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json of .* is a pointer of Git LFS; run 'git lfs pull'"):
        Tokenizer.load(str(folder))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ModelFolderError, match=r"no usable tokenizer in .*: none .* has tokens; add tokenizer\.json"):
        Tokenizer.load(str(folder))


@pytest.mark.skipif(find_spec("sentencepiece") is not None, reason="sentencepiece is installed")
def test_a_missing_package_for_tokenizer_model_is_named(folder: Path) -> None:
    """transformers names another one, by which it tries to read the file next."""
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    change_json(folder / "tokenizer_config.json", tokenizer_class="LlamaTokenizer")
    with pytest.raises(
        ModelFolderError, match=r"tokenizer\.model is read with the packages sentencepiece and protobuf"
    ):
        Tokenizer.load(str(folder))
    (folder / "tokenizer.json").write_text("{")  # many folders hold both
    with pytest.raises(ModelFolderError, match=r"no usable tokenizer in .*: Expecting property name"):
        Tokenizer.load(str(folder))


def test_templates_lose_their_byte_order_mark(folder: Path) -> None:
    """Windows writes one, and it would become the beginning of every prompt."""
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text("\ufeff" + template)
    assert Tokenizer.load(str(folder)).hf.chat_template == template
    assert read_template(str(folder / "chat_template.jinja")) == template


def test_deep_large_and_special_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = (folder / "config.json").read_text()
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_text(DEEP)
        with pytest.raises(
            ModelFolderError, match=rf"{name} cannot be read as JSON: its objects are nested too deeply"
        ):
            load_config(folder)
        (folder / "config.json").write_text(kept)
    with pytest.raises(ModelFolderError, match=r"generation_config\.json .* nested too deeply"):
        eos_token_ids(str(folder), None)
    (folder / "generation_config.json").unlink()
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/dev/zero")
    with pytest.raises(ModelFolderError, match=r"config\.json is not a regular file"):
        load_config(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(kept)
    monkeypatch.setattr("forkpoint.checks.MAX_JSON_BYTES", 10)
    with pytest.raises(ModelFolderError, match="at most 10 are read"):
        load_config(folder)


@pytest.mark.parametrize("value", ["x", -1, [2, None], True, 1.5])
def test_an_end_that_is_not_a_token_id(value: Any, folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    for read in (load_config, lambda path: eos_token_ids(str(path), None)):
        with pytest.raises(ModelFolderError, match=r"generation_config\.json has eos_token_id=.*a token id or a list"):
            read(folder)


@pytest.mark.parametrize("inner", ["text_config", "llm_config"])
def test_an_end_that_only_the_text_model_has(inner: str, folder: Path) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    change_json(folder / "config.json", **{inner: {"eos_token_id": [7, 9]}})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"eos_token_id": None}))
    assert eos_token_ids(str(folder), None) == {7, 9}


def test_an_old_transformers_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match=r"transformers \d.* has no LaterConfig, .* install a newer one"):
        class_defaults("later.LaterConfig")


def test_what_transformers_itself_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> None:
        raise ModuleNotFoundError("No module named 'httpx2'", name="httpx2")

    monkeypatch.setattr("forkpoint.models.fields.import_module", import_module)
    with pytest.raises(
        UnsupportedModelError, match=r"cannot be imported: No module named 'httpx2'; install what it needs"
    ):
        class_defaults("llama.LlamaConfig")


def test_the_architecture_is_refused_before_its_quantisation(tmp_path: Path) -> None:
    gpt_oss = {"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(gpt_oss))
    with pytest.raises(UnsupportedModelError, match="is of a GptOssForCausalLM"):
        load_config(tmp_path)
