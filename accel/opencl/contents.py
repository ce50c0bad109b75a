"""What a step program holds: the products of every format take longest to compile and to load."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeAlias

from accel.packets.ops import TABLE
from accel.packets.step import PRODUCTS
from contract.dtypes import WEIGHT_DTYPES, StorageClass

Parts: TypeAlias = frozenset[str]
"""Names of formats, as kernels write them, and RECURRENT."""

RECURRENT = "RECURRENT"
RECURRENT_OPS = frozenset(name for name in TABLE if name.startswith("ssm_"))
PARTS = (*(dtype.name.upper() for dtype in WEIGHT_DTYPES), RECURRENT)
EVERYTHING: Parts = frozenset(PARTS)
ALWAYS: Parts = frozenset()
"""What every program holds, whatever steps need: for tests, which would need many programs."""

FEW = 2
"""Programs of some parts one process makes. Who wants yet another gets everything: that is a tool
which runs op after op in every format, or a server of many models."""

Build = Callable[[Parts], tuple[Parts, Any]]
"""A program that holds some parts: which it holds, maybe more, and itself. Raises BuildError."""


def parts_of(kinds: Iterable[tuple[str, str]]) -> Parts:
    """What steps need of ops of these ``kinds``, see ``StepMemory``."""
    found = set()
    for name, dtype in kinds:
        if name in RECURRENT_OPS:
            found.add(RECURRENT)
        elif name in PRODUCTS and dtype:
            found.add(dtype.upper())
    return frozenset(found)


def ops_with(parts: Parts) -> tuple[str, ...]:
    """Every op of a program that holds ``parts``."""
    return tuple(name for name in TABLE if RECURRENT in parts or name not in RECURRENT_OPS)


def format_lists(parts: Parts) -> str:
    """``FOR_EACH_QUANTIZED(X)`` and ``FOR_EACH_FLOAT(X)``: X(name) for each format."""
    lines = []
    for kind in ("QUANTIZED", "FLOAT"):
        names = (
            dtype.name.upper()
            for dtype in WEIGHT_DTYPES
            if (dtype.storage is StorageClass.FLOAT) == (kind == "FLOAT")
        )
        cases = " ".join(f"X({name})" for name in names if name in parts)
        lines.append(f"#define FOR_EACH_{kind}(X) {cases}\n")
    return "".join(lines)


def mask_of(parts: Parts) -> int:
    """A number for a set of parts."""
    return sum(1 << bit for bit, name in enumerate(PARTS) if name in parts)


def of_mask(mask: int) -> Parts:
    """The parts of a number."""
    return frozenset(name for bit, name in enumerate(PARTS) if mask >> bit & 1)


class StepPrograms:
    """Programs that run steps, each made when a step needs what none so far holds; few in all.

    Safe to share between threads.
    """

    def __init__(self, build: Build) -> None:
        self._build = build
        self._programs: dict[Parts, Any] = {}
        self._lock = threading.Lock()
        self._maker: threading.Thread | None = None

    def holding(self, parts: Parts) -> Any:
        """A program that holds ``parts``; what was begun comes first. Raises BuildError."""
        self.close()
        return self._holding(parts)

    def _holding(self, parts: Parts) -> Any:
        requested = parts | ALWAYS
        with self._lock:
            for held, program in self._programs.items():
                if requested <= held:
                    return program
            held, program = self._build(EVERYTHING if len(self._programs) >= FEW else requested)
            self._programs[held] = program
            return program

    def expect(self, parts: Parts) -> None:
        """Begin to make what ``holding`` is about to be asked for, while the host does other
        things: what it takes is the driver's time, not Python's."""
        self.close()
        self._maker = threading.Thread(target=self._make, args=(parts,), name="step program")
        self._maker.start()

    def close(self) -> None:
        """Wait for what was begun."""
        maker = self._maker
        if maker is not None:
            maker.join()
            self._maker = None

    def _make(self, parts: Parts) -> None:
        # Whoever asks for it meets the same error.
        with suppress(Exception):
            self._holding(parts)
