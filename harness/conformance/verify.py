"""Verifies a package: complete, made with these definitions, and without a failure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract.errors import ConfigError
from harness.conformance.cases import DEFAULT_MODEL_CASE
from harness.conformance.identity import definition_facts, source_facts
from harness.conformance.package import unpack
from harness.conformance.run import PASS, STATUSES
from harness.conformance.waivers import find_waiver, parse_waivers


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a package: ``reasons`` are why it is not conformant; ``notes`` are remarks."""

    device: str
    cases: int
    waived: int
    reasons: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def conformant(self) -> bool:
        """Whether there are no reasons against it."""
        return not self.reasons

    def lines(self) -> list[str]:
        """The verdict as lines of text, the result first."""
        word = "CONFORMANT" if self.conformant else "NOT CONFORMANT"
        waived = f", {self.waived} waived" if self.waived else ""
        return [
            f"{word}: {self.device}, {self.cases:,} cases{waived}",
            *(f"  because {reason}" for reason in self.reasons),
            *(f"  note: {note}" for note in self.notes),
        ]


def verify_package(path: Path, must_pass: Sequence[str]) -> Verdict:
    """The verdict on the package at ``path`` for this source and its list ``must_pass``. Raises
    ConfigError when the file is not an intact package."""
    members = unpack(path)
    try:
        run = json.loads(members["run.json"])
        tier, definitions, source = run["tier"], run["definitions"], run["source"]
        device = str(tier["device"])
        identity = f"{tier['name']} on {device} ({tier['driver']})"
        notes = _source_notes(source)
        results = _results(members["results.jsonl"])
        listed = members["must_pass.txt"].decode().splitlines()
        waivers = parse_waivers(members["waivers.toml"].decode(), "waivers.toml")
        quick = bool(run["quick"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path}: its contents cannot be understood ({problem})") from None
    reasons = _definition_reasons(definitions, source)
    reasons += _list_reasons([name for name, _, _ in results], listed, must_pass, quick)
    failed, waived = [], 0
    for name, status, findings in results:
        if status not in STATUSES or (status == PASS) == bool(findings):
            reasons.append(f"the result of {name} contradicts itself")
        elif status != PASS:
            waiver = find_waiver(waivers, name, device)
            waived += waiver is not None
            if waiver is None:
                failed.append(name)
            else:
                notes.append(f"waived: {name}: {waiver.reason}")
    if failed:
        reasons.append(f"{_cases(failed)} failed without a waiver, first {failed[0]}")
    return Verdict(identity, len(results), waived, tuple(reasons), tuple(notes))


def _results(data: bytes) -> list[tuple[str, str, list[Any]]]:
    """The (case, status, findings) of every line."""
    records = [json.loads(line) for line in data.decode().splitlines()]
    return [(str(r["case"]), str(r["status"]), list(r.get("findings", ()))) for r in records]


def _definition_reasons(found: Mapping[str, Any], source: Mapping[str, Any]) -> list[str]:
    """Reasons why the package's definitions differ from this source's."""
    here = definition_facts()
    other = [name.replace("_", " ") for name in here if found.get(name) != here[name]]
    if not other:
        return []
    made = source["commit"] or source["version"]
    version = found.get("arithmetic")
    if version != here["arithmetic"]:
        return [
            f"it was made with arithmetic version {version}, this source has version "
            f"{here['arithmetic']}: run the device again, or verify it with {made}"
        ]
    return [f"it was made with other definitions ({', '.join(other)}): verify it with {made}"]


def _source_notes(source: Mapping[str, Any]) -> list[str]:
    made = source["commit"] or source["version"]
    notes = [f"made with {made}, changed since"] if source["dirty"] else []
    here = source_facts()["packages"]
    other = [name for name in ("accel", "harness") if source["packages"][name] != here[name]]
    return notes + [f"the package {name} of {made} is not this one" for name in other]


def _list_reasons(
    ran: Sequence[str], listed: Sequence[str], must_pass: Sequence[str], quick: bool
) -> list[str]:
    reasons = []
    present = set(ran)
    missing = [name for name in must_pass if name not in present]
    if missing:
        why = "a quick run: " if quick else ""
        reasons.append(f"{why}{_cases(missing)} of the list did not run, first {missing[0]}")
    if len(present) != len(ran):
        reasons.append("a case has several results")
    unknown = sorted(present - set(must_pass) - {DEFAULT_MODEL_CASE})
    if unknown:
        reasons.append(f"{_cases(unknown)} not of the list, first {unknown[0]}")
    if set(listed) != present:
        reasons.append("its list and its results name different cases")
    return reasons


def _cases(names: Sequence[str]) -> str:
    return f"{len(names):,} case{'s' if len(names) != 1 else ''}"
