"""Plots a load as bars: generated tokens per second, and the waiting times of clients."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from harness.bench.engines import PEER
from harness.bench.plot import COLORS, HEADROOM, PEER_COLOR, figure_of
from harness.bench.report import digits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = (
    ("generated, tok/s", ("rate",), 1.0),
    ("first text, ms", ("first_p50", "first_p99"), 1e3),
    ("between two pieces of text, ms", ("interval_p50", "interval_p99"), 1e3),
)
"""The title, metrics and factor of each panel."""


def draw_load_figures(report: Mapping[str, Any]) -> Figure:
    """The plot as a matplotlib figure."""
    load = report["load"]
    how = f"{load['rate']:g} requests a second" if load["rate"] else f"{load['clients']} clients"
    title = f"{report['machine']['cpu']}, mix {load['mix']}, {how}"
    return figure_of([partial(_panel, report["engines"], *panel) for panel in PANELS], title)


def _panel(
    engines: Mapping[str, Any], title: str, metrics: tuple[str, ...], factor: float, axes: Any
) -> None:
    top = 0.0
    for number, (name, found) in enumerate(engines.items()):
        for index, metric in enumerate(metrics):
            if metric not in found:
                continue
            median, low, high = (
                found[metric][key] * factor for key in ("median", "minimum", "maximum")
            )
            at = number + index / (len(metrics) + 0.5)
            color = PEER_COLOR if name == PEER else COLORS[index % len(COLORS)]
            axes.bar(at, median, 0.9 / (len(metrics) + 0.5), color=color)
            axes.errorbar(at, median, [[median - low], [high - median]], color="black", capsize=3)
            label = digits(median)
            if len(metrics) > 1:
                label += f"\n{metric.rpartition('_')[2]}"
            axes.annotate(label, (at, high), xytext=(0, 4), textcoords="offset points", ha="center")
            top = max(top, high)
    axes.set_ylim(0, (top or 1.0) * HEADROOM)
    middle = (len(metrics) - 1) / (len(metrics) + 0.5) / 2
    axes.set_xticks([number + middle for number in range(len(engines))], list(engines))
    axes.set_title(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
