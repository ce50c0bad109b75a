"""Definition of a setting: its name, help, range of values, and the parser of their text."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from contract.errors import ConfigError
from contract.lazy_dataclass import dataclass
from harness.named_adapters import named_adapters

ENV_PREFIX = "ZINC_RT_"
KEY_ENV = f"{ENV_PREFIX}KEY"
"""The environment variable with the API key for a server."""
INT32_MAX = 2**31 - 1
UINT64_MAX = 2**64 - 1
NO_DEFAULT = "none: this user has no home folder"
"""Text of the help for a file or folder of a user without a home folder."""
MEGABYTE = 10**6
NAME_BYTES = 255
"""Most bytes of the name of a file or folder."""
DISK_CACHE_BYTES = 10 * 10**9
"""Most bytes of a disk cache whose size the user leaves open."""
QUEUE_DEPTH = 256
"""Most requests that wait for a slot, where the user leaves it open."""
UTF_8 = "[^\ud800-\udfff]+"
"""A pattern of all texts but those of bytes that are no UTF-8."""
COUNT_SUFFIX = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
"""Factors of counts of tokens: 32K is 32,768."""
BYTE_UNITS = {"": 1000, "i": 1024}
"""Base of the units of bytes: 6GB is 6 * 1000^3, as sizes are printed, 6GiB is 6 * 1024^3."""


@dataclass(frozen=True, slots=True)
class SettingKind:
    """Parser of the text of a value: ``parse`` raises ValueError on what ``accepts`` excludes.

    ``toml_types`` are the types the configuration file may use; their text goes through ``parse``.
    """

    accepts: str
    metavar: str
    parse: Callable[[str], Any]
    toml_types: tuple[type, ...]


def _integer(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,20}", text):
        raise ValueError(text)
    return int(text)


def _real(text: str) -> float:
    if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text):
        raise ValueError(text)
    return float(text)


def _count(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,20})([kKmMgG]?)", text)
    if match is None:
        raise ValueError(text)
    return int(match[1]) * COUNT_SUFFIX[match[2].lower()]


def _byte_count(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,20})(?:\s?([kKmMgGtT])(?:(i)?[bB])?|\s?[bB])?", text)
    if match is None:
        raise ValueError(text)
    power = " kmgt".index((match[2] or " ").lower())
    return int(match[1]) * int(BYTE_UNITS[match[3] or ""] ** power)


def _bounded(read: Callable[[str], Any], low: float, high: float) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        value = read(text)
        if not (math.isfinite(value) and low <= value <= high):
            raise ValueError(text)
        return value

    return parse


def _one_of(names: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(text)
        return text

    return parse


def path_of(text: str) -> Path:
    """A path, in which ``~`` is the home folder. Raises ValueError and RuntimeError, which say what
    is wrong; also for names that are longer than those of files."""
    path = Path(text).expanduser()
    if not text:
        raise ValueError("it is empty")
    if "\0" in text:
        raise ValueError("it has a zero byte")
    if any(len(os.fsencode(part)) > NAME_BYTES for part in path.parts):
        raise ValueError(f"a name in it is too long, above {NAME_BYTES} bytes")
    return path


def _text(text: str) -> str:
    return text


def integer(low: int, high: int) -> SettingKind:
    """Whole numbers in ``low..high``."""
    accepts = f"a whole number from {low} to {high}"
    return SettingKind(accepts, "N", _bounded(_integer, low, high), (int, str))


def tokens(low: int, high: int) -> SettingKind:
    """Token counts in ``low..high``, with binary suffixes: ``32K`` is 32,768."""
    accepts = f"a number of tokens from {low} to {high}, such as 4096 or 32K (1K = 1024)"
    return SettingKind(accepts, "TOKENS", _bounded(_count, low, high), (int, str))


def size(low: int) -> SettingKind:
    """Bytes from ``low`` on: ``6GB`` is 6 * 1000^3, ``6GiB`` is 6 * 1024^3."""
    least = f"{low // MEGABYTE}MB" if low else "0"
    accepts = f"a size from {least}, such as 800MB, 6GB or 6GiB (1GB = 1000MB)"
    return SettingKind(accepts, "SIZE", _bounded(_byte_count, low, UINT64_MAX), (int, str))


def number(low: float, high: float, metavar: str = "NUMBER", or_zero: bool = False) -> SettingKind:
    """Finite real numbers in ``low..high``, or with ``or_zero`` also 0."""
    bounded = _bounded(_real, low, high)

    def parse(text: str) -> float:
        return 0.0 if or_zero and _real(text) == 0 else float(bounded(text))

    accepts = f"{'0, or ' if or_zero else ''}a number from {low:g} to {high:g}"
    return SettingKind(accepts, metavar, parse, (int, float, str))


def choice(*names: str) -> SettingKind:
    """Exactly one of ``names``."""
    return SettingKind(
        f"one of {', '.join(names)}", "{" + ",".join(names) + "}", _one_of(names), (str,)
    )


def switch(off: str, on: str) -> SettingKind:
    """One of two words: False for ``off``, True for ``on``."""
    kind = choice(off, on)
    return replace(kind, parse=lambda text: kind.parse(text) == on)


def names(metavar: str, accepts: str = "names", pattern: str = ".+") -> SettingKind:
    """A tuple of names, which the text separates by commas; each matches ``pattern``."""

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(filter(None, map(str.strip, text.split(","))))
        if not all(re.fullmatch(pattern, name) for name in found):
            raise ValueError(text)
        return found

    return SettingKind(f"{accepts}, separated by commas", metavar, parse, (str,))


def text(metavar: str = "TEXT") -> SettingKind:
    """Any text; ``metavar`` says in the help what it names."""
    return SettingKind("text", metavar, _text, (str,))


FILE = SettingKind("a path", "FILE", path_of, (str,))
ADAPTER_FILES = SettingKind(
    "[NAME=]FILE[:SCALE], several with commas between them", "FILE", named_adapters, (str,)
)
DIR = SettingKind("a path", "DIR", path_of, (str,))


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table of settings.

    A ``default`` may be its text; ``shown_default`` replaces it in the help. A flag that
    ``repeats`` may be given several times: its values are joined with commas. The short help shows
    ``common`` settings only. ``aliases`` are the flags that other programs use for the same thing.
    ``field`` is its field in options records, where that has another name."""

    name: str
    kind: SettingKind
    default: Any
    help: str
    shown_default: str | None = None
    repeats: bool = False
    common: bool = False
    aliases: tuple[str, ...] = ()
    field: str | None = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def flags(self) -> tuple[str, ...]:
        """The flag, after short aliases and before long ones."""
        short = tuple(alias for alias in self.aliases if len(alias) == 2)
        return (*short, self.flag, *(alias for alias in self.aliases if len(alias) > 2))

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    def default_value(self) -> Any:
        value = self.default() if callable(self.default) else self.default
        return self.kind.parse(value) if isinstance(value, str) else value

    def default_text(self) -> str:
        """The default as the help shows it."""
        if self.shown_default is not None:
            return self.shown_default
        if isinstance(self.default, str):
            return self.default
        try:
            return str(self.default_value())
        except ConfigError:
            return NO_DEFAULT

    def described(self, shown: str | None = None) -> str:
        """The help text with the environment variable and the default, or ``shown`` in its
        place."""
        default = self.default_text() if shown is None else shown
        return f"{self.help} [env {self.env}] [default: {default}]".replace("%", "%%")
