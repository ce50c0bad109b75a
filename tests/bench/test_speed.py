"""Ratios of speeds measured in this run against those stored for this kind of machine.

Not part of the ordinary run: it needs an idle machine. ``ci/speed`` calls it."""

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.bench.gate import (
    ATTEMPTS,
    BASELINE,
    complaint,
    ratios_here,
    store_ratio,
    stored_ratio,
    this_machine,
)
from tests.bench.ratios import MEASUREMENTS, Bench, Measured, measure_ratio
from tests.needs import machine_lacks

pytestmark = pytest.mark.speed


@pytest.fixture(scope="module")
def machine() -> dict[str, Any]:
    return this_machine()


@pytest.fixture(scope="module")
def bench(synthetic_model) -> Iterator[Bench]:
    """Four layers, 512 wide."""
    with ExitStack() as stack:
        yield Bench(synthetic_model("small", architecture="llama", quant="q4_k_m"), stack)


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_a_ratio_does_not_fall(benchmark, bench, machine, name, pytestconfig):
    if name not in ratios_here(machine):
        machine_lacks(f"{MEASUREMENTS[name][0]} tier to measure")

    def rounds(first: Callable[[], None], second: Callable[[], None], number: int) -> None:
        benchmark.pedantic(second, setup=first, rounds=number)

    def in_turn(first: Callable[[], None], second: Callable[[], None], number: int) -> None:
        for _ in range(number):
            first()
            second()

    reason = pytestconfig.getoption("--store-ratios", default="")
    stored = 0.0 if reason else stored_ratio(BASELINE, machine, name)
    # pytest-benchmark times one series a test.
    attempts = [measure_ratio(bench, name, rounds)]
    while len(attempts) < ATTEMPTS and (reason or complaint(stored, attempts)):
        attempts.append(measure_ratio(bench, name, in_turn))
    benchmark.extra_info["ratios"] = [round(attempt.ratio, 4) for attempt in attempts]
    if reason:
        ratio = statistics.median(attempt.ratio for attempt in attempts)
        others = max(attempt.others for attempt in attempts)
        store_ratio(BASELINE, machine, name, Measured(ratio, others), reason)
    else:
        assert not complaint(stored, attempts)
