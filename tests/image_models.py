"""Tiny multimodal checkpoints, pictures, and transformers' own logits for prompts with images."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from forkpoint import LLM
from tests.checkpoints import COMMON, DENSE, GDN, MOE, make_state_sensitive
from tests.mtp_heads import add_mtp

IMAGE, VIDEO, START, END = 250, 251, 252, 253  # ids of the placeholder, and of what is put around it
# Of the logits' standard deviation. Ours are within 1e-4 of transformers' on most CPUs, and transformers' own are up to
# 1.2e-4 from float64.
TOLERANCE = 2e-4
IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
TEXT: dict[str, Any] = {
    **COMMON,
    **GDN,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
        "mrope_section": [6, 5, 5],
    },
}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
}
SIZE = {"shortest_edge": 1024, "longest_edge": 1 << 24}
Part: TypeAlias = "list[int] | Any"  # token ids, or a picture


def write_vision_checkpoint(
    folder: Path, *, moe: bool = False, mtp: bool = False, ids: Mapping[str, int] = IDS, **text: Any
) -> Any:
    """Save a multimodal model whose images matter, and return transformers' own instance of it."""
    torch.manual_seed(0)
    if moe:
        inner = {**TEXT, **MOE, "model_type": "qwen3_5_moe_text", **text}
        config = transformers.Qwen3_5MoeConfig(text_config=inner, vision_config=dict(VISION), **ids)
        model = transformers.Qwen3_5MoeForConditionalGeneration(config)
    else:
        inner = {**TEXT, **DENSE, "model_type": "qwen3_5_text", **text}
        config = transformers.Qwen3_5Config(text_config=inner, vision_config=dict(VISION), **ids)
        model = transformers.Qwen3_5ForConditionalGeneration(config)
    make_state_sensitive(model.eval(), 0)
    patches = model.model.visual.patch_embed.proj.weight  # whose inputs are all of a patch
    patches.data *= (patches.shape[-1] / patches[0].numel()) ** 0.5
    model.save_pretrained(folder)
    settings = {"size": SIZE, "patch_size": 16, "merge_size": 2, "image_mean": [0.5, 0.4, 0.5], "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    if mtp:
        add_mtp(folder, "mtp_num_hidden_layers")
    return model


def picture(seed: int, height: int, width: int) -> Any:
    """Noise."""
    image = pytest.importorskip("PIL.Image")
    return image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def processed(pictures: Sequence[Any]) -> dict[str, Tensor]:
    """What transformers' own processor makes of pictures."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    mean_and_std = {"image_mean": [0.5, 0.4, 0.5], "image_std": [0.5] * 3}
    processor = Qwen2VLImageProcessorPil(patch_size=16, temporal_patch_size=2, merge_size=2, size=SIZE, **mean_and_std)
    found: dict[str, Tensor] = dict(processor(images=list(pictures), return_tensors="pt"))
    return found


def prompt_of(parts: Sequence[Part]) -> dict[str, Any]:
    """The prompt of token ids and pictures, as `LLM.generate` takes it."""
    ids: list[int] = []
    pictures = []
    for part in parts:
        if isinstance(part, list):
            ids += part
        else:
            ids += [START, IMAGE, END]
            pictures.append(part)
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": pictures}}


@torch.no_grad()
def oracle(model: Any, parts: Sequence[Part], outputs: Sequence[int] = ()) -> tuple[list[int], Tensor]:
    """All token ids of the prompt and the outputs, and transformers' logits for them in one pass."""
    pictures = [part for part in parts if not isinstance(part, list)]
    inputs: dict[str, Any] = processed(pictures) if pictures else {}
    counts = iter((inputs["image_grid_thw"].prod(1) // 4).tolist() if pictures else [])
    ids = [
        token for part in parts for token in (part if isinstance(part, list) else [START, *[IMAGE] * next(counts), END])
    ]
    x = torch.tensor([[*ids, *outputs]])
    types = (x == IMAGE).int()
    types[:, len(ids) :] = 0
    return x[0].tolist(), model(input_ids=x, mm_token_type_ids=types, use_cache=False, **inputs).logits[0].float()


TEMPLATE = """{%- macro show(content, system) -%}
{%- if content is string -%}{{ content }}
{%- else -%}{%- for part in content -%}
{%- if 'image' in part or 'image_url' in part or part.type == 'image' -%}
{%- if system -%}{{ raise_exception('System message cannot contain images.') }}{%- endif -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\n' + show(m.content, m.role == 'system')|trim + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""
CHAT_IDS = {"image_token_id": 310, "video_token_id": 311, "vision_start_token_id": 312, "vision_end_token_id": 313}
NAMES = {
    300: "im_start",
    301: "im_end",
    302: "endoftext",
    310: "image_pad",
    311: "video_pad",
    312: "vision_start",
    313: "vision_end",
}


def write_chat_model(folder: Path, write: Callable[..., Any] = write_vision_checkpoint) -> Any:
    """Save a multimodal model whose tokens are bytes, and whose template shows images as Qwen's does.

    `write` saves the model itself.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    model = write(folder, ids=CHAT_IDS, vocab_size=320)
    vocab = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {f"<|{NAMES.get(i, f'extra_{i}')}|>": i for i in range(len(vocab), 320)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(f"<|{name}|>", special=True, normalized=False) for name in NAMES.values()])
    hf = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    hf.chat_template = TEMPLATE
    hf.save_pretrained(folder)
    return model


class Watched:
    """An engine with one request at a time, whose logits of all computed tokens are kept."""

    def __init__(
        self,
        folder: Path,
        theirs: Any,
        prompt: Callable[[Sequence[Part]], dict[str, Any]] = prompt_of,
        expected: Callable[..., tuple[list[int], Tensor]] = oracle,
        **options: Any,
    ) -> None:
        """`prompt` and `expected` are the functions of the model's family."""
        sizes = {"max_model_len": 2048, "kv_cache_memory_bytes": 1 << 26}
        plain = {"skip_tokenizer_init": True, "device": "cpu", "cpu_ops": "torch", "log_level": "error"}
        self.llm = LLM(str(folder), **{**sizes, **plain, **options})
        self.theirs, self._prompt, self._expected = theirs, prompt, expected
        self.runner: Any = self.llm._engine.core._runner
        self._model, self._logits = self.runner._model, list[Tensor]()
        forward = self._model.forward

        def watched(ids: Tensor, ctx: Any) -> Tensor:
            hidden: Tensor = forward(ids, ctx)
            self._logits.append(self._model.logits(hidden).float().cpu().clone())
            return hidden

        self._model.forward = watched

    @property
    def num_runs(self) -> int:
        """How often the tower ran."""
        return int(self.runner._encoded.num_runs)

    def forget_images(self) -> None:
        """Drop the embeddings of all images."""
        scheduler: Any = self.llm._engine.core.scheduler
        scheduler._encoder.clear()

    def computed(self) -> Tensor:
        """The logits of the tokens that the last request computed."""
        return torch.cat(self._logits)

    def ask(self, parts: Sequence[Part], num_outputs: int = 1) -> Asked:
        """Generate greedily, and compare the logits of every token that was computed with transformers'."""
        from forkpoint import SamplingParams

        # transformers takes every placeholder for an image's
        allowed = list(range(IMAGE))
        params = SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True, allowed_token_ids=allowed)
        runs = self.num_runs
        self._logits.clear()
        (output,) = self.llm.generate([self._prompt(parts)], params, use_tqdm=False)
        outputs = list(output.outputs[0].token_ids)
        ids, want = self._expected(self.theirs, parts, outputs[:-1])
        assert [*output.prompt_token_ids, *outputs[:-1]] == ids
        got, cached = torch.cat(self._logits), output.num_cached_tokens
        assert len(got) == len(ids) - cached, "a cached token was computed"
        error = float((got - want[cached:]).abs().max() / want.std())
        return Asked(len(output.prompt_token_ids), cached, self.num_runs - runs, error, outputs, ids)


class Asked:
    """What became of a request: `error` is in standard deviations of the logits. `ids` are all computed or cached."""

    def __init__(
        self, num_tokens: int, cached: int, num_runs: int, error: float, outputs: list[int], ids: list[int]
    ) -> None:
        self.num_tokens, self.cached, self.num_runs, self.error = num_tokens, cached, num_runs, error
        self.outputs, self.ids = outputs, ids


class Operators(TorchDispatchMode):
    """Counts torch's operators by name while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))
