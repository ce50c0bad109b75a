"""The bytes of a graph's weights, as the file holds them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from contract.errors import ModelFileError
from contract.ir.graph import BufferDecl
from contract.ir.source import ONES, parse_source
from reference.model.gguf import GgufFile
from reference.quant import find_nonfinite_scale


def weight_bytes(file: GgufFile, decl: BufferDecl) -> NDArray[np.uint8]:
    """What the WEIGHT buffer ``decl`` is made of, uint8[rows, row_bytes]; a view where it can be.

    Raises ModelFileError when a scale or an element of a float type is not finite.
    """
    source = parse_source(decl.source)
    if source.tensor == ONES:
        return source.scaled(np.ones((1, len(source.powers)), np.float32)).view(np.uint8)
    data = file.tensor_bytes(source.tensor)
    if source.rows is not None:
        data = source.rows.take(data)
    broken = find_nonfinite_scale(decl.dtype, data)
    if broken is not None:
        raise ModelFileError(
            file.path,
            f"tensor {source}",
            f"row {broken[0]} block {broken[1]} holds a NaN or infinite scale",
            "fetch the file again or convert it again",
        )
    return source.scaled(data.view("<f4")).view(np.uint8) if source.powers else data
