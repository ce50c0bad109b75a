"""Building programs, and keeping them on disk."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest

from accel.opencl import binding as cl
from accel.opencl import program as program_module
from accel.opencl.device import Device
from accel.opencl.pocl_cache import check_room
from accel.opencl.program import (
    OP_NAMES,
    build_program,
    kernel_text,
    op_files,
    processor_key,
    source_of,
    step_files,
)
from accel.packets.accessors import packet_accessors
from accel.packets.build import BuildError
from accel.packets.disk_cache import write_entry
from accel.packets.ops import TABLE
from contract.errors import TierUnavailable
from tests.needs import machine_lacks
from tests.patience import PROCESS_SECONDS

FILES = {"one.cl": "__kernel void one(__global int *x) { x[0] = 1; }\n"}
OPTIONS = "-cl-std=CL1.2"
Build = Callable[..., list[str]]


@pytest.fixture
def build(device, tmp_path) -> Build:
    """``build(files, options)`` builds with a cache and returns what progress was told."""
    context = cl.Context([device.handle])

    def run(files: dict[str, str] = FILES, options: str = OPTIONS) -> list[str]:
        told: list[str] = []
        program = build_program(context, device, files, options, tmp_path, told.append)
        # Raises an error where the program has no such kernel.
        cl.Kernel(program, "one")
        return told

    return run


def test_source_and_options_are_the_key(build, tmp_path):
    """Progress is told of a compilation, and nothing is compiled twice."""
    assert [len(build()), len(build())] == [1, 0]
    assert len(build({"one.cl": FILES["one.cl"] + "\n"})) == 1
    assert len(build(options=OPTIONS + " -DX=1")) == 1
    assert len(list(tmp_path.glob("*.bin"))) == 3


def test_another_processor_is_another_entry(device, build, tmp_path, monkeypatch):
    """A folder of built programs may be shared by machines whose devices have one name."""
    if not device.is_cpu:
        machine_lacks("OpenCL CPU device in the first place")
    build()
    monkeypatch.setattr("accel.opencl.program.processor_key", lambda: "0123")
    assert len(build()) == 1
    monkeypatch.undo()
    assert build() == []
    assert len(list(tmp_path.glob("*.bin"))) == 2


def test_processors_are_told_apart_by_what_all_their_cores_can_do(tmp_path):
    """Speeds, numbers and the order of flags do not matter."""

    def key(*cores: str) -> str:
        path = tmp_path / f"cpuinfo{len(list(tmp_path.iterdir()))}"
        path.write_text("".join(f"processor : {n}\n{core}\n" for n, core in enumerate(cores)))
        return processor_key(path)

    assert key("flags : fpu avx2") == key("flags : avx2 fpu", "flags\t: fpu avx2")
    assert key("flags : fpu avx2") == key("flags : fpu avx2", "flags : fpu avx2 avx512f")
    keys = {key("flags : fpu"), key("flags : fpu avx2"), key("Features : fp asimd"), key("")}
    assert len(keys) == 4
    assert processor_key(tmp_path / "none") == key("")


def test_an_entry_that_cannot_be_used_is_replaced(build, tmp_path):
    """What a crash or a full disk left, and a whole one that is not of this driver; tests of
    Vulkan's pipelines have other damages."""
    build()
    (entry,) = tmp_path.glob("*.bin")
    entry.write_bytes(entry.read_bytes()[:-1])
    assert [len(build()), len(build())] == [1, 0]
    write_entry(entry, program_module.MAGIC, b"not a program of this driver")
    assert [len(build()), len(build())] == [1, 0]


def test_an_unwritable_cache_only_costs_time(device, tmp_path):
    """A cache that is a file is no folder: the program is built all the same."""
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    context = cl.Context([device.handle])
    cl.Kernel(build_program(context, device, FILES, OPTIONS, blocked), "one")


