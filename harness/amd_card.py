"""Tests a card and packs the results in one archive to send.

For each tier it records what the system reports, runs every packet test of AMD's with a trace, then
the conformance list. The results of a step are kept whatever happens later."""

import gzip
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from accel.amd.device import Device
from accel.amd.kernel import Kernel
from accel.amd.packet_check import packet_tests
from accel.amd.program import Modules
from accel.amd.queue import Queue
from accel.amd.runtime import DRIVERS
from accel.amd.system import findings
from accel.amd.tools.trace import Trace, Tracer
from contract.errors import TierUnavailable, ZincError, system_words
from harness.conformance.__main__ import main as conformance
from harness.conformance.package import tar_of
from harness.tiers import REPORTED, SIMULATED, device_lines

FOLDER = "zinc-rt-card"
"""The folder in the archive that contains all members."""
REPORT = "report.txt"


@dataclass(slots=True)
class Card:
    """The results. ``lines`` were shown to the user, ``files`` are by name; tiers in ``absent``
    could not be opened, tiers in ``failed`` gave wrong results."""

    tell: Callable[[str], None]
    lines: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def say(self, line: str) -> None:
        """Show a line to the user and add it to the report."""
        self.lines.append(line)
        self.tell(line)

    def archive(self) -> bytes:
        """A gzipped tar of the report and the files."""
        report = "".join(f"{line}\n" for line in self.lines).encode()
        return gzip.compress(tar_of(FOLDER, {REPORT: report, **self.files}))


def examine(
    card: Card, tiers: Sequence[str], device: str, options: Mapping[str, str | None]
) -> None:
    """Run all tests and record them in ``card``. ``options`` are further flags of ``zinc-rt
    conformance``, None for flags without a value."""
    for tier in tiers:
        if tier in REPORTED:
            _listed(card, tier, device, options)
            continue
        kernel, requested = system(device)
        card.say(f"{tier}: what the system says")
        for finding in findings(kernel, tier):
            card.say(f"    {finding}")
        _tier(card, tier, kernel, requested, device, options)


def _listed(card: Card, tier: str, device: str, options: Mapping[str, str | None]) -> None:
    """A tier that asks somebody else's driver for its devices."""
    card.say(f"{tier}: devices")
    try:
        for line in device_lines(tier):
            card.say(f"    {line}")
    except TierUnavailable as error:
        card.say(f"    {error}")
        card.absent.append(tier)
        return
    with tempfile.TemporaryDirectory() as folder:
        _conformance(card, tier, device, options, Path(folder))


def _tier(
    card: Card,
    tier: str,
    kernel: Kernel,
    requested: str,
    device: str,
    options: Mapping[str, str | None],
) -> None:
    card.say(f"{tier}: packets")
    try:
        passed, trace = try_packets(
            tier, kernel, requested, lambda line: card.say(f"    {line}"), True
        )
    except ZincError as error:
        card.say(f"    {error}")
        card.absent.append(tier)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "packets.trace")
        trace.save(path)
        card.files[f"{tier}/{path.name}"] = path.read_bytes()
        if not passed:
            card.failed.append(tier)
            return
        _conformance(card, tier, device, options, Path(folder))


def _conformance(
    card: Card, tier: str, device: str, options: Mapping[str, str | None], folder: Path
) -> None:
    card.say(f"{tier}: conformance")
    package = folder / "conformance.tar.gz"
    words = ["--tier", tier, "--out", str(package)]
    words += ["--device", device] if device else []
    for flag, value in options.items():
        words += [flag] if value is None else [flag, value]
    code = conformance(words)
    card.say(f"    {'all that ran passed' if code == 0 else 'not everything passed'}")
    if code:
        card.failed.append(tier)
    if package.is_file():
        card.files[f"{tier}/{package.name}"] = package.read_bytes()


def system(device: str) -> tuple[Kernel, str]:
    """The system a GPU named like that is looked for in, and its name there."""
    if device != SIMULATED:
        return Kernel(), device
    # Wheels leave the simulated machine out.
    from accel.amd.tools.simulated import simulated_kernel

    return simulated_kernel(), ""


def try_packets(
    tier: str, kernel: Kernel, requested: str, tell: Callable[[str], None], record: bool
) -> tuple[bool, Trace]:
    """Try every packet of a tier on one GPU and report it line by line. Returns whether all tests
    pass, and what went through the queue if it is to be kept. Raises TierUnavailable where there is
    no GPU or it cannot be used."""
    device = Device(kernel, DRIVERS[tier](kernel, requested))
    passed = True
    with ExitStack() as undo:
        undo.callback(device.close)
        try:
            queue = Queue(device)
        except OSError as error:
            reason = f"{device.name} cannot be used: {system_words(error)}"
            raise TierUnavailable(tier, reason, "free the GPU, or see dmesg") from None
        undo.callback(queue.close)
        tracer = Tracer(device, queue)
        if record:
            tracer.attach()
        tell(f"{device.name}, {device.driver.version}")
        for result in packet_tests(device, queue, Modules(device)):
            tell(f"{'FAILED' if result.problem else 'ok':<8}{result.proves}")
            if result.problem:
                tell(f"        {result.problem}")
                passed = False
    return passed, tracer.trace
