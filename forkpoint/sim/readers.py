"""Readers of trace files: Mooncake, Claude-Code conversations, Azure lengths, and the engine's request log."""

from __future__ import annotations

import csv
import random
import tarfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import islice
from lzma import LZMAError
from pathlib import Path
from typing import Final, NamedTuple

from forkpoint.errors import TraceError
from forkpoint.sim.records import Record, parse_json, read_lines
from forkpoint.sim.tokens import TokenMint, TokenSpans
from forkpoint.sim.trace import Trace, TraceRequest

MOONCAKE_BLOCK = 512
_CLAUDE_BLOCK = 64
_AZURE: Final = "the columns TIMESTAMP, ContextTokens and GeneratedTokens are needed"
SESSION_GAP_S = 30.0  # mean seconds between conversations in traces without start times


def read_trace(path: Path, limit: int | None = None) -> Trace:
    """Read a trace file of any known format: Mooncake, request log, Azure CSV, Claude-Code JSON or archive.

    `limit` is a number of requests (of conversations for Claude-Code). Raises TraceError.
    """
    if not path.exists():
        raise TraceError(f"trace {path} does not exist; give a file, a folder of conversations or an archive of them")
    try:
        return _reader_for(path)(path, limit)
    except (OSError, EOFError, LZMAError, tarfile.TarError, csv.Error, ValueError, OverflowError) as error:
        raise TraceError(f"{path} cannot be read as a trace: {type(error).__name__}: {error}") from error


def _reader_for(path: Path) -> Callable[[Path, int | None], Trace]:
    if path.is_dir() or path.suffix == ".json" or ".tar" in path.suffixes:
        return read_claude_code
    if path.suffix == ".csv":
        return read_azure
    if path.suffix != ".jsonl":
        raise TraceError(f"{path}: traces end in .jsonl, .csv, .json or .tar.xz, or are folders of .json files")
    first = next(read_lines(path, 1), None)
    if first and ("block_hashes" in first or "token_ids" in first):
        return read_request_log
    return read_mooncake


def read_azure(path: Path, limit: int | None = None) -> Trace:
    """Read Azure's LLM inference trace, which has only lengths and times: no two prompts share tokens."""
    mint, start = TokenMint(), None
    requests: list[TraceRequest] = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        for index, row in enumerate(islice(rows, limit)):
            try:
                when = datetime.fromisoformat(row["TIMESTAMP"][:26])
                lengths = {name: int(row[name]) for name in ("ContextTokens", "GeneratedTokens")}
            except (KeyError, TypeError, ValueError) as error:
                raise TraceError(
                    f"line {rows.line_num} of {path}: {type(error).__name__}: {error}; {_AZURE}"
                ) from error
            record, start = Record(f"line {rows.line_num} of {path}", lengths), start or when
            prompt = mint.fresh(record.integer("ContextTokens", low=1))
            output = mint.fresh(max(1, record.integer("GeneratedTokens")))
            arrival = (when - start).total_seconds()
            requests.append(TraceRequest(f"azure-{index}", f"azure-{index}", prompt, output, arrival))
    return Trace(path.stem, tuple(requests))


def read_mooncake(path: Path, limit: int | None = None) -> Trace:
    """Read Mooncake's traces: ids of 512-token blocks, which name all tokens up to the block's end.

    A prompt's last block may be partial; it has an id of its own. A conversation's next turn repeats all ids of its
    previous turn except that one. A prompt that stops sharing exactly there is read as the next turn: it repeats the
    rest of that prompt, and its output where the length allows.
    """
    records = [_MooncakeRecord.read(record) for record in read_lines(path, limit)]
    return Trace(path.stem, tuple(_MooncakeTokens(len(records)).requests(records)))


class _MooncakeRecord(NamedTuple):
    arrival_s: float
    length: int
    num_output_tokens: int
    hash_ids: list[int | str]

    @classmethod
    def read(cls, record: Record) -> _MooncakeRecord:
        ids, length = record.names("hash_ids"), record.integer("input_length", low=1)
        if not len(ids) - 1 <= length / MOONCAKE_BLOCK <= len(ids):
            raise TraceError(
                f"{record.where}: input_length={length} does not fit its {len(ids)} hash_ids; a Mooncake trace has one "
                f"for each {MOONCAKE_BLOCK} tokens"
            )
        return cls(record.time("timestamp") / 1000, length, max(1, record.integer("output_length")), ids)


