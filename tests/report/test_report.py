"""Reports: the numbers of the graph, one well-formed page that loads nothing and runs nothing."""

import json
import re
import tomllib
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest

from contract.dtypes import F32
from contract.ir.analysis import Machine
from contract.ir.cost import graph_cost
from contract.ir.graph import BufferKind, Graph, GraphBuilder
from contract.ir.prune_rows import prune_rows
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from harness.report.render import Assumptions, model_document, render_html, render_json
from tests.contract.graphs import decoder
from tests.contract.model_graphs import Sizes, hybrid, slider
from tests.paths import ROOT

ASSUMED = Assumptions(ShapeKey(1, 1), 128, Machine(100e9, 1e12))
VOID = {"meta", "link", "br", "img", "input", "hr"}
LOADING = {"src", "href", "xlink:href", "action", "data", "srcset", "style"}
ALLOWED = {
    "html", "head", "meta", "title", "style", "body", "header", "main", "section", "article",
    "h1", "h2", "h3", "p", "div", "table", "caption", "thead", "tbody", "tr", "th", "td", "span",
    "b", "meter",
}  # fmt: skip


class Page(HTMLParser):
    """Elements of a page in order; fails on one that is not closed where it belongs."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.parents: list[tuple[str, ...]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"{tag} repeats an attribute"
        self.elements.append((tag, dict(attrs)))
        self.parents.append(tuple(self._open))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def document(graph: Graph, label: str = "tiny.gguf", architecture: str = "llama") -> dict[str, Any]:
    return model_document(label, architecture, graph, ASSUMED)


def without_digest(found: dict[str, Any]) -> dict[str, Any]:
    return {**found, "digest": "0" * 64}


PAIR = [without_digest(document(hybrid(), "hybrid.gguf")), without_digest(document(slider()))]


def test_json(snapshot):
    assert render_json([without_digest(document(decoder(1)))]) == snapshot


def test_html(snapshot):
    assert render_html(PAIR) == snapshot


def test_the_document_agrees_with_the_graph():
    graph = hybrid()
    found = json.loads(render_json([document(graph)]))[0]
    decode = graph_cost(graph, ShapeKey(1, 1), 128)
    assert found["decode"]["bytes_per_token"] == decode.bytes_moved
    assert sum(found["decode"]["bytes"].values()) == decode.bytes_moved
    assert found["decode"]["flops_per_token"] == decode.flops
    prompt = ShapeKey(128, 1)
    prefill = graph_cost(prune_rows(graph, prompt), prompt, 64)
    assert found["prefill"] == {
        "tokens": 128, "flops": prefill.flops, "flops_per_token": prefill.flops // 128,
    }  # fmt: skip
    for rows in (found["op_mix"], found["roles"]):
        assert sum(row["flops"] for row in rows) == found["totals"]["flops"] == decode.flops
        assert sum(row["nodes"] for row in rows) == len(graph.nodes)
    path = found["critical_path"]
    assert sum(part["seconds"] for part in path["parts"]) == pytest.approx(path["seconds"])
    assert path["memory_bound_seconds"] <= path["seconds"] < path["serial_seconds"]


@pytest.mark.parametrize("documents", [PAIR, PAIR[:1]], ids=["two", "one"])
def test_html_is_well_formed_and_accessible(documents):
    """Headings go down one at a time, tables have captions, bars fit, ids are unique."""
    page = Page(render_html(documents))
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert len(page.named("caption")) == len(page.named("table")) > 0
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.elements:
        assert set((attributes.get("aria-labelledby") or "").split()) <= set(ids)
    assert all(0 <= float(a["value"] or -1) <= 1 for a in page.named("meter"))
    assert all(a.get("scope") in ("row", "col") for a in page.named("th"))
    assert len(page.named("article")) == len(documents)


def test_html_loads_nothing():
    text = render_html(PAIR)
    for loading in ("http:", "https:", "src=", "url(", "@import", "@font-face", "//"):
        assert loading not in text
    assert not [a for _, a in Page(text).elements if LOADING & set(a)]


def test_hostile_names_stay_text():
    """Names from files neither become markup nor reorder what is beside them."""
    name = '"><script src=//evil.example>alert(1)</script><img onerror=x>&amp;{{ 7 * 7 }}\u202e'
    b = GraphBuilder(name)
    x = b.buffer(f"x{name}", BufferKind.REQUEST, F32, ("tokens", 8))
    b.emit(Opcode.SCALE, f"{name}[0]", x=x, factor=2.0, y=b.output("y", "tokens", 8))
    text = render_html([document(b.build(), name, name), document(decoder(), f"b{name}", "llama")])
    page = Page(text)
    assert {tag for tag, _ in page.elements} == ALLOWED
    attributes = {attribute for _, found in page.elements for attribute in found}
    assert not {a for a in attributes if a.startswith("on")} | (attributes & LOADING)
    shown = name.replace("\u202e", "\\u202e")
    words = "".join(page.words)
    assert words.count(shown) >= 4
    assert "\u202e" not in text


def test_a_model_of_sixty_layers_is_folded():
    """The page of fifteen times the layers is hardly longer than that of four."""
    few, many = (render_html([document(hybrid(Sizes(layers=n)))]) for n in (4, 60))
    assert len(many) - len(few) < 56 * 400
    assert many.count("<tr>") == few.count("<tr>")
    assert len(render_json([document(hybrid(Sizes(layers=60)))])) < 2_000_000


def test_a_graph_without_layers_is_shown_too():
    b = GraphBuilder("g")
    x = b.buffer("x", BufferKind.REQUEST, F32, ("tokens", 8))
    b.emit(Opcode.SCALE, x=x, factor=2.0, y=b.output("y", "tokens", 8))
    page = Page(render_html([document(b.build())]))
    assert "No node of this graph belongs to a layer." in "".join(page.words)


@pytest.mark.parametrize("package", ["contract", "reference", "accel", "harness"])
def test_data_files_are_installed_with_the_packages(package):
    """Every table, text and kernel beside the modules matches a pattern of package data."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"][package]
    installed = {path for pattern in patterns for path in (ROOT / package).glob(pattern)}
    suffixes = ("css", "html", "js", "json", "svg", "toml", "txt", "typed", "cu", "h", "k", "cl")
    data = {
        path
        for suffix in suffixes
        for path in (ROOT / package).rglob(f"*.{suffix}")
        if "python" not in path.parts[len(ROOT.parts) :]
    }
    assert data
    assert data <= installed
