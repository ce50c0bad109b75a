"""``python -m harness.bench``: measure speed and memory of engines and servers."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from contract.errors import ConfigError
from contract.processors import processors
from harness.bench.drafts import DraftsPlan, render_drafts, run_drafts
from harness.bench.engines import PEER, check_peer, fixed_workers
from harness.bench.load import command as load_command
from harness.bench.measure import BenchmarkPlan, run_benchmark
from harness.bench.plot import check_plot, write_plot
from harness.bench.rates import RatesPlan, render_rates, run_rates
from harness.bench.report import render, render_markdown
from harness.bench.serving.measure import run_serving
from harness.bench.serving.plan import DRAFT_TOKENS, ServingPlan
from harness.bench.serving.report import render_serving
from harness.catalog import resolve_model
from harness.cli.parser import Parser, add_count, add_file, add_switch, whole_number
from harness.cli.tool import run_tool
from harness.console import note
from harness.progress import progress_on
from harness.settings import Settings, add_flags, group_of, resolve
from harness.tiers import AUTO, TierOptions, check_tiers, open_tier

P = TypeVar("P", bound=BenchmarkPlan)
SINGLE_SIZES = {"prompt_tokens": 512, "decode_tokens": 64, "repeat": 5}
DRAFTS_SIZES = {"prompt_tokens": 32, "decode_tokens": 64, "repeat": 4}
SERVING_SIZES = {"prompt_tokens": 32, "decode_tokens": 32, "repeat": 3}
EXAMPLES = """\
examples:
  zinc-rt bench --tiers native,opencl --peer llama.cpp
  zinc-rt bench --serve --tiers native          many requests at once
  zinc-rt bench --server http://127.0.0.1:8080 --clients 8
  zinc-rt bench --server --tiers native         starts a server for it
"""
SERVE_HELP = """\
--serve measures one model shared by many requests:
  together   tokens a second of 1, 4 and 16 sequences that decode in the same
             steps; with --peer next to the peer's own batches, with and
             without flash attention
  mixed      the decode intervals of an interactive tenant, alone and while the
             15 other slots read prompts and decode for a batch tenant: p50, p99
  chat       ten turns: the share of prompt tokens that came from the prefix
             cache; the time to the first token of a prompt of 512 tokens, new
             and again
  lookup     a text is edited, plain and with tokens guessed from the prompt:
             the answers are equal
  host       processor time of the host in a step of 1, 16 and 64 slots, at
             1,024 and at 131,072 positions, on a tier that computes nothing

Judge the ratios and the targets below the table: both sides of each were
measured in turn. A model of a given shape to measure with:
  zinc-rt synth --arch qwen3 --size 0.6b --quant q4_k_m --out q.gguf
  zinc-rt bench --serve --tiers opencl --peer llama.cpp --model q.gguf
"""
SETTINGS = ("model", "cache_dir", "kv_dtype", "threads", "device", "draft", "draft_model")

PROG = "python -m harness.bench"


def build_parser(prog: str = PROG) -> Parser:
    """The flags."""
    parser = Parser(
        prog=prog,
        description="Measure the speed and memory of tiers, of llama.cpp on the same file, or of "
        "a server. Engines are measured in turn, with the same threads.",
        epilog=EXAMPLES,
        appendix=f"{SERVE_HELP}\n{load_command.HELP}",
    )
    parser.rare |= {"peer_gpu", "gate", "prompt_tokens", "decode_tokens", "repeat", "beside"}
    _add_measurement(parser)
    group_of(parser, "device").add_argument(
        "--tiers",
        "--tier",
        default=AUTO,
        metavar="NAME[,NAME]",
        help="the tiers to measure; native:2 is the native tier with two workers instead of as "
        "many as are fastest; auto is the one that zinc-rt run takes [default: auto]",
    )
    output = group_of(parser, "output")
    form = output.add_mutually_exclusive_group()
    add_switch(form, "--json", help="print JSON")
    add_switch(form, "--markdown", help="print a Markdown table")
    add_file(output, "--plot", help="draw the rates into this .svg or .png")
    load_command.add_flags(parser)
    add_flags(parser, SETTINGS)
    return parser


def _add_measurement(parser: Parser) -> None:
    """Add the flags that say what is measured."""
    group = group_of(parser, "measurement")
    add_switch(group, "--serve", help="measure many requests at once, without a server")
    add_switch(
        group,
        "--drafts",
        help="measure tokens guessed ahead by the file's draft block, from the prompt or by "
        "--draft-model: tokens a step, speed against plain decoding, equal answers; exit code 1 "
        "where an answer differs",
    )
    for flag, what in (
        ("rates", "prompts of these lengths, and decoding behind each"),
        ("sequences", "this many sequences at once"),
    ):
        group.add_argument(f"--{flag}", metavar="N[,N]", help=f"measure {what}, in one process")
    group.add_argument("--peer", choices=[PEER], help="measure this engine too")
    add_switch(
        group,
        "--peer-gpu",
        help="with --peer: run all its layers on a graphics card, instead of none",
    )
    add_switch(
        group, "--gate", help="with --serve or --server: exit code 1 when a target is missed"
    )
    for flags, what in (
        (
            ("--prompt-tokens", "--n-prompt", "-p"),
            "tokens of the prompt [default: 512; with --serve or --drafts 32]",
        ),
        (
            ("--decode-tokens", "--n-gen", "-n"),
            "tokens that are generated [default: 64; with --serve 32]",
        ),
        (
            ("--repeat", "--repetitions", "-r"),
            "how often each is measured [default: 5; with --drafts 4, with --serve and --server 3]",
        ),
    ):
        group.add_argument(*flags, type=whole_number, metavar="N", help=what)
    add_count(group, "--beside", 0, "run this many busy processes meanwhile")


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Measure and print; returns 0, or 2 with one line on standard error."""
    return run_tool(build_parser(prog), _run, argv)


