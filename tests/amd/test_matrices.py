"""Products by matrix instructions: what they compute, when a GPU is trusted with them, and that
steps of many tokens use them."""

import numpy as np
import pytest

from accel.amd.isa.blocks import blocks_of
from accel.amd.isa.decode import EXEC, decode
from accel.amd.isa.semantics import MATRIX, VECTOR_OFFSET, access
from accel.amd.self_check import ProbeCase
from accel.amd.sim import arithmetic, command_processor
from accel.amd.sim.memory_view import GpuFault
from accel.amd.sim.translate import block_function
from accel.amd.tier import AmdTier
from accel.kernels.product_check import matrices_agree
from accel.kernels.source import matrix_modules
from contract.dtypes import Q4_K, Q6_K, DType
from contract.errors import CodecError
from contract.opcodes import Opcode
from harness.parity.cases import all_cases
from harness.parity.execute import compare
from tests.amd.code import words

WMMA_V8 = 0xCC444008, 0x1A030100
"""v_wmma_i32_16x16x16_iu8 v[8:15], v[0:1], v[128:129], 0, both operands unsigned."""
CLAMP = 1 << 15


def registers(matrix: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> tuple[object, ...]:
    """Two vector registers uint32[1, 32] that hold uint8[16, 16]: lane l half (l div 16) of row
    l mod 16."""
    lanes = [matrix[lane % 16, 8 * (lane // 16) : 8 * (lane // 16) + 8] for lane in range(32)]
    held = np.ascontiguousarray(np.stack(lanes)).view(np.uint32)
    return held[None, :, 0].copy(), held[None, :, 1].copy()


@pytest.mark.parametrize("signs", range(4))
def test_a_product_of_matrices(signs):
    """As the ISA guide has its operands, with any signs, on top of numbers that overflow."""
    rng = np.random.default_rng(signs)
    a, b = rng.integers(0, 256, (2, 16, 16), np.uint8)
    a[0], b[0] = 128, 128
    addend = tuple(rng.integers(0, 1 << 32, (1, 32), np.uint32) for _ in range(8))
    found = arithmetic.matrix_product(registers(a), registers(b), addend, signs, None)
    x, y = (m.view(np.int8) if signs >> n & 1 else m for n, m in enumerate((a, b)))
    exact = x.astype(np.int64) @ y.astype(np.int64).T
    for lane in range(32):
        for register in range(8):
            element = register + 8 * (lane // 16), lane % 16
            total = int(exact[element]) + int(addend[register][0, lane])
            assert int(found[register][0, lane]) == total % (1 << 32)


def test_registers_that_are_alike_in_all_waves_or_lanes():
    """Three waves by operands of one, and by a register whose lanes are the same."""
    rng = np.random.default_rng(1)
    many = tuple(rng.integers(0, 1 << 32, (3, 32), np.uint32) for _ in range(2))
    one = np.full((1, 1), 0x01020304, np.uint32), rng.integers(0, 1 << 32, (1, 32), np.uint32)
    whole = tuple(np.broadcast_to(x, (3, 32)).copy() for x in one)
    expected = arithmetic.matrix_product(many, whole, (), 3, None)
    found = arithmetic.matrix_product(many, one, (), 3, None)
    assert np.array_equal(found, expected)


def test_all_lanes_have_to_take_part():
    zeros = (np.zeros((1, 32), np.uint32),) * 2
    some = np.arange(32)[None, :] != 5
    with pytest.raises(GpuFault, match="lanes that take no part"):
        arithmetic.matrix_product(zeros, zeros, (), 3, some)
    arithmetic.matrix_product(zeros, zeros, (), 3, some | True)


def test_registers_read_and_written():
    """A wait that is missing before it is then found."""
    first, second = WMMA_V8
    own = decode(words(first, second & ~(511 << 18) | 264 << 18), 0)
    assert own.name == MATRIX
    vectors = {VECTOR_OFFSET + n for n in (0, 1, 128, 129, *range(8, 16))}
    assert access(own).reads == vectors | {EXEC}
    assert access(own).writes == {VECTOR_OFFSET + n for n in range(8, 16)}
    alone = decode(words(*WMMA_V8), 0)
    assert access(alone).reads == {VECTOR_OFFSET + n for n in (0, 1, 128, 129)} | {EXEC}


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ((WMMA_V8[0] | CLAMP, WMMA_V8[1]), "clamp is not supported"),
        ((WMMA_V8[0], WMMA_V8[1] + (1 << 18)), "src2 is not supported"),
        ((WMMA_V8[0], WMMA_V8[1] & ~511 | 4), "src0 is not supported"),
    ],
    ids=["clamp", "constant", "scalar"],
)
def test_what_no_kernel_uses_is_refused(code, problem):
    def executed() -> None:
        (block,) = blocks_of(words(*code, 0xBFB00000)).values()
        block_function(block, False, False)

    with pytest.raises(CodecError, match=problem):
        executed()


def only(monkeypatch: pytest.MonkeyPatch, dtype: DType) -> None:
    """The self-test asks for one format."""
    monkeypatch.setattr("accel.kernels.product_check.FORMATS", (dtype,))


def agree(tier: AmdTier) -> bool:
    """What the GPU is asked."""
    runtime = tier._runtime
    case = ProbeCase(runtime.device, runtime.queue, runtime.modules)
    return matrices_agree(case.device, case.launch, every=False)


def test_a_gpu_is_asked_for_the_bits_of_packed_dots(open_amd, kernel, monkeypatch):
    """Here of a format whose blocks have halves; what the kernels read is checked."""
    only(monkeypatch, Q6_K)
    assert agree(open_amd(kernel))


@pytest.mark.soak
@pytest.mark.parametrize("module", matrix_modules(), ids=str)
def test_every_format(open_amd, kernel, module, monkeypatch):
    assert module.dtype is not None
    only(monkeypatch, module.dtype)
    assert agree(open_amd(kernel))


MANY = [
    case
    for case in all_cases(1)
    if case.opcode is Opcode.MATMUL and case.dtype == Q4_K and case.sizes["tokens"] == 17
][::3]


def loaded(tier: AmdTier) -> set[str]:
    """Kernels whose code is on the GPU."""
    return {name.split(".")[0] for name in tier._runtime.modules._loaded}


def test_steps_of_many_tokens_are_multiplied_by_matrix_instructions(open_amd, monkeypatch):
    """Of the whole tier: asked, lowered, fused, launched, equal to the definition."""
    only(monkeypatch, Q4_K)
    tier = open_amd()
    assert "matmul_tiles" not in loaded(tier)
    assert MANY
    for case in MANY:
        assert compare(tier, case) == {}, str(case)
    assert "matmul_tiles" in loaded(tier)


def test_a_gpu_that_multiplies_otherwise_keeps_to_packed_dots(open_amd, monkeypatch):
    """Negative control: elements are where another generation has them. Answers stay right."""
    only(monkeypatch, Q4_K)
    product = arithmetic.matrix_product

    def rows_by_pairs(*operands: object) -> list[object]:
        first = product(*operands)  # type: ignore[arg-type]
        return [first[n ^ 1] for n in range(8)]

    monkeypatch.setattr(arithmetic, "matrix_product", rows_by_pairs)
    monkeypatch.setattr(command_processor, "_programs", {})
    tier = open_amd()
    assert not agree(tier)
    assert compare(tier, MANY[0]) == {}
    assert tier._runtime.uses_matrices() is False


def test_a_choice_is_not_asked_about(open_amd):
    tier = open_amd(matrices=False)
    assert compare(tier, MANY[0]) == {}
    assert "matmul_tiles" not in loaded(tier)
