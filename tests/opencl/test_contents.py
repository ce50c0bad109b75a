"""What step programs hold: what graphs need, found again in the cache, and made once."""

from collections.abc import Callable
from typing import Any

import pytest

from accel.opencl import contents
from accel.opencl import program as program_module
from accel.opencl.contents import (
    EVERYTHING,
    PARTS,
    RECURRENT,
    RECURRENT_OPS,
    Parts,
    StepPrograms,
    format_lists,
    mask_of,
    of_mask,
    ops_with,
    parts_of,
)
from accel.opencl.device import Device
from accel.opencl.program import OP_NAMES, base_files, build_step_program, step_files
from accel.packets.build import BuildError
from accel.packets.footprint import op_kinds
from accel.packets.rules import lower_graph
from contract.dtypes import F16, WEIGHT_DTYPES
from reference.limits import Limits
from reference.model.open import open_model
from tests.families_table import FAMILIES
from tests.opencl_parts import holding

LIMITS = Limits(1, 64, 4, F16, step_tokens=16, step_rows=4)
Q4_K_M = frozenset({"Q4_K", "Q6_K"})
NARROW_Q4_K_M = Q4_K_M | {"Q5_0", "Q8_0"}
"""Where some rows are no whole number of super-blocks."""
BLOCKS = frozenset({"Q4_1", "Q8_0"})


@pytest.mark.parametrize(
    ("family", "quant", "expected"),
    [
        ("qwen3", "q4_k_m", NARROW_Q4_K_M),
        ("qwen3", "q8_0", {"Q8_0"}),
        ("qwen3", "f16", {"F16"}),
        ("llama-8-experts", "q8_0", {"Q8_0", "F32"}),
        ("qwen35moe-fused", "q8_0", {"Q8_0", "F32", RECURRENT}),
    ],
)
def test_a_step_needs_the_formats_of_its_products(synthetic_model, family, quant, expected):
    """In every form the same: one program runs them all."""
    model = open_model(synthetic_model(quant=quant, **FAMILIES[family]))
    graph = model.graph(LIMITS)
    for tokens in (1, 4, LIMITS.step_tokens):
        bucket = type(LIMITS.largest)(tokens, min(tokens, LIMITS.step_rows))
        assert parts_of(op_kinds(lower_graph(graph, bucket, 2, "opencl").ops)) == expected


def test_a_program_holds_its_parts_and_all_other_ops():
    """Formats are listed for the kernels; ops of delta nets come with their part."""
    assert {dtype.name.upper() for dtype in WEIGHT_DTYPES} | {RECURRENT} == EVERYTHING
    assert set(ops_with(BLOCKS)) == set(OP_NAMES) - RECURRENT_OPS
    assert ops_with(EVERYTHING) == OP_NAMES
    lists = format_lists(BLOCKS | {"F32", RECURRENT}).splitlines()
    assert lists == [
        "#define FOR_EACH_QUANTIZED(X) X(Q4_1) X(Q8_0)",
        "#define FOR_EACH_FLOAT(X) X(F32)",
    ]
    files = step_files(ops_with(BLOCKS), BLOCKS)
    assert "ssm_delta_net.cl" not in files
    assert "X(Q4_K)" not in "".join(files.values())
    assert "X(Q4_K)" in step_files()["formats.h"]
    assert "matmul.cl" not in base_files()


def test_numbers_of_parts():
    """Every set of parts has a number of its own."""
    for parts in (frozenset(), EVERYTHING, BLOCKS, *(frozenset({part}) for part in PARTS)):
        assert of_mask(mask_of(parts)) == parts
    assert len({mask_of(frozenset({part})) for part in PARTS}) == len(PARTS)


class Builder:
    """Builds nothing, and says what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[Parts] = []
        self.fails = False

    def __call__(self, parts: Parts) -> tuple[Parts, Any]:
        self.asked.append(parts)
        if self.fails:
            raise BuildError("device", "kernel", "no")
        return parts, f"program {len(self.asked)}"


@pytest.fixture
def builder() -> Builder:
    return Builder()


@pytest.fixture
def programs(builder) -> StepPrograms:
    return StepPrograms(builder)


def test_a_program_is_made_once_and_serves_whoever_needs_less(builder, programs):
    """Of two graphs the second has the first one's program if that is enough."""
    with holding(frozenset()):
        assert programs.holding(Q4_K_M) == "program 1"
        assert programs.holding(frozenset()) == programs.holding(Q4_K_M) == "program 1"
        assert programs.holding(Q4_K_M | {RECURRENT}) == "program 2"
        assert programs.holding(frozenset({RECURRENT})) == "program 2"
    assert builder.asked == [Q4_K_M, Q4_K_M | {RECURRENT}]


