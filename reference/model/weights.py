"""The bytes of a graph's read-only buffers: weights from the file, and computed tables."""

from __future__ import annotations

import math

import numpy as np

from contract.arrays import Bytes
from contract.dtypes import DType
from contract.errors import ModelFileError
from contract.ir.graph import BufferDecl
from contract.ir.source import MADE, WeightSource, parse_source
from reference.exact.rotary import growth_table, rotary_table, unrotated_table
from reference.model.adapters import TensorFile, numbers_of
from reference.model.config.rope import GROWTH_TABLE
from reference.model.draft_head import ROPE_TABLE, STORED, TOKEN_TABLE
from reference.model.families.feed_forward import XIELU
from reference.model.families.head_products import MATRIX_OF_HEAD
from reference.model.families.positions import POSITION_TABLE, POSITIONS
from reference.model.open import Model
from reference.quant import find_nonfinite_scale

PIECE_BYTES = 1 << 21
"""Bytes of a tensor that one thread checks at a time."""
SHARED_BYTES = 1 << 26
"""Bytes below which the calling thread checks a tensor alone, sooner than others could start."""


def weight_bytes(file: TensorFile, decl: BufferDecl) -> Bytes:
    """The data of the WEIGHT buffer ``decl``, uint8[rows, row_bytes]; a view of the file if
    possible. Raises ModelFileError when a scale or an element of a float type is not finite."""
    source = parse_source(decl.source)
    if source.tensor in MADE:
        shape = math.prod(map(int, decl.shape[:-1])), int(decl.shape[-1])
        made = np.full(shape, float(source.tensor), np.float32)
        return source.scaled(made).view(np.uint8)
    data = _stored(file, decl, source)
    broken = _first_broken(decl.dtype, data)
    if broken is not None:
        raise ModelFileError(
            file.path_of(source.tensor),
            f"tensor {str(source).removeprefix(STORED)}",
            f"row {broken[0]} block {broken[1]} holds a NaN or infinite scale",
            "fetch the file again or convert it again",
        )
    return source.scaled(data.view("<f4")).view(np.uint8) if source.powers else data


def unchecked_weight(file: TensorFile, decl: BufferDecl) -> Bytes:
    """The data of the WEIGHT buffer ``decl``; the caller must check that its numbers are finite."""
    source = parse_source(decl.source)
    made = source.powers or source.tensor in MADE
    return weight_bytes(file, decl) if made else _stored(file, decl, source)


def constant_bytes(model: Model, decl: BufferDecl) -> Bytes:
    """The data of the CONSTANT buffer ``decl`` of the model's graph, uint8[rows, row_bytes]: the
    table of that name for ``decl.shape[0]`` positions or heads. Raises ModelFileError for frequency
    divisors that are not positive numbers, and for angles that are too large."""
    context = int(decl.shape[0])
    if decl.name == MATRIX_OF_HEAD:
        return np.arange(context, dtype="<i4").reshape(1, -1).view(np.uint8)
    if decl.name.startswith(XIELU):
        layer = int(decl.name.removeprefix(XIELU)[1:-1])
        return np.array([model.config.xielu[layer]], "<f4").view(np.uint8)
    if decl.name == POSITION_TABLE:
        rows = numbers_of(model.file, POSITIONS)[:context].reshape(2 * context, -1)
        return np.ascontiguousarray(rows, "<f4").view(np.uint8)
    growth = model.config.query_growth
    if growth is not None and decl.name == GROWTH_TABLE:
        grown = growth_table(context, growth.length, growth.factor, growth.offset)
        return grown.reshape(-1, 1).view(np.uint8)
    file, config = model.file, model.config
    if model.head is not None and decl.name in (ROPE_TABLE, TOKEN_TABLE):
        if decl.name == TOKEN_TABLE:
            assert model.head.tokens is not None
            return model.head.tokens.reshape(1, -1).view(np.uint8)
        file, config = model.head.file, model.head.config
    rope = next(rope for rope in config.ropes if rope.table == decl.name)
    if not rope.rotates:
        return unrotated_table(context, rope.dims).reshape(-1, rope.dims // 2).view(np.uint8)
    tensor = rope.factors_for(context)
    factors = None
    if tensor:
        factors = numbers_of(file, tensor).reshape(-1).tolist()
        if not all(0.0 < factor < math.inf for factor in factors):
            raise ModelFileError(
                file.path,
                f"tensor {tensor}",
                "holds a divisor that is not a positive number",
                "fetch the file again or convert it again",
            )
    try:
        table = rotary_table(context, rope.base, rope.dims, rope.scaling, factors)
    except ValueError as error:
        keys = f"keys {config.architecture}.rope.*"
        problem = f"{error} with a base of {rope.base:g}"
        raise ModelFileError(file.path, keys, problem) from None
    return table.reshape(-1, table.shape[-1]).view(np.uint8)


def _stored(file: TensorFile, decl: BufferDecl, source: WeightSource) -> Bytes:
    data = file.tensor_bytes(source.tensor)
    data = data if source.rows is None else source.rows.take(data)
    return data if len(decl.shape) > 1 else data.reshape(1, -1)


def _first_broken(dtype: DType, data: Bytes) -> tuple[int, int] | None:
    """The first (row, block) of a tensor with a scale or element that is not finite, or None.

    All cores check a large tensor: the check reads it from disk for the first time, and a tier
    cannot upload it sooner."""
    rows = max(1, PIECE_BYTES // max(1, data.shape[1]))
    found: dict[int, tuple[int, int]] = {}

    def check(first: int) -> None:
        broken = find_nonfinite_scale(dtype, data[first : first + rows])
        if broken is not None:
            found[first] = (first + broken[0], broken[1])

    firsts = range(0, len(data), rows)
    if data.nbytes < SHARED_BYTES:
        for first in firsts:
            check(first)
    else:
        # Imported here, because a tier that checks by itself needs no threads of this one.
        from reference.cpu.threads import for_each

        for_each(check, firsts)
    return found[min(found)] if found else None
