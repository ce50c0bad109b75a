"""Targets of benchmarks: bounds that measured medians are compared with."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness.bench.engines import PEER
from harness.bench.report import Metrics, digits


@dataclass(frozen=True, slots=True)
class Target:
    """A target: ``metric`` shall be at least or at most ``bound``; with ``of_peer`` as a multiple
    of the peer's. ``clients`` is the load it applies to, None for any."""

    metric: str
    bound: float
    least: bool = True
    of_peer: bool = False
    clients: int | None = None

    def met(self, value: float) -> bool:
        """Whether ``value`` meets the target."""
        return value >= self.bound if self.least else value <= self.bound

    def verdict(self, value: float, of: str = "") -> dict[str, Any]:
        """The target with the value measured for ``of``, and whether it is met."""
        return {**asdict(self), "of": of, "value": value, "met": self.met(value)}


def target_rows(
    verdicts: Sequence[Mapping[str, Any]], metrics: Metrics
) -> Iterator[tuple[str, ...]]:
    """A table of verdicts with its head."""
    yield ("target", "", "measured", "aim", "")
    for verdict in verdicts:
        label, unit, factor = metrics[verdict["metric"]]
        label = label.strip()
        if verdict["of_peer"]:
            label, unit, factor = f"{label} over {PEER}", "", 1.0
        label += f", {verdict['of']}" if verdict["of"] else ""
        bound = f"{'>=' if verdict['least'] else '<='} {digits(verdict['bound'] * factor)}"
        met = "met" if verdict["met"] else "missed"
        yield (label, unit, digits(verdict["value"] * factor), bound, met)
