"""Prefill/decode disaggregation under real models: D continues what P has computed, with the bits of one engine."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu_tiers import bits_of
from forkpoint.engine.llm import LLM
from forkpoint.outputs import RequestOutput
from forkpoint.params import SamplingParams, StructuredOutputsParams
from forkpoint.runtime.rings import PeerRings
from forkpoint.shared_arrays import CAN_SHARE
from tests.checkpoints import write_checkpoint
from tests.engine.false_peer import Damage, false_peer
from tests.engine.real import MODELS, MORE_MODELS
from tests.engine.test_host_tier import ROOM
from tests.late_streams import LatePlatform

SHARED: dict[str, Any] = {"max_model_len": 768, "num_threads": 1, "deterministic": True, "log_level": "error"}
ASKS = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
LENGTHS = (1, 63, 64, 65, 128, 300, 512, 640)


def prompt(seed: int, length: int = 300) -> list[int]:
    return np.random.default_rng(seed).integers(5, 90, length).tolist()


def engine(model: Path, role: str | None, link: Mapping[str, Any] | None = None, **more: Any) -> LLM:
    options = {**SHARED, **more}
    if role is not None:
        connector = {"kv_connector": "NixlConnector", "kv_role": role}
        options["kv_transfer_config"] = {**connector, "kv_connector_extra_config": dict(link or {})}
    return LLM(str(model), **options)


def ask(llm: LLM, token_ids: list[int], params: Mapping[str, Any] | None = None, **more: Any) -> RequestOutput:
    wanted = {"temperature": 0.0, "max_tokens": 6, "logprobs": 1, "ignore_eos": True, **more}
    [output] = llm.generate(token_ids, SamplingParams(**wanted, kv_transfer_params=params), use_tqdm=False)
    llm._engine.core.scheduler.check_integrity()
    return output


def computed(llm: LLM, token_ids: list[int], **more: Any) -> dict[str, Any]:
    """Let P compute a prompt, and return what its answer says for D. Proxies leave `min_tokens` out, as here."""
    params = ask(llm, token_ids, ASKS, **{**more, "max_tokens": 1, "min_tokens": 0}).kv_transfer_params
    assert params is not None
    return dict(params)


@pytest.fixture(scope="module")
def one(tiny_model: Path) -> Iterator[LLM]:
    with engine(tiny_model, None, enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def prefill(tiny_model: Path) -> Iterator[LLM]:
    with engine(tiny_model, "kv_producer", {"kv_lease_duration": 600}) as llm:  # however slow the machine is
        yield llm


@pytest.fixture(scope="module")
def decode(tiny_model: Path) -> Iterator[LLM]:
    with engine(tiny_model, "kv_consumer", {"fetch_timeout_s": 30}) as llm:
        yield llm


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """The warnings that the engines log."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    lines, handler, logger = list[str](), Lines(logging.WARNING), logging.getLogger("forkpoint")
    level = logger.level
    logger.setLevel(logging.WARNING)
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_a_decode_engine_continues_with_the_bits_of_one_engine(one: LLM, prefill: LLM, decode: LLM) -> None:
    before = decode.get_metrics()
    for seed, length in enumerate(LENGTHS):
        token_ids = prompt(seed, length)
        output = ask(prefill, token_ids, ASKS, max_tokens=1)
        answer = ask(decode, token_ids, output.kv_transfer_params)
        whole = (length - 1) // 64 * 64
        assert answer.cache.num_peer_tokens == answer.cache.num_restored_tokens == whole
        assert bits_of(answer) == bits_of(ask(one, token_ids))
    figures = decode.get_metrics()
    assert figures["peer_hit_tokens"] - before["peer_hit_tokens"] == sum((each - 1) // 64 * 64 for each in LENGTHS)
    assert figures["peer_failed_fetches"] == before["peer_failed_fetches"] and figures["peer_fetched_bytes"] > 0


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.9, "seed": 3, "n": 2, "frequency_penalty": 0.5, "min_tokens": 3},
        {"structured_outputs": StructuredOutputsParams(regex="[a-z]{6,9}")},
        {"cache_salt": "tenant"},
    ],
    ids=str,
)
def test_the_decode_engine_alone_samples(one: LLM, prefill: LLM, decode: LLM, more: dict[str, Any]) -> None:
    token_ids = prompt(20 + len(str(more)))
    answer = ask(decode, token_ids, computed(prefill, token_ids, **more), **more)
    assert answer.cache.num_peer_tokens == 256
    expected = ask(one, token_ids, **more)
    assert [each.token_ids for each in answer.outputs] == [each.token_ids for each in expected.outputs]
    assert bits_of(answer) == bits_of(expected)


