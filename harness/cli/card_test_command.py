"""``zinc-rt card-test``: tests a card and writes an archive of the results to send."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from harness.cli.outputs import check_output
from harness.cli.parser import add_file, add_switch, path_argument
from harness.settings import group_of

AMD_TIERS = ("t1", "t2")
TIERS = (*AMD_TIERS, "intel")
EPILOG = """\
examples:
  zinc-rt card-test                          AMD: both tiers; writes card.tar.gz
  zinc-rt card-test --tier t1 --quick        one case in 25, on one tier
  zinc-rt card-test --tier intel             a card of Intel's
  zinc-rt card-test --device simulated --quick     without a card

Exit code 0: every tier that opens passes everything; 1: something differs, or
no tier opens the card: the archive says why. Without a card nothing is written.
"""


def add_parser(subparsers: Any) -> None:
    """Add the ``card-test`` command; its parser sets ``func(args) -> exit code``."""
    text = "test a card of AMD's or Intel's and write an archive of the results to send"
    parser = subparsers.add_parser("card-test", help=text, description=text, epilog=EPILOG)
    device = group_of(parser, "device")
    device.add_argument("--tier", choices=TIERS, help="test one tier only [default: t1 and t2]")
    device.add_argument(
        "--device", default="", metavar="NAME", help="part of a GPU's name, or simulated"
    )
    group_of(parser, "output").add_argument(
        "--out",
        type=path_argument,
        default=Path("card.tar.gz"),
        metavar="FILE",
        help="the archive to write [default: card.tar.gz]",
    )
    group = group_of(parser, "input")
    add_switch(group, "--quick", help="run one case in 25 only")
    add_file(
        group,
        "--must-pass",
        help="names of the cases to run [default: all of `zinc-rt conformance --list`]",
    )
    parser.set_defaults(func=card_test)


def card_test(args: argparse.Namespace) -> int:
    """Print the results, then write the archive."""
    from harness.amd_card import Card, examine
    from harness.best_tier import AMD, INTEL, card_makers, lists_cards
    from harness.conformance.package import write_archive
    from harness.tiers import SIMULATED

    check_output("--out", args.out, args.must_pass)
    tiers = (args.tier,) if args.tier else AMD_TIERS
    maker, name = (INTEL, "Intel") if args.tier == "intel" else (AMD, "AMD")
    options: dict[str, str | None] = {"--quick": None} if args.quick else {}
    if args.must_pass is not None:
        options["--must-pass"] = str(args.must_pass)
    present = args.device == SIMULATED or not lists_cards() or maker in card_makers()
    card = Card(print)
    try:
        examine(card, tiers, args.device, options)
    finally:
        if present:
            write_archive(args.out, card.archive())
    if not present:
        print(f"this machine has no {name} card: nothing is written")
        return 1
    print(f"{args.out}: send this file")
    return int(bool(card.failed) or len(card.absent) == len(tiers))
