"""``python -m harness.bench``: how fast, how large, and against what."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from contract.errors import ConfigError, ZincError
from harness.bench.engines import PEER, check_peer
from harness.bench.measure import SHORT_TOKENS, VOCABULARY_TOKENS, Plan, run_benchmark
from harness.catalog import resolve_model
from harness.cli.console import note, table
from harness.cli.progress import progress_on
from harness.settings import add_flags, resolve
from reference.cpu.threads import thread_count

SETTINGS = ("model", "cache_dir", "kv_dtype", "threads")
ROWS = (
    ("decode_short", "decode at context {short}", "tok/s", 1.0),
    ("decode_long", "decode at context {long}", "tok/s", 1.0),
    ("prefill", "prefill of {long} tokens", "tok/s", 1.0),
    ("first_token_seconds", "process start to first token", "s", 1.0),
    ("peak_resident_bytes", "peak resident memory", "MB", 1e-6),
)
"""Metric, label, unit, factor."""


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.bench",
        description="Measure tiers, and a peer on the same file with the same threads, in turn.",
    )
    parser.add_argument("--tiers", default="cpu", metavar="NAME[,NAME]", help="default: cpu")
    parser.add_argument("--peer", choices=[PEER], help="measure this engine too")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--decode-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_flags(parser, SETTINGS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 0, or 2 with one line on standard error."""
    args = build_parser().parse_args(argv)
    try:
        report = run_benchmark(_plan(args), note)
    except ZincError as error:
        note(f"error: {error}")
        return error.exit_code
    print(json.dumps(report, indent=1) if args.json else render(report))
    return 0


def _plan(args: argparse.Namespace) -> Plan:
    settings = resolve(args, SETTINGS)
    tiers = tuple(name for name in args.tiers.split(",") if name)
    if not tiers or len(set(tiers)) != len(tiers) or PEER in tiers:
        raise ConfigError(f"--tiers: {args.tiers!r} is not a list of different tiers")
    for flag in ("prompt_tokens", "decode_tokens", "repeat"):
        if getattr(args, flag) < 1:
            raise ConfigError(f"--{flag.replace('_', '-')}: must be at least 1")
    if args.peer:
        check_peer()
    return Plan(
        model=resolve_model(settings["model"], settings["cache_dir"], progress_on()),
        engines=(*tiers, args.peer) if args.peer else tiers,
        threads=settings["threads"] or thread_count(),
        kv_dtype=settings["kv_dtype"],
        prompt_tokens=args.prompt_tokens,
        decode_tokens=args.decode_tokens,
        repeat=args.repeat,
    )


def render(report: Mapping[str, Any]) -> str:
    """The report as text."""
    machine, model, settings = report["machine"], report["model"], report["settings"]
    engines, ratios = report["engines"], report["ratios"]
    rows = [("", "", *engines, *(f"{name} / {PEER}" for name in ratios))]
    for metric, label, unit, factor in ROWS:
        cells = [_spread(found[metric], factor) for found in engines.values()]
        cells += [_spread(found[metric], 1.0) for found in ratios.values()]
        lengths = {"short": SHORT_TOKENS, "long": settings["prompt_tokens"]}
        rows.append((label.format(**lengths), unit, *cells))
    stream = report["stream_bytes_per_second"]["median"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_average'][0]}, "
        f"numpy {machine['numpy']}, {', '.join(machine['blas'])}",
        f"{model['file']}, {model['bytes'] / 1e6:.1f} MB, KV {settings['kv_dtype']}, "
        f"{settings['threads']} threads, prompt {settings['prompt_tokens']}, "
        f"decode {settings['decode_tokens']}, {settings['repeat']} repetitions",
        "",
        table(rows, right=range(2, len(rows[0]))),
        "",
        f"memory copies {stream / 1e9:.1f} GB/s (read and write)",
    ]
    for label, nbytes in report["bytes_per_token"].items():
        shares = ", ".join(
            f"{name} {share[label]:.1%}" for name, share in report["roofline"].items()
        )
        lines.append(
            f"{label}: {nbytes / 1e6:.1f} MB a token, at most {stream / nbytes:.0f} tok/s: {shares}"
        )
    resident = ", ".join(
        f"{name} {found['peak_resident_bytes']['median'] / model['bytes']:.2f}"
        for name, found in engines.items()
    )
    lines.append(f"peak resident memory over file size: {resident}")
    opened = _spread(report["vocabulary_open_seconds"], 1.0)
    lines.append(f"a file with {VOCABULARY_TOKENS:,} tokens opens in {opened} s")
    return "\n".join(lines)


def _spread(found: Mapping[str, Any], factor: float) -> str:
    """Median and range in three significant digits, the range only where there is one."""
    median, low, high = (found[key] * factor for key in ("median", "minimum", "maximum"))
    shown = _digits(median)
    return shown if low == high else f"{shown} ({_digits(low)}-{_digits(high)})"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main())
