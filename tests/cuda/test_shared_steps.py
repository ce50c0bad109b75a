"""A persistent step that several devices execute together: emulated blocks of all devices, one
device up to a step ahead of another, compared with the definitions bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray

from accel.cuda import phases
from accel.cuda.device import Device
from accel.cuda.plan import PlannedLaunch
from accel.cuda.step_choice import Block
from accel.cuda.step_table import (
    ATTENTION_KIND,
    ATTENTION_RECORD,
    HEAD,
    HEAD_BYTES,
    PEER_DEVICES,
    PRODUCT_RECORD,
    PeerWorkspaces,
)
from accel.packets.shares import Share
from contract.dtypes import I4R, I12, DType
from contract.ir.inputs import pack_inputs
from contract.records import STEP
from contract.shape_key import ShapeKey
from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from reference.limits import Limits
from reference.model.open import open_model
from tests.cuda.emulated_launch import MAX_TURNS, run_all
from tests.cuda.emulated_step import DEVICE, aligned_memory
from tests.cuda.recorded_step import Bytes, PersistentSteps, RecordedModel, inside_of
from tests.cuda.test_persistent import FOUR_WARPS, MODELS, fill_evenly, recorded


@dataclass
class SharedSteps:
    """``count`` devices that execute steps of ``recorded`` in the form of ``bucket`` together.

    ``changed`` is what becomes of the table of device n; ``own_heads`` whether it has pages of its
    own heads."""

    recorded: RecordedModel
    bucket: ShapeKey
    device: Device
    blocks: Sequence[Block]
    folder: Path
    count: int
    changed: Callable[[int, Bytes], Bytes] = lambda _, table: table
    own_heads: bool = False
    members: list[PersistentSteps] = field(init=False)
    units: dict[str, Bytes] = field(default_factory=dict)
    calls: list[list[tuple[Bytes, Bytes]]] = field(default_factory=list)
    before: dict[str, Bytes] = field(init=False)
    events: int = 0

    def __post_init__(self) -> None:
        self.members = [
            PersistentSteps(
                self.recorded, self.bucket, self.device, self.blocks, self.folder,
                Share(n, self.count), self.units, changed=lambda table, n=n: self.changed(n, table),
                own_heads=self.own_heads,
            )
            for n in range(self.count)
        ]  # fmt: skip
        self.before = {name: self.recorded.raw[name].copy() for name in self.members[0].states}
        for member in self.members:
            for name, state in self.before.items():
                member.states[name][:] = member.part_of(name, state)

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
            own.append((member.scratch_before(inside_of(self.launch_of(member))), block))
        self.calls.append(own)

    def run(self, seed: int, absent: int | None = None, turns: int = MAX_TURNS) -> bool:
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
        return run_all(source, grid, launches[0].threads, calls, seed, self.folder, turns)

    def compare(self) -> None:
        """Every device has what the definitions left after the last step."""
        for member, (scratch, _) in zip(self.members, self.calls[-1], strict=True):
            member.compare(self.launch_of(member), scratch, self.before)


ONE = ShapeKey(1, 1)
TURNS = 9000
"""More than a single step takes."""


def steps_of(
    folder: Path,
    count: int,
    steps: int,
    changed: Callable[[int, Bytes], Bytes] = lambda _, table: table,
    rows: int = 1,
) -> SharedSteps:
    """So many steps of ``count`` devices, of which all but the last have ``rows`` rows."""
    model = recorded("llama", folder, ONE)
    shared = SharedSteps(model, ONE, DEVICE, FOUR_WARPS, folder, count, changed)
    for position in range(steps):
        given = model.inputs([5 + position], [position], [1])
        shared.record(given, 1 if position == steps - 1 else rows)
    return shared


@pytest.mark.parametrize(
    ("count", "steps", "rows"),
    [(2, 5, 1), (2, 5, 0), (3, 3, 1), pytest.param(5, 2, 1, marks=pytest.mark.long)],
)
def test_devices_have_the_bits_of_one(count: int, steps: int, rows: int, folder: Path) -> None:
    """Banks are used again; shares are unequal; there are more devices than rows of keys to divide;
    and steps without a row do not wait for all that others store."""
    shared = steps_of(folder, count, steps, rows=rows)
    assert shared.run(seed=0)
    shared.compare()


def long_context(
    folder: Path,
    count: int,
    first: int,
    dtype: DType,
    *,
    kv_heads: int = 2,
    own_heads: bool = False,
    changed: Callable[[int, Bytes], Bytes] = lambda _, table: table,
) -> SharedSteps:
    """Two steps of ``count`` devices behind a past of ``first`` positions."""
    path = folder / f"{kv_heads}-heads.gguf"
    sizes = {**MODELS["llama"], "kv_heads": kv_heads}
    write_synthetic(path, sized_spec("tiny", quant="q8_0", **sizes))
    limits = Limits(2, 192, 24, dtype, step_tokens=4, step_rows=4)
    model = RecordedModel(open_model(path), limits, ONE)
    fill_evenly(model)
    shared = SharedSteps(model, ONE, DEVICE, FOUR_WARPS, folder, count, changed, own_heads)
    for position in (first, first + 1):
        shared.record(model.inputs([5], [position], [0]))
    return shared


@pytest.mark.parametrize(
    ("count", "first", "divided", "dtype"),
    [(2, 126, 127, I12), (3, 189, 0, I12), (2, 126, 127, I4R)],
    ids=str,
)
def test_devices_divide_the_heads_of_a_long_context(
    count: int,
    first: int,
    divided: int,
    dtype: DType,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the second step on, or by devices of which one has no heads; blocks share contexts, and
    pages are whole on every device."""
    monkeypatch.setattr(phases, "DIVIDED_FROM", divided)
    shared = long_context(folder, count, first, dtype)
    assert shared.run(seed=1)
    shared.compare()


