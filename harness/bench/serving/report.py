"""Renders a report of ``--serve`` as text for a terminal and as Markdown."""

from collections.abc import Iterator

from harness.bench.engines import PEER
from harness.bench.report import Report, digits, machine_line, metric_rows, sections
from harness.bench.serving.host import HOST_CONTEXTS, HOST_SLOTS
from harness.bench.serving.plan import SEQUENCES
from harness.bench.targets import target_rows

METRICS = {
    **{f"decode_{n}": (f"decode, {n} together", "tok/s", 1.0) for n in SEQUENCES},
    "decode_gain": (f"  {SEQUENCES[-1]} over 1", "", 1.0),
    "interval_alone_p50": ("interactive interval alone, p50", "ms", 1e3),
    "interval_alone_p99": ("  p99", "ms", 1e3),
    "interval_alone_spread": ("  p99 over p50", "", 1.0),
    "interval_mixed_p50": ("interactive interval beside batch work, p50", "ms", 1e3),
    "interval_mixed_p99": ("  p99", "ms", 1e3),
    "interval_mixed_spread": ("  p99 over p50", "", 1.0),
    "chat_hits": ("prompt tokens of a 10-turn chat that were cached", "%", 1e2),
    "first_token_cold": ("first token of a new prompt", "ms", 1e3),
    "first_token_hit": ("  of the same prompt again", "ms", 1e3),
    "first_token_gain": ("  again over new", "", 1.0),
    "lookup_plain": ("editing a text", "tok/s", 1.0),
    "lookup_guessed": ("  with prompt lookup", "tok/s", 1.0),
    "lookup_gain": ("  with over without", "", 1.0),
    "lookup_tokens_a_step": ("  tokens a step with prompt lookup", "", 1.0),
}
"""The label, unit and factor of each metric."""
HOST_KINDS = {"steady": "the same sequences decode on", "churn": "requests come and go"}


def render_serving(report: Report, *, markdown: bool = False) -> str:
    """The report as tables: engines, the host's cost of a step, targets."""
    metrics = METRICS | {f"host_{kind}": (label, "us", 1.0) for kind, label in HOST_KINDS.items()}
    rows = _engine_rows(report), _host_rows(report), target_rows(report["targets"], metrics)
    return "\n\n".join(["\n".join(_subject(report)), *sections(rows, markdown)])


def _subject(report: Report) -> list[str]:
    model, settings = report["model"], report["settings"]
    lines = [
        machine_line(report),
        f"{model['file']}, {model['bytes'] / 1e6:.1f} MB, KV {settings['kv_dtype']}, "
        f"{settings['threads']} threads, prompts of {settings['prompt_tokens']}, "
        f"{settings['decode_tokens']} decoded, {settings['repeat']} repetitions",
    ]
    if settings["beside"]:
        lines.append(f"beside {settings['beside']} busy processes")
    if report["peer"]:
        lines.append(f"{PEER} of {report['peer']['version']}; ratios are to its better way")
    return lines


def _engine_rows(report: Report) -> Iterator[tuple[str, ...]]:
    peers = report["peer"]["engines"] if report["peer"] else {}
    return metric_rows(METRICS, {**report["engines"], **peers}, report["ratios"])


def _host_rows(report: Report) -> Iterator[tuple[str, ...]]:
    yield (
        "the host's part of a step, CPU time",
        "",
        *(f"{slots} slots at {context:,}" for context in HOST_CONTEXTS for slots in HOST_SLOTS),
    )
    if not report["host"]:
        return
    for kind, label in HOST_KINDS.items():
        cells = (
            digits(report["host"][f"{kind}_{slots}_{context}"]["median"])
            for context in HOST_CONTEXTS
            for slots in HOST_SLOTS
        )
        yield (label, "us", *cells)
