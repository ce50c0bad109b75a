"""Rows of the opcode table: elementwise operations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from contract.opcodes import Opcode
from contract.ops.common import (
    ACTIVATION_FUNCTION,
    EXP_FLOPS,
    GATED_FORMULA,
    TANH_FLOPS,
    each,
    gated,
    operands,
)
from contract.spec import Dim, OpSpec, Param, Scalar


def _one_factor_or_all(dims: Mapping[str, Dim], params: Mapping[str, Scalar]) -> str | None:
    if dims["factors"] in (1, dims["width"]):
        return None
    return f"{dims['factors']} factors for {dims['width']} columns"


def _spec(
    opcode: Opcode,
    inputs: str,
    *,
    formula: str,
    params: tuple[Param, ...] = (),
    rule: str = "R0",
    tokens: str = "tokens",
    per_element: int = 1,
    **more: Any,
) -> OpSpec:
    """The row of an operation that computes ``y`` [tokens, width] from ``inputs``."""
    more = {"flops": each(per_element, tokens, "width"), **more}
    both = operands(f"{inputs}, *y[{tokens}, width]")
    return OpSpec(opcode, both, params, rule, formula, **more)


X = "x[tokens, width]"

ELEMENTWISE = (
    _spec(Opcode.ADD, "a[tokens, width], b[tokens, width]", formula="y = a + b"),
    _spec(
        Opcode.SCALE,
        X,
        params=(Param("factor", float, "multiplies x, rounded to binary32"),),
        formula="y = x * factor",
    ),
    _spec(
        Opcode.SCALE_COLUMNS,
        f"{X}, factors[factors]",
        formula="y = x * factors, one factor a column or one for all",
        constraint=_one_factor_or_all,
    ),
    _spec(
        Opcode.SOFT_CAP,
        "x[rows, width]",
        tokens="rows",
        params=(Param("cap", float, "bound of |y|; positive", minimum=2.0**-126),),
        rule="R0 R2",
        formula="y = cap * tanh(x / cap)",
        per_element=TANH_FLOPS + 2,
    ),
    _spec(
        Opcode.XIELU,
        f"{X}, parameters[4]",
        rule="R0 R2",
        formula="p, n, b, e = parameters; y = (p x) x + b x where x > 0, else "
        "((exp(min(x, e)) - 1) - x) n + b x",
        per_element=EXP_FLOPS + 5,
    ),
    _spec(Opcode.BIAS_ADD, f"{X}, bias[width]", formula="y = x + bias"),
    _spec(
        Opcode.SWIGLU,
        "gate[tokens, width], up[tokens, width]",
        params=(ACTIVATION_FUNCTION,),
        rule="R0 R2",
        formula=GATED_FORMULA,
        flops=gated("tokens", "width"),
    ),
)