@pytest.mark.parametrize(
    ("count", "kv_heads", "first", "dtype"),
    [(2, 2, 1, I12), (2, 2, 189, I12), (3, 3, 126, I12), (2, 6, 126, I12), (2, 2, 126, I4R)],
    ids=str,
)
def test_devices_have_pages_of_their_own_heads(
    count: int, kv_heads: int, first: int, dtype: DType, folder: Path
) -> None:
    """Of short contexts and of those that blocks share; what is not a device's own it has not."""
    shared = long_context(folder, count, first, dtype, kv_heads=kv_heads, own_heads=True)
    assert shared.run(seed=1)
    shared.compare()


@pytest.mark.parametrize("field", ["k", "v", "kv"])
def test_heads_of_another_device_are_noticed(field: str, folder: Path) -> None:
    """The negative control: device 1 takes the first of two heads, or writes a page away."""

    def changed(device: int, table: Bytes) -> Bytes:
        if device == 1:
            at = HEAD_BYTES + PRODUCT_RECORD.itemsize
            record = table[at : at + ATTENTION_RECORD.itemsize].view(ATTENTION_RECORD)
            assert record["kind"] == ATTENTION_KIND
            assert record["own_heads"] == 1
            record[field] -= 64 * 4 if field != "kv" else I12.row_bytes(64)
        return table

    shared = long_context(folder, 2, 1, I12, own_heads=True, changed=changed)
    assert not shared.run(seed=1, turns=TURNS) or is_wrong(shared)


def is_wrong(shared: SharedSteps) -> bool:
    """Whether a device has other bits than the definitions."""
    try:
        shared.compare()
    except AssertionError:
        return True
    return False


def with_two_banks(device: int, table: Bytes) -> Bytes:
    """Step n clears the bank of step n - 1, as on a single device."""
    table[:HEAD_BYTES].view(HEAD)["banks"] = 2
    return table


def is_noticed(folder: Path, seed: int) -> bool:
    """Whether a bank that is cleared too early changes a result, in the order of ``seed``."""
    shared = steps_of(folder, 2, 5, with_two_banks, rows=0)
    assert shared.run(seed=seed)
    return is_wrong(shared)


def test_a_bank_that_is_cleared_too_early_is_noticed(folder: Path) -> None:
    """The negative control: another device still stores to it, in most orders."""
    assert any(is_noticed(folder, seed) for seed in range(2, 10))


def stored_at_home(device: int, table: Bytes) -> Bytes:
    """What device 1 computes in the first phase reaches itself only."""
    first = table[HEAD_BYTES : HEAD_BYTES + PRODUCT_RECORD.itemsize].view(PRODUCT_RECORD)
    assert first["everywhere"] == 0b111
    first["everywhere"] = 0b111 if device != 1 else 0
    return table


def without_the_last(device: int, table: Bytes) -> Bytes:
    """Device 0 knows one of two others."""
    peers = table[table.nbytes - PEER_DEVICES.itemsize :].view(PEER_DEVICES)
    assert peers["count"] == 2
    peers["count"] = 1 if device == 0 else 2
    return table


@pytest.mark.parametrize(
    ("count", "changed", "absent"),
    [(2, stored_at_home, None), (3, without_the_last, None), (2, lambda _, table: table, 1)],
    ids=["at home", "one of two", "absent"],
)
def test_devices_wait_for_each_other(
    count: int, changed: Callable[[int, Bytes], Bytes], absent: int | None, folder: Path
) -> None:
    """For floats that do not reach them, and for a device that has no step; the stop word ends
    that."""
    shared = steps_of(folder, count, 1, changed)
    assert not shared.run(seed=0, absent=absent, turns=TURNS)
    for member in shared.members:
        member.workspace[:] = 0
        member.stop[0] = 1
    assert shared.run(seed=0, absent=absent)


def test_a_single_step_takes_fewer_turns(folder: Path) -> None:
    """The control of those that wait."""
    for count in (2, 3):
        shared = steps_of(folder, count, 1)
        assert shared.run(seed=0, turns=TURNS)
        shared.compare()
