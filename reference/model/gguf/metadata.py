"""The key-value section of a GGUF file, and typed access to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar, cast

import numpy as np

from contract.errors import ModelFileError
from reference.model.gguf.cursor import Cursor, shown
from reference.model.gguf.limits import (
    DEFAULT_ALIGNMENT_BYTES,
    MAX_ALIGNMENT_BYTES,
    MAX_KEY_BYTES,
    MAX_KEYS,
    MAX_STRINGS,
    MAX_TEXT_BYTES,
    MIN_ALIGNMENT_BYTES,
)
from reference.model.gguf.strings import LENGTH_BYTES, StringArray, read_string_array
from reference.model.gguf.types import NUMERIC_DTYPES, SCALAR_STRUCTS, GgufType

Value = bool | int | float | str | np.ndarray | StringArray
"""A metadata value; arrays are numpy views of the file (bool, ints, floats) or StringArray."""

Kind = TypeVar("Kind", bool, int, float, str, np.ndarray, StringArray)

_KIND_NAMES: dict[type, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a float",
    str: "a string",
    np.ndarray: "an array of numbers",
    StringArray: "an array of strings",
}
_CONVERT = "the file was converted wrongly: convert or fetch it again"
_HOSTILE = "the file is damaged or hostile"
ALIGNMENT_KEY = "general.alignment"
_SMALLEST_ENTRY_BYTES = LENGTH_BYTES + 1 + 4 + 1


class _MetadataReader:
    """Reads entries in order and counts what the per-file limits restrict."""

    __slots__ = ("cursor", "strings_left", "text_bytes_left")

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.strings_left = MAX_STRINGS
        self.text_bytes_left = MAX_TEXT_BYTES

    def value(self, kind: GgufType, where: str) -> Value:
        cursor = self.cursor
        if kind is GgufType.STRING:
            start = cursor.position
            text = cursor.text(self.text_bytes_left, "a string", where)
            self.text_bytes_left -= cursor.position - start - LENGTH_BYTES
            return text
        if kind is GgufType.ARRAY:
            return self.array(where)
        if kind is GgufType.BOOL:
            return bool(self.numbers(kind, 1, where)[0])
        return cursor.unpack(SCALAR_STRUCTS[kind], f"a value of type {kind.name.lower()}", where)

    def array(self, where: str) -> np.ndarray | StringArray:
        cursor = self.cursor
        kind = read_type(cursor, "array item type", where)
        if kind is GgufType.ARRAY:
            raise cursor.error(
                where, "is an array of arrays, which GGUF files do not use", _HOSTILE
            )
        count = cursor.u64("the length of an array", where)
        if kind is not GgufType.STRING:
            return self.numbers(kind, count, where)
        if count > self.strings_left:
            raise cursor.error(
                where,
                f"{count} strings make more than {MAX_STRINGS} in arrays of one file",
                _HOSTILE,
            )
        self.strings_left -= count
        return read_string_array(cursor, count, where)

    def numbers(self, kind: GgufType, count: int, where: str) -> np.ndarray:
        dtype = NUMERIC_DTYPES[kind]
        name = kind.name.lower()
        octets = self.cursor.octet_view(count * dtype.itemsize, f"{count} of type {name}", where)
        if kind is GgufType.BOOL and count and octets.max() > 1:
            bad = int(np.argmax(octets > 1))
            raise self.cursor.error(
                where, f"bool {bad} of {count} is {octets[bad]}, neither 0 nor 1", _CONVERT
            )
        return octets.view(dtype)


def read_type(cursor: Cursor, item: str, where: str) -> GgufType:
    """Read the number of a value type; raises ModelFileError when it is unknown."""
    number = cursor.u32(f"the {item}", where)
    try:
        return GgufType(number)
    except ValueError:
        raise cursor.error(where, f"{item} {number} is unknown (0 to 12 are defined)") from None


def read_metadata(cursor: Cursor, count: int) -> tuple[dict[str, Value], dict[str, GgufType]]:
    """Read ``count`` entries from the cursor's position: values by key, and types by key."""
    if count > MAX_KEYS:
        raise cursor.error("byte offset 16", f"{count} keys are more than {MAX_KEYS}", _HOSTILE)
    cursor.need(count * _SMALLEST_ENTRY_BYTES, f"a count of {count} keys", "byte offset 16")
    reader = _MetadataReader(cursor)
    values: dict[str, Value] = {}
    types: dict[str, GgufType] = {}
    for _ in range(count):
        start = cursor.position
        key = cursor.text(MAX_KEY_BYTES, "a key")
        if not key:
            raise cursor.error(f"byte offset {start}", "a key is empty", _CONVERT)
        where = f"key {shown(key)}"
        if key in values:
            raise cursor.error(where, f"appears again at byte offset {start}", _CONVERT)
        types[key] = read_type(cursor, "value type", where)
        values[key] = reader.value(types[key], where)
    return values, types


def alignment_of(path: object, metadata: Mapping[str, Value], types: Mapping[str, GgufType]) -> int:
    """``general.alignment`` in bytes, 32 when absent; raises ModelFileError for an invalid
    value."""
    if ALIGNMENT_KEY not in metadata:
        return DEFAULT_ALIGNMENT_BYTES
    where = f"key {shown(ALIGNMENT_KEY)}"
    if types[ALIGNMENT_KEY] is not GgufType.UINT32:
        found = types[ALIGNMENT_KEY].name.lower()
        raise ModelFileError(path, where, f"is of type {found}, not uint32", _CONVERT)
    alignment = typed_value(path, metadata, ALIGNMENT_KEY, int)
    power_of_two = alignment & (alignment - 1) == 0
    if not power_of_two or not MIN_ALIGNMENT_BYTES <= alignment <= MAX_ALIGNMENT_BYTES:
        raise ModelFileError(
            path,
            where,
            f"{alignment} is not a power of two from {MIN_ALIGNMENT_BYTES} to"
            f" {MAX_ALIGNMENT_BYTES}",
            _CONVERT,
        )
    return alignment


def typed_value(path: object, metadata: Mapping[str, Value], key: str, kind: type[Kind]) -> Kind:
    """The value of ``key``, which must be present and of ``kind``.

    ``int`` takes any integer width, ``float`` any number; ``bool`` is not a number. Raises
    ModelFileError naming the key, what was expected and what was found."""
    where = f"key {shown(key)}"
    if key not in metadata:
        raise ModelFileError(path, where, f"is missing ({_KIND_NAMES[kind]} is needed)", _CONVERT)
    value = metadata[key]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    found = type(value)
    if found is not kind:
        raise ModelFileError(
            path, where, f"is {_KIND_NAMES[found]} where {_KIND_NAMES[kind]} is needed", _CONVERT
        )
    return cast(Kind, value)
