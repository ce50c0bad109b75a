"""Writes GGUF version 3 files: the same input gives the same bytes, and no partial file appears."""

from __future__ import annotations

import os
import secrets
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from contract.cached_files import need_file, partial_file, remove_abandoned
from contract.dtypes import DType
from contract.errors import ModelFileError
from reference.model.gguf.cursor import shown
from reference.model.gguf.header import MAGIC, VERSION, Header, parse_header
from reference.model.gguf.limits import DEFAULT_ALIGNMENT_BYTES
from reference.model.gguf.metadata import ALIGNMENT_KEY, alignment_of
from reference.model.gguf.strings import StringArray
from reference.model.gguf.tensors import TensorInfo
from reference.model.gguf.types import NUMERIC_DTYPES, SCALAR_STRUCTS, GgmlType, GgufType

_U32_MAX = (1 << 32) - 1
_FIX = "correct what is to be written"
_ITEM_TYPES = {dtype: kind for kind, dtype in NUMERIC_DTYPES.items()}
_MAX_STEM_CHARACTERS = 48


@dataclass(frozen=True, slots=True)
class Typed:
    """A scalar metadata value with the exact type it is stored as."""

    kind: GgufType
    value: bool | int | float | str


WritableValue = bool | int | float | str | Typed | np.ndarray | StringArray | Sequence[Any]
"""A metadata value; a Sequence holds only bools, only numbers, or only strings (str or bytes)."""


class Hole(Enum):
    """Tensor data that is not written: a hole in the file, which reads as zeros."""

    HOLE = "hole"


HOLE = Hole.HOLE

TensorData = bytes | bytearray | memoryview | np.ndarray | Iterable[bytes | np.ndarray] | Hole
"""The bytes of a tensor in file layout, whole or in chunks of any size, or ``HOLE``."""

TensorSource = tuple[DType | GgmlType, Sequence[int], TensorData]
"""A tensor's storage type, row-major shape and data."""


def write_gguf(
    path: str | Path, metadata: Mapping[str, WritableValue], tensors: Mapping[str, TensorSource]
) -> None:
    """Write a GGUF file at ``path``, replacing an existing one only when all data is on disk.

    An int becomes uint32 if it fits, else uint64 or int64; a float becomes float32; numpy arrays
    keep their dtype; ``Typed`` sets the type. Tensors are written in the order given, each at a
    multiple of the metadata's ``general.alignment`` (bytes, 32 without it). A link stays, and the
    file it names is replaced. Raises ModelFileError for whatever ``open_gguf`` would refuse, when a
    tensor's data does not have the length of its shape, when the file cannot be written, and where
    ``path`` is a device or a pipe."""
    path = Path(path)
    header, layout = _encode_header(path, metadata, tensors)
    target = Path(os.path.realpath(path))
    stem = target.name[:_MAX_STEM_CHARACTERS]
    temporary = target.with_name(f".{stem}.{secrets.token_hex(8)}.tmp")
    remove_abandoned(target.parent, f".{stem}.", ".tmp")
    try:
        need_file(target)
        with partial_file(temporary, 0o666) as file:
            file.write(header)
            for tensor in layout.tensors:
                _write_tensor(file, path, tensor, tensors[tensor.name][2])
                file.write(bytes(_padding(tensor.nbytes, layout.alignment)))
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
            file.close()
            os.replace(temporary, target)
        _sync_directory(target.parent)
    except OSError as error:
        raise ModelFileError(
            path, "the file", f"cannot be written: {error.strerror}", "check the folder and disk"
        ) from None


def _padding(position: int, alignment: int) -> int:
    return -position % alignment


def _encode_header(
    path: Path, metadata: Mapping[str, WritableValue], tensors: Mapping[str, TensorSource]
) -> tuple[bytes, Header]:
    """The bytes before the first tensor, and the header the reader parses from them.

    Parsing them before any data is written refuses everything the reader would refuse."""
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    parts += [_encode_entry(path, key, value) for key, value in metadata.items()]
    alignment = _alignment(path, metadata)
    data_bytes = 0
    for name, (dtype, shape, _) in tensors.items():
        entry, nbytes = _encode_tensor(path, name, dtype, shape, data_bytes)
        parts.append(entry)
        data_bytes += nbytes + _padding(nbytes, alignment)
    header = b"".join(parts)
    header += bytes(_padding(len(header), alignment))
    return header, parse_header(header, len(header) + data_bytes, path)


def _alignment(path: Path, metadata: Mapping[str, WritableValue]) -> int:
    """The alignment in bytes that the reader will find in ``metadata``, whose values have been
    encoded."""
    if ALIGNMENT_KEY not in metadata:
        return DEFAULT_ALIGNMENT_BYTES
    value = metadata[ALIGNMENT_KEY]
    kind, _ = _encode_value(value)
    stored: Any = value.value if isinstance(value, Typed) else value
    return alignment_of(path, {ALIGNMENT_KEY: stored}, {ALIGNMENT_KEY: kind})


