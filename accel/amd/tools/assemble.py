"""Compiles a developer's kernel, a ``.k`` or ``.s`` file, to a ``.zrt`` kernel file, and checks it
as the kernels of the package are checked."""

from dataclasses import dataclass
from pathlib import Path

from accel.amd.generation import GFX12, Generation
from accel.amd.isa.checks import check_code
from accel.amd.isa.code_object import kernel_of, read_code_object
from accel.amd.sim.translate import check_translation
from accel.amd.tools.build import COMPILER, Build, CompileError, assembled, make_kernel, traits_of
from accel.kernels.source import ALL_OPS, GROUP_SIZE, STORED, Language, Module, module_source
from contract.dtypes import DType
from contract.errors import CodecError, ConfigError, system_errors_as
from contract.kernel import MAX_WORKGROUP, KernelHeader, decode_kernel

SOURCES = {".k": "a kernel of the dialect", ".s": "assembly", ".zrt": "a kernel file"}
"""Accepted file suffixes. The dialect is the macro language of ``accel/kernels``."""
ENTRY_SUFFIX = ".kd"
MAX_SOURCE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class AssemblyOptions:
    """What a source does not say.

    A ``.k`` is compiled for weights stored as ``dtype``, empty for an op without weights; with
    ``native`` it uses the GPU's division and square root, else those computed in integers. A ``.s``
    has ``items`` work-items in a work-group, a multiple of 32. ``gpu`` is the target."""

    dtype: str = ""
    native: bool = True
    items: int = GROUP_SIZE
    gpu: Generation = GFX12


def kernel_from(path: Path, options: AssemblyOptions) -> KernelHeader:
    """The kernel of a ``.k``, ``.s`` or ``.zrt`` file, checked. Raises ConfigError for other files
    and for text that does not compile, with the compiler's log, and CodecError for code that a
    launch could not run."""
    if path.suffix not in SOURCES:
        known = ", ".join(f"{suffix} ({what})" for suffix, what in SOURCES.items())
        raise ConfigError(f"{path}: its name ends in none of {known}")
    with system_errors_as(str(path)):
        data = path.read_bytes()
    if path.suffix == ".zrt":
        kernel = decode_kernel(data)
    else:
        kernel = _compiled(path, data, options)
    check_code(kernel)
    check_translation(kernel)
    return kernel


def _compiled(path: Path, data: bytes, options: AssemblyOptions) -> KernelHeader:
    if len(data) > MAX_SOURCE_BYTES:
        raise ConfigError(f"{path}: {len(data):,} bytes of source, at most {MAX_SOURCE_BYTES:,}")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not text (UTF-8)") from None
    try:
        compiled = _from_dialect if path.suffix == ".k" else _from_assembly
        return compiled(path, text, options)
    except FileNotFoundError as error:
        missing = error.filename or COMPILER
        hint = "apt install clang-19 lld-19"
        reason = hint if missing == COMPILER else f"{path} includes it"
        raise ConfigError(f"there is no {missing}: {reason}") from None
    except CompileError as error:
        raise ConfigError(f"{path}: {error}") from None


def _from_dialect(path: Path, text: str, options: AssemblyOptions) -> KernelHeader:
    """The kernel of a ``.k`` file. The file is named after the op whose packet the kernel reads."""
    op = path.stem.split(".")[0]
    if op not in ALL_OPS:
        raise ConfigError(f"{path}: there is no op {op}; a .k is named after one of accel/kernels")
    module = Module(op, _dtype(path, op, options.dtype))
    whole = module_source(Language.AMD, module, traits_of(module, options.native), text)
    return make_kernel(Build(module, options.native, options.gpu), whole)


def _dtype(path: Path, op: str, name: str) -> DType | None:
    dtypes = {str(dtype): dtype for dtype in STORED.get(op, ())}
    if not dtypes and not name:
        return None
    if name not in dtypes:
        names = ", ".join(dtypes) or "no storage type"
        raise ConfigError(f"{path}: --dtype {name or '(none)'}: {op} is compiled for {names}")
    return dtypes[name]


def _from_assembly(path: Path, text: str, options: AssemblyOptions) -> KernelHeader:
    if not 0 < options.items <= MAX_WORKGROUP or options.items % 32:
        raise ConfigError(f"--items {options.items}: waves have 32 items, groups at most 1024")
    code = read_code_object(assembled(text, options.gpu))
    kernels = [
        name.removesuffix(ENTRY_SUFFIX) for name in code.symbols if name.endswith(ENTRY_SUFFIX)
    ]
    if len(kernels) != 1:
        names = ", ".join(kernels) or "none"
        raise CodecError(f"{path}: has to have one kernel (.amdhsa_kernel), not {names}")
    return kernel_of(code, path.stem, kernels[0], options.items)
