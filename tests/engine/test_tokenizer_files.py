"""Tokenizers of model folders as they are published: the files say how texts become ids, whatever class they name."""

from __future__ import annotations

import base64
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import regex
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, Qwen2Tokenizer

from forkpoint.engine.token_bytes import BYTE_OF_CHARACTER
from forkpoint.engine.tokenizer import Tokenizer
from forkpoint.errors import ModelFolderError
from tests.engine.tokenizers import CORPUS, SPECIALS, bytes_trainer, metaspace

# Words keep the character before them, digits are split in threes, and a run of punctuation keeps its line breaks.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = "In 12345678 days, don'T: foo_bar.baz(x)\n\n  y = 1000000;\t<|im_start|>user\n ok   x"


def split_words() -> Backend:
    """Byte-level BPE of words and digits that a regular expression finds: as Granite's, Olmo's and SmolLM's."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator([*CORPUS, *[TEXT] * 8], bytes_trainer(600))
    return backend


def write_folder(folder: Path, backend: Backend, model_type: str, **tokenizer_config: Any) -> str:
    """Write `backend` as the tokenizer of a folder of a model of this type, and return the folder's name."""
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    said = {"bos_token": "<s>", "eos_token": "<|im_end|>", **tokenizer_config}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return str(folder)


@pytest.mark.parametrize("model_type", ["llama", "granitemoehybrid", "qwen3_5", "kimi_linear"])
@pytest.mark.parametrize(
    "name", ["GPT2Tokenizer", "Qwen2TokenizerFast", "LlamaTokenizerFast", "GPTNeoXTokenizerFast", "TokenizersBackend"]
)
def test_ids_are_those_of_tokenizer_json_whatever_class_is_named(name: str, model_type: str, tmp_path: Path) -> None:
    """The classes of transformers 5 split texts in ways of their own, and leave the file's out."""
    for kind, backend in (("split", split_words()), ("metaspace", metaspace().backend)):
        folder = write_folder(tmp_path / kind, backend, model_type, tokenizer_class=name)
        found = Tokenizer.load(folder)
        assert found.encode(TEXT, add_special_tokens=False) == backend.encode(TEXT, add_special_tokens=False).ids
        assert found.decode(found.encode(TEXT), skip_special_tokens=True) == backend.decode(backend.encode(TEXT).ids)
        assert found.eos_token_id == backend.token_to_id("<|im_end|>")


def test_a_class_with_the_rules_of_tokenizer_json_stays(tmp_path: Path) -> None:
    """Qwen's files differ from the class in fields that do not change ids, and a second look would take seconds."""
    trained = json.loads(split_words().to_str())["model"]
    Qwen2Tokenizer(vocab=trained["vocab"], merges=list(map(tuple, trained["merges"]))).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    rules = json.loads(path.read_text())
    rules["pre_tokenizer"]["pretokenizers"][-1]["trim_offsets"] = False
    rules["decoder"] |= {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    path.write_text(json.dumps(rules))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert type(Tokenizer.load(str(tmp_path)).hf) is Qwen2Tokenizer
    del rules["normalizer"]
    path.write_text(json.dumps({**rules, "normalizer": {"type": "NFKC"}}))
    assert Tokenizer.load(str(tmp_path)).encode("\u2460") == Tokenizer.load(str(tmp_path)).encode("1")


def test_a_class_of_another_library_makes_way_for_tokenizer_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers prefers mistral-common's, which cannot stream, in folders of Mistral if it is installed."""
    backend = split_words()
    folder = write_folder(tmp_path / "mistral", backend, "mistral", tokenizer_class="LlamaTokenizerFast")
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *args, **options: SimpleNamespace(chat_template="x"))
    found = Tokenizer.load(folder)
    assert found.encode(TEXT, add_special_tokens=False) == backend.encode(TEXT, add_special_tokens=False).ids


