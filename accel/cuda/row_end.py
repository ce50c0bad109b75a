"""The end of a step of one row as the last phase of a persistent launch: it takes the token of the
largest logit, writes the event, and stores the token in the slot.

Rows that are drawn need two more launches, which begin with the largest logit and end the row; rows
whose logits are changed first need all of SAMPLE, which starts over. So a step has several graphs,
and the host, which knows how the row is sampled, enqueues the shortest that suffices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from accel.cuda.plan import PlannedLaunch, ShortStep
from accel.cuda.program import tuned_source
from accel.cuda.runs import operand_indices, operand_of, source
from accel.cuda.step_table import END_FIELDS, END_KIND, END_RECORD, Bound, Operand
from accel.packets.step import Op, Tensor
from contract.arrays import Records

DRAWING = ("sample_bins", "sample_draw")
ENDING = ("sample_part", "sample", "stream_out", "store_request_state")
"""The ops that must follow the logits."""
BEHIND = ("row_digest", "verify_k")
"""The only ops that may follow those: for one row they read nothing of them, and they are launched
in every step."""


@dataclass(frozen=True, slots=True)
class EndPhase:
    """The end of a step; ``first`` is the index of the op after the logits."""

    ops: Sequence[Op]
    first: int

    @property
    def sampling(self) -> Tensor:
        """The record of how the row is sampled: SAMPLING[1] in the inputs."""
        return self._operand("sample_part", "sampling").tensor

    @property
    def logits(self) -> Tensor:
        """The logits of the row."""
        return self._operand("sample_part", "logits").tensor

    @property
    def done(self) -> range:
        """Indices of the ops that the phase executes for a row that is not drawn."""
        return range(self.first, min(self.first + len(ENDING), len(self.ops)))

    def record(self, bound: Bound) -> Records:
        """END_RECORD[1]."""
        record = np.zeros(1, END_RECORD)
        one = record[0]
        packets = bound.packets
        part = packets[self._index("sample_part")]
        one["kind"] = END_KIND
        one["multiplier"], one["counted"] = part["size"][0], part["counted"]
        one["vocab"] = self._op("sample_part").max_sizes()["vocab"]
        logits = self._operand("sample_part", "logits")
        one["logits"], _ = bound.stored(logits)
        if logits.tensor.buffer in bound.exchange.offsets:
            one["arriving"], _ = bound.read(logits)
        operands = (
            self._operand("sample_part", "sampling"),
            self._operand("store_request_state", "output_rows"),
            self._operand("store_request_state", "query"),
            self._operand("stream_out", "step"),
            self._operand("store_request_state", "slot_table"),
            self._operand("stream_out", "ring"),
            self._operand("sample_part", "best"),
        )
        for name, operand in zip(END_FIELDS, operands, strict=True):
            one[name], stride = bound.stored(operand)
            if name in ("query", "slots"):
                one[f"{name}_stride"] = stride
        one["ring_events"] = self._op("stream_out").max_sizes()["ring_events"]
        return record

    def _index(self, name: str) -> int:
        return next(number for number in self.done if self.ops[number].name == name)

    def _op(self, name: str) -> Op:
        return self.ops[self._index(name)]

    def _operand(self, op: str, name: str) -> Operand:
        number = self._index(op)
        tensor = operand_of(self.ops[number], name)
        assert tensor is not None
        return Operand(number, self.ops[number].device.index_of[name], tensor)


def end_phase(ops: Sequence[Op], first: int, logits: Tensor) -> EndPhase | None:
    """The end of a step whose ``logits`` of one row are complete before op ``first``; None where
    other ops follow."""
    rest, behind = ops[first : first + len(ENDING)], ops[first + len(ENDING) :]
    if sorted(op.name for op in rest) != sorted(ENDING) or rest[0].name != "sample_part":
        return None
    if not all(op.name in BEHIND for op in behind):
        return None
    if source(rest[0]) != logits or rest[0].max_sizes()["rows"] != 1:
        return None
    return EndPhase(ops, first)


def short_step(end: EndPhase, launches: int, behind: Sequence[PlannedLaunch]) -> ShortStep:
    """The launches that suffice for a step that ``end`` ends after ``launches`` launches; others
    come ``behind``."""
    drawing = [launch for launch in behind if launch.entry in DRAWING]
    last = [launch for launch in behind if launch.first >= end.done.stop]
    sampling = behind[: len(behind) - len(last)]
    # Without kernels that read unchanged logits, a drawn row needs all launches.
    launched = [_tempered(launch, end) for launch in drawing] if drawing else sampling
    return ShortStep(launches, tuple(launched), end.sampling, len(last))


def _tempered(launch: PlannedLaunch, end: EndPhase) -> PlannedLaunch:
    """The launch changed to draw from the logits, not from SAMPLE's first half; the last one also
    executes the ops that follow."""
    ops = [end.ops[number] for number in end.done]
    changed = operand_indices(ops, 0, "LOGITS_AT=logits") | {"PACKET_COUNT": 2}
    if launch.entry == DRAWING[-1] and len(ops) == len(ENDING):
        changed |= {"PACKET_COUNT": len(ops), **_last_macros(ops)}
    macros = {**dict(launch.source.macros), **changed}
    assert launch.first == end.first + 1
    source = tuned_source(launch.source.name, macros, "sample")
    return replace(launch, source=source, first=end.first, count=macros["PACKET_COUNT"])


def _last_macros(ops: Sequence[Op]) -> dict[str, int]:
    """Macros of the operands of STREAM_OUT and STORE_REQUEST_STATE."""
    names = [op.name for op in ops]
    event, state = names.index("stream_out"), names.index("store_request_state")
    return {
        **operand_indices(ops, state, "OUTPUT_ROWS_AT=output_rows QUERY_AT=query"),
        **operand_indices(ops, state, "SLOTS_AT=slot_table"),
        **operand_indices(ops, event, "STEP_AT=step RING_AT=ring"),
        "RING_EVENTS": ops[event].max_sizes()["ring_events"],
    }


def is_plain(record: np.void) -> bool:
    """Whether nothing but a temperature changes the logits of a row sampled by SAMPLING ``record``:
    no mask, bias or penalty."""
    changed = record["mask"] > 0 or record["bias_count"] > 0
    return not changed and min(record["position"], record["repeat_last_n"]) <= 0


def is_drawn(record: np.void) -> bool:
    """Whether the token is drawn, not simply that of the largest logit."""
    return bool(record["temperature"] > 0)
