"""A word tokenizer on disk: every word is a token, and text survives the trip."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

NUM_WORDS = 500


def make_word_tokenizer(folder: Path) -> str:
    """`<eos>` and the words w0, w1, ... with a leading space each."""
    words = {"<eos>": 0, **{f"\u2581w{number}": number + 1 for number in range(NUM_WORDS)}}
    backend = Backend(models.WordLevel(words, unk_token="<eos>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(folder)
    return str(folder)
