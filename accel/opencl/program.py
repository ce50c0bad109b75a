"""The device program: its source, its build options, and its binaries on disk."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.opencl.contents import EVERYTHING, Parts, format_lists, mask_of, of_mask, ops_with
from accel.opencl.device import Device, import_binding
from accel.opencl.pocl_cache import check_room
from accel.packets.accessors import op_list, packet_accessors, packet_constants
from accel.packets.build import BuildError, Progress, cache_entry
from accel.packets.disk_cache import read_entry, write_entry
from accel.packets.ops import OPS, TABLE
from contract.lazy_dataclass import dataclass

if TYPE_CHECKING:
    from accel.kernels.source import Traits


import hashlib
import platform
from functools import cache

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
    "transpose.h",
    "attention_tile.h",
    "attention_codes.h",
    "attention.h",
    "matmul_formats.h",
    "matmul_decode.h",
    "matmul_few.h",
    "matmul_prefill.h",
    "matmul_float.h",
)
ENTRIES = ("entry.cl", "copy_output.cl")
CONSTANTS_FILE = "packet_constants.h"
KERNELS = Path(__file__).with_name("kernels")
OP_NAMES = tuple(op.name for op in OPS)
BASE_OPS = ("select_rows",)
"""The ops of a small program that every process loads to probe how the device runs workers."""
MAGIC = b"zinc-rt opencl program 1\n"


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """The options of the kernels; the headers explain the macros."""

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
        """The same options for the kernels that GPU tiers share."""
        from accel.kernels.source import Traits

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
    try:
        return (KERNELS / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        problem = "accel/packets/ops.py names an op whose kernel file does not exist"
        raise BuildError("accel/opencl/kernels", name, problem) from None


def source_of(files: Mapping[str, str]) -> str:
    """One translation unit; ``#line`` makes the compiler name the file of an error."""
    return "".join(f'#line 1 "{name}"\n{text}\n' for name, text in files.items())


def step_files(ops: Sequence[str] = OP_NAMES, parts: Parts = EVERYTHING) -> dict[str, str]:
    """The files of the program that runs steps of ``ops``, by name, in order."""
    return {**op_files(ops, parts), **{name: kernel_text(name) for name in ENTRIES}}


def base_files() -> dict[str, str]:
    """The files of the program of BASE_OPS."""
    ops = BASE_OPS
    return {
        CONSTANTS_FILE: packet_constants(),
        "packet.h": kernel_text("packet.h"),
        "accessors.h": packet_accessors(TABLE[name] for name in ops),
        **{name: kernel_text(name) for name in (f"{TABLE[op].source}.cl" for op in ops)},
        "ops.h": op_list(ops),
        **{name: kernel_text(name) for name in ENTRIES},
    }


def op_files(ops: Sequence[str], parts: Parts = EVERYTHING) -> dict[str, str]:
    """The code and the list of ``ops``, without kernels that run them.

    Products are compiled for the formats in ``parts``.

    Raises KeyError for an op that is not in the table and BuildError for one without a kernel file.
    """
    sources = dict.fromkeys(f"{TABLE[name].source}.cl" for name in ops)
    return {
        CONSTANTS_FILE: packet_constants(),
        **{name: kernel_text(name) for name in HEADERS},
        "formats.h": format_lists(parts),
        "accessors.h": packet_accessors(TABLE[name] for name in ops),
        **{name: kernel_text(name) for name in sources},
        "ops.h": op_list(ops),
    }


def copy_files() -> dict[str, str]:
    """The files of the kernel that copies outputs."""
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
    """A built program, from the cache if it has one for exactly these files and options. Raises
    BuildError naming the kernel file and the compiler's log, and as ``check_room``."""
    check_room(device)
    options = _for_processor(device, options)
    path = cache_entry(cache, _identity(device, options, files))
    cached = None if path is None else _cached(context, path, options)
    return cached or _compile_and_store(context, device, files, options, path, progress)


def build_step_program(
    context: Any,
    device: Device,
    parts: Parts,
    options: str,
    cache: Path | None,
    progress: Progress | None = None,
) -> tuple[Parts, Any]:
    """A built program that runs steps of ``parts``, and the parts that it has.

    It comes from the cache if the cache has a program with these parts; of several, the one with
    the fewest parts. Raises as ``build_program``."""
    check_room(device)
    options = _for_processor(device, options)
    whole = cache_entry(cache, _identity(device, options, step_files()))
    if whole is None:
        return parts, _compile_and_store(
            context, device, _files_with(parts), options, None, progress
        )
    for held in (parts, *_larger(parts, whole)):
        program = _cached(context, _with_parts(whole, held), options)
        if program is not None:
            return held, program
    path = _with_parts(whole, parts)
    return parts, _compile_and_store(context, device, _files_with(parts), options, path, progress)


