"""``python -m harness.validate``: compare every op of a model on every tier with the
definitions."""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from contract.dtypes import BY_NAME
from contract.errors import ConfigError, RequestError
from harness.catalog import resolve_model
from harness.cli.parser import Parser, add_count, add_switch, whole_number
from harness.cli.tool import run_tool
from harness.progress import progress_on
from harness.settings import add_flags, group_of, resolve
from harness.tiers import TierOptions, check_tiers, open_tier
from harness.validate.run import DEFINITIONS, TRACE_BYTES, ValidationReport, Workload, validate
from reference.cpu.tier import CpuTier
from reference.model.open import Model, open_model

TIER_SETTINGS = ("threads", "device", "opencl_mode", "opencl_device")
SETTINGS = ("model", "cache_dir", "kv_dtype", *TIER_SETTINGS)
PROMPT = "The quick brown fox jumps over the lazy dog, 1,234 times: naïve, 漢字 and\n\tcode(x)!"
DIGEST_SHOWN = 12

EXAMPLES = """\
examples:
  zinc-rt validate --tiers native
  zinc-rt validate --tiers native,opencl --model model.gguf --layers 0,5
  zinc-rt validate --tiers cuda --tokens 1,2,3 --json

Exit code 0: all bits agree; 1: some differ; 2: it could not be run.
"""
PROG = "python -m harness.validate"


def build_parser(prog: str = PROG) -> Parser:
    """The flags."""
    parser = Parser(
        prog=prog,
        description="Run a model on tiers and compare every op with the numpy definitions.",
        epilog=EXAMPLES,
    )
    parser.rare |= {"chunk", "decode", "trace_bytes"}
    group = group_of(parser, "input")
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        "--prompt",
        default=PROMPT,
        metavar="TEXT",
        help="text whose tokens are computed [default: a sentence of many kinds of characters]",
    )
    source.add_argument("--tokens", metavar="ID[,ID]", help="token ids instead of a text")
    group.add_argument(
        "--layers",
        default="all",
        metavar="LAYER[,LAYER]",
        help="numbers of the layers to compare op by op [default: all]",
    )
    add_count(group, "--chunk", 16, "tokens of a prefill step")
    add_count(group, "--decode", 4, "last tokens, which are computed one by one")
    group_of(parser, "device").add_argument(
        "--tiers", default="cpu", metavar="NAME[,NAME]", help="tiers to compare [default: cpu]"
    )
    group_of(parser, "memory").add_argument(
        "--trace-bytes",
        type=whole_number,
        default=TRACE_BYTES,
        metavar="N",
        help=f"most bytes of intermediate values in memory [default: {TRACE_BYTES}]",
    )
    add_switch(group_of(parser, "output"), "--json", help="print JSON")
    add_flags(parser, SETTINGS)
    return parser


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run the command; returns its exit code: 0 where all bits agree."""
    return run_tool(build_parser(prog), _validate, argv)


def _validate(args: argparse.Namespace) -> int:
    """Run and print; returns 0, or 1 where bits differ."""
    report = _run(args)
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
    options = TierOptions(**{name: settings[name] for name in TIER_SETTINGS})
    path = resolve_model(
        settings["model"],
        settings["cache_dir"],
        progress_on(),
        before_pull=partial(check_tiers, names, options),
    )
    with ExitStack() as stack:
        model = open_model(path)
        stack.callback(model.file.close)
        layers = None
        if args.layers != "all":
            layers = _integers("--layers", args.layers, model.config.layers)
        workload = Workload(
            _tokens(args, model), args.chunk, args.decode, BY_NAME[settings["kv_dtype"]]
        )
        oracle = stack.enter_context(CpuTier(settings["threads"], definitions_only=True))
        tiers = {name: stack.enter_context(open_tier(name, options)) for name in names}
        return validate(model, oracle, tiers, workload, layers, args.trace_bytes, progress_on())


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