class _MooncakeTokens:
    """Assigns tokens to blocks, record by record."""

    def __init__(self, num_records: int) -> None:
        self._mint = TokenMint()
        self._blocks: dict[int | str, TokenSpans] = {}
        self._conversation: dict[int | str, int] = {}  # block id -> the conversation in which it first appeared
        self._of_record = list(range(num_records))  # record -> conversation
        # last full block of a prompt -> its record and its partial block
        self._ends: dict[int | str, tuple[int, TokenSpans]] = {}

    def requests(self, records: Sequence[_MooncakeRecord]) -> Iterator[TraceRequest]:
        previous = [self._place(index, record) for index, record in enumerate(records)]
        prompts = [
            TokenSpans.join(self._blocks[i] for i in record.hash_ids).part(0, record.length) for record in records
        ]
        following: dict[int, int] = {}
        for index, before in enumerate(previous):
            if before is not None:
                following.setdefault(before, index)
        for index, record in enumerate(records):
            start, length = record.length, record.num_output_tokens
            known = TokenSpans()
            if index in following:
                known = prompts[following[index]].part(start, start + length)
            output = TokenSpans.join([known, self._mint.fresh(length - known.num_tokens)])
            session = f"conversation-{self._of_record[index]}"
            yield TraceRequest(f"mooncake-{index}", session, prompts[index], output, record.arrival_s)

    def _place(self, index: int, record: _MooncakeRecord) -> int | None:
        """Assign tokens to the record's new blocks. Returns the record that it continues, or None.

        If it continues a record, its first new block begins with the tokens of that record's partial block.
        """
        ids, length = record.hash_ids, record.length
        num_shared = next((i for i, block in enumerate(ids) if block not in self._blocks), len(ids))
        before, partial_block = None, TokenSpans()
        end = self._ends.get(ids[num_shared - 1]) if num_shared else None
        if end is not None and num_shared * MOONCAKE_BLOCK + end[1].num_tokens < length:
            before, partial_block = end
            self._of_record[index] = self._of_record[before]
        for block in ids[num_shared:]:
            own = self._mint.fresh(MOONCAKE_BLOCK)
            self._blocks[block] = TokenSpans.join([partial_block, own.part(partial_block.num_tokens, MOONCAKE_BLOCK)])
            self._conversation[block] = self._of_record[index]
            partial_block = TokenSpans()
        full, rest = divmod(length, MOONCAKE_BLOCK)
        if full and self._conversation[ids[full - 1]] == self._of_record[index]:
            self._ends[ids[full - 1]] = (index, self._blocks[ids[full]].part(0, rest) if rest else TokenSpans())
        return before


def read_claude_code(path: Path, limit: int | None = None) -> Trace:
    """Read Claude-Code conversations: ids of full 64-token blocks, local to a conversation, and think times.

    Requests of a conversation follow each other. The tokens after a prompt's full blocks, and its output, are those of
    the next prompt if that extends it. Conversations start `SESSION_GAP_S` apart on average.
    """
    mint, gaps, start = TokenMint(), random.Random(0), 0.0
    requests: list[TraceRequest] = []
    for number, conversation in enumerate(islice(_conversations(path), limit)):
        declared = conversation.integer("tool_tokens", default=0), conversation.integer("system_tokens", default=0)
        breakpoints = tuple(sorted({declared[0], sum(declared)} - {0}))
        blocks: dict[int | str, TokenSpans] = defaultdict(partial(mint.fresh, _CLAUDE_BLOCK))
        for suffix, records in _threads(conversation):
            session = f"{conversation.text('id')}-{number}{suffix}"
            if suffix:  # the requests of a subagent
                requests += _claude_requests(session, records, start + records[0].time("t"), (), blocks, mint)
            else:
                requests += _claude_requests(session, records, start, breakpoints, blocks, mint)
        start += gaps.expovariate(1 / SESSION_GAP_S)
    return Trace(path.name.split(".")[0], tuple(requests))


