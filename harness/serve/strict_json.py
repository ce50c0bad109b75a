"""Parses JSON of clients strictly: no duplicate keys, no NaN, limited depth, valid Unicode."""

from __future__ import annotations

import json
import math
import re
import threading
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from decimal import Decimal, InvalidOperation
from typing import Any, NoReturn, TypeVar

import msgspec

MAX_DEPTH = 64
"""Deepest nesting of containers."""
LONG_BYTES = 64 << 10
"""Longer bodies are parsed one at a time: the objects take many times their bytes, and parsing
holds the interpreter lock anyway."""
ROUNDED = (Decimal, dict, list)
"""Types that ``with_floats`` may change."""
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


T = TypeVar("T")
NO_LIMIT = nullcontext()
_one_long_body = threading.Lock()
_reading_type = threading.Lock()
_read_types: set[Any] = set()


class BadJson(ValueError):
    """A malformed body. The message may be shown to the sender."""


class Decimals:
    """The latest Decimal that ``loads`` made, on whatever thread: a body that made none needs no
    look for them."""

    latest: Decimal | None = None


def loads(body: bytes, exact: bool = False) -> Any:
    """The JSON value of ``body``. With ``exact`` a number that binary64 cannot represent is a
    Decimal. Raises BadJson for anything but one strict JSON value in UTF-8."""
    try:
        value = _decoded(EXACT if exact else ROUNDING, body.decode())
    except UnicodeDecodeError as error:
        raise BadJson(f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise BadJson(f"is nested deeper than {MAX_DEPTH} levels") from None
    except json.JSONDecodeError as error:
        raise BadJson(f"is not JSON: {error.msg} at character {error.pos}") from None
    except BadJson:
        raise
    except ValueError:
        raise BadJson("holds a number of too many digits") from None
    may_hold_surrogates = SURROGATE.search(body) is not None
    # Few containers are not nested deeply.
    if may_hold_surrogates or body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _check(value, may_hold_surrogates=may_hold_surrogates)
    return value


def _decoded(decoder: json.JSONDecoder, text: str) -> Any:
    """The value of ``text``. The library's own ``decode`` looks for space around it first."""
    try:
        value, end = decoder.scan_once(text, 0)  # type: ignore[attr-defined]
        if end == len(text):
            return value
    except StopIteration:
        pass
    return decoder.decode(text)


def object_or_empty(text: str) -> dict[str, Any]:
    """The JSON object of a text; an empty one for any other text, such as a truncated object."""
    try:
        value = loads(text.encode())
    except BadJson:
        return {}
    return value if isinstance(value, dict) else {}


def known_type(kind: type[T]) -> type[T]:
    """``kind``, after msgspec has analysed it. msgspec does so at the first use, and a second
    thread using the type meanwhile would crash the process."""
    if kind not in _read_types:
        with _reading_type:
            msgspec.json.Decoder(kind)
            _read_types.add(kind)
    return kind


def parsing(body: bytes) -> AbstractContextManager[object]:
    """Limits parsing of long bodies to one at a time."""
    return _one_long_body if len(body) > LONG_BYTES else NO_LIMIT


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise BadJson(f"names {twice[:64]!r} twice in one object")
    return value


def _refused(name: str) -> NoReturn:
    raise BadJson(f"holds {name}, which is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise BadJson(f"holds the number {text[:32]}, which is too large")
    return value


def _exact(text: str) -> float | Decimal:
    value = _finite(text)
    try:
        number = Decimal(text)
    except InvalidOperation:
        raise BadJson(f"holds the number {text[:32]}, whose exponent is too large") from None
    if Decimal(repr(value)) == number:
        return value
    Decimals.latest = number
    return number


ROUNDING, EXACT = (
    json.JSONDecoder(object_pairs_hook=_distinct, parse_constant=_refused, parse_float=number)
    for number in (_finite, _exact)
)


def with_floats(value: Any) -> Any:
    """``value`` with every Decimal rounded to binary64."""
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, dict):
        return {
            name: with_floats(one) if type(one) in ROUNDED else one for name, one in value.items()
        }
    if isinstance(value, list):
        # A prompt may be a hundred thousand token ids: no call for each of them.
        return [with_floats(one) if type(one) in ROUNDED else one for one in value]
    return value


def _check(value: Any, *, may_hold_surrogates: bool) -> None:
    """Walk the containers level by level."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        if may_hold_surrogates:
            _check_text(level)
        level = [
            inner
            for outer in level
            if isinstance(outer, list | dict)
            for inner in _inside(outer, may_hold_surrogates)
        ]
        if not level:
            return
    raise BadJson(f"is nested deeper than {MAX_DEPTH} levels")


def _inside(value: Any, texts: bool) -> list[Any]:
    parts = value if isinstance(value, list) else [*value.values(), *(value if texts else ())]
    return parts if texts else [part for part in parts if type(part) in (list, dict)]


def _check_text(values: list[Any]) -> None:
    for value in values:
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                raise BadJson("holds half of a surrogate pair, which is no character") from None
