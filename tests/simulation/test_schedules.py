"""The engine under thousands of simulated schedules, and that they reach what is rare."""

import os
import subprocess
import sys

import pytest

from contract.errors import ConfigError
from contract.types import Request
from harness import adversary_test, mem_test, sched_test
from harness.sched_test import main
from harness.simulation import run
from harness.simulation.generate import MEMORY, SCHEDULER, Profile, generate
from harness.simulation.invariants import Invariant
from harness.simulation.run import SimulationReport, run_schedules, shrink
from harness.simulation.schedule import (
    Arrive,
    KeptAction,
    Schedule,
    format_actions,
    keep,
    parse_actions,
)
from tests.full_disk import largest_file
from tests.needs import machine_lacks
from tests.simulation.controls import a_waiting_request_is_lost

JOBS = 1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1)
"""Where tests run beside each other, processes of their own only take time to begin."""
PARTS = ((0, 40), pytest.param(40, 60, marks=pytest.mark.long))
"""The first schedule of a test, and how many."""
RARE = (
    *("cancels", "ended client_too_slow", "ended error", "ended length", "ended stop", "faults"),
    *("guesses right", "guesses wrong", "idle steps", "logits", "logs", "masks"),
    *("models unloaded", "no room", "preemptions", "prefix copied", "prefix evicted"),
    *("prefix restored", "prefix spilled", "prefix tokens_hit", "queue full", "refused"),
    *("restarts", "stalls"),
)


def nothing_broken(profile: Profile, first: int, count: int) -> SimulationReport:
    """The report of so many schedules; a failure says how to play it again."""
    report = run_schedules(profile, first, count, jobs=JOBS)
    if report.failure is not None:
        seed, message = report.failure
        pytest.fail(f"python -m harness.{profile.name}_test --schedules 1 --seed {seed}: {message}")
    assert report.schedules == count
    return report


def everything_happens(report: SimulationReport) -> None:
    """What is rare in service is not so here."""
    assert report.counts["steps"] > 90 * report.schedules
    for what in RARE:
        assert report.counts[what] > 0.005 * report.schedules, f"{what} hardly ever happens"


@pytest.mark.parametrize(("first", "count"), PARTS)
@pytest.mark.parametrize("profile", [SCHEDULER, MEMORY], ids=["scheduler", "few pages"])
def test_nothing_breaks(profile, first, count):
    """So many schedules of about 100 steps each."""
    everything_happens(nothing_broken(profile, first, count))


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("profile", "first"), [(SCHEDULER, 100_000), (MEMORY, 100_000)])
def test_nothing_breaks_for_long(profile, first):
    """100,000 schedules in all."""
    nothing_broken(profile, first, 50_000)


def test_another_process_sees_the_same():
    """Nothing depends on the order of hashes, on addresses or on time."""
    digests = set()
    for hashes in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-m", "harness.sched_test", "--schedules", "3", "--jobs", "1"],
            env={**os.environ, "PYTHONHASHSEED": hashes}, capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        digests.add(next(line for line in done.stdout.splitlines() if "log digest" in line))
    here = run_schedules(SCHEDULER, 0, 3, jobs=1)
    assert digests == {f"3 schedules, log digest {here.digest:032x}"}


def test_a_seed_is_a_schedule():
    assert generate(5) == generate(5)
    assert generate(5) != generate(6)
    assert generate(5, MEMORY) != generate(5, SCHEDULER)


def test_processes_share_the_work_and_change_nothing(monkeypatch):
    monkeypatch.setattr(run, "BATCH", 3)
    assert run_schedules(MEMORY, 7, 14, jobs=2) == run_schedules(MEMORY, 7, 14, jobs=1)


def test_the_first_failure_is_reported(monkeypatch, capsys):
    """As one line that plays its smallest form again, with exit code 1 each time."""
    a_waiting_request_is_lost(monkeypatch)
    assert main(["--schedules", "30", "--seed", "1", "--jobs", "1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("FAIL seed ") and "LIVENESS" in line for line in lines)
    line = lines[-1].removeprefix("reproduce: python -m harness.sched_test ")
    arguments = line.split()
    kept = parse_actions(arguments[arguments.index("--keep") + 1])
    # The engine loses every fifth request, so there must be five.
    assert len(kept) == 5
    assert main(arguments) == 1
    assert "LIVENESS" in capsys.readouterr().out
    monkeypatch.undo()
    assert main([*arguments, "--log"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("Arrive(") == 5
    assert "nothing broken" in printed


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--schedules", "0"], "--schedules: must be at least 1"),
        (["--keep", "1"], "one schedule"),
        (["--schedules", "1", "--keep", "1;2"], "--keep: '1;2' is not ACTION"),
        (["--schedules", "1", "--keep", "99999"], "there is no action 99999"),
    ],
)
def test_bad_flags(arguments, problem, capsys):
    assert main(arguments) == 2
    assert problem in capsys.readouterr().err


def test_help_teaches(capsys):
    with pytest.raises(SystemExit, match="0"):
        mem_test.main(["--help-all"])
    printed = capsys.readouterr().out
    assert all(invariant.name in printed for invariant in Invariant)
    assert "--seed 1" in printed


@pytest.mark.parametrize("room", [0, 16])
@pytest.mark.parametrize(
    "tool", [sched_test, mem_test, adversary_test], ids=lambda tool: tool.__name__
)
def test_locks_without_room_are_said_where_they_are(capsys, tool, room):
    """A lock of several processes is a file of 32 bytes. One process needs none."""
    if sys.platform != "linux":
        machine_lacks("Linux, on which locks are files")
    words = ["--schedules", "1", "--seed", "1", "--jobs"]
    with largest_file(room):
        assert tool.main([*words, "2"]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith("error: no room for locks of several processes")
        assert all(part in said for part in ("df -h /dev/shm", "--shm-size", "--jobs 1"))
        assert "Error" not in said
        assert tool.main([*words, "1"]) == 0


def test_what_is_kept_can_be_written_and_read():
    kept = (
        KeptAction(3), KeptAction(5, None, 0), KeptAction(7, 12), KeptAction(8, 1, 2),
    )  # fmt: skip
    assert format_actions(kept) == "3,5//0,7/12,8/1/2"
    assert parse_actions(format_actions(kept)) == kept
    for wrong in ("", "x", "1/2/3/4", "-1", "/1", "1,,2"):
        with pytest.raises(ConfigError, match="--keep"):
            parse_actions(wrong)


def _arrivals(schedule: Schedule) -> list[Request]:
    return [action.request for action in schedule.actions if isinstance(action, Arrive)]


def _two_long_ones(schedule: Schedule) -> bool:
    return sum(len(request.prompt) > 6 for request in _arrivals(schedule)) >= 2


def _many_tokens(schedule: Schedule) -> bool:
    return sum(request.max_tokens for request in _arrivals(schedule)) > 40


def test_shrinking_deletes_and_shortens():
    """Nothing is left that is not needed to fail."""
    schedule = next(s for s in map(generate, range(99)) if _two_long_ones(s))
    smaller = keep(schedule, shrink(schedule, _two_long_ones))
    assert len(smaller.actions) == 2
    assert [(len(r.prompt), r.max_tokens) for r in _arrivals(smaller)] == [(7, 0), (7, 0)]
    schedule = next(s for s in map(generate, range(99)) if _many_tokens(s))
    smaller = keep(schedule, shrink(schedule, _many_tokens))
    assert sum(request.max_tokens for request in _arrivals(smaller)) == 41
    assert {len(request.prompt) for request in _arrivals(smaller)} == {1}
