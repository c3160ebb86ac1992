"""A server as the prefill or the decode half of a pair, with requests as vLLM's proxies send them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forkpoint.engine.llm import LLM
from forkpoint.params import SamplingParams
from tests.server.running import start_server

LINK = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"fetch_timeout_s": 30}}
# The fields that vLLM's proxies send to the prefill engine.
ASKS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
PROMPT = "a prompt that is long enough for a few blocks. " * 6


def test_both_halves_of_a_pair(tiny_model: Path, tmp_path: Path) -> None:
    flags = ["--served-model-name", "tiny", "--deterministic", "--num-threads", "1", "--max-model-len", "512"]
    running = start_server(tiny_model, tmp_path, *flags, "--kv-transfer-config", json.dumps(LINK))
    options: dict[str, Any] = {"deterministic": True, "num_threads": 1, "max_model_len": 512, "log_level": "error"}
    body = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "logprobs": 1}
    params = {"temperature": 0.0, "logprobs": 1}
    try:
        with running.wait_ready().client() as http, LLM(str(tiny_model), kv_transfer_config=LINK, **options) as llm:
            # The server computes the prompt, and the LLM continues it.
            first = http.post("/v1/completions", json={**body, "max_tokens": 1, "kv_transfer_params": ASKS}).json()
            offered = first["kv_transfer_params"]
            assert offered["do_remote_prefill"] is True and offered["remote_port"] > 0
            fields = {"remote_engine_id", "remote_request_id", "remote_host", "remote_block_ids", "remote_num_tokens"}
            assert fields <= offered.keys()
            [found] = llm.generate(
                PROMPT, SamplingParams(**params, max_tokens=8, kv_transfer_params=offered), use_tqdm=False
            )
            assert found.cache.num_peer_tokens == offered["remote_num_tokens"] >= 64
            plain = http.post("/v1/completions", json={**body, "max_tokens": 8}).json()
            assert plain["kv_transfer_params"] is None
            assert plain["choices"][0]["text"] == found.outputs[0].text

            # The LLM computes another prompt, and the server continues it in a stream.
            other = "another " + PROMPT
            [half] = llm.generate(
                other, SamplingParams(**params, max_tokens=1, kv_transfer_params=ASKS), use_tqdm=False
            )
            asked = {**body, "prompt": other, "max_tokens": 8, "stream": True}
            lines = http.post("/v1/completions", json={**asked, "kv_transfer_params": half.kv_transfer_params}).text
            chunks = [json.loads(line[6:]) for line in lines.splitlines() if line.startswith("data: {")]
            text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
            cache = next(chunk["cache"] for chunk in chunks if chunk.get("cache"))
            assert cache["num_peer_tokens"] == cache["num_restored_tokens"] == cache["num_tokens"] >= 64
            [whole] = llm.generate(other, SamplingParams(**params, max_tokens=8), use_tqdm=False)
            assert text == whole.outputs[0].text

            # Chat answers offer their prompt too, and requests of several prompts do not.
            chat = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1}
            reply = http.post("/v1/chat/completions", json={**chat, "kv_transfer_params": ASKS}).json()
            assert reply["kv_transfer_params"]["do_remote_prefill"] is True
            two = http.post("/v1/completions", json={**body, "prompt": [PROMPT, other], "kv_transfer_params": ASKS})
            assert two.json()["kv_transfer_params"] is None
            assert b"forkpoint_peer_hits_total" in http.get("/metrics").content
    finally:
        assert running.stop() == 0, running.log
