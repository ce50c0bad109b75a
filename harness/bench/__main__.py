"""``python -m harness.bench``: how fast, how large, and against what."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from contract.errors import ConfigError, ZincError
from harness.bench.engines import PEER, check_peer, fixed_workers
from harness.bench.measure import BenchmarkPlan, run_benchmark
from harness.bench.plot import check_plot, write_plot
from harness.bench.report import render, render_markdown
from harness.catalog import resolve_model
from harness.console import note
from harness.progress import progress_on
from harness.settings import add_flags, resolve
from reference.cpu.threads import thread_count

SETTINGS = ("model", "cache_dir", "kv_dtype", "threads")


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.bench",
        description="Measure tiers, and a peer on the same file with the same threads, in turn.",
    )
    parser.add_argument(
        "--tiers",
        default="cpu",
        metavar="NAME[,NAME]",
        help="default: cpu; opencl:2 is opencl with two workers instead of as many as are fastest",
    )
    parser.add_argument("--peer", choices=[PEER], help="measure this engine too")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--decode-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument(
        "--beside", type=int, default=0, metavar="N", help="keep N processes busy meanwhile"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the rates: .svg or .png")
    add_flags(parser, SETTINGS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 0, or 2 with one line on standard error."""
    args = build_parser().parse_args(argv)
    try:
        if args.plot is not None:
            check_plot(args.plot)
        report = run_benchmark(_plan(args), note)
        if args.plot is not None:
            write_plot(report, args.plot)
    except ZincError as error:
        note(f"error: {error}")
        return error.exit_code
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        print(render_markdown(report) if args.markdown else render(report))
    return 0


def _plan(args: argparse.Namespace) -> BenchmarkPlan:
    settings = resolve(args, SETTINGS)
    tiers = tuple(name for name in args.tiers.split(",") if name)
    if not tiers or len(set(tiers)) != len(tiers) or PEER in tiers:
        raise ConfigError(f"--tiers: {args.tiers!r} is not a list of different tiers")
    for name in tiers:
        fixed_workers(name)
    if args.beside < 0:
        raise ConfigError("--beside: must not be negative")
    for flag in ("prompt_tokens", "decode_tokens", "repeat"):
        if getattr(args, flag) < 1:
            raise ConfigError(f"--{flag.replace('_', '-')}: must be at least 1")
    if args.peer:
        check_peer()
    return BenchmarkPlan(
        model=resolve_model(settings["model"], settings["cache_dir"], progress_on()),
        engines=(*tiers, args.peer) if args.peer else tiers,
        threads=settings["threads"] or thread_count(),
        kv_dtype=settings["kv_dtype"],
        prompt_tokens=args.prompt_tokens,
        decode_tokens=args.decode_tokens,
        repeat=args.repeat,
        beside=args.beside,
    )


if __name__ == "__main__":
    sys.exit(main())
