"""The commands of README and docs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from tests.paths import ROOT

LINE = re.compile(r"^ {4}(?:\$ )?((?:zinc-rt|python -m harness\.)[^\n]*)$", re.MULTILINE)
INLINE = re.compile(r"`((?:zinc-rt|python -m harness\.\w+) [^`]*)`")
HELP = re.compile(r"^  (zinc-rt [^\n]*)$", re.MULTILINE)


def page_commands() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each command of README and docs: where it is, and its words. Pipes and comments are cut."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for text in commands_in(page):
            yield page.name, text


def commands_in(page: Path) -> list[tuple[str, ...]]:
    """The words of each command of a page."""
    text = page.read_text("utf-8")
    found = [*LINE.findall(text), *INLINE.findall(text)]
    return [words for line in found if (words := words_of(line))]


def words_of(line: str) -> tuple[str, ...]:
    """The words of a command line as a shell sees them, up to a pipe or a second command."""
    words = shlex.split(line.partition(" | ")[0].partition("; ")[0], comments=True)
    for number, word in enumerate(words):
        if word in ("&&", "&", ">", "<"):
            words = words[:number]
            break
    return tuple(words)
