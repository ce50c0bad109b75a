"""A runner without a model: it checks its inputs, takes virtual time and may fail.

It has the interface of ``reference.runner.ModelRunner``. Like the slowest possible device, it runs
a submission only when its result is waited for. Steps and copies run in the order of submission."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NoReturn, Protocol

import numpy as np

from contract.arrays import Bytes, Floats
from contract.cancel_token import CancelToken
from contract.errors import DeviceLost, StepAbandoned
from harness.simulation.clock import VirtualClock
from harness.simulation.device import NO_SCOPE, DeviceMemory, SavedState, StepCopy
from harness.simulation.history import MAX_POSITIONS, VOCAB, listed
from harness.simulation.invariants import Invariant, Violation
from reference.limits import RING_STEPS, Limits
from reference.memory.row_copies import HostBytes
from reference.model.adapters import Adapters
from reference.ops.verify_k import accepted_drafts
from reference.runner import CHOSEN, LOGITS, TOP_IDS, TOP_LOGS, StepInput, StepOutput


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """The seconds of a step: fixed, for each query token, for each position attended to, and for
    the host to plan it."""

    fixed: float = 4e-3
    token: float = 1e-4
    attended: float = 1e-6
    host: float = 2e-4

    def of(self, step: StepCopy) -> float:
        """Seconds the device takes for ``step``."""
        tokens = len(step.query)
        attended = sum([position for _, _, position, _ in step.query]) + tokens
        return self.fixed + self.token * tokens + self.attended * attended


@dataclass(slots=True, eq=False)
class QueuedStep:
    """A step in the device's queue. ``run`` is called when the caller waits for this step or a
    later one."""

    run: Callable[[], StepOutput | None]
    number: int = 0
    ends: float = 0.0
    fails: bool = False
    done: bool = False
    output: StepOutput | None = None
    token: CancelToken | None = None

    @property
    def fence(self) -> QueuedStep:
        """What a caller waits for."""
        return self


class Saved(Protocol):
    """A page or a state in host memory."""

    def bytes(self) -> Any:
        """What it holds."""


class SavedCopy:
    """Result of ``read`` when the queue comes to it, in host memory then."""

    def __init__(self, runner: SimulatedRunner, read: Callable[[], Any]) -> None:
        runner.copying()
        self._runner = runner
        self._value: Any = None

        def run() -> None:
            self._value = read()

        self._late = runner.enqueue(run)

    def bytes(self) -> Any:
        """See ``Saved``; waits for the copy."""
        self._runner.wait(self._late)
        return self._value


class SimulatedStates:
    """``ModelRunner.recurrent``: recurrent states saved and loaded in the order of the queue."""

    def __init__(self, runner: SimulatedRunner) -> None:
        self._runner = runner

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot's states, 0 for a model without."""
        return 8 if self._runner.memory.recurrent else 0

    def save(self, slot: int, state_slot: int, position: int | None = None) -> None:
        """Copy the slot's state for ``position``, by default the latest, to ``state_slot``."""
        self._runner.copying()
        memory = self._runner.memory

        def run() -> None:
            begun = memory.state_positions[slot] if position is None else position
            memory.saved_states[state_slot] = SavedState(begun, memory.state(slot, begun))

        self._runner.enqueue(run)

    def load(self, state_slot: int, slot: int) -> None:
        """Copy the state saved in ``state_slot`` to ``slot``."""
        memory = self._runner.memory

        def run() -> None:
            memory.keep_state(slot, *memory.saved_states[state_slot])

        self._runner.enqueue(run)

    def read(self, state_slot: int) -> SavedCopy:
        """Copy the state saved in ``state_slot`` to host memory."""
        saved_states = self._runner.memory.saved_states
        return SavedCopy(self._runner, lambda: saved_states[state_slot])

    def write(self, state_slot: int, saved: Saved, position: int) -> None:
        """Copy a state from host memory, after ``position`` tokens, to ``state_slot``."""
        self._runner.copying()
        memory = self._runner.memory

        def run() -> None:
            memory.saved_states[state_slot] = saved.bytes()
            if memory.saved_states[state_slot].position != position:
                raise Violation(Invariant.HISTORY, f"a state is loaded for position {position}")

        self._runner.enqueue(run)


