"""Steps that several emulated devices execute together, each compared with the definitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from accel.cuda.device import Device
from accel.cuda.plan import PlannedLaunch
from accel.cuda.step_choice import Block
from accel.cuda.step_table import PeerWorkspaces
from accel.packets.shares import Share
from contract.ir.inputs import pack_inputs
from contract.records import STEP
from contract.shape_key import ShapeKey
from tests.cuda.emulated_launch import MOST_TURNS, run_all
from tests.cuda.emulated_step import aligned_memory
from tests.cuda.recorded_step import Bytes, PersistentSteps, RecordedModel


@dataclass
class SharedSteps:
    """``count`` devices that execute steps of ``recorded`` in the form of ``bucket`` together.

    ``changed`` is what becomes of the table of device n; ``peers_of`` of its peers."""

    recorded: RecordedModel
    bucket: ShapeKey
    device: Device
    blocks: Sequence[Block]
    folder: Path
    count: int
    changed: Callable[[int, Bytes], Bytes] = lambda _, table: table
    members: list[PersistentSteps] = field(init=False)
    units: dict[str, Bytes] = field(default_factory=dict)
    calls: list[list[tuple[Bytes, Bytes]]] = field(default_factory=list)
    before: dict[str, Bytes] = field(init=False)
    events: int = 0

    def __post_init__(self) -> None:
        self.members = [
            PersistentSteps(
                self.recorded, self.bucket, self.device, self.blocks, self.folder,
                lambda table, n=n: self.changed(n, table), Share(n, self.count), self.units,
            )
            for n in range(self.count)
        ]  # fmt: skip
        self.before = {name: self.recorded.raw[name].copy() for name in self.members[0].states}
        for member in self.members:
            for name, state in self.before.items():
                member.states[name][:] = state

    def launch_of(self, member: PersistentSteps) -> PlannedLaunch:
        """The only launch of a step that is shared."""
        (launch,) = member.launches
        assert launch.gathers
        assert [one.gathers for one in member.plan.launches].count(True) == 1
        return launch

    def record(self, given: dict[str, NDArray[Any]], rows: int = 1) -> None:
        """One more step, which the definitions execute at once; an event of theirs that a step
        without ``rows`` does not have is overwritten by the next step with one."""
        model, number = self.recorded, self.events
        self.events += rows
        model.arrays["request.step"].view(STEP)[0, 0]["first_event"] = number
        model.step(given)
        key = ShapeKey(model.key.tokens, rows)
        inputs = pack_inputs(self.members[0].layout, key, given, number)
        own = []
        for member in self.members:
            block = aligned_memory(inputs.nbytes)
            block[:] = inputs
            own.append((member.scratch_before(self.launch_of(member)), block))
        self.calls.append(own)

    def run(self, seed: int, absent: int | None = None, turns: int = MOST_TURNS) -> bool:
        """All steps recorded, in an order drawn from ``seed``; False where devices wait for more
        than ``turns``, as they do for one that is ``absent``."""
        launches = [self.launch_of(member) for member in self.members]
        (source,) = {launch.source for launch in launches}
        (grid,) = {launch.grid[0] for launch in launches}
        places = [
            member.workspace.ctypes.data + (launch.workspace or 0)
            for member, launch in zip(self.members, launches, strict=True)
        ]
        tables = []
        for n, member in enumerate(self.members):
            apart = (place - places[n] for other, place in enumerate(places) if other != n)
            tables.append(member.bound_table(launches[n], PeerWorkspaces(n, tuple(apart))))
        addresses = [0 if n == absent else one.ctypes.data for n, one in enumerate(tables)]
        calls = [
            [
                (scratch.ctypes.data, inputs.ctypes.data, table, place)
                for (scratch, inputs), table, place in zip(step, addresses, places, strict=True)
            ]
            for step in self.calls
        ]
        return run_all(source, grid, launches[0].block[0], calls, seed, self.folder, turns)

    def compare(self) -> None:
        """Every device has what the definitions left after the last step."""
        for member, (scratch, _) in zip(self.members, self.calls[-1], strict=True):
            member.compare(self.launch_of(member), scratch, self.before)
