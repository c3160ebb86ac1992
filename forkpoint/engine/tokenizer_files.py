"""Reads a transformers tokenizer from the files of a model folder, without running any code of the folder."""

from __future__ import annotations

import base64
import binascii
import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from forkpoint.checks import member, read_json
from forkpoint.engine.token_bytes import CHARACTER_OF_BYTE
from forkpoint.errors import ModelFolderError
from forkpoint.quick_imports import transformers_delayed

TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
TIKTOKEN: Final = "tiktoken.model"
KIMI_CLASS: Final = "TikTokenTokenizer"  # the class in the code of Moonshot's folders
# Moonshot's pieces of a text: runs of Chinese characters, words with or without capitals, up to three digits, others.
_LETTERS: Final = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_SHORTENED: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PIECES: Final = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_LETTERS}]*[\p{{Ll}}{_LETTERS}]+{_SHORTENED}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_LETTERS}]+[\p{{Ll}}{_LETTERS}]*{_SHORTENED}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
KIMI_RESERVED: Final = 256  # ids after those of tiktoken.model, each of which is a special token
_FLAGS: Final = ("byte_fallback", "fuse_unk", "ignore_merges")  # fields of a BPE model


@transformers_delayed()
def read_tokenizer(folder: str) -> Any:
    """Return a transformers tokenizer. It splits texts as the folder's tokenizer.json says, if there is one.

    Raises many kinds of errors.
    """
    from transformers.models.auto.tokenization_auto import AutoTokenizer
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

    if _is_kimi(Path(folder)):
        return _read_kimi(Path(folder))
    try:
        hf = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        try:  # the folder may name a class or model_type that transformers lacks, without needing it
            return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception:
            raise error from None
    path = Path(folder) / TOKENIZER
    if type(hf) is PreTrainedTokenizerFast or not path.is_file():
        return hf
    backend = getattr(hf, "backend_tokenizer", None)  # mistral-common's class has none
    if backend is not None and not _splits_otherwise(backend, path):
        return hf
    found = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if backend is not None:  # special tokens around a text stay as transformers and vLLM add them
        found.backend_tokenizer.post_processor = backend.post_processor
    return found


def _splits_otherwise(backend: Any, path: Path) -> bool:
    """Return whether a class's tokenizer splits or decodes texts in another way than tokenizer.json says.

    Many classes of transformers 5 read only the vocabulary of the file, and bring their own normalizer and splitter.
    """
    said = read_json(path)
    model = said.get("model")
    # the same rules without a vocabulary, which takes long to read
    rules = {**said, "model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": [], "post_processor": None}
    own = tokenizers.Tokenizer.from_str(json.dumps(rules))
    first, other = ([_rule(each.normalizer), _rule(each.pre_tokenizer), _rule(each.decoder)] for each in (own, backend))
    flags = [(bool(member(model, name)), bool(getattr(backend.model, name, False))) for name in _FLAGS]
    return first != other or any(one != two for one, two in flags)


def _rule(part: Any) -> Any:
    """Return those settings of a tokenizer's part that can change ids or decoded text."""

    def kept(value: Any, names: Collection[str]) -> Any:
        if isinstance(value, list):
            return [kept(each, names) for each in value]
        if not isinstance(value, dict):
            return value
        return {name: kept(each, names) for name, each in value.items() if name not in names}

    if part is None:
        return None
    is_decoder = isinstance(part, decoders.Decoder)
    without_effect = ("trim_offsets", "add_prefix_space", "use_regex") if is_decoder else ("trim_offsets",)
    return kept(json.loads(part.__getstate__()), without_effect)


def _is_kimi(folder: Path) -> bool:
    if (folder / TOKENIZER).exists() or not (folder / TIKTOKEN).is_file():
        return False
    path = folder / TOKENIZER_CONFIG
    return path.is_file() and read_json(path).get("tokenizer_class") == KIMI_CLASS


def _read_kimi(folder: Path) -> Any:
    """Return the tokenizer of a folder of Moonshot's, which has a tiktoken.model and code, but no tokenizer.json."""
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

    class KimiTokenizer(PreTrainedTokenizerFast):  # type: ignore[misc]  # mypy does not look into the library
        """Shows the fields of tools in order, as Moonshot's class does."""

        def apply_chat_template(self, conversation: Any, tools: Any = None, **options: Any) -> Any:
            return super().apply_chat_template(conversation, tools=_in_order(tools), **options)

    ranks = _read_ranks(folder / TIKTOKEN)
    backend = tokenizers.Tokenizer(
        models.BPE({_text(token): rank for token, rank in ranks.items()}, _merges(ranks), ignore_merges=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(KIMI_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    named = read_json(folder / TOKENIZER_CONFIG).get("added_tokens_decoder")
    added = []
    for token_id in range(len(ranks), len(ranks) + KIMI_RESERVED):
        said = member(named, str(token_id))
        text = str(member(said, "content") or f"<|reserved_token_{token_id}|>")
        added.append(tokenizers.AddedToken(text, special=member(said, "special") is not False, normalized=False))
    backend.add_tokens(added)
    if backend.get_vocab_size() != len(ranks) + KIMI_RESERVED:
        raise ModelFolderError(f"{folder / TOKENIZER_CONFIG} gives a token more than one id; fetch the file again")
    with TemporaryDirectory() as place:
        backend.save(str(Path(place) / TOKENIZER))
        for name in (TOKENIZER_CONFIG, "special_tokens_map.json", "chat_template.jinja"):
            if (folder / name).is_file():
                shutil.copyfile(folder / name, Path(place) / name)
        hf = KimiTokenizer.from_pretrained(place, local_files_only=True, trust_remote_code=False)
    hf.name_or_path = str(folder)
    return hf


def _in_order(value: Any) -> Any:
    """Return a JSON value with the fields of all its objects sorted by name."""
    if isinstance(value, Mapping):
        return {name: _in_order(value[name]) for name in sorted(value)}
    return [_in_order(each) for each in value] if isinstance(value, list) else value


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Return the id of each token in a file whose lines have a token in base64 and its id. Raises ModelFolderError."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ModelFolderError(
                f"line {number} of {path} is not a token in base64 and its id; fetch the file again"
            ) from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ModelFolderError(f"{path} does not hold each id from 0 once; fetch the file again")
    return ranks


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that join to another token, in the order of its id."""
    found: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        made = [(one, two) for one, two in pairs if one in ranks and two in ranks]
        made.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        found += [(_text(one), _text(two)) for one, two in made]
    return found


def _text(token: bytes) -> str:
    return "".join(map(CHARACTER_OF_BYTE.__getitem__, token))
