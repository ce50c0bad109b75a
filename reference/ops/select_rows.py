"""SELECT_ROWS: selects the tokens whose logits are computed."""

from __future__ import annotations

from contract.arrays import Floats, Ints


def select_rows(*, x: Floats, output_rows: Ints) -> Floats:
    """y[r] = x[output_rows[r]]. Returns [rows, hidden]."""
    return x[output_rows]
