"""Canonical JSON (RFC 8785): one byte sequence for each value, so that it can be signed and
digested."""

from __future__ import annotations

import hashlib
import json
from decimal import Decimal
from typing import Any

MAX_INTEGER = 2**53 - 1
"""The largest integer that every JSON reader keeps exactly. Callers write larger ones as
strings."""
DECIMAL_DIGITS = 21
"""A number with more digits before its point is written with an exponent."""


def canonical(value: Any) -> bytes:
    """The value in UTF-8: no white space, members sorted by name, numbers as ECMAScript writes
    them. Raises ValueError for an integer above MAX_INTEGER."""
    return _text(value).encode()


def canonical_digest(value: Any) -> str:
    """SHA-256 of ``canonical``, hex."""
    return hashlib.sha256(canonical(value)).hexdigest()


def _text(value: Any) -> str:
    if isinstance(value, dict):
        members = sorted(value.items(), key=lambda member: member[0].encode("utf-16-be"))
        return "{" + ",".join(f"{_text(name)}:{_text(inner)}" for name, inner in members) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_text, value)) + "]"
    if isinstance(value, float):
        return _number(value)
    if type(value) is int and abs(value) > MAX_INTEGER:
        raise ValueError(f"{value} is beyond 2^53")
    return json.dumps(value, ensure_ascii=False)


def _number(value: float) -> str:
    """The shortest decimal that reads as the same binary64, as ECMAScript writes it."""
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    if not isinstance(exponent, int):
        raise ValueError(f"{value} is not a JSON number")
    if value == 0:
        return "0"
    text = "".join(map(str, digits))
    point = len(text) + exponent
    if len(text) <= point <= DECIMAL_DIGITS:
        shown = text + "0" * (point - len(text))
    elif 0 < point <= DECIMAL_DIGITS:
        shown = f"{text[:point]}.{text[point:]}"
    elif -6 < point <= 0:
        shown = "0." + "0" * -point + text
    else:
        fraction = f".{text[1:]}" if len(text) > 1 else ""
        shown = f"{text[0]}{fraction}e{point - 1:+d}"
    return "-" * sign + shown
