"""Every rule broken on purpose: the parity comparison must notice each.

A control replaces one ingredient of a definition by a mistake, runs the parity suite's own cases
through it and asks that at least one comparison fails."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from contract.opcodes import Opcode
from harness.parity.cases import Case, generate
from harness.parity.execute import by_definition, difference
from harness.parity.operands import fill
from reference.ops import DEFINITIONS
from tests.ops import mistakes, mistakes_experts

KINDS = ("normal", "huge", "zeros", "scales")
"""Kinds of values whose results are finite by the rules."""
FEW_CASES = 24


@dataclass(frozen=True, slots=True)
class Control:
    """``wrong`` replaces ``target``, or the opcode's whole definition.

    ``within`` begins the labels of the shapes that can show it."""

    label: str
    opcode: Opcode
    wrong: Any
    target: str = ""
    within: str = ""


CONTROLS_BY_RULE = Path(__file__).with_name("negative_controls.txt").read_text()
"""Rule and mistake, opcode, what takes the place of which part of ``reference``, or of the whole
definition, and how the labels of the shapes begin that can show it."""
WORDS = {**vars(mistakes), **vars(mistakes_experts)}


def control_of(row: str) -> Control:
    """The control of a row."""
    label, opcode, wrong, target, within, *_ = (*row.split(" | "), "", "")
    replaced = target and f"reference.{target}"
    return Control(label, Opcode[opcode], eval(wrong, WORDS), replaced, within)


CONTROLS = [control_of(row) for row in CONTROLS_BY_RULE.strip().splitlines()]


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.label)
def test_mistake_is_noticed(control, monkeypatch):
    """At least one generated case of the opcode compares unequal; few of them first."""
    cases = [
        case
        for case in generate(control.opcode)
        if case.kind in KINDS and not case.may_break and case.shape.label.startswith(control.within)
    ]
    few = cases[:: max(1, len(cases) // FEW_CASES)]
    rest = [case for case in cases if case not in few]
    assert any(_notices(case, control, monkeypatch) for case in few + rest)


def _notices(case: Case, control: Control, monkeypatch: pytest.MonkeyPatch) -> bool:
    operands = fill(case)
    expected = by_definition(case, operands)
    with monkeypatch.context() as patch:
        if control.target:
            patch.setattr(control.target, control.wrong)
        else:
            patch.setitem(DEFINITIONS, control.opcode, control.wrong)
        got = by_definition(case, operands)
    return any(
        difference(expected[name], got[name], may_break=False) is not None for name in expected
    )


@pytest.mark.parametrize("opcode", sorted({control.opcode for control in CONTROLS}))
def test_nothing_is_noticed_without_a_mistake(opcode):
    """The same comparison is silent when nothing was replaced."""
    for case in list(generate(opcode))[::63]:
        operands = fill(case)
        first, second = by_definition(case, operands), by_definition(case, operands)
        for name in first:
            assert difference(first[name], second[name], may_break=True) is None
