"""Which instruction sets a machine can run, and that each of them computes the same bits."""

import itertools
from collections.abc import Iterable

import pytest

from accel.native import library
from accel.native.library import VARIANT_SETTING, choose_variant, processor_words
from accel.native.names import this_target
from accel.native.variants import (
    AVX2,
    AVX512VNNI,
    OSXSAVE,
    VARIANTS,
    WORDS,
    XMM,
    YMM,
    ZMM_HIGH,
    Bit,
    machine,
    usable,
)
from contract.errors import TierUnavailable
from contract.opcodes import Opcode
from harness.parity.cases import Case, all_cases
from harness.parity.execute import compare
from reference.model.open import open_model
from tests.long_cases import long_except
from tests.model_runs import SHORT
from tests.model_runs import compare as compare_model
from tests.needs import machine_lacks

X86 = [variant for variant in VARIANTS if variant.machine == "x86_64"]
EVERY_BIT = frozenset().union(*(variant.needs for variant in X86))
EVERY_REGISTER = X86[0].registers | XMM | YMM
NAMES = [variant.name for variant in VARIANTS]
FASTEST = "x86-64-v4-vnni"
"""What most machines of the gate have; a compiler takes 20 s for each other one."""
SELECTED = 6
"""Every so many-th shape of an opcode: other tests sweep all of them on this machine's variant."""


def _words(bits: Iterable[Bit], registers: int) -> list[int]:
    words = [0] * WORDS
    for word, bit in bits:
        words[word] |= 1 << bit
    words[4] = registers
    return words


def _best(bits: Iterable[Bit], registers: int = EVERY_REGISTER) -> str:
    return usable(_words(bits, registers), "x86_64")[0].name


def test_the_processor_decides():
    """Each feature that is missing leads to the variant that does without it."""
    assert _best(EVERY_BIT) == "x86-64-v4-vnni"
    assert _best(EVERY_BIT - {AVX512VNNI}) == "x86-64-v4"
    assert _best(X86[2].needs) == "x86-64-v3"
    assert _best(EVERY_BIT - {AVX2}) == "x86-64-v2"
    assert usable(_words((), EVERY_REGISTER), "x86_64") == []


def test_the_system_decides():
    """What the processor lists counts only where the system keeps the registers."""
    assert _best(EVERY_BIT, EVERY_REGISTER & ~ZMM_HIGH) == "x86-64-v3"
    assert _best(EVERY_BIT, XMM) == "x86-64-v2"
    assert _best(EVERY_BIT - {OSXSAVE}, 0) == "x86-64-v2"


def test_every_variant_needs_what_the_next_one_does():
    """The order of the table is that of what they need."""
    for faster, slower in itertools.pairwise(X86):
        assert faster.needs > slower.needs
        assert faster.registers | slower.registers == faster.registers


def test_an_unknown_variant_is_an_error(monkeypatch):
    """It says which there are."""
    monkeypatch.setenv(VARIANT_SETTING, "x86-64-v9")
    with pytest.raises(TierUnavailable, match="no such variant"):
        choose_variant(tuple(_words(EVERY_BIT, EVERY_REGISTER)))


def test_a_variant_that_cannot_run_is_an_error(monkeypatch):
    """Naming it does not make the processor run it."""
    if machine() != "x86_64":
        machine_lacks("variants of x86")
    monkeypatch.setenv(VARIANT_SETTING, "x86-64-v4")
    with pytest.raises(TierUnavailable, match="cannot run it; choose of x86-64-v3, x86-64-v2"):
        choose_variant(tuple(_words(X86[2].needs, XMM | YMM)))


def _selected() -> list[Case]:
    """Some shapes of every opcode, in every storage type over all opcodes."""
    cases: list[Case] = []
    for opcode in Opcode:
        shapes = list(dict.fromkeys(case.name for case in all_cases() if case.opcode is opcode))
        chosen = set(shapes[:: max(1, len(shapes) // SELECTED)])
        cases += [case for case in all_cases() if case.opcode is opcode and case.name in chosen]
    return cases


@pytest.mark.parity
@pytest.mark.parametrize(
    "name", long_except(NAMES, FASTEST, *(one for one in NAMES if one.startswith("aarch64")))
)
def test_every_variant_computes_the_same_bits(name, open_native, monkeypatch, tiny_model_path):
    """Of some shapes of every opcode and of a whole model, compared with the definitions."""
    words = processor_words(this_target(machine()), library.default_cache())
    if name not in [variant.name for variant in usable(words, machine())]:
        machine_lacks(f"processor for the variant {name}")
    monkeypatch.setenv(VARIANT_SETTING, name)
    tier = open_native(threads=2)
    assert tier.variant.name == name
    problems = [f"{case}: {found}" for case in _selected() if (found := compare(tier, case))]
    assert not problems, "\n".join(problems)
    compare_model(open_model(tiny_model_path), tier, requests=SHORT)
