"""Quantities as text, and how a report folds layers."""

import pytest

from contract.ir.analysis import FeedForward, Mixer
from harness.report.render import (
    KINDS,
    by_kind,
    chain,
    counted,
    duration,
    percent,
    quantity,
    ranges,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_499, "999 kB"), (999_500, "1 MB"),
     (98_362_432, "98.4 MB"), (2.5e15, "2.5 PB"), (5e18, "5000 PB")],
)  # fmt: skip
def test_quantity(value, text):
    assert quantity(value, "B") == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 ns"), (58.5e-9, "58.5 ns"), (1e-6, "1 µs"), (0.0259, "25.9 ms"), (90, "90 s")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_percent_shows_that_something_is_there():
    assert [percent(share) for share in (0, 1e-6, 0.001, 0.4449, 1)] == [
        "0.0 %", "< 0.1 %", "0.1 %", "44.5 %", "100.0 %",
    ]  # fmt: skip


def test_lists_fold():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0–2, 5, 7–8"
    assert ranges([]) == ""
    assert chain(["A", "B", "B", "A"]) == "A → B ×2 → A"
    assert counted(["x", "y", "y"]) == "2 y, 1 x"


def test_every_kind_of_layer_can_be_drawn_and_told_apart():
    kinds = [*Mixer, *FeedForward]
    assert list(KINDS) == [kind.value for kind in kinds]
    for family in (Mixer, FeedForward):
        assert len({KINDS[kind.value] for kind in family}) == len(family)


def test_layers_of_a_kind_are_listed_together():
    layers = [
        {"layer": n, "mixer": "delta net" if n % 4 else "sliding attention",
         "window": 0 if n % 4 else 1024, "feed_forward": "MoE"}
        for n in range(9)
    ]  # fmt: skip
    assert by_kind(layers) == {
        "sliding attention over 1,024 positions, MoE": [0, 4, 8],
        "delta net, MoE": [1, 2, 3, 5, 6, 7],
    }
