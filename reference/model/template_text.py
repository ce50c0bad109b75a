"""Text of a chat template's output that records which of its characters the template wrote.

Literals of the template are ``Text`` with trusted characters, data is plain ``str``. Operations
that move, cut, repeat, fill in or recase characters preserve the marks. Any other operation
yields plain ``str``, which is untrusted.

Imports the standard library only: the process that renders templates starts fast."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from string import Formatter
from typing import Any


class Text(str):
    """A str that records which of its characters the template wrote.

    ``_trusted`` holds one byte per character: 1 for the template's, 0 for all others."""

    __slots__ = ("_trusted",)
    _trusted: bytes

    def __new__(cls, value: str = "", trusted: bytes | None = None) -> Text:
        text = super().__new__(cls, value)
        text._trusted = trusted_characters(value) if trusted is None else trusted
        return text

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: Any) -> str:
        return Text(super().__mul__(count), self._trusted * count)

    __rmul__ = __mul__

    def __getitem__(self, key: Any) -> str:
        trusted = self._trusted[key]
        if isinstance(trusted, int):
            trusted = bytes([trusted])
        return Text(super().__getitem__(key), trusted)

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def lstrip(self, chars: str | None = None) -> str:
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None) -> str:
        return self[: len(super().rstrip(chars))]

    def strip(self, chars: str | None = None) -> str:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str) -> str:
        return self[len(self) - len(super().removeprefix(prefix)) :]

    def removesuffix(self, suffix: str) -> str:
        return self[: len(super().removesuffix(suffix))]

    def split(self, sep: str | None = None, maxsplit: Any = -1) -> list[str]:
        return self._split_parts(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: Any = -1) -> list[str]:
        return self._split_parts(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: Any = False) -> list[str]:
        return self._split_parts(super().splitlines(keepends), "" if keepends else None)

    def partition(self, sep: str) -> tuple[str, str, str]:
        before, middle, after = self._split_parts(super().partition(sep), "")
        return before, middle, after

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        before, middle, after = self._split_parts(super().rpartition(sep), "")
        return before, middle, after

    def _split_parts(self, parts: Iterable[str], between: str | None) -> list[str]:
        """The pieces of this text that equal ``parts``, which are in order and separated by
        ``between``. If it is None, they are separated by blanks and contain none."""
        found = []
        start = 0
        for part in parts:
            if between is None:
                start = super().index(part, start)
            found.append(self[start : start + len(part)])
            start += len(part) + len(between or "")
        return found

    def join(self, items: Iterable[str]) -> str:
        items = list(items)
        trusted = self._trusted.join(map(trusted_characters, items))
        return Text(super().join(items), trusted)

    def replace(self, old: str, new: str, count: Any = -1) -> str:
        if old:
            return Text(new).join(self.split(old, count))
        times = len(self) + 1 if count < 0 else min(count, len(self) + 1)
        pieces = [piece for index in range(times) for piece in (new, self[index : index + 1])]
        return concat([*pieces, self[times:]])

    def upper(self) -> str:
        return self._recased(super().upper())

    def lower(self) -> str:
        return self._recased(super().lower())

    def title(self) -> str:
        return self._recased(super().title())

    def capitalize(self) -> str:
        return self._recased(super().capitalize())

    def swapcase(self) -> str:
        return self._recased(super().swapcase())

    def casefold(self) -> str:
        return self._recased(super().casefold())

    def _recased(self, recased: str) -> str:
        return Text(recased, self._trusted) if len(recased) == len(self) else recased

    def ljust(self, width: Any, fillchar: str = " ") -> str:
        return self._within(super().ljust(width, fillchar), 0, fillchar)

    def rjust(self, width: Any, fillchar: str = " ") -> str:
        padded = super().rjust(width, fillchar)
        return self._within(padded, len(padded) - len(self), fillchar)

    def center(self, width: Any, fillchar: str = " ") -> str:
        padded = super().center(width, fillchar)
        more = len(padded) - len(self)
        # CPython puts the odd one to the left where the width is odd.
        return self._within(padded, more // 2 + (more & width & 1), fillchar)

    def zfill(self, width: Any) -> str:
        padded = super().zfill(width)
        sign = self[: int(self[:1] in ("+", "-") and len(padded) > len(self))]
        return concat([sign, "0" * (len(padded) - len(self)), self[len(sign) :]])

    def _within(self, padded: str, start: int, fill: str) -> str:
        """This text padded with ``fill`` to the length of ``padded``, so that it begins at
        ``start``."""
        after = len(padded) - len(self) - start
        return concat([_repeated(fill, start), self, _repeated(fill, after)])

    def expandtabs(self, tabsize: Any = 8) -> str:
        return self._of_data("expandtabs").expandtabs(tabsize)

    def translate(self, table: Any) -> str:
        return self._of_data("translate").translate(table)

    def encode(self, *args: Any, **kwargs: Any) -> bytes:
        return self._of_data("encode").encode(*args, **kwargs)

    def _of_data(self, operation: str) -> str:
        """This text as a plain str. Raises Untracked if the template wrote any of it."""
        if 1 in self._trusted:
            raise Untracked(f"{operation!r} of a text of the template's is not supported")
        return str.__getitem__(self, slice(None))

    def __mod__(self, values: Any) -> str:
        return checked(percent_formatted(self, values), super().__mod__(values), "%")


def trusted_characters(value: str) -> bytes:
    """One byte per character of ``value``: 1 where the template wrote it."""
    return value._trusted if isinstance(value, Text) else bytes(len(value))


def literal(value: str) -> Text:
    """A Text whose characters are all trusted."""
    return Text(value, b"\1" * len(value))


class GivenList(list[Any]):
    """A list of the conversation, which a template may read only; its own lists are plain ones."""


def untrusted(value: Any) -> Any:
    """``value``, of JSON's types, with every string as an untrusted Text and every list as a
    GivenList.

    It is a Text, not a str, so that what the template joins to it stays trusted."""
    if isinstance(value, str):
        return Text(value, bytes(len(value)))
    if isinstance(value, dict):
        return {name: untrusted(one) for name, one in value.items()}
    return GivenList(map(untrusted, value)) if isinstance(value, list) else value


def written_with(write: Callable[[Any], str], value: Any) -> str:
    """The JSON text ``write(value)``, in which the template's characters stay trusted.

    Strings with trusted characters are replaced by marks, and inserted into the written text."""
    written = write(value)
    mark = "@"
    while mark in written:
        mark += "@"
    texts: list[Text] = []
    marked = _marked(value, mark, texts)
    if not texts:
        return written
    parts = re.split(f"{mark}([0-9]+){mark}", write(marked))
    parts[1::2] = [_escaped(texts[int(index)], write) for index in parts[1::2]]
    return checked(concat(parts), written, "tojson")


def _marked(value: Any, mark: str, texts: list[Text]) -> Any:
    """``value`` with a mark for each Text that has trusted characters; these go to ``texts``."""
    if isinstance(value, Text) and 1 in value._trusted:
        texts.append(value)
        return f"{mark}{len(texts) - 1}{mark}"
    if isinstance(value, dict):
        return {name: _marked(one, mark, texts) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(one, mark, texts) for one in value]
    return value


def _escaped(text: Text, write: Callable[[Any], str]) -> str:
    """A text as JSON writes it between quotation marks. Escapes have their character's mark."""
    written = [write(character)[1:-1] for character in text]
    flags = zip(written, text._trusted, strict=True)
    return concat(Text(piece, bytes([flag]) * len(piece)) for piece, flag in flags)


def concat(pieces: Iterable[str]) -> Text:
    """Join the pieces and their marks. Jinja joins its output with this function."""
    pieces = list(pieces)
    return Text("".join(pieces), b"".join(map(trusted_characters, pieces)))


class Untracked(Exception):
    """An operation of a template that loses which characters are trusted; the message names it."""


def checked(tracked: Text, expected: str, operation: str) -> Text:
    """``tracked``. Raises Untracked if it differs from ``expected``, what Python itself gives."""
    if tracked != expected:
        raise Untracked(f"{operation!r} of a text is not supported in this form")
    return tracked


def _repeated(fill: str, count: int) -> Text:
    return concat([fill] * count)


PERCENT = re.compile(
    r"%(?:\((?P<key>[^()]*)\))?(?P<flags>[#0\- +]*)(?P<width>\*|\d+)?(?:\.(?P<precision>\*|\d*))?"
    r"[hlL]?(?P<kind>[diouxXeEfFgGcrsa%])"
)


def percent_formatted(form: Text, values: Any) -> Text:
    """``form % values``, for values that fit."""
    pieces: list[str] = []
    rest = iter(values if isinstance(values, tuple) else (values,))
    end = 0
    for found in PERCENT.finditer(str.__str__(form)):
        pieces.append(form[end : found.start()])
        end = found.end()
        stars = [next(rest, None) for part in ("width", "precision") if found[part] == "*"]
        if found["kind"] == "%":
            pieces.append(form[end - 1 : end])
        elif found["key"] is not None:
            value = values[found["key"]]
            pieces.append(_filled(found, {found["key"]: value}, value, found["precision"]))
        else:
            value = next(rest, None)
            limit = stars[-1] if found["precision"] == "*" else found["precision"]
            pieces.append(_filled(found, (*stars, value), value, limit))
    return concat([*pieces, form[end:]])


def _filled(found: re.Match[str], values: Any, value: Any, limit: Any) -> str:
    """The text of one conversion. A string is cut to ``limit`` characters and keeps its marks."""
    written: str = found[0] % values
    if found["kind"] != "s" or not isinstance(value, str):
        return written
    shown = value if limit is None else value[: int(limit or 0)]
    return _aligned(shown, written, "<" if "-" in found["flags"] else ">")


BRACE_SPEC = re.compile(
    r"(?:(?P<fill>.)?(?P<align>[<>=^]))?(?P<zero>0)?\d*(?:\.(?P<limit>\d+))?s?", re.S
)


def brace_formatted(formatter: Formatter, form: str, args: Any, kwargs: Any) -> str:
    """``form.format(*args, **kwargs)`` by ``formatter``, which says what fields may reach."""
    expected: str = formatter.vformat(str.__str__(form), args, kwargs)
    if not isinstance(form, Text):
        return expected
    return checked(concat(_brace_pieces(formatter, form, args, kwargs)), expected, "format")


def _brace_pieces(formatter: Formatter, form: Text, args: Any, kwargs: Any) -> Iterator[str]:
    at, unnamed = 0, 0
    for text, field, spec, conversion in formatter.parse(str.__str__(form)):
        yield form[at : at + len(text)]
        at += len(text)
        if field is None:
            # A doubled brace stands for one: skip the second.
            at += bool(text) and text[-1] in "{}"
            continue
        at += _field_length(form, at, field, spec or "", conversion)
        if not field or field[0] in ".[":
            field, unnamed = f"{unnamed}{field}", unnamed + 1
        value, _ = formatter.get_field(field, args, kwargs)
        if conversion:
            value = formatter.convert_field(value, conversion)
        filled = formatter.vformat(spec, args, kwargs) if spec else ""
        yield _in_spec(value, formatter.format_field(value, filled), filled)


def _field_length(form: str, at: int, field: str, spec: str, conversion: str | None) -> int:
    end = at + 1 + len(field) + (2 if conversion else 0)
    return (end + 1 + len(spec) if form[end : end + 1] == ":" else end) + 1 - at


def _in_spec(value: Any, written: str, spec: str) -> str:
    found = BRACE_SPEC.fullmatch(spec)
    if not isinstance(value, str) or found is None:
        return written
    shown = value if found["limit"] is None else value[: int(found["limit"])]
    return _aligned(shown, written, found["align"] or "<")


def _aligned(shown: str, written: str, align: str) -> str:
    """``written`` with the marks of ``shown``, which is aligned in it by ``align``: <, > or ^."""
    more = len(written) - len(shown)
    start = {"<": 0, ">": more, "^": more // 2}.get(align, 0)
    if more < 0 or written[start : start + len(shown)] != shown:
        return written
    return concat([written[:start], shown, written[start + len(shown) :]])
