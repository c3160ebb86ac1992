"""A checkpoint that says given texts word for word, so that tests can send any answer through the real server.

The model is a Llama whose layers add nothing to the residual stream: only the last token decides the next token. Each
piece of a text is one token of the vocabulary, so a test chooses how an answer is split into tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.server.running import RunningServer, start_server

SERVED_NAME = "scripted"
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
END = SPECIALS[1]
# `think`, a template variable, opens the thinking in the prompt.
CHAT_TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% if think %}<think>{% endif %}{{ marker }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class ScriptedModel:
    """The folder of a checkpoint and what it can say.

    `tokens` has the texts of each script's tokens by the script's name, without the end token. `markers` has the white
    space that begins each script when a prompt ends with it.
    """

    folder: Path
    tokens: Mapping[str, tuple[str, ...]]
    markers: Mapping[str, str]

    def text(self, name: str) -> str:
        return "".join(self.tokens[name])


def write_scripted_model(
    folder: Path,
    scripts: Mapping[str, Sequence[str]],
    *,
    template: str = CHAT_TEMPLATE,
    num_positions: int = 4096,
    after: Mapping[str, str] | None = None,
    special: Sequence[str] = (),
) -> ScriptedModel:
    """Write a checkpoint that says `scripts`, each given as the pieces that become its tokens.

    A request chooses a script by the template variable `script`, or by a last message whose text is the script's name.
    Otherwise the first script is said. `template` must end its prompts with `{{ marker }}`. A prompt that ends with a
    character of `after` instead (one byte in UTF-8) begins the script of that name. Pieces that are in `special` become
    special tokens.

    Two tokens cannot have the same text, so a piece that another token already has is joined with the next piece, and
    at the end of a script with the piece before it. Raises ValueError for a script that has no text of its own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    used = set(SPECIALS)
    tokens = {name: _distinct_tokens(name, pieces, used) for name, pieces in scripts.items()}
    markers = {name: "\n" + " " * (number + 3) + "\n" for number, name in enumerate(scripts)}
    tokenizer = _tokenizer([*markers.values(), *(token for script in tokens.values() for token in script)], special)
    ids: dict[str, int] = tokenizer.get_vocab()
    following: dict[int, int] = {}
    for name, script in tokens.items():
        chain = [markers[name], *script, END]
        following |= {ids[token]: ids[successor] for token, successor in pairwise(chain)}
    for character, name in (after or {}).items():
        following[ids[f"<0x{ord(character):02X}>"]] = ids[tokens[name][0]]
    _write_weights(folder, following, len(ids), num_positions, ids[END])
    tokenizer.chat_template = _choose_marker(markers) + template
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids[END]], "do_sample": False}))
    return ScriptedModel(folder, tokens, markers)


@contextmanager
def scripted_server(
    folder: Path, scripts: Mapping[str, Sequence[str]], *flags: str, **options: Any
) -> Iterator[RunningServer]:
    """Serve a model that says `scripts` under the name SERVED_NAME; `options` are those of `write_scripted_model`."""
    model = write_scripted_model(folder / "model", scripts, **options)
    running = start_server(model.folder, folder, "--served-model-name", SERVED_NAME, *flags)
    try:
        yield running.wait_ready()
    finally:
        assert running.stop() == 0, running.log


def chat_body(script: str, **fields: Any) -> dict[str, Any]:
    """Return the body of a chat completion that says `script`; `chat_template_kwargs` are added to the choice."""
    body = {"model": SERVED_NAME, "messages": [{"role": "user", "content": "hello"}], "temperature": 0, **fields}
    return body | {"chat_template_kwargs": {"script": script, **fields.get("chat_template_kwargs", {})}}


def _distinct_tokens(name: str, pieces: Sequence[str], used: set[str]) -> tuple[str, ...]:
    """Join pieces until none is in `used`, which gains them."""
    tokens: list[str] = []
    joined = ""
    for piece in pieces:
        joined += piece
        if joined and joined not in used:
            tokens.append(joined)
            used.add(joined)
            joined = ""
    while joined and (joined in used or not tokens):
        if not tokens:
            raise ValueError(f"script {name!r} is a token of another script: give it a text of its own")
        last = tokens.pop()
        used.remove(last)
        joined = last + joined
    if joined:
        tokens.append(joined)
        used.add(joined)
    return tuple(tokens)


def _tokenizer(added: Sequence[str], special: Sequence[str]) -> PreTrainedTokenizerFast:
    """A token for each byte, for each of SPECIALS and of `added`, which decode to exactly their text."""
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, clean_up_tokenization_spaces=False)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIALS})
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=text in special) for text in added])
    return tokenizer


def _choose_marker(markers: Mapping[str, str]) -> str:
    """The beginning of a chat template that sets `marker`."""
    first = next(iter(markers))
    return (
        f"{{%- set markers = {json.dumps(markers)} %}}{{%- set said = (messages | last).content %}}"
        "{%- if script is defined %}{%- set marker = markers[script] %}"
        "{%- elif said is string and said in markers %}{%- set marker = markers[said] %}"
        f"{{%- else %}}{{%- set marker = markers[{json.dumps(first)}] %}}{{%- endif %}}"
    )


def _write_weights(folder: Path, following: Mapping[int, int], vocab_size: int, num_positions: int, end: int) -> None:
    """Write weights and config: each token of `following` has a dimension of its own, which the head maps to the next
    token. The layer's projections are zero."""
    hidden = -(-max(len(following), 64) // 64) * 64
    embedding, head = torch.zeros(vocab_size, hidden), torch.zeros(vocab_size, hidden)
    for dimension, (token, successor) in enumerate(following.items()):
        embedding[token, dimension] = 1.0
        head[successor, dimension] = 4.0
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": num_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": end,
    }
    shapes = {
        "self_attn.q_proj": (64, hidden),
        "self_attn.k_proj": (32, hidden),
        "self_attn.v_proj": (32, hidden),
        "self_attn.o_proj": (hidden, 64),
        "mlp.gate_proj": (64, hidden),
        "mlp.up_proj": (64, hidden),
        "mlp.down_proj": (hidden, 64),
    }
    weights = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": torch.ones(hidden)}
    weights |= {f"model.layers.0.{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    for name in ("input_layernorm", "post_attention_layernorm"):
        weights[f"model.layers.0.{name}.weight"] = torch.ones(hidden)
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