@pytest.mark.parametrize("drafts", [False, True])
def test_a_prompt_is_fetched_while_it_is_computed(tiny_model: Path, one: LLM, decode: LLM, drafts: bool) -> None:
    """A proxy asks both engines at once, under a lease that it chose."""
    token_ids, lease, more = prompt(30 + drafts, 640), {"lease": 2**40 + drafts}, dict[str, Any]()
    if drafts:  # steps are submitted early
        more = {"async_scheduling": True, "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
    with engine(tiny_model, "kv_producer", max_num_batched_tokens=128, max_num_seqs=4, **more) as first:
        core = first._engine.core
        known = computed(first, prompt(33))  # the place of the engine
        early = {**known, "forkpoint": {**known["forkpoint"], **lease, "early": True}}
        first_id = start(first, token_ids, {**ASKS, "forkpoint": lease})
        second_id = start(decode, token_ids, early)
        peers, landed = decode._engine.core.scheduler.cache.tiers.peers, list[int]()
        assert peers is not None and peers.fetched is not None
        answers: dict[str, RequestOutput] = {}
        while second_id not in answers:
            if first._engine.has_unfinished():
                step(first, answers)
            time.sleep(0.02)  # a step of a real model takes longer than the fetch of a block
            step(decode, answers)
            landed += [len(found.landed) for found in peers.fetched._prompts.values() if first_id not in answers]
        core.scheduler.check_integrity()
    assert max(landed) >= 3, "blocks are in the arena before the last one is computed"
    assert answers[second_id].cache.num_peer_tokens == 576
    assert bits_of(answers[second_id]) == bits_of(ask(one, token_ids))


def start(llm: LLM, token_ids: list[int], params: Mapping[str, Any]) -> str:
    wanted = SamplingParams(temperature=0.0, max_tokens=6, logprobs=1, ignore_eos=True, kv_transfer_params=params)
    return llm._engine.add_request(llm._engine.inputs.prompt(token_ids, params=wanted), wanted)


def step(llm: LLM, answers: dict[str, RequestOutput]) -> None:
    """Run a step and collect the answers that it ends."""
    for state in llm._engine.advance():
        if state.finished:
            answers[state.request_id] = state.output()


def test_what_the_decode_engine_has_is_not_fetched(one: LLM, prefill: LLM, decode: LLM) -> None:
    first, second = prompt(40), prompt(40) + prompt(41)
    ask(decode, first, computed(prefill, first))
    before = decode.get_metrics()["peer_fetched_bytes"]
    answer = ask(decode, second, computed(prefill, second))
    fetched = decode.get_metrics()["peer_fetched_bytes"] - before
    layout = decode._engine.core.scheduler.layout
    assert fetched == 5 * layout.block_bytes + layout.slot_bytes, "blocks 5 to 9 and the state"
    assert answer.cache.num_peer_tokens == 320 and answer.cache.num_cached_tokens == 576
    assert bits_of(answer) == bits_of(ask(one, second))
    again = ask(decode, second, computed(prefill, second))
    assert again.cache.num_cached_tokens == 576 and again.cache.num_peer_tokens == 0, "nothing is missing"
    assert decode.get_metrics()["peer_fetched_bytes"] == before + fetched


def flipped(data: bytes, offset: int) -> bytes:
    """Change one byte of the contents of the first block, which begin after two short messages."""
    if offset <= 4500 < offset + len(data):
        place = 4500 - offset
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
    return data


DAMAGES: dict[str, tuple[Damage, str]] = {
    "wrong bytes": (flipped, "checksum"),
    "cut off": (lambda data, offset: data if offset < 3000 else None, "ended the connection early"),
    "another protocol": (lambda data, _: b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak this protocol"),
    "a huge message": (lambda data, _: b"FKP5" + b"\xff" * 100, "does not speak this protocol"),
    "no message": (lambda data, _: b"FKP5" + (100).to_bytes(4, "little") + bytes(100), "cannot be read"),
    "silence": (lambda data, _: SILENCE.wait(20) and None, "late|timed out|too long"),
}
SILENCE = threading.Event()


@pytest.fixture(scope="module")
def hasty(tiny_model: Path) -> Iterator[LLM]:
    """A decode engine that does not wait long."""
    with engine(tiny_model, "kv_consumer", {"fetch_timeout_s": 1.5}) as llm:
        yield llm
    SILENCE.set()


@pytest.mark.parametrize("name", DAMAGES)
def test_a_false_peer_means_that_the_decode_engine_computes(
    one: LLM, prefill: LLM, hasty: LLM, warnings: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetching = hasty._engine.core._runner.arena.peers.fetching  # type: ignore[union-attr]
    monkeypatch.setattr(fetching, "shares_memory", False)  # the peer sees the contents
    damage, says = DAMAGES[name]
    token_ids = prompt(50 + list(DAMAGES).index(name))
    params, before = computed(prefill, token_ids), hasty.get_metrics()["peer_failed_fetches"]
    with false_peer(params["remote_host"], params["remote_port"], damage) as port:
        answer = ask(hasty, token_ids, {**params, "remote_port": port})
        SILENCE.set()
    SILENCE.clear()
    check_computed(hasty, one, token_ids, answer, before, warnings, says)


def check_computed(
    llm: LLM, one: LLM, token_ids: list[int], answer: RequestOutput, before: int, warnings: list[str], says: str
) -> None:
    assert answer.cache.num_peer_tokens == answer.cache.num_cached_tokens == 0
    assert llm.get_metrics()["peer_failed_fetches"] == before + 1
    assert bits_of(answer) == bits_of(ask(one, token_ids))
    assert len(warnings) == 1, warnings
    assert any(each in warnings[0] for each in says.split("|")), warnings


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"remote_port": None}, "remote_port is not an integer"),
        ({"remote_host": "10.1.2.3"}, "remote_hosts of kv_connector_extra_config does not name 10.1.2.3"),
        ({"remote_host": "x" * 1000}, "remote_host is not a text"),
        ({"remote_engine_id": "earlier"}, "it has been restarted"),
        ({"remote_num_tokens": 2**30}, "it computed another prompt"),
        ({"remote_num_tokens": 65}, "not a multiple of 64"),
        ({"forkpoint": None}, "another kind of engine"),
        ({"forkpoint": {"namespace": "00" * 16}}, "another model"),
        ({"forkpoint": {"more_ports": [1]}}, "it has tensor_parallel_size=2 and this engine 1"),
        ({"forkpoint": {"last_hash": "zz"}}, "non-hexadecimal"),
        ({"forkpoint": {"last_hash": "00" * 16}}, "it computed another prompt"),
        ({"forkpoint": {"origin": "nowhere"}}, "not a valid Origin"),
        ({"forkpoint": {"origin": "junction"}}, "checksum"),
    ],
    ids=str,
)
def test_an_offer_that_does_not_fit_is_computed(
    one: LLM, prefill: LLM, hasty: LLM, warnings: list[str], changes: dict[str, Any], says: str
) -> None:
    token_ids = prompt(70 + sum(map(ord, str(changes))))
    params, before = computed(prefill, token_ids), hasty.get_metrics()["peer_failed_fetches"]
    if isinstance(changes.get("forkpoint"), dict):
        changes = {"forkpoint": {**params["forkpoint"], **changes["forkpoint"]}}
    answer = ask(hasty, token_ids, {**params, **changes})
    check_computed(hasty, one, token_ids, answer, before, warnings, says)


