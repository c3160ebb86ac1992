"""Engines that hand prompts to each other, whatever happens to them: answers are those of an uncached run.

`FORKPOINT_EXAMPLES` is the number of examples.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from forkpoint.cache.peer_offers import PeerFacts
from forkpoint.config import CacheConfig
from forkpoint.errors import RequestTooLargeError
from forkpoint.images import ImageSpan
from forkpoint.params import FinishReason
from forkpoint.sched.request import Request
from tests.cache.published import Listener
from tests.hash_peers import HashPeers
from tests.sched.harness import WITH_WINDOWS, Harness, image_span, tokens

NUM_EXAMPLES = int(os.environ.get("FORKPOINT_EXAMPLES", "30"))
TRUNK = tokens(99, 2000)
ASKS = {"do_remote_decode": True}
FIRST_LEASE: Final = 2**40  # that a proxy chose


@dataclass
class Engine:
    """An engine, and what its requests may not be blamed for."""

    harness: Harness
    listener: Listener
    spoiled: set[str] = field(default_factory=set)  # aborted, or made to fail
    num_broken: int = 0  # steps made to fail

    @property
    def name(self) -> str:
        assert self.harness.peers is not None
        return self.harness.peers.engine_id

    @property
    def live(self) -> list[str]:
        return sorted(self.harness.sched._requests)


class Fleet:
    """Two or three engines of one layout, each with options and tiers of its own."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.layout = self.rng.choice(sorted(WITH_WINDOWS))
        self.links: dict[str, HashPeers] = {}  # by the engine's name
        self.num_engines = self.num_requests = self.num_leases = self.num_peer_tokens = 0
        self.engines = [self._engine() for _ in range(self.rng.choice([2, 2, 3]))]
        self.places: dict[str, dict[str, Any]] = {}  # by the engine's name: its last answer's parameters
        self.computing: list[tuple[Engine, Request, Callable[[dict[str, Any]], None]]] = []

    def _engine(self) -> Engine:
        rng, layout = self.rng, WITH_WINDOWS[self.layout]
        stored, spare, max_num_seqs = layout.in_tiers(), rng.randint(1, 12), rng.randint(1, 6)
        host, disk = rng.choice([0, 0, 200, 2000]), rng.choice([0, 0, 200, 2000])
        most = rng.choice([1 << 40, 8 * (stored.block_bytes + stored.slot_bytes)])
        name = f"engine {self.num_engines}"
        self.num_engines += 1
        harness = Harness(
            layout,
            layout.num_pages_for(rng.choice([300, 900, 6000]), spare) + 2,
            budget=max(rng.choice([128, 500, 2048]), max_num_seqs + 63),
            max_num_seqs=max_num_seqs,
            async_scheduling=rng.random() < 0.5,
            deterministic=rng.random() < 0.4,
            most_drafts=rng.choice([0, 0, 1, 4]),
            draft_chance=rng.choice([0.0, 0.5, 1.0]),
            state_write_interval=rng.choice([1, 8]),
            encoder_budget=rng.choice([None, 100, 1]),
            encoder_cache_size=rng.choice([0, 200, 1 << 15]),
            num_host_pages=stored.num_pages_for(host, spare) + 1 if host else 0,
            host_streams=rng.random() < 0.3,
            loaded_at_once=rng.choice([0, 1]),
            num_disk_pages=stored.num_pages_for(disk, spare) + 1 if disk else 0,
            disk_delay=rng.choice([0, 2, 9]),
            cache=CacheConfig(checkpoint_interval=rng.choice([0, 64, 512]), num_ghosts=rng.choice([0, 1000])),
            peers=PeerFacts(b"n" * 16, name, "127.0.0.1", 1, ("loopback",), most, 3600.0),
        )
        chances = {"fail_chance": rng.choice([0.0, 0.0, 0.2]), "lose_chance": rng.choice([0.0, 0.0, 0.05])}
        link = HashPeers(most_delay=rng.choice([0, 2, 9]), random=rng, **chances)
        link.engines = self.links
        harness.runner.peers = self.links[name] = link
        return Engine(harness, Listener(harness.sched.cache))

    def act(self) -> None:
        """Do one of the things that happen to a fleet."""
        rng, engine = self.rng, self.rng.choice(self.engines)
        act = rng.choices(
            (self.arrive, self.abort, self.preempt, self.poison, self.break_step, self.restart, self.reset, self.steps),
            (45, 7, 5, 3, 3, 3, 2, 32),
        )[0]
        act(engine)
        for each in self.engines:
            each.listener.check([TRUNK[:700]])
        for entry in list(self.computing):
            prefill, request, hand_over = entry
            if request.id not in prefill.live:
                self.computing.remove(entry)
                if request.kv_transfer_params:
                    self.places[prefill.name] = dict(request.kv_transfer_params)
                    hand_over(dict(request.kv_transfer_params))

    def arrive(self, decode: Engine) -> None:
        """A prompt, which another engine computes before or meanwhile."""
        rng = self.rng
        prefill = rng.choice([each for each in self.engines if each is not decode])
        prompt, images, salt = self._prompt()
        more: dict[str, Any] = {"images": images, "cache_salt": salt, "priority": rng.randint(0, 2)}
        other = prompt  # a proxy may mix up requests
        if rng.random() < 0.1:
            other = np.concatenate([prompt[: len(prompt) // 2 + 1], tokens(7, rng.randint(1, 300))])
        fits = tuple(image for image in images if image.end <= len(other))
        outputs, copies = rng.randint(1, 60), rng.choice([1, 1, 1, 2])

        def hand_over(params: dict[str, Any]) -> None:
            for _ in range(copies):
                self._add(decode, other, outputs, kv_transfer_params=params, **{**more, "images": fits})

        asks, place = dict[str, Any](ASKS), self.places.get(prefill.name)
        if rng.random() < 0.6:
            asks["forkpoint"] = {"lease": self._lease()}
        is_first = rng.random() < 0.5
        is_early = place is not None and "forkpoint" in asks and rng.random() < 0.7
        if place is not None and is_early and not is_first:
            hand_over({**place, "forkpoint": {**place["forkpoint"], **asks["forkpoint"], "early": True}})
        request = self._add(prefill, prompt, rng.choice([1, 1, 20]), kv_transfer_params=asks, **more)
        if place is not None and is_early and is_first:
            hand_over({**place, "forkpoint": {**place["forkpoint"], **asks["forkpoint"], "early": True}})
        if request is None and "forkpoint" in asks:  # a server does so for requests that it refuses
            prefill.harness.sched.cache.tiers.peers.end_lease(asks["forkpoint"]["lease"])  # type: ignore[union-attr]
        if request is not None:
            self.computing.append((prefill, request, hand_over if not is_early else lambda params: None))

    def _lease(self) -> int:
        """Return a new lease, or sometimes one that was chosen before."""
        self.num_leases += 1
        return FIRST_LEASE + (self.rng.randint(0, 3) if self.rng.random() < 0.15 else self.num_leases)

    def _prompt(self) -> tuple[np.ndarray, tuple[ImageSpan, ...], str]:
        rng = self.rng
        asked = [request for each in self.engines for request in each.harness.requests.values()]
        if asked and rng.random() < 0.4:
            request = rng.choice(asked)
            more = tokens(rng.randint(0, 5), rng.randint(1, 200))
            return np.concatenate([request.all_token_ids(), more]), request.images, request.params.cache_salt
        shared = TRUNK[: rng.choice([0, 64, 256, rng.randint(0, 900)])]
        prompt = np.concatenate([shared, tokens(rng.randint(0, 3), rng.randint(1, 500))])
        images, end = list[ImageSpan](), 0
        for _ in range(rng.choice([0, 0, 1, 3])):
            start = end + rng.choice([0, 1, 64, 200])
            images.append(image_span(start, rng.randint(1, 20), rng.choice([1, 16]), rng.randint(0, 3)))
            end = images[-1].end
        return prompt, tuple(image for image in images if image.end <= len(prompt)), rng.choice(["", "", "b"])

    def _add(self, engine: Engine, prompt: np.ndarray, outputs: int, **options: Any) -> Request | None:
        self.num_requests += 1
        try:
            return engine.harness.add(f"r{self.num_requests}", prompt.astype(np.int32), outputs, **options)
        except RequestTooLargeError:
            return None

    def abort(self, engine: Engine) -> None:
        if engine.live:
            name = self.rng.choice(engine.live)
            engine.spoiled.add(name)
            engine.harness.sched.abort(name)

    def preempt(self, engine: Engine) -> None:
        running = engine.harness.sched._running.requests
        if running and not engine.harness.in_flight:
            engine.harness.sched._departures.preempt(self.rng.choice(running))

    def poison(self, engine: Engine) -> None:
        """The model will produce NaN for a request."""
        if engine.live:
            name = self.rng.choice(engine.live)
            engine.spoiled.add(name)
            engine.harness.runner.non_finite_requests.add(name)

    def break_step(self, engine: Engine) -> None:
        engine.harness.fail_next = True
        engine.num_broken += 1

    def reset(self, engine: Engine) -> None:
        engine.harness.sched.reset_prefix_cache()

    def restart(self, engine: Engine) -> None:
        """Another engine takes the place of one that was killed."""
        self.engines[self.engines.index(engine)] = self._engine()
        del self.links[engine.name]
        self.computing = [entry for entry in self.computing if entry[0] is not engine]

    def steps(self, engine: Engine) -> None:
        for _ in range(self.rng.randint(1, 25)):
            self.rng.choice(self.engines).harness.step()

    def finish(self) -> None:
        """Run all engines to the end, and check answers and what is left."""
        for _ in range(100_000):
            went_on = [each.harness.step() for each in self.engines]
            if not any(went_on):
                break
        else:
            raise AssertionError("still busy")
        for each in self.engines:
            failed = {name for name in each.harness.requests if self._check(each, name)}
            assert len(failed - each.spoiled) <= each.num_broken, "a request ended for another's fault"
            each.harness.check_hits()
            self._check_left(each.harness)

    def _check(self, engine: Engine, name: str) -> bool:
        """Check a request's answer. Returns whether it failed."""
        harness = engine.harness
        failed = any(update.finish_reason is FinishReason.ERROR for update in harness.updates[name])
        output, expected = harness.output(name), harness.expected(name)
        if failed or name in engine.spoiled:
            assert output == expected[: len(output)], f"{name}: wrong before it ended early"
        else:
            assert output == expected, f"{name}: cached and uncached outputs differ"
            self.num_peer_tokens += harness.requests[name].cache.num_peer_tokens
        return failed

    def _check_left(self, harness: Harness) -> None:
        peers = harness.sched.cache.tiers.peers
        assert peers is not None and peers.fetched is not None and not peers._open
        assert not peers.fetched._prompts and not peers.fetched._of and peers.fetched._num_bytes == 0
        harness.sched.reset_prefix_cache()
        harness.run()
        left = harness.sched.stats().cache
        assert not harness.runner.peers.buffers
        assert left.num_free_pages == left.num_pages - 1
        assert left.num_free_host_pages == max(0, left.num_host_pages - 1)
        assert left.num_free_disk_pages == max(0, left.num_disk_pages - 1)


def test_engines_hand_over_prompts() -> None:
    num_peer_tokens = 0
    for seed in range(NUM_EXAMPLES):
        try:
            num_peer_tokens += play(seed)
        except Exception as error:
            raise AssertionError(f"example {seed} failed") from error
    assert num_peer_tokens > 100 * NUM_EXAMPLES


def play(seed: int) -> int:
    """Return how many tokens were handed over in an example."""
    fleet = Fleet(seed)
    for _ in range(fleet.rng.randint(5, 40)):
        fleet.act()
    fleet.finish()
    return fleet.num_peer_tokens
