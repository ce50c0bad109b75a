"""Ray Serve's request router of the replicas: by prefix, tenant and load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from functools import partial
from typing import Any, ClassVar

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from harness.host.remote.work import Work
from harness.serve.replicas.affinity import PrefixAffinity
from harness.serve.replicas.work import AnswerEnd, Question

STOPPED_SECONDS = 60.0
"""How long a replica gets no request after its engine said that it hangs."""


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Sends a request to the replica with most of its prompt cached; see ``PrefixAffinity``."""

    running: frozenset[str] = frozenset()
    """The replicas as Ray Serve told last, for all routers of this process."""

    stopped: ClassVar[dict[str, float]] = {}
    """Replicas whose engine said that it has ended or hangs, and when; see ``ReplicatedDriver``."""

    def initialize_state(self, **_: Any) -> None:
        """Called by Ray Serve before the first request."""
        self._affinity = PrefixAffinity()
        self._meant: dict[str, str] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray Serve when replicas come or go."""
        super().update_replicas(replicas)
        PrefixRouter.running = frozenset(one.replica_id.unique_id for one in replicas)
        self._affinity.keep(PrefixRouter.running)
        for name in PrefixRouter.stopped.keys() - PrefixRouter.running:
            PrefixRouter.stopped.pop(name, None)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """One rank a replica, the best first."""
        by_name = {one.replica_id.unique_id: one for one in candidate_replicas}
        PrefixRouter.running = frozenset(by_name)
        argument = pending_request.args[0] if pending_request and pending_request.args else None
        match argument:
            case Work(request=request):
                assert pending_request is not None
                self._forget(pending_request)
                names = self._affinity.rank(request.tenant, request.prompt, _well(by_name))
                if names:
                    # Count it now, since others are routed before it arrives.
                    self._meant[pending_request.metadata.internal_request_id] = names[0]
                    self._affinity.sent(request.tenant, request.prompt, names[0])
                    pending_request.future.add_done_callback(
                        partial(self._forget_cancelled, pending_request)
                    )
            case Question(replica=name) | AnswerEnd(replica=name) if name in by_name:
                names = [name]
            case _:
                names = list(by_name)
        return [[by_name[name]] for name in names]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Called by Ray Serve."""
        argument = pending_request.args[0] if pending_request.args else None
        meant = self._meant.pop(pending_request.metadata.internal_request_id, None)
        if isinstance(argument, Work) and meant != replica_id.unique_id:
            if meant is not None:
                self._affinity.ended(meant)
            request = argument.request
            self._affinity.sent(request.tenant, request.prompt, replica_id.unique_id)

    def _forget_cancelled(
        self, pending_request: PendingRequest, future: asyncio.Future[Any]
    ) -> None:
        if future.cancelled():
            self._forget(pending_request)

    def _forget(self, pending_request: PendingRequest) -> None:
        meant = self._meant.pop(pending_request.metadata.internal_request_id, None)
        if meant is not None:
            self._affinity.ended(meant)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Ray Serve."""
        self._affinity.ended(replica_id.unique_id)


def stopped_lately() -> frozenset[str]:
    """The replicas whose engine said within STOPPED_SECONDS that it hangs."""
    now = time.monotonic()
    # Other threads add to it.
    stopped = PrefixRouter.stopped.copy()
    return frozenset(name for name, at in stopped.items() if now < at + STOPPED_SECONDS)


def _well(names: Collection[str]) -> Collection[str]:
    """The replicas whose engine did not stop lately, or all if there are none."""
    stopped = stopped_lately()
    return [name for name in names if name not in stopped] or names
