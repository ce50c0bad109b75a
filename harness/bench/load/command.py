"""The command ``zinc-rt bench --server``."""

import argparse
import json
import signal
from functools import partial
from pathlib import Path
from types import FrameType

from contract.errors import ConfigError
from contract.processors import processors
from harness.bench.engines import PEER
from harness.bench.load.measure import ServerBench, run_server_bench
from harness.bench.load.plan import MIXES, LoadPlan
from harness.bench.load.report import draw_load_figures, render_server_bench
from harness.bench.load.servers import ServerSetup, check_peer_server
from harness.bench.plot import check_plot, save_figure
from harness.catalog import resolve_model
from harness.cli.parser import Parser, add_count, add_switch, real_number, whole_number
from harness.console import note
from harness.progress import progress_on
from harness.settings import resolve
from harness.tiers import TierOptions, check_tiers

TITLE = "load of a server"
OWN = ""
HELP = """\
--server measures what clients of a server see. Requests have lengths as
conversations have them (--mix), and each answer is streamed. --clients N send
one request after the other. --rate N sends N requests a second at random
moments, however many wait: times to the first text then count from when a
request was due.
  zinc-rt bench --server --tiers opencl --peer llama.cpp --plot load.svg
"""


def add_flags(parser: Parser) -> None:
    """Add the flags that describe a load and the server that gets it."""
    group = parser.add_argument_group(TITLE)
    parser.rare |= {"requests", "seed", "tenants", "slots", "http_cost"}
    group.add_argument(
        "--server",
        nargs="?",
        const=OWN,
        metavar="URL",
        help="send requests to this server, or without a URL to one that is started for it",
    )
    _add_load(group)
    group.add_argument(
        "--key",
        action="append",
        default=[],
        metavar="KEY",
        help="API key of a tenant. May be given several times",
    )
    group.add_argument(
        "--tenants",
        type=whole_number,
        metavar="N",
        help="tenants of the server that is started [default: 1]",
    )
    add_count(group, "--slots", 16, "slots of the server that is started")
    add_switch(group, "--http-cost", help="measure the engine without HTTP too")


def _add_load(group: argparse._ArgumentGroup) -> None:
    """Add the flags that say how many requests of which lengths are sent, and when."""
    add_count(
        group,
        "--clients",
        8,
        "clients that each wait for an answer before they send the next request",
    )
    group.add_argument(
        "--rate",
        type=real_number,
        metavar="NUMBER",
        help="requests a second, sent at random moments, instead of --clients",
    )
    add_count(group, "--requests", 48, "requests in all")
    group.add_argument(
        "--mix",
        choices=sorted(MIXES),
        default="mixed",
        help="lengths of prompts and answers [default: mixed]",
    )
    add_count(group, "--seed", 0, "start of the random numbers: the same seed is the same load")


def refuse_load(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Raise ConfigError for a flag of the load of a server where none is measured."""
    (group,) = (one for one in parser._action_groups if one.title == TITLE)
    for action in group._group_actions:
        if getattr(args, action.dest) != action.default:
            raise ConfigError(f"{action.option_strings[-1]}: is for --server; leave it out")


def run(args: argparse.Namespace, settings: tuple[str, ...]) -> int:
    """Measure and print; returns 0, or 1 for a missed target with ``--gate``. SIGTERM ends it as
    Ctrl-C does: the processes it started end and its folders are deleted."""
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        return _run(args, settings)
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _run(args: argparse.Namespace, settings: tuple[str, ...]) -> int:
    url = args.server or None
    if args.plot is not None:
        check_plot(args.plot)
    if args.key and args.tenants:
        raise ConfigError("--key is for a server that runs, --tenants for one that is started")
    tenants = len(args.key) or args.tenants or 1
    if url is not None and args.tenants:
        raise ConfigError("--tenants: a server that runs knows its own; give a --key for each")
    load = LoadPlan(args.requests, args.clients, args.rate, args.mix, args.seed, tenants)
    setup = None
    if url is None or args.peer or args.http_cost:
        setup = _setup(args, settings, tenants)
    if args.peer:
        check_peer_server()
    bench = ServerBench(
        load,
        setup,
        url,
        tuple(args.key),
        peer=args.peer == PEER,
        overhead=args.http_cost,
        repeat=args.repeat or 3,
    )
    report = run_server_bench(bench, note)
    if args.plot is not None:
        save_figure(lambda: draw_load_figures(report), args.plot)
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        print(render_server_bench(report, markdown=args.markdown))
    return int(args.gate and not all(target["met"] for target in report["targets"]))


def _setup(args: argparse.Namespace, names: tuple[str, ...], tenants: int) -> ServerSetup:
    settings = resolve(args, names)
    if "," in args.tiers:
        raise ConfigError("--tiers: a server runs on one tier")
    if args.slots < 1:
        raise ConfigError("--slots: must be at least 1")
    if ":" in args.tiers:
        raise ConfigError(f"--tiers: a server has no {args.tiers!r}; leave out the workers")
    options = TierOptions(device=settings["device"] or "")
    path: Path = resolve_model(
        settings["model"],
        settings["cache_dir"],
        progress_on(),
        before_pull=partial(check_tiers, [args.tiers], options),
    )
    threads = settings["threads"] or processors()
    return ServerSetup(path, args.tiers, threads, args.slots, tenants)
