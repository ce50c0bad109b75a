"""``python -m harness.conformance``: run the must-pass list on a device, or verify a package."""

import argparse
import hashlib
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from contract.errors import ConfigError, ZincError, system_words
from harness.catalog import DEFAULT_ID, resolve_model
from harness.cli.outputs import check_output
from harness.cli.parser import Parser, add_file, add_switch
from harness.cli.tool import run_tool
from harness.conformance.cases import known_cases
from harness.conformance.must_pass import digest_lines, load_must_pass, must_pass_ids
from harness.conformance.package import write_archive
from harness.conformance.run import FAIL, PASS, STATUSES, conformance_package
from harness.conformance.verify import verify_package
from harness.conformance.waivers import parse_waivers
from harness.console import table
from harness.progress import progress_on
from harness.settings import add_flags, group_of, resolve
from harness.tiers import TierOptions, open_tier

SETTINGS = ("cache_dir", "threads", "device")
QUICK_STRIDE = 25
"""A quick run takes one case in this many of the list."""
FAILURES_SHOWN = 10
WAIVER_BYTES_MAX = 1 << 20

EXAMPLES = """\
examples:
  zinc-rt conformance --tier native --quick     a few of the cases, to try
  zinc-rt conformance --tier opencl --out package.tar.gz
  zinc-rt conformance --verify package.tar.gz

Exit code 0: conformant; 1: not conformant; 2: it could not be run or read.
"""
PROG = "python -m harness.conformance"


def build_parser(prog: str = PROG) -> Parser:
    """The flags."""
    parser = Parser(
        prog=prog,
        description="Run every must-pass case on a device and write an archive of the results, or "
        "judge such an archive. One of --tier, --verify, --list and --digests is needed.",
        epilog=EXAMPLES,
    )
    parser.rare |= {"digests", "must_pass", "waivers"}
    action = group_of(parser, "measurement").add_mutually_exclusive_group(required=True)
    action.add_argument("--tier", metavar="NAME", help="run the cases on this tier")
    add_file(action, "--verify", help="judge this archive")
    add_switch(action, "--list", help="print the name of every case")
    add_switch(action, "--digests", help="print a count and a digest of the cases per opcode")
    group = group_of(parser, "input")
    add_file(group, "--must-pass", help="names of the cases to run [default: all of --list]")
    add_file(group, "--waivers", help="failures that are accepted, in TOML")
    add_switch(
        group,
        "--quick",
        help=f"run one case in {QUICK_STRIDE} only; such an archive is not conformant",
    )
    add_file(
        group_of(parser, "output"),
        "--out",
        help="the archive to write [default: conformance-NAME.tar.gz]",
    )
    add_flags(parser, SETTINGS)
    return parser


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run the command line; see ``build_parser``."""
    return run_tool(build_parser(prog), _chosen, argv)


def _chosen(args: argparse.Namespace) -> int:
    """Do the one thing that the flags name; returns the exit code."""
    if args.tier is None:
        _refuse_unused(args)
    if args.list:
        print("\n".join(must_pass_ids()))
        return 0
    if args.digests:
        for group, line in digest_lines(must_pass_ids()).items():
            print(group, line)
        return 0
    if args.verify is None:
        return _run(args)
    verdict = verify_package(args.verify, load_must_pass(args.must_pass))
    print("\n".join(verdict.lines()))
    return 0 if verdict.conformant else 1


def _refuse_unused(args: argparse.Namespace) -> None:
    """Raise ConfigError for a flag that has no effect without a run."""
    action = next(name for name in ("verify", "list", "digests") if getattr(args, name))
    for name in ("must_pass", "waivers", "quick", "out", *SETTINGS):
        if getattr(args, name) and (action, name) != ("verify", "must_pass"):
            raise ConfigError(
                f"--{name.replace('_', '-')}: has no effect with --{action}; leave it out"
            )


def _run(args: argparse.Namespace) -> int:
    settings = resolve(args, SETTINGS)
    out = args.out or Path(f"conformance-{args.tier}.tar.gz")
    check_output("--out", out, args.must_pass, args.waivers)
    waivers = _waivers(args.waivers)
    known = known_cases(_default_model(settings["cache_dir"]))
    chosen = load_must_pass(args.must_pass)
    for name in chosen:
        if name not in known:
            raise ConfigError(f"--must-pass: this source has no case {name}; see --list")
    if args.must_pass is None:
        chosen = (*chosen, *(name for name in known if name not in set(chosen)))
    if args.quick:
        chosen = chosen[::QUICK_STRIDE]
    archive, results = conformance_package(
        partial(open_tier, args.tier, TierOptions(settings["threads"], settings["device"])),
        {name: known[name] for name in chosen},
        waivers,
        quick=args.quick,
        progress=progress_on(),
    )
    write_archive(out, archive)
    failed = [result for result in results if result.status == FAIL]
    for result in failed[:FAILURES_SHOWN]:
        print(f"FAIL {result.case}: {result.findings[0]}")
    rows = [(status, str(sum(r.status == status for r in results))) for status in STATUSES]
    print(table([("STATUS", "CASES"), *rows], right=(1,)))
    print(f"{out}, SHA-256 {hashlib.sha256(archive).hexdigest()}")
    if all(result.status == PASS for result in results) and len(chosen) < len(known):
        print("all passed, but not every case ran: this is no submission")
    return 1 if failed else 0


def _waivers(path: Path | None) -> str:
    """The text of the waivers file, checked before the device is opened."""
    if path is None:
        return ""
    try:
        if path.stat().st_size > WAIVER_BYTES_MAX:
            raise ConfigError(f"{path}: larger than {WAIVER_BYTES_MAX:,} bytes")
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {system_words(error)}") from None
    parse_waivers(text, str(path))
    return text


def _default_model(cache_dir: Path) -> Path | None:
    """The default model's file if it is on disk."""
    try:
        return resolve_model(DEFAULT_ID, cache_dir, pull_missing=False)
    except ZincError:
        return None


if __name__ == "__main__":
    sys.exit(main())
