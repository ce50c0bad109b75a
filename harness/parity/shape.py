"""One shape of an opcode's cases, and functions that several opcodes' shape lists share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from contract.arithmetic import PAGE_TOKENS
from contract.dtypes import DType, StorageClass
from contract.spec import Scalar

Run = tuple[int, int, int]
SPARE_PAGES = 3
"""KV pages that no slot owns, filled with garbage."""

EMPTY: tuple[Run, ...] = ()
DECODE_ONE: tuple[Run, ...] = ((0, 63, 1),)
DECODE_MANY: tuple[Run, ...] = ((2, 64, 1), (0, 15, 1), (3, 127, 1), (1, 0, 1), (4, 128, 1))
CHUNK_TWO: tuple[Run, ...] = ((0, 63, 2),)
CHUNK_LONG: tuple[Run, ...] = ((1, 64, 65),)
CHUNK_SPANS: tuple[Run, ...] = ((0, 1022, 3), (1, 1150, 2))
DECODE_SPANS: tuple[Run, ...] = ((1, 1100, 1), (0, 1024, 1), (2, 2120, 1))
MIXED: tuple[Run, ...] = ((0, 60, 9), (2, 5, 1), (1, 125, 6), (2, 6, 1))
SHORT: tuple[Run, ...] = ((0, 0, 17),)


@dataclass(frozen=True, slots=True)
class OpShape:
    """The dimensions and parameters of a case by name. ``absent`` operands are omitted."""

    label: str
    given: Mapping[str, Scalar] = field(default_factory=dict)
    runs: tuple[Run, ...] | None = None
    absent: frozenset[str] = frozenset()

    def sizes(self) -> dict[str, int]:
        """Every dimension by name, those of the step included."""
        sizes = {name: value for name, value in self.given.items() if isinstance(value, int)}
        if self.runs is not None:
            slots = 1 + max((slot for slot, _, _ in self.runs), default=0)
            slots *= sizes.get("states", 1)
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


Strategy = Callable[[DType | None], tuple[OpShape, ...]]


def inner_lengths(dtype: DType | None) -> tuple[int, int, int]:
    """Three inner lengths a format allows: short, longer than a segment, and into a second span."""
    if dtype is None or dtype.storage is StorageClass.FLOAT:
        return 40, 257, 1300
    if dtype.storage is StorageClass.INTEGER32:
        return 32, 288, 1312
    return 256, 512, 1536


def always(*shapes: OpShape) -> Strategy:
    """The same shapes for every storage type."""
    return lambda dtype: shapes


def listed(names: str, *rows: Sequence[Any], label: str = "{label}", **params: Scalar) -> Strategy:
    """One shape for each row: values of ``names``, and then operands that are absent. ``runs`` are
    those of the step; ``label`` names the others in braces."""
    shapes = []
    for row in rows:
        given = dict(zip(names.split(), row, strict=False))
        absent = frozenset(row[len(given) :])
        text, runs = label.format(**given), given.pop("runs", None)
        given.pop("label", None)
        shapes.append(OpShape(text, given | params, runs, absent))
    return always(*shapes)


def grid(names: str, *rows: Sequence[int], label: str = "", **params: Scalar) -> Strategy:
    """One shape for each row of sizes, of the dimensions ``names``."""
    label += "x".join(f"{{{name}}}" for name in names.split())
    return listed(names, *rows, label=label, **params)


def activations(names: str, *rows: Sequence[int], silu: str = "silu-") -> Strategy:
    """Every row of sizes with every activation function; labels of silu begin with ``silu``."""
    labels = (silu, "gelu-", "sigmoid-", "clamped-", "relu-")
    return lambda dtype: tuple(
        shape
        for number, label in enumerate(labels)
        for shape in grid(names, *rows, label=label, activation=number)(dtype)
    )
