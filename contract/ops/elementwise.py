"""Rows of the opcode table: elementwise operations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from contract.opcodes import Opcode
from contract.ops.common import (
    ACTIVATION_FUNCTION,
    GATED_FORMULA,
    TANH_FLOPS,
    WRITE,
    activation,
    each,
    gated,
)
from contract.spec import Dim, Operand, OpSpec, Param, Scalar


def _one_factor_or_all(dims: Mapping[str, Dim], params: Mapping[str, Scalar]) -> str | None:
    if dims["factors"] in (1, dims["width"]):
        return None
    return f"{dims['factors']} factors for {dims['width']} columns"


def _spec(
    opcode: Opcode,
    *inputs: Operand,
    formula: str,
    params: tuple[Param, ...] = (),
    rule: str = "R0",
    tokens: str = "tokens",
    per_element: int = 1,
    **more: Any,
) -> OpSpec:
    """The row of an operation that computes ``y`` [tokens, width] from ``inputs``."""
    y = activation("y", tokens, "width", access=WRITE)
    more = {"flops": each(per_element, tokens, "width"), **more}
    return OpSpec(opcode, (*inputs, y), params, rule, formula, **more)


X = activation("x", "tokens", "width")
A, B = activation("a", "tokens", "width"), activation("b", "tokens", "width")

ELEMENTWISE = (
    _spec(Opcode.ADD, A, B, formula="y = a + b"),
    _spec(
        Opcode.SCALE,
        X,
        params=(Param("factor", float, "multiplies x, rounded to binary32"),),
        formula="y = x * factor",
    ),
    _spec(
        Opcode.SCALE_COLUMNS,
        X,
        activation("factors", "factors"),
        formula="y = x * factors, one factor a column or one for all",
        constraint=_one_factor_or_all,
    ),
    _spec(
        Opcode.SOFT_CAP,
        activation("x", "rows", "width"),
        tokens="rows",
        params=(Param("cap", float, "bound of |y|; positive", minimum=2.0**-126),),
        rule="R0 R2",
        formula="y = cap * tanh(x / cap)",
        per_element=TANH_FLOPS + 2,
    ),
    _spec(Opcode.BIAS_ADD, X, activation("bias", "width"), formula="y = x + bias"),
    _spec(
        Opcode.SWIGLU,
        activation("gate", "tokens", "width"),
        activation("up", "tokens", "width"),
        params=(ACTIVATION_FUNCTION,),
        rule="R0 R2",
        formula=GATED_FORMULA,
        flops=gated("tokens", "width"),
    ),
)
