"""The end of a step of one row as the last phase of a persistent launch: a token, that of the
largest logit, the event that tells it and the slot that keeps it.

Rows that are drawn take two launches behind it, which begin with the largest logit and end the row;
those whose logits are changed first take all of SAMPLE, which does everything anew. So a step has
several graphs, and the host, which knows how the row is sampled, enqueues the shortest that is
enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from accel.cuda.plan import PlannedLaunch, ShortStep
from accel.cuda.program import tuned_source
from accel.cuda.runs import operand_index, operand_of, source
from accel.cuda.step_table import END_FIELDS, END_KIND, END_RECORD, Bound, Operand
from accel.packets.step import Op, Tensor

DRAWING = ("sample_bins", "sample_draw")
ENDING = ("sample_part", "sample", "stream_out", "store_request_state")
"""What has to follow the logits, and nothing else."""


@dataclass(frozen=True, slots=True)
class EndPhase:
    """``first`` is the op behind the logits."""

    ops: Sequence[Op]
    first: int

    @property
    def sampling(self) -> Tensor:
        """How the row is sampled: SAMPLING[1] among the inputs."""
        return self._operand("sample_part", "sampling").tensor

    @property
    def done(self) -> range:
        """The ops it does of a row that is not drawn."""
        return range(self.first, len(self.ops))

    def record(self, bound: Bound) -> NDArray[np.void]:
        """END_RECORD[1]."""
        record = np.zeros(1, END_RECORD)
        one = record[0]
        packets = bound.packets
        part = packets[self._place("sample_part")]
        one["kind"] = END_KIND
        one["multiplier"], one["counted"] = part["size"][0], part["counted"]
        one["vocab"] = self._op("sample_part").most_sizes()["vocab"]
        one["logits"], _ = bound.stored(self._operand("sample_part", "logits"))
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
        one["ring_events"] = self._op("stream_out").most_sizes()["ring_events"]
        return record

    def _place(self, name: str) -> int:
        return next(number for number in self.done if self.ops[number].name == name)

    def _op(self, name: str) -> Op:
        return self.ops[self._place(name)]

    def _operand(self, op: str, name: str) -> Operand:
        number = self._place(op)
        tensor = operand_of(self.ops[number], name)
        assert tensor is not None
        return Operand(number, self.ops[number].device.index_of[name], tensor)


def end_phase(ops: Sequence[Op], first: int, logits: Tensor) -> EndPhase | None:
    """What ends a step whose ``logits`` of one row are there before op ``first``; None where more
    is done of them, or less."""
    rest = ops[first:]
    if sorted(op.name for op in rest) != sorted(ENDING) or rest[0].name != "sample_part":
        return None
    if source(rest[0]) != logits or rest[0].most_sizes()["rows"] != 1:
        return None
    return EndPhase(ops, first)


def short_step(end: EndPhase, launches: int, behind: Sequence[PlannedLaunch]) -> ShortStep:
    """For a step that ``end`` ends with so many launches, with others ``behind`` them."""
    drawing = [launch for launch in behind if launch.entry in DRAWING]
    # Without kernels that take logits as they are a row that is drawn needs all launches.
    kept = [_tempered(launch, end) for launch in drawing] if drawing else behind
    return ShortStep(launches, tuple(kept), end.sampling)


def _tempered(launch: PlannedLaunch, end: EndPhase) -> PlannedLaunch:
    """Drawing as before, from logits instead of what SAMPLE's first half makes of them; who draws
    does what follows, too."""
    ops = end.ops[end.first :]
    places = {"LOGITS_AT": operand_index(ops, 0, "logits"), "PACKET_COUNT": 2}
    if launch.entry == DRAWING[-1] and len(ops) == len(ENDING):
        places |= {"PACKET_COUNT": len(ops), **_last_places(ops)}
    macros = {**dict(launch.source.macros), **places}
    assert launch.first == end.first + 1
    source = tuned_source(launch.source.name, macros, "sample")
    return replace(launch, source=source, first=end.first, count=macros["PACKET_COUNT"])


def _last_places(ops: Sequence[Op]) -> dict[str, int]:
    """Where STREAM_OUT and STORE_REQUEST_STATE of a row's ``ops`` have what they are given."""
    names = [op.name for op in ops]
    tell, keep = names.index("stream_out"), names.index("store_request_state")
    return {
        "OUTPUT_ROWS_AT": operand_index(ops, keep, "output_rows"),
        "QUERY_AT": operand_index(ops, keep, "query"),
        "SLOTS_AT": operand_index(ops, keep, "slot_table"),
        "STEP_AT": operand_index(ops, tell, "step"),
        "RING_AT": operand_index(ops, tell, "ring"),
        "RING_EVENTS": ops[tell].most_sizes()["ring_events"],
    }


def is_plain(record: np.void) -> bool:
    """Whether nothing but a temperature changes the logits of a row that is sampled by SAMPLING
    ``record``: no mask, bias or penalty."""
    changed = record["mask"] > 0 or record["bias_count"] > 0
    return not changed and min(record["position"], record["repeat_last_n"]) <= 0


def is_drawn(record: np.void) -> bool:
    """Whether its token is not simply that of the largest logit."""
    return bool(record["temperature"] > 0)
