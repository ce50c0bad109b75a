"""Engine parts broken on purpose: each must be noticed as the invariant it breaks."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from contract.records import LOGIT_BIAS
from contract.types import QosClass, TokenEvent
from harness.simulation.invariants import Invariant
from harness.simulation.runner import SimulatedCopies, SimulatedStates
from reference.engine import Engine
from reference.engine.constraining import log_probabilities_of
from reference.engine.models import Models
from reference.engine.scheduler import Scheduler
from reference.engine.slot_manager import SlotManager
from reference.memory.kv import KvMemory
from reference.memory.pages import PagePool
from reference.sched.planner import plan_step
from reference.sched.tenants import Tenants
from reference.sched.wait_queue import RunningRequest, WaitQueue, choose_victim
from reference.usage import UsageCounters

Patch = pytest.MonkeyPatch
Break = Callable[[Patch], None]
NO_BIASES = np.zeros(0, LOGIT_BIAS)


def a_slot_given_twice(patch: Patch) -> None:
    admit = SlotManager.admit

    def broken(self: SlotManager, sequence: Any, *arguments: Any, **options: Any) -> Any:
        admitted = admit(self, sequence, *arguments, **options)
        if admitted and sequence.slot not in self.free_slots:
            self.free_slots.append(sequence.slot)
        return admitted

    patch.setattr(SlotManager, "admit", broken)


def a_reference_is_kept(patch: Patch) -> None:
    release = KvMemory.release

    def broken(self: KvMemory, pages: Sequence[int], tenant: int) -> None:
        release(self, pages[: max(1, len(pages) - 1)], tenant)

    patch.setattr(KvMemory, "release", broken)


def a_page_is_lost(patch: Patch) -> None:
    give_back = PagePool.give_back
    patch.setattr(PagePool, "give_back", lambda self, pages: give_back(self, pages[:2]))


def one_scope_for_all(patch: Patch) -> None:
    for module in (
        "reference.engine.engine",
        "reference.engine.tenant_changes",
        "harness.simulation.watch",
    ):
        patch.setattr(f"{module}.scope_of", lambda tenant: ("group", 0))


def a_decode_is_left_out(patch: Patch) -> None:
    def broken(pending: Any, chunk_tokens: int) -> Any:
        chunks = plan_step(pending, chunk_tokens)
        return chunks[1:] if len(chunks) > 2 else chunks

    patch.setattr("reference.engine.scheduler.plan_step", broken)


def too_much_prefill(patch: Patch) -> None:
    patch.setattr(
        "reference.engine.scheduler.plan_step", lambda pending, most: plan_step(pending, most + 1)
    )


def quotas_are_not_asked(patch: Patch) -> None:
    patch.setattr(Tenants, "within_quota", lambda self, id, pages: True)


def first_come_first_served(patch: Patch) -> None:
    patch.setattr(Tenants, "dominant_share", lambda self, id: 0.0)


def classes_reversed(patch: Patch) -> None:
    def broken(
        running: Sequence[RunningRequest], tenants: Tenants, claimant: QosClass | None
    ) -> Any:
        if claimant is not None:
            return choose_victim(running, tenants, claimant)
        return min(running, key=lambda entry: entry.qos.rank, default=None)

    patch.setattr("reference.engine.scheduler.choose_victim", broken)


def stalled_ones_go_on(patch: Patch) -> None:
    def broken(self: Engine, sequence: Any, stalled: bool) -> None:
        sequence.stalled, sequence.stalled_steps = stalled, 0
        self._stalled = {s.request.id: s for s in self._live.values() if s.stalled}

    patch.setattr(Engine, "_set_stalled", broken)


def a_token_twice(patch: Patch) -> None:
    take_events = Engine.take_events

    def broken(self: Engine) -> list[TokenEvent]:
        events = take_events(self)
        return events + events[:1]

    patch.setattr(Engine, "take_events", broken)


def cancel_is_forgotten(patch: Patch) -> None:
    patch.setattr(Engine, "cancel", lambda self, request_id: None)


def the_usage_counts_twice(patch: Patch) -> None:
    generated = UsageCounters.generated
    patch.setattr(
        UsageCounters, "generated", lambda self, tenant, n=1: generated(self, tenant, 2 * n)
    )


def published_too_early(patch: Patch) -> None:
    """Pages are found before their last position is computed."""
    publish = KvMemory.publish

    def broken(self: KvMemory, scope: Any, tokens: Any, pages: Sequence[int], *rest: Any) -> Any:
        base = tokens.base if tokens.base is not None else tokens
        return publish(self, scope, base[: len(tokens) + 1], pages, *rest)

    patch.setattr(KvMemory, "publish", broken)


def masks_are_forgotten(patch: Patch) -> None:
    patch.setattr("reference.engine.pipeline.with_masks", lambda inputs, *rest: inputs)


def biases_are_forgotten(patch: Patch) -> None:
    patch.setattr("reference.engine.slot_manager.bias_records", lambda request: NO_BIASES)


def logs_of_another_row(patch: Patch) -> None:
    patch.setattr(
        "reference.engine.output_processor.log_probabilities_of",
        lambda request, output, row: log_probabilities_of(request, output, 0),
    )


def the_first_model_goes_first(patch: Patch) -> None:
    def broken(self: Models) -> list[TokenEvent]:
        for model in list(self._models.values()):
            engine = model.loaded.engine
            if not engine.idle:
                self._step(model)
                if engine.has_events or not engine.blocked:
                    return engine.take_events()
        return []

    patch.setattr(Models, "step", broken)


def the_model_used_last_makes_room(patch: Patch) -> None:
    loaded = Models.loaded
    assert loaded.fget is not None
    patch.setattr(Models, "loaded", property(lambda self: loaded.fget(self)[::-1]))


def no_model_makes_room(patch: Patch) -> None:
    patch.setattr(Models, "unload", lambda self, name: False)


def copies_do_nothing(patch: Patch) -> None:
    patch.setattr(SimulatedCopies, "copy", lambda self, source, target: None)


def saved_pages_do_not_come_back(patch: Patch) -> None:
    patch.setattr(SimulatedCopies, "load", lambda self, saved, page: None)


def states_are_not_loaded(patch: Patch) -> None:
    patch.setattr(SimulatedStates, "load", lambda self, state_slot, slot: None)


def the_cache_outlives_a_fault(patch: Patch) -> None:
    """What the device lost is still found."""
    reset = SlotManager.reset

    def broken(self: SlotManager, live: Any) -> None:
        for sequence in self.running.values():
            self.memory.release(sequence.pages, sequence.tenant)
        reset(self, live)

    patch.setattr(SlotManager, "reset", broken)
    clear = KvMemory.clear
    patch.setattr(KvMemory, "clear", lambda self: None if hasattr(self, "_trees") else clear(self))


def chance_decides(patch: Patch) -> None:
    """Pages are handed out in an order that the schedule's seed does not determine."""
    chance = random.Random(1)
    init = KvMemory.__init__

    def broken(self: KvMemory, pages: int, **options: Any) -> None:
        init(self, pages, **options)
        chance.shuffle(self._pool._free)

    def due(self: Scheduler) -> bool:
        return bool(self.waiting) and chance.random() < 0.95

    patch.setattr(KvMemory, "__init__", broken)
    patch.setattr(Scheduler, "due", property(due))


