"""Documents of models as text: JSON for tools, one self-contained HTML page for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from harness.report import figures
from harness.report.figures import counted, duration, quantity, ratio

Document = Mapping[str, Any]

SHOWN_ROLES = 10
"""Rows of the tables of hot nodes."""


def render_json(documents: Sequence[Document]) -> str:
    """The documents as one JSON array."""
    return json.dumps(documents, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def render_html(documents: Sequence[Document]) -> str:
    """The documents as columns of one page that loads nothing.

    All documents count the same step for the same machine; the page says it once. Text from the
    documents is escaped, whatever it holds.
    """
    environment = Environment(
        loader=PackageLoader("harness.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        quantity=quantity,
        duration=duration,
        percent=figures.percent,
        ranges=figures.ranges,
        chain=figures.chain,
        printable=_printable,
    )
    longest = max(document["decode"]["bytes_per_token"] for document in documents)
    first = documents[0]
    machine = first["machine"]
    return environment.get_template("graph.html").render(
        key=first["key"],
        context=first["context"],
        machine=machine,
        ridge=machine["flops_per_second"] / machine["bytes_per_second"],
        kinds=figures.KINDS,
        holders=figures.HOLDERS,
        cell=figures.CELL,
        drawing_width=figures.DRAWING_WIDTH,
        stack_height=figures.STACK_HEIGHT,
        comparison=[(label, [fact(document) for document in documents]) for label, fact in FACTS],
        models=[_view(document, longest) for document in documents],
    )


def _view(document: Document, longest: int) -> dict[str, Any]:
    """What the template shows of one model beside the document itself."""
    totals = document["totals"]
    moved = _moved(totals)
    mix = [_shares(row, moved, totals["flops"]) for row in document["op_mix"]]
    roles = [_shares(row, moved, totals["flops"]) for row in document["roles"]]
    path = document["critical_path"]
    layers = document["layers"]
    used = {layer["mixer"] for layer in layers} | {layer["feed_forward"] for layer in layers}
    return {
        "document": document,
        "ribbon": figures.ribbon(layers),
        "legend": [kind for kind in figures.KINDS if kind in used],
        "stack": figures.stack(document["decode"]["bytes"], longest),
        "holders": [
            (holder, nbytes, ratio(nbytes, document["decode"]["bytes_per_token"]))
            for holder, nbytes in document["decode"]["bytes"].items()
        ],
        "mix": mix,
        "hot_bytes": roles[:SHOWN_ROLES],
        "hot_flops": sorted(roles, key=lambda row: (-row["flops"], row["role"]))[:SHOWN_ROLES],
        "path": [
            {**part, "share": ratio(part["seconds"], path["seconds"])} for part in path["parts"]
        ],
    }


def _shares(row: Document, moved: int, flops: int) -> dict[str, Any]:
    """A row of counts with its bytes, FLOPs per byte and its shares of the step."""
    nbytes = _moved(row)
    return {
        **row,
        "bytes": nbytes,
        "intensity": ratio(row["flops"], nbytes),
        "bytes_share": ratio(nbytes, moved),
        "flops_share": ratio(row["flops"], flops),
    }


def _moved(row: Document) -> int:
    nbytes: int = row["bytes_read"] + row["bytes_written"]
    return nbytes


def _printable(text: str) -> str:
    """What could reorder or hide text on a page is shown as its escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _storage(document: Document) -> str:
    total = sum(row["bytes"] for row in document["weights"])
    rows = ((row["type"], ratio(row["bytes"], total)) for row in document["weights"])
    return ", ".join(f"{name} {figures.percent(share)}" for name, share in rows)


def _bits(document: Document) -> str:
    nbytes = sum(row["bytes"] for row in document["weights"])
    return f"{8 * ratio(nbytes, document['parameters']):.2f}"


def _path(document: Document) -> str:
    path = document["critical_path"]
    return f"{duration(path['seconds'])}, every node in turn {duration(path['serial_seconds'])}"


FACTS: tuple[tuple[str, Callable[[Document], str]], ...] = (
    ("architecture", lambda d: d["architecture"]),
    ("layers", lambda d: str(len(d["layers"]))),
    ("mixers", lambda d: counted(layer["mixer"] for layer in d["layers"])),
    ("feed-forwards", lambda d: counted(layer["feed_forward"] for layer in d["layers"])),
    ("parameters", lambda d: f"{d['parameters']:,}"),
    ("weights", lambda d: quantity(sum(row["bytes"] for row in d["weights"]), "B")),
    ("bits a parameter", _bits),
    ("bytes by storage type", _storage),
    ("nodes", lambda d: f"{d['totals']['nodes']:,}"),
    ("bytes a decoded token", lambda d: quantity(d["decode"]["bytes_per_token"], "B")),
    ("… of weights", lambda d: quantity(d["decode"]["bytes"]["weights"], "B")),
    ("… of keys and values", lambda d: quantity(d["decode"]["bytes"]["kv"], "B")),
    ("… of recurrent and other state", lambda d: quantity(d["decode"]["bytes"]["state"], "B")),
    (
        "… of activations and step data",
        lambda d: quantity(d["decode"]["bytes"]["activations"], "B"),
    ),
    ("FLOPs a decoded token", lambda d: quantity(d["decode"]["flops_per_token"], "FLOP")),
    ("FLOPs a prefilled token", lambda d: quantity(d["prefill"]["flops_per_token"], "FLOP")),
    (
        "FLOPs per byte of the step",
        lambda d: f"{ratio(d['totals']['flops'], _moved(d['totals'])):.3g}",
    ),
    ("critical path (estimate)", _path),
    ("scratch of the step", lambda d: quantity(d["scratch_bytes"], "B")),
)
"""Rows of the table of facts, and how each is read from a document."""
