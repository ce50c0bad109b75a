"""The speed gate: when it fails, what it stores, and that it measures what it says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import ConfigError
from harness.bench import gate, ratios
from harness.bench.__main__ import main
from harness.bench.gate import (
    ATTEMPTS,
    FAILED,
    LEAST_SHARE,
    OTHERS_MOST,
    PASSED,
    UNDECIDED,
    find_baseline,
    judge,
    store_baseline,
)
from harness.bench.machine import CpuUse
from harness.bench.ratios import MEASUREMENTS, Measured, measure_ratios

MACHINE = {"cpu": "abacus", "cores": 2, "devices": {"cpu": "x"}}
positive = st.floats(1e-3, 1e3)


def quiet(ratios: dict[str, float]) -> dict[str, Measured]:
    return {name: Measured(ratio, 0.0) for name, ratio in ratios.items()}


attempt = st.builds(Measured, st.floats(0.01, 2.0), st.floats(0, 1))


@given(
    stored=st.dictionaries(st.sampled_from("abcd"), positive, min_size=1),
    shares=st.lists(
        st.fixed_dictionaries(dict.fromkeys("abcd", attempt)),
        min_size=ATTEMPTS,
        max_size=ATTEMPTS,
    ),
)
def test_a_ratio_fails_exactly_when_every_attempt_is_too_low_on_quiet_cores(stored, shares):
    attempts = iter(shares)

    def measure(names: Sequence[str]) -> dict[str, Measured]:
        found = next(attempts)
        return {n: replace(found[n], ratio=stored[n] * found[n].ratio) for n in names}

    for judged in judge(stored, measure):
        mine = [share[judged.name] for share in shares]
        least = LEAST_SHARE * stored[judged.name]
        good = [stored[judged.name] * share.ratio >= least for share in mine]
        busy = any(share.others > OTHERS_MOST for share in mine)
        assert judged.verdict == (PASSED if any(good) else UNDECIDED if busy else FAILED)
        assert len(judged.attempts) == (good.index(True) + 1 if any(good) else ATTEMPTS)


def test_one_slow_moment_is_measured_again_and_forgiven():
    values = iter([quiet({"a": 1.0, "b": 0.1}), quiet({"b": 0.9})])
    asked = []

    def measure(names: Sequence[str]) -> dict[str, Measured]:
        asked.append(list(names))
        return next(values)

    assert {judged.verdict for judged in judge({"a": 1.0, "b": 1.0}, measure)} == {PASSED}
    assert asked == [["a", "b"], ["b"]]


def test_a_baseline_belongs_to_one_kind_of_machine(tmp_path):
    path = tmp_path / "speed.json"
    other = MACHINE | {"cores": 64}
    store_baseline(path, MACHINE, {"a": 1.23456}, "first")
    store_baseline(path, other, {"a": 9.0}, "larger machine")
    store_baseline(path, MACHINE, {"a": 2.0}, "faster")
    assert find_baseline(path, MACHINE)["ratios"] == {"a": 2.0}
    assert find_baseline(path, MACHINE)["reason"] == "faster"
    assert find_baseline(path, other)["ratios"] == {"a": 9.0}
    assert find_baseline(path, MACHINE | {"devices": {}}) is None
    with pytest.raises(ConfigError, match="needs --reason"):
        store_baseline(path, MACHINE, {"a": 1.0}, " ")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"baselines": 3}',
        '{"baselines": [{}]}',
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
    """Each names ratios of tiers that its machine had."""
    for baseline in gate.load_baselines(gate.BASELINE):
        tiers = set(baseline["machine"]["devices"])
        assert set(baseline["ratios"]) == {
            name for name, (tier, _) in MEASUREMENTS.items() if tier in tiers
        }


def test_every_ratio_is_its_yardstick_over_what_is_measured(monkeypatch):
    """With known times, the median over the repetitions of one over the other."""
    slow, quick = iter([9.0, 8.0, 6.0, 4.0]), iter([9.0, 4.0, 2.0, 2.0])
    pair = (lambda: next(slow), lambda: next(quick))
    monkeypatch.setattr(ratios, "MEASUREMENTS", {"a": ("cpu", lambda bench: pair)})
    assert measure_ratios(Path("none.gguf"), ["a"], 3)["a"].ratio == 2.0


def test_what_others_use_is_what_this_process_does_not():
    earlier = CpuUse(wall=10.0, busy=4.0, own=3.0)
    assert CpuUse(wall=14.0, busy=7.0, own=4.0).others_since(earlier) == 0.5
    assert CpuUse(wall=14.0, busy=4.5, own=4.0).others_since(earlier) == 0.0
    assert earlier.others_since(earlier) == 0.0
    now = CpuUse.now()
    assert now.busy > 0
    assert now.own > 0


@pytest.mark.parametrize(("others", "code"), [(0.0, 1), (0.9, 2)])
def test_a_busy_machine_gives_no_verdict_and_no_baseline(
    tmp_path, capsys, monkeypatch, others, code
):
    """The same low ratios fail on quiet cores and are undecided on busy ones."""

    def measure(model, names, repetitions, say):
        return {name: Measured(1.0, others) for name in names}

    monkeypatch.setattr(gate, "measure_ratios", measure)
    path = tmp_path / "speed.json"
    words = ["gate", "--size", "tiny", "--baseline", str(path)]
    assert main([*words, "--update", "--reason", "x"]) == (0 if code == 1 else 2)
    assert path.exists() == (code == 1)
    machine = gate.this_machine()
    tiers = machine["devices"]
    low = {name: 9.0 for name, (tier, _) in MEASUREMENTS.items() if tier in tiers}
    store_baseline(path, machine, low, "too good")
    assert main(words) == code


@pytest.fixture
def quickly(monkeypatch):
    """Fewer tokens and repetitions: nothing here depends on how fast anything is."""
    monkeypatch.setattr(gate, "REPETITIONS", 1)
    monkeypatch.setattr(gate, "OTHERS_MOST", 1.0)
    monkeypatch.setattr(gate, "ATTEMPTS", 1)
    monkeypatch.setattr(ratios, "PROMPT_TOKENS", 8)
    monkeypatch.setattr(ratios, "DECODE_TOKENS", 2)


@pytest.fixture
def measured(quickly, tmp_path, capsys):
    """A baseline of this machine, measured by the command."""
    path = tmp_path / "speed.json"
    words = ["gate", "--size", "tiny", "--baseline", str(path)]
    assert main([*words, "--update", "--reason", "test"]) == 0
    capsys.readouterr()
    return path, words


def scaled(path, factor: float) -> None:
    document = json.loads(path.read_text())
    for baseline in document["baselines"]:
        baseline["ratios"] = {k: v * factor for k, v in baseline["ratios"].items()}
    path.write_text(json.dumps(document))


def test_a_hopeless_baseline_fails_and_a_modest_one_passes(measured, capsys):
    """Both directions, with margins no noise can cross."""
    path, words = measured
    stored = json.loads(path.read_text())["baselines"][0]["ratios"]
    assert all(value > 0 for value in stored.values())
    scaled(path, 1e6)
    assert main(words) == 1
    assert capsys.readouterr().out.count("REGRESSION") == len(stored)
    scaled(path, 1e-12)
    assert main(words) == 0
    assert capsys.readouterr().out.count(" ok") == len(stored)


def test_no_verdict_without_a_baseline_of_this_machine(quickly, tmp_path, capsys):
    path = tmp_path / "speed.json"
    store_baseline(path, MACHINE, {"a": 1.0}, "another machine")
    assert main(["gate", "--size", "tiny", "--baseline", str(path)]) == 2
    assert "no baseline for this machine" in capsys.readouterr().err


def test_an_update_without_a_reason_measures_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gate, "measure_ratios", None)
    assert main(["gate", "--update", "--baseline", str(tmp_path / "speed.json")]) == 2
    assert "needs --reason" in capsys.readouterr().err
