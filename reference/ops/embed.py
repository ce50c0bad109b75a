"""EMBED: the embedding row of every query token."""

from __future__ import annotations

import numpy as np

from contract.arrays import Floats, Ints
from reference.matrix import Matrix
from reference.quant import FORMATS


def embed(*, query: Ints, table: Matrix) -> Floats:
    """y[t] = table[query[t].token], expanded to binary32. Returns [tokens, hidden]."""
    if not len(query):
        return np.empty((0, table.shape[-1]), np.float32)
    return FORMATS[table.dtype].dequantize(table.blocks[query[:, 0]])
