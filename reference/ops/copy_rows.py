"""COPY_ROWS: copies rows of one buffer to another."""

from __future__ import annotations

from contract.arrays import Floats, Ints


def copy_rows(*, source: Floats, pairs: Ints, target: Floats) -> None:
    """target[pairs[r, 1]] = source[pairs[r, 0]], in place, bits unchanged.

    ``source`` is [sources, width], ``pairs`` [rows, 2] with distinct targets, ``target``
    [targets, width]."""
    target[pairs[:, 1]] = source[pairs[:, 0]]
