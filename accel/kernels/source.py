"""The complete source text of a kernel, in one of the languages of the dialect."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import resources

from accel.kernels import matrix_tiles
from accel.kernels.accessors import op_struct, packet_constants, packet_struct, pushed_macros
from accel.packets.device_op import DeviceOp, DeviceOperand, pieces
from accel.packets.fused_ops import FUSED
from accel.packets.layouts import TILE_ROWS, UNIT_COLUMNS
from accel.packets.ops import TABLE
from accel.packets.step import PRODUCTS, Op
from contract.arithmetic import SEGMENT
from contract.dtypes import I12, KV_DTYPES, ROTATED_KV, WEIGHT_DTYPES, DType, StorageClass

GROUP_SIZE = 128
"""Items of a work-group unless ``Module.group_size`` says otherwise."""
PRODUCT_GROUP_SIZE = 256
"""Items of a group that multiplies quantized weights: 32 rows, and eight segments of each."""
TILES_GROUP_SIZE = 512
"""Items of a group of ``matmul_tiles.k``: 16 subgroups of 32."""


def _outside_steps(
    name: str, operands: str, result: str, sizes: str, items: Callable[..., int]
) -> DeviceOp:
    read = tuple(DeviceOperand(operand) for operand in operands.split())
    written = DeviceOperand(result, written=True)
    return DeviceOp(name, (*read, written), tuple(sizes.split()), (), items, False, False, name)


OUTSIDE_STEPS: Mapping[str, DeviceOp] = {
    op.name: op
    for op in (
        _outside_steps(
            "arrange",
            "stored",
            "arranged",
            "groups rows columns first_group",
            lambda groups, columns, **_: groups * TILE_ROWS * pieces(columns, UNIT_COLUMNS),
        ),
        _outside_steps(
            "self_test", "a b words", "results", "samples", lambda samples, **_: samples
        ),
    )
}
"""Ops that are launched outside of steps; their packets have no op number."""
ALL_OPS: Mapping[str, DeviceOp] = {**TABLE, **FUSED, **OUTSIDE_STEPS}

UNROTATED = tuple(d for d in KV_DTYPES if d not in ROTATED_KV)
"""Types of keys and values that a fused op writes as it has them."""
QUANTIZED = tuple(d for d in WEIGHT_DTYPES if d.storage is not StorageClass.FLOAT)
STORED = {
    "arrange": QUANTIZED,
    "embed": WEIGHT_DTYPES,
    "matmul": WEIGHT_DTYPES,
    "matmul_row": QUANTIZED,
    "norm_row": QUANTIZED,
    "gate_row": QUANTIZED,
    "matmul_tiles": QUANTIZED,
    matrix_tiles.FEW_PRODUCT: QUANTIZED,
    **dict.fromkeys(matrix_tiles.WIDE_PRODUCTS, matrix_tiles.WIDE_FORMATS),
    "expand_weight": matrix_tiles.EXPANDED_FORMATS,
    "matmul_planes": matrix_tiles.PRODUCT_FORMATS,
    "kv_write_batched": KV_DTYPES,
    "flash_attn_part": KV_DTYPES,
    "flash_attn_batched": KV_DTYPES,
    "flash_attn_tiles": (I12,),
    "head_rows": UNROTATED,
    "flash_attn_row": (I12,),
    "flash_attn_row_wide": (I12,),
}
"""Ops that have a module for each storage type of what they read or write."""

ATTENTION_ROWS = ("flash_attn_row", "flash_attn_row_wide")
SEGMENT_OPS = ("flash_attn_quantize", "rms_norm_quantize", "swiglu_quantize", *ATTENTION_ROWS)
"""Ops whose work-groups have as many items as a segment has columns, or four tiles of keys
positions."""

REPEATING_OPS = (*ATTENTION_ROWS, "norm_row", "gate_row")
"""Ops of ``packets/repeated.py``, which not every tier with these kernels uses."""

ATTENTION_TILES = "flash_attn_tiles"
VULKAN_MATRIX_OPS = (*matrix_tiles.WIDE_PRODUCTS, matrix_tiles.FEW_PRODUCT, ATTENTION_TILES)
"""Ops for matrix units that only Vulkan uses."""
MATRIX_OPS = ("matmul_tiles", *VULKAN_MATRIX_OPS)
"""Ops whose kernels are fast only where the device has matrix units."""

PLANE_PRODUCT = "matmul_planes"
PLANE_OPS = ("expand_weight", "expand_tokens", PLANE_PRODUCT)
"""Ops of products of planes of bytes, which only Vulkan's matrix units use."""

GLSL_FIRST_LINES = """\
#version 460
#extension GL_GOOGLE_cpp_style_line_directive : require
"""
INCLUDE = re.compile(r'#include "([\w.]+)"')


class Language(Enum):
    """The languages of the kernels; the value is the header in ``accel/kernels``."""

    VULKAN = "vk.h"
    OPENCL = "cl.h"
    CUDA = "cu.h"
    METAL = "msl.h"
    AMD = "amd.h"
    INTEL = "intel.h"


