"""What clang makes of the kernels' texts: modules of SPIR-V that forbid other results than the text
defines."""

import shutil
import subprocess

import pytest

from accel.intel import compiler
from accel.intel.compiler import Compiler, InexactKernel, check_exact, find_spirv_compiler
from accel.kernels.source import Language, Module, Traits, module_source
from accel.packets.build import BuildError
from accel.vulkan.spirv import instructions, words_of
from contract.dtypes import I12, Q4_K
from tests.intel.spirv_c import translated
from tests.intel.spirv_types import Untranslated
from tests.needs import need_device

SELF_TEST = module_source(Language.INTEL, Module("self_test"), Traits())
SUM = """
kernel void sum(global float *a) { a[0] = BODY; }
"""
VALIDATOR = shutil.which("spirv-val")
F_ADD, F_MUL, F_DIV = 129, 133, 136


@pytest.fixture
def clang(kernel_cache) -> Compiler:
    """The compiler of the tier."""
    return need_device(lambda: find_spirv_compiler(kernel_cache / "intel"))


def opcodes(code: bytes) -> list[int]:
    """The instructions of a module."""
    return [i.opcode for i in instructions(words_of(code))]


def test_operations_stay_as_they_are_written(clang):
    """A product and a sum are two instructions, and the entry point forbids the driver to make one
    of them; nothing allows fast mathematics."""
    code = clang.compiled("sum", SUM.replace("BODY", "a[1] * a[2] + a[3] / a[4]"))
    assert {F_ADD, F_MUL, F_DIV} <= set(opcodes(code))
    modes = [i for i in instructions(words_of(code)) if i.opcode == compiler.EXECUTION_MODE]
    assert any(int(i.words[2]) == compiler.CONTRACTION_OFF for i in modes)
    check_exact(list(instructions(words_of(code))))
    with pytest.raises(InexactKernel, match="forbid contraction"):
        check_exact([i for i in instructions(words_of(code)) if i.opcode != modes[0].opcode])


@pytest.mark.parametrize(
    ("body", "option", "reason"),
    [
        ("a[1] * a[2] + a[3]", "-ffp-contract=on", "not known to be exact: 26"),
        ("a[1] + a[2]", "-menable-no-nans", "fast mathematics"),
        ("__builtin_fmaf(a[1], a[2], a[3])", "-O2", "not known to be exact: 26"),
        ("__builtin_expf(a[1])", "-O2", "not known to be exact"),
    ],
)
def test_inexact_modules_are_refused(clang, monkeypatch, body, option, reason):
    """The negative control: each way in which a driver could compute something else."""
    monkeypatch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, option))
    with pytest.raises(BuildError, match=reason):
        clang.compiled("sum", SUM.replace("BODY", body))


@pytest.mark.parametrize(
    "module", [Module("self_test"), Module("embed", Q4_K), Module("flash_attn_part", I12)], ids=str
)
def test_modules_are_valid(clang, module, tmp_path):
    """By the types that their translation to C checks, and by spirv-val where it is installed: one
    that clang cannot optimize, and one in which it once lost the conversion of an index."""
    code = clang.compiled(str(module), module_source(Language.INTEL, module, Traits()))
    assert module.entry in translated(code)
    if VALIDATOR is not None:
        path = tmp_path / "module.spv"
        path.write_bytes(code)
        subprocess.run([VALIDATOR, "--target-env", "spv1.2", str(path)], check=True)


def test_modules_are_compiled_once(clang, tmp_path, monkeypatch):
    """They lie in the cache by everything that they depend on."""
    text = SUM.replace("BODY", "a[1]")
    own = Compiler(clang.command, clang.version, tmp_path)
    code = own.compiled("sum", text)
    broken = Compiler(("/no/such/compiler",), clang.version, tmp_path)
    assert broken.compiled("sum", text) == code
    with pytest.raises(FileNotFoundError):
        Compiler(broken.command, "another version", tmp_path).compiled("sum", text)


def test_a_text_with_an_error_names_it(clang):
    """By the file and the line of the kernel."""
    text = module_source(Language.INTEL, Module("add")).replace("A(a) + A(b)", "A(a) +")
    with pytest.raises(BuildError, match=r"building add failed: add\.k:\d+:\d+: error"):
        clang.compiled("add", text)


def test_other_bytes_are_no_module():
    """Neither for the tier nor for the simulated GPU."""
    with pytest.raises(BuildError, match="not a SPIR-V module"):
        compiler.exact("text", b"text")
    with pytest.raises(ValueError, match="not a SPIR-V module"):
        translated(b"text")


def test_an_instruction_that_nobody_translates_is_named(clang):
    """The simulated GPU computes nothing by guessing."""
    code = clang.compiled("sum", SUM.replace("BODY", "a[1]"))
    words = words_of(code).copy()
    load = next(i for i in instructions(words) if i.opcode == 61)
    load.words[0] = int(load.words[0]) & ~0xFFFF | 333
    with pytest.raises(Untranslated, match="instruction 333"):
        translated(words.tobytes())
