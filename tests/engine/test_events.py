"""Events about the cache: vLLM's bytes, replay, and what a router of another project makes of them."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from forkpoint.config import EngineConfig
from forkpoint.engine.events import MAX_FRAME_BYTES, EventPublisher, address_of
from forkpoint.errors import ConfigError
from forkpoint.json_options import KVEventsConfig
from forkpoint.routing import wire
from forkpoint.routing.feed import RestorableIndex
from tests.cache.published import Listener, sent_hashes
from tests.sched.harness import LAYOUTS, Harness, tokens

SIZE = 64


# --- as vLLM 0.33 declares them (vllm/distributed/kv_events.py); its subscribers decode with these


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(Event):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    pass


class VllmBatch(Batch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


def test_the_bytes_are_those_of_vllm() -> None:
    harness = Harness()
    watched = harness.sched.cache.watch_restorable()
    prompt = tokens(1, 300)
    harness.add("a", prompt)
    harness.run()
    harness.sched.reset_prefix_cache()
    harness.add("b", prompt[:200])
    harness.run()
    changes = watched.drain()
    batch = msgspec.msgpack.decode(wire.encode(wire.batch_of(changes, 5.0)), type=VllmBatch)
    cleared, stored = batch.events
    assert (batch.ts, cleared, batch.data_parallel_rank) == (5.0, AllBlocksCleared(), 0)
    assert stored == BlockStored(sent_hashes(prompt)[:3], None, prompt[: 3 * SIZE].tolist(), SIZE, None, "GPU", None)
    assert all(isinstance(event, BlockStored | BlockRemoved | AllBlocksCleared) for event in batch.events)


def test_a_state_that_goes_takes_the_blocks_above_it_along() -> None:
    """Keys and values stay in the cache; nobody can resume there."""
    harness = Harness()
    cache, listener = harness.sched.cache, Listener(harness.sched.cache)
    prompt = tokens(1, 700)
    hashes = sent_hashes(prompt)
    harness.add("a", prompt, breakpoints=(256,))
    harness.run()
    listener.check([prompt, prompt[:400]])
    assert listener.index.restorable(hashes) == 10
    while harness.sched.cache.lookup(cache.new_lease("x", "", prompt), 700).num_tokens > 256:
        nodes = cache.store.tree.match(cache.new_lease("x", "", prompt).chain, 10)
        cache.store.drop_checkpoint(next(n.checkpoint for n in reversed(nodes) if n.checkpoint is not None))
    listener.check([prompt, prompt[:400]])
    assert listener.published_run(hashes) == 4
    assert cache.lookup(cache.new_lease("x", "", prompt), 700).kv_num_tokens == 640


def test_what_is_condemned_while_somebody_reads_it_is_told_at_once() -> None:
    harness = Harness()
    cache, listener = harness.sched.cache, Listener(harness.sched.cache)
    prompt = tokens(1, 300)
    harness.add("a", prompt)
    harness.run()
    reader = cache.new_lease("b", "", prompt)
    cache.attach(reader, hit := cache.lookup(reader, len(prompt)))
    listener.check([prompt])
    cache.tiers.condemn_everywhere([hit.path[1]])
    listener.check([prompt])
    assert listener.index.restorable(sent_hashes(prompt)) == 0
    cache.release(reader)
    listener.check([prompt])


def test_each_room_has_events_of_its_own() -> None:
    """What the arena evicts can be restored from the host, then from the disk, until a reset."""
    layout = LAYOUTS["several blocks a page"]
    host_pages = layout.num_pages_for(2000, 3)
    harness = Harness(layout, num_pages=layout.num_pages_for(900, 3) + 1, num_host_pages=host_pages, num_disk_pages=400)
    listener, prompt = Listener(harness.sched.cache), tokens(0, 641)
    hashes, media = sent_hashes(prompt)[:9], list[list[str]]()
    for seed in range(100, 130):
        harness.ask(f"{seed}", prompt if seed == 100 else tokens(seed, 700), 2)
        listener.check([prompt])
        assert listener.index.restorable(hashes) == 9
        found = [medium for medium, known in listener.index._resumable.items() if known.get(hashes[8])]
        media += [found] if found != media[-1:] else []
    assert media[0] == ["GPU"] and ["CPU"] in media and media[-1] == ["STORAGE"]
    stored = [event for batch in listener.batches for event in batch.events if isinstance(event, wire.BlockStored)]
    with_tokens = {event.medium: event for event in stored if event.token_ids}
    assert set(with_tokens) == {"GPU", "CPU"} and all(event.block_hashes for event in stored)
    late = Listener(harness.sched.cache)  # knows what was there before it
    late.check([prompt])
    assert late.index.restorable(hashes) == 9
    harness.sched.reset_prefix_cache()
    harness.ask("after", tokens(7, 300), 2)
    late.check([prompt, tokens(7, 300)])
    assert [type(event) for event in late.batches[-1].events] == [wire.AllBlocksCleared, wire.BlockStored]


def test_what_a_salt_hides_is_not_told() -> None:
    harness = Harness()
    listener = Listener(harness.sched.cache)
    harness.add("a", tokens(1, 300), cache_salt="mine")
    harness.run()
    listener.check([tokens(1, 300)])
    assert harness.sched.stats().cache.num_checkpoints and not listener.batches


def test_the_router_of_dynamo_counts_what_can_be_restored() -> None:
    core = pytest.importorskip("dynamo._core", reason="ai-dynamo-runtime is not installed")
    tree = core.RadixTree()
    harness = Harness(num_pages=60)
    listener = Listener(harness.sched.cache)
    rng = np.random.default_rng(3)
    histories: list[np.ndarray] = []
    told = num_exact = num_asked = 0
    for turn in range(40):
        start = histories[rng.integers(len(histories))] if histories and rng.random() < 0.7 else tokens(turn, 90)
        prompt = np.concatenate([start, tokens(1000 + turn, int(rng.integers(40, 500)))])
        harness.add(f"r{turn}", prompt, 40)
        harness.run()
        histories.append(harness.requests[f"r{turn}"].all_token_ids())
        listener.listen()
        for batch in listener.batches[told:]:
            for event in batch.events:
                tree.apply_event(7, json.dumps(dynamo_event(core, told, event)).encode())
        told = len(listener.batches)
        for history in histories[-8:]:
            ids = history.tolist()
            scores = tree.find_matches(core.compute_block_hash_for_seq(ids, SIZE)).scores
            (count,) = scores.values() if scores else (0,)
            hashes = sent_hashes(history)
            assert count == listener.published_run(hashes)
            num_exact += count == listener.index.restorable(hashes)
            num_asked += 1
    assert num_exact >= 0.9 * num_asked  # of histories; one that parts between two states is counted too far


def dynamo_event(core: Any, number: int, event: Any) -> dict[str, Any]:
    match event:
        case wire.BlockStored():
            local = core.compute_block_hash_for_seq(event.token_ids, event.block_size)
            blocks = [
                {"block_hash": name, "tokens_hash": own} for name, own in zip(event.block_hashes, local, strict=True)
            ]
            data: Any = {"stored": {"parent_hash": event.parent_block_hash, "blocks": blocks}}
        case wire.BlockRemoved():
            data = {"removed": {"block_hashes": event.block_hashes}}
        case _:
            data = "cleared"
    return {"event_id": number, "data": data}


# --- the publisher


@contextmanager
def publishing(harness: Harness, folder: Path, **options: Any) -> Iterator[tuple[EventPublisher, Any, Any]]:
    endpoints = {name: f"ipc://{folder}/{name}" for name in ("endpoint", "replay_endpoint")}
    config = KVEventsConfig.of({"enable_kv_cache_events": True, "topic": "kv", **endpoints, **options})
    publisher = EventPublisher(config, harness.sched.cache.watch_restorable())
    with zmq.Context() as context, context.socket(zmq.SUB) as sub, context.socket(zmq.DEALER) as replay:
        sub.setsockopt(zmq.RCVTIMEO, 20_000)
        replay.setsockopt(zmq.RCVTIMEO, 20_000)
        sub.subscribe(b"kv")
        sub.connect(endpoints["endpoint"])
        replay.connect(endpoints["replay_endpoint"])
        try:
            yield publisher, sub, replay
        finally:
            publisher.close()


def ask(replay: Any, start: int) -> list[tuple[int, wire.EventBatch]]:
    replay.send_multipart((b"", wire.sequence_bytes(start)))
    found = []
    while (frames := replay.recv_multipart())[1] != wire.END_OF_REPLAY:
        found.append((int.from_bytes(frames[1], "big"), wire.decode(frames[2])))
    return found


def serve(harness: Harness, publisher: EventPublisher, seeds: range) -> list[np.ndarray]:
    prompts = [tokens(seed, 200) for seed in seeds]
    for seed, prompt in zip(seeds, prompts, strict=True):
        harness.add(f"r{seed}", prompt)
        harness.run()
        publisher.publish()
    return prompts


def test_batches_are_numbered_and_can_be_replayed(tmp_path: Path) -> None:
    harness = Harness()
    with publishing(harness, tmp_path) as (publisher, sub, replay):
        while not sub.poll(50):  # until the subscription has arrived
            serve(harness, publisher, range(len(harness.requests), len(harness.requests) + 1))
        topic, number, data = sub.recv_multipart()
        assert topic == b"kv"
        first, index = int.from_bytes(number, "big"), RestorableIndex()
        for _, batch in (found := ask(replay, 0)):
            index.apply(batch)
        assert [number for number, _ in found] == list(range(len(harness.requests)))
        assert wire.encode(found[first][1]) == data
        assert [number for number, _ in ask(replay, 1)] == list(range(1, len(harness.requests)))
        for request in harness.requests.values():
            assert index.restorable(sent_hashes(request.prompt_token_ids)) == 3


@pytest.mark.parametrize("limit", ["buffer_steps", "max_queue_size"])
def test_who_missed_batches_that_are_gone_is_told_all(
    tmp_path: Path, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness, goes_on, encode = Harness(), threading.Event(), wire.encode
    monkeypatch.setattr(wire, "encode", lambda batch: encode(batch) if goes_on.wait(30) else b"")
    if limit == "buffer_steps":
        goes_on.set()
    with publishing(harness, tmp_path, **{limit: 2}) as (publisher, _, replay):
        serve(harness, publisher, range(5))  # a slow thread has one, two wait, and two are lost
        goes_on.set()
        wait_for(publisher._queue.empty)
        if limit == "buffer_steps":
            wait_for(lambda: publisher._sent and publisher._sent[-1][0] == 4)
            assert [number for number, _ in ask(replay, 0)] == [3, 4]
        publisher.publish()
        wait_for(lambda: _knows_all(harness, ask(replay, 0)))


def _knows_all(harness: Harness, batches: list[tuple[int, wire.EventBatch]]) -> bool:
    index = RestorableIndex()
    for _, batch in batches:
        index.apply(batch)
    prompts = [request.prompt_token_ids for request in harness.requests.values()]
    return all(index.restorable(sent_hashes(prompt)) == 3 for prompt in prompts)


def wait_for(holds: Any) -> None:
    until = time.monotonic() + 30
    while not holds() and time.monotonic() < until:
        time.sleep(0.01)
    assert holds()


def test_wrong_options_are_told() -> None:
    given = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557", "buffer_steps": 10}
    assert EngineConfig.from_flat(model="m", kv_events_config=json.dumps(given)).kv_events_config.is_on
    assert not EngineConfig.from_flat(model="m").kv_events_config.is_on
    assert not KVEventsConfig.of({**given, "publisher": "null"}).is_on
    for wrong in ({"port": 1}, {"publisher": "kafka"}, {"buffer_steps": 0}, {"hwm": "many"}, []):
        with pytest.raises(ConfigError, match=r"kv_events_config|publisher|hwm"):
            EngineConfig.from_flat(model="m", kv_events_config=wrong)
    with pytest.raises(ConfigError, match="nowhere"):
        EventPublisher(KVEventsConfig.of({**given, "endpoint": "nowhere"}), Harness().sched.cache.watch_restorable())


@pytest.mark.parametrize(
    ("endpoint", "host", "address"),
    [
        ("tcp://*:5557", None, "tcp://127.0.0.1:5557"),
        ("tcp://*:5557", "127.0.0.1", "tcp://127.0.0.1:5557"),
        ("tcp://*:5557", "localhost", "tcp://127.0.0.1:5557"),
        ("tcp://*:5557", "0.0.0.0", "tcp://0.0.0.0:5557"),
        ("tcp://*:*", "::1", "tcp://[::1]:*"),
        ("tcp://router:5557", "0.0.0.0", "tcp://router:5557"),
        ("ipc:///tmp/events", "0.0.0.0", "ipc:///tmp/events"),
    ],
)
def test_a_wildcard_is_the_address_that_the_server_listens_on(endpoint: str, host: str | None, address: str) -> None:
    assert address_of(endpoint, host) == address


def test_by_default_only_this_machine_reaches_the_events(caplog: pytest.LogCaptureFixture) -> None:
    def bound(host: str | None) -> list[str]:
        given = {"enable_kv_cache_events": True, "endpoint": "tcp://*:*", "replay_endpoint": "tcp://*:*", "host": host}
        publisher = EventPublisher(KVEventsConfig.of(given), Harness().sched.cache.watch_restorable())
        try:
            return publisher.addresses
        finally:
            publisher.close()

    assert all(re.fullmatch(r"tcp://127\.0\.0\.1:\d+", address) for address in bound(None))
    assert "all prompts" not in caplog.text
    assert all(re.fullmatch(r"tcp://0\.0\.0\.0:\d+", address) for address in bound("0.0.0.0"))
    assert "let only your routers reach this address" in caplog.text


def test_large_frames_and_floods_do_no_harm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Subscribers that send much, ask again and again, and read nothing: the others get their batches."""
    harness = Harness()
    with publishing(harness, tmp_path) as (publisher, _, replay), zmq.Context() as context, ExitStack() as stack:
        serve(harness, publisher, range(4))
        wait_for(lambda: publisher._queue.empty() and len(ask(replay, 0)) == 4)
        for _ in range(40):  # more than may be served at once
            flood = stack.enter_context(context.socket(zmq.DEALER))
            flood.setsockopt(zmq.LINGER, 0)
            flood.setsockopt(zmq.RCVHWM, 1)
            flood.connect(f"ipc://{tmp_path}/replay_endpoint")
            for _ in range(200):
                flood.send_multipart((b"", wire.sequence_bytes(0)))
                flood.send_multipart((b"", b"odd"))
            flood.send(b"x" * MAX_FRAME_BYTES * 1000)
        assert [number for number, _ in ask(replay, 2)] == [2, 3]
        assert [number for number, _ in ask(replay, 2**64 - 2)] == []
        serve(harness, publisher, range(4, 5))
        wait_for(lambda: [number for number, _ in ask(replay, 4)] == [4])
    assert caplog.text.count("have a wrong form") <= 1
