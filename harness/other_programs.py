"""Advice about names that other programs have, from ``other_programs.toml``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path


@cache
def advice(kind: str) -> Mapping[str, str]:
    """What to do instead, by name, for the names of one kind: "flags" and "commands" of command
    lines, "arguments" of calls in Python, "attributes" of their objects."""
    import tomllib

    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))[kind]
    return {name: text for text, names in rows.items() for name in re.split(r",\s+", names)}
