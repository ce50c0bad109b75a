"""Loops are written out, arrays become values, and operations of floats stay as they were."""

from pathlib import Path

from accel.vulkan.build import ENVIRONMENT, FOLDER, UNROLLED_OPS, builds, unrolled
from accel.vulkan.spirv import FLOAT_ARITHMETIC, TYPE_ARRAY, exact, instructions, words_of
from contract.kernel import decode_kernel
from tests.vulkan.test_spirv import compile_raw, contractible, validated

LOOP_MERGE, TYPE_POINTER, VARIABLE, FUNCTION = 246, 32, 59, 7
UNROLL = 1
LOOPS = """0.0;
    float kept[4];
    [[unroll]] for (uint i = 0u; i < 4u; i++) kept[i] = given.a * float(i);
    [[unroll]] for (uint i = 0u; i < 4u; i++)
        [[unroll]] for (uint k = 0u; k < 3u; k++) kept[i] = kept[i] + given.b;
    result.v[1] = (kept[0] + kept[1]) + (kept[2] + kept[3])"""
CONSTANTS = "given.a * 2.0 * 3.0 + 0.0"


def loops_and_arrays(code: bytes) -> tuple[int, int]:
    """Loops that ask to be unrolled, and arrays of functions."""
    found = list(instructions(words_of(code)))
    arrays = {int(i.words[1]) for i in found if i.opcode == TYPE_ARRAY}
    array_pointers = {
        int(i.words[1])
        for i in found
        if i.opcode == TYPE_POINTER and i.words[2] == FUNCTION and int(i.words[3]) in arrays
    }
    loops = sum(i.opcode == LOOP_MERGE and bool(i.words[3] & UNROLL) for i in found)
    return loops, sum(i.opcode == VARIABLE and int(i.words[1]) in array_pointers for i in found)


def float_operations(code: bytes) -> int:
    return sum(i.opcode in FLOAT_ARITHMETIC for i in instructions(words_of(code)))


def with_loops(folder: Path) -> bytes:
    raw = compile_raw(folder, LOOPS, "#extension GL_EXT_control_flow_attributes : require")
    return exact(raw)


def test_loops_are_written_out(tmp_path):
    """Those around others, too."""
    code = with_loops(tmp_path)
    assert loops_and_arrays(code) == (3, 1)
    made = exact(unrolled(code, ENVIRONMENT))
    assert loops_and_arrays(made) == (0, 0)
    assert float_operations(made) == 4 + 4 * 3 + 3
    assert contractible(made) == []
    assert validated(tmp_path, made) == ""


def test_operations_of_floats_stay(tmp_path):
    """And a negative control: what is not marked is folded."""
    raw = compile_raw(tmp_path, CONSTANTS)
    assert float_operations(raw) == 3
    assert float_operations(unrolled(exact(raw), ENVIRONMENT)) == 3
    assert float_operations(unrolled(raw, ENVIRONMENT)) < 3


def test_kept_modules_have_no_such_loop():
    """Of the kernels that are to keep their arrays in registers."""
    names = [build.name for build in builds() if build.module.op in UNROLLED_OPS]
    assert names
    for name in names:
        kernel = decode_kernel((FOLDER / f"{name}.zrt").read_bytes())
        assert loops_and_arrays(kernel.code) == (0, 0)
