"""What the driver of replicas uses of Ray Serve, in this process: real replicas, and our router."""

import asyncio
import itertools
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

OURS = [f"harness.serve.replicas.{name}" for name in ("driver", "router")]
"""Modules that import Ray."""


class _Exception(Exception):
    pass


class _Base:
    """Of the router, and of what only types name."""

    def update_replicas(self, replicas: list[Any]) -> None:
        """The router's: Ray Serve tells which replicas there are."""


def _modules() -> dict[str, ModuleType]:
    names = itertools.count()
    given: dict[str, dict[str, Any]] = {
        "ray": {},
        "ray.exceptions": {
            name: type(name, (_Exception,), {})
            for name in ("RayActorError", "RayError", "TaskCancelledError")
        },
        "ray.serve": {
            "get_replica_context": lambda: SimpleNamespace(
                replica_id=SimpleNamespace(unique_id=f"replica {next(names)}")
            )
        },
        "ray.serve.exceptions": {"RayServeException": type("RayServeException", (_Exception,), {})},
        "ray.serve.handle": {"DeploymentHandle": _Base},
        "ray.serve.request_router": dict.fromkeys(
            ("PendingRequest", "ReplicaID", "RequestRouter", "RunningReplica"), _Base
        ),
    }
    made = {}
    for name, values in given.items():
        made[name] = ModuleType(name)
        vars(made[name]).update(values)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(made[parent], last, made[name])
    return made


@contextmanager
def doubled_ray() -> Iterator[None]:
    """Ray is the double, whether it is installed or not."""
    names = [*_modules(), *OURS]
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.modules.update(_modules())
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)


class Handle:
    """The handle of a deployment of ``replicas``."""

    def __init__(self, replicas: list[Any]) -> None:
        from harness.serve.replicas.router import PrefixRouter

        self._replicas = {one._name: one for one in replicas}
        self._owned = list(replicas)
        self._router = PrefixRouter()
        self._router.initialize_state()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.generate = SimpleNamespace(remote=lambda work: Response(self, work))
        self.ask = SimpleNamespace(remote=lambda question: self._asked("ask", question))
        self.end_answer = SimpleNamespace(remote=lambda end: self._asked("end_answer", end))

    def options(self, *, stream: bool) -> "Handle":
        return self

    def run(self, work: Coroutine[Any, Any, Any]) -> "Future[Any]":
        """Begin a coroutine on the thread of the handle."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def chosen(self, argument: object) -> Any:
        """The replica that the router sends a request or a question to."""
        candidates = self._candidates()
        metadata = SimpleNamespace(internal_request_id=str(id(argument)))
        pending = SimpleNamespace(args=[argument], metadata=metadata, future=asyncio.Future)
        pending.future = SimpleNamespace(add_done_callback=lambda done: None)
        ranked = self.run(self._router.choose_replicas(candidates, pending)).result()  # type: ignore[arg-type]
        return self._replicas[ranked[0][0].replica_id.unique_id]

    def replace(self, replicas: list[Any]) -> None:
        """Only some of the replicas run from now on."""
        self._replicas = {one._name: one for one in replicas}
        self._router.update_replicas(self._candidates())

    def _candidates(self) -> list[Any]:
        return [
            SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in self._replicas
        ]

    def _asked(self, method: str, argument: object) -> Any:
        future = self.run(getattr(self.chosen(argument), method)(argument))
        return SimpleNamespace(result=lambda timeout_s: future.result(timeout_s))

    def close(self) -> None:
        """End the thread, and the replicas."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for one in self._owned:
            one._owned.close()
            one._threads.shutdown()


class Response:
    """The updates of one request, from the replica that was chosen for it."""

    def __init__(self, handle: Handle, work: Any) -> None:
        self._handle = handle
        self._updates: AsyncIterator[Any] = handle.chosen(work).generate(work)

    def __iter__(self) -> Iterator[Any]:
        while True:
            update = self._handle.run(self._next()).result()
            if update is None:
                return
            yield update

    async def _next(self) -> Any:
        return await anext(self._updates, None)

    def cancel(self) -> None:
        pass
