"""The transformers peer: bf16, one forward pass per step, the cache of the last prompt copied by hand."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
import transformers

from benchmarks.peers.protocol import Answer, Job, PeerOptions, answers_stream, parse_options, serve


class TransformersPeer:
    """Greedy loops over AutoModelForCausalLM. Keeps the last cold prompt's cache for a prompt that extends it."""

    def __init__(self, options: PeerOptions) -> None:
        torch.set_num_threads(options.threads)
        auto: Any = transformers.AutoModelForCausalLM
        self._model: Any = auto.from_pretrained(options.model, dtype=torch.bfloat16, trust_remote_code=False).eval()
        self._kept_ids: list[int] = []
        self._kept_cache: Any = None

    def describe(self) -> str:
        return f"transformers {transformers.__version__}, bf16, torch {torch.__version__}"

    @torch.inference_mode()
    def run(self, job: Job) -> Answer:
        start = time.perf_counter()
        prompt = job.prompts[0]
        cached, cache = 0, None
        if len(job.prompts) == 1 and self._kept_ids and prompt[: len(self._kept_ids)] == self._kept_ids:
            cached, cache = len(self._kept_ids), copy.deepcopy(self._kept_cache)
        ids = torch.tensor([tokens[cached:] for tokens in job.prompts])
        out = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        tokens = [int(token[0])]
        first = time.perf_counter()
        if job.num_tokens == 1 and not cached:
            self._kept_ids, self._kept_cache = prompt, out.past_key_values
        for _ in range(job.num_tokens - 1):
            out = self._model(token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(int(token[0]))
        return Answer(first - start, time.perf_counter() - first, cached, tokens)


def main() -> None:
    answers = answers_stream()
    serve(TransformersPeer(parse_options()), answers)


if __name__ == "__main__":
    main()
