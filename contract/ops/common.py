"""Shared parts of the opcode table's rows: operand shorthands, parameters, cost formulas.

Names of operand dimensions: ``tokens`` is the query tokens of the step, ``rows`` the tokens whose
logits are computed, ``hidden`` the residual width, ``pages`` the pages of the KV pool, ``slots``
the sequences a step can hold, ``slot_pages`` the page-table width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from contract.arithmetic import PAGE_TOKENS
from contract.spec import ACTIVATION, INDEX, KV, WEIGHT, Access, Dim, Operand, Param, Scalar, Work

READ, WRITE, UPDATE = Access.READ, Access.WRITE, Access.UPDATE

Constraint = Callable[[Mapping[str, Dim], Mapping[str, Scalar]], str | None]


def activation(name: str, *dims: str, access: Access = READ, optional: bool = False) -> Operand:
    """A binary32 tensor: an activation, a norm weight, a table or a recurrent state."""
    return Operand(name, dims, ACTIVATION, access, optional)


def weight(name: str, *dims: str) -> Operand:
    """A matrix of the model file in any storage type, row-major [outputs, inner]."""
    return Operand(name, dims, WEIGHT)


def index(name: str, *dims: str, access: Access = READ, optional: bool = False) -> Operand:
    """An int32 tensor: token ids, positions, page tables, masks, records of 32-bit words."""
    return Operand(name, dims, INDEX, access, optional)


def kv(access: Access) -> Operand:
    """The KV pages of one layer: keys at index 0 of the second axis, values at 1."""
    dims = ("pages", "2", str(PAGE_TOKENS), "kv_heads", "head_dim")
    return Operand("kv", dims, KV, access)


TOKEN_ACTIVATION = activation("x", "tokens", "hidden")
NORM_WEIGHT = activation("norm_weight", "hidden")
QUERY = index("query", "tokens", "4")
"""QUERY_TOKEN records: token, slot, position, flags."""
SLOT_TABLE = index("slot_table", "slots", "8")
"""SLOT records: what the device stores for each slot's sequence."""
PAGE_TABLE = index("page_table", "slots", "slot_pages")
ROPE_TABLE = activation("rope_table", "context", "2", "rotary_pairs")
"""Cosines at index 0 of the second axis, sines at 1."""

EPS = Param("eps", float, "added to the mean square", minimum=0.0)
HEADS = Param("heads", int, "query heads", minimum=1)
KV_HEADS = Param("kv_heads", int, "key/value heads", minimum=1)
HEAD_DIM = Param("head_dim", int, "elements", minimum=1)
NEOX = Param(
    "neox", int, "pairs (m, m + n/2) if 1, (2m, 2m + 1) if 0", 0, 0, ("interleaved", "neox")
)
ACTIVATION_FUNCTION = Param(
    "activation", int, "the gate's function", 0, 0, ("silu", "gelu", "sigmoid", "clamped")
)
GATED_FORMULA = (
    "y = f(gate) * up, f silu, gelu or sigmoid; clamped: with g = min(gate, 7) and u = up within "
    "+-7, y = (g / (1 + exp(-(1.702 g)))) * (u + 1)"
)

EXP_FLOPS = 20
"""Operations of R2's exp: 1 for n, 4 for the reduction, 14 for the polynomial, 1 for the scale."""
DIGEST_FLOPS = 61
"""Integer operations of R12 per logit: 7 rounds of 8 mixes of 14, of a block of 16, 37 blocks for
32; and 4 to make a logit's bits canonical."""
SILU_FLOPS = EXP_FLOPS + 2
CLAMPED_FLOPS = SILU_FLOPS + 5
"""Operations of the clamped gate per element: 3 for the bounds, 1 for 1.702 g, 1 for u + 1."""
TANH_FLOPS = EXP_FLOPS + 4
GELU_FLOPS = TANH_FLOPS + 8
NORM_FLOPS = 4
"""Operations per element of a norm: square, accumulate, scale, weight."""


def each(per_element: int, *sizes: str) -> Callable[[Work], int]:
    """Cost of ``per_element`` operations on every element of a tensor of the named sizes."""

    def flops(work: Work) -> int:
        total = per_element
        for size in sizes:
            total *= work[size]
        return total

    return flops


def product(*sizes: str) -> Callable[[Work], int]:
    """Cost of a product of matrices: a multiplication and an addition per element pair."""
    return each(2, *sizes)


def gated(*sizes: str) -> Callable[[Work], int]:
    """Cost of an activation function times a second tensor."""

    def flops(work: Work) -> int:
        per_element = 1 + (SILU_FLOPS, GELU_FLOPS, SILU_FLOPS, CLAMPED_FLOPS)[work["activation"]]
        return each(per_element, *sizes)(work)

    return flops


def active_slots(work: Work) -> int:
    """Most slots that a step of this many tokens can read or write."""
    return min(work["slots"], work["tokens"])


def all_of(*constraints: Constraint) -> Constraint:
    """A constraint that returns the first problem any of ``constraints`` finds."""

    def check(dims: Mapping[str, Dim], params: Mapping[str, Scalar]) -> str | None:
        for constraint in constraints:
            problem = constraint(dims, params)
            if problem is not None:
                return problem
        return None

    return check
