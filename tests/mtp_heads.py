"""Heads for multi-token prediction, added to saved models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import FAMILIES, make_state_sensitive
from tests.json_files import change_json


def add_mtp(folder: Path, name: str = "num_nextn_predict_layers") -> None:
    """Give a saved model of one file an MTP head whose layer is a changed copy of its first attention layer."""
    path, generator = folder / "model.safetensors", torch.Generator().manual_seed(3)
    weights = load_file(path)
    prefix = min(key.partition("self_attn.")[0] for key in weights if ".self_attn." in key and ".layers." in key)
    hidden = weights[f"{prefix}input_layernorm.weight"].shape[0]
    for key in [key for key in weights if key.startswith(prefix)]:
        copy = weights[f"mtp.layers.0.{key.removeprefix(prefix)}"] = weights[key].clone()
        if copy.is_floating_point() and copy.itemsize > 1 and "scale" not in key:  # quantised ones stay
            copy += torch.randn(copy.shape, generator=generator).to(copy.dtype) * 0.1
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        weights[f"mtp.{norm}.weight"] = torch.randn(hidden, generator=generator) * 0.1
    weights["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) * hidden**-0.5
    save_file({key: weight.contiguous() for key, weight in weights.items()}, path, {"format": "pt"})
    change_json(folder / "config.json", **{name: 1})


def published_names(family: str, num_layers: int) -> tuple[dict[str, str], str, dict[str, str], str]:
    """Return the names under which checkpoints of `family` store an MTP head.

    They are: the start of each name in a model of the head's layers alone -> its start in the checkpoint; the start of
    the names of what joins embeddings and hidden states; each such part -> its name; and the field that counts heads.
    """
    eagle = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "join": "eh_proj"}
    qwen = {"embedding_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "join": "fc"}
    layer = f"model.layers.{num_layers}"
    if family == "nemotron_h":
        names = {"model.layers.": "mtp.layers.", "model.norm_f.": "mtp.layers.1.final_layernorm."}
        return names, "mtp.layers.0.", eagle, "num_nextn_predict_layers"
    if family == "glm5_next":
        inner, text = f"model.language_model.layers.{num_layers}.", "model.language_model."
        names = {f"{text}layers.0.": inner, f"{text}norm.": f"{inner}shared_head.norm."}
        return names, inner, eagle, "num_nextn_predict_layers"
    if family == "alice_ai":
        return {"model.layers.0.": "mtp.layers.0.", "model.norm.": "mtp.norm."}, "mtp.", qwen, "mtp_num_hidden_layers"
    if family == "qwen4_exp":
        names = {f"model.{part}": f"mtp.{part}" for part in ("layers.0.", "hyper_connection_mixer.")}
        joined = {**qwen, "join": "fc_hidden", "embedding_join": "fc_embedding"}
        return names, "mtp.", joined, "mtp_num_hidden_layers"
    names = {"model.layers.0.": f"{layer}.", "model.norm.": f"{layer}.final_layernorm."}
    count = "num_mtp_layers" if family == "bailing_hybrid" else "num_nextn_predict_layers"
    return names, f"{layer}.", eagle, count


# The config of a model that has the layers of an MTP head alone.
HEAD_ALONE: dict[str, dict[str, Any]] = {
    "nemotron_h": {"layers_block_type": ["attention", "moe"], "num_hidden_layers": 2},
    "bailing_moe_v2_5": {"layer_group_size": 1, "first_k_dense_replace": 0, "num_hidden_layers": 1},
    "bailing_hybrid": {"layer_types": ["full_attention"], "mlp_layer_types": ["sparse"], "num_hidden_layers": 1},
    "glm5_next": {"layer_types": ["indexed_attention"], "mlp_layer_types": ["sparse"], "num_hidden_layers": 1},
    "alice_ai": {"layer_types": ["full_attention"], "num_hidden_layers": 1},
    "qwen4_exp": {"layer_types": ["indexed_attention"], "ple_layer_ids": [], "num_hidden_layers": 1},
}
RESIDUAL_MIXERS = ("_res_", ".hc_attn", ".hc_ffn")  # parts of the reference's layers that heads do not have


def add_published_mtp(folder: Path, family: str, **config: Any) -> tuple[Any, dict[str, Tensor]]:
    """Give a saved model the MTP head that vLLM reads, and return transformers' model of the head's layers.

    That model has the head's last norm or mixer as its own. The second value has the weights that join a token's
    embedding and the hidden state before it. `config` is what the model was written with.
    """
    torch.manual_seed(5)
    saved = json.loads((folder / "config.json").read_text())
    text = saved.get("text_config", saved)
    theirs = FAMILIES[family](**{**config, **HEAD_ALONE[family]})
    make_state_sensitive(theirs.eval(), 3)
    theirs.save_pretrained(folder / "head")
    path, stored = folder / "model.safetensors", load_file(folder / "head" / "model.safetensors")
    names, first, joining, count = published_names(family, text.get("num_hidden_layers", 0))
    weights, hidden = load_file(path), theirs.config.get_text_config().hidden_size
    if family == "bailing_hybrid":
        weights[f"{first}shared_head.head.weight"] = torch.ones(2)  # not used
    elif family == "nemotron_h":
        stored = {name.replace("backbone.", "model."): weight for name, weight in stored.items()}
    stored = {name: weight for name, weight in stored.items() if not any(part in name for part in RESIDUAL_MIXERS)}
    for start, ours in names.items():
        weights |= {ours + name.removeprefix(start): w for name, w in stored.items() if name.startswith(start)}
    centre, streams = float("enorm" in joining.values()), getattr(theirs.config, "hc_count", 1)
    width = 2 * hidden if "embedding_join" not in joining else hidden
    own = {"embedding_norm": centre + 0.1 * torch.randn(hidden)}
    own |= {"hidden_norm": centre + 0.1 * torch.randn(streams * hidden)}
    own |= {part: torch.randn(hidden, width) * hidden**-0.5 for part in joining if part.endswith("join")}
    weights |= {f"{first}{joining[part]}.weight": weight for part, weight in own.items()}
    save_file({name: weight.contiguous() for name, weight in weights.items()}, path, {"format": "pt"})
    text[count] = 1
    (folder / "config.json").write_text(json.dumps(saved))
    return theirs, own


class ReferenceHead:
    """The MTP head of a family whose layers are run one by one, from transformers' parts."""

    def __init__(self, family: str, main: Any, head: Any, joining: dict[str, Tensor]) -> None:
        self.main, self.joining = main, joining
        text = main.model.language_model if family == "glm5_next" else main.model
        self._own = head.model.language_model if family == "glm5_next" else head.model
        self._kept = text.hyper_connection_mixer if family == "qwen4_exp" else text.norm
        self._eps, self._centre = main.config.get_text_config().rms_norm_eps, float(family != "glm5_next")
        self._last = {"glm5_next": self._glm, "alice_ai": self._alice, "qwen4_exp": self._qwen}[family]
        self._streams = family == "qwen4_exp"

    def hidden(self, tokens: list[int]) -> Tensor:
        """Return the hidden state that the head reads after each token."""
        found: list[Tensor] = []

        def note(_: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            found.append(inputs[0] if self._streams else output)

        with self._kept.register_forward_hook(note):
            self.main(torch.tensor([tokens]), use_cache=False)
        return found[0].view(len(tokens), -1)

    def joined(self, embedded: Tensor, before: Tensor) -> Tensor:
        parts = {"embedding": embedded, "hidden": before}
        embedded, before = (
            rms_norm(x, self._centre + self.joining[f"{name}_norm"], self._eps) for name, x in parts.items()
        )
        if not self._streams:
            return self.joining["join"] @ torch.cat((embedded, before))
        own = before.view(-1, len(embedded)) @ self.joining["join"].T
        return (own + self.joining["embedding_join"] @ embedded).flatten()

    def last(self, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return what the output head reads after the last of `inputs`, and the hidden state of the next draft."""
        return self._last(torch.stack(inputs)[None])

    def _glm(self, x: Tensor) -> tuple[Tensor, Tensor]:
        layer = self._own.layers[0]
        x = x + layer.self_attn(layer.input_layernorm(x), torch.ones(1, x.shape[1], dtype=torch.bool))[0]
        x = self._own.norm(x + layer.mlp(layer.post_attention_layernorm(x)))[0, -1]
        return x, x

    def _alice(self, x: Tensor) -> tuple[Tensor, Tensor]:
        layer, positions = self._own.layers[0], torch.arange(x.shape[1])[None]
        attended = layer.self_attn(layer.input_layernorm(x), self._own.rotary_emb(x, positions), _causal(x))[0]
        x = x + attended
        x = self._own.norm(x + layer.mlp(layer.post_attention_layernorm(x[0])))[0, -1]
        return x, x

    def _qwen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(x.shape[1]).expand(3, 1, -1)
        x = self._own.layers[0](x, self._own.rotary_emb(x, positions), _causal(x))
        return self._own.hyper_connection_mixer(x)[0, -1], x[0, -1]


def _causal(x: Tensor) -> Tensor:
    length = x.shape[1]
    return torch.full((length, length), torch.finfo(x.dtype).min).triu(1)[None, None]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean() + eps) * weight
