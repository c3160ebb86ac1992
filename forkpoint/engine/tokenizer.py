"""The tokenizer of a model folder: converts text to ids and ids to text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NoReturn

from forkpoint.checks import TEXT_OBJECTS, first_line, member, one_or_more, read_config, read_json
from forkpoint.engine.token_bytes import TokenBytes
from forkpoint.errors import InvalidPromptError, ModelFolderError
from forkpoint.foreign_files import is_lfs_pointer

# Tokens that open a tool call in the models' answers: Qwen, Granite and Nemotron; LFM2; Jamba; Kimi.
TOOL_CALL_OPENINGS: Final = ("<tool_call>", "<|tool_call_start|>", "<tool_calls>", "<|tool_calls_section_begin|>")
# Processors of multimodal models kept their chat template here before transformers 4.52. Tokenizers do not read it.
PROCESSOR_TEMPLATE: Final = "chat_template.json"


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A transformers tokenizer, and the `tokenizers` object inside it, which can stream.

    `hf` is None in a process that only converts ids to text (see `writer`).
    """

    hf: Any
    backend: Any
    _bytes: TokenBytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_bytes", TokenBytes(self.backend))

    @classmethod
    def load(cls, folder: str) -> Tokenizer:
        """Read the tokenizer of a local folder, without running any code of the folder.

        Raises ModelFolderError if there is none that can encode texts and stream. If config.json is the cause, raises
        what `load_config` raises.
        """
        if not Path(folder).is_dir():
            raise ModelFolderError(f"there is no model folder {folder!r}; give the path of a downloaded checkpoint")
        from forkpoint.engine.tokenizer_files import read_tokenizer  # imports much

        try:
            hf = read_tokenizer(folder)
        except ModelFolderError:
            raise
        except Exception as error:  # transformers raises many kinds here, and each means the same to the user
            cls._refuse(folder, error)
        of_processor = Path(folder) / PROCESSOR_TEMPLATE
        if getattr(hf, "chat_template", None) is None and of_processor.is_file():
            hf.chat_template = read_json(of_processor).get("chat_template")
        found = cls.wrap(hf)
        texts = {name: text.removeprefix("\ufeff") for name, text in found.templates.items()}
        if texts:  # Windows begins texts with a byte order mark
            hf.chat_template = texts if len(texts) > 1 else texts.get("default", texts)
        if not found.has_tokens:  # transformers has made one from config.json alone
            cls._refuse(folder, ValueError("none of its files has tokens"))
        try:  # some wrong fields are read only now
            found.encode("a")
            found.encode_with_offsets("a")
        except Exception as error:
            raise ModelFolderError(
                f"the tokenizer in {folder} cannot encode a text: {first_line(error)}; correct its "
                "tokenizer_config.json, name another folder with --tokenizer, or pass token ids with "
                "--skip-tokenizer-init"
            ) from error
        return found

    @staticmethod
    def _refuse(folder: str, error: Exception) -> NoReturn:
        if (Path(folder) / "config.json").exists():
            from forkpoint.models.registry import load_config

            load_config(folder)  # transformers reads config.json too, but its errors do not name the wrong file
        if is_lfs_pointer(Path(folder) / "tokenizer.json"):
            raise ModelFolderError(
                f"tokenizer.json of {folder} is a pointer of Git LFS; run 'git lfs pull' in the folder"
            ) from None
        reason = first_line(error)
        names = {path.name for path in Path(folder).glob("tokenizer.*")}
        if "tokenizer.model" in names and "tokenizer.json" not in names and find_spec("sentencepiece") is None:
            reason = "tokenizer.model is read with the packages sentencepiece and protobuf, which can be installed"
        raise ModelFolderError(
            f"no usable tokenizer in {folder}: {reason}; add tokenizer.json, name another folder with --tokenizer, or "
            "pass token ids with --skip-tokenizer-init"
        ) from error

    @classmethod
    def wrap(cls, hf: Any) -> Tokenizer:
        backend = getattr(hf, "backend_tokenizer", None)
        if backend is None:
            raise ModelFolderError(
                f"the tokenizer {type(hf).__name__} has no tokenizer.json form; convert it with transformers' "
                "AutoTokenizer and save_pretrained"
            )
        return cls(hf, backend)

    @classmethod
    def writer(cls, backend: str) -> Tokenizer:
        """Create a tokenizer, from the JSON that `backend.to_str()` returned, that only converts ids to text.

        Does not import transformers.
        """
        import tokenizers

        return cls(None, tokenizers.Tokenizer.from_str(backend))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a text's ids. Raises InvalidPromptError for lone surrogates, which UTF-8 cannot encode."""
        _require_unicode(text)
        # not verbose, because the engine itself checks the prompt's length
        return list(self.hf.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return ids without added special tokens, and the half-open character range of `text` that each id covers.

        Raises what `encode` raises.
        """
        _require_unicode(text)
        encoded = self.hf(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return list(encoded["input_ids"]), [tuple(pair) for pair in encoded["offset_mapping"]]

    def is_special(self, text: str) -> bool:
        """Return whether `text` is a single token that `skip_special_tokens` leaves out."""
        token = self.backend.token_to_id(text)
        return token is not None and not self.decode([token], skip_special_tokens=True)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return str(self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, which need not be whole characters; empty for an id without a token."""
        return self._bytes.of(token_id)

    @property
    def templates(self) -> dict[str, str]:
        """The model's chat templates by name. A single one is the `default`; `tool_use` is for prompts with tools."""
        given = getattr(self.hf, "chat_template", None)
        if not isinstance(given, dict):
            given = {"default": given}
        return {str(name): str(text) for name, text in given.items() if text}

    @property
    def has_tokens(self) -> bool:
        """Whether the vocabulary has tokens besides the added ones, such as special tokens."""
        added = {token.content for token in self.backend.get_added_tokens_decoder().values()}
        return not added.issuperset(self.backend.get_vocab(with_added_tokens=False))

    @property
    def longest_token(self) -> int:
        """The number of characters of the longest token. A text with more characters per token cannot fit."""
        return max(map(len, self.backend.get_vocab()), default=1)

    @property
    def eos_token_id(self) -> int | None:
        value = self.hf.eos_token_id
        return None if value is None else int(value)

    @property
    def tool_call_token_ids(self) -> frozenset[int]:
        """The ids of this vocabulary that open a tool call in an answer."""
        known = (self.backend.token_to_id(opening) for opening in TOOL_CALL_OPENINGS)
        return frozenset(token_id for token_id in known if token_id is not None)


def eos_token_ids(
    folder: str, tokenizer: Tokenizer | None, overrides: Mapping[str, Any] | None = None
) -> frozenset[int]:
    """Return the ids that end a completion: of generation_config.json, else config.json, and the tokenizer's.

    `overrides` change fields of config.json. Raises ModelFolderError for a file that is broken or has another value
    there.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        if not path.is_file():
            continue
        values = read_json(path) if name == "generation_config.json" else read_config(path.parent, overrides)
        objects = (values, *(values.get(inner) for inner in TEXT_OBJECTS))
        given = [ids for ids in (member(each, "eos_token_id") for each in objects) if ids is not None]
        if given:
            value = given[0]
            ids = one_or_more(value)
            if not all(type(each) is int and each >= 0 for each in ids):
                raise ModelFolderError(f"{path} has eos_token_id={value!r}; a token id or a list of them is needed")
            found.update(ids)
            break
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return frozenset(found)


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidPromptError(
            f"character {error.start} of the prompt is the lone surrogate U+{ord(text[error.start]):04X}, which "
            "encodes no character; give valid Unicode text"
        ) from error
