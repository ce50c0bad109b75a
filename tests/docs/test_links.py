"""Links, anchors, paths and names in README and docs lead somewhere, and so do the pages code
names."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from harness.simulation.invariants import Invariant
from tests.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = ("contract", "reference", "accel", "harness", "tests", "ci")
SUFFIXES = {".py", ".k", ".h", ".cu", ".cl", ".cpp", ".toml", ".sh", ".html", ".js", ".service", ""}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
NAMED_PATH = re.compile(r"`((?:contract|reference|accel|harness|tests|ci|goldens)/[\w./*-]+)`")
NAMED_SOURCE = re.compile(r"`(?:[\w/]+/)?(\w+\.(?:py|cu|k|cl|cpp))`")
NAMED_PAGE = re.compile(r"\bdocs/[\w/-]+\.(?:md|py)")
SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
NAME = re.compile(r"[A-Za-z_][\w.]*(?:\(.*\))?", re.DOTALL)
WORD = re.compile(r"(?<![\w\\])[A-Za-z_]\w+(?![\w*<])")
CLASS = re.compile(r"^(?:class )?(\w+)(?:[(:]| = )(.*)", re.MULTILINE)
MEMBER = re.compile(r"`([A-Z]\w+)\.(\w+)")
FILES_OF = re.compile(
    r"^\| (?:file|module) of `([\w/]+)` \|.*\n\|[-| ]+\n((?:\|.*\n)+)", re.MULTILINE
)
Classes = dict[str, list[tuple[str, list[str]]]]
"""By name the text of each module that defines such a class, and the words of its bases."""
NOT_OURS = {
    "m_b": "a formula's", "gsm8k": "a data set",
    "preemptions_total": "the Prometheus client adds _total", "rejections_total": "the same",
    "ZINC_RT_PARITY_CASES": "read by the tests alone", "ZINC_RT_TINYGRAD": "the same",
    "sm_80": "named to NVRTC by the tests alone", "MTL_DEBUG_LAYER": "Apple's",
    "simdgroup_matrix": "Apple's, said not to be used",
    "VK_NV_cooperative_matrix2": "NVIDIA's, said not to be used",
    "VK_NVX_binary_import": "the same",
}  # fmt: skip
"""Names on the pages that the product does not contain, and why."""


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


def unknown_names(text: str, words: set[str]) -> set[str]:
    """Words in backticks that are no ``words``: those with an underscore, and all of a span that is
    one name. A setting has its name in lower case behind ZINC_RT_."""
    found: set[str] = set()
    for _, span in SPAN.findall(FENCE.sub("", text)):
        named = WORD.findall(span)
        found.update(named if NAME.fullmatch(span) else [word for word in named if "_" in word])
    settings = {name for name in found if name.removeprefix("ZINC_RT_").lower() in words}
    return found - words - settings


def classes_of(modules: Iterable[str]) -> Classes:
    """The classes at the beginning of a line, and names for them."""
    classes: Classes = {}
    for module in modules:
        for name, bases in CLASS.findall(module):
            classes.setdefault(name, []).append((module, re.findall(r"\w+", bases)))
    return classes


def modules_of(name: str, classes: Classes, below: frozenset[str] = frozenset()) -> Iterator[str]:
    """The modules that define a class of this name, or a base of one."""
    for module, bases in classes.get(name, ()):
        yield module
        for base in {*bases} - below - {name}:
            yield from modules_of(base, classes, below | {name})


def missing_members(text: str, classes: Classes) -> Iterator[str]:
    """`Class.member` where no module of the class contains the member."""
    for name, member in MEMBER.findall(text):
        defining = list(modules_of(name, classes))
        if defining and not any(re.search(rf"\b{member}\b", module) for module in defining):
            yield f"{name}.{member}"


def missing_files(text: str) -> Iterator[str]:
    """Files of a table's first column that are not in the folder that its head names."""
    for folder, rows in FILES_OF.findall(text):
        for row in rows.splitlines():
            for name in re.findall(r"`([\w./]+)`", row.split("|")[1]):
                if not (ROOT / folder / name).exists() and not (ROOT / name).exists():
                    yield f"{folder}/{name}"


