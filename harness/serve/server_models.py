"""The models of a server: the active one, those that requests may name, and those being unloaded.

``activate`` replaces the active model while it works: the new model is loaded, gets all new
requests, and the old one is unloaded after its last answer. A model that requests may name is
loaded when one does, and stays in memory until another model needs the room."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from contract.errors import DoesNotFit, OutOfMemory, ZincError
from harness.host.heap import refreeze_heap
from harness.host.remote.process import EngineProcess
from harness.host.submissions import EngineStopped
from harness.serve.accounts import Accounts, HasTenants
from harness.serve.errors import RESTART_SECONDS, load_refusal, no_room, try_again
from harness.serve.ledger_store import LedgerStore
from harness.serve.metrics import Metrics
from harness.serve.model import Engines, ServedModel
from harness.serve.model_names import ModelNames
from harness.serve.receipts.store import ReceiptStore
from harness.serve.service import Service
from reference.engine.models import Models, load_with_room

Opener = Callable[[Path, str, ExitStack, int], ServedModel]
"""Loads the model of a file under a name. Closing the stack unloads it. The last argument is the
number of bytes that other models take."""
NO_OTHERS: Mapping[str, Path] = {}
CLOSE_SECONDS = 10.0
"""Seconds that requests in flight have to notice that the server closes."""
log = logging.getLogger("zinc_rt.serve")


@dataclass(eq=False)
class _LeasedModel:
    """A model in memory, used by ``leases`` requests. ``retiring``: it is unloaded after the last
    of them."""

    service: Service
    owned: ExitStack
    leases: int = 0
    retiring: bool = False

    @property
    def failed(self) -> bool:
        """Whether its engine ended because of an error."""
        return self.service.model.driver.failure is not None


class Lease:
    """Keeps a model in memory until ``release``."""

    def __init__(self, service: Service, end: Callable[[], None]) -> None:
        self.service = service
        self._end: Callable[[], None] | None = end

    def release(self) -> None:
        """End the lease. A second call does nothing."""
        end, self._end = self._end, None
        if end is not None:
            end()


class ServerModels:
    """The models of a server. Loads and unloads them. A context manager.

    The constructor loads the model of the file ``path``, called ``name``, which is active until
    ``activate`` chooses another. Requests use a model by ``lease``. ``on_demand``: models by name,
    loaded when a request names them. ``began_with``: name and file of the model that the server was
    started with, if it is not this one. ``thread`` steps the engines of all models; None with
    replicas. Raises what ``open_it`` raises."""

    def __init__(
        self,
        path: Path,
        name: str,
        open_it: Opener,
        accounts: Accounts,
        ledger: LedgerStore,
        began_with: tuple[str, Path] | None = None,
        on_demand: Mapping[str, Path] = NO_OTHERS,
        thread: Engines | None = None,
        receipts: ReceiptStore | None = None,
    ) -> None:
        self.began_with = began_with or (name, path)
        self.names = ModelNames(dict([self.began_with, *on_demand.items()]) if on_demand else {})
        self.accounts = accounts
        self._thread = thread
        self._loading = threading.Lock()
        self._ledger = ledger
        self._open = open_it
        self._changed = threading.Condition()
        self.activating = threading.Lock()
        """Held while another model is chosen to answer, or one is deleted."""
        self._retiring: list[threading.Thread] = []
        self._closing = False
        owned = ExitStack()
        try:
            model = open_it(path, name, owned, 0)
        except BaseException:
            owned.close()
            raise
        service = Service(model, accounts, ledger, Metrics(model))
        service.receipts = receipts
        self._active = _LeasedModel(service, owned)
        self._in_memory = [self._active]

    @property
    def service(self) -> Service:
        """The service of the active model."""
        return self._active.service

    @property
    def hangs(self) -> bool:
        """Whether a thread of this process hangs, so that nothing can be unloaded."""
        return self._thread is not None and self._thread.hangs

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files of the models in memory, the active one first."""
        with self._changed:
            loaded = (self._active, *(one for one in self._in_memory if one is not self._active))
            return tuple(one.service.model.model.file.path.resolve() for one in loaded)

    @property
    def others(self) -> Mapping[str, ServedModel | None]:
        """The other models that requests may name, by name; None for those not in memory."""
        with self._changed:
            staying = [one.service.model for one in self._in_memory if not one.retiring]
        here, answers = {model.name: model for model in staying}, self.service.model.name
        return {name: here.get(name) for name in self.names.files if name != answers}

    @contextmanager
    def held(self) -> Iterator[Mapping[str, ServedModel | None]]:
        """The ``others``; none is unloaded until the context ends."""
        with self._changed:
            leases = [self._leased(one) for one in self._in_memory if not one.retiring]
            others = self.others
        with ExitStack() as held:
            for lease in leases:
                held.callback(lease.release)
            yield others

    def lease(self, name: str | None = None) -> Lease:
        """A lease of the model of this name, or of the active one, for one request. Loads the model
        if it is not in memory. Raises ApiError."""
        name = self.names.canonical(name)
        with self._changed:
            loaded = self._called(name)
            if loaded is not None:
                return self._leased(loaded)
        assert name is not None
        with self._loading:
            with self._changed:
                loaded = self._called(name)
            if loaded is None:
                loaded = self._load_in_background(name)
            # No model is unloaded while this lock is held.
            with self._changed:
                return self._leased(loaded)

    def _called(self, name: str | None) -> _LeasedModel | None:
        """The model in memory for this name; None if it has to be loaded."""
        answers = self._active
        if name not in self.names.files or name == answers.service.model.name:
            return answers
        here = [loaded for loaded in self._in_memory if loaded.service.model.name == name]
        return next((loaded for loaded in here if not (loaded.retiring or loaded.failed)), None)

    def _leased(self, loaded: _LeasedModel) -> Lease:
        loaded.leases += 1

        def end() -> None:
            with self._changed:
                loaded.leases -= 1
                if not loaded.leases:
                    self._changed.notify_all()

        return Lease(loaded.service, end)

    def refresh(self) -> None:
        """Apply changes of the tenants file."""
        self.accounts.refresh(self.change_tenants)

    def change_tenants(self, change: Callable[[HasTenants], None]) -> None:
        """Call ``change`` with the tenants of all engines."""
        if self._thread is None:
            self.service.model.driver.call(change)
        else:
            self._thread.call(change)

    def activate(self, name: str, path: Path) -> Service:
        """Make the model of the file ``path``, called ``name``, the active one, also after a
        restart. Returns once it is loaded. Raises ApiError if it cannot be loaded or another one is
        being loaded; then nothing has changed."""
        if not self.activating.acquire(blocking=False):
            raise try_again("another model is being loaded", "model_loading", RESTART_SECONDS)
        try:
            self._check_accepting()
            before = self._active
            if path.resolve() != before.service.model.model.file.path.resolve():
                with self._loading:
                    self._replace(before, name, path)
            began, file = self.began_with
            self._ledger.activate(file, None if name == began else name)
            return self.service
        finally:
            self.activating.release()

    def reopen(self) -> bool:
        """Open the active model again if the process of its engine ended. Returns whether it was.
        Raises ApiError and EngineStopped if it cannot be opened."""
        if not isinstance(self._thread, EngineProcess) or self.service.draining.is_set():
            return False
        with self._loading:
            before = self._active
            if not before.failed:
                return True
            self._unload_failed(but=before)
            name, path = before.service.model.name, before.service.model.model.file.path
            try:
                loaded = self._load(path, name, (before,))
            except (DoesNotFit, OutOfMemory) as error:
                raise no_room(name, error) from error
            except EngineStopped:
                raise
            except (ZincError, OSError) as error:
                log.error("%s cannot be opened again: %s", name, error)
                raise EngineStopped(f"{name} cannot be opened again; see the log") from error
            with self._changed:
                self._active = loaded
            log.info("%s is opened again", name)
            if not before.retiring:
                self._unload_later(before)
        return True

    def close(self, seconds: float) -> None:
        """Accept no more requests, let running ones end for up to ``seconds``, and cancel the
        rest."""
        self.service.draining.set()
        deadline = time.monotonic() + seconds
        if self._thread is not None:
            self._thread.end_by(deadline)
        for loaded in tuple(self._in_memory):
            loaded.service.model.driver.close(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(0.0)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._retiring:
            thread.join()
        for loaded in tuple(self._in_memory):
            self._unload_when_idle(loaded, CLOSE_SECONDS)

    def _replace(self, before: _LeasedModel, name: str, path: Path) -> None:
        with self._changed:
            loaded = None if name not in self.names.files else self._called(name)
        stays = before.service.model.name in self.names.files
        if loaded is None:
            try:
                loaded = self._load(path, name, () if stays else (before,))
            except BaseException as error:
                raise load_refusal(name, error) from error
        with self._changed:
            self._active = loaded
        log.info("%s answers now, instead of %s", name, before.service.model.name)
        if not stays:
            self._unload_later(before)

    def _check_accepting(self) -> None:
        """Raise if models can no longer be loaded. The failure of one model's engine is no
        reason."""
        self.service.check_accepting(receipt=False, engine=self._thread is None)
        if self._thread is not None:
            self._thread.call(Models.longest_idle, ())

    def _unload_later(self, loaded: _LeasedModel) -> None:
        """Unload a model, in a thread, after its last request."""
        loaded.retiring = True
        loaded.service.metrics.leave(loaded.service.model.driver)
        self._retiring = [thread for thread in self._retiring if thread.is_alive()]
        thread = threading.Thread(target=self._retire, args=(loaded,), name="retire", daemon=True)
        self._retiring.append(thread)
        thread.start()

    def _load(self, path: Path, name: str, leaving: Collection[_LeasedModel] = ()) -> _LeasedModel:
        """Load a model; for room unload unused ones. Raises what opening it raises."""

        def load() -> _LeasedModel:
            with self._changed:
                stay = [p for p in self._in_memory if not p.retiring and p not in leaving]
            return self._opened(path, name, stay)

        return load_with_room(load, self._unload_one)

    def _opened(self, path: Path, name: str, staying: Iterable[_LeasedModel]) -> _LeasedModel:
        """Load a model while ``staying`` keep their memory. Raises what opening it raises."""
        owned = ExitStack()
        try:
            taken = sum(loaded.service.model.plan.total for loaded in staying)
            model = self._open(path, name, owned, taken)
            loaded = _LeasedModel(replace(self.service, model=model), owned)
            with self._changed:
                if self._closing:
                    raise EngineStopped("the server is shutting down")
                self._in_memory.append(loaded)
        except BaseException:
            owned.close()
            raise
        # Tenants may have changed while the engine was loaded.
        self.accounts.send_to(self.change_tenants)
        loaded.service.metrics.follow(model)
        refreeze_heap()
        return loaded

    def _load_in_background(self, name: str) -> _LeasedModel:
        """Load a model that a request names. Raises ApiError."""
        self._check_accepting()
        self._unload_failed()
        try:
            loaded = self._load(self.names.files[name], name)
        except (DoesNotFit, OutOfMemory) as error:
            raise no_room(name, error) from error
        except BaseException as error:
            raise load_refusal(name, error) from error
        log.info("%s is loaded", name)
        return loaded

    def _unload_failed(self, but: _LeasedModel | None = None) -> None:
        """Unload the models whose engines ended, except one."""
        with self._changed:
            failed = [one for one in self._in_memory if one.failed and not one.retiring]
        for one in failed:
            if one is not but:
                self._unload_later(one)

    def _unload_one(self) -> bool:
        """Unload the model that has been unused for longest. Returns False if requests use all of
        them."""
        if self._thread is None:
            return False
        with self._changed:
            spare = {
                loaded.service.model.driver.key: loaded
                for loaded in self._in_memory
                if loaded is not self._active and not loaded.leases and not loaded.retiring
                if not loaded.failed
            }
        oldest = self._thread.call(Models.longest_idle, tuple(spare))
        if oldest is None:
            return False
        loaded = spare[oldest]
        with self._changed:
            free = not (loaded.leases or loaded.retiring)
            loaded.retiring |= free
        if not free:
            # A request named it meanwhile.
            return self._unload_one()
        loaded.service.metrics.leave(loaded.service.model.driver)
        self._retire(loaded)
        return True

    def _retire(self, loaded: _LeasedModel) -> None:
        self._unload_when_idle(loaded, None)
        log.info("%s is unloaded", loaded.service.model.name)

    def _unload_when_idle(self, loaded: _LeasedModel, seconds: float | None) -> None:
        """Unload a model after its last request, or CLOSE_SECONDS after the server closed."""
        with self._changed:
            self._changed.wait_for(lambda: not loaded.leases or self._closing, seconds)
            if self._closing:
                self._changed.wait_for(lambda: not loaded.leases, CLOSE_SECONDS)
            self._in_memory = [one for one in self._in_memory if one is not loaded]
        loaded.owned.close()
        refreeze_heap()
