"""The model that answers now, and those that only end what they began.

A model takes another's place while that one works: it is loaded beside it, new requests are its
from then on, and the other is let go of when the last of its answers was sent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from contract.errors import DoesNotFit, OutOfMemory, RequestError, ZincError
from harness.serve.accounts import Accounts
from harness.serve.errors import RESTART_SECONDS, ApiError
from harness.serve.ledger_store import LedgerStore
from harness.serve.metrics import Metrics
from harness.serve.model import ServedModel
from harness.serve.service import Service

Opener = Callable[[Path, str, ExitStack], ServedModel]
"""Loads the model in a file, to be called by a name; it ends with the stack."""
CLOSE_SECONDS = 10.0
"""How long what still answers may take to notice that the server is closed."""
log = logging.getLogger("zinc_rt.serve")


@dataclass(eq=False)
class _Place:
    """A loaded model; ``leases`` requests use it."""

    service: Service
    owned: ExitStack
    leases: int = 0


class Lease:
    """The right to use a model until ``release``: it stays whole so long."""

    def __init__(self, service: Service, end: Callable[[], None]) -> None:
        self.service = service
        self._end: Callable[[], None] | None = end

    def release(self) -> None:
        """Give it back; a second time does nothing."""
        end, self._end = self._end, None
        if end is not None:
            end()


class Serving:
    """Loads the model in ``path``, and others in its place. A context manager.

    ``began_with`` are name and file of the model that the server was started with, which may be
    another one. Raises what ``open_it`` raises.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        open_it: Opener,
        accounts: Accounts,
        ledger: LedgerStore,
        began_with: tuple[str, Path] | None = None,
    ) -> None:
        self.began_with = began_with or (name, path)
        self.accounts = accounts
        self._ledger = ledger
        self._open = open_it
        self._changed = threading.Condition()
        self._activating = threading.Lock()
        self._retiring: list[threading.Thread] = []
        self._closing = False
        owned = ExitStack()
        try:
            model = open_it(path, name, owned)
        except BaseException:
            owned.close()
            raise
        service = Service(model, accounts, ledger, Metrics(model.name, model.driver))
        self._place = _Place(service, owned)
        self._places = [self._place]

    @property
    def service(self) -> Service:
        """What answers now."""
        return self._place.service

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files of the models in memory, the one that answers first."""
        with self._changed:
            places = [self._place, *(each for each in self._places if each is not self._place)]
            return tuple(place.service.model.model.file.path.resolve() for place in places)

    def lease(self) -> Lease:
        """What answers now, for one request."""
        with self._changed:
            place = self._place
            place.leases += 1

        def end() -> None:
            with self._changed:
                place.leases -= 1
                self._changed.notify_all()

        return Lease(place.service, end)

    def refresh(self) -> None:
        """Put changes of the tenants' file in force."""
        self.accounts.refresh(lambda change: self.service.model.driver.call(change))

    def activate(self, name: str, path: Path) -> Service:
        """Let the model in ``path`` answer, called ``name``, from now on, and after a restart;
        gives back when it does.

        Raises ApiError when another is being loaded, and when this one cannot be: then nothing has
        changed.
        """
        if not self._activating.acquire(blocking=False):
            raise ApiError(
                503,
                "another model is being loaded",
                code="model_loading",
                retry_after=RESTART_SECONDS,
                retry=True,
            )
        try:
            self.service.check_accepting()
            before = self._place
            if path.resolve() != before.service.model.model.file.path.resolve():
                self._replace(before, name, path)
            began, file = self.began_with
            self._ledger.activate(file, None if name == began else name)
            return self.service
        finally:
            self._activating.release()

    def close(self, seconds: float) -> None:
        """Take no more requests, let those under way end for so long, and cut the rest."""
        self.service.draining.set()
        deadline = time.monotonic() + seconds
        with self._changed:
            places = list(self._places)
        for place in places:
            place.service.model.driver.close(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(0.0)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._retiring:
            thread.join()
        self._let_go(self._place, CLOSE_SECONDS)

    def _replace(self, before: _Place, name: str, path: Path) -> None:
        owned = ExitStack()
        try:
            model = self._open(path, name, owned)
        except BaseException as error:
            owned.close()
            raise _refusal(name, error) from error
        service = replace(before.service, model=model)
        with self._changed:
            self._place = _Place(service, owned)
            self._places.append(self._place)
        # What changed of the tenants while the model was loaded, it has not been told.
        self.accounts.tell(lambda change: model.driver.call(change))
        service.metrics.follow(model.name, model.driver)
        log.info("%s answers now, in place of %s", model.name, before.service.model.name)
        self._retiring = [thread for thread in self._retiring if thread.is_alive()]
        thread = threading.Thread(target=self._retire, args=(before,), name="retire", daemon=True)
        self._retiring.append(thread)
        thread.start()

    def _retire(self, place: _Place) -> None:
        self._let_go(place, None)
        log.info("%s is unloaded", place.service.model.name)

    def _let_go(self, place: _Place, seconds: float | None) -> None:
        """Unload a model once nobody uses it; when the server closes, after a moment at most."""
        with self._changed:
            self._changed.wait_for(lambda: not place.leases or self._closing, seconds)
            if self._closing:
                self._changed.wait_for(lambda: not place.leases, CLOSE_SECONDS)
            self._places.remove(place)
        place.owned.close()


def _refusal(name: str, error: BaseException) -> BaseException:
    """What whoever wanted a model is told when it cannot be loaded."""
    if isinstance(error, DoesNotFit | OutOfMemory):
        return ApiError(
            422,
            f"{name} does not fit into memory beside the model that answers now: {error}",
            param="model",
            code="model_does_not_fit",
        )
    if isinstance(error, ZincError):
        problem = error.problem if isinstance(error, RequestError) else str(error)
        message = f"{name} cannot be loaded: {problem}"
        return ApiError(422, message, param="model", code="model_unusable")
    return error