@pytest.fixture(scope="module")
def product() -> dict[Path, str]:
    """The text of each source that is neither a test nor somebody else's."""
    examples = (ROOT / "docs" / "examples").iterdir()
    files = (path for path in (*sources(), *examples, ROOT / "pyproject.toml") if path.is_file())
    ours = (
        path for path in files if "vendor" not in path.parts and ROOT / "tests" not in path.parents
    )
    return {path: path.read_text(errors="ignore") for path in ours}


@pytest.fixture(scope="module")
def words(product) -> set[str]:
    """All words of the product, and of the names of all files."""
    paths = [path for folder in CODE for path in (ROOT / folder).rglob("*")]
    names = [path.name for path in paths if "__pycache__" not in path.parts]
    named = set(re.findall(r"\w+", " ".join(names)))
    return named.union(*(re.findall(r"\w+", text) for text in product.values()))


@pytest.fixture(scope="module")
def file_names() -> set[str]:
    examples = (ROOT / "docs" / "examples").glob("*.py")
    return {path.name for path in (*sources(), *examples)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_exist(page, file_names):
    text = page.read_text()
    assert list(broken_links(page, text)) == []
    assert list(missing_paths(text)) == []
    assert set(NAMED_SOURCE.findall(text)) <= file_names


@pytest.fixture(scope="module")
def classes(product) -> Classes:
    return classes_of(text for path, text in product.items() if path.suffix == ".py")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_exist(page, words, classes):
    """What a page says of the code was renamed with the code."""
    text = page.read_text()
    assert unknown_names(text, words) <= NOT_OURS.keys()
    assert list(missing_members(text, classes)) == []
    assert list(missing_files(text)) == []


def test_exceptions_are_needed(words):
    named = set().union(*(unknown_names(page.read_text(), words) for page in PAGES))
    assert named == NOT_OURS.keys()


def test_every_invariant_is_listed():
    listed = {span for _, span in SPAN.findall((ROOT / "docs" / "tools.md").read_text())}
    assert {invariant.name for invariant in Invariant} <= listed


def test_pages_that_code_names_exist():
    """In comments, docstrings and help texts."""
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources()
        for name in NAMED_PAGE.findall(path.read_text(errors="ignore"))
        if not (ROOT / name).exists()
    ]
    assert missing == []


def test_the_readme_leads_to_every_page():
    linked = set(LINK.findall((ROOT / "README.md").read_text()))
    names = {target.partition("#")[0] for target in linked}
    assert {f"docs/{page.name}" for page in PAGES[1:]} <= names


def test_what_is_broken_is_found():
    """Negative controls: a missing file, a missing heading, a missing path."""
    page = ROOT / "docs" / "lifecycle.md"
    text = "[a](no.md) [b](memory.md#no-such-heading) [c](memory.md#pages) [d](https://x.org/no)"
    assert list(broken_links(page, text)) == ["no.md", "memory.md#no-such-heading"]
    assert NAMED_SOURCE.findall("`no.py` `accel/no.cu` no.k") == ["no.py", "no.cu"]
    assert list(missing_paths("`accel/no.py` `accel/packets/rules*.py` `ci/test`")) == [
        "accel/no.py"
    ]
    names = (
        "`no_such(1)`, `all_outputs=True`, `Tier.submit`, `ZINC_RT_SLOTS`, ``a `b_c` d``, `no_*`"
    )
    assert unknown_names(names, {"Tier", "submit", "slots"}) == {"no_such", "all_outputs", "b_c"}
    classes = classes_of(
        ["class Base:\n    held", "class Engine(Base):\n    step", "Tier = Engine\n"]
    )
    members = "`Engine.step` `Engine.held` `Engine.lower(1)` `Tier.step` `Other.x`"
    assert list(missing_members(members, classes)) == ["Engine.lower"]
    table = "| file of `accel/vulkan` | does |\n| --- | --- |\n| `tier.py`, `no.py` | x |\n"
    assert list(missing_files(table)) == ["accel/vulkan/no.py"]
