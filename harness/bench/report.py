"""Renders a benchmark's report as text for a terminal and as Markdown."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from harness.bench.engines import PEER
from harness.bench.measure import SHORT_TOKENS, VOCABULARY_TOKENS, flash_name
from harness.console import table

Report = Mapping[str, Any]

Metrics = Mapping[str, tuple[str, str, float]]
"""The label, unit and factor of each metric."""
METRICS: Metrics = {
    "decode_short": ("decode at context {short}", "tok/s", 1.0),
    "decode_long": ("decode at context {long}", "tok/s", 1.0),
    "prefill": ("prefill of {long} tokens", "tok/s", 1.0),
    "first_token_seconds": ("start to first token", "s", 1.0),
    "cold_start_seconds": ("first-ever start, nothing cached", "s", 1.0),
    "peak_resident_bytes": ("peak resident memory", "MB", 1e-6),
}


def label_of(metric: str, report: Report) -> str:
    """The label of a metric in this report."""
    return METRICS[metric][0].format(short=SHORT_TOKENS, long=report["settings"]["prompt_tokens"])


def render(report: Report) -> str:
    """The report as text."""
    about = [f"memory copies {_stream(report) / 1e9:.1f} GB/s (read and write)", *_bounds(report)]
    shown = as_text(list(_rows(report)))
    return "\n".join([*_subject(report), "", shown, "", *about])


def render_markdown(report: Report) -> str:
    """The report as Markdown: what was measured, a table, and the bounds."""
    bounds = "; ".join(_bounds(report))
    about = f"Memory copies {_stream(report) / 1e9:.1f} GB/s; {bounds}."
    return "\n".join(
        [f"{'; '.join(_subject(report))}.", "", as_markdown(list(_rows(report))), "", about]
    )


def as_text(rows: Sequence[tuple[str, ...]]) -> str:
    """Rows, of which the first is the head, as columns for a terminal."""
    return table(rows, right=range(2, len(rows[0])))


def as_markdown(rows: Sequence[tuple[str, ...]]) -> str:
    """Rows, of which the first is the head, as a Markdown table."""
    head, *body = rows
    rule = ("---", "---", *("--:" for _ in head[2:]))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *body))


def sections(report_rows: Sequence[Iterable[tuple[str, ...]]], markdown: bool) -> list[str]:
    """The tables that have more than a head."""
    show = as_markdown if markdown else as_text
    return [show(rows) for rows in map(list, report_rows) if len(rows) > 1]


def metric_rows(
    metrics: Metrics,
    engines: Mapping[str, Mapping[str, Any]],
    ratios: Mapping[str, Mapping[str, Any]],
) -> Iterator[tuple[str, ...]]:
    """A table with its head: the measured metrics of engines, and ratios of some to the peer."""
    yield ("", "", *engines, *(f"{name} / {PEER}" for name in ratios))
    for metric, (label, unit, factor) in metrics.items():
        found = [(one, factor) for one in engines.values()]
        found += [(one, 1.0) for one in ratios.values()]
        cells = [spread(one[metric], scale) if metric in one else "" for one, scale in found]
        if any(cells):
            yield (label, unit, *cells)


def machine_line(report: Report) -> str:
    """The processor, its cores and its load."""
    machine = report["machine"]
    return f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_average'][0]}"


def _rows(report: Report) -> Iterator[tuple[str, ...]]:
    labelled = {name: (label_of(name, report), *METRICS[name][1:]) for name in METRICS}
    return metric_rows(labelled, report["engines"], report["ratios"])


def _subject(report: Report) -> list[str]:
    machine, model, settings = report["machine"], report["model"], report["settings"]
    subject = [
        f"{machine_line(report)}, numpy {machine['numpy']}, {', '.join(machine['blas'])}",
        f"{model['file']}, {model['bytes'] / 1e6:.1f} MB, KV {settings['kv_dtype']}, "
        f"{settings['threads']} threads, prompt {settings['prompt_tokens']}, "
        f"decode {settings['decode_tokens']}, {settings['repeat']} repetitions",
    ]
    if settings["beside"]:
        subject.append(f"beside {settings['beside']} busy processes")
    if report["peer"]:
        peer = report["peer"]
        tried = ", ".join(f"{name} {digits(s)} s" for name, s in peer["tried_seconds"].items())
        used = flash_name(peer["flash_attention"])
        where = "on its graphics card " if peer["gpu"] else ""
        subject.append(f"{PEER} of {peer['version']} {where}{used} (prompt and answer: {tried})")
    return subject


def _stream(report: Report) -> float:
    return float(report["stream_bytes_per_second"]["median"])


def _bounds(report: Report) -> Iterator[str]:
    """Lines of figures that are not metrics of an engine."""
    for metric, nbytes in report["bytes_per_token"].items():
        shares = ", ".join(
            f"{name} {share[metric]:.1%}" for name, share in report["roofline"].items()
        )
        yield (
            f"{label_of(metric, report)} moves {nbytes / 1e6:.1f} MB a token, "
            f"at most {_stream(report) / nbytes:.0f} tok/s: {shares}"
        )
    resident = ", ".join(
        f"{name} {found['peak_resident_bytes']['median'] / report['model']['bytes']:.2f}"
        for name, found in report["engines"].items()
    )
    yield f"peak resident memory over file size: {resident}"
    opened = spread(report["vocabulary_open_seconds"], 1.0)
    yield f"a file with {VOCABULARY_TOKENS:,} tokens opens in {opened} s"


def spread(found: Mapping[str, Any], factor: float) -> str:
    """The median and range with three significant digits; no range for a single value."""
    median, low, high = (found[key] * factor for key in ("median", "minimum", "maximum"))
    shown = digits(median)
    return shown if low == high else f"{shown} ({digits(low)}-{digits(high)})"


def digits(value: float) -> str:
    """A number with three significant digits; larger integers in full."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
