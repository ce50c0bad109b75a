"""The device program: its source, its build options, and built binaries kept on disk."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from accel.kernels.source import Traits
from accel.opencl.cpu_flags import processor_key
from accel.opencl.device import Device, import_pyopencl
from accel.packets.accessors import op_list, packet_accessors, packet_constants
from accel.packets.build import BuildError, Progress, cache_entry
from accel.packets.disk_cache import read_entry, write_entry
from accel.packets.ops import OPS, TABLE

HEADERS = (
    "packet.h",
    "exact.h",
    "blocks.h",
    "norm.h",
    "elementwise.h",
    "argmax.h",
    "sample.h",
    "sample_item.h",
    "lanes_layout.h",
    "matmul_operands.h",
    "matmul_experts.h",
    "matmul_lanes.h",
    "attention_rows.h",
    "attention_tile.h",
    "attention.h",
    "matmul_formats.h",
    "matmul_decode.h",
    "matmul_few.h",
    "matmul_prefill.h",
    "matmul_float.h",
)
ENTRIES = ("entry.cl", "copy_output.cl")
CONSTANTS_FILE = "packet_constants.h"
OP_NAMES = tuple(op.name for op in OPS)
MAGIC = b"zinc-rt opencl program 1\n"


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What the kernels are compiled for; see the headers for the meaning of the macros."""

    persistent: bool
    shared_addresses: bool
    native_divide: bool
    native_sqrt: bool
    futex_syscall: int
    dot_vnni: bool
    packed_dot: bool = False

    def text(self, device: Device) -> str:
        """The compiler's command line."""
        macros = {
            "PERSISTENT": int(self.persistent),
            "SHARED_ADDRESSES": int(self.shared_addresses),
            "NATIVE_DIVIDE": int(self.native_divide),
            "NATIVE_SQRT": int(self.native_sqrt),
            "FUTEX_SYSCALL": self.futex_syscall,
            "DOT_VNNI": int(self.dot_vnni),
        }
        defined = [f"-D{name}={value}" for name, value in macros.items()]
        return " ".join((module_options(device), *defined))

    def traits(self) -> Traits:
        """The same for the kernels that GPU tiers share."""
        return Traits(
            divide=self.native_divide,
            root=self.native_sqrt,
            dot=self.packed_dot,
            shared_addresses=self.shared_addresses,
        )


def module_options(device: Device) -> str:
    """The compiler's command line for a text that defines its own macros."""
    rounded = " -cl-fp32-correctly-rounded-divide-sqrt" if device.correctly_rounded else ""
    return f"-cl-std=CL1.2{rounded}"


def kernel_text(name: str) -> str:
    """The text of one file of ``kernels``. Raises BuildError when there is none."""
    file = resources.files("accel.opencl").joinpath("kernels", name)
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        problem = "accel/packets/ops.py names an op whose kernel file does not exist"
        raise BuildError("accel/opencl/kernels", name, problem) from None


def source_of(files: Mapping[str, str]) -> str:
    """One translation unit; ``#line`` makes the compiler name the file an error is in."""
    return "".join(f'#line 1 "{name}"\n{text}\n' for name, text in files.items())


def step_files(ops: Sequence[str] = OP_NAMES) -> dict[str, str]:
    """Every file of the program that runs steps of ``ops``, in order, by name."""
    return {**op_files(ops), **{name: kernel_text(name) for name in ENTRIES}}


def op_files(ops: Sequence[str]) -> dict[str, str]:
    """The code of ``ops`` and their list, without kernels that run them.

    Raises KeyError for an op that is not in the table and BuildError for one without a kernel file.
    """
    sources = dict.fromkeys(f"{TABLE[name].source}.cl" for name in ops)
    return {
        CONSTANTS_FILE: packet_constants(),
        **{name: kernel_text(name) for name in HEADERS},
        "accessors.h": packet_accessors(TABLE[name] for name in ops),
        **{name: kernel_text(name) for name in sources},
        "ops.h": op_list(ops),
    }


def copy_files() -> dict[str, str]:
    """The one kernel beside those of modules: it keeps what a step left."""
    texts = {name: kernel_text(name) for name in ("packet.h", "copy_output.cl")}
    return {CONSTANTS_FILE: packet_constants(), **texts}


def self_test_files() -> dict[str, str]:
    """The files of the start-up self-test."""
    texts = {name: kernel_text(name) for name in ("packet.h", "exact.h", "self_test.cl")}
    return {CONSTANTS_FILE: packet_constants(), **texts}


def build_program(
    context: Any,
    device: Device,
    files: Mapping[str, str],
    options: str,
    cache: Path | None,
    progress: Progress | None = None,
) -> Any:
    """A built pyopencl Program, from the cache when it holds one for exactly this request.

    Raises BuildError naming the kernel file and the compiler's log.
    """
    source = source_of(files)
    if device.is_cpu:
        # PoCL compiles for what this processor can do and caches by the processor's name and the
        # options: two virtual machines of one name may differ in what they can do.
        options = f"{options} -DPROCESSOR=x{processor_key()}"
    identity = (device.name, device.driver, device.platform, options, source)
    path = cache_entry(cache, identity)
    if path is not None and (binary := read_entry(path, MAGIC)) is not None:
        program = _from_binary(context, device, binary, options)
        if program is not None:
            return program
    if progress is not None:
        progress(f"compiling OpenCL kernels for {device.name}")
    program = _compile(context, device, source, files, options)
    if path is not None:
        write_entry(path, MAGIC, _binary_of(program))
    return program


@contextlib.contextmanager
def _quiet_compiler(cl: Any) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cl.CompilerWarning)
        yield


def _compile(
    context: Any, device: Device, source: str, files: Mapping[str, str], options: str
) -> Any:
    cl = import_pyopencl()
    program = cl.Program(context, source)
    try:
        with _quiet_compiler(cl):
            return program.build(options, devices=[device.handle], cache_dir=False)
    except cl.RuntimeError as error:
        log = str(error)
        raise BuildError(device.name, _blamed_file(log, files), log) from None


def _from_binary(context: Any, device: Device, binary: bytes, options: str) -> Any | None:
    """None when the driver no longer takes the binary."""
    cl = import_pyopencl()
    try:
        with _quiet_compiler(cl):
            program = cl.Program(context, [device.handle], [binary])
            return program.build(options, devices=[device.handle])
    except cl.Error:
        return None


def _binary_of(program: Any) -> bytes:
    cl = import_pyopencl()
    return bytes(program.get_info(cl.program_info.BINARIES)[0])


def _blamed_file(log: str, files: Mapping[str, str]) -> str:
    """The kernel file the first error of ``log`` is in."""
    place = r"([\w.]+\.(?:cl|h|k)):\d+"
    found = re.search(rf"error: {place}|{place}(?::\d+)?: (?:fatal )?error", log)
    blamed = (found.group(1) or found.group(2)) if found else None
    if blamed is None and (found := re.search(r"<kernel>:(\d+):\d+: error", log)):
        blamed = _file_of_line(int(found.group(1)), files)
    if blamed is not None and blamed in files:
        return blamed
    return next(iter(files)) if len(files) == 1 else "the kernels"


def _file_of_line(number: int, files: Mapping[str, str]) -> str | None:
    """For a compiler that ignores ``#line``: the file of a line of the whole program."""
    for name in files:
        number -= source_of({name: files[name]}).count("\n")
        if number <= 0:
            return name
    return None
