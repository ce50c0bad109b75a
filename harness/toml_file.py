"""Reads TOML files that users write; errors name the file and the problem."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from contract.errors import ConfigError

FILE_BYTES_MAX = 1 << 20


def read_toml(path: Path, title: str, *, may_be_absent: bool = False) -> dict[str, Any]:
    """The tables of the file; ``title`` names it in errors. Raises ConfigError when it cannot be
    read.

    A missing file is an error too, unless it ``may_be_absent`` and counts as empty."""
    text = read_text(path, title, may_be_absent=may_be_absent)
    if not text:
        return {}
    import tomllib

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        hint = '; a text needs quotes: key = "text"' if "Invalid value" in str(error) else ""
        raise ConfigError(f"{path}: not valid TOML: {error}{hint}") from None
    except (RecursionError, ValueError):
        raise ConfigError(f"{path}: not a table of values") from None


def read_text(path: Path, title: str, *, may_be_absent: bool = False) -> str:
    """The text of the file, with the errors of ``read_toml``."""
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except (FileNotFoundError, NotADirectoryError):  # As where HOME is /dev/null.
        if not may_be_absent:
            raise ConfigError(f"{path}: no such {title}") from None
        return ""
    except OSError as error:
        refused = isinstance(error, PermissionError)
        advice = "; change its permissions, or name another one" if refused else ""
        raise ConfigError(f"{path}: cannot read: {error.strerror}{advice}") from None
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: longer than {FILE_BYTES_MAX:,} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8") from None


def unknown_key(key: str, known: Iterable[str]) -> str:
    """The error message for a key that is not in ``known``."""
    return f"unknown key {key!r}; the nearest known key is {nearest_of(key, known)!r}"


def nearest_of(key: str, known: Iterable[str]) -> str:
    """The name in ``known`` that is most like ``key``."""
    import difflib

    return difflib.get_close_matches(key.replace("-", "_"), known, n=1, cutoff=0)[0]


def likeness(one: str, other: str, prefix: str) -> float:
    """How alike two texts are behind a common prefix, from 0 to 1."""
    import difflib

    return difflib.SequenceMatcher(None, one[len(prefix) :], other[len(prefix) :]).ratio()