def _conversations(path: Path) -> Iterator[Record]:
    if path.is_dir():
        for file in sorted(path.glob("*.json")):
            yield _conversation(str(file), file.read_text(encoding="utf-8-sig"))
    elif path.suffix == ".json":
        yield _conversation(str(path), path.read_text(encoding="utf-8-sig"))
    else:
        with tarfile.open(path) as archive:
            for member in archive:
                if member.name.endswith(".json") and (content := archive.extractfile(member)) is not None:
                    yield _conversation(f"{member.name} of {path}", content.read().decode("utf-8-sig"))


def _conversation(where: str, text: str) -> Record:
    return Record.of(where, parse_json(where, text))


def _threads(conversation: Record) -> Iterator[tuple[str, list[Record]]]:
    """Yield the conversation's own requests, then those of each subagent, which runs in parallel.

    Each comes with a suffix of its session's name, empty for the conversation's own. Times are the conversation's.
    """
    entries = conversation.records("requests")
    yield "", [entry for entry in entries if "hash_ids" in entry]
    for number, agent in enumerate(entry for entry in entries if "requests" in entry):
        own = [entry for entry in agent.records("requests") if "hash_ids" in entry]
        shifted = [Record(entry.where, {**entry.values, "t": agent.time("t") + entry.time("t")}) for entry in own]
        if shifted:
            yield f"-agent{number}", shifted


def _claude_requests(
    session: str,
    records: list[Record],
    begins: float,
    breakpoints: tuple[int, ...],
    blocks: dict[int | str, TokenSpans],
    mint: TokenMint,
) -> list[TraceRequest]:
    full_blocks = [[blocks[block] for block in record.names("hash_ids")] for record in records]
    requests: list[TraceRequest] = []
    coming, coming_ids = TokenSpans(), list[int | str]()  # the next prompt
    for index in range(len(records) - 1, -1, -1):
        record, ids = records[index], records[index].names("hash_ids")
        full, length = len(ids) * _CLAUDE_BLOCK, max(record.integer("in"), 1)
        wanted = length + max(1, record.integer("out"))
        known = TokenSpans()
        if coming_ids[: len(ids)] == ids:
            known = coming.part(full, wanted)
        rest = TokenSpans.join([known, mint.fresh(wanted - full - known.num_tokens)])
        prompt = TokenSpans.join([*full_blocks[index], rest.part(0, length - full)])
        requests.append(
            TraceRequest(
                id=f"{session}-{index}",
                session=session,
                prompt=prompt,
                output=rest.part(length - full, wanted - full),
                arrival_s=begins,
                after=f"{session}-{index - 1}" if index else None,
                think_s=record.time("think_time", default=0.0),
                breakpoints=tuple(b for b in breakpoints if b < length),
                awaits_tool=record.values.get("stop") == "tool_use",
            )
        )
        coming, coming_ids = prompt, ids
    requests.reverse()
    return requests


def read_request_log(path: Path, limit: int | None = None) -> Trace:
    """Read the engine's request log (`--log-requests`): one JSON line per request, with block hashes or ids.

    Requests come in the order of arrival; the first one arrives at 0.
    """
    mint, requests = TokenMint(), []
    seen: dict[int | str, TokenSpans] = {}  # by hash or token id
    for index, record in enumerate(read_lines(path, limit)):
        length = record.integer("num_prompt_tokens", low=1)
        total = length + max(1, record.integer("num_output_tokens"))
        names, size = record.names("token_ids", []), 1
        if not names:
            names, size = record.names("block_hashes"), record.integer("block_size", low=1)
        for name in names:
            if name not in seen:
                seen[name] = mint.fresh(size)
        known = TokenSpans.join(seen[name] for name in names)
        everything = TokenSpans.join([known, mint.fresh(max(0, total - known.num_tokens))])
        requests.append(
            TraceRequest(
                id=f"{index}-{record.text('request_id')}",
                session=record.text("request_id"),
                prompt=everything.part(0, length),
                output=everything.part(length, total),
                arrival_s=record.time("arrival_s"),
                breakpoints=record.integers("breakpoints"),
                awaits_tool=record.flag("awaits_tool", False),
            )
        )
    requests.sort(key=lambda request: request.arrival_s)
    first = min((request.arrival_s for request in requests), default=0.0)
    return Trace(path.stem, tuple(replace(r, arrival_s=r.arrival_s - first) for r in requests))
