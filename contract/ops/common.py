"""Shared parts of the opcode table's rows: operand shorthands, parameters, cost formulas.

Names of operand dimensions: ``tokens`` is the query tokens of the step, ``rows`` the tokens whose
logits are computed, ``hidden`` the residual width, ``pages`` the pages of the KV pool, ``slots``
the sequences a step can hold, ``slot_pages`` the page-table width."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from contract.arithmetic import PAGE_TOKENS
from contract.spec import ACTIVATION, INDEX, KV, WEIGHT, Access, Dim, Operand, Param, Scalar, Work

Constraint = Callable[[Mapping[str, Dim], Mapping[str, Scalar]], str | None]


NAMED: Mapping[str, str] = {
    # Records of token, slot, position and flags.
    "query": "int query[tokens, 4]",
    "page_table": "int page_table[slots, slot_pages]",
    # Cosines at index 0 of the second axis, sines at 1.
    "rope_table": "rope_table[context, 2, rotary_pairs]",
    # The KV pages of one layer: keys at index 0 of the second axis, values at 1.
    "kv": f"pages kv[pages, 2, {PAGE_TOKENS}, kv_heads, head_dim]",
}
"""Operands that always have the same dimensions, which ``operands`` leaves out."""
_DTYPES = {"": ACTIVATION, "int": INDEX, "weight": WEIGHT, "pages": KV}
_ACCESS = {"": Access.READ, "*": Access.WRITE, "&": Access.UPDATE}
_OPERAND = re.compile(r"(?:(int|weight|pages) )?([*&]?)(\w+)(?:\[(.*?)\])?(\??)(?:, |$)")


def operands(text: str) -> tuple[Operand, ...]:
    """The operands of a row: ``name[dimensions]`` with commas between them.

    An element is binary32, ``int`` for int32 (ids, positions, masks, records of 32-bit words) or
    ``weight`` for a matrix of the model file in any storage type, row-major [outputs, inner].
    ``*name`` is written, ``&name`` updated in place, and ``name[...]?`` may be absent."""
    found, end = [], 0
    for match in _OPERAND.finditer(text):
        kind, access, name, dims, optional = match.groups()
        if not dims:
            kind, _, name, dims, _ = _OPERAND.findall(NAMED[name])[0]
        sizes = tuple(dims.split(", "))
        found.append(Operand(name, sizes, _DTYPES[kind or ""], _ACCESS[access], bool(optional)))
        end += len(match[0])
    assert end == len(text), f"not a list of operands: {text}"
    return tuple(found)


EPS = Param("eps", float, "added to the mean square", minimum=0.0)
HEADS = Param("heads", int, "query heads", minimum=1)
KV_HEADS = Param("kv_heads", int, "key/value heads", minimum=1)
HEAD_DIM = Param("head_dim", int, "elements", minimum=1)
NEOX = Param(
    "neox", int, "pairs (m, m + n/2) if 1, (2m, 2m + 1) if 0", 0, 0, ("interleaved", "neox")
)
ACTIVATION_FUNCTION = Param(
    "activation", int, "the gate's function", 0, 0, ("silu", "gelu", "sigmoid", "clamped", "relu")
)
GATED_FORMULA = (
    "y = f(gate) * up, f silu, gelu, sigmoid or relu; clamped: with g = min(gate, 7) and u = up "
    "within +-7, y = (g / (1 + exp(-(1.702 g)))) * (u + 1)"
)

EXP_FLOPS = 20
"""Operations of R2's exp: 1 for n, 4 for the reduction, 14 for the polynomial, 1 for the scale."""
DIGEST_FLOPS = 61
"""Integer operations of R12 per logit: 7 rounds of 8 mixes of 14, of a block of 16, 37 blocks for
32; and 4 to make a logit's bits canonical."""
SILU_FLOPS = EXP_FLOPS + 2
CLAMPED_FLOPS = SILU_FLOPS + 5
"""Operations of the clamped gate per element: 3 for the bounds, 1 for 1.702 g, 1 for u + 1."""
RELU_FLOPS = 1
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
        functions = (SILU_FLOPS, GELU_FLOPS, SILU_FLOPS, CLAMPED_FLOPS, RELU_FLOPS)
        return each(1 + functions[work["activation"]], *sizes)(work)

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
