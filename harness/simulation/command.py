"""The command line of ``python -m harness.sched_test``, ``harness.mem_test`` and
``harness.adversary_test``."""

import argparse
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from contract.errors import ConfigError
from contract.processors import processors
from harness.cli.parser import Parser, add_count, add_switch, whole_number
from harness.cli.tool import run_tool
from harness.console import note, table
from harness.progress import progress_on
from harness.settings import group_of
from harness.simulation import run
from harness.simulation.drive import Outcome, Simulation
from harness.simulation.generate import Profile, generate
from harness.simulation.invariants import Invariant
from harness.simulation.model import MODEL_VOCAB
from harness.simulation.schedule import keep, parse_actions

DEFAULT_SCHEDULES = 1000
DESCRIPTION = (
    "A schedule is drawn from its seed: the sizes of an engine, its tenants and requests, and what "
    "happens to them and when. It is played on the real engine, scheduler and page pool in virtual "
    "time, on a runner without a model, which knows the tokens of every page."
)
EPILOG = """\
examples:
  {prog} --schedules 10000 --seed 1

A failure ends with one line that plays its smallest form again; add --log to it
to see every decision and event.
Exit code 0: no invariant is broken; 1: one is; 2: it could not be run.
"""


def build_parser(purpose: str, prog: str) -> Parser:
    """The parser, whose help explains the simulation to a new reader."""
    invariants = "\n".join(
        textwrap.fill(
            f"{i.name:<23} {i.value}", 78, initial_indent="  ", subsequent_indent=" " * 26
        )
        for i in Invariant
    )
    parser = Parser(
        prog=prog,
        description=f"{purpose} {DESCRIPTION}",
        epilog=EPILOG.format(prog=prog),
        appendix=f"Checked with every step or at the end:\n{invariants}",
    )
    group = group_of(parser, "input")
    parser.rare |= {"keep", "jobs"}
    add_count(group, "--schedules", DEFAULT_SCHEDULES, "number of schedules, with rising seeds")
    add_count(group, "--seed", 0, "the first seed")
    add_switch(
        group,
        "--model",
        help="play on a tiny real model, a hundred times slower: tokens and logits must have the "
        "bits of each request alone",
    )
    group.add_argument(
        "--keep",
        metavar="ACTION[/PROMPT[/TOKENS]][,...]",
        help="play only these actions of one schedule, with shorter lengths: what a failure prints",
    )
    group_of(parser, "device").add_argument(
        "--jobs",
        type=whole_number,
        default=processors(),
        metavar="N",
        help="processes; the result is the same with any number [default: one per core]",
    )
    add_switch(
        group_of(parser, "output"), "--log", help="print the actions and the log of one schedule"
    )
    return parser


@dataclass(frozen=True, slots=True)
class SimulationTool:
    """The command ``prog``, which plays schedules of a ``profile``; its help begins with
    ``purpose``."""

    prog: str
    purpose: str
    profile: Profile

    def build_parser(self, prog: str | None = None) -> Parser:
        """The parser of the command, which may be called otherwise."""
        return build_parser(self.purpose, prog or self.prog)

    def main(self, argv: Sequence[str] | None = None, prog: str | None = None) -> int:
        """Run the command; returns its exit code."""
        return run_tool(self.build_parser(prog), self._run, argv)

    def _run(self, args: argparse.Namespace) -> int:
        _check(args)
        chosen = self.profile
        if args.model:
            chosen = replace(chosen, vocab=MODEL_VOCAB, model=True)
        if args.keep is not None or args.log:
            return _play_one(chosen, args)
        return _play_all(chosen, args)


def _check(args: argparse.Namespace) -> None:
    for flag, low in (("schedules", 1), ("seed", 0), ("jobs", 1)):
        if getattr(args, flag) < low:
            raise ConfigError(f"--{flag}: must be at least {low}")
    if (args.keep is not None or args.log) and args.schedules != 1:
        raise ConfigError("--keep and --log are about one schedule; add --schedules 1")


def _play_one(profile: Profile, args: argparse.Namespace) -> int:
    schedule = generate(args.seed, profile)
    if args.keep is not None:
        schedule = keep(schedule, parse_actions(args.keep))
    with run.worlds_of(profile, schedule) as worlds:
        simulation = Simulation(schedule, worlds)
        outcome = simulation.play()
    if args.log:
        for part in (schedule.shape, *schedule.tenants, *schedule.actions, *simulation.log):
            print(part)
    return _verdict(outcome, args.seed)


def _verdict(outcome: Outcome, seed: int) -> int:
    if outcome.violation is None:
        print(f"seed {seed}: nothing broken, log {outcome.log_hash}")
        return 0
    print(f"seed {seed}: {outcome.violation}")
    return 1


def _play_all(profile: Profile, args: argparse.Namespace) -> int:
    report = run.run_schedules(
        profile, args.seed, args.schedules, jobs=args.jobs, progress=progress_on()
    )
    rows = [(name, f"{count:,}") for name, count in sorted(report.counts.items())]
    print(table([("HAPPENED", "TIMES"), *rows], right=(1,)))
    print(f"{report.schedules:,} schedules, log digest {report.digest:032x}")
    if report.failure is None:
        print("nothing broken")
        return 0
    seed, message = report.failure
    print(f"FAIL seed {seed}: {message}")
    _explain(profile, seed)
    return 1


def _explain(profile: Profile, seed: int) -> None:
    """Shrink a failing schedule and print the command that reproduces it."""
    violation = run.play_seed(profile, seed, twice=True).violation
    if violation is None or violation.invariant in run.NOT_IN_A_SCHEDULE:
        print(f"reproduce: {run.reproducing_line(profile, seed, None)}")
        return
    note("shrinking ...")
    kept, violation = run.smallest(profile, seed, violation)
    print(f"shrunk: {violation}")
    print(f"reproduce: {run.reproducing_line(profile, seed, kept)}")
