"""`serve --log-requests`: a line for every request, however it ends, which the simulator reads."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx2

from forkpoint.sim.readers import read_trace
from tests.server.conftest import REQUEST_LOG
from tests.server.running import RunningServer

PROMPT = "a prompt that nobody else sends, " * 5


def records(log: Path, count: int, after: int) -> list[dict[str, Any]]:
    """The `count` lines that follow the first `after`; waits for them."""
    deadline = time.monotonic() + 120
    while len(lines := log.read_text().splitlines()) < after + count:
        assert time.monotonic() < deadline, lines[after:]
        time.sleep(0.02)
    return [json.loads(line) for line in lines[after:]]


def test_a_line_for_every_request(server: RunningServer, http: httpx2.Client) -> None:
    log = server.log_path.parent / REQUEST_LOG
    before = len(log.read_text().splitlines())
    body = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "max_tokens": 30}
    [text] = [choice["text"] for choice in http.post("/v1/completions", json=body).json()["choices"]]
    http.post("/v1/completions", json={**body, "n": 2, "max_tokens": 5})
    http.post("/v1/completions", json={**body, "stop": text[3:6]})
    found = records(log, 4, before)
    for tried in range(20):  # on a busy machine an answer may have ended before its client is gone
        with http.stream("POST", "/v1/completions", json={**body, "max_tokens": 300, "stream": True}) as reply:
            next(reply.iter_lines())
        left = records(log, 1, before + 4 + tried)[0]
        if left["finish_reason"] == "abort":
            break
    found.append(left)
    assert [record["finish_reason"] for record in found] == ["length", "length", "length", "stop", "abort"]
    assert [record["num_prompt_tokens"] for record in found] == [len(PROMPT)] * 5  # the tokenizer's tokens are bytes
    assert [record["num_output_tokens"] for record in found[:3]] == [30, 5, 5] and found[3]["num_output_tokens"] < 30
    assert found[0]["num_cached_tokens"] == 0 and all(record["num_cached_tokens"] == 128 for record in found[1:])
    assert found[0]["block_hashes"][:2] == found[4]["block_hashes"][:2]
    assert len(read_trace(log).requests) >= 5
