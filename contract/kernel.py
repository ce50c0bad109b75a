"""The ``.zrt`` kernel file: a small declarative header, the device code and the kernel's name.

Little-endian, ABI version 2. The first 64 bytes follow the kernel ABI's version 1; version 2 adds
what a launcher of AMD code needs and cannot derive: the three resource registers, the number of
user SGPRs and the scratch size, and a SHA-256 over everything else in the file. The magic is the
*bytes* ``ZRT\\0``, as a little-endian word 0x0054525A (the constant 0x005A5254 sometimes given for
it would be the bytes ``TRZ\\0``).

=======  =====  ==============================================================================
offset   bytes  field
=======  =====  ==============================================================================
0        4      magic ``ZRT\\0``
4        2, 2   ABI version, target (``GpuTarget``)
8        4, 4   code size, entry offset within the code
16       4, 4   buffer count, push-constant bytes
24       4      subgroup size, 0 when the kernel does not care
28       12     workgroup size x, y, z
40       4      LDS bytes
44       4, 4   VGPR count, SGPR count
52       4      occupancy hint, waves per SIMD, 0 when there is none
56       4, 4   name offset, name size
64       12     COMPUTE_PGM_RSRC1, 2, 3
76       4      user SGPR count
80       4      scratch bytes per lane
84       12     zero
96       32     SHA-256 of the file without these 32 bytes
128             code, then the name (UTF-8)
=======  =====  =============================================================================="""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import field
from enum import IntEnum

import numpy as np

from contract.errors import CodecError
from contract.lazy_dataclass import dataclass
from contract.spec import MAX_BINDINGS

MAGIC = b"ZRT\0"
ABI_VERSION = 2
MAX_CODE_BYTES = 64 << 20
MAX_NAME_BYTES = 255
MAX_PUSH_CONSTANT_BYTES = 256
MAX_WORKGROUP = 1024
"""Most invocations of one workgroup: every supported device allows at least this many."""
MAX_LDS_BYTES = 256 << 10
MAX_VGPRS = 512
MAX_SGPRS = 128
MAX_OCCUPANCY = 64
MAX_USER_SGPRS = 16
"""The hardware has the registers COMPUTE_USER_DATA_0 to 15."""
MAX_SCRATCH_BYTES = 1 << 20
AMD_CODE_ALIGNMENT = 256
"""The register COMPUTE_PGM_LO holds an address divided by 256."""
SUBGROUP_SIZES = (0, 1, 2, 4, 8, 16, 32, 64, 128)


class GpuTarget(IntEnum):
    """The kind of device or language the code is for. A number never changes its meaning."""

    GFX1201 = 1
    GFX1200 = 2
    GFX1151 = 3
    GFX1100 = 4
    XE2HPG = 0x10
    SM_90 = 0x20
    APPLE_METAL = 0x30
    OPENCL_C = 0x40
    SPIRV = 0x41
    CUDA_C = 0x42
    CPU_NUMPY = 0xFF

    @property
    def is_amd(self) -> bool:
        """True for AMD instruction sets, the only ones with resource registers."""
        return self in _AMD_TARGETS


_AMD_TARGETS = frozenset(
    (GpuTarget.GFX1201, GpuTarget.GFX1200, GpuTarget.GFX1151, GpuTarget.GFX1100)
)


@dataclass(frozen=True, slots=True)
class KernelHeader:
    """The contents of a kernel file. Sizes are in bytes; ``rsrc1`` to ``rsrc3`` are raw register
    words.

    ``rsrc1``-``rsrc3``, ``user_sgpr_count`` and ``scratch_bytes`` belong to AMD targets and are
    zero for every other."""

    name: str
    target: GpuTarget
    code: bytes = field(repr=False)
    entry_offset: int = 0
    buffer_count: int = 0
    push_constant_bytes: int = 0
    subgroup_size: int = 0
    workgroup_size: tuple[int, int, int] = (1, 1, 1)
    lds_bytes: int = 0
    vgpr_count: int = 0
    sgpr_count: int = 0
    occupancy_hint: int = 0
    rsrc1: int = 0
    rsrc2: int = 0
    rsrc3: int = 0
    user_sgpr_count: int = 0
    scratch_bytes: int = 0


