"""Renders documents of models: JSON for tools, one self-contained HTML page for people."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from harness.console import printable

Document = Mapping[str, Any]

KINDS: Mapping[str, tuple[str, str]] = {
    "full attention": ("A", "full"),
    "sliding attention": ("W", "sliding"),
    "delta net": ("Δ", "delta"),
    "no mixer": ("·", "none"),
    "dense": ("D", "dense"),
    "MoE": ("M", "moe"),
    "MoE and dense": ("M+", "both"),
    "no feed-forward": ("·", "none"),
}
"""The letter and style of every kind of mixer and feed-forward, so that colour is not needed."""

HOLDERS: Mapping[str, str] = {
    "weights": "weights",
    "kv": "keys and values",
    "state": "recurrent and other state",
    "activations": "activations and step data",
}
"""The labels of the kinds of buffers that a step's bytes are in."""


def render_json(documents: Sequence[Document]) -> str:
    """The documents as one JSON array."""
    return json.dumps(documents, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def render_html(documents: Sequence[Document]) -> str:
    """The documents as columns of one page that loads nothing.

    All documents count the same step for the same machine; the page states it once. All text from
    the documents is escaped."""
    environment = Environment(
        loader=PackageLoader("harness.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (quantity, duration, percent, ranges, chain, printable, kind_of, by_kind, moved)
    environment.filters.update({function.__name__: function for function in filters})
    machine = documents[0]["machine"]
    return environment.get_template("graph.html").render(
        documents=documents,
        ridge=machine["flops_per_second"] / machine["bytes_per_second"],
        kinds=KINDS,
        holders=HOLDERS,
        ratio=ratio,
        facts=[(label, [fact(document) for document in documents]) for label, fact in FACTS],
    )


def quantity(value: float, unit: str = "") -> str:
    """A number with three digits and a decimal prefix: 1,234,000 bytes are ``1.23 MB``."""
    scaled, prefixes = float(value), iter(("", "k", "M", "G", "T", "P"))
    prefix = next(prefixes)
    while scaled >= 999.5 and prefix != "P":
        scaled, prefix = scaled / 1000, next(prefixes)
    digits = f"{scaled:.0f}" if scaled >= 999.5 else f"{scaled:.3g}"
    return f"{digits} {prefix}{unit}".strip()


def duration(seconds: float) -> str:
    """A duration with three digits in a suitable unit: ``12.3 ms``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def percent(share: float) -> str:
    """A share of 1 in percent; a share that would round to nothing is ``< 0.1 %``."""
    return "< 0.1 %" if 0 < share < 0.001 else f"{100 * share:.1f} %"


def ratio(part: float, whole: float) -> float:
    """``part / whole``, 0 when ``whole`` is 0."""
    return part / whole if whole else 0.0


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers as ranges: 0, 1, 2, 5 is ``0–2, 5``."""
    runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    members = [[number for _, number in run] for _, run in runs]
    return ", ".join(str(m[0]) if len(m) == 1 else f"{m[0]}–{m[-1]}" for m in members)


def chain(opcodes: Iterable[str]) -> str:
    """Opcodes in order, with repetitions counted: ``RMS_NORM → MATMUL ×2``."""
    runs = [(name, len(list(run))) for name, run in groupby(opcodes)]
    return " → ".join(name if count == 1 else f"{name} ×{count}" for name, count in runs)


def counted(names: Iterable[str]) -> str:
    """Names with their counts, the most frequent first: ``36 delta net, 12 full attention``."""
    return ", ".join(f"{count} {name}" for name, count in Counter(names).most_common())


def kind_of(layer: Mapping[str, Any]) -> str:
    """The kind of one layer of a document in words."""
    window = f" over {abs(layer['window']):,} positions" if layer["window"] else ""
    return f"{layer['mixer']}{window}, {layer['feed_forward']}"


def by_kind(layers: Iterable[Mapping[str, Any]]) -> dict[str, list[int]]:
    """The numbers of the layers of each kind."""
    found: dict[str, list[int]] = {}
    for layer in layers:
        found.setdefault(kind_of(layer), []).append(layer["layer"])
    return found


def moved(row: Document) -> int:
    """The bytes of a row of counts."""
    nbytes: int = row["bytes_read"] + row["bytes_written"]
    return nbytes


def _storage(document: Document) -> str:
    total = sum(row["bytes"] for row in document["weights"])
    rows = ((row["type"], ratio(row["bytes"], total)) for row in document["weights"])
    return ", ".join(f"{name} {percent(share)}" for name, share in rows)


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
    ("FLOPs a decoded token", lambda d: quantity(d["decode"]["flops_per_token"], "FLOP")),
    ("FLOPs a prefilled token", lambda d: quantity(d["prefill"]["flops_per_token"], "FLOP")),
    (
        "FLOPs per byte of the step",
        lambda d: f"{ratio(d['totals']['flops'], moved(d['totals'])):.3g}",
    ),
    ("critical path (estimate)", _path),
    ("scratch of the step", lambda d: quantity(d["scratch_bytes"], "B")),
)
"""The rows of the table of facts: label, and function that reads the value from a document."""
