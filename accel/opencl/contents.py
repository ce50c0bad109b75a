"""Chooses the parts that a step program contains: each part takes long to compile and to load."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeAlias

from accel.packets.ops import TABLE
from accel.packets.step import PRODUCTS
from contract.dtypes import WEIGHT_DTYPES, StorageClass

Parts: TypeAlias = frozenset[str]
"""A set of format names, as kernels spell them, and RECURRENT."""

RECURRENT = "RECURRENT"
RECURRENT_OPS = frozenset(name for name in TABLE if name.startswith("ssm_"))
PARTS = (*(dtype.name.upper() for dtype in WEIGHT_DTYPES), RECURRENT)
EVERYTHING: Parts = frozenset(PARTS)
ALWAYS: Parts = frozenset()
"""Parts that every program contains; tests set it, so that they need few programs."""

FEW = 2
"""Most programs of selected parts in a process. The next program contains all parts: the process is
then a tool that runs ops in every format, or a server of many models."""

Build = Callable[[Parts], tuple[Parts, Any]]
"""Builds a program with at least some parts; returns its parts and the program. Raises
BuildError."""


def parts_of(kinds: Iterable[tuple[str, str]]) -> Parts:
    """The parts that ops of these ``kinds`` need; see ``StepMemory``."""
    found = set()
    for name, dtype in kinds:
        if name in RECURRENT_OPS:
            found.add(RECURRENT)
        elif name in PRODUCTS and dtype:
            found.add(dtype.upper())
    return frozenset(found)


def ops_with(parts: Parts) -> tuple[str, ...]:
    """The names of all ops in a program of ``parts``."""
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
    """The number that stands for a set of parts."""
    return sum(1 << bit for bit, name in enumerate(PARTS) if name in parts)


def of_mask(mask: int) -> Parts:
    """The set of parts that a number stands for."""
    return frozenset(name for bit, name in enumerate(PARTS) if mask >> bit & 1)


class StepPrograms:
    """The programs that run steps. A new one is built when none has the parts that a step needs.

    Threads may share it."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._programs: dict[Parts, Any] = {}
        self._lock = threading.Lock()
        self._maker: threading.Thread | None = None

    def holding(self, parts: Parts) -> Any:
        """A program with ``parts``; waits for builds that have begun. Raises BuildError."""
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
        """Begin to build a program with ``parts`` in a thread; the driver works without Python's
        lock."""
        self.close()
        self._maker = threading.Thread(target=self._make, args=(parts,), name="step program")
        self._maker.start()

    def close(self) -> None:
        """Wait for the build that has begun."""
        maker = self._maker
        if maker is not None:
            maker.join()
            self._maker = None

    def _make(self, parts: Parts) -> None:
        # A later call of ``holding`` raises the same error.
        with suppress(Exception):
            self._holding(parts)