@pytest.mark.parametrize(
    ("free", "files", "problem"),
    [
        (1 << 20, 1000, "1.0 MB are free, of the 17 MB that it needs"),
        (1 << 40, 7, "7 files are free, of the 64 that it needs"),
    ],
)
@pytest.mark.parametrize("cached", [False, True], ids=["compiled", "cached"])
def test_a_folder_without_room_is_said(
    device, build, tmp_path, monkeypatch, cached, free, files, problem
):
    """LLVM ends the whole process there, also when PoCL unpacks a program that is stored."""
    if not device.is_pocl:
        machine_lacks("PoCL")
    if cached:
        build()
    _fill(monkeypatch, f_bavail=free // 512, f_files=9999, f_favail=files)
    monkeypatch.setenv("POCL_CACHE_DIR", str(tmp_path / "kernels"))
    remedy = "free some disk space, or set POCL_CACHE_DIR to another folder"
    where = f"PoCL builds kernels in {tmp_path / 'kernels'}: {problem}; {remedy}"
    with pytest.raises(TierUnavailable, match=re.escape(where)):
        build()


def test_a_folder_that_reports_no_size_is_not_full(device, tmp_path, monkeypatch):
    """Such as one in memory without a limit."""
    monkeypatch.setenv("POCL_CACHE_DIR", str(tmp_path / "kernels"))
    _fill(monkeypatch, f_blocks=0, f_bavail=0, f_files=0, f_favail=0)
    check_room(device)


def _fill(patch: pytest.MonkeyPatch, **sizes: int) -> None:
    disk = SimpleNamespace(**{"f_blocks": 1 << 40, "f_frsize": 512, **sizes})
    patch.setattr(os, "statvfs", lambda path: disk)


CHECK = """
import os, sys
from types import SimpleNamespace
from accel.opencl.pocl_cache import check_room
from contract.errors import TierUnavailable
os.environ["POCL_CACHE_DIR"] = sys.argv[1]
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    check_room(SimpleNamespace(is_pocl=True))
except TierUnavailable as error:
    print(error.reason)
"""
"""Asks as a user who may not enter every folder."""


@pytest.mark.parametrize(
    ("mode", "below", "said"),
    [
        (0o777, ".", ""),
        (0o777, "new/kernels", ""),
        (0o777, "n" * 300, "File name too long"),
        (0o777, "file/kernels", "Not a directory"),
        (0o555, "new/kernels", "Permission denied"),
        (0o000, "new/kernels", "Permission denied"),
        (0o555, ".", "it cannot be written"),
        (0o666, ".", "it cannot be written"),
    ],
)
def test_real_folders_are_asked(mode, below, said):
    """Whatever the system says of a folder, it is the reason why there is no tier."""
    with TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        folder = Path(name, "of another")
        folder.mkdir()
        (folder / "file").touch()
        folder.chmod(mode)
        asked = [sys.executable, "-c", CHECK, str(folder / below)]
        result = subprocess.run(asked, capture_output=True, text=True, timeout=PROCESS_SECONDS)
    assert (result.stderr, result.returncode) == ("", 0)
    where = f"PoCL builds kernels in {folder / below}: "
    assert result.stdout == (f"{where}{said}\n" if said else "")


def test_a_small_disk_is_asked(device, tmp_path, monkeypatch):
    """As the system reports it."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path])
    if mounted.returncode:
        machine_lacks("right to mount a file system")
    try:
        monkeypatch.setenv("POCL_CACHE_DIR", str(tmp_path / "kernels"))
        with pytest.raises(TierUnavailable, match=r"kernels: 1\.0 MB are free, of the 17 MB"):
            check_room(device)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_cache_that_cannot_be_entered_has_no_programs(tmp_path):
    """Such as one of another user; root may enter any, but none has so long a name."""
    folder = tmp_path / ("n" * 300)
    assert program_module._larger(frozenset(), folder / "whole.bin") == []


def test_two_processes_fill_one_cache(device, tmp_path):
    """Both succeed, one entry remains, no partial file does."""
    code = (
        "import sys, pathlib\n"
        "from accel.opencl import binding as cl\n"
        "from accel.opencl.device import find_device\n"
        "from accel.opencl.program import build_program\n"
        "device = find_device()\n"
        f"build_program(cl.Context([device.handle]), device, {FILES!r}, {OPTIONS!r}, "
        "pathlib.Path(sys.argv[1]))\n"
    )
    root = Path(__file__).parents[2]
    both = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=root) for _ in range(2)
    ]
    assert [process.wait(timeout=PROCESS_SECONDS) for process in both] == [0, 0]
    assert [path.suffix for path in tmp_path.iterdir()] == [".bin"]


def test_a_rejected_kernel_is_named_with_the_compilers_words(build):
    """The error names the file the fault is in, and holds the log."""
    broken = {**FILES, "two.cl": "__kernel void two(void) { undeclared = 1; }"}
    with pytest.raises(BuildError, match=r"two\.cl") as caught:
        build(broken)
    assert "undeclared" in caught.value.log


def test_lines_of_the_program_are_counted_per_file():
    """A compiler reports places in the files of the repository."""
    assert source_of({"a.cl": "x", "b.cl": "y"}) == '#line 1 "a.cl"\nx\n#line 1 "b.cl"\ny\n'


def test_every_op_has_its_file():
    """The file the table names holds the kernel of each op."""
    text = step_files()
    for name, op in TABLE.items():
        file = text[f"{op.source}.cl"]
        macros = (f"DEFINE_{kind}({name}," for kind in ("ELEMENTWISE", "BY_COLUMNS"))
        assert any(definition in file for definition in (f"op_{name}(", *macros))


def test_an_op_without_a_kernel_file_is_refused(monkeypatch):
    """The table has an op whose file nobody wrote."""
    missing = replace(TABLE["add"], name="subtract", source="subtract")
    monkeypatch.setattr(program_module, "TABLE", {"subtract": missing})
    with pytest.raises(BuildError, match=r"subtract\.cl"):
        op_files(["subtract"])


def _built(device: Device, files: dict[str, str]) -> None:
    options = (
        "-cl-std=CL1.2 -DSHARED_ADDRESSES=1 -DNATIVE_DIVIDE=1 -DNATIVE_SQRT=1 "
        "-DDOT_VNNI=0 -DPERSISTENT=0 -DYIELD_SYSCALL=0"
    )
    build_program(cl.Context([device.handle]), device, files, options, None)


def test_a_table_without_the_ops_kernel_function_is_refused(device):
    """Its file is there, but defines no such op."""
    files = step_files(["add"])
    files["add.cl"] = files["add.cl"].replace("(add,", "(sum,")
    with pytest.raises(BuildError, match=r"add"):
        _built(device, files)


@pytest.mark.parametrize(("given", "used"), [("weight", "gain"), ("eps", "epsilon")])
def test_a_kernel_that_uses_another_name_is_refused(device, given, used):
    """The compiler's words name the file, and the field the table does not have."""
    files = step_files(["rms_norm"])
    files["rms_norm.cl"] = files["rms_norm.cl"].replace(f"op.{given}", f"op.{used}")
    with pytest.raises(BuildError, match=r"rms_norm\.cl") as caught:
        _built(device, files)
    assert used in caught.value.log


def test_kernels_read_packets_by_name_alone():
    """No kernel knows the place of an operand, a size or a real."""
    for file in {f"{op.source}.cl" for op in TABLE.values()}:
        text = kernel_text(file)
        assert not re.search(r"packet->(operand|stride|size|real)\b|OPERAND\(", text), file
    assert "packet->operand[3]" in packet_accessors([TABLE["matmul"]])


def _kernels_with_assembly(text: str) -> list[str]:
    """Kernels that have assembly, in their text or in that of functions inlined into them."""
    for not_read in (
        r"#ifdef __NV_CL_C_VERSION\n.*?\n#(?:else|endif)\n",
        r"__attribute__\(\(.*?\)\) ",
    ):
        text = re.sub(not_read, "", text, flags=re.DOTALL)
    function = re.compile(
        r"^(\w[^;{}#()]*?(\w+)\([^;{}()]*\)) \{\n(.*?)^\}", re.DOTALL | re.MULTILINE
    )
    functions = function.findall(text)
    assert sum(body.count("__asm__") for *_, body in functions) == text.count("__asm__") > 0
    holders = {"__asm__"}
    while True:
        uses = re.compile(rf"\b(?:{'|'.join(holders)})\b")
        found = {
            name for head, name, body in functions if "OUTLINED" not in head and uses.search(body)
        }
        if found <= holders:
            return sorted(
                name for head, name, _ in functions if "__kernel" in head and name in found
            )
        holders |= found


def test_no_kernel_holds_assembly():
    """PoCL 4 to 6 abort on it; what executes assembly is a function that is not inlined."""
    text = source_of(step_files())
    assert _kernels_with_assembly(text) == []
    for head in ("bool meet(", "ulong cycles("):
        inlined = text.replace(f"OUTLINED {head}", f"static inline {head}")
        assert _kernels_with_assembly(inlined) == ["run_packets"]


def test_names_of_an_op_are_distinct():
    """Operands, their strides, sizes and reals are members of one structure."""
    for op in TABLE.values():
        operands = [operand.name for operand in op.operands]
        names = [*operands, *(f"{name}_stride" for name in operands), *op.sizes, *op.reals]
        assert len(set(names)) == len(names), op.name
    assert tuple(TABLE) == OP_NAMES
