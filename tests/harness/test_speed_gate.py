"""The speed gate: when it complains, what it stores, and that it measures what it says."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import ConfigError
from tests.bench import ratios
from tests.bench.cpu_use import CpuUse
from tests.bench.gate import (
    BASELINE,
    MIN_SHARE,
    OTHERS_MOST,
    complaint,
    find_baseline,
    load_baselines,
    ratios_here,
    store_ratio,
    stored_ratio,
    this_machine,
)
from tests.bench.ratios import MEASUREMENTS, Bench, Measured, measure_ratio

MACHINE: dict[str, Any] = {"cpu": "abacus", "cores": 2, "devices": {"cpu": "x"}}
QUIET = 0.0


@given(
    stored=st.floats(1e-3, 1e3),
    attempts=st.lists(
        st.builds(Measured, st.floats(0.01, 2.0), st.floats(0, 1)), min_size=1, max_size=3
    ),
)
def test_one_good_attempt_is_enough_and_a_busy_machine_gives_no_verdict(stored, attempts):
    found = [Measured(stored * attempt.ratio, attempt.others) for attempt in attempts]
    said = complaint(stored, found)
    if any(attempt.ratio >= MIN_SHARE * stored for attempt in found):
        assert said == ""
    elif any(attempt.others > OTHERS_MOST for attempt in found):
        assert "no verdict" in said
    else:
        assert "of the stored" in said


def test_a_loss_of_a_sixth_is_too_much():
    assert complaint(6.0, [Measured(5.2, QUIET)]) == ""
    assert "83% of the stored 6" in complaint(6.0, [Measured(5.0, QUIET)])


def test_a_baseline_belongs_to_one_kind_of_machine(tmp_path):
    path = tmp_path / "speed.json"
    other = MACHINE | {"cores": 64}
    store_ratio(path, MACHINE, "a", Measured(1.23456, QUIET), "first")
    store_ratio(path, other, "a", Measured(9.0, QUIET), "larger machine")
    store_ratio(path, MACHINE, "b", Measured(3.0, QUIET), "second")
    store_ratio(path, MACHINE, "a", Measured(2.0, QUIET), "faster")
    baseline = find_baseline(path, MACHINE)
    assert baseline is not None
    assert baseline["ratios"] == {"a": 2.0, "b": 3.0}
    assert baseline["reason"] == "faster"
    assert stored_ratio(path, other, "a") == 9.0
    with pytest.raises(ConfigError, match=r"no b of this kind of machine .*--store-ratios"):
        stored_ratio(path, other, "b")
    with pytest.raises(ConfigError, match="no a of this kind of machine"):
        stored_ratio(path, MACHINE | {"devices": {}}, "a")


@pytest.mark.parametrize(
    ("measured", "reason", "problem"),
    [
        (Measured(1.0, QUIET), " ", "with a reason"),
        (Measured(1.0, 0.9), "x", "other processes use 90% of the cores"),
    ],
)
def test_nothing_is_stored_without_a_reason_or_beside_others(tmp_path, measured, reason, problem):
    path = tmp_path / "speed.json"
    with pytest.raises(ConfigError, match=problem):
        store_ratio(path, MACHINE, "a", measured, reason)
    assert not path.exists()


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", '{"baselines": 3}', '{"baselines": [{}]}'),
        '{"baselines": [{"machine": {"cpu": "x"}, "ratios": {"a": 0}}]}',
        '{"baselines": [{"machine": {"cpu": "x"}, "ratios": {"a": "fast"}}]}',
        '{"baselines": [{"machine": {"cpu": "x"}, "ratios": {}}]}',
    ],
)
def test_a_damaged_baseline_file_is_named(tmp_path, text):
    path = tmp_path / "speed.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"speed\.json: is no file of baselines"):
        find_baseline(path, MACHINE)


def test_stored_baselines_hold_the_ratios_that_are_measured():
    for baseline in load_baselines(BASELINE):
        assert set(baseline["ratios"]) == set(ratios_here(baseline["machine"]))
    assert json.loads(BASELINE.read_text())["baselines"]


def in_turn(first: Callable[[], None], second: Callable[[], None], number: int) -> None:
    for _ in range(number):
        first()
        second()


def test_a_ratio_is_its_yardstick_over_what_is_measured(monkeypatch):
    """With known times, the median over the repetitions of one over the other."""
    slow, quick = iter([9.0, 8.0, 6.0, 4.0]), iter([9.0, 4.0, 2.0, 2.0])
    pair = (lambda: next(slow), lambda: next(quick))
    monkeypatch.setattr(ratios, "MEASUREMENTS", {"a": ("cpu", lambda bench: pair)})
    monkeypatch.setattr(ratios, "REPETITIONS", 3)
    with ExitStack() as stack:
        assert measure_ratio(Bench(Path("none.gguf"), stack), "a", in_turn).ratio == 2.0


def test_every_ratio_can_be_measured_here(tiny_model_path, monkeypatch):
    """Few tokens: nothing here depends on how fast anything is."""
    monkeypatch.setattr(ratios, "REPETITIONS", 1)
    monkeypatch.setattr(ratios, "PROMPT_TOKENS", 8)
    monkeypatch.setattr(ratios, "DECODE_TOKENS", 2)
    machine = this_machine()
    assert "cpu" in machine["devices"]
    assert set(ratios_here(machine)) <= set(MEASUREMENTS)
    with ExitStack() as stack:
        bench = Bench(tiny_model_path, stack)
        for name in ratios_here(machine):
            assert measure_ratio(bench, name, in_turn).ratio > 0


def test_what_others_use_is_what_this_process_does_not():
    earlier = CpuUse(wall=10.0, busy=4.0, own=3.0)
    assert CpuUse(wall=14.0, busy=7.0, own=4.0).others_since(earlier) == 0.5
    assert CpuUse(wall=14.0, busy=4.5, own=4.0).others_since(earlier) == 0.0
    assert earlier.others_since(earlier) == 0.0
    now = CpuUse.now()
    assert now.busy > 0
    assert now.own > 0
