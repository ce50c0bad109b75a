"""Numbers and drawings of a report: text of quantities, and the geometry of its SVGs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

CELL, GAP = 18, 2
"""Size of a layer's squares in a ribbon and the space between them, in SVG units."""
LAYERS_A_LINE = 24
NUMBERED = 4
"""Every fourth layer of a ribbon carries its number."""
NUMBER_HEIGHT = 14
DRAWING_WIDTH = LAYERS_A_LINE * (CELL + GAP)
STACK_HEIGHT = 22

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
"""Letter and style of every kind of mixer and feed-forward: colour alone would not do."""

HOLDERS: Mapping[str, str] = {
    "weights": "weights",
    "kv": "keys and values",
    "state": "recurrent and other state",
    "activations": "activations and step data",
}
"""What the bytes of a step are in, as people call it."""


def quantity(value: float, unit: str = "") -> str:
    """Three digits with a decimal prefix: 1,234,000 bytes are ``1.23 MB``."""
    scaled, prefixes = float(value), iter(("", "k", "M", "G", "T", "P"))
    prefix = next(prefixes)
    while scaled >= 999.5 and prefix != "P":
        scaled, prefix = scaled / 1000, next(prefixes)
    digits = f"{scaled:.0f}" if scaled >= 999.5 else f"{scaled:.3g}"
    return f"{digits} {prefix}{unit}".strip()


def duration(seconds: float) -> str:
    """Three digits in the unit that suits: ``12.3 ms``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def percent(share: float) -> str:
    """A share of 1; what is there but would round to nothing is ``< 0.1 %``."""
    if 0 < share < 0.001:
        return "< 0.1 %"
    return f"{100 * share:.1f} %"


def ratio(part: float, whole: float) -> float:
    """``part / whole``, 0 when there is nothing to share."""
    return part / whole if whole else 0.0


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers as ranges: 0, 1, 2, 5 is ``0–2, 5``."""
    runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    shown = []
    for _, run in runs:
        members = [number for _, number in run]
        shown.append(str(members[0]) if len(members) == 1 else f"{members[0]}–{members[-1]}")
    return ", ".join(shown)


def chain(opcodes: Iterable[str]) -> str:
    """Opcodes in order, repetitions counted: ``RMS_NORM → MATMUL ×2``."""
    runs = [(name, len(list(run))) for name, run in groupby(opcodes)]
    return " → ".join(name if count == 1 else f"{name} ×{count}" for name, count in runs)


def counted(names: Iterable[str]) -> str:
    """Names with how often they occur, the commonest first: ``36 delta net, 12 full attention``."""
    return ", ".join(f"{count} {name}" for name, count in Counter(names).most_common())


@dataclass(frozen=True, slots=True)
class Square:
    """One square of a ribbon: top left corner, letter, style."""

    x: int
    y: int
    letter: str
    style: str


@dataclass(frozen=True, slots=True)
class LayerMark:
    """A layer of a ribbon: its squares, and its number where one is written at (x, y)."""

    title: str
    squares: tuple[Square, Square]
    number: tuple[int, int, int] | None


@dataclass(frozen=True, slots=True)
class Ribbon:
    """The layers of a model from left to right in lines, and a sentence that says the same."""

    width: int
    height: int
    marks: tuple[LayerMark, ...]
    description: str


def ribbon(layers: Sequence[Mapping[str, Any]]) -> Ribbon:
    """Drawing of the ``layers`` of a model's document: mixers above, feed-forwards below."""
    line_height = NUMBER_HEIGHT + 2 * (CELL + GAP) + GAP
    marks = []
    for index, layer in enumerate(layers):
        line, column = divmod(index, LAYERS_A_LINE)
        x, y = column * (CELL + GAP), line * line_height
        top = y + NUMBER_HEIGHT
        squares = (
            Square(x, top, *KINDS[layer["mixer"]]),
            Square(x, top + CELL + GAP, *KINDS[layer["feed_forward"]]),
        )
        numbered = column % NUMBERED == 0
        number = (x + CELL // 2, y + NUMBER_HEIGHT - 4, layer["layer"]) if numbered else None
        marks.append(LayerMark(f"layer {layer['layer']}: {kind_of(layer)}", squares, number))
    lines = -(-len(layers) // LAYERS_A_LINE)
    by_kind: dict[str, list[int]] = {}
    for layer in layers:
        by_kind.setdefault(kind_of(layer), []).append(layer["layer"])
    described = "; ".join(f"layers {ranges(found)}: {kind}" for kind, found in by_kind.items())
    return Ribbon(DRAWING_WIDTH, lines * line_height, tuple(marks), described)


def kind_of(layer: Mapping[str, Any]) -> str:
    """One layer of a document in words."""
    window = f" over {layer['window']:,} positions" if layer["window"] else ""
    return f"{layer['mixer']}{window}, {layer['feed_forward']}"


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a stacked bar, in SVG units."""

    x: float
    width: float
    style: str
    title: str


def stack(moved: Mapping[str, int], longest: int) -> tuple[Segment, ...]:
    """Bytes by holder as one bar; a bar of ``longest`` bytes is as wide as the drawing."""
    segments, x = [], 0.0
    for holder, nbytes in moved.items():
        width = DRAWING_WIDTH * ratio(nbytes, longest)
        title = f"{HOLDERS[holder]}: {quantity(nbytes, 'B')}"
        segments.append(Segment(round(x, 2), round(width, 2), holder, title))
        x += width
    return tuple(segments)
