"""One point of an opcode's shape space, and what the strategies of several opcodes share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from contract.arithmetic import PAGE_TOKENS
from contract.dtypes import DType, StorageClass
from contract.spec import Scalar

Run = tuple[int, int, int]
SPARE_PAGES = 3
"""Pages no slot owns, filled with garbage."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One point of an opcode's shape space. ``absent`` operands are left out."""

    label: str
    dims: Mapping[str, int] = field(default_factory=dict)
    params: Mapping[str, Scalar] = field(default_factory=dict)
    runs: tuple[Run, ...] | None = None
    absent: frozenset[str] = frozenset()

    def sizes(self) -> dict[str, int]:
        """Every dimension by name, those of the step included."""
        sizes = dict(self.dims)
        if self.runs is not None:
            slots = 1 + max((slot for slot, _, _ in self.runs), default=0)
            context = max((first + count for _, first, count in self.runs), default=1)
            slot_pages = -(-context // PAGE_TOKENS)
            sizes |= {
                "tokens": sum(count for _, _, count in self.runs),
                "slots": slots,
                "slot_pages": slot_pages,
                "pages": slots * slot_pages + SPARE_PAGES,
                "context": context,
            }
        return sizes


Strategy = Callable[[DType | None], tuple[Shape, ...]]


def inner_lengths(dtype: DType | None) -> tuple[int, int, int]:
    """Inner lengths a format allows: short, past a segment, a second span of two segments."""
    if dtype is None or dtype.storage is StorageClass.FLOAT:
        return 40, 257, 1300
    if dtype.storage is StorageClass.INTEGER32:
        return 32, 288, 1312
    return 256, 512, 1536