KIMI_PIECES = (  # the pattern in the code of Moonshot's folders
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI_TEXTS = (
    "In 12345678 days, don'T: fooBar.BAZ(x)\n\n  y = 1000000;\t ok   x",
    "東京と大阪、日本語 naïve CAFÉ ǅungla 你好world 🙂👩‍💻 \r\n\r\n end ",
    "the quick brown fox jumps over the lazy dog and the dog sleeps on",
)


def kimi_folder(folder: Path) -> dict[bytes, int]:
    """Write the files of a tokenizer of Moonshot's, and return its tokens and their ids."""
    trained = json.loads(split_words().to_str())["model"]["vocab"]
    tokens = [bytes([byte]) for byte in range(256)]
    for text in trained:
        token = b"".join(bytes([BYTE_OF_CHARACTER[letter]]) for letter in text) if text not in SPECIALS else b""
        if len(token) > 1:
            tokens.append(token)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    folder.mkdir()
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    (folder / "tiktoken.model").write_text("".join(lines))
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_linear"}))
    first = len(tokens)
    named = {"[BOS]": first, "[EOS]": first + 1, "<|im_end|>": first + 2, "<|tool|>": first + 9}
    said = {
        "added_tokens_decoder": {str(n): {"content": text, "special": text != "<|tool|>"} for text, n in named.items()},
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
        "model_max_length": 1048576,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return ranks


def merged(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Return the ids of a piece of text: while a pair of neighbours makes a token, join the one with the lowest id."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while True:
        made = [(ranks[one + two], i) for i, (one, two) in enumerate(itertools.pairwise(parts)) if one + two in ranks]
        if not made:
            return [ranks[part] for part in parts]
        _, at = min(made)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_a_tiktoken_file_is_read_as_moonshots_code_reads_it(tmp_path: Path) -> None:
    """Kimi-Linear is published without a tokenizer.json."""
    ranks = kimi_folder(tmp_path / "kimi")
    found = Tokenizer.load(str(tmp_path / "kimi"))
    for text in KIMI_TEXTS:
        pieces = regex.findall(KIMI_PIECES, text, regex.V1)
        assert "".join(pieces) == text
        want = [token for piece in pieces for token in merged(piece.encode(), ranks)]
        assert found.encode(text) == want and len(want) < len(text.encode())
        assert found.decode(want, skip_special_tokens=True) == text
    first = len(ranks)
    assert found.encode("a[EOS]<|im_end|>") == [ranks[b"a"], first + 1, first + 2]
    assert found.encode(f"<|reserved_token_{first + 3}|>") == [first + 3]
    assert found.eos_token_id == first + 1 and found.hf.chat_template == "{{ messages }}"
    assert found.hf.name_or_path == str(tmp_path / "kimi")
    assert found.is_special("[EOS]") and not found.is_special("<|tool|>")


def test_kimi_sees_the_fields_of_tools_in_order(tmp_path: Path) -> None:
    """Moonshot's code sorts the fields, also inside of lists."""
    kimi_folder(tmp_path / "kimi")
    (tmp_path / "kimi" / "chat_template.jinja").write_text("{{ messages[0] | tojson }}{{ tools | tojson }}")
    hf = Tokenizer.load(str(tmp_path / "kimi")).hf
    tools = [{"type": "function", "function": {"name": "f", "enum": [{"b": 1, "a": [2, 1]}]}}]
    text = hf.apply_chat_template([{"role": "user", "content": "x"}], tools=tools, tokenize=False)
    assert text == (
        '{"role": "user", "content": "x"}'
        '[{"function": {"enum": [{"a": [2, 1], "b": 1}], "name": "f"}, "type": "function"}]'
    )


@pytest.mark.parametrize("text", ["[EOS]", "a"])
def test_a_special_token_of_two_ids_is_refused(text: str, tmp_path: Path) -> None:
    """It would get its first id, and each special token after it the id of the one before."""
    number = str(len(kimi_folder(tmp_path / "kimi")) + 3)
    path = tmp_path / "kimi" / "tokenizer_config.json"
    said = json.loads(path.read_text())
    said["added_tokens_decoder"][number] = {"content": text}
    path.write_text(json.dumps(said))
    with pytest.raises(ModelFolderError, match=r"tokenizer_config\.json gives a token more than one id; fetch"):
        Tokenizer.load(str(tmp_path / "kimi"))


@pytest.mark.parametrize("line", ["no base64 3", "YQ==", "YQ== x", "YQ== 5"])
def test_a_broken_tiktoken_file_is_named(line: str, tmp_path: Path) -> None:
    kimi_folder(tmp_path / "kimi")
    with (tmp_path / "kimi" / "tiktoken.model").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ModelFolderError, match=r"tiktoken\.model .*fetch the file again"):
        Tokenizer.load(str(tmp_path / "kimi"))
