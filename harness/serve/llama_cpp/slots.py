"""llama.cpp's slots: each tenant has as many as the engine, each with its latest conversation.

A slot here only names a conversation. Requests run in any slot of the engine, and the prefix cache
finds keys and values by tokens."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from contract.arithmetic import PAGE_TOKENS
from contract.arrays import Bytes, Ints
from contract.types import Tenant
from harness.serve.errors import ApiError, invalid_value, try_again
from harness.serve.generation import Generation
from harness.serve.llama_cpp.slot_files import SlotFileRefused, SlotFolder
from harness.serve.model import ServedModel
from reference.engine import Engine

SIMILAR = 0.1
"""A prompt takes the slot whose conversation shares the longest prefix with it, if that is more
than this fraction of the prompt."""
PAGES_AT_ONCE = 64
"""Most pages that are copied between two steps of the engine."""
NO_TOKENS: Ints = np.empty(0, np.int32)
NO_FOLDER = "slots are not saved here; start the server with --slot-save-path DIR"


@dataclass(slots=True, eq=False)
class Slot:
    """The tokens of the latest conversation, and the answers being generated. ``number``: its index
    in the tenant's slots."""

    number: int
    tokens: Ints = field(default_factory=lambda: NO_TOKENS)
    answers: weakref.WeakSet[Generation] = field(default_factory=weakref.WeakSet)

    @property
    def is_processing(self) -> bool:
        """Whether an answer is being generated."""
        return len(self.answers) > 0 and not all(answer.done for answer in self.answers)


class TenantSlots:
    """The slots of a tenant for one model. ``by_age`` has them in the order of their last use."""

    def __init__(self, count: int) -> None:
        self.slots = [Slot(number) for number in range(count)]
        self.by_age = dict.fromkeys(self.slots)

    def use(self, slot: Slot) -> None:
        """The slot, if it is one of these, is used now."""
        if slot in self.by_age:
            del self.by_age[slot]
            self.by_age[slot] = None

    def best(self, prompt: Sequence[int]) -> Slot:
        """The slot whose conversation shares the longest prefix with a prompt, else the least
        recently used one. Idle slots come first."""
        oldest = next((slot for slot in self.by_age if not slot.is_processing), None)
        common: dict[Slot, int] = {}
        for slot in self.by_age:
            if slot.tokens is NO_TOKENS or not len(slot.tokens) or slot.tokens[0] != prompt[0]:
                continue
            if oldest is None or not slot.is_processing:
                common[slot] = _common(slot.tokens, np.array(prompt, np.int32))
        # Ties go to the slot used last.
        best = max(reversed(common), key=lambda slot: common[slot], default=None)
        if best is not None and common[best] > SIMILAR * len(prompt):
            return best
        return next(iter(self.by_age)) if oldest is None else oldest


