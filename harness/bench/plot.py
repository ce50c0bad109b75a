"""Plots a benchmark's rates as bars, with the memory bound if there is one, as SVG or PNG."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.cached_files import writing
from contract.errors import ConfigError, system_errors_as
from contract.extras import install_command
from harness.bench.engines import PEER
from harness.bench.report import Report, digits, label_of
from harness.cli.outputs import check_output

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = ("decode_short", "decode_long", "prefill")
FORMATS = ("svg", "png")
HEADROOM = 1.28
"""The height of a panel relative to its tallest bar, with room for two lines of label."""
TITLE_PAD = 18.0
"""Points between a panel and its title, with room for the line that states the memory bound."""
COLORS = ("#2166ac", "#67a9cf", "#5aae61", "#9970ab")
PEER_COLOR = "#999999"
BOUND_COLOR = "#b2182b"
INCHES = (9.0, 3.4)
DOTS_PER_INCH = 150
STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "zinc-rt", "font.size": 9.0}
"""Style options: text stays text, and the same report gives the same file."""


def check_plot(path: Path) -> None:
    """Raise ConfigError before anything is measured when no plot could be written to ``path``."""
    if path.suffix[1:] not in FORMATS:
        raise ConfigError(f"--plot: {path} must end in .svg or .png")
    check_output("--plot", path)
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--plot: matplotlib is not installed; run {install_command('bench')}")


def write_plot(report: Report, path: Path) -> None:
    """Plot decode at both contexts and prefill: a bar per engine, with the range of its
    repetitions.

    A dashed line is the rate at which memory could stream what a decode step moves. Raises
    ConfigError when the file cannot be written."""
    save_figure(lambda: draw(report), path)


def save_figure(draw_it: Callable[[], Figure], path: Path) -> None:
    """Draw in the common style and write the file. Raises ConfigError when that fails."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure = draw_it()
        metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        with system_errors_as(f"{path}: cannot be written"), writing(path) as file:
            form = path.suffix[1:]
            figure.savefig(file, format=form, dpi=DOTS_PER_INCH, metadata=metadata)


def draw(report: Report) -> Figure:
    """The plot as a matplotlib figure."""
    machine, model = report["machine"], report["model"]
    threads = report["settings"]["threads"]
    title = f"{model['file']}, {machine['cpu']}, {threads} threads"
    title += f" (x: ratio to {PEER})" if report["ratios"] else ""
    return figure_of([partial(_panel, report=report, metric=name) for name in PANELS], title)


def figure_of(panels: Sequence[Callable[[Any], None]], title: str) -> Figure:
    """A figure of panels side by side, each drawn into matplotlib's axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, draw_panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        draw_panel(axes)
    figure.suptitle(title, fontsize=9)
    return figure


def _panel(axes: Any, report: Report, metric: str) -> None:
    found = {name: metrics[metric] for name, metrics in report["engines"].items()}
    ours = iter(COLORS * len(found))
    colors = [PEER_COLOR if name == PEER else next(ours) for name in found]
    medians = [rate["median"] for rate in found.values()]
    spread = [
        [rate["median"] - rate["minimum"] for rate in found.values()],
        [rate["maximum"] - rate["median"] for rate in found.values()],
    ]
    axes.bar(list(found), medians, color=colors, width=0.6, yerr=spread, capsize=3)
    for index, (name, rate) in enumerate(found.items()):
        label = digits(rate["median"])
        if ratio := report["ratios"].get(name, {}).get(metric):
            label += f"\n{ratio['median']:.2f}x"
        axes.annotate(
            label,
            (index, rate["maximum"]),
            xytext=(0, 5),
            textcoords="offset points",
            ha="center",
            # The background keeps lines from crossing the text of a value.
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )
    top = max(rate["maximum"] for rate in found.values())
    if metric in report["bytes_per_token"]:
        stream = report["stream_bytes_per_second"]["median"]
        bound = stream / report["bytes_per_token"][metric]
        axes.axhline(bound, color=BOUND_COLOR, linestyle="--", linewidth=1)
        # Placed above the panel, since a value of any bar could overlap it inside.
        axes.annotate(
            f"- - memory bound {digits(bound)}",
            (0.5, 1),
            xycoords="axes fraction",
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            color=BOUND_COLOR,
        )
        top = max(top, bound)
    axes.set_ylim(0, top * HEADROOM)
    axes.set_title(label_of(metric, report), fontsize=9, pad=TITLE_PAD)
    axes.set_ylabel("tokens per second")
    axes.spines[["top", "right"]].set_visible(False)
