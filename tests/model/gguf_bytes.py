"""GGUF files put together by hand, so that any field of one can be wrong.

A file is a list of pieces; a piece that is a count, length, type, dimension or offset has a role,
by which a mutation finds it. Nothing here is shared with the reader or the writer under test."""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B"}
CODES |= {U64: "Q", I64: "q", F64: "d"}


@dataclass(frozen=True, slots=True)
class Piece:
    data: bytes
    role: str = ""


Pieces = list[Piece]


def join(pieces: Pieces) -> bytes:
    return b"".join(piece.data for piece in pieces)


def flat(parts: Iterable[Pieces]) -> Pieces:
    return list(chain.from_iterable(parts))


def number(kind: int, value: float, role: str = "") -> Pieces:
    return [Piece(struct.pack("<" + CODES[kind], value), role)]


def text(value: bytes | str, length: int | None = None) -> Pieces:
    """A string; ``length`` lies about its size."""
    raw = value.encode() if isinstance(value, str) else value
    return [*number(U64, len(raw) if length is None else length, "length"), Piece(raw)]


def entry(key: bytes | str, kind: int, *payload: Pieces) -> Pieces:
    """A metadata entry whose value is already in pieces."""
    return text(key) + number(U32, kind, "type") + flat(payload)


def scalar(key: bytes | str, kind: int, value: float) -> Pieces:
    return entry(key, kind, number(kind, value))


def string(key: bytes | str, value: bytes | str) -> Pieces:
    return entry(key, STRING, text(value))


def array(key: str, kind: int, items: Sequence, count: int | None = None) -> Pieces:
    """An array entry; ``count`` lies about its length."""
    made = (text(item) if kind == STRING else number(kind, item) for item in items)
    size = number(U64, len(items) if count is None else count, "count")
    return entry(key, ARRAY, number(U32, kind, "type"), size, flat(made))


def tensor(
    name: bytes | str,
    dimensions: Sequence[int] = (4,),
    ggml_type: int = 0,
    offset: int = 0,
    n_dims: int | None = None,
) -> Pieces:
    """A tensor entry, dimensions fastest first as the file has them."""
    return [
        *text(name),
        *number(U32, len(dimensions) if n_dims is None else n_dims, "n_dims"),
        *(piece for extent in dimensions for piece in number(U64, extent, "dimension")),
        *number(I32, ggml_type, "ggml_type"),
        *number(U64, offset, "offset"),
    ]


def gguf(
    entries: Sequence[Pieces] = (), tensors: Sequence[Pieces] = (), data: bytes = b"", *,
    magic: bytes = b"GGUF", version: int = 3, key_count: int | None = None,
    tensor_count: int | None = None, alignment: int = 32,
) -> Pieces:  # fmt: skip
    """A whole file, ``data`` beginning at the next multiple of ``alignment``."""
    pieces = [
        Piece(magic),
        *number(U32, version, "version"),
        *number(U64, len(tensors) if tensor_count is None else tensor_count, "count"),
        *number(U64, len(entries) if key_count is None else key_count, "count"),
        *flat(entries),
        *flat(tensors),
    ]
    size = len(join(pieces))
    return [*pieces, Piece(bytes(-size % alignment)), Piece(data)]
