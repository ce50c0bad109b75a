"""Ray Serve's request router of the replicas: by prefix, by tenant, by load."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from harness.serve.replicas.affinity import PrefixAffinity
from harness.serve.replicas.work import Question, Work


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Sends a request where most of its prompt is cached; see ``PrefixAffinity``."""

    running: frozenset[str] = frozenset()
    """The replicas there were when a request was last routed, of all routers of this process."""

    def initialize_state(self, **_: Any) -> None:
        """Called by Ray Serve before the first request."""
        self._affinity = PrefixAffinity()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """One rank a replica, the best first."""
        by_name = {one.replica_id.unique_id: one for one in candidate_replicas}
        PrefixRouter.running = frozenset(by_name)
        asked = pending_request.args[0] if pending_request and pending_request.args else None
        match asked:
            case Work(request=request):
                names = self._affinity.rank(request.tenant, request.prompt, by_name)
            case Question(replica=name) if name in by_name:
                names = [name]
            case _:
                names = list(by_name)
        return [[by_name[name]] for name in names]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Called by Ray Serve."""
        asked = pending_request.args[0] if pending_request.args else None
        if isinstance(asked, Work):
            request = asked.request
            self._affinity.sent(request.tenant, request.prompt, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Ray Serve."""
        self._affinity.ended(replica_id.unique_id)
