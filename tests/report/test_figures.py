"""Quantities as text, and what the drawings of a report are made of."""

from __future__ import annotations

import pytest

from contract.ir.analysis import FeedForward, Mixer
from harness.report.figures import (
    CELL,
    DRAWING_WIDTH,
    GAP,
    KINDS,
    LAYERS_A_LINE,
    chain,
    counted,
    duration,
    percent,
    quantity,
    ranges,
    ribbon,
    stack,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_499, "999 kB"), (999_500, "1 MB"),
     (98_362_432, "98.4 MB"), (2.5e15, "2.5 PB"), (5e18, "5000 PB")],
)  # fmt: skip
def test_quantity(value: float, text: str) -> None:
    assert quantity(value, "B") == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 ns"), (58.5e-9, "58.5 ns"), (1e-6, "1 µs"), (0.0259, "25.9 ms"), (90, "90 s")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_percent_shows_that_something_is_there() -> None:
    assert [percent(share) for share in (0, 1e-6, 0.001, 0.4449, 1)] == [
        "0.0 %", "< 0.1 %", "0.1 %", "44.5 %", "100.0 %",
    ]  # fmt: skip


def test_lists_fold() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0–2, 5, 7–8"
    assert ranges([]) == ""
    assert chain(["A", "B", "B", "A"]) == "A → B ×2 → A"
    assert counted(["x", "y", "y"]) == "2 y, 1 x"


def test_every_kind_of_layer_can_be_drawn_and_told_apart() -> None:
    kinds = [*Mixer, *FeedForward]
    assert list(KINDS) == [kind.value for kind in kinds]
    for family in (Mixer, FeedForward):
        assert len({KINDS[kind.value] for kind in family}) == len(family)


def test_a_ribbon_has_a_square_pair_a_layer_and_none_overlap() -> None:
    layers = [
        {"layer": n, "mixer": "delta net" if n % 4 else "full attention", "window": 0,
         "feed_forward": "MoE"}
        for n in range(LAYERS_A_LINE + 2)
    ]  # fmt: skip
    drawn = ribbon(layers)
    corners = [(s.x, s.y) for mark in drawn.marks for s in mark.squares]
    assert len(set(corners)) == 2 * len(layers)
    for x, y in corners:
        assert 0 <= x <= drawn.width - CELL
        assert 0 <= y <= drawn.height - CELL
        assert not any(
            (x, y) != (u, v) and abs(x - u) < CELL + GAP and abs(y - v) < CELL + GAP
            for u, v in corners
        )
    squares = {square for mark in drawn.marks for square in mark.squares}
    for number in filter(None, (mark.number for mark in drawn.marks)):
        assert all(not s.y <= number[1] < s.y + CELL for s in squares)
    assert drawn.description.startswith("layers 0, 4, 8")


def test_a_stack_fills_its_share_of_the_longest_without_gaps() -> None:
    segments = stack({"weights": 60, "kv": 30, "state": 0, "activations": 10}, 200)
    assert [(s.x, s.width) for s in segments] == [
        (0, 0.3 * DRAWING_WIDTH), (0.3 * DRAWING_WIDTH, 0.15 * DRAWING_WIDTH),
        (0.45 * DRAWING_WIDTH, 0), (0.45 * DRAWING_WIDTH, 0.05 * DRAWING_WIDTH),
    ]  # fmt: skip
