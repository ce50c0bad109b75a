"""The decoder against LLVM's, over everything that is shipped and every row of the table."""

import re
import subprocess

import pytest

from accel.amd.generation import GENERATIONS, GFX11, GFX12, Generation
from accel.amd.isa.decode import CARRYING, decode, instructions, isa_of, opcodes
from contract.errors import CodecError
from tests.amd.code import SAMPLE, need_program, shipped, some_shipped, words

S_NOP = 0xBF800000
SUFFIX = re.compile(r"_e(32|64)$")
SECOND_WORDS = (
    *(0x04020100, 0x00000100, 0x00020100, 0x100 | 0x101 << 9 | 0x102 << 18, 0),
    *(0x18000000 | 0x100 | 0x108 << 9 | 0x110 << 18, 0x18000000 | 0x100 | 0x108 << 9 | 2 << 18),
    *(0xF8000000, 0x007C0000 | 0x100, 0x007C0001),
)
"""Operands, of which each opcode takes at least one."""


def disassembler(gpu: Generation) -> list[str]:
    """The command that reads bytes and prints instructions."""
    command = [need_program("llvm-mc-19"), "--disassemble"]
    return [*command, "--triple=amdgcn-amd-amdhsa", f"-mcpu={gpu.cpu}"]


def disassembled(code: bytes, gpu: Generation) -> list[str]:
    """Mnemonics LLVM finds, those it cannot decode left out."""
    text = " ".join(f"{byte:#04x}" for byte in code)
    command = disassembler(gpu)
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    lines = (line.strip() for line in done.stdout.splitlines())
    return [SUFFIX.sub("", line.split()[0]) for line in lines if line and line[0] != "."]


by_gpu = pytest.mark.parametrize("gpu", GENERATIONS, ids=lambda gpu: gpu.cpu)


@by_gpu
@pytest.mark.parametrize("step", [SAMPLE, pytest.param(1, marks=pytest.mark.soak)])
def test_shipped_instructions_are_decoded_as_llvm_does(gpu, step):
    """Mnemonics in order are the same, so lengths are."""
    count = 0
    for kernel in some_shipped(step, gpu):
        found = [found.name for found in instructions(kernel.code, isa_of(gpu.target))]
        assert found == disassembled(kernel.code, gpu), kernel.name
        count += len(found)
    assert count > 50_000 // step


@by_gpu
def test_every_row_of_the_table_is_llvms(gpu):
    """With the first operands it takes; the encodings of VOP3 that other ones share are derived."""
    isa = isa_of(gpu.target)
    rest = dict(opcodes(isa))
    for second in SECOND_WORDS:
        code, asked = b"", []
        for (name, number), mnemonic in rest.items():
            encoding = next(e for e in isa.encodings if e.name == name)
            first = encoding.match | number << encoding.fields["op"][0]
            first |= {"VOP1": 0x100, "VOPC": 0x100, "VGLOBAL": 0x7C * (gpu is GFX12)}.get(name, 0)
            first |= {"VOP2": 0x100, "VOP3P": 0x4000}.get(name, 0)
            code += words(S_NOP | 0x1000 | len(asked), first, second, 0, 0)
            asked.append(((name, number), mnemonic))
        found = _between_marks(code, len(asked), gpu)
        for n, (key, mnemonic) in enumerate(asked):
            if found[n] == mnemonic:
                del rest[key]
        if not rest:
            break
    assert not rest


def _between_marks(code: bytes, count: int, gpu: Generation) -> list[str]:
    """The first mnemonic behind each mark."""
    lines = []
    for start in range(0, len(code), 20):
        part = code[start : start + 20]
        lines += [_listed(part[:4]), _listed(part[4:])]
    text = "\n".join(lines)
    command = disassembler(gpu)
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    found, current = [""] * count, -1
    for line in done.stdout.splitlines():
        parts = line.split()
        if parts[:1] == ["s_nop"] and int(parts[1], 0) & 0xF000 == 0x1000:
            current = int(parts[1], 0) & 0xFFF
        elif parts and parts[0][0] != "." and not found[current]:
            found[current] = SUFFIX.sub("", parts[0])
    return found


def _listed(code: bytes) -> str:
    return " ".join(f"{byte:#04x}" for byte in code)


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (words(0xC8000000, 0), "unknown encoding"),
        (words(0xEC000000, 0, 0), "unknown encoding"),
        (words(0xBF840000 | 0x3F << 16), "no SOPP opcode"),
        (shipped("add").code[:6], "past the end"),
        (words(0xF4000000), "past the end"),
    ],
    ids=["dual issue", "flat", "opcode", "cut", "half"],
)
def test_what_is_no_instruction_is_said_to_be_none(code, problem):
    with pytest.raises(CodecError, match=problem):
        list(instructions(code))


def test_a_generation_does_not_run_the_others_code():
    """Loads through addresses of vectors lie otherwise, and waits are others."""
    for kernel, isa in ((shipped("add"), GFX11), (shipped("add", GFX11), GFX12)):
        with pytest.raises(CodecError):
            list(instructions(kernel.code, isa_of(isa.target)))


def test_a_field_taken_from_the_wrong_bits_is_noticed():
    """Negative control: V_ADD3_U32 with another opcode bit is another instruction."""
    code = words(0xD6550000, 0x04020100)
    assert decode(code, 0).name == "v_add3_u32"
    assert decode(words(0xD6560000, 0x04020100), 0).name != "v_add3_u32"
    assert {"v_add_co_u32", "v_div_scale_f32"} <= CARRYING
