"""``zinc-rt asm`` and ``zinc-rt pm4-test``."""

import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from accel.amd.isa.decode import instructions
from accel.amd.isa.semantics import VECTOR_OFFSET
from accel.amd.kernel_files import FOLDER
from accel.amd.sim.fake_kernel import FakeKernel
from accel.amd.tier import AmdTier
from accel.amd.tools.build import COMPILER
from accel.amd.tools.listing import listing, occupancy, spans
from accel.amd.tools.trace import load_trace
from contract.kernel import decode_kernel
from harness.cli.main import main
from harness.conformance.cases import check_default_model
from tests.amd.code import need_program, shipped, some_shipped

KERNELS = FOLDER.parents[1] / "kernels"
Told = Callable[..., tuple[int, str, str]]

ASSEMBLY = """
.text
.p2align 8
.globl store
.type store,@function
store:
  s_load_b64 s[4:5], s[0:1], 0x0
  v_lshlrev_b32 v1, 2, v0
  {wait}
  global_store_b32 v1, v0, s[4:5]
  s_endpgm
.Lend:
.size store, .Lend-store
.rodata
.p2align 6
.amdhsa_kernel store
  .amdhsa_next_free_vgpr 8
  .amdhsa_next_free_sgpr 8
  .amdhsa_kernarg_size 32
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_wavefront_size32 1
  {more}
.end_amdhsa_kernel
"""
WAIT = "s_wait_kmcnt 0x0"
MODE = ".amdhsa_float_denorm_mode_32 3"


@pytest.fixture
def told(capsys) -> Told:
    """``told(*words)`` is a command's exit code and what it printed."""

    def run(*words: object) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def test_a_kernel_of_the_dialect_is_that_of_the_package(told, tmp_path):
    """Compiled from its text, beside other files: the same bytes."""
    need_program(COMPILER)
    for name, file, more in (
        ("scale.k", "scale", ()),
        ("embed.k", "embed.q8_0", ("--dtype", "q8_0")),
        ("soft_cap.k", "soft_cap.integer", ("--integer",)),
    ):
        source, target = tmp_path / name, tmp_path / f"{file}.zrt"
        source.write_text((KERNELS / name).read_text())
        code, out, _ = told("asm", source, "-o", target, *more)
        assert code == 0, out
        assert decode_kernel(target.read_bytes()).code == shipped(file).code
        assert f"{file.removesuffix('.integer')}" in out


def test_assembly_becomes_a_kernel(told, tmp_path):
    need_program(COMPILER)
    source = tmp_path / "store.s"
    source.write_text(ASSEMBLY.format(wait=WAIT, more=MODE))
    assert told("asm", source, "--items", 64)[0] == 0
    kernel = decode_kernel(source.with_suffix(".zrt").read_bytes())
    assert kernel.workgroup_size == (64, 1, 1)
    code, out, _ = told("asm", source.with_suffix(".zrt"), "--list")
    assert code == 0
    assert re.search(r"s_load_b64 +s\[4:5\] <- s\[0:1\]", out)
    assert re.search(r"global_store_b32 +s\[4:5\] exec v\[0:1\]|v\[0:1\]", out)
    assert told("asm", source.with_suffix(".zrt"))[2].startswith("error: ")


