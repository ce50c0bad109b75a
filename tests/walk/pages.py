"""The commands of README and docs."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.paths import ROOT

LINE = re.compile(r"^ {4}(?:\$ )?((?:zinc-rt|python -m harness\.)[^\n]*)$", re.MULTILINE)
CURL = re.compile(r"^ {4}(?:\$ )?curl (?:[^\n]*\\\n)*[^\n]*$", re.MULTILINE)
ECHO = re.compile(r"^ {4}\$ echo '([^']+)' > (\S+)$", re.MULTILINE)
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


@dataclass(frozen=True)
class Asked:
    """A request that a page shows as a command line of curl, to a server of this machine."""

    page: str
    route: str
    body: dict[str, Any]


def page_requests() -> list[Asked]:
    """The requests of README and docs with a body, which may be in a file that the page writes."""
    found = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text("utf-8")
        files = {f"@{name}": body for body, name in ECHO.findall(text)}
        for line in CURL.findall(text):
            words = shlex.split(line.replace("\\\n", ""), comments=True)
            if "-d" not in words:
                continue
            body = words[words.index("-d") + 1]
            (route,) = (part[1] for word in words if (part := word.split(":8080", 1))[1:])
            found.append(Asked(page.name, route, json.loads(files.get(body, body))))
    return found


def words_of(line: str) -> tuple[str, ...]:
    """The words of a command line as a shell sees them, up to a pipe or a second command."""
    words = shlex.split(line.partition(" | ")[0].partition("; ")[0], comments=True)
    for number, word in enumerate(words):
        if word in ("&&", "&", ">", "<"):
            words = words[:number]
            break
    return tuple(words)
