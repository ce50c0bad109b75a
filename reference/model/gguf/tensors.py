"""The tensor list of a GGUF file: names, shapes, types and offsets, all checked."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

from contract.dtypes import BY_GGML_ID, DType
from contract.errors import UnsupportedModel
from contract.lazy_dataclass import dataclass
from reference.model.gguf import limits
from reference.model.gguf.cursor import Cursor, shown
from reference.model.gguf.types import GGML_TYPES, WITHDRAWN_GGML_TYPES, GgmlType

_CONVERT = "the file was converted wrongly: convert or fetch it again"
_SMALLEST_ENTRY_BYTES = 8 + 1 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file.

    ``shape`` is row-major (the file lists dimensions fastest first); ``offset`` is in bytes from
    the start of the file of shard ``shard``; ``nbytes`` is without padding."""

    name: str
    shape: tuple[int, ...]
    ggml_type: GgmlType
    offset: int
    nbytes: int
    shard: int

    @property
    def dtype(self) -> DType | None:
        """The storage type of the contract, or None when this project cannot compute with the
        type."""
        return BY_GGML_ID.get(self.ggml_type.ggml_id)

    @property
    def rows(self) -> int:
        """The product of all dimensions but the last; 1 for a vector."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.nbytes // self.rows


def read_tensors(cursor: Cursor, count: int, shard: int) -> list[TensorInfo]:
    """Read ``count`` entries in file order, with offsets from the start of the data section."""
    if count > limits.MAX_TENSORS:
        raise cursor.error(
            "byte offset 8",
            f"{count} tensors are more than {limits.MAX_TENSORS}",
            "the file is damaged or hostile",
        )
    cursor.need(count * _SMALLEST_ENTRY_BYTES, f"a count of {count} tensors", "byte offset 8")
    tensors: dict[str, TensorInfo] = {}
    for _ in range(count):
        start = cursor.position
        tensor = _read_tensor(cursor, shard)
        if tensor.name in tensors:
            raise cursor.error(
                f"tensor {shown(tensor.name)}", f"appears again at byte offset {start}", _CONVERT
            )
        tensors[tensor.name] = tensor
    return list(tensors.values())


def _read_tensor(cursor: Cursor, shard: int) -> TensorInfo:
    start = cursor.position
    name = cursor.text(limits.MAX_TENSOR_NAME_BYTES, "a tensor name")
    if not name:
        raise cursor.error(f"byte offset {start}", "a tensor name is empty", _CONVERT)
    where = f"tensor {shown(name)}"
    dimensions = cursor.u32("the number of dimensions", where)
    if not 1 <= dimensions <= limits.MAX_DIMENSIONS:
        raise cursor.error(
            where, f"has {dimensions} dimensions, not 1 to {limits.MAX_DIMENSIONS}", _CONVERT
        )
    extents = [cursor.u64("a dimension", where) for _ in range(dimensions)]
    if 0 in extents:
        raise cursor.error(where, f"has a dimension of 0 in {extents}", _CONVERT)
    if math.prod(extents) > limits.MAX_ELEMENTS:
        raise cursor.error(
            where, f"dimensions {extents} make more than 2^63 - 1 elements", _CONVERT
        )
    ggml_type = _read_ggml_type(cursor, where)
    if extents[0] % ggml_type.block_elements:
        raise cursor.error(
            where,
            f"rows of {extents[0]} elements are not a whole number of {ggml_type} blocks of"
            f" {ggml_type.block_elements}",
            _CONVERT,
        )
    offset = cursor.u64("the data offset", where)
    nbytes = math.prod(extents) // ggml_type.block_elements * ggml_type.block_bytes
    return TensorInfo(name, tuple(reversed(extents)), ggml_type, offset, nbytes, shard)


def _read_ggml_type(cursor: Cursor, where: str) -> GgmlType:
    number = cursor.i32("the tensor type", where)
    if number in GGML_TYPES:
        return GGML_TYPES[number]
    if number in WITHDRAWN_GGML_TYPES:
        raise UnsupportedModel(
            cursor.path,
            where,
            f"is of type {WITHDRAWN_GGML_TYPES[number]}, which GGML has withdrawn",
            "quantize the model again",
        )
    raise cursor.error(
        where, f"tensor type {number} is unknown", "the file is damaged, or newer than this build"
    )


def locate_tensors(
    cursor: Cursor, tensors: list[TensorInfo], data_start: int, alignment: int
) -> list[TensorInfo]:
    """``tensors`` with offsets from the start of the file, in file order. Raises ModelFileError for
    one that is misaligned, leaves the file or overlaps another."""
    for tensor in tensors:
        where = f"tensor {shown(tensor.name)}"
        if tensor.offset % alignment:
            raise cursor.error(
                where,
                f"data offset {tensor.offset} is not a multiple of the alignment {alignment}",
                _CONVERT,
            )
        end = data_start + tensor.offset + tensor.nbytes
        if end > cursor.size:
            raise cursor.error(
                where,
                f"{tensor.ggml_type} {list(tensor.shape)} of {tensor.nbytes} bytes ends at byte"
                f" offset {end}, past the end of the file ({cursor.size} bytes)",
            )
    placed = [replace(tensor, offset=data_start + tensor.offset) for tensor in tensors]
    for before, after in pairwise(sorted(placed, key=lambda tensor: tensor.offset)):
        if before.offset + before.nbytes > after.offset:
            raise cursor.error(
                f"tensor {shown(after.name)}",
                f"overlaps tensor {shown(before.name)} at byte offset {after.offset}",
                _CONVERT,
            )
    return placed