_WORDS = (
    *("code_size", "entry_offset", "buffer_count", "push_constant_bytes", "subgroup_size"),
    *("workgroup_size", "lds_bytes", "vgpr_count", "sgpr_count", "occupancy_hint"),
    *("name_offset", "name_size", "rsrc1", "rsrc2", "rsrc3", "user_sgpr_count", "scratch_bytes"),
)
"""The 32-bit fields of the header in file order; the size of a work-group is three words."""
_LAYOUT = np.dtype(
    [
        *(("magic", "S4"), ("abi_version", "<u2"), ("target", "<u2")),
        *((name, "<u4", (3,) if name == "workgroup_size" else ()) for name in _WORDS),
        *(("zero", "V12"), ("sha256", "V32")),
    ]
)
HEADER_BYTES = _LAYOUT.itemsize
_DIGEST = slice(96, 128)

_LIMITS = {
    "buffer_count": MAX_BINDINGS,
    "push_constant_bytes": MAX_PUSH_CONSTANT_BYTES,
    "lds_bytes": MAX_LDS_BYTES,
    "vgpr_count": MAX_VGPRS,
    "sgpr_count": MAX_SGPRS,
    "occupancy_hint": MAX_OCCUPANCY,
    "rsrc1": 2**32 - 1,
    "rsrc2": 2**32 - 1,
    "rsrc3": 2**32 - 1,
    "user_sgpr_count": MAX_USER_SGPRS,
    "scratch_bytes": MAX_SCRATCH_BYTES,
}
_AMD_ONLY = ("rsrc1", "rsrc2", "rsrc3", "user_sgpr_count", "scratch_bytes")


def encode_kernel(kernel: KernelHeader) -> bytes:
    """Encode the kernel as a ``.zrt`` file. Raises CodecError when a field is out of range."""
    _check(kernel)
    name = kernel.name.encode()
    header = np.zeros((), _LAYOUT)
    header["magic"] = MAGIC
    header["abi_version"] = ABI_VERSION
    header["target"] = kernel.target
    header["code_size"] = len(kernel.code)
    header["entry_offset"] = kernel.entry_offset
    header["subgroup_size"] = kernel.subgroup_size
    header["workgroup_size"] = kernel.workgroup_size
    header["name_offset"] = HEADER_BYTES + len(kernel.code)
    header["name_size"] = len(name)
    for field_name in _LIMITS:
        header[field_name] = getattr(kernel, field_name)
    prefix = header.tobytes()[: _DIGEST.start]
    digest = hashlib.sha256(prefix + kernel.code + name).digest()
    return prefix + digest + kernel.code + name


def decode_kernel(blob: bytes) -> KernelHeader:
    """Decode a ``.zrt`` file. Raises CodecError naming the field and its byte offset."""
    if len(blob) < HEADER_BYTES:
        raise CodecError(
            f"ends before its {HEADER_BYTES}-byte header does", section="kernel", offset=len(blob)
        )
    header = np.frombuffer(blob, _LAYOUT, 1)[0]
    if blob[:4] != MAGIC:
        raise _error("magic", f"is {blob[:4]!r}, not {MAGIC!r}: not a .zrt kernel")
    version = int(header["abi_version"])
    if version != ABI_VERSION:
        age = "newer" if version > ABI_VERSION else "older"
        raise _error("abi_version", f"is {version}, {age} than the {ABI_VERSION} this build reads")
    code_end = HEADER_BYTES + int(header["code_size"])
    if int(header["name_offset"]) != code_end:
        raise _error("name_offset", f"is {header['name_offset']}, but the code ends at {code_end}")
    if code_end + int(header["name_size"]) != len(blob):
        raise _error("name_size", f"does not end the file of {len(blob)} bytes")
    digest = hashlib.sha256(blob[: _DIGEST.start])
    digest.update(blob[HEADER_BYTES:])
    if digest.digest() != blob[_DIGEST]:
        raise _error("sha256", "does not match the contents: the file is damaged")
    if bytes(blob[84 : _DIGEST.start]).strip(b"\0"):
        raise _error("zero", "reserved bytes are not zero")
    return _fields(blob, header, code_end)