def _run(args: argparse.Namespace) -> int:
    if args.server is None:
        load_command.refuse_load(args, build_parser())
    if args.rates is not None or args.sequences is not None:
        return _rates(args)
    if args.server is not None:
        if args.device is not None:
            raise ConfigError("--device: a server takes it from ZINC_RT_DEVICE")
        return load_command.run(args, SETTINGS)
    if args.serve:
        return _serve(args)
    if args.drafts:
        return _drafts(args)
    if args.gate:
        raise ConfigError("--gate: judges --serve and --server; ci/speed judges single requests")
    if args.plot is not None:
        check_plot(args.plot)
    report = run_benchmark(_plan(args, BenchmarkPlan), note)
    if args.plot is not None:
        write_plot(report, args.plot)
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        print(render_markdown(report) if args.markdown else render(report))
    return 0


def _serve(args: argparse.Namespace) -> int:
    """Measure many requests at once and print; returns 0, or 1 for a missed target with
    ``--gate``."""
    if args.plot is not None:
        raise ConfigError("--plot: draws the rates of single requests; leave out --serve")
    report = run_serving(_plan(args, ServingPlan), note)
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        print(render_serving(report, markdown=args.markdown))
    return int(args.gate and not all(target["met"] for target in report["targets"]))


def _rates(args: argparse.Namespace) -> int:
    """Measure prompts and sequences of several sizes and print; returns 0."""
    for other in ("server", "serve", "drafts", "peer", "gate", "plot", "markdown"):
        if getattr(args, other) not in (None, False):
            raise ConfigError(f"--{other}: does not go with --rates and --sequences")
    lengths, sequences = (_numbers(args, flag) for flag in ("rates", "sequences"))
    plan = replace(_plan(args, RatesPlan), lengths=lengths, sequences=sequences)
    report = run_rates(plan, note)
    print(json.dumps(report, indent=1) if args.json else render_rates(report))
    return 0


def _numbers(args: argparse.Namespace, flag: str) -> tuple[int, ...]:
    given = getattr(args, flag)
    words = () if given is None else given.split(",")
    if not all(
        word.isascii() and word.isdecimal() and len(word) < 10 and int(word) for word in words
    ):
        raise ConfigError(f"--{flag}: {given!r} is not a list of numbers from 1 on")
    return tuple(map(int, words))


def _drafts(args: argparse.Namespace) -> int:
    """Measure drafted tokens and print; returns 0, or 1 where an answer differs."""
    settings = resolve(args, SETTINGS)
    named = settings.get("draft_model")
    if named is not None:
        named = _model_file(args, settings, named)
    plan = replace(
        _plan(args, DraftsPlan), draft_model=named, draft=settings["draft"] or DRAFT_TOKENS
    )
    report = run_drafts(plan, progress_on())
    print(json.dumps(report, indent=1) if args.json else render_drafts(report))
    ours = [one for one in report["results"] if one["engine"] != PEER]
    return int(any(one["equal"] < one["answers"] for one in ours))


def _tiers(args: argparse.Namespace) -> tuple[str, ...]:
    """The tiers to measure, with their numbers of workers."""
    tiers = tuple(name for name in args.tiers.split(",") if name)
    if AUTO in tiers:
        with open_tier(AUTO, TierOptions(device=resolve(args, SETTINGS)["device"] or "")) as best:
            tiers = tuple(best.info.name if name == AUTO else name for name in tiers)
        args.tiers = ",".join(tiers)
    if not tiers or len(set(tiers)) != len(tiers) or PEER in tiers:
        raise ConfigError(f"--tiers: {args.tiers!r} is not a list of different tiers")
    for name in tiers:
        fixed_workers(name)
    return tiers


def _model_file(args: argparse.Namespace, settings: Settings, named: str | None) -> Path:
    """The file of a model. Raises TierUnavailable for a tier that is not there, before a missing
    file is fetched and before another tier is measured."""
    names = [name.partition(":")[0] for name in _tiers(args)]
    check_tiers(names, TierOptions(device=settings["device"] or ""))
    return resolve_model(named, settings["cache_dir"], progress_on())


def _plan(args: argparse.Namespace, kind: type[P]) -> P:
    settings = resolve(args, SETTINGS)
    usual = SERVING_SIZES if args.serve else DRAFTS_SIZES if args.drafts else SINGLE_SIZES
    for flag, value in usual.items():
        if getattr(args, flag) is None:
            setattr(args, flag, value)
    tiers = _tiers(args)
    if args.beside < 0:
        raise ConfigError("--beside: must not be negative")
    for flag in usual:
        if getattr(args, flag) < 1:
            raise ConfigError(f"--{flag.replace('_', '-')}: must be at least 1")
    if args.peer_gpu and not args.peer:
        raise ConfigError(f"--peer-gpu: which peer? Add --peer {PEER}")
    if args.peer:
        check_peer()
    return kind(
        model=_model_file(args, settings, settings["model"]),
        engines=(*tiers, args.peer) if args.peer else tiers,
        threads=settings["threads"] or processors(),
        kv_dtype=settings["kv_dtype"],
        prompt_tokens=args.prompt_tokens,
        decode_tokens=args.decode_tokens,
        repeat=args.repeat,
        beside=args.beside,
        peer_gpu=args.peer_gpu,
        device=settings["device"] or "",
    )


if __name__ == "__main__":
    sys.exit(main())
