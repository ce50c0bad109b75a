"""The model that answers now, those that may be asked for by name, and those that only end what
they began.

A model takes another's place while that one works: it is loaded beside it, new requests are its
from then on, and the other is let go of when the last of its answers was sent. Models that may be
asked for by name are loaded when they are, and stay until another needs the room.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Self

from contract.errors import DoesNotFit, OutOfMemory, RequestError, ZincError
from harness.host.engine_thread import EngineThread, ThreadedDriver
from harness.serve.accounts import Accounts, Tenanted
from harness.serve.errors import RESTART_SECONDS, ApiError
from harness.serve.heap import refreeze_heap
from harness.serve.ledger_store import LedgerStore
from harness.serve.metrics import Metrics
from harness.serve.model import LATEST, ServedModel, other_names
from harness.serve.receipts.store import ReceiptStore
from harness.serve.service import Service
from reference.engine.models import load_with_room

Opener = Callable[[Path, str, ExitStack, int], ServedModel]
"""Loads the model in a file, to be called by a name; it ends with the stack. The last argument are
the bytes that models beside it take."""
NO_OTHERS: Mapping[str, Path] = MappingProxyType({})
CLOSE_SECONDS = 10.0
"""How long what still answers may take to notice that the server is closed."""
log = logging.getLogger("zinc_rt.serve")


@dataclass(eq=False)
class _Place:
    """A loaded model; ``leases`` requests use it."""

    service: Service
    owned: ExitStack
    leases: int = 0
    retiring: bool = False


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
    another one. Requests may name those ``beside``, and then that one too. ``thread`` steps the
    engines of all; replicas have none. Receipts of answers go to ``receipts``. Raises what
    ``open_it`` raises.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        open_it: Opener,
        accounts: Accounts,
        ledger: LedgerStore,
        began_with: tuple[str, Path] | None = None,
        beside: Mapping[str, Path] = NO_OTHERS,
        thread: EngineThread | None = None,
        receipts: ReceiptStore | None = None,
    ) -> None:
        self.began_with = began_with or (name, path)
        self.by_name = dict([self.began_with, *beside.items()]) if beside else {}
        self._by_other_name = {
            other: name for name, file in self.by_name.items() for other in other_names(file)
        }
        self.accounts = accounts
        self._thread = thread
        self._loading = threading.Lock()
        self._ledger = ledger
        self._open = open_it
        self._changed = threading.Condition()
        self._activating = threading.Lock()
        self._retiring: list[threading.Thread] = []
        self._closing = False
        owned = ExitStack()
        try:
            model = open_it(path, name, owned, 0)
        except BaseException:
            owned.close()
            raise
        service = Service(model, accounts, ledger, Metrics(model.name, model.driver))
        service.receipts = receipts
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

    @property
    def others(self) -> Mapping[str, ServedModel | None]:
        """The models that may be asked for by name beside the one that answers, those not in memory
        without."""
        with self._changed:
            here = {place.service.model.name: place.service.model for place in self._places}
        answers = self.service.model.name
        return {name: here.get(name) for name in self.by_name if name != answers}

    def canonical(self, name: str | None) -> str | None:
        """The name in ``by_name`` of a model that requests may also call after its file."""
        if name is None or name in self.by_name:
            return name
        short = name.removesuffix(LATEST)
        return short if short in self.by_name else self._by_other_name.get(short, name)

    def lease(self, name: str | None = None) -> Lease:
        """What answers now, or the model that may be asked for by this name, for one request. One
        that is not in memory is loaded first: ApiError where it cannot be."""
        name = self.canonical(name)
        with self._changed:
            place = self._called(name)
            if place is not None:
                return self._leased(place)
        assert name is not None
        with self._loading:
            with self._changed:
                place = self._called(name)
            if place is None:
                place = self._load_in_background(name)
            # Nobody unloads one while this lock is held.
            with self._changed:
                return self._leased(place)

    def _called(self, name: str | None) -> _Place | None:
        """What answers a request for a model of this name; None where it is to be loaded."""
        answers = self._place
        if name not in self.by_name or name == answers.service.model.name:
            return answers
        places = (place for place in self._places if place.service.model.name == name)
        return next((place for place in places if not place.retiring), None)

    def _leased(self, place: _Place) -> Lease:
        place.leases += 1

        def end() -> None:
            with self._changed:
                place.leases -= 1
                self._changed.notify_all()

        return Lease(place.service, end)

    def refresh(self) -> None:
        """Put changes of the tenants' file in force."""
        self.accounts.refresh(self.tell)

    def tell(self, change: Callable[[Tenanted], None]) -> None:
        """Carry out a change of the tenants in the engines."""
        if self._thread is None:
            self.service.model.driver.call(change)
        else:
            self._thread.call(change)

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
                with self._loading:
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
        for place in tuple(self._places):
            self._let_go(place, CLOSE_SECONDS)

    def _replace(self, before: _Place, name: str, path: Path) -> None:
        with self._changed:
            place = None if name not in self.by_name else self._called(name)
        stays = before.service.model.name in self.by_name
        if place is None:
            try:
                place = self._load(path, name, () if stays else (before,))
            except BaseException as error:
                raise _refusal(name, error) from error
        with self._changed:
            self._place = place
        log.info("%s answers now, in place of %s", name, before.service.model.name)
        if stays:
            return
        before.retiring = True
        before.service.metrics.leave(before.service.model.driver)
        self._retiring = [thread for thread in self._retiring if thread.is_alive()]
        thread = threading.Thread(target=self._retire, args=(before,), name="retire", daemon=True)
        self._retiring.append(thread)
        thread.start()

    def _load(self, path: Path, name: str, leaving: Collection[_Place] = ()) -> _Place:
        """Load a model, in place of others that nobody uses where there is no room. Raises what
        opening it raises."""

        def load() -> _Place:
            with self._changed:
                stay = [p for p in self._places if not p.retiring and p not in leaving]
            return self._opened(path, name, stay)

        return load_with_room(load, self._unload_one)

    def _opened(self, path: Path, name: str, beside: Iterable[_Place]) -> _Place:
        """Load a model, beside others that stay. Raises what opening it raises."""
        owned = ExitStack()
        try:
            taken = sum(place.service.model.plan.total for place in beside)
            model = self._open(path, name, owned, taken)
        except BaseException:
            owned.close()
            raise
        place = _Place(replace(self.service, model=model), owned)
        with self._changed:
            self._places.append(place)
        # What changed of the tenants while the model was loaded, it has not been told.
        self.accounts.tell(self.tell)
        place.service.metrics.follow(model.name, model.driver)
        refreeze_heap()
        return place

    def _load_in_background(self, name: str) -> _Place:
        """Load a model that is asked for. Raises ApiError."""
        self.service.check_accepting()
        try:
            place = self._load(self.by_name[name], name)
        except (DoesNotFit, OutOfMemory) as error:
            raise _no_room(name, error) from error
        except BaseException as error:
            raise _refusal(name, error) from error
        log.info("%s is loaded", name)
        return place

    def _unload_one(self) -> bool:
        """Unload the model unused for longest, of those nobody uses; False where there is none."""
        if self._thread is None:
            return False
        with self._changed:
            spare = {
                place.service.model.driver.key: place
                for place in self._places
                if place is not self._place and not place.leases and not place.retiring
                if isinstance(place.service.model.driver, ThreadedDriver)
            }
        oldest = self._thread.call(lambda models: models.longest_idle(spare))
        if oldest is None:
            return False
        place = spare[oldest]
        with self._changed:
            # Somebody may have asked for it meanwhile.
            if not place.leases:
                place.retiring = True
        if place.retiring:
            place.service.metrics.leave(place.service.model.driver)
            self._retire(place)
        return True

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
        refreeze_heap()


def _no_room(name: str, error: BaseException) -> ApiError:
    """What whoever asked for a model is told while all others are in use."""
    return ApiError(
        503,
        f"{name} does not fit into memory beside the models in use: {error}",
        param="model",
        code="model_does_not_fit",
        retry_after=RESTART_SECONDS,
        retry=True,
    )


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
