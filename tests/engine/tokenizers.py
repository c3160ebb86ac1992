"""Real tokenizers of the kinds that models ship, small enough to train on the spot."""

from __future__ import annotations

import json

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from forkpoint.engine.tokenizer import Tokenizer

SPECIALS = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]
CORPUS = [
    "the quick brown fox jumps over the lazy dog and the dog sleeps on",
    "system user assistant tools answer in one sentence, please; the end of the answer",
    "naïve café; “quoted” déjà vu, 東京 and 大阪, emoji 👩‍💻🙂 and more text of every kind",
] * 8


def byte_level() -> Tokenizer:
    """Byte-level BPE, as Qwen's and Llama-3's."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(CORPUS, bytes_trainer(400))
    return _wrap(backend)


def bytes_trainer(vocab_size: int) -> trainers.BpeTrainer:
    """A trainer of byte-level BPE with the special tokens of these tests."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )


def metaspace() -> Tokenizer:
    """Characters with byte fallback, spaces as a mark, a leading space dropped: as Llama-2's."""
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", *SPECIALS, *bytes_], show_progress=False, limit_alphabet=60
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    plain = json.loads(backend.to_str())  # bytes are no special tokens
    plain["added_tokens"] = [token for token in plain["added_tokens"] if token["content"] not in bytes_]
    return _wrap(Backend.from_str(json.dumps(plain)))


def _wrap(backend: Backend) -> Tokenizer:
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", bos_token="<s>")
    hf.add_special_tokens({"additional_special_tokens": SPECIALS})
    return Tokenizer.wrap(hf)
