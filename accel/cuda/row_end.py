"""The end of a step of one row as the last phase of a persistent launch: a token, that of the
largest logit, the event that tells it and the slot that keeps it.

Rows that are drawn, or whose logits are changed first, take the launches behind it, which do
everything anew. So a step has two forms of its graph, and the host, which knows how the row is
sampled, enqueues the shorter one where it is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accel.cuda.runs import operand_of, source
from accel.cuda.step_table import END_FIELDS, END_KIND, END_RECORD, Bound, Operand
from accel.packets.step import Op, Tensor

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
        return Operand(number, self.ops[number].device.places[name], tensor)


def end_phase(ops: Sequence[Op], first: int, logits: Tensor) -> EndPhase | None:
    """What ends a step whose ``logits`` of one row are there before op ``first``; None where more
    is done of them, or less."""
    rest = ops[first:]
    if sorted(op.name for op in rest) != sorted(ENDING) or rest[0].name != "sample_part":
        return None
    if source(rest[0]) != logits or rest[0].most_sizes()["rows"] != 1:
        return None
    return EndPhase(ops, first)


@dataclass(frozen=True, slots=True)
class ShortStep:
    """The first ``launches`` of a step are all of one whose row takes its largest logit.
    ``sampling`` says how a row is sampled."""

    launches: int
    sampling: Tensor


def takes_largest(record: np.void) -> bool:
    """Whether the token of a row that is sampled by SAMPLING ``record`` is that of the largest of
    its logits, whatever they are."""
    changed = record["mask"] > 0 or record["bias_count"] > 0
    recent = min(record["position"], record["repeat_last_n"]) > 0
    return not (changed or recent or record["temperature"] > 0)
