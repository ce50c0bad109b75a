"""The parser of a GGUF header: all data of a file before its tensor data."""

from __future__ import annotations

import mmap

from contract.errors import ModelFileError
from contract.lazy_dataclass import dataclass
from reference.model.gguf.cursor import Cursor
from reference.model.gguf.metadata import Value, alignment_of, read_metadata
from reference.model.gguf.tensors import TensorInfo, locate_tensors, read_tensors
from reference.model.gguf.types import GgufType

MAGIC = b"GGUF"
VERSION = 3
"""The version written; versions 2 and 3 are read and have one layout in little-endian files."""

_SUPPORTED_VERSIONS = (2, 3)
_NOT_A_MODEL = "give a GGUF model file"
_OTHER_FORMATS = (
    (b"PK\x03\x04", "a zip archive (a PyTorch checkpoint?)", "convert the model to GGUF"),
    (b"\x80", "a Python pickle, which is a program and not opened", "convert the model to GGUF"),
    (b"FUGG", "a GGUF file with its bytes swapped", "convert it for little-endian machines"),
    (b"lmgg", "a GGML file older than GGUF", "convert the model to GGUF"),
    (b"tjgg", "a GGML file older than GGUF", "convert the model to GGUF"),
    (b"fmgg", "a GGML file older than GGUF", "convert the model to GGUF"),
    (b"version https://git-lfs", "a Git LFS pointer, not the model", "run git lfs pull"),
    (b"<", "a web page, perhaps a failed download", "fetch the file again"),
    (b"\x1f\x8b", "a gzip file", "unpack it first"),
    (b"\x89HDF", "an HDF5 file", "convert the model to GGUF"),
)
_LONGEST_SIGN_BYTES = 24


@dataclass(frozen=True, slots=True)
class Header:
    """The contents of a file without tensor data. ``alignment`` is in bytes."""

    version: int
    alignment: int
    metadata: dict[str, Value]
    value_types: dict[str, GgufType]
    tensors: list[TensorInfo]


def parse_header(buffer: mmap.mmap | bytes, size: int, path: object, shard: int = 0) -> Header:
    """Parse the header of a file of ``size`` bytes that begins with ``buffer``.

    Arrays in the result are views of ``buffer``. Raises ModelFileError for everything that is not a
    well-formed little-endian GGUF file of version 2 or 3 with all its tensors inside ``size``."""
    if size < len(MAGIC) or buffer[: len(MAGIC)] != MAGIC:
        raise _not_gguf(bytes(buffer[:_LONGEST_SIGN_BYTES]), path)
    cursor = Cursor(buffer, size, path)
    cursor.position = len(MAGIC)
    version = _read_version(cursor)
    tensor_count = cursor.u64("the tensor count")
    key_count = cursor.u64("the key count")
    metadata, value_types = read_metadata(cursor, key_count)
    alignment = alignment_of(path, metadata, value_types)
    tensors = read_tensors(cursor, tensor_count, shard)
    data_start = -(-cursor.position // alignment) * alignment
    placed = locate_tensors(cursor, tensors, data_start, alignment)
    return Header(version, alignment, metadata, value_types, placed)


def _read_version(cursor: Cursor) -> int:
    version = cursor.u32("the version")
    if version in _SUPPORTED_VERSIONS:
        return version
    where = f"byte offset {len(MAGIC)}"
    if version and version & 0xFFFF == 0:
        raise cursor.error(
            where, "the file is byte-swapped (big-endian)", "convert it for little-endian machines"
        )
    if version > max(_SUPPORTED_VERSIONS):
        raise cursor.error(
            where, f"GGUF version {version} is newer than this build reads (2 and 3)", "update"
        )
    raise cursor.error(
        where,
        f"GGUF version {version} is not one this build reads (2 and 3)",
        "convert the model again with a current converter",
    )


def _not_gguf(start: bytes, path: object) -> ModelFileError:
    """The error for a file that is not GGUF and begins with ``start``; it names the likely
    format."""
    for sign, what, remedy in _OTHER_FORMATS:
        if start.startswith(sign):
            return ModelFileError(path, "byte offset 0", f"bad magic: this is {what}", remedy)
    if start[8:9] == b"{":
        problem = "bad magic: this is a safetensors file"
        return ModelFileError(path, "byte offset 0", problem, "convert the model to GGUF")
    problem = f"bad magic: a GGUF file begins with {MAGIC!r}, this one with {start[:4]!r}"
    return ModelFileError(path, "byte offset 0", problem, _NOT_A_MODEL)