def test_a_dead_peer_is_not_asked_again(
    one: LLM, prefill: LLM, hasty: LLM, warnings: list[str], free_port: int
) -> None:
    for seed, says in ((90, "refused"), (91, "has not answered")):
        warnings.clear()
        params, before = computed(prefill, prompt(seed)), hasty.get_metrics()["peer_failed_fetches"]
        answer = ask(hasty, prompt(seed), {**params, "remote_port": free_port})
        check_computed(hasty, one, prompt(seed), answer, before, warnings, says)


def test_engines_of_one_name_are_told_apart(
    tiny_model: Path, one: LLM, free_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options that name an engine are often those of all engines, and of its next start."""
    options: dict[str, Any] = {**SHARED, "log_level": "warning"}
    named = {"kv_connector": "NixlConnector", "engine_id": "name", "kv_connector_extra_config": {}}
    at_port = {**named, "kv_role": "kv_producer", "kv_connector_extra_config": {"side_channel_port": free_port}}
    with LLM(str(tiny_model), **options, kv_transfer_config={**named, "kv_role": "kv_consumer"}) as second:
        with LLM(str(tiny_model), **options, kv_transfer_config=at_port) as first:
            answer = ask(second, prompt(130), computed(first, prompt(130)))
            assert answer.cache.num_peer_tokens == 256
            params, before = computed(first, prompt(131)), second.get_metrics()["peer_failed_fetches"]
        with LLM(str(tiny_model), **options, kv_transfer_config=at_port) as first:
            computed(first, prompt(132))
            answer = ask(second, prompt(131), params)
            lines = capsys.readouterr().err.splitlines()
            check_computed(second, one, prompt(131), answer, before, lines, "it has been restarted")


def test_an_offer_ends(one: LLM, prefill: LLM, hasty: LLM, warnings: list[str]) -> None:
    params, before = computed(prefill, prompt(95)), hasty.get_metrics()["peer_failed_fetches"]
    assert prefill.reset_prefix_cache()
    computed(prefill, prompt(96))
    answer = ask(hasty, prompt(95), params)
    check_computed(hasty, one, prompt(95), answer, before, warnings, "the lease has ended")
    other = computed(prefill, prompt(97), cache_salt="one tenant")
    warnings.clear()
    answer = ask(hasty, prompt(97), other, cache_salt="another tenant")
    check_computed(hasty, one, prompt(97), answer, before + 1, warnings, "another cache_salt")


def test_memory_comes_back(prefill: LLM, decode: LLM) -> None:
    """On P when a prompt was fetched, and on D when it was restored or nobody waits for it any more."""
    token_ids = prompt(98)
    assert prefill.reset_prefix_cache()
    peers = decode._engine.core.scheduler.cache.tiers.peers
    assert peers is not None and peers.fetched is not None
    arena = decode._engine.core._runner.arena  # type: ignore[union-attr]
    ask(decode, token_ids, computed(prefill, token_ids))
    ask(decode, prompt(99, 20))  # a plan that carries what is to be forgotten
    assert not peers.fetched._prompts and not arena.peers.fetching._ordered
    offered = prefill._engine.core._runner.arena.peers.offered  # type: ignore[union-attr]
    with offered._changed:
        assert offered._changed.wait_for(lambda: not offered._leases, 10) and offered.num_bytes == 0


def test_nobody_waits_for_a_fetch_any_more(prefill: LLM, hasty: LLM) -> None:
    params, core = computed(prefill, prompt(120)), hasty._engine.core
    peers = core.scheduler.cache.tiers.peers
    assert peers is not None and peers.fetched is not None
    with false_peer(params["remote_host"], params["remote_port"], lambda _, __: SILENCE.wait(20) and None) as port:
        wanted = SamplingParams(max_tokens=4, kv_transfer_params={**params, "remote_port": port})
        name = hasty._engine.add_request(hasty._engine.inputs.prompt(prompt(120), params=wanted), wanted)
        for _ in range(3):
            assert core.step() == [] and core.scheduler.stats().num_waiting == 1
        hasty._engine.abort(name)
        core.scheduler.check_integrity()
        assert not peers.fetched._prompts and not peers.fetched._of and peers.fetched._num_bytes == 0
        while core.has_unfinished():
            core.step()
        SILENCE.set()
    SILENCE.clear()


@pytest.mark.parametrize("where", ["tight arena", "tight prefill arena", "mp", "host tier", "late streams"])
def test_many_prompts_at_once(
    tiny_model: Path, one: LLM, prefill: LLM, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "late streams":  # as on a device with memory of its own
        monkeypatch.setattr("forkpoint.worker.build.resolve_platform", lambda *given: LatePlatform(0, 0.7))
    prompts = [prompt(100 + seed, 520) for seed in range(8)]
    options: dict[str, Any] = {"kv_cache_memory_bytes": ROOM}
    if where == "mp":
        options = {"distributed_executor_backend": "mp"}
    elif where == "host tier":
        options["kv_offloading_size"] = 0.05
    wanted = {"temperature": 0.0, "max_tokens": 6, "logprobs": 1, "ignore_eos": True}
    if where in ("tight prefill arena", "late streams"):
        asks = SamplingParams(max_tokens=1, kv_transfer_params=ASKS)
        first = engine(tiny_model, "kv_producer", kv_cache_memory_bytes=ROOM)
        params = [dict(output.kv_transfer_params or {}) for output in first.generate(prompts, asks, use_tqdm=False)]
        first._engine.core.scheduler.check_integrity()
    else:
        params = [computed(prefill, each) for each in prompts]
    with engine(tiny_model, "kv_consumer", {"fetch_timeout_s": 30}, **options) as llm:
        each = [SamplingParams(**wanted, kv_transfer_params=one_of) for one_of in params]
        answers = llm.generate(prompts, each, use_tqdm=False)
        llm._engine.core.scheduler.check_integrity()
    assert [bits_of(answer) for answer in answers] == [bits_of(ask(one, each)) for each in prompts]
    restored = [answer.cache.num_peer_tokens for answer in answers]
    assert set(restored) <= {0, 512} and sum(restored) >= 4 * 512
    if where in ("tight prefill arena", "late streams"):
        first.close()


@pytest.mark.skipif(not CAN_SHARE, reason="this system has no memory for several processes")
@pytest.mark.parametrize("num_prompts", [2, 30], ids=["a small ring", "a ring for all"])
def test_prompts_come_from_the_ring(
    tiny_model: Path, one: LLM, num_prompts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on devices that can read each other's memory. Prompts that were written over are fetched or computed."""
    monkeypatch.setattr("forkpoint.worker.build.resolve_platform", lambda *given: LatePlatform(0, 0.7))
    layout = one._engine.core.scheduler.cache.layout
    ring = {"ring_bytes": num_prompts * (8 * layout.block_bytes + layout.slot_bytes)}
    found, find = list[object](), PeerRings.find

    def noted(*given: Any) -> Any:
        found.append(find(*given))
        return found[-1]

    monkeypatch.setattr(PeerRings, "find", noted)
    prompts = [prompt(200 + seed, 520) for seed in range(13)]
    with (
        engine(tiny_model, "kv_producer", ring) as first,
        engine(tiny_model, "kv_consumer", {"fetch_timeout_s": 30}) as llm,
    ):
        ask(llm, prompts[0], computed(first, prompts[0]))
        assert not found, "the ring was opened before"
        params = [computed(first, each) for each in prompts[1:]]
        wanted = {"temperature": 0.0, "max_tokens": 6, "logprobs": 1, "ignore_eos": True}
        each = [SamplingParams(**wanted, kv_transfer_params=one_of) for one_of in params]
        answers = llm.generate(prompts[1:], each, use_tqdm=False)
        llm._engine.core.scheduler.check_integrity()
    assert [bits_of(answer) for answer in answers] == [bits_of(ask(one, each)) for each in prompts[1:]]
    restored = [answer.cache.num_peer_tokens for answer in answers]  # late copies may let a prompt be computed
    assert set(restored) <= {0, 512} and sum(restored) >= 4 * 512
    # A prompt is copied again if an earlier one of the queue arrives meanwhile, and is restored first.
    least = 1 if num_prompts == 2 else 9 * (sum(restored) // 512)
    assert least <= len(found) and None not in found


@pytest.mark.parametrize("family", ["qwen3", "lfm2", "falcon_mamba", "mistral", "lara_mini"])
def test_families(tmp_path: Path, family: str) -> None:
    """Without states, with slots smaller than blocks, without attention, with windows alone and among others."""
    kind, config = {**MODELS, **MORE_MODELS}[family]
    write_checkpoint(tmp_path, kind, vocab_size=128, **config)
    plain = {"skip_tokenizer_init": True, "max_model_len": 512}
    with (
        engine(tmp_path, "kv_producer", **plain) as first,
        engine(tmp_path, "kv_both", {"fetch_timeout_s": 30}, **plain) as second,
    ):
        answer = ask(second, prompt(1), computed(first, prompt(1)))
        assert answer.cache.num_peer_tokens == 256
        ids = ask(first, prompt(1))
        assert bits_of(answer) == bits_of(ids)


def test_no_memory_is_left_free_for_a_ring_that_cannot_be(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs whose memory other processes cannot open."""

    def started(lends_memory: bool) -> int:
        platform = LatePlatform(0)
        platform.lends_memory = lends_memory
        monkeypatch.setattr(platform, "arena_bytes", lambda utilization: 1 << 31)
        monkeypatch.setattr("forkpoint.worker.build.resolve_platform", lambda *given: platform)
        with engine(tiny_model, "kv_producer", {"ring_bytes": 1 << 27}) as llm:
            layout = llm._engine.core.scheduler.cache.layout
            return llm._engine.core.scheduler.cache.arena.num_pages * layout.page_bytes

    lost = started(lends_memory=False) - started(lends_memory=True)
    assert abs(lost - (1 << 27)) < 1 << 20
