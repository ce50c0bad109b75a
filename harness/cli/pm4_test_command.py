"""``zinc-rt pm4-test``: tests every packet the AMD tiers send on this machine's GPU and kernel."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.errors import system_errors_as
from harness.cli.parser import add_file
from harness.settings import group_of

if TYPE_CHECKING:
    from accel.amd.tools.trace import Trace

EPILOG = """\
examples:
  zinc-rt pm4-test                              through amdkfd
  zinc-rt pm4-test --tier t2                    through user queues
  zinc-rt pm4-test --device simulated           without a GPU
  zinc-rt pm4-test --record card.trace          and record packets and memory
  zinc-rt pm4-test --replay card.trace          repeat them on the simulated GPU
  zinc-rt pm4-test --list card.trace            show them

A tier runs the same tests whenever it opens, and does not start when one fails.
A replay compares the memory after every submission with the recorded one.
"""


def add_parser(subparsers: Any) -> None:
    """Add the ``pm4-test`` command; its parser sets ``func(args) -> exit code``."""
    text = "test every packet that the AMD tiers send to a card"
    parser = subparsers.add_parser("pm4-test", help=text, description=text, epilog=EPILOG)
    device = group_of(parser, "device")
    device.add_argument("--tier", choices=("t1", "t2"), default="t1", help="the tier [default: t1]")
    device.add_argument(
        "--device", default="", metavar="NAME", help="part of a GPU's name, or simulated"
    )
    add_file(group_of(parser, "output"), "--record", help="write a trace")
    group = group_of(parser, "input").add_mutually_exclusive_group()
    add_file(group, "--replay", help="repeat a trace")
    add_file(group, "--list", help="show the packets of a trace")
    parser.set_defaults(func=pm4_test)


def pm4_test(args: argparse.Namespace) -> int:
    """Print a line for every test, or a trace; returns 1 if a result differs."""
    if args.replay is not None or args.list is not None:
        return _trace(args.replay or args.list, args.replay is not None)
    from harness.amd_card import system, try_packets

    kernel, requested = system(args.device)
    record = args.record is not None
    passed, trace = try_packets(args.tier, kernel, requested, print, record)
    if record:
        _save(trace, args.record)
    return int(not passed)


def _save(trace: Trace, path: Path) -> None:
    with system_errors_as(str(path)):
        trace.save(path)
    print(f"{path}: {len(trace.submissions)} submissions")


def _trace(path: Path, go_through: bool) -> int:
    from accel.amd.tools.trace import listing, load_trace, replay

    with system_errors_as(str(path)):
        trace = load_trace(path)
    print(f"{trace.tier} on {trace.device}: {len(trace.submissions)} submissions")
    if not go_through:
        print("\n".join(listing(trace)))
        return 0
    found = replay(trace)
    if found is None:
        print("replayed on the simulated GPU: every byte is the same")
        return 0
    print(f"differs after submission {found.submission}: {found.problem}")
    return 1