def a_waiting_request_is_lost(patch: Patch) -> None:
    push = WaitQueue.push

    def broken(self: WaitQueue, waiting: Any) -> None:
        if waiting.order % 5 != 4:
            push(self, waiting)

    patch.setattr(WaitQueue, "push", broken)


def nothing_is_refused(patch: Patch) -> None:
    patch.setattr("reference.engine.engine.check_request", lambda *arguments: None)


def one_tenant_may_take_all_places(patch: Patch) -> None:
    patch.setattr(
        "reference.engine.engine.may_wait", lambda own, waiting, depth, tenants: waiting < depth
    )


CONTROLS: dict[Invariant, tuple[Break, ...]] = {
    Invariant.SLOT_OWNER: (a_slot_given_twice,),
    Invariant.PAGE_REFERENCES: (a_reference_is_kept, published_too_early),
    Invariant.PAGE_SUM: (a_page_is_lost,), Invariant.PAGE_ISOLATION: (one_scope_for_all,),
    Invariant.EVERY_DECODE: (a_decode_is_left_out,), Invariant.STEP_CAP: (too_much_prefill,),
    Invariant.QUOTA: (quotas_are_not_asked,), Invariant.ADMISSION_ORDER: (first_come_first_served,),
    Invariant.INTERACTIVE_STAYS: (classes_reversed,), Invariant.BACKPRESSURE: (stalled_ones_go_on,),
    Invariant.TOKENS: (
        *(a_token_twice, cancel_is_forgotten, masks_are_forgotten, biases_are_forgotten),
        logs_of_another_row,
    ),
    Invariant.HISTORY: (
        *(copies_do_nothing, saved_pages_do_not_come_back, states_are_not_loaded),
        the_cache_outlives_a_fault,
    ),
    Invariant.USAGE: (the_usage_counts_twice,), Invariant.SAME_SEED_SAME_LOG: (chance_decides,),
    Invariant.LIVENESS: (a_waiting_request_is_lost, one_tenant_may_take_all_places),
    Invariant.MODEL_TURNS: (the_first_model_goes_first,),
    Invariant.MODEL_ROOM: (the_model_used_last_makes_room, no_model_makes_room),
    Invariant.ONLY_DOCUMENTED_ERRORS: (nothing_is_refused,),
}  # fmt: skip
