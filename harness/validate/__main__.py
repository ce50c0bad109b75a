"""``python -m harness.validate``: compare every op of a model on every tier with the
definitions."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from contract.dtypes import BY_NAME
from contract.errors import ConfigError, RequestError, ZincError
from harness.catalog import resolve_model
from harness.progress import progress_on
from harness.settings import add_flags, resolve
from harness.tiers import TierOptions, open_tier
from harness.validate.run import DEFINITIONS, TRACE_BYTES, ValidationReport, Workload, validate
from reference.cpu.tier import CpuTier
from reference.model.open import Model, open_model

TIER_SETTINGS = ("threads", "device", "opencl_mode", "opencl_device")
SETTINGS = ("model", "cache_dir", "kv_dtype", *TIER_SETTINGS)
PROMPT = "The quick brown fox jumps over the lazy dog, 1,234 times: naïve, 漢字 and\n\tcode(x)!"
DIGEST_SHOWN = 12

PROG = "python -m harness.validate"


def build_parser(prog: str = PROG) -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Run a model on tiers and compare every op with the numpy definitions. "
        "Exit code 0: all bits agree; 1: some differ; 2: it could not be run.",
    )
    parser.add_argument("--tiers", default="cpu", metavar="NAME[,NAME]", help="default: cpu")
    parser.add_argument(
        "--layers", default="all", metavar="all|N[,N]", help="layers to trace; default: all"
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", default=PROMPT, help="text whose tokens are computed")
    source.add_argument("--tokens", metavar="N[,N]", help="token ids instead of a text")
    parser.add_argument("--chunk", type=int, default=16, help="tokens of a prefill step")
    parser.add_argument("--decode", type=int, default=4, help="last tokens computed one by one")
    parser.add_argument(
        "--trace-bytes", type=int, default=TRACE_BYTES, help="memory for intermediate values"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_flags(parser, SETTINGS)
    return parser


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """See ``build_parser``."""
    args = build_parser(prog).parse_args(argv)
    try:
        report = _run(args)
    except ZincError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if args.json:
        print(json.dumps(report.as_dict(), indent=1))
    else:
        print_report(report)
    return 0 if report.agrees else 1


def _run(args: argparse.Namespace) -> ValidationReport:
    settings = resolve(args, SETTINGS)
    names = [name for name in args.tiers.split(",") if name]
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"--tiers: {args.tiers!r} is not a list of different tiers")
    for flag, low in (("chunk", 1), ("decode", 0), ("trace_bytes", 1)):
        if getattr(args, flag) < low:
            raise ConfigError(f"--{flag.replace('_', '-')}: must be at least {low}")
    path = resolve_model(settings["model"], settings["cache_dir"], progress_on())
    with ExitStack() as stack:
        model = open_model(path)
        stack.callback(model.file.close)
        layers = None if args.layers == "all" else _layers(args.layers, model)
        workload = Workload(
            _tokens(args, model), args.chunk, args.decode, BY_NAME[settings["kv_dtype"]]
        )
        oracle = stack.enter_context(CpuTier(settings["threads"], definitions_only=True))
        options = TierOptions(**{name: settings[name] for name in TIER_SETTINGS})
        tiers = {name: stack.enter_context(open_tier(name, options)) for name in names}
        return validate(model, oracle, tiers, workload, layers, args.trace_bytes)


def _integers(flag: str, text: str, bound: int) -> tuple[int, ...]:
    """Comma-separated numbers in [0, bound)."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{flag}: {text!r} is not a list of numbers such as 0,5,7") from None
    for number in numbers:
        if not 0 <= number < bound:
            raise ConfigError(f"{flag}: {number} is outside 0 to {bound - 1}")
    return numbers


def _layers(text: str, model: Model) -> tuple[int, ...]:
    return _integers("--layers", text, model.config.layers)


def _tokens(args: argparse.Namespace, model: Model) -> tuple[int, ...]:
    if args.tokens is not None:
        tokens = _integers("--tokens", args.tokens, model.config.vocab)
    else:
        tokens = tuple(model.tokenizer.encode(args.prompt))
    if not tokens:
        raise RequestError("prompt", "is empty; give at least one token")
    if len(tokens) > model.config.context:
        raise RequestError(
            "prompt", f"is {len(tokens)} tokens, the model has {model.config.context} positions"
        )
    return tokens


def print_report(report: ValidationReport) -> None:
    """Print a line per layer and differing tier, the divergences, and the verdict."""
    for layer, by_tier in report.histograms.items():
        oracle = by_tier[DEFINITIONS]
        marks = " ".join(
            f"{name}{'=' if by_tier[name].digest == oracle.digest else '≠'}"
            for name in report.tiers
        )
        print(f"layer {layer:<4} {oracle.digest[:DIGEST_SHOWN]} {oracle.line()}  {marks}")
        for name in report.tiers:
            if by_tier[name].digest != oracle.digest:
                shown = by_tier[name]
                print(f"  {name:<8} {shown.digest[:DIGEST_SHOWN]} {shown.line()}")
    for divergence in report.divergences.values():
        print("\n".join(divergence.lines()))
    print(report.verdict)


if __name__ == "__main__":
    sys.exit(main())
