"""What a setting is: its name and help, what its values may be, and how their text is read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contract.lazy_dataclass import dataclass

ENV_PREFIX = "ZINC_RT_"
KEY_ENV = f"{ENV_PREFIX}KEY"
"""The environment variable with the API key for a server."""
INT32_MAX = 2**31 - 1
UINT64_MAX = 2**64 - 1
SIZE_SUFFIX = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@dataclass(frozen=True, slots=True)
class SettingKind:
    """How the text of a value is read: ``parse`` raises ValueError on what ``accepts`` excludes.

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


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,20})([kKmMgG]?)", text)
    if match is None:
        raise ValueError(text)
    return int(match[1]) * SIZE_SUFFIX[match[2].lower()]


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
    """A path, in which ``~`` is the home folder. Raises ValueError and RuntimeError."""
    if not text or "\0" in text:
        raise ValueError(text)
    return Path(text).expanduser()


def _text(text: str) -> str:
    return text


def integer(low: int, high: int) -> SettingKind:
    """Whole numbers in ``low..high``."""
    accepts = f"a whole number from {low} to {high}"
    return SettingKind(accepts, "N", _bounded(_integer, low, high), (int, str))


def tokens(low: int, high: int) -> SettingKind:
    """Token counts in ``low..high``, with binary suffixes: ``32K`` is 32,768."""
    accepts = f"a number of tokens from {low} to {high}, such as 4096 or 32K (1K = 1024)"
    return SettingKind(accepts, "TOKENS", _bounded(_size, low, high), (int, str))


def size(low: int) -> SettingKind:
    """Bytes from ``low`` on, with binary suffixes: ``6G`` is 6 * 2^30."""
    accepts = f"a number of bytes from {low}, such as 6G or 800M (1G = 1024M)"
    return SettingKind(accepts, "BYTES", _bounded(_size, low, UINT64_MAX), (int, str))


def number(low: float, high: float) -> SettingKind:
    """Finite real numbers in ``low..high``."""
    accepts = f"a number from {low:g} to {high:g}"
    return SettingKind(accepts, "X", _bounded(float, low, high), (int, float, str))


def choice(*names: str) -> SettingKind:
    """Exactly one of ``names``."""
    return SettingKind(
        f"one of {', '.join(names)}", "{" + ",".join(names) + "}", _one_of(names), (str,)
    )


PATH = SettingKind("a path", "PATH", path_of, (str,))
TEXT = SettingKind("text", "TEXT", _text, (str,))


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table. ``shown_default`` replaces a default that is computed later. A flag
    that ``repeats`` may be given several times: its values are joined with commas."""

    name: str
    kind: SettingKind
    default: Any
    help: str
    shown_default: str | None = None
    repeats: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    def default_value(self) -> Any:
        return self.default() if callable(self.default) else self.default

    def described(self, shown: str | None = None) -> str:
        """The help text with the environment twin and the default, or ``shown`` in its place."""
        if shown is None:
            shown = self.shown_default
        if shown is None:
            shown = self.default_value()
        text = f"{self.help} [env {self.env}] [default: {shown}]"
        return text.replace("%", "%%")