def test_whoever_needs_many_gets_everything(builder, programs):
    """A tool that runs op after op in every format does not compile a program for each."""
    with holding(frozenset()):
        for part in PARTS:
            programs.holding(frozenset({part}))
    assert builder.asked == [*(frozenset({part}) for part in PARTS[:2]), EVERYTHING]


class LateThread:
    """Does nothing before somebody waits for it."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], name: str) -> None:
        self._target, self._args = target, args

    def start(self) -> None:
        pass

    def join(self) -> None:
        self._target(*self._args)


@pytest.mark.parametrize("late", [True, False])
def test_what_was_begun_is_waited_for(builder, programs, monkeypatch, late):
    """A graph that needs less does not get a program of its own meanwhile; an error is told."""
    if late:
        monkeypatch.setattr(contents.threading, "Thread", LateThread)
    with holding(frozenset()):
        programs.expect(Q4_K_M)
        assert programs.holding(frozenset()) == "program 1"
        builder.fails = True
        programs.expect(BLOCKS)
        with pytest.raises(BuildError):
            programs.holding(BLOCKS)
        programs.close()
        programs.close()
    assert builder.asked == [Q4_K_M, BLOCKS, BLOCKS]


def test_tests_build_everything(builder, programs):
    """So that all of them together compile few programs."""
    programs.holding(BLOCKS)
    programs.holding(frozenset({RECURRENT}))
    assert builder.asked == [EVERYTHING]


@pytest.fixture
def build(device, tmp_path, monkeypatch) -> Callable[..., Any]:
    """Step programs without a compiler: one is the text of its formats."""
    compiled: list[str] = []

    class Program(str):
        def binary(self) -> bytes:
            return self.encode()

    def compile_it(context: Any, device: Device, source: str, *rest: object) -> Program:
        compiled.append(source)
        return Program(source.split("FOR_EACH_QUANTIZED(X)")[1].splitlines()[0].strip())

    monkeypatch.setattr(program_module, "_compile", compile_it)
    monkeypatch.setattr(
        program_module, "_from_binary", lambda context, binary, options: binary.decode()
    )

    def run(parts: Parts, options: str = "") -> tuple[Parts, str, int]:
        before = len(compiled)
        held, program = build_step_program(None, device, parts, options, tmp_path)
        return held, program, len(compiled) - before

    return run


def test_the_cache_gives_what_holds_enough(build, tmp_path):
    """The very program, else the one with the least beside what is needed."""
    one, three = frozenset({"Q8_0"}), BLOCKS | {"Q4_K"}
    assert build(three) == (three, "X(Q4_1) X(Q8_0) X(Q4_K)", 1)
    assert build(one) == (three, "X(Q4_1) X(Q8_0) X(Q4_K)", 0)
    assert build(EVERYTHING)[::2] == (EVERYTHING, 1)
    assert build(one)[::2] == (three, 0)
    assert build(frozenset({RECURRENT}))[::2] == (EVERYTHING, 0)
    assert build(three, "-DX=1")[::2] == (three, 1)
    assert build(BLOCKS, "-DX=1")[::2] == (three, 0)
    assert len(list(tmp_path.iterdir())) == 3


def test_entries_that_are_none_are_passed_over(build, tmp_path):
    """A damaged program and a file of another name are as if they were not there."""
    build(EVERYTHING)
    (entry,) = tmp_path.iterdir()
    entry.with_name(f"{entry.stem.rpartition('-')[0]}-backup.bin").write_bytes(b"")
    entry.write_bytes(entry.read_bytes()[:-1])
    assert build(BLOCKS) == (BLOCKS, "X(Q4_1) X(Q8_0)", 1)
    assert build(BLOCKS)[::2] == (BLOCKS, 0)