class SimulatedCopies:
    """``ModelRunner.page_copies()``: pages copied, saved and loaded in the order of the queue."""

    page_bytes = 64

    def __init__(self, runner: SimulatedRunner) -> None:
        self._runner = runner

    def copy(self, source: int, target: int) -> None:
        """Copy page ``source`` to page ``target``."""
        self._runner.copying()
        pages = self._runner.memory.pages

        def run() -> None:
            pages[target] = pages[source].copy()

        self._runner.enqueue(run)

    def save(self, page: int) -> SavedCopy:
        """Copy ``page`` to host memory."""
        pages = self._runner.memory.pages
        return SavedCopy(self._runner, lambda: pages[page].copy())

    def load(self, saved: Saved, page: int) -> None:
        """Copy a saved page to ``page``."""
        self._runner.copying()
        pages = self._runner.memory.pages

        def run() -> None:
            pages[page] = saved.bytes().copy()

        self._runner.enqueue(run)

    def load_all(self, saved: Sequence[Saved], pages: Sequence[int]) -> None:
        """``load`` for each of several pages."""
        for one, page in zip(saved, pages, strict=True):
            self.load(one, page)

    def block(self) -> None:
        """Memory for pages, which nobody needs here."""

    def load_block(self, block: Sequence[Any], pairs: Iterable[tuple[int, int]]) -> Any:
        """Copy pages of ``block`` to pages, (number in the block, page) each."""
        for number, page in pairs:
            self.load(HostBytes(block[number]), page)
        return SimpleNamespace(done=True)


