"""``python -m harness.bench gate``: ratios of speeds measured here and now, against stored ones.

Only ratios of two times taken in turn are judged: a slow or busy machine moves both. They still
depend on the kind of machine, so a baseline is of one processor, number of cores and set of
devices, and there is no verdict on a machine without one. Nor does a ratio fail while other
processes take the cores: kernels whose workers wait for each other suffer more than others do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract.errors import ConfigError, ZincError
from harness.bench.machine import machine_facts
from harness.bench.ratios import MEASUREMENTS, Measured, measure_ratios
from harness.console import note, table
from harness.goldens import FOLDER
from harness.synth import sized_spec, write_synthetic
from harness.tiers import probe

BASELINE = FOLDER / "speed.json"
REPETITIONS = 5
"""Interleaved measurements whose median is one ratio."""
ATTEMPTS = 3
LEAST_SHARE = 0.6
"""A ratio below this share of the stored one, in every attempt, is a regression."""

OTHERS_MOST = 0.1
"""Share of the cores other processes may use in a measurement that speaks against a ratio."""
PASSED, FAILED, UNDECIDED = "ok", "REGRESSION", "UNDECIDED, machine busy"
EXIT_CODES = {PASSED: 0, UNDECIDED: 2, FAILED: 1}

Ratios = Mapping[str, float]
Measure = Callable[[Sequence[str]], Mapping[str, Measured]]
"""Ratios by name, of the names asked for."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One ratio: the stored value, and what the attempts gave until one was good enough."""

    name: str
    stored: float
    attempts: tuple[Measured, ...]

    @property
    def best(self) -> float:
        """The highest attempt."""
        return max(attempt.ratio for attempt in self.attempts)

    @property
    def verdict(self) -> str:
        """PASSED when some attempt came near enough, FAILED when none did on quiet cores."""
        if self.best >= LEAST_SHARE * self.stored:
            return PASSED
        quiet = all(attempt.others <= OTHERS_MOST for attempt in self.attempts)
        return FAILED if quiet else UNDECIDED


def judge(stored: Ratios, measure: Measure) -> list[Judged]:
    """Measure until every ratio was good enough once, ATTEMPTS times at most."""
    found: dict[str, tuple[Measured, ...]] = dict.fromkeys(stored, ())
    pending = list(stored)
    for _ in range(ATTEMPTS):
        if not pending:
            break
        measured = measure(pending)
        for name in pending:
            found[name] += (measured[name],)
        pending = [
            name for name in pending if Judged(name, stored[name], found[name]).verdict != PASSED
        ]
    return [Judged(name, stored[name], attempts) for name, attempts in found.items()]


def this_machine() -> dict[str, Any]:
    """What a baseline belongs to: processor, cores, and the device of every tier that runs."""
    facts = machine_facts()
    devices = {status.name: status.device for status in probe() if status.available}
    return {"cpu": facts["cpu"], "cores": facts["cores"], "devices": devices}


def load_baselines(path: Path) -> list[dict[str, Any]]:
    """The stored baselines; none when there is no file. Raises ConfigError for a damaged one."""
    if not path.exists():
        return []
    try:
        baselines = json.loads(path.read_text(encoding="utf-8"))["baselines"]
        for baseline in baselines:
            valid = {name: float(value) for name, value in baseline["ratios"].items()}
            if not baseline["machine"] or not valid or min(valid.values()) <= 0:
                raise ValueError("a baseline without machine or without positive ratios")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: is no file of baselines ({error})") from None
    return list(baselines)


def find_baseline(path: Path, machine: Mapping[str, Any]) -> dict[str, Any] | None:
    """The baseline of this kind of machine."""
    return next((b for b in load_baselines(path) if b["machine"] == machine), None)


def store_baseline(path: Path, machine: Mapping[str, Any], ratios: Ratios, reason: str) -> None:
    """Write or replace the baseline of one kind of machine; the others stay."""
    if not reason.strip():
        raise ConfigError("gate: an update needs --reason TEXT")
    others = [b for b in load_baselines(path) if b["machine"] != machine]
    shown = {name: float(f"{value:.4g}") for name, value in ratios.items()}
    entry = {"reason": reason, "machine": dict(machine), "ratios": shown}
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(json.dumps({"baselines": [*others, entry]}, indent=1) + "\n")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.bench gate",
        description="Measure ratios of speeds on a small random-weight model and compare them with "
        f"the stored ones. A ratio fails below {LEAST_SHARE} of the stored one in all of "
        f"{ATTEMPTS} attempts. Exit code 0: none failed; 1: some did; 2: no baseline, a machine "
        "too busy to tell, or an error.",
    )
    parser.add_argument("--update", action="store_true", help="store this machine's ratios")
    parser.add_argument("--reason", default="", help="why they change; needed by --update")
    parser.add_argument("--baseline", type=Path, default=BASELINE, metavar="FILE")
    parser.add_argument("--size", default="small", help="of the model; see harness.synth")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """See ``build_parser``."""
    args = build_parser().parse_args(argv)
    try:
        if args.update and not args.reason.strip():
            raise ConfigError("gate: an update needs --reason TEXT")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "gate.gguf"
            write_synthetic(path, sized_spec(args.size, architecture="llama", quant="q4_k_m"))
            return _run(args, path)
    except ZincError as error:
        note(f"error: {error}")
        return error.exit_code


def _run(args: argparse.Namespace, model: Path) -> int:
    machine = this_machine()

    def measure(names: Sequence[str]) -> Mapping[str, Measured]:
        return measure_ratios(model, names, REPETITIONS, note)

    here = [name for name, (tier, _) in MEASUREMENTS.items() if tier in machine["devices"]]
    if args.update:
        ratios = _undisturbed(here, measure)
        store_baseline(args.baseline, machine, ratios, args.reason)
        print(table([(name, f"{value:.3g}") for name, value in ratios.items()], right=(1,)))
        return 0
    baseline = find_baseline(args.baseline, machine)
    if baseline is None:
        about = f"{machine['cpu']}, {machine['cores']} cores, {', '.join(machine['devices'])}"
        raise ConfigError(
            f"{args.baseline}: no baseline for this machine ({about}); "
            "store one with --update --reason TEXT"
        )
    if set(baseline["ratios"]) != set(here):
        raise ConfigError(f"{args.baseline}: holds other ratios than this source measures; update")
    judged = judge(baseline["ratios"], measure)
    rows = [("RATIO", "STORED", "BEST", "ATTEMPTS", "")]
    rows += [
        (j.name, f"{j.stored:.3g}", f"{j.best:.3g}", str(len(j.attempts)), j.verdict)
        for j in judged
    ]
    print(table(rows, right=(1, 2, 3)))
    verdicts = {j.verdict for j in judged}
    return next(EXIT_CODES[v] for v in (FAILED, UNDECIDED, PASSED) if v in verdicts)


def _undisturbed(names: Sequence[str], measure: Measure) -> Ratios:
    """For each ratio the middle of ATTEMPTS measurements: neither luck nor bad luck is stored."""
    attempts = [measure(names) for _ in range(ATTEMPTS)]
    others = max(found.others for attempt in attempts for found in attempt.values())
    if others > OTHERS_MOST:
        raise ConfigError(
            f"gate: other processes use {others:.0%} of the cores; nothing is stored, "
            "try again on a quiet machine"
        )
    return {n: statistics.median_low(a[n].ratio for a in attempts) for n in names}


if __name__ == "__main__":
    sys.exit(main())
