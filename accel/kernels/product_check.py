"""Tests matrix units before use: their products must have the bits of packed dot products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from accel.kernels.matrix_tiles import (
    EXPANDED_FORMATS,
    FEW_PRODUCT,
    WIDE_FORMATS,
    WIDE_PRODUCTS,
    plane_bytes,
    product_format,
)
from accel.kernels.source import ALL_OPS, PLANE_PRODUCT, STORED, Module
from accel.packets.device_op import pieces
from accel.packets.fused_ops import GROUP_ROWS, GROUP_TOKENS
from accel.packets.layouts import TILE_ROWS, UNIT_COLUMNS, tile_bytes
from accel.packets.packet import ABSENT, PACKET
from accel.packets.tier import A, DeviceMemory
from contract.arrays import Bytes, Floats, Records
from contract.dtypes import Q4_K, Q5_1, Q6_K, DType

KERNELS = ("matmul", "matmul_tiles")
"""Kernels compared for all formats on every device; for others see ``Product.kernels``."""
FORMATS = (Q4_K, Q6_K, Q5_1)
"""Formats that differ in the kernels: blocks with minima, halves of blocks, blocks with their own
scales."""
ROWS = GROUP_ROWS + 41
TOKENS = GROUP_TOKENS + 5
UNITS = 5
"""Units of 256 columns, more than a span has."""
COLUMNS = UNITS * UNIT_COLUMNS
BLOCKS = COLUMNS // 32
PLANES = {"weight planes": plane_bytes(ROWS, COLUMNS), "x planes": plane_bytes(TOKENS, COLUMNS)}
"""Operands that products of planes expand first, and their bytes."""
PLANE_CALLS = (
    ("expand_weight", {"weight": "weight", "planes": "weight planes"}),
    ("expand_tokens", {"m": "x", "scale": "scale", "sums": "sums", "planes": "x planes"}),
    ("matmul_planes", {"x": "x planes", "weight": "weight planes", "y": "y"}),
)
"""The launches of those products: each op, and the buffer of each of its operands."""
GROUPS = 4
"""Work-groups of a launch: all that tiles have."""


@dataclass(frozen=True, slots=True)
class Product:
    """The operands of a product, by name, and their strides. Bytes are random wherever that is
    valid."""

    dtype: DType
    operands: Mapping[str, Bytes]
    strides: Mapping[str, int]

    def module(self, op: str) -> Module:
        """The module that executes ``op`` of KERNELS or PLANE_CALLS."""
        if op == PLANE_PRODUCT:
            return Module(op, product_format(self.dtype))
        return Module(op, self.dtype if op in STORED else None)

    @property
    def kernels(self) -> tuple[str, ...]:
        """The ops that compute the product from unexpanded operands, whose results are compared."""
        wide = WIDE_PRODUCTS if self.dtype in WIDE_FORMATS else ()
        return (*KERNELS, FEW_PRODUCT, *wide)

    def packet(self, op: str, addresses: Mapping[str, int]) -> Records:
        """PACKET[1] with which ``op`` computes the product."""
        index_of = ALL_OPS[op].index_of
        packet = np.zeros(1, PACKET)
        packet["operand"] = ABSENT
        for name, address in addresses.items():
            packet["operand"][0, index_of[name]] = address
            packet["stride"][0, index_of[name]] = self.strides[name]
        sizes = {"tokens": TOKENS, "rows": ROWS, "columns": COLUMNS}
        for index, name in enumerate(ALL_OPS[op].sizes):
            packet["size"][0, index] = sizes.get(name, 0)
        return packet


def product_of(dtype: DType) -> Product:
    """Activations with all possible bytes, as ``quantizer.k`` writes them, and a matrix in
    planes."""
    rng = np.random.default_rng(dtype.ggml_id)
    high = rng.integers(-128, 128, (TOKENS, BLOCKS, 32), np.int8)
    low = rng.integers(0, 16, (TOKENS, BLOCKS, 32), np.int8)
    m = 16 * high.astype(np.int16) + low
    row_bytes = tile_bytes(dtype, COLUMNS)
    operands = {
        "x": np.stack([high, low], axis=2),
        "scale": np.ldexp(np.float32(1), rng.integers(-20, 20, (TOKENS, UNITS))),
        "sums": m.reshape(TOKENS, 2 * BLOCKS, 16).sum(axis=2, dtype=np.int32).astype(np.int16),
        "weight": rng.integers(0, 256, pieces(ROWS, TILE_ROWS) * row_bytes, np.uint8),
    }
    strides = {"x": COLUMNS, "m": COLUMNS, "scale": UNITS, "sums": BLOCKS, "weight": row_bytes}
    flat = {name: array.reshape(-1).view(np.uint8) for name, array in operands.items()}
    return Product(dtype, flat, strides | {"y": ROWS, "planes": 0})


UNWRITTEN = np.full(TOKENS * ROWS, np.nan, np.float32)

Launch = Callable[[Module, Records, int], None]
"""Runs the kernel of a module with PACKET[1] and a number of work-groups, and waits for it."""


def matrices_agree(memory: DeviceMemory[A], launch: Launch, every: bool) -> bool:
    """Whether products on matrix units equal those of packed dots, bit for bit: of ``every``
    kernel, or of those that all devices with matrix units have. Raises the driver's error where it
    rejects a kernel, DeviceLost and OutOfMemory."""
    return all(_agrees(memory, launch, product_of(dtype), every) for dtype in FORMATS)


def _agrees(memory: DeviceMemory[A], launch: Launch, product: Product, every: bool) -> bool:
    planes = PLANES if every and product.dtype in EXPANDED_FORMATS else {}
    held = {name: memory.adopt("self-test", data) for name, data in product.operands.items()}

    def computed(*launches: tuple[str, Mapping[str, str]]) -> Floats:
        """y after launches of ops, each with the buffer of each of its operands. y is filled with
        NaN first, so that a kernel that writes nothing is detected."""
        memory.write(held["y"], 0, UNWRITTEN.view(np.uint8))
        for op, buffers in launches:
            addresses = {operand: held[buffer].address for operand, buffer in buffers.items()}
            launch(product.module(op), product.packet(op, addresses), GROUPS)
        return memory.read(held["y"], 0, UNWRITTEN.nbytes).view(np.float32).copy()

    try:
        for name, nbytes in (("y", UNWRITTEN.nbytes), *planes.items()):
            held[name] = memory.allocate("self-test", nbytes)
        same = {name: name for name in (*product.operands, "y")}
        results = [computed((op, same)) for op in (product.kernels if every else KERNELS)]
        results += [computed(*PLANE_CALLS)] if planes else []
    finally:
        for allocation in held.values():
            memory.free(allocation)
    return all(np.array_equal(results[0], other, equal_nan=True) for other in results[1:])
