"""Makes a ``.zrt`` file from a developer's kernel, in the dialect or in assembly, with the checks
of the package's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from accel.amd.generation import GFX12, Generation
from accel.amd.isa.checks import check_code
from accel.amd.isa.code_object import kernel_of, read_code_object
from accel.amd.sim.translate import check_translation
from accel.amd.tools.build import COMPILER, Build, CompileError, assembled, kernel_made, traits_of
from accel.kernels.source import ALL_OPS, GROUP_SIZE, STORED, Language, Module, module_source
from contract.dtypes import DType
from contract.errors import CodecError, ConfigError
from contract.kernel import MAX_WORKGROUP, KernelHeader, decode_kernel

SOURCES = {".k": "a kernel of the dialect", ".s": "assembly", ".zrt": "a kernel file"}
ENTRY_SUFFIX = ".kd"
MOST_SOURCE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class AssemblyJob:
    """Facts that are not in a source: the storage type of a ``.k``, whether the GPU divides itself,
    the items of a work-group of a ``.s``, and the GPU."""

    dtype: str = ""
    native: bool = True
    items: int = GROUP_SIZE
    gpu: Generation = GFX12


def kernel_from(path: Path, requested: AssemblyJob) -> KernelHeader:
    """The kernel of a ``.k``, ``.s`` or ``.zrt`` file, checked. Raises ConfigError for other files,
    CompileError with the compiler's log, and CodecError for code that a launch could not run."""
    if path.suffix not in SOURCES:
        known = ", ".join(f"{suffix} ({what})" for suffix, what in SOURCES.items())
        raise ConfigError(f"{path}: its name ends in none of {known}")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    if path.suffix == ".zrt":
        kernel = decode_kernel(data)
    else:
        kernel = _compiled(path, data, requested)
    check_code(kernel)
    check_translation(kernel)
    return kernel


def _compiled(path: Path, data: bytes, requested: AssemblyJob) -> KernelHeader:
    if len(data) > MOST_SOURCE_BYTES:
        raise ConfigError(f"{path}: {len(data):,} bytes of source, at most {MOST_SOURCE_BYTES:,}")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not text (UTF-8)") from None
    try:
        return (
            _from_dialect(path, text, requested)
            if path.suffix == ".k"
            else _from_assembly(path, text, requested)
        )
    except FileNotFoundError as error:
        missing = error.filename or COMPILER
        remedy = (
            "apt install clang-19 lld-19"
            if missing == COMPILER
            else "it includes a file of \
the package that there is not"
        )
        raise ConfigError(f"there is no {missing}: {remedy}") from None
    except CompileError as error:
        raise ConfigError(f"{path}: {error}") from None


def _from_dialect(path: Path, text: str, requested: AssemblyJob) -> KernelHeader:
    """The kernel of a ``.k`` file, whose name is that of the op whose packet it reads."""
    op = path.stem.split(".")[0]
    if op not in ALL_OPS:
        raise ConfigError(f"{path}: there is no op {op}; a .k is named after one of accel/kernels")
    module = Module(op, _dtype(path, op, requested.dtype))
    whole = module_source(Language.AMD, module, traits_of(module, requested.native), text)
    return kernel_made(Build(module, requested.native, requested.gpu), whole)


def _dtype(path: Path, op: str, name: str) -> DType | None:
    known = {str(dtype): dtype for dtype in STORED.get(op, ())}
    if not known and not name:
        return None
    if name not in known:
        named = ", ".join(known) or "no storage type"
        raise ConfigError(f"{path}: --dtype {name or '(none)'}: {op} is compiled for {named}")
    return known[name]


def _from_assembly(path: Path, text: str, requested: AssemblyJob) -> KernelHeader:
    if not 0 < requested.items <= MAX_WORKGROUP or requested.items % 32:
        raise ConfigError(f"--items {requested.items}: waves have 32 items, groups at most 1024")
    code = read_code_object(assembled(text, requested.gpu))
    found = [
        name.removesuffix(ENTRY_SUFFIX) for name in code.symbols if name.endswith(ENTRY_SUFFIX)
    ]
    if len(found) != 1:
        named = ", ".join(found) or "none"
        raise CodecError(f"{path}: has to have one kernel (.amdhsa_kernel), not {named}")
    return kernel_of(code, path.stem, found[0], requested.items)
