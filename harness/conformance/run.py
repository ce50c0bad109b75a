"""Runs cases on a device one after another, and makes the package of a run."""

import json
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from contract.errors import ConfigError, DeviceLost, TierError, ZincError
from contract.tier import Tier
from harness.bench.machine import machine_facts
from harness.conformance.cases import Check, Finding
from harness.conformance.identity import definition_facts, source_facts, tier_facts
from harness.conformance.package import pack
from harness.conformance.waivers import find_waiver, parse_waivers
from harness.progress import SILENT, Progress

PASS, FAIL, WAIVED = "pass", "fail", "waived"
STATUSES = (PASS, FAIL, WAIVED)
FINDINGS_MAX = 16
"""Most findings recorded of one case."""

OpenTier = Callable[[], Tier]


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The result of one case. ``findings`` is empty exactly for a pass."""

    case: str
    status: str
    seconds: float
    findings: tuple[Finding, ...] = ()
    waiver: str = ""

    def line(self) -> str:
        """The result as a line of ``results.jsonl``."""
        record: dict[str, Any] = {
            "case": self.case,
            "status": self.status,
            "seconds": round(self.seconds, 6),
        }
        if self.findings:
            record["findings"] = list(self.findings)
        if self.waiver:
            record["waiver"] = self.waiver
        return json.dumps(record)


@dataclass(slots=True)
class Log:
    """Lines with the seconds since the run began."""

    started: float = field(default_factory=time.perf_counter)
    lines: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Add an entry; further lines of ``text`` are indented."""
        stamp = f"{time.perf_counter() - self.started:10.3f}  "
        self.lines.append(stamp + text.rstrip().replace("\n", "\n" + " " * len(stamp)))

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self.started


@dataclass(slots=True)
class _Device:
    """An open tier that is reopened after a fault it may not have survived."""

    open: OpenTier
    log: Log
    tier: Tier | None
    lost: str = ""

    def run(self, check: Check) -> list[Finding]:
        """The findings of one check; an exception it raises is a finding."""
        if self.tier is None:
            return [{"note": f"the device could not be opened again: {self.lost}"}]
        try:
            return check(self.tier)
        except Exception as error:
            self.log.add(traceback.format_exc())
            if isinstance(error, DeviceLost) or not isinstance(error, ZincError):
                self._reopen()
            return [{"note": f"{type(error).__name__}: {error}"}]

    def _reopen(self) -> None:
        self.close()
        try:
            self.tier = self.open()
            self.log.add("device opened again")
        except ZincError as error:
            self.lost = str(error)

    def close(self) -> None:
        """Close the tier; an error is only logged, since closing a lost device may fail."""
        tier, self.tier = self.tier, None
        if tier is not None:
            try:
                tier.close()
            except TierError as error:
                self.log.add(f"closing: {error}")


def run_cases(
    open_device: OpenTier,
    cases: Mapping[str, Check],
    waivers: str = "",
    progress: Progress = SILENT,
    log: Log | None = None,
) -> tuple[dict[str, Any], list[CaseResult]]:
    """Run every case in order; returns facts of the device and the results. ``waivers`` is a file's
    text.

    A case that raises has failed, and the device is reopened for the next one. Raises what
    ``open_device`` raises the first time, and ConfigError for waivers that cannot be read."""
    accepted = parse_waivers(waivers, "waivers")
    log = log or Log()
    device = _Device(open_device, log, open_device())
    results = []
    try:
        assert device.tier is not None
        facts = tier_facts(device.tier.info)
        log.add(f"{facts['name']} on {facts['device']} ({facts['driver']})")
        progress.start(f"conformance of {facts['name']}", len(cases), "case")
        for case, check in cases.items():
            began = time.perf_counter()
            findings = device.run(check)[:FINDINGS_MAX]
            seconds = time.perf_counter() - began
            waiver = find_waiver(accepted, case, facts["device"]) if findings else None
            status = PASS if not findings else WAIVED if waiver else FAIL
            reason = waiver.reason if waiver else ""
            results.append(CaseResult(case, status, seconds, tuple(findings), reason))
            log.add("\n".join([f"{status} {case}", *map(json.dumps, findings)]))
            progress.advance(1)
    finally:
        progress.close()
        device.close()
    return facts, results


def conformance_package(
    open_device: OpenTier,
    cases: Mapping[str, Check],
    waivers: str = "",
    *,
    quick: bool = False,
    progress: Progress = SILENT,
) -> tuple[bytes, list[CaseResult]]:
    """Run ``cases``; returns the archive of the run and the results in it."""
    if not cases:
        raise ConfigError("there is no case to run")
    began = datetime.now(UTC).isoformat(timespec="seconds")
    source, definitions = source_facts(), definition_facts()
    log = Log()
    log.add(f"source {source['commit'] or source['version']}, {len(cases)} cases")
    facts, results = run_cases(open_device, cases, waivers, progress, log)
    counts = {status: sum(r.status == status for r in results) for status in STATUSES}
    log.add(", ".join(f"{count} {status}" for status, count in counts.items()))
    run = {
        "tier": facts,
        "machine": machine_facts(),
        "source": source,
        "definitions": definitions,
        "quick": quick,
        "started": began,
        "seconds": round(log.seconds, 3),
        "counts": counts,
    }
    members = {
        "run.json": json.dumps(run, indent=1) + "\n",
        "must_pass.txt": "".join(f"{case}\n" for case in cases),
        "results.jsonl": "".join(f"{result.line()}\n" for result in results),
        "waivers.toml": waivers,
        "log.txt": "".join(f"{line}\n" for line in log.lines),
    }
    return pack({name: text.encode() for name, text in members.items()}), results
