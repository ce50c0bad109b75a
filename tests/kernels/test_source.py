"""Texts of kernels: complete, of the table of ops, and like those that another compiler makes."""

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from accel.kernels.accessors import packet_constants, packet_struct
from accel.kernels.source import STORED, Language, Module, Traits, module_source, modules
from accel.packets.ops import OPS, TABLE
from accel.packets.packet import CONSTANTS, PACKET
from accel.vulkan.build import file_name
from accel.vulkan.program import kernel_of
from contract.dtypes import KV_DTYPES, Q4_K, WEIGHT_DTYPES
from contract.records import SAMPLING
from tests.long_cases import long_except
from tests.needs import missing

BYTES = {"uint": 4, "int": 4, "float": 4, "U64": 8}


def test_every_op_has_a_module_for_every_storage_type():
    """An op of the table without a kernel file fails here."""
    made = modules()
    assert {module.op for module in made} >= set(TABLE)
    for op in TABLE:
        found = [module.dtype for module in made if module.op == op]
        assert found == list(STORED.get(op, (None,)))
    assert set(STORED["matmul"]) == set(WEIGHT_DTYPES)
    assert set(STORED["flash_attn_batched"]) == set(KV_DTYPES)


@pytest.mark.parametrize("language", Language)
def test_a_text_is_complete(language):
    """Nothing is left to include, and nothing is there twice."""
    for module in modules():
        text = module_source(language, module)
        assert '#include "' not in text
        assert text.count('#line 1 "exact.k"') == text.count(f'#line 1 "{module.op}.k"') == 1


def test_no_kernel_takes_the_larger_of_an_integer_and_its_negation():
    """NVIDIA's compilers lose the negation in a chain of such maxima."""
    magnitude = re.compile(r"\b(?:MAX_I|max)\((?:\([^()]*\))?([^(),]+), -\1\)")
    assert magnitude.search("most = MAX_I(most, MAX_I(m[i], -m[i]));")
    texts = {path: path.read_text("utf-8") for path in Path("accel").rglob("*.*[klhu]")}
    assert Path("accel/kernels/coded_rows.k") in texts
    assert [path for path, text in texts.items() if magnitude.search(text)] == []


def test_an_op_without_a_kernel_is_an_error():
    """And not a text without a kernel."""
    with pytest.raises(KeyError, match="no_such_op"):
        module_source(Language.OPENCL, Module("no_such_op"))


def test_lines_are_those_of_the_files():
    """A compiler names the file and line an error is in, behind an include too."""
    text = module_source(Language.CUDA, Module("rms_norm")).splitlines()
    file, number, lines_of = "", 0, {}
    for line in text:
        if found := re.fullmatch(r'#line (\d+) "(.*)"', line):
            number, file = int(found[1]), found[2]
            continue
        lines_of.setdefault((file, number), line)
        number += 1
    with open("accel/kernels/rms_norm.k", encoding="utf-8") as stored:
        lines = stored.read().splitlines()
    last = len(lines)
    assert lines_of["rms_norm.k", last] == lines[-1]
    assert lines_of["rms_norm.k", 1] == lines[0]


def test_the_packet_is_that_of_the_host():
    """Fields in the order, of the types and at the offsets of numpy's record."""
    assert PACKET.fields is not None
    offset, fields = 0, iter(PACKET.names or ())
    for kind, name, count in re.findall(r"    (\w+) (\w+?)_?(?:\[(\d+)\])?;", packet_struct()):
        assert name == next(fields)
        assert PACKET.fields[name][1] == offset
        offset += BYTES[kind] * int(count or 1)
    assert offset == PACKET.itemsize
    assert next(fields, None) is None


def test_constants_are_those_of_the_host():
    """Of packets, records and formats."""
    found = dict(re.findall(r"#define (\w+) (\w+)\n", packet_constants()))
    numbers = {name: int(text.rstrip("ul"), 0) for name, text in found.items()}
    assert numbers.items() >= CONSTANTS.items()
    assert numbers["Q4_K"] == Q4_K.ggml_id
    assert np.dtype(SAMPLING).fields is not None
    assert numbers["SAMPLING_WORDS"] * 4 == SAMPLING.itemsize
    assert numbers["SAMPLING_TOP_K"] == 4


def test_operands_sizes_and_reals_have_the_names_of_the_table():
    """Whatever a kernel reads of its packet."""
    for op in OPS:
        module = next(module for module in modules() if module.op == op.name)
        text = module_source(Language.CUDA, module)
        struct = re.search(r"struct OP \{\n(.*?)\};", text.replace("STRUCT(OP)", "struct OP"), re.S)
        assert struct is not None
        declared = re.findall(r"(\w+);", struct[1])
        operands = [part for o in op.operands for part in (o.name, f"{o.name}_stride")]
        assert declared == [*operands, *op.sizes, *op.reals, "arrangement"]


def test_what_a_device_cannot_do_is_in_the_text():
    """The macros that choose between its instructions and integers."""
    for able in (True, False):
        traits = Traits(divide=able, root=able, half=able, dot=able)
        text = module_source(Language.OPENCL, Module("rms_norm"), traits)
        for name in ("DIVIDE", "ROOT", "HALF", "DOT"):
            assert f"#define NATIVE_{name} {able:d}\n" in text


BUILT_IN = re.compile(r"\[\[(thread\w+|threads\w+)\]\]")
BARRIER = "threadgroup_barrier("
ONE_OF_EACH = {module.op: module for module in modules()}.values()


def crossed(module: Module, folder: Path) -> str:
    """The text that spirv-cross makes of the stored module of Vulkan."""
    program = shutil.which("spirv-cross") or missing(
        "spirv-cross is not installed", "apt-get install spirv-cross"
    )
    binary = folder / f"{module}.spv"
    binary.write_bytes(kernel_of(file_name(module)).code)
    command = [program, "--msl", "--msl-version", "30000", str(binary)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", long_except(modules(), *ONE_OF_EACH), ids=str)
def test_both_texts_ask_for_the_same(module, tmp_path):
    """The kernel's built-in arguments, the group's items, and whether items wait for each other."""
    theirs, ours = crossed(module, tmp_path), module_source(Language.METAL, module)
    kernel = theirs[theirs.index("kernel void") :]
    assert set(BUILT_IN.findall(kernel)) <= set(BUILT_IN.findall(ours))
    size = re.search(r"gl_WorkGroupSize \S+ = uint3\((\d+)u, 1u, 1u\)", theirs)
    if size is not None:
        assert int(size[1]) == module.group_size
    assert "buffer(0)" in kernel
    assert "buffer(1)" not in kernel
    assert (BARRIER in theirs) == (BARRIER in body(ours))


def body(text: str) -> str:
    """What a text's kernel and the functions it reaches say, macros replaced."""
    compiler = shutil.which("g++") or missing("g++ is not installed", "apt-get install g++")
    command = [compiler, "-E", "-P", "-x", "c++", "-"]
    source = text.replace("#include <metal_stdlib>", "")
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=True)
    return done.stdout
