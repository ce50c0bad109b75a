"""Generates parity cases: opcode x format x shape x kind of values, each with its own seed."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from contract import dtypes
from contract.dtypes import DType
from contract.opcodes import Opcode
from contract.ops import TABLE
from contract.spec import ACTIVATION, Access, OpSpec, Scalar
from harness.parity.shape import OpShape
from harness.parity.shapes import STRATEGIES
from harness.parity.values import BREAKS_ROWS, KINDS, NONFINITE, OF_PAGES
from reference.ops import DEFINITIONS

INTEGER_REPEATS = 6
"""Seeds per shape of an opcode without activations, since it has no kinds of values."""


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison. ``dtype`` is the tested storage type, None if the opcode has only one
    type."""

    opcode: Opcode
    dtype: DType | None
    shape: OpShape
    kind: str
    repeat: int

    @property
    def name(self) -> str:
        """The name of the case, without its seed."""
        form = f"-{self.dtype}" if self.dtype else ""
        return f"{TABLE[self.opcode].name}{form}-{self.shape.label}-{self.kind}"

    @property
    def seed(self) -> int:
        """The seed of the case's random numbers, derived from its name and repetition."""
        return zlib.crc32(f"{self.name}-{self.repeat}".encode())

    @property
    def params(self) -> dict[str, Scalar]:
        """The opcode's parameters, defaults filled in."""
        params, given = TABLE[self.opcode].params, self.shape.given
        values = {param.name: given.get(param.name, param.default) for param in params}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def sizes(self) -> dict[str, int]:
        """Every dimension name of the opcode's table row, with its value."""
        integers = {k: v for k, v in self.params.items() if isinstance(v, int)}
        return integers | self.shape.sizes()

    @property
    def may_break(self) -> bool:
        """Whether NaN or an infinity can be a correct result."""
        overflows = _has_pages(self.opcode) or self.opcode is Opcode.SSM_SCAN
        return self.kind in (NONFINITE | BREAKS_ROWS if overflows else NONFINITE)

    def __str__(self) -> str:
        return f"{self.name}-seed{self.seed}"


def swept_dtypes(spec: OpSpec) -> tuple[DType | None, ...]:
    """Every storage type of the opcode's operands that accept several."""
    for operand in spec.operands:
        if len(operand.dtypes) > 1:
            return operand.dtypes
    fixed = [o.dtypes[0] for o in spec.operands if o.dtypes[0] not in (dtypes.F32, dtypes.I32)]
    return (fixed[0] if fixed else None,)


def _has_pages(opcode: Opcode) -> bool:
    return any(operand.name == "kv" for operand in TABLE[opcode].operands)


def generate(opcode: Opcode, repeats: int = 1) -> Iterator[Case]:
    """All cases of one opcode, with ``repeats`` seeds each."""
    spec = TABLE[opcode]
    floats = any(o.dtypes == ACTIVATION and o.access is Access.READ for o in spec.operands)
    seeds = repeats if floats else repeats * INTEGER_REPEATS
    kinds = [kind for kind in KINDS if _has_pages(opcode) or kind not in OF_PAGES]
    for dtype in swept_dtypes(spec):
        for shape in STRATEGIES[opcode](dtype):
            for kind in kinds if floats else ("integers",):
                for repeat in range(seeds):
                    yield Case(opcode, dtype, shape, kind, repeat)


def all_cases(repeats: int = 1) -> list[Case]:
    """The cases of every opcode that has both operands and a definition."""
    defined = [opcode for opcode in STRATEGIES if opcode in DEFINITIONS]
    return [case for opcode in defined for case in generate(opcode, repeats)]
