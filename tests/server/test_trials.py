"""Compiling in readers' processes: bounded, ended when nobody waits, and no harm to others."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from forkpoint.errors import InvalidParamsError
from forkpoint.params import StructuredOutputsParams
from forkpoint.server import trials
from forkpoint.server.trials import NUM_AT_ONCE, compile_once
from tests.server.running import RunningServer, to_read
from tests.server.test_readers import until

# The automaton of their least common multiple has more states than any memory.
ENDLESS: dict[str, Any] = {"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 7919}]}
# Each leads to the next: following them goes deeper than the stack.
DEEP = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(2000)}


def ask(server: RunningServer, timeout_s: float = 60, **wanted: Any) -> httpx2.Response:
    body = {"prompt": "x", "max_tokens": 1, "structured_outputs": wanted}
    with server.client() as http:
        return http.post("/v1/completions", json=body, timeout=to_read(timeout_s))


def message(reply: httpx2.Response) -> str:
    assert reply.status_code == 400
    return str(reply.json()["error"]["message"])


def test_what_takes_too_long_is_refused_and_others_go_on(server: RunningServer) -> None:
    assert ask(server, regex="warm up").status_code == 200
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        slow = [pool.submit(ask, server, json={**ENDLESS, "title": str(i)}) for i in range(NUM_AT_ONCE)]
        until(lambda: len(server.reader_pids) >= NUM_AT_ONCE)
        for known in ({"regex": "warm up"}, {"choice": ["a", "b"]}, {"json": {"type": "boolean"}}):
            assert ask(server, **known).status_code == 200, "it needs no trial, so it waits for nobody"
        assert not any(one.done() for one in slow), "these were there before the slow ones were given up"
        assert all("the JSON schema took more than 2 s to compile" in message(one.result()) for one in slow)


def test_who_leaves_takes_the_work_along(server: RunningServer) -> None:
    def leave(number: int) -> str:
        try:  # a client that the machine keeps waiting may see the refusal
            return message(ask(server, 0.3, json={**ENDLESS, "title": f"left {number}"}))
        except httpx2.ReadTimeout:
            return "left"

    started = time.monotonic()
    with ThreadPoolExecutor(4 * NUM_AT_ONCE) as pool:
        seen = list(pool.map(leave, range(4 * NUM_AT_ONCE)))
    assert seen.count("left") > 2 * NUM_AT_ONCE, seen
    assert all(text == "left" or "took more than 2 s to compile" in text for text in seen), seen
    assert ask(server, regex="[a-z]{4}").status_code == 200
    assert time.monotonic() - started < 60


def test_one_that_overflows_the_stack_ends_its_process_alone(server: RunningServer) -> None:
    schema = {"$defs": {**DEEP, "d2000": {}}, "$ref": "#/$defs/d0"}
    assert "its process ended" in message(ask(server, json=schema))
    assert "the regular expression cannot be compiled" in message(ask(server, regex="("))


def test_a_grammar_that_takes_too_much_of_a_core_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine compiles it again, so it is refused even if the trial's process was done in time."""
    compiler = SimpleNamespace(check=lambda wanted: sum(range(10**5)), slow_name=lambda wanted: "json")
    texts: Any = SimpleNamespace(inputs=SimpleNamespace(grammars=compiler))
    compile_once(StructuredOutputsParams(json={}), texts, b"")
    monkeypatch.setattr(trials, "MAX_COMPILE_S", 0.0)
    with pytest.raises(InvalidParamsError, match=r"the JSON schema took more than 0 s to compile"):
        compile_once(StructuredOutputsParams(json={}), texts, b"")