def _files_with(parts: Parts) -> dict[str, str]:
    return step_files(ops_with(parts), parts)


def _with_parts(whole: Path, parts: Parts) -> Path:
    """The cache entry of the program with ``parts``; ``whole`` is that of the complete program."""
    return whole.with_name(f"{whole.stem}-{mask_of(parts):x}{whole.suffix}")


def _larger(parts: Parts, whole: Path) -> list[Parts]:
    """Larger sets of parts that the cache has a program for, the smallest first."""
    try:
        paths = list(whole.parent.glob(f"{whole.stem}-*.bin"))
    except OSError:  # The folder may not be entered.
        return []
    names = (path.stem.rpartition("-")[2] for path in paths)
    found = (of_mask(int(name, 16)) for name in names if re.fullmatch("[0-9a-f]+", name))
    return sorted((held for held in found if parts < held), key=lambda held: (len(held), *held))


def _for_processor(device: Device, options: str) -> str:
    """Options that name the processor's instruction sets, for PoCL.

    PoCL's cache knows the processor's name only, and two virtual machines of one name may differ
    in their instruction sets."""
    return f"{options} -DPROCESSOR=x{processor_key()}" if device.is_cpu else options


def _identity(device: Device, options: str, files: Mapping[str, str]) -> tuple[str, ...]:
    return device.name, device.driver, device.platform, options, source_of(files)


def _cached(context: Any, path: Path, options: str) -> Any | None:
    """The program of a cache entry; None if there is none or the driver rejects it."""
    binary = read_entry(path, MAGIC)
    return None if binary is None else _from_binary(context, binary, options)


def _compile_and_store(
    context: Any,
    device: Device,
    files: Mapping[str, str],
    options: str,
    path: Path | None,
    progress: Progress | None,
) -> Any:
    """Compile the program of ``files`` and store it at ``path``."""
    if progress is not None:
        progress(f"compiling OpenCL kernels for {device.name}")
    program = _compile(context, device, source_of(files), files, options)
    if path is not None:
        write_entry(path, MAGIC, program.binary())
    return program


def _compile(
    context: Any, device: Device, source: str, files: Mapping[str, str], options: str
) -> Any:
    cl = import_binding()
    try:
        return cl.Program(context, source).build(options)
    except cl.BuildFailed as error:
        log = str(error)
        raise BuildError(device.name, _blamed_file(log, files), log) from None


def _from_binary(context: Any, binary: bytes, options: str) -> Any | None:
    """The program of a binary; None when the driver rejects it."""
    cl = import_binding()
    try:
        return cl.Program(context, binary).build(options)
    except (cl.Error, cl.BuildFailed):
        return None


def _blamed_file(log: str, files: Mapping[str, str]) -> str:
    """The kernel file of the first error in ``log``."""
    location = r"([\w.]+\.(?:cl|h|k)):\d+"
    found = re.search(rf"error: {location}|{location}(?::\d+)?: (?:fatal )?error", log)
    blamed = (found.group(1) or found.group(2)) if found else None
    if blamed is None and (found := re.search(r"<kernel>:(\d+):\d+: error", log)):
        blamed = _file_of_line(int(found.group(1)), files)
    if blamed is not None and blamed in files:
        return blamed
    return next(iter(files)) if len(files) == 1 else "the kernels"


def _file_of_line(number: int, files: Mapping[str, str]) -> str | None:
    """The file of a line of the whole program, for compilers that ignore ``#line``."""
    for name in files:
        number -= source_of({name: files[name]}).count("\n")
        if number <= 0:
            return name
    return None


CPU_INFORMATION = Path("/proc/cpuinfo")
FLAG_FIELDS = ("flags", "Features")
"""Names of the list of instruction sets in Linux, on x86 and on ARM."""
DIGEST_CHARACTERS = 16


@cache
def cpu_flags(source: Path = CPU_INFORMATION) -> frozenset[str]:
    """The instruction sets that Linux lists for all cores; empty without such a list."""
    try:
        lines = source.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    fields = (line.partition(":") for line in lines)
    cores = [frozenset(value.split()) for name, _, value in fields if name.strip() in FLAG_FIELDS]
    return frozenset.intersection(*cores) if cores else frozenset()


def processor_key(source: Path = CPU_INFORMATION) -> str:
    """Hexadecimal digits that identify the architecture and the instruction sets."""
    described = " ".join((platform.machine(), *sorted(cpu_flags(source))))
    return hashlib.sha256(described.encode()).hexdigest()[:DIGEST_CHARACTERS]
