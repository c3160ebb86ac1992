"""Train the tokenizer of the demo model on generated dialogues, and write its files.

    python -m train.tokenizer --output demo_model

The same seed and versions of `tokenizers` and of the generator give the same files.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.random_model import CHAT_TEMPLATE
from evaluation.dialogue import END_OF_TEXT, IM_END, IM_START
from evaluation.tasks import make_training_dialogue

SPECIAL_TOKENS = (IM_START, IM_END, END_OF_TEXT)  # ids 0, 1, 2
MAX_TOKENS = 8192
SEED, NUM_DIALOGUES, VOCAB_SIZE = 0, 4000, 1536  # those of the model's files
CODE = re.compile(r"[A-Z]{2}(?=[0-9]{2})")


def corpus(seed: int, num_dialogues: int) -> Iterator[str]:
    """Yield the contents of messages. Special tokens separate messages, and nothing merges across them.

    Made-up words and the letters of values such as KX71 are left out, so that they are spelled and take up no tokens.
    """
    rng = random.Random(seed)
    for _ in range(num_dialogues):
        dialogue = make_training_dialogue(rng, 1000)
        for message in dialogue.messages if dialogue.task != "made_up" else ():
            yield CODE.sub("", f"{message.role}\n{message.content}")


def train(seed: int, num_dialogues: int, vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE in which each word of the tasks is one token.

    Each byte has a token too, so any text can be written and read back. Digits are single tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(seed, num_dialogues), trainer)
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    fast.add_special_tokens({"additional_special_tokens": list(SPECIAL_TOKENS)})
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    ends = [fast.convert_tokens_to_ids(token) for token in (IM_END, END_OF_TEXT)]
    generation = {"do_sample": False, "eos_token_id": ends, "pad_token_id": ends[1]}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tokenizer of the demo model.")
    parser.add_argument("--output", type=Path, default=Path("demo_model"))
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--num-dialogues", type=int, default=NUM_DIALOGUES)
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE, help="at most; fewer if each word has a token")
    options = parser.parse_args()
    write(train(options.seed, options.num_dialogues, options.vocab_size), options.output)


if __name__ == "__main__":
    main()