@dataclass(frozen=True, slots=True)
class Traits:
    """The operations that a device computes exactly, or abilities that its kernels use.

    ``divide``, ``root`` and ``half`` are its own division, square root and widening of binary16;
    ``dot`` are instructions for products of packed bytes, ``matrix`` those of ``matrices.k``.
    ``shared_addresses``, which only OpenCL uses, says that the device dereferences host addresses.
    """

    divide: bool = True
    root: bool = True
    half: bool = True
    dot: bool = False
    matrix: bool = False
    shared_addresses: bool = True


@dataclass(frozen=True, slots=True)
class Module:
    """One program: an op, for one storage type if the op has several."""

    op: str
    dtype: DType | None = None

    def __str__(self) -> str:
        return f"{self.op}.{self.dtype}" if self.dtype is not None else self.op

    @property
    def group_size(self) -> int:
        """Items of its work-groups."""
        if self.op == "matmul_tiles":
            return TILES_GROUP_SIZE
        if self.op in (*SEGMENT_OPS, *PLANE_OPS, ATTENTION_TILES):
            return SEGMENT
        quantized = self.dtype is not None and self.dtype.storage is not StorageClass.FLOAT
        return PRODUCT_GROUP_SIZE if self.op in PRODUCTS and quantized else GROUP_SIZE

    @property
    def entry(self) -> str:
        """The name of the kernel function; in GLSL it is main."""
        return f"launch_{self.op}"


def module_of(op: Op) -> Module:
    """The module that executes an op of a step."""
    return Module(op.name, op.dtype if op.name in STORED else None)


def modules(repeating: bool = True) -> tuple[Module, ...]:
    """Every module by op and storage type, except those of matrix units; ``repeating`` False leaves
    out REPEATING_OPS."""
    left_out = (*MATRIX_OPS, *PLANE_OPS, *(() if repeating else REPEATING_OPS))
    names = (name for name in ALL_OPS if name not in left_out)
    return tuple(Module(name, dtype) for name in names for dtype in STORED.get(name, (None,)))


def matrix_modules(vulkan: bool = False) -> tuple[Module, ...]:
    """The modules for matrix units, with ``vulkan`` those of VULKAN_MATRIX_OPS too.

    On devices without matrix units they are right but slow."""
    names = (name for name in MATRIX_OPS if vulkan or name not in VULKAN_MATRIX_OPS)
    return tuple(Module(name, dtype) for name in names for dtype in STORED[name])


def plane_modules() -> tuple[Module, ...]:
    """The modules of products of planes of bytes."""
    return tuple(Module(name, dtype) for name in PLANE_OPS for dtype in STORED.get(name, (None,)))


def module_source(
    language: Language, module: Module, traits: Traits | None = None, text: str | None = None
) -> str:
    """The complete text for a compiler of ``language``; ``text`` replaces the module's own kernel
    file. Raises FileNotFoundError for an op without a kernel file."""
    name = f"{module.op}.k"
    return _combined(language, module, traits, (name,), {name: text} if text is not None else {})


def headers(language: Language, op: str = "", traits: Traits | None = None) -> str:
    """The text before every kernel, for a kernel written for ``language`` alone: the language's
    part of the dialect, PACKET, ``OP`` if an op is named, and the exact primitives."""
    return _combined(language, Module(op), traits, (), {})


def _combined(
    language: Language,
    module: Module,
    traits: Traits | None,
    files: tuple[str, ...],
    given: Mapping[str, str],
) -> str:
    first = GLSL_FIRST_LINES if language is Language.VULKAN else ""
    macros = _macros(module, traits or Traits())
    if language is Language.VULKAN and module.op:
        pushed = pushed_macros(ALL_OPS[module.op])
        macros |= {name: str(value) for name, value in pushed.items()}
    defines = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    fields = op_struct(ALL_OPS[module.op]) if module.op else ""
    made = {"packet_constants.h": packet_constants(), "packet.h": packet_struct() + fields, **given}
    included: set[str] = set()
    names = language.value, "exact.k", *files
    return first + defines + "".join(_text(name, made, included) for name in names)


def _macros(module: Module, traits: Traits) -> dict[str, str]:
    flags = {
        "NATIVE_DIVIDE": traits.divide,
        "NATIVE_ROOT": traits.root,
        "NATIVE_HALF": traits.half,
        "NATIVE_DOT": traits.dot,
        "SHARED_ADDRESSES": traits.shared_addresses,
    }
    macros = {"GROUP_SIZE": f"{module.group_size}u"} | {
        name: str(int(on)) for name, on in flags.items()
    }
    if traits.matrix:
        macros["NATIVE_MATRIX"] = "1"
    if module.dtype is not None:
        macros["DTYPE"] = str(module.dtype.ggml_id)
    return macros


def _text(name: str, made: Mapping[str, str], included: set[str]) -> str:
    """A file with the files it includes, each once; ``#line`` keeps the lines of compiler errors
    right."""
    included.add(name)
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate((made.get(name) or _file(name)).splitlines(), 1):
        if (include := INCLUDE.fullmatch(line.strip())) is None:
            lines.append(line)
        elif include[1] not in included:
            lines += [_text(include[1], made, included), f'#line {number + 1} "{name}"']
    return "\n".join(lines) + "\n"


def _file(name: str) -> str:
    return resources.files("accel").joinpath("kernels", name).read_text(encoding="utf-8")
