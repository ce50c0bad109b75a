"""A cursor over a GGUF header that checks the bounds of every read before it reads."""

from __future__ import annotations

import mmap
import struct

import numpy as np

from contract.errors import ModelFileError
from reference.model.gguf.limits import MAX_HEADER_BYTES

_U32 = struct.Struct("<I")
_I32 = struct.Struct("<i")
_U64 = struct.Struct("<Q")
_SHOWN_CHARACTERS = 80

TRUNCATED = "the file is cut short or damaged: fetch it again"


def shown(text: str | bytes) -> str:
    """``text`` from a file as a short, printable, quoted line."""
    quoted = repr(text[:_SHOWN_CHARACTERS])
    if len(text) <= _SHOWN_CHARACTERS and len(quoted) <= _SHOWN_CHARACTERS:
        return quoted
    return f"{quoted[:_SHOWN_CHARACTERS]}..."


class Cursor:
    """A position in the header of a file of ``size`` bytes whose first bytes are ``buffer``."""

    __slots__ = ("buffer", "octets", "path", "position", "size")

    def __init__(self, buffer: mmap.mmap | bytes, size: int, path: object) -> None:
        self.buffer = buffer
        self.octets = np.frombuffer(buffer, np.uint8)
        self.size = size
        self.path = path
        self.position = 0

    def error(self, where: str, problem: str, remedy: str = TRUNCATED) -> ModelFileError:
        """The error to raise; an empty ``where`` means the current byte offset."""
        return ModelFileError(self.path, where or f"byte offset {self.position}", problem, remedy)

    def need(self, byte_count: int, item: str, where: str = "") -> None:
        """Raise ModelFileError unless the header can contain ``byte_count`` more bytes."""
        end = self.position + byte_count
        if end > self.size:
            raise self.error(
                where,
                f"{item} needs {byte_count} bytes at byte offset {self.position}, past the end of"
                f" the file ({self.size} bytes)",
            )
        if end > MAX_HEADER_BYTES:
            raise self.error(
                where,
                f"{item} ends at byte offset {end}, past the largest header this build reads"
                f" ({MAX_HEADER_BYTES} bytes)",
                "the file is damaged or hostile",
            )

    def unpack(self, layout: struct.Struct, item: str, where: str = "") -> int | float:
        """Read one number of ``layout``."""
        self.need(layout.size, item, where)
        value: int | float = layout.unpack_from(self.buffer, self.position)[0]
        self.position += layout.size
        return value

    def u32(self, item: str, where: str = "") -> int:
        return int(self.unpack(_U32, item, where))

    def i32(self, item: str, where: str = "") -> int:
        return int(self.unpack(_I32, item, where))

    def u64(self, item: str, where: str = "") -> int:
        return int(self.unpack(_U64, item, where))

    def octet_view(self, byte_count: int, item: str, where: str = "") -> np.ndarray:
        """A view of the next ``byte_count`` bytes, uint8."""
        self.need(byte_count, item, where)
        start = self.position
        self.position += byte_count
        return self.octets[start : self.position]

    def text(self, limit_bytes: int, item: str, where: str = "") -> str:
        """Read a length-prefixed string of at most ``limit_bytes`` bytes, which must be valid
        UTF-8."""
        length = self.u64(f"the length of {item}", where)
        if length > limit_bytes:
            raise self.error(
                where,
                f"{item} of {length} bytes at byte offset {self.position} is longer than"
                f" {limit_bytes} bytes",
                "the file is damaged or hostile",
            )
        raw = self.octet_view(length, item, where).tobytes()
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(
                where,
                f"{item} {shown(raw)} ending at byte offset {self.position} is not valid UTF-8"
                f" ({error.reason} at byte {error.start})",
                "the file is damaged: fetch or convert it again",
            ) from None
