"""Routing of requests to the replica of a role with the fewest unfinished ones.

Ray's own choice goes by queue lengths that replicas report, which a burst outruns. Here one process
alone asks the replicas, so its own count is exact. Only Ray imports this module, by its name.
"""

from __future__ import annotations

import random
from asyncio import Future
from collections import Counter
from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)


class LeastRequestsRouter(RequestRouter):
    """Prefers the replica with the fewest requests of this process; see `RequestRouter`."""

    def initialize_state(self, **_: Any) -> None:
        """Begin without requests."""
        # request -> its replica, and the future that is cancelled where none was reached
        self._held: dict[str, tuple[ReplicaID, Future[Any]]] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return all replicas, the one with the fewest requests first, equal ones in any order."""
        name = pending_request.metadata.internal_request_id if pending_request else ""
        held = self._held.items()
        self._held = {n: at for n, at in held if n != name and not at[1].cancelled()}
        count = Counter(replica for replica, _ in self._held.values())
        mixed = random.sample(candidate_replicas, len(candidate_replicas))
        order = sorted(mixed, key=lambda each: count[each.replica_id])
        if pending_request is not None and order:  # counted now: others are chosen for meanwhile
            self._held[name] = (order[0].replica_id, pending_request.future)
        return [[each] for each in order]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Note the replica that took a request; a full one passes it on."""
        name = pending_request.metadata.internal_request_id
        self._held[name] = (replica_id, pending_request.future)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Forget a request that is over."""
        if self._held.get(internal_request_id, (None,))[0] == replica_id:
            del self._held[internal_request_id]