def _string(text: str | bytes) -> bytes:
    raw = text.encode("utf-8") if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _encode_entry(path: Path, key: str, value: WritableValue) -> bytes:
    try:
        kind, payload = _encode_value(value)
        return _string(key) + struct.pack("<I", kind) + payload
    except (TypeError, UnicodeEncodeError, OverflowError, struct.error) as error:
        raise ModelFileError(
            path, f"key {shown(key)}", f"cannot be stored: {error}", _FIX
        ) from None


def _encode_value(value: WritableValue) -> tuple[GgufType, bytes]:
    if isinstance(value, Typed):
        return value.kind, _encode_scalar(value.kind, value.value)
    if isinstance(value, bool | int | float | str):
        kind = _scalar_type(value)
        return kind, _encode_scalar(kind, value)
    item_kind, count, items = _encode_items(value)
    return GgufType.ARRAY, struct.pack("<IQ", item_kind, count) + items


def _scalar_type(value: bool | int | float | str) -> GgufType:
    if isinstance(value, bool):
        return GgufType.BOOL
    if isinstance(value, int):
        return _integer_type(value, value)
    return GgufType.FLOAT32 if isinstance(value, float) else GgufType.STRING


def _integer_type(least: int, greatest: int) -> GgufType:
    if least < 0:
        return GgufType.INT64
    return GgufType.UINT32 if greatest <= _U32_MAX else GgufType.UINT64


def _encode_scalar(kind: GgufType, value: bool | int | float | str) -> bytes:
    if kind is GgufType.STRING and isinstance(value, str):
        return _string(value)
    if kind not in SCALAR_STRUCTS or isinstance(value, str):
        raise TypeError(f"{value!r} cannot have the type {kind.name.lower()}")
    return SCALAR_STRUCTS[kind].pack(value)


def _encode_items(value: np.ndarray | StringArray | Sequence[Any]) -> tuple[GgufType, int, bytes]:
    """The item type, count and bytes of an array."""
    if isinstance(value, np.ndarray):
        dtype = value.dtype.newbyteorder("<")
        if value.ndim != 1 or dtype not in _ITEM_TYPES:
            raise TypeError(f"a {value.ndim}-dimensional array of {value.dtype} has no GGUF form")
        return _ITEM_TYPES[dtype], len(value), value.astype(dtype).tobytes()
    if isinstance(value, StringArray):
        return GgufType.STRING, len(value), b"".join(map(_string, value.to_list()))
    if not isinstance(value, list | tuple) or not value:
        raise TypeError(f"{value!r} has no GGUF type (an empty array must be a numpy array)")
    item_types = set(map(type, value))
    if item_types <= {str, bytes}:
        return GgufType.STRING, len(value), b"".join(map(_string, value))
    if item_types == {bool}:
        kind = GgufType.BOOL
    elif item_types == {int}:
        kind = _integer_type(min(value), max(value))
    elif item_types <= {int, float}:
        kind = GgufType.FLOAT32
    else:
        raise TypeError(f"an array mixes {sorted(kind.__name__ for kind in item_types)}")
    code = SCALAR_STRUCTS[kind].format[1:]
    return kind, len(value), struct.pack(f"<{len(value)}{code}", *value)


def _encode_tensor(
    path: Path, name: str, dtype: DType | GgmlType, shape: Sequence[int], offset: int
) -> tuple[bytes, int]:
    """A tensor's entry in the header, and the bytes of its data."""
    elements = 1
    for extent in shape:
        elements *= int(extent)
    nbytes = elements // dtype.block_elements * dtype.block_bytes
    try:
        dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        entry = _string(name) + dimensions + struct.pack("<IQ", dtype.ggml_id, offset)
    except (UnicodeEncodeError, struct.error) as error:
        raise ModelFileError(
            path, f"tensor {shown(name)}", f"{list(shape)} cannot be stored: {error}", _FIX
        ) from None
    return entry, nbytes


def _write_tensor(file: BinaryIO, path: Path, tensor: TensorInfo, data: TensorData) -> None:
    if isinstance(data, Hole):
        file.seek(tensor.nbytes, os.SEEK_CUR)
        return
    written = 0
    for chunk in _chunks(data):
        written += len(chunk)
        if written > tensor.nbytes:
            break
        file.write(chunk.data)
    if written != tensor.nbytes:
        more = "at least " if written > tensor.nbytes else ""
        raise ModelFileError(
            path,
            f"tensor {shown(tensor.name)}",
            f"{tensor.ggml_type} {list(tensor.shape)} takes {tensor.nbytes} bytes, its data has"
            f" {more}{written}",
            _FIX,
        )


def _chunks(data: TensorData) -> Iterator[np.ndarray]:
    """Each piece of ``data`` as uint8, copied only when an array is not contiguous."""
    assert not isinstance(data, Hole)
    pieces = [data] if isinstance(data, bytes | bytearray | memoryview | np.ndarray) else data
    for piece in pieces:
        array = piece if isinstance(piece, np.ndarray) else np.frombuffer(piece, np.uint8)
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _sync_directory(directory: Path) -> None:
    """Make the rename durable. Windows does so by itself and cannot open a folder."""
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