class SimulatedRunner:
    """Executes steps of the model of this number on a ``DeviceMemory``; all time is that of
    ``clock``.

    ``slot_scopes`` is the isolation scope of each slot, which the engine's watch sets. ``watch`` is
    called with every step before it is queued. ``failures`` counts the faults raised on purpose.
    If it ``abandons`` steps, ``meanwhile`` has calls that are made while the engine's thread is in
    the next "submit" or "collect"; ``abandoned`` counts these steps."""

    def __init__(
        self,
        limits: Limits,
        clock: VirtualClock,
        *,
        recurrent: bool = False,
        model: int = 0,
        seconds: StepSeconds | None = None,
        abandons: bool = False,
    ) -> None:
        if limits.context > MAX_POSITIONS:
            raise ValueError(f"the context is at most {MAX_POSITIONS} positions here")
        self.limits = limits
        opened: Any = [SimpleNamespace(digest=str(n)) for n in range(limits.adapters)]
        adapters = Adapters(tuple(opened))
        self.model = SimpleNamespace(config=SimpleNamespace(vocab=VOCAB), adapters=adapters)
        self.tier = SimpleNamespace(
            info=SimpleNamespace(asynchronous=True), wait=lambda late: self.collect(late)
        )
        self.memory = DeviceMemory(limits, recurrent=recurrent, model=model)
        self.recurrent = SimulatedStates(self)
        self._copies = SimulatedCopies(self)
        self.slot_scopes = [NO_SCOPE] * limits.slots
        self.watch: Callable[[StepInput], None] = lambda step: None
        self.violation: Violation | None = None
        self.steps = 0
        self._clock = clock
        self._seconds = seconds or StepSeconds()
        self._queue: deque[QueuedStep] = deque()
        self._device_free = 0.0
        self._fault: str | None = None
        self._copy_fails = False
        self.failures = self.abandoned = 0
        self.meanwhile: dict[str, list[Callable[[], Any]]] = {"submit": [], "collect": []}
        if abandons:
            self.tier.abandon = self.tier.submit_abandonable = self.submit

    def page_copies(self) -> SimulatedCopies:
        """Copies between KV pages, and to host memory."""
        return self._copies

    def fail_next(self, where: str) -> None:
        """Lose the device with the next step: ``where`` is "submit" or "collect"."""
        self._fault = where

    def fail_next_copy(self) -> None:
        """Let the next copy of a page or a state fail."""
        self._copy_fails = True

    def copying(self) -> None:
        """Raise DeviceLost if the copy that is about to be queued should fail."""
        if self._copy_fails:
            self._copy_fails = False
            self.failures += 1
            raise DeviceLost("a copy failed on purpose")

    def restart(self) -> None:
        """Forget the queue, as if the process had ended; the device's memory stays."""
        self._queue.clear()
        self._fault = None
        self._copy_fails = False
        for calls in self.meanwhile.values():
            calls.clear()

    def unload(self) -> None:
        """Forget the queue and lose the memory, as if the model were unloaded."""
        self.restart()
        self.memory.lose()

    def submit(self, inputs: StepInput) -> QueuedStep:
        """Queue a step with a snapshot of its inputs."""
        limits = self.limits
        self._clock.advance(self._seconds.host)
        if self._fault == "submit":
            self._lose()
        tokens, rows = len(inputs.query), len(inputs.output_rows)
        if not (0 < tokens <= limits.step_tokens and rows <= limits.step_rows):
            self._broken(Invariant.STEP_CAP, f"a step of {tokens} tokens and {rows} rows")
        try:
            self.watch(inputs)
        except Violation as violation:
            self.violation = self.violation or violation
            raise
        drafts = 0 if inputs.plain else limits.draft_tokens
        copy, requested = StepCopy.of(inputs, self.slot_scopes), inputs.requested
        begins = max(self._clock(), self._device_free)
        self._device_free = begins + self._seconds.of(copy)
        self.steps += 1
        late = self.enqueue(lambda: self._execute(copy, requested, drafts, inputs.token))
        late.token = inputs.token
        self._call_meanwhile("submit")
        late.fails, self._fault = self._fault == "collect", None
        return late

    def collect(self, submission: QueuedStep) -> StepOutput:
        """Run everything up to ``submission``; time passes until it is done."""
        if submission.number <= self.steps - RING_STEPS:
            self._broken(Invariant.TOKENS, "a step is read after its events were overwritten")
        self._clock.advance_to(submission.ends)
        self._call_meanwhile("collect")
        if submission.fails:
            self._lose()
        self.wait(submission)
        if submission.token is not None and submission.token.cancelled:
            raise StepAbandoned("the step was abandoned on purpose")
        assert submission.output is not None
        return submission.output

    def wait(self, late: QueuedStep) -> None:
        """Run what is queued up to ``late``."""
        while not late.done:
            if not self._queue:
                self._broken(Invariant.TOKENS, "a lost step is waited for")
            first = self._queue.popleft()
            try:
                first.output = first.run()
            except Violation as violation:
                self.violation = self.violation or violation
                raise
            first.done = True

    def enqueue(self, run: Callable[[], StepOutput | None]) -> QueuedStep:
        """Queue a submission that is not a step."""
        late = QueuedStep(run, number=self.steps, ends=self._device_free)
        self._queue.append(late)
        return late

    def _call_meanwhile(self, where: str) -> None:
        while self.meanwhile[where]:
            self.meanwhile[where].pop()()

    def _execute(
        self, step: StepCopy, requested: Sequence[str], drafts: int, cancel: CancelToken | None
    ) -> StepOutput | None:
        if cancel is not None and cancel.cancelled:
            self.memory.spoil(step)
            self.abandoned += 1
            return None
        sampled, histories = self.memory.execute(step)
        token = np.array(sampled, np.int32)
        outputs = {}
        if LOGITS in requested:
            outputs[LOGITS] = simulated_logits(histories).view(np.uint8)
        if CHOSEN in requested:
            outputs |= simulated_logs(histories, sampled, self.limits.top_log_probabilities)
        rows, query = np.array(step.rows, np.int32), np.array(step.query, np.int32).reshape(-1, 4)
        accepted = accepted_drafts(token, rows, query, drafts)
        return StepOutput(token, accepted, outputs)

    def _lose(self) -> None:
        self._queue.clear()
        self._fault = None
        self.memory.lose()
        self.failures += 1
        raise DeviceLost("the simulated device was lost on purpose")

    def _broken(self, invariant: Invariant, detail: str) -> NoReturn:
        """Raise Violation and remember it, since the engine may recover from the exception."""
        violation = Violation(invariant, detail)
        self.violation = self.violation or violation
        raise violation


def simulated_logits(histories: Sequence[int]) -> Floats:
    """float32[rows, VOCAB] whose first four values are the 16-bit words of the row's history."""
    logits = np.zeros((len(histories), VOCAB), np.float32)
    logits[:, :4] = np.array(histories, np.uint64).view(np.uint16).reshape(-1, 4)
    return logits


def simulated_logs(histories: Sequence[int], tokens: Sequence[int], top: int) -> dict[str, Bytes]:
    """The outputs of rule R10, a row for each history."""
    rows = [listed(history, token, top) for history, token in zip(histories, tokens, strict=True)]
    values = (
        (CHOSEN, [chosen for chosen, _ in rows], np.float32),
        (TOP_IDS, [[id for id, _ in likeliest] for _, likeliest in rows], np.int32),
        (TOP_LOGS, [[log for _, log in likeliest] for _, likeliest in rows], np.float32),
    )
    return {name: np.array(value, dtype).view(np.uint8) for name, value, dtype in values}


def history_of_logits(logits: Floats) -> list[int]:
    """The histories that ``simulated_logits`` were made of."""
    histories: list[int] = logits[:, :4].astype(np.uint16).view(np.uint64)[:, 0].tolist()
    return histories