REFUSED = {
    "a wait is missing": ("s_nop 0", MODE, "2 waits are missing: global_store_b32"),
    "scratch": (
        WAIT,
        ".amdhsa_private_segment_fixed_size 16\n  " + MODE,
        "16 bytes of scratch memory",
    ),
    "float mode": (WAIT, ".amdhsa_float_denorm_mode_32 0", "float mode"),
    "not an instruction": ("v_nonsense v0", MODE, "store.s: .*error: invalid instruction"),
    "no semantics": ("s_wait_kmcnt 0x0\n  s_ttracedata", MODE, "has no semantics"),
    "a branch": (WAIT + "\n  s_branch 0x1000", MODE, "no code"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_assembly_that_is_refused(name, told, tmp_path):
    """In one line that says what, and nothing is written."""
    need_program(COMPILER)
    wait, more, problem = REFUSED[name]
    source = tmp_path / "store.s"
    source.write_text(ASSEMBLY.format(wait=wait, more=more))
    code, _, err = told("asm", source)
    assert code == 2
    assert re.search(problem, err, re.DOTALL), err
    assert not source.with_suffix(".zrt").exists()


def test_input_that_is_no_kernel(told, tmp_path):
    need_program(COMPILER)
    for name, text, words, problem in (
        ("a.txt", b"", (), "ends in none of"),
        ("none.k", None, (), "No such file"),
        ("scale.k", b"\xff", (), "is not text"),
        ("scale.k", b" " * (1 << 21), (), "bytes of source"),
        ("other.k", b"", (), "there is no op other"),
        ("matmul.k", b"", (), r"--dtype \(none\): matmul is compiled for f32"),
        ("scale.k", b"", ("--dtype", "q4_k"), "scale is compiled for no storage type"),
        ("scale.k", b"nonsense", (), "scale.k:1:1: error"),
        ("scale.k", b'#include "missing.h"\n', (), "missing.h"),
        ("a.zrt", b"ZRT", (), "is a kernel file already"),
        ("a.zrt", b"ZRT", ("--list",), "ends before"),
        ("store.s", ASSEMBLY.format(wait=WAIT, more=MODE).encode(), ("--items", 33), "--items 33"),
        ("empty.s", b".text\n", (), "has to have one kernel"),
    ):
        path = tmp_path / name
        if text is not None:
            path.write_bytes(text)
        code, _, err = told("asm", path, *words)
        assert code == 2, (name, err)
        assert re.search(problem, err), err
        assert err.count("\n") == 1 or "error:" in err


@pytest.mark.parametrize("name", ["add", "flash_attn", "matmul_row.q4_k"])
def test_a_listing_has_every_instruction(name):
    """Words of all the code in order."""
    kernel = shipped(name)
    lines = [line.strip() for line in listing(kernel)]
    body = [line for line in lines[1:] if not line.endswith(":")]
    found = list(instructions(kernel.code))
    assert len(body) == len(found)
    for line, instruction in zip(body, found, strict=True):
        words = kernel.code[instruction.address : instruction.end]
        assert line.startswith(words[:4][::-1].hex())
        assert instruction.name in line


def test_registers_by_name():
    registers = {0, 1, 5, 106, 107, 108, 124, 126, *(VECTOR_OFFSET + n for n in (3, 4))}
    assert spans(registers) == "s[0:1] s5 vcc vcc_hi ttmp0 null exec v[3:4]"


def test_waves_that_fit():
    """By registers in steps of 24, by group memory of a unit with two SIMDs."""
    assert all(1 <= occupancy(kernel) <= 16 for kernel in some_shipped(7))
    assert occupancy(shipped("add")) == 16


def test_packets_are_tried_recorded_and_replayed(told, tmp_path, name):
    path = tmp_path / "packets.trace"
    code, out, _ = told("pm4-test", "--tier", name, "--device", "simulated", "--record", path)
    assert code == 0
    assert "gfx1201 (simulated)" in out
    assert "FAILED" not in out
    assert out.count("\nok") == 10
    code, out, _ = told("pm4-test", "--replay", path)
    assert (code, "every byte is the same" in out) == (0, True)
    code, out, _ = told("pm4-test", "--list", path)
    assert code == 0
    assert "        DISPATCH_DIRECT" not in out.splitlines()[1]
    assert "COND_EXEC" in out
    trace = load_trace(path)
    trace.submissions[2].words[-1] ^= 1
    trace.submissions[2].digests[0] ^= 1
    trace.save(path)
    code, out, _ = told("pm4-test", "--replay", path)
    assert (code, "differs after submission 2" in out) == (1, True)
    assert told("pm4-test", "--replay", tmp_path / "none")[2].startswith("error: ")
    assert told("pm4-test", "--replay", __file__)[2].startswith("error: ")


def test_packets_of_a_gpu_that_is_not_there(told, name):
    code, _, err = told("pm4-test", "--tier", name, "--device", "no such card")
    assert code == 2
    assert err.startswith("error: ")


def test_conformance_of_the_simulated_gpu(told, tmp_path, name, monkeypatch):
    """Its package says what it is; a check that opens a tier of its own opens the same."""
    opened: list[str] = []

    def checked(folder: Path, path: Path, tier: AmdTier) -> list[str]:
        with tier:
            opened.append(tier.info.device)
        return []

    monkeypatch.setattr("harness.goldens.check_default_model", checked)
    requested, out = tmp_path / "list.txt", tmp_path / "package.tar.gz"
    requested.write_text("tier/opcodes\nparity/barrier\n")
    words = ("--tier", name, "--device", "simulated", "--must-pass", requested, "--out", out)
    assert told("conformance", *words)[0] == 0
    with tarfile.open(out) as package:
        facts = package.extractfile("zinc-rt-conformance/run.json")
        assert facts is not None
        assert "gfx1201 (simulated)" in facts.read().decode()
    with AmdTier(kernel=FakeKernel(), tier=name) as tier:
        assert check_default_model(tmp_path, tier) == []
    assert opened == ["gfx1201 (simulated)"]
