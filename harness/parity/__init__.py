"""Parity tests: cases generated from the opcode table, compared with the numpy definitions."""

from harness.parity.cases import Case, all_cases, generate, swept_dtypes
from harness.parity.execute import (
    Difference,
    Example,
    by_definition,
    compare,
    difference,
    example,
    on_tier,
    run_barrier,
)
from harness.parity.operands import fill
from harness.parity.shapes import STRATEGIES

__all__ = [
    "STRATEGIES",
    "Case",
    "Difference",
    "Example",
    "all_cases",
    "by_definition",
    "compare",
    "difference",
    "example",
    "fill",
    "generate",
    "on_tier",
    "run_barrier",
    "swept_dtypes",
]
