"""``zinc-rt replay``: do again what a trace recorded, on any tier; compare the bits."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from harness.catalog import resolve_model
from harness.cli.parser import Parser, add_switch, path_argument
from harness.cli.tool import run_tool
from harness.console import note, printable, table
from harness.progress import progress_on
from harness.settings import add_flags, group_of, resolve
from harness.tiers import TierOptions, open_tier
from harness.trace.framing import RecordKind, TraceReader
from harness.trace.play import play, sensible
from harness.trace.records import ModelRecord
from reference.model.open import Model, open_model

SETTINGS = ("tier", "threads", "opencl_mode", "opencl_device", "cache_dir")
PROG = "python -m harness.replay"
DIFFERENT = 1
INCOMPLETE = 3

EXAMPLES = """\
examples:
  zinc-rt run --trace run.trace "Why is the sky blue?"    record a run
  zinc-rt replay run.trace                     replay it on the best tier here
  zinc-rt replay run.trace --tier cpu          on the tier of the definitions
  zinc-rt replay run.trace --model other/path.gguf
  zinc-rt replay run.trace --list              what is in it; replays nothing

Exit code 0: identical; 1: something differs; 2: it cannot be read or replayed;
3: what is there is identical, but the end of the trace is missing.
"""
ABOUT_TRACES = """\
A trace holds every step that a tier computed, and digests of the results. Every
tier gives the same bits, so a trace of one replays on every other. The first
step with other bytes is named: then either the tier is wrong, or memory or a
file changed during the recording."""


def build_parser(prog: str = PROG) -> Parser:
    """The flags."""
    parser = Parser(
        prog=prog,
        description="Replay a recorded run and compare every result.",
        epilog=EXAMPLES,
        appendix=ABOUT_TRACES,
    )
    parser.add_argument(
        "trace", type=path_argument, metavar="TRACE", help="a file that --trace wrote"
    )
    group_of(parser, "model").add_argument(
        "-m",
        "--model",
        action="append",
        default=[],
        metavar="NAME",
        help="a GGUF file or the name of a model; once for every model of the trace, in their "
        "order [default: the file it was recorded with]",
    )
    add_switch(
        group_of(parser, "output"), "--list", help="say what the trace holds; replay nothing"
    )
    add_flags(parser, SETTINGS)
    return parser


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """See ``build_parser``."""
    return run_tool(build_parser(prog), _opened, argv)


def _opened(args: argparse.Namespace) -> int:
    with TraceReader(args.trace) as reader:
        return _list(reader) if args.list else _replay(args, reader)


def _list(reader: TraceReader) -> int:
    counts = dict.fromkeys(RecordKind, 0)
    nbytes = dict.fromkeys(RecordKind, 0)
    models = []
    for record in reader.records():
        if record.kind is RecordKind.MODEL:
            with sensible(record):
                models.append(ModelRecord.unpack(record.payload))
        counts[record.kind] += 1
        nbytes[record.kind] += len(record.payload)
    for name, value in reader.header.items():
        print(printable(f"{name}: {value}"))
    for model in models:
        print(printable(f"model: {model.path}, SHA-256 {' '.join(model.sha256)}"))
        limits = (f"{name} {value}" for name, value in model.limits.items())
        print(printable(f"limits: {', '.join(limits)}"))
    rows = [(k.name.lower(), f"{counts[k]:,}", f"{nbytes[k]:,}") for k in RecordKind if counts[k]]
    print(table([("RECORD", "COUNT", "BYTES"), *rows], right=(1, 2)))
    if not reader.whole:
        note("note: the end of the trace is missing; the recording was cut off")
    return 0


def _replay(args: argparse.Namespace, reader: TraceReader) -> int:
    settings = resolve(args, SETTINGS)
    options = TierOptions(
        threads=settings["threads"],
        opencl_mode=settings["opencl_mode"],
        opencl_device=settings["opencl_device"],
        note=note,
    )
    with ExitStack() as files, open_tier(settings["tier"], options) as tier:

        def open_it(number: int, traced: ModelRecord) -> Model:
            named = args.model[number] if number < len(args.model) else traced.path
            model = open_model(resolve_model(named, settings["cache_dir"], pull_missing=False))
            files.callback(model.file.close)
            return model

        replayed = play(reader, open_it, tier, progress_on())
        where = f"{tier.info.name} ({tier.info.device})"
    recorded = f"{reader.header.get('tier')} ({reader.header.get('device')})"
    if replayed.difference is not None:
        print(printable(f"DIFFERENT: {replayed.difference}"))
        print(printable(f"recorded on {recorded}, replayed on {where}"))
        return DIFFERENT
    count = f"{replayed.submissions:,} submissions, {replayed.compared:,} results"
    summary = f"{count}, recorded on {recorded}, replayed on {where}"
    if not replayed.whole:
        print(printable(f"NOT WHOLE: {replayed.missing}; identical as far as it goes: {summary}"))
        return INCOMPLETE
    print(printable(f"identical: {summary}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
