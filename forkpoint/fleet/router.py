"""Chooses a replica for each request, inside Ray Serve."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from forkpoint.config import BLOCK_SIZE
from forkpoint.fleet.messages import RoutingHint
from forkpoint.routing.feed import EventFeed, RestorableIndex
from forkpoint.routing.router import Router


class RestorableRouter(RequestRouter):
    """Applies a rule of `routing.router` to Ray's replicas.

    The first argument of every call to a replica is a RoutingHint.
    """

    def initialize_state(self, router: str) -> None:
        self._router = Router(router)
        self._feeds: dict[ReplicaID, EventFeed] = {}
        self._open: dict[str, tuple[PendingRequest, ReplicaID]] = {}  # Ray's id -> a request that has not ended

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Replace the list of replicas; subscribe to the events of new ones, leave lost ones."""
        super().update_replicas(replicas)
        running = {replica.replica_id: replica for replica in replicas}
        for gone in self._feeds.keys() - running.keys():
            self._feeds.pop(gone).close()
        for name in running.keys() - self._feeds.keys():
            self._feeds[name] = EventFeed(**running[name].replica_metadata)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        name = pending_request.metadata.internal_request_id
        if name in self._open:
            self._open[name] = (pending_request, replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._open.pop(internal_request_id, None)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return ranks of replicas: the best one, the others that were not tried, those that were.

        If any replica will do, all fresh ones share a rank, and Ray takes the one with the fewest requests.
        """
        if pending_request is None or not pending_request.args:
            return [candidate_replicas]
        route: RoutingHint = pending_request.args[0]
        hashes = route.block_hashes
        fresh = [replica for replica in candidate_replicas if replica.replica_id.unique_id not in route.tried]
        tried = [replica for replica in candidate_replicas if replica not in fresh]
        if not fresh or hashes is None:
            return [fresh or tried]
        names, num_requests = [replica.replica_id for replica in fresh], self._num_requests()

        def restorable(index: int) -> int:
            return self._index(names[index]).restorable(hashes) * BLOCK_SIZE

        best = fresh.pop(self._router.choose([num_requests[name] for name in names], restorable))
        self._open[pending_request.metadata.internal_request_id] = (pending_request, best.replica_id)
        return [ranks for ranks in ([best], fresh, tried) if ranks]

    def _num_requests(self) -> Counter[ReplicaID]:
        """Count for each replica the open requests that this process has sent.

        Ray does not report requests whose clients left before a replica was chosen, so cancelled ones are removed here.
        """
        for name in [name for name, (request, _) in self._open.items() if request.future.cancelled()]:
            del self._open[name]
        return Counter(replica for _, replica in self._open.values())

    def _index(self, name: ReplicaID) -> RestorableIndex:
        feed = self._feeds.get(name)
        if feed is None:
            return RestorableIndex()
        return feed.index
