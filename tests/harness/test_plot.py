"""The plot of a benchmark: whatever the numbers, no words cover others."""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import matplotlib
import pytest

from harness.bench.engines import PEER
from harness.bench.plot import PANELS, STYLE, draw

RATES = {"cpu": (4.5, 4.4, 4.7), "opencl": (137.0, 80.0, 159.0), PEER: (62.6, 56.0, 70.0)}
"""Median, minimum and maximum in tokens per second, of the size a small model has."""


def report(bound: float) -> dict[str, Any]:
    """Every panel shows RATES, decoding has a memory bound of ``bound`` tokens per second."""
    rates = {
        name: dict(zip(("median", "minimum", "maximum"), rate, strict=True))
        for name, rate in RATES.items()
    }
    ratios = {name: {"median": rate[0] / RATES[PEER][0]} for name, rate in RATES.items()}
    return {
        "engines": {name: dict.fromkeys(PANELS, rate) for name, rate in rates.items()},
        "ratios": {name: dict.fromkeys(PANELS, ratios[name]) for name in ("cpu", "opencl")},
        "bytes_per_token": dict.fromkeys(("decode_short", "decode_long"), 1e8),
        "stream_bytes_per_second": {"median": 1e8 * bound},
        "machine": {"cpu": "Some Processor with a Name as Long as They Come @ 2.50GHz"},
        "model": {"file": "smollm2-135m-instruct-q4_1.gguf"},
        "settings": {"threads": 2, "prompt_tokens": 512},
    }


def words(figure: Any) -> Iterator[tuple[str, Any]]:
    """Every text that is drawn, with its box in pixels."""
    from matplotlib.text import Text

    figure.canvas.draw()
    texts = list(figure.texts)
    for axes in figure.axes:
        top = axes.get_ylim()[1]
        ticks = zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
        # Ticks beyond the limits exist and are not drawn.
        texts += [label for tick, label in ticks if tick <= top]
        texts += [*axes.texts, axes.title, axes.yaxis.label, *axes.get_xticklabels()]
    for text in texts:
        # A text's own box; an annotation's would include the point it is about.
        yield text.get_text(), Text.get_window_extent(text, figure.canvas.get_renderer())


@pytest.mark.parametrize("bound", [1.0, 30.0, 62.6, 75.0, 100.0, 137.0, 160.0, 165.0, 180.0, 400.0])
def test_no_text_covers_another_or_leaves_the_picture(bound):
    with matplotlib.rc_context(STYLE):
        figure = draw(report(bound))
        found = list(words(figure))
    assert sum("memory bound" in text for text, _ in found) == 2
    for (text, box), (other, its) in combinations(found, 2):
        assert not box.overlaps(its), f"{text!r} covers {other!r}"
    for text, box in found:
        if "Processor" not in text:
            assert figure.bbox.contains(*box.min), text
            assert figure.bbox.contains(*box.max), text