class SlotTable:
    """The slots of all tenants and models. Tokens are kept only if there are ``files`` to save them
    to. Thread-safe."""

    def __init__(self, files: SlotFolder | None = None) -> None:
        self.files = files
        self._lock = threading.Lock()
        self._slots: dict[tuple[int, str], TenantSlots] = {}

    def of(self, model: ServedModel, tenant: Tenant, number: int | None, name: str) -> Slot:
        """A tenant's slot ``number``, which the client calls ``name``. Raises ApiError."""
        with self._lock:
            slots = self._slots_of(model, tenant.id).slots
        if number is None or number >= len(slots):
            raise invalid_value(
                "id_slot", f"there is no slot {name}; they are 0 to {len(slots) - 1}"
            )
        return slots[number]

    def facts(self, model: ServedModel, tenant: Tenant) -> list[tuple[bool, int]]:
        """For each slot of a tenant whether an answer is being generated, and how many tokens its
        conversation has."""
        with self._lock:
            slots = self._slots_of(model, tenant.id).slots
            return [(slot.is_processing, len(slot.tokens)) for slot in slots]

    def begin(self, model: ServedModel, tenant: Tenant, answer: Generation, requested: int) -> int:
        """The slot of a new answer: ``requested``, or for -1 the best match. Raises ApiError."""
        with self._lock:
            own = self._slots_of(model, tenant.id)
            if requested >= len(own.slots):
                raise invalid_value(
                    "id_slot", f"id_slot is {requested}, and there are {len(own.slots)} slots"
                )
            prompt = answer.choices[0].request.prompt
            slot = own.slots[requested] if requested >= 0 else own.best(prompt)
            slot.answers.add(answer)
            own.use(slot)
            return slot.number

    def end(self, model: ServedModel, tenant: Tenant, answer: Generation, number: int) -> None:
        """Keep the conversation of an ended answer."""
        if self.files is None:
            with self._lock:
                self._slots_of(model, tenant.id).slots[number].answers.discard(answer)
            return
        choice = answer.choices[0]
        tokens = np.array([*choice.request.prompt, *choice.sampled], np.int32)
        with self._lock:
            own = self._slots_of(model, tenant.id)
            slot = own.slots[number]
            slot.tokens = tokens
            slot.answers.discard(answer)
            own.use(slot)

    def only(self, tenants: Sequence[Tenant]) -> None:
        """Delete the slots and files of all tenants but these."""
        ids = {tenant.id for tenant in tenants}
        with self._lock:
            for key in [key for key in self._slots if key[0] not in ids]:
                del self._slots[key]
        if self.files is not None:
            self.files.only(tenants)

    def save(self, model: ServedModel, tenant: Tenant, slot: Slot, name: str) -> tuple[int, int]:
        """Write the cached part of a slot's conversation to a file. Returns its tokens and bytes.
        Raises ApiError, RequestError and StorageProblem."""
        files, tokens = self._files(), slot.tokens
        driver = model.driver
        tokens = tokens[: driver.call(Engine.cached_prefix, tenant.id, tokens)]
        state = driver.call(Engine.save_state, tenant.id, tokens)
        pages, nbytes = files.write(
            name, tenant, model.kv_function, _pages(model, tenant, tokens), state, tokens
        )
        if not pages:
            problem = "nothing of this slot's conversation is cached"
            raise ApiError(400, problem, param="id_slot", code="slot_empty")
        return pages * PAGE_TOKENS, nbytes

    def restore(self, model: ServedModel, tenant: Tenant, slot: Slot, name: str) -> tuple[int, int]:
        """Load a file into the cache as the slot's conversation. Returns its tokens and bytes.
        Raises ApiError, RequestError and StorageProblem."""
        files = self._files()
        try:
            saved = files.read(name, tenant, model.kv_function, model.limits.pages)
        except FileNotFoundError:
            problem = f"there is no saved slot {name!r}"
            raise ApiError(404, problem, param="filename", code="slot_file_not_found") from None
        except SlotFileRefused as refused:
            problem = f"{name!r} is not restored: {refused}"
            raise ApiError(400, problem, param="filename", code="slot_file_refused") from None
        tokens, pages, state, nbytes = saved
        count = model.driver.call(Engine.load_prefix, tenant.id, tokens, pages, state)
        if not count:
            raise try_again("there is no room for the saved slot now", "no_room", 1)
        with self._lock:
            slot.tokens = tokens[:count]
            self._slots_of(model, tenant.id).use(slot)
        return count, nbytes

    def erase(self, model: ServedModel, tenant: Tenant, slot: Slot) -> int:
        """Forget a slot's conversation, and its pages in the cache that no other prompt shares.
        Returns the number of its tokens. Raises ApiError."""
        self._files()
        with self._lock:
            tokens, slot.tokens = slot.tokens, NO_TOKENS
        model.driver.call(Engine.drop_prefix, tenant.id, tokens)
        return len(tokens)

    def _files(self) -> SlotFolder:
        if self.files is None:
            raise ApiError(501, NO_FOLDER, code="not_supported", retry=False)
        return self.files

    def _slots_of(self, model: ServedModel, tenant: int) -> TenantSlots:
        key = tenant, model.name
        if key not in self._slots:
            self._slots[key] = TenantSlots(model.driver.statistics.slots)
        return self._slots[key]


def _common(one: Ints, other: Ints) -> int:
    """The length of the common prefix."""
    shared = min(len(one), len(other))
    differing = np.flatnonzero(one[:shared] != other[:shared])
    return int(differing[0]) if len(differing) else shared


def _pages(model: ServedModel, tenant: Tenant, tokens: Ints) -> Iterator[Bytes]:
    """The cached keys and values of a tenant's tokens, page by page."""

    def copied(first: int) -> list[Bytes]:
        return model.driver.call(Engine.save_pages, tenant.id, tokens, first, PAGES_AT_ONCE)

    first = 0
    while pages := copied(first):
        yield from pages
        first += len(pages)
