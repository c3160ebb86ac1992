"""Traces in their files' own forms, in small; the invariants that replay needs."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from forkpoint.errors import TraceError
from forkpoint.sim.readers import read_trace
from forkpoint.sim.tokens import TokenMint, TokenSpans
from forkpoint.sim.workload import WORKLOADS, make_workload
from tests.sim.driving import join


def common(a: TokenSpans, b: TokenSpans) -> int:
    """Equal leading tokens."""
    x, y = a.array(), b.array()
    length = min(len(x), len(y))
    differs = (x[:length] != y[:length]).nonzero()[0]
    return int(differs[0]) if len(differs) else length


def mooncake(folder: Path, *records: tuple[int, int, int, list[int]]) -> Path:
    path = folder / "mooncake.jsonl"
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(names, record, strict=True))) + "\n" for record in records))
    return path


def test_mooncake_equal_ids_are_equal_tokens(tmp_path: Path) -> None:
    path = mooncake(tmp_path, (0, 1300, 7, [0, 1, 2]), (2000, 1400, 5, [0, 3, 4]), (2500, 1300, 5, [0, 1, 2]))
    a, b, c = read_trace(path).requests
    assert (a.prompt.num_tokens, a.output.num_tokens, b.arrival_s) == (1300, 7, 2.0)
    assert common(a.prompt, b.prompt) == 512 and common(a.prompt, c.prompt) == 1300


def test_mooncake_a_next_turn_repeats_tail_and_output(tmp_path: Path) -> None:
    """The second prompt parts from the first in its last, partly filled block: it goes on from it."""
    path = mooncake(tmp_path, (0, 1300, 100, [0, 1, 2]), (1, 600, 9, [0, 9]), (2, 2000, 5, [0, 1, 7, 8]))
    first, other, second = read_trace(path).requests
    assert common(join(first.prompt, first.output), second.prompt) == 1400
    assert second.session == first.session != other.session
    assert common(other.prompt, second.prompt) == 512


def test_mooncake_sharing_only_what_all_share_is_no_turn(tmp_path: Path) -> None:
    path = mooncake(tmp_path, (0, 1300, 10, [0, 1, 2]), (1, 700, 10, [0, 3]), (2, 1500, 10, [0, 5, 6]))
    requests = read_trace(path).requests
    assert len({request.session for request in requests}) == 3
    assert common(requests[1].prompt, requests[2].prompt) == 512


def claude(folder: Path, **changes: object) -> Path:
    def entry(at: float, tokens: int, out: int, ids: list[int], think: float = 0.0) -> dict[str, object]:
        told = {"t": at, "type": "n", "in": tokens, "out": out, "hash_ids": ids, "think_time": think}
        return {**told, "stop": "tool_use"}

    agent = {"t": 5.0, "type": "subagent", "requests": [entry(1.0, 70, 4, [90])]}
    records = [entry(0.0, 150, 20, [1, 2]), agent, entry(9.0, 400, 30, [1, 2, 3, 4, 5, 6], 6.5)]
    conversation = {"id": "c", "tool_tokens": 60, "system_tokens": 20, "requests": records, **changes}
    (folder / "one.json").write_text(json.dumps(conversation))
    (folder / "two.json").write_text(json.dumps({**conversation, "id": "d"}))
    return folder


def test_claude_code(tmp_path: Path) -> None:
    trace = read_trace(claude(tmp_path))
    first, second, agent = trace.requests[:3]
    assert (first.prompt.num_tokens, first.output.num_tokens, first.breakpoints) == (150, 20, (60, 80))
    assert common(join(first.prompt, first.output), second.prompt) == 170
    assert second.after == first.id and second.think_s == 6.5
    assert first.awaits_tool
    assert agent.after is None and agent.arrival_s == first.arrival_s + 6.0
    assert common(first.prompt, trace.requests[3].prompt) == 0, "ids are local to a conversation"
    assert len(read_trace(tmp_path, limit=1).requests) == 3
    assert read_trace(tmp_path / "one.json").requests[1].prompt.num_tokens == 400


def test_azure(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.6805900,374,44"]
    path.write_text("\n".join([*rows, "2023-11-16 18:15:50.1805900,10,1"]) + "\n")
    a, b = read_trace(path).requests
    assert (a.prompt.num_tokens, a.output.num_tokens, b.prompt.num_tokens) == (374, 44, 10)
    assert b.arrival_s == pytest.approx(3.5) and common(a.prompt, b.prompt) == 0


def test_request_log_of_hashes_and_of_tokens(tmp_path: Path) -> None:
    shared = {"num_prompt_tokens": 150, "num_output_tokens": 20, "breakpoints": [64]}
    hashes = [{**shared, "request_id": "b", "arrival_s": 8.0, "block_size": 64, "block_hashes": ["x", "z"]}]
    hashes[0]["awaits_tool"] = True
    hashes.append({**shared, "request_id": "a", "arrival_s": 5.0, "block_size": 64, "block_hashes": ["x", "y"]})
    tokens = [
        {**shared, "request_id": n, "arrival_s": 1.0, "token_ids": [*range(140), *[i] * 30]}
        for i, n in ((0, "a"), (1, "b"))
    ]
    for records, expected in ((hashes, 64), (tokens, 140)):
        path = tmp_path / "log.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        first, second = read_trace(path).requests
        assert first.session == "a" and first.arrival_s == 0.0 and first.breakpoints == (64,)
        assert (first.prompt.num_tokens, first.output.num_tokens) == (150, 20)
        assert common(first.prompt, second.prompt) == expected
        assert (first.awaits_tool, second.awaits_tool) == (False, records is hashes)


LINE = '{"timestamp": 0, "input_length": 1000, "output_length": 9, "hash_ids": [1, 2]}\n'
LOGGED = '{"request_id": "a", "arrival_s": 1, "num_prompt_tokens": 9, "num_output_tokens": 1, "token_ids": [1]}\n'
CONVERSATION = '{"id": "c", "requests": [{"t": 0, "in": 9, "out": 1, "hash_ids": []}]}'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"


@pytest.mark.parametrize(
    ("name", "content"), [("a.jsonl", LINE), ("b.jsonl", LOGGED), ("c.json", CONVERSATION), ("d.csv", AZURE)]
)
def test_files_from_windows_are_read(tmp_path: Path, name: str, content: str) -> None:
    """They begin with a byte order mark, lines end in a carriage return, and the last ones may be blank."""
    path = tmp_path / name
    path.write_bytes(content.encode())
    requests = read_trace(path).requests
    path.write_bytes(("\ufeff" + content + "\n").replace("\n", "\r\n").encode())
    assert read_trace(path).requests == requests and len(requests) == 1


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.jsonl", LINE + LINE[:30], "line 2 of .*a.jsonl is not JSON: Unterminated string"),
        ("a.jsonl", LINE + "null\n", "line 2 of .* is None; an object is needed"),
        ("a.jsonl", LINE + "[" * 100_000 + "\n", "line 2 of .* is nested too deeply"),
        ("a.jsonl", LINE.replace("0,", "NaN,", 1), "line 1 of .*: timestamp=nan is not allowed; give a number"),
        ("a.jsonl", LINE.replace("1000", "true"), "line 1 of .*: input_length=True is not allowed; give an integer"),
        ("a.jsonl", LINE.replace("9", "1.5"), "line 1 of .*: output_length=1.5 is not allowed"),
        ("a.jsonl", LINE.replace("1, 2", "[1]"), "hash_ids=.* is not allowed; give a list of integers or texts"),
        ("a.jsonl", LINE.replace("1, 2", ""), "input_length=1000 does not fit its 0 hash_ids; .* 512 tokens"),
        ("a.jsonl", LINE.replace("1000", "9" * 9), "input_length=999999999 does not fit its 2 hash_ids"),
        ("a.jsonl", LINE.replace("1000", "30"), "input_length=30 does not fit its 2 hash_ids"),
        ("a.jsonl", LOGGED + LOGGED.replace("[1]", "1"), "line 2 of .*: token_ids=1 is not allowed"),
        ("a.jsonl", LOGGED.replace('"a"', "7"), "line 1 of .*: request_id=7 is not allowed"),
        ("a.json", "[]", r"a.json is \[\]; an object is needed"),
        ("a.json", CONVERSATION.replace("[]}", "[]}, 5"), r"a.json: requests\[1\] is 5; an object is needed"),
        ("a.json", CONVERSATION.replace("9", '"x"'), r"requests\[0\]: in='x' is not allowed"),
        ("a.csv", AZURE + "yesterday,1,1\n", "line 3 of .*a.csv: ValueError: .*; the columns TIMESTAMP, Context"),
        ("a.csv", AZURE.replace("374", "-1"), "line 2 of .*: ContextTokens=-1 is not allowed"),
        ("a.tar.xz", "no archive", "a.tar.xz cannot be read as a trace"),
    ],
)
def test_a_wrong_value_is_named_with_its_line(tmp_path: Path, name: str, content: str, text: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(TraceError, match=text):
        read_trace(tmp_path / name)


def test_a_cut_archive_is_refused(tmp_path: Path) -> None:
    whole = tmp_path / "a.tar.xz"
    with tarfile.open(whole, "w:xz") as archive:
        archive.add(claude(tmp_path) / "one.json", "one.json")
    assert read_trace(whole).requests
    (tmp_path / "b.tar.xz").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    with pytest.raises(TraceError, match=r"b.tar.xz cannot be read as a trace: EOFError"):
        read_trace(tmp_path / "b.tar.xz")


@pytest.mark.parametrize(
    ("name", "content"), [("a.jsonl", '{"timestamp": 1}\n'), ("a.csv", "x,y\n1,2\n"), ("a.txt", ""), ("a.jsonl", "{\n")]
)
def test_what_is_no_trace_is_refused(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(TraceError, match=name):
        read_trace(tmp_path / name)
    with pytest.raises(TraceError, match="does not exist"):
        read_trace(tmp_path / "nothing.jsonl")


def test_spans() -> None:
    mint = TokenMint()
    a, b = mint.fresh(100), mint.fresh(50)
    assert join(a, b).runs == ((0, 150),)
    assert join(b, a).part(40, 70).array().tolist() == [*range(140, 150), *range(20)]
    assert join(a, b).part(90, 1000).num_tokens == 60 and TokenSpans().array().size == 0
    with pytest.raises(OverflowError, match="int32"):
        TokenMint(2**31 - 5).fresh(10)


@pytest.mark.parametrize("kind", sorted(WORKLOADS))
def test_workloads_are_the_same_every_time(kind: str) -> None:
    trace = make_workload(kind)
    assert trace == make_workload(kind) and trace != make_workload(f"{kind}:seed=1")
    shared = [common(trace.requests[0].prompt, request.prompt) for request in trace.requests[1:30]]
    assert max(shared) > 100, "nothing is shared"


@pytest.mark.parametrize(
    "spec",
    [
        "chats",
        "chat:users=3",
        "chat:turns=many",
        "rag:documents=0",
        "chat:sessions=1000000000000",
        "chat:gap_s=nan",
        "chat:system=1000000,sessions=9999,first=1000000",
    ],
)
def test_bad_workloads(spec: str) -> None:
    with pytest.raises(TraceError):
        make_workload(spec)
