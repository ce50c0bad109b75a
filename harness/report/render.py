"""Renders documents of models: JSON for tools, one self-contained HTML page for people."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from contract.ir import analysis
from contract.ir.cost import Cost, graph_cost
from contract.ir.export import cost_fields, to_document
from contract.ir.nodes import Graph
from contract.ir.prune_rows import prune_rows
from contract.ir.scratch import plan_scratch
from contract.shape_key import ShapeKey
from harness.console import printable

DECODE = ShapeKey(1, 1)
PROMPT_TOKENS = 512
"""Prompt tokens of the counted prefill, or fewer for a shorter context."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """The counted step, the context its query tokens attend to, and the machine of the estimate."""

    key: ShapeKey
    context: int
    machine: analysis.Machine


def model_document(
    label: str, architecture: str, graph: Graph, assumptions: Assumptions
) -> dict[str, Any]:
    """The document of ``contract.ir.export`` with further keys.

    Added keys: ``model``, ``architecture``, ``layers`` (one object per layer), ``parameters``,
    ``weights`` (by storage type), ``scratch_bytes``, ``decode`` (one token: bytes by kind of
    buffer, and FLOPs), ``prefill`` (a prompt of ``tokens``: FLOPs), ``roles`` (nodes grouped over
    the layers) and ``critical_path`` (seconds estimated for ``machine``)."""
    key, context, machine = assumptions.key, assumptions.context, assumptions.machine
    costs = analysis.node_costs(graph, key, context)
    storage = analysis.weight_storage(graph)
    return {
        "model": label,
        "architecture": architecture,
        "layers": [asdict(kind) for kind in analysis.layer_kinds(graph)],
        "parameters": sum(row.elements for row in storage),
        "weights": [
            {
                "type": row.dtype,
                "tensors": row.tensors,
                "elements": row.elements,
                "bytes": row.nbytes,
            }
            for row in storage
        ],
        "scratch_bytes": plan_scratch(graph, key).nbytes,
        "decode": _decode(graph, context),
        "prefill": _prefill(graph, context),
        "roles": [
            {
                "role": share.name,
                "opcode": share.opcode,
                "nodes": share.nodes,
                **cost_fields(share.cost),
            }
            for share in analysis.role_mix(graph, costs)
        ],
        "critical_path": _critical_path(graph, costs, machine),
        "machine": asdict(machine),
        **to_document(graph, key, context, costs),
    }


def _decode(graph: Graph, context: int) -> dict[str, Any]:
    """Counts of one token at the end of the context."""
    moved = analysis.step_bytes(graph, DECODE, context)
    return {
        "context": context,
        "bytes": asdict(moved),
        "bytes_per_token": moved.total,
        "flops_per_token": graph_cost(graph, DECODE, context).flops,
    }


def _prefill(graph: Graph, context: int) -> dict[str, Any]:
    """Counts of a prompt from position 0: its tokens attend to half of it on average; one row of
    logits."""
    tokens = min(PROMPT_TOKENS, context)
    key = ShapeKey(tokens, 1)
    work = graph_cost(prune_rows(graph, key), key, (tokens + 1) // 2)
    return {"tokens": tokens, "flops": work.flops, "flops_per_token": work.flops // tokens}


def _critical_path(
    graph: Graph, costs: Sequence[Cost], machine: analysis.Machine
) -> dict[str, Any]:
    path = analysis.critical_path(graph, costs, machine)
    return {
        "estimate": "each node takes the longer of bytes / bandwidth and FLOPs / peak",
        "nodes": [graph.nodes[index].name for index in path.nodes],
        "seconds": path.seconds,
        "serial_seconds": path.serial_seconds,
        "memory_bound_seconds": sum(
            machine.seconds(costs[index])
            for index in path.nodes
            if costs[index].intensity <= machine.ridge
        ),
        "parts": [asdict(part) for part in analysis.fold_path(graph, path, costs, machine)],
    }


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
