"""Links, anchors and paths in README and docs lead somewhere, and so do the pages code names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = ("contract", "reference", "accel", "harness", "tests", "ci")
SUFFIXES = {".py", ".k", ".h", ".cu", ".cl", ".cpp", ".toml", ".sh", ".html", ".js", ".service", ""}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
NAMED_PATH = re.compile(r"`((?:contract|reference|accel|harness|tests|ci|goldens)/[\w./*-]+)`")
NAMED_SOURCE = re.compile(r"`(?:[\w/]+/)?(\w+\.(?:py|cu|k|cl|cpp))`")
NAMED_PAGE = re.compile(r"\bdocs/[\w/-]+\.(?:md|py)")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


def broken_links(page: Path, text: str) -> Iterator[str]:
    """Links of ``text``, read as ``page``, whose file or heading does not exist."""
    for target in LINK.findall(FENCE.sub("", text)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            yield target


def missing_paths(text: str) -> Iterator[str]:
    """Paths from the root, in backticks, that match no file."""
    for path in NAMED_PATH.findall(text):
        if "..." not in path and not any(ROOT.glob(path.rstrip("/"))):
            yield path


def sources() -> Iterator[Path]:
    """Every file of the code."""
    for folder in CODE:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in SUFFIXES and "__pycache__" not in path.parts:
                yield path


@pytest.fixture(scope="module")
def file_names() -> set[str]:
    examples = (ROOT / "docs" / "examples").glob("*.py")
    return {path.name for path in (*sources(), *examples)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_exist(page: Path, file_names: set[str]) -> None:
    text = page.read_text()
    assert list(broken_links(page, text)) == []
    assert list(missing_paths(text)) == []
    assert set(NAMED_SOURCE.findall(text)) <= file_names


def test_pages_that_code_names_exist() -> None:
    """In comments, docstrings and help texts."""
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources()
        for name in NAMED_PAGE.findall(path.read_text(errors="ignore"))
        if not (ROOT / name).exists()
    ]
    assert missing == []


def test_the_readme_leads_to_every_page() -> None:
    linked = set(LINK.findall((ROOT / "README.md").read_text()))
    names = {target.partition("#")[0] for target in linked}
    assert {f"docs/{page.name}" for page in PAGES[1:]} <= names


def test_what_is_broken_is_found() -> None:
    """Negative controls: a missing file, a missing heading, a missing path."""
    page = ROOT / "docs" / "lifecycle.md"
    text = "[a](no.md) [b](memory.md#no-such-heading) [c](memory.md#pages) [d](https://x.org/no)"
    assert list(broken_links(page, text)) == ["no.md", "memory.md#no-such-heading"]
    assert NAMED_SOURCE.findall("`no.py` `accel/no.cu` no.k") == ["no.py", "no.cu"]
    assert list(missing_paths("`accel/no.py` `accel/packets/rules*.py` `ci/test`")) == [
        "accel/no.py"
    ]
