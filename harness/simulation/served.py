"""One model in memory: an engine with its watch, on a world."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import numpy as np

from contract.arrays import Ints
from harness.simulation.clients import Clients
from harness.simulation.invariants import Invariant, Violation, require
from harness.simulation.schedule import Schedule
from harness.simulation.watch import EngineWatch
from harness.simulation.world import World
from reference.engine import Engine, EngineOptions
from reference.engine.drafter import DraftRequest
from reference.sched.tenants import Tenants


class Served:
    """The engine of model ``number``, its watch, and its world."""

    def __init__(
        self,
        number: int,
        schedule: Schedule,
        world: World,
        tenants: Tenants,
        clients: Clients,
        watch: EngineWatch,
    ) -> None:
        shape = schedule.shape
        self.number = number
        self.world = world
        self.watch = watch
        self._clients = clients
        world.runner.watch = watch.submitted_step
        self.engine = Engine(
            world.runner,
            EngineOptions(
                end_of_generation=world.end_of_generation,
                chunk_tokens=shape.chunk_tokens,
                chunk_while_decoding=(shape.chunk_tokens + 1) // 2 if schedule.seed % 2 else None,
                page_order=shape.page_order,
                steps_ahead=shape.steps_ahead,
                queue_depth=shape.queue_depth,
                prefix_cache=shape.prefix_cache,
                cached_pages=shape.cached_pages,
                copy_pages=shape.copy_pages,
                host_pages=shape.host_pages,
                stall_steps=shape.stall_steps,
            ),
            tenants=tenants,
            clock=world.clock,
            drafter=self._drafter(schedule.seed) if shape.guesses else None,
            observer=watch,
            disk=world.disk,
        )
        watch.attach(self.engine)

    @property
    def violation(self) -> Violation | None:
        """The first violation that was found while the engine worked."""
        return self.watch.violation or self.world.runner.violation

    def leave(self, counts: Counter[str]) -> None:
        """Give back what the engine has, check it, and add its counts to ``counts``. Raises
        Violation."""
        statistics = self.engine.statistics
        self.watch.deeply()
        self.engine.abandon()
        self.watch.at_end()
        held = 0 if self.world.disk is None else self.world.disk.queued
        require(
            not held or self.watch.interrupted,
            Invariant.PAGE_SUM,
            lambda: f"{held} pages wait to be written for ever",
        )
        for what in ("tokens_hit", "evicted", "spilled", "restored", "copied"):
            counts[f"prefix {what}"] += getattr(statistics.prefix, what)
        if self.world.disk is not None:
            for what, count in self.world.disk.counts.items():
                counts[f"disk {what}"] += count
            self.world.disk.counts.update(written=0, read=0)
            self.world.disk.queued = 0
        counts["guesses right"] += statistics.speculation.accepted
        counts["guesses wrong"] += statistics.speculation.drafted - statistics.speculation.accepted
        counts["admissions"] += statistics.admitted
        counts["preemptions"] += statistics.preempted

    def empty(self) -> None:
        """Check that no request and no slot is left. Raises Violation."""
        require(
            self.engine.idle, Invariant.LIVENESS, lambda: "the engine has requests without clients"
        )
        self.watch.between_steps(0)
        require(
            not self.watch.state().slot_manager,
            Invariant.SLOT_OWNER,
            lambda: "a slot is taken without requests",
        )

    def _drafter(self, seed: int) -> Guesses:
        vocab = self.world.runner.model.config.vocab
        return Guesses(self._answer, vocab, Random(seed + self.number))

    def _answer(self, order: int) -> tuple[int, ...] | None:
        """All tokens of the request that was the ``order``-th to arrive."""
        request_id = self.watch.request_in_order(order)
        client = None if request_id is None else self._clients.by_id.get(request_id)
        if client is None:
            return None
        return client.request.prompt + tuple(max(0, event.token) for event in client.expected)


WRONG_ONE_IN = 4
"""One drafted token of this many is wrong."""
READY_PARTS = 0.7
"""The fraction of cases in which there is a draft."""


class Guesses:
    """A ``Drafter`` that knows the next tokens and is sometimes wrong on purpose. ``answer`` gives
    all tokens of the sequence with a key, None for one it does not know."""

    def __init__(
        self, answer: Callable[[int], Sequence[int] | None], vocab: int, random: Random
    ) -> None:
        self._answer = answer
        self._vocab = vocab
        self._random = random

    def draft(self, sequences: Sequence[DraftRequest]) -> list[Ints]:
        return [self._guess(open) for open in sequences]

    def ready(self, key: int, tokens: Ints) -> bool:
        return self._random.random() < READY_PARTS

    def forget(self, key: int) -> None:
        """See ``Drafter``."""

    def _guess(self, open: DraftRequest) -> Ints:
        answer = self._answer(open.key) or ()
        known = len(open.tokens)
        guess = np.array(answer[known : known + open.limit], np.int32)
        for index in range(len(guess)):
            if self._random.randrange(WRONG_ONE_IN) == 0:
                guess[index] = (guess[index] + 1) % self._vocab
        return guess
