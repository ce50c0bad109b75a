"""The speed gate: compares ratios of speeds measured now with stored ones (``ci/speed``).

It compares only ratios of two times measured in turn, which a slow or busy machine changes both.
Ratios still depend on the kind of machine, so a baseline belongs to one processor, number of cores
and set of devices; without a baseline there is no verdict. There is none either while other
processes use the cores: run it on an idle machine."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contract.errors import ConfigError
from harness.bench.machine import machine_facts
from harness.goldens import FOLDER
from harness.tiers import probe
from tests.bench.ratios import MEASUREMENTS, Measured

BASELINE = FOLDER / "speed.json"
ATTEMPTS = 3
MIN_SHARE = 0.85
"""A ratio below this share of the stored one in every attempt is a regression."""
OTHERS_MOST = 0.1
"""Most share of the cores that other processes may use in a valid measurement."""

Ratios = Mapping[str, float]


def complaint(stored: float, attempts: Sequence[Measured]) -> str:
    """The complaint about ``attempts`` (at least one); empty when one is good enough."""
    best = max(attempt.ratio for attempt in attempts)
    if best >= MIN_SHARE * stored:
        return ""
    busiest = max(attempt.others for attempt in attempts)
    if busiest > OTHERS_MOST:
        return (
            f"no verdict: other processes use {busiest:.0%} of the cores; run it on an idle machine"
        )
    return f"{best:.3g} is {best / stored:.0%} of the stored {stored:.3g}, at least " + (
        f"{MIN_SHARE:.0%} are asked for"
    )


def stored_ratio(path: Path, machine: Mapping[str, Any], name: str) -> float:
    """The stored ratio of this kind of machine. Raises ConfigError that explains how to store
    one."""
    baseline = find_baseline(path, machine)
    if baseline is None or name not in baseline["ratios"]:
        about = f"{machine['cpu']}, {machine['cores']} cores, {', '.join(machine['devices'])}"
        raise ConfigError(
            f"{path}: no {name} of this kind of machine ({about}); on an idle one, "
            'ci/speed --store-ratios "REASON" stores it'
        )
    return float(baseline["ratios"][name])


def ratios_here(machine: Mapping[str, Any]) -> list[str]:
    """The names of the ratios that this machine's tiers can measure."""
    return [name for name, (tier, _) in MEASUREMENTS.items() if tier in machine["devices"]]


def this_machine() -> dict[str, Any]:
    """The key of a baseline: processor, cores, and the device of every tier that runs."""
    facts = machine_facts()
    devices = {status.name: status.device for status in probe() if status.available}
    return {"cpu": facts["cpu"], "cores": facts["cores"], "devices": devices}


def load_baselines(path: Path) -> list[dict[str, Any]]:
    """The stored baselines; empty when there is no file. Raises ConfigError for a damaged file."""
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
    """The baseline of this kind of machine, or None."""
    return next((b for b in load_baselines(path) if b["machine"] == machine), None)


def store_ratio(
    path: Path, machine: Mapping[str, Any], name: str, measured: Measured, reason: str
) -> None:
    """Store one ratio of one kind of machine, with the reason. Raises ConfigError, also for a ratio
    measured while other processes used the cores."""
    if not reason.strip():
        raise ConfigError("a ratio is stored with a reason: --store-ratios TEXT")
    if measured.others > OTHERS_MOST:
        raise ConfigError(
            f"other processes use {measured.others:.0%} of the cores; nothing is stored, "
            "try again on an idle machine"
        )
    baselines = load_baselines(path)
    entry = next((b for b in baselines if b["machine"] == machine), None)
    if entry is None:
        entry = {"reason": "", "machine": dict(machine), "ratios": {}}
        baselines.append(entry)
    entry["reason"] = reason
    entry["ratios"][name] = float(f"{measured.ratio:.4g}")
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(json.dumps({"baselines": baselines}, indent=1) + "\n")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
