"""The opcode table: one row per operation, from which everything else is derived.

The verifier, the reference table in the docs, the parity tests and the tier coverage report all
read this table; ``contract.ops.common`` says what its dimension names mean."""

from __future__ import annotations

from collections.abc import Mapping

from contract.opcodes import Opcode
from contract.ops.attention import ATTENTION
from contract.ops.elementwise import ELEMENTWISE
from contract.ops.experts import EXPERTS
from contract.ops.norms import NORMS
from contract.ops.projections import PROJECTIONS
from contract.ops.recurrent import RECURRENT
from contract.ops.step import STEP
from contract.spec import OpSpec

TABLE: Mapping[Opcode, OpSpec] = {
    spec.opcode: spec
    for spec in (*STEP, *NORMS, *PROJECTIONS, *ATTENTION, *ELEMENTWISE, *EXPERTS, *RECURRENT)
}
"""Every opcode's specification, by opcode."""

if set(TABLE) != set(Opcode):
    raise AssertionError(f"opcodes without a specification: {set(Opcode) - set(TABLE)}")
