"""Finds runs of launches that one persistent launch can replace, and what their phases exchange.

On several devices an ALL_GATHER between phases is no launch of such a run: the phase before it
stores its results on every device."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from accel.cuda.phases import AttentionPhase, Phase, ProductPhase, Readers, next_phase
from accel.cuda.plan import PlannedLaunch
from accel.cuda.row_end import EndPhase, end_phase
from accel.cuda.step_table import PhaseBuffers
from accel.packets.packet import aligned
from accel.packets.shares import ALL_GATHER
from accel.packets.step import Op, Tensor

MAX_FORMATS = 4


@dataclass(frozen=True, slots=True)
class PhaseRun:
    """The ``phases`` of ``launches`` launches that follow each other, for the ops from ``first`` to
    ``stop`` - 1. ``gathered`` are the ALL_GATHERs between them; ``end`` executes the ops that
    follow, if they are the end of the step."""

    phases: tuple[Phase, ...] = ()
    launches: int = 0
    first: int = 0
    stop: int = 0
    gathered: tuple[Op, ...] = ()
    end: EndPhase | None = None

    @property
    def longest_row(self) -> int:
        """Units of the longest row that is normalized."""
        normed = (one for one in self.phases if isinstance(one, ProductPhase) and one.norm)
        return max([0, *(phase.units for phase in normed)])

    @property
    def parts(self) -> frozenset[Tensor]:
        """The columns that this device computes of the tensors that all devices gather."""
        return frozenset(part for op in self.gathered if (part := op.operands[0]) is not None)

    def is_shared(self, reading: Readers) -> bool:
        """Whether it can run on all devices together: only phases, or the end of the step, read
        what is gathered, and what attention computes."""
        if self.end is None:
            return False
        attentions = (phase for phase in self.phases if isinstance(phase, AttentionPhase))
        buffers = {part.buffer for part in self.parts} - {self.end.logits.buffer}
        buffers |= {y.tensor.buffer for phase in attentions for y in phase.writes}
        return all(max(reading[name]) < self.stop for name in buffers)

    def exchange(self, reading: Readers, local: Collection[str] | None) -> PhaseBuffers:
        """The buffers that one phase writes and another reads. Later ops may read them too, as they
        may those that are not ``local``."""
        written: dict[str, int] = {}
        read: set[str] = set()
        for phase in self.phases:
            read |= {operand.tensor.buffer for operand in phase.reads} & written.keys()
            for y in phase.writes:
                written[y.tensor.buffer] = phase.tokens * y.tensor.stride * 4
        logits = {part.buffer for part in self.parts} - read
        offsets, size = {}, 0
        for name in sorted(read | logits):
            offsets[name] = size
            size += aligned(written[name])
        outside = {
            name
            for name in read
            if (local is not None and name not in local) or max(reading[name]) >= self.stop
        }
        return PhaseBuffers(offsets, frozenset(outside), size, self.parts)


def phase_run(
    launches: Sequence[PlannedLaunch],
    ops: Sequence[Op],
    reading: Readers,
    max_tokens: int,
    local: Collection[str] | None,
) -> PhaseRun:
    """The longest run that ``launches`` begin with."""
    phases: list[Phase] = []
    gathered: list[Op] = []
    at = first = stop = 0
    while at < len(launches):
        if phases and launches[at].gathers:
            between = ops[launches[at].first : launches[at].first + launches[at].count]
            if not _written_by(phases, between):
                break
            gathered += between
            stop = launches[at].first + launches[at].count
            at += 1
            continue
        found = next_phase(launches[at : at + 2], ops, reading)
        if found is None:
            break
        phase, count = found
        if phase.tokens > max_tokens or (local is not None and phase.dropped - set(local)):
            break
        if not _fits(phases, phase):
            break
        if not phases:
            first = phase.first
        phases.append(phase)
        stop = phase.first + phase.length
        at += count
    end = _end(phases, gathered, ops, stop)
    return PhaseRun(tuple(phases), at, first, stop, tuple(gathered), end)


def _written_by(phases: Sequence[Phase], gathers: Iterable[Op]) -> bool:
    """Whether phases write all that is gathered."""
    written = {y.tensor for phase in phases for y in phase.writes}
    return all(op.operands[0] in written for op in gathers)


def _end(
    phases: Sequence[Phase], gathered: Sequence[Op], ops: Sequence[Op], stop: int
) -> EndPhase | None:
    """The end of the step, if the last phase computes the logits of its only row."""
    last = phases[-1] if phases else None
    if not isinstance(last, ProductPhase) or any(phase.tokens != 1 for phase in phases):
        return None
    own = last.writes[0].tensor
    wholes = [op.operands[1] for op in gathered if op.operands[0] == own]
    return end_phase(ops, stop, own if not wholes or wholes[-1] is None else wholes[-1])


def _fits(phases: Sequence[Phase], phase: Phase) -> bool:
    """Whether one kernel can compute all phases: few formats, heads of one width, pages of one
    type."""
    every = (*phases, phase)
    formats = {dtype for one in every for dtype in one.formats}
    widths = {one.head_dim for one in every} - {0}
    pages = {one.dtype for one in every if isinstance(one, AttentionPhase)}
    return len(formats) <= MAX_FORMATS and len(widths) <= 1 and len(pages) <= 1


def only_synchronizes(launch: PlannedLaunch, ops: Sequence[Op]) -> bool:
    """Whether devices only wait for each other in a launch."""
    between = ops[launch.first : launch.first + launch.count]
    return all(op.device is ALL_GATHER and op.operands[0] is None for op in between)