def _fields(blob: bytes, header: np.void, code_end: int) -> KernelHeader:
    try:
        target = GpuTarget(int(header["target"]))
    except ValueError:
        raise _error("target", f"{int(header['target']):#x} is unknown") from None
    try:
        name = bytes(blob[code_end:]).decode()
    except UnicodeDecodeError as error:
        raise CodecError(
            "is not UTF-8", section="kernel name", offset=code_end + error.start
        ) from None
    x, y, z = (int(size) for size in header["workgroup_size"])
    kernel = KernelHeader(
        name=name,
        target=target,
        code=bytes(blob[HEADER_BYTES:code_end]),
        entry_offset=int(header["entry_offset"]),
        subgroup_size=int(header["subgroup_size"]),
        workgroup_size=(x, y, z),
        **{field_name: int(header[field_name]) for field_name in _LIMITS},
    )
    _check(kernel)
    return kernel


def _error(field_name: str, problem: str) -> CodecError:
    fields = _LAYOUT.fields
    assert fields is not None
    return CodecError(
        problem, section=f"kernel header field {field_name}", offset=fields[field_name][1]
    )


def _check(kernel: KernelHeader) -> None:
    for field_name, problem in _problems(kernel):
        raise _error(field_name, problem)


def _problems(kernel: KernelHeader) -> Iterator[tuple[str, str]]:
    """Yield (field of the file, sentence) for every field out of range."""
    name_bytes = len(kernel.name.encode())
    if not kernel.name.isprintable() or not 1 <= name_bytes <= MAX_NAME_BYTES:
        yield "name_size", f"{kernel.name!r} is not 1-{MAX_NAME_BYTES} bytes of printable text"
    if not 1 <= len(kernel.code) <= MAX_CODE_BYTES:
        yield "code_size", f"is {len(kernel.code)}, not in [1, {MAX_CODE_BYTES}]"
    if not 0 <= kernel.entry_offset < len(kernel.code):
        yield "entry_offset", f"is {kernel.entry_offset}, outside {len(kernel.code)} code bytes"
    for field_name, limit in _LIMITS.items():
        value = getattr(kernel, field_name)
        if not 0 <= value <= limit:
            yield field_name, f"is {value}, not in [0, {limit}]"
    if kernel.push_constant_bytes % 4:
        yield "push_constant_bytes", f"is {kernel.push_constant_bytes}, not a multiple of 4"
    if kernel.subgroup_size not in SUBGROUP_SIZES:
        yield "subgroup_size", f"is {kernel.subgroup_size}, not one of {SUBGROUP_SIZES}"
    x, y, z = kernel.workgroup_size
    if min(x, y, z) < 1 or x * y * z > MAX_WORKGROUP:
        yield "workgroup_size", f"is {x} x {y} x {z}, not 1 to {MAX_WORKGROUP} invocations"
    yield from _amd_problems(kernel) if kernel.target.is_amd else _foreign_problems(kernel)


def _amd_problems(kernel: KernelHeader) -> Iterator[tuple[str, str]]:
    if kernel.entry_offset % AMD_CODE_ALIGNMENT:
        yield "entry_offset", f"is {kernel.entry_offset}, not a multiple of {AMD_CODE_ALIGNMENT}"
    declared = kernel.rsrc2 >> 1 & 31
    if declared != kernel.user_sgpr_count:
        yield "user_sgpr_count", f"is {kernel.user_sgpr_count}, RSRC2 says {declared}"
    if (kernel.rsrc2 & 1) != (kernel.scratch_bytes > 0):
        yield "scratch_bytes", f"is {kernel.scratch_bytes}, RSRC2.SCRATCH_EN is {kernel.rsrc2 & 1}"


def _foreign_problems(kernel: KernelHeader) -> Iterator[tuple[str, str]]:
    for field_name in _AMD_ONLY:
        if getattr(kernel, field_name):
            yield field_name, f"must be 0 for {kernel.target.name}, which has no such register"
