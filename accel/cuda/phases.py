"""Converts launches of a plan to phases of a persistent step kernel: operands and records."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from accel.cuda import step_table
from accel.cuda.attention import HEAD_DIMS, SPAN_TILES, TILE_WARPS, groups_bytes
from accel.cuda.packed_tiles import UNIT_ROWS, unit_count
from accel.cuda.plan import PlannedLaunch
from accel.cuda.products import ALIGNED_FLOATS, SQUARE_BYTES, UNIT_ACTIVATION_BYTES
from accel.cuda.runs import result
from accel.packets.packet import aligned
from accel.packets.step import Op
from contract.arithmetic import KV_TILE, PAGE_TOKENS
from contract.arrays import Records
from contract.dtypes import KV_DTYPES, ROTATED_KV, DType

SHARE_CHANNELS, SHARE_BYTES = 32, 160
"""Channels and bytes of a part that one warp merges."""
DIVIDED_FROM = 16 * KV_TILE
"""Positions before a token's own from which on several devices with whole pages divide its heads.
Of shorter contexts a multiprocessor has few tiles at most, and computing all heads costs no
exchange."""
MAX_TILE_PARTS = 256
"""Most tiles of a context whose parts are tiles; longer contexts have enough spans for all
blocks."""


@dataclass(frozen=True, slots=True)
class ProductPhase:
    """The phase of one launch of ``unit_product.cu``. ``before`` is the index of the op before it
    that selects rows of x or rotates them back, if there is one."""

    operands: step_table.LaunchOperands
    length: int
    before: int | None = None

    @property
    def first(self) -> int:
        """The index of its first op."""
        return self.operands.first if self.before is None else self.before

    @property
    def turned(self) -> bool:
        """Whether x is rotated back."""
        return self.before is not None and self.operands.ops[self.before].name == "rotate_heads"

    @property
    def tokens(self) -> int:
        """Most tokens."""
        return self.operands.macros["TOKENS"]

    @property
    def formats(self) -> tuple[int, ...]:
        """GGML type ids of its matrices in order."""
        macros = self.operands.macros
        both = macros["FIRST"], macros["SECOND"]
        return tuple(both[macros["NUMBERS"] >> 4 * i & 1] for i in range(macros["MATRICES"]))

    @property
    def head_dim(self) -> int:
        """Zero: the phase has no heads."""
        return 0

    @property
    def units(self) -> int:
        """Units of a row of x."""
        return unit_count(self._product.max_sizes()["columns"])

    @property
    def norm(self) -> bool:
        """Whether x is normalized."""
        return self.operands.number("NORM") is not None

    @property
    def activation(self) -> int | None:
        """The activation of its gate, None without a gate."""
        gate = self.operands.number("GATE")
        return None if gate is None else self.operands.ops[gate].max_sizes()["activation"]

    @property
    def biased(self) -> bool:
        """Whether a bias is added to any of its products."""
        return any(self.operands.operand(f"B{i}") is not None for i in range(len(self.formats)))

    @property
    def _product(self) -> Op:
        number = self.operands.number("PRODUCT")
        assert number is not None
        return self.operands.ops[number]

    @property
    def x(self) -> step_table.Operand:
        """The rows that are multiplied, before any selection or rotation."""
        if self.before is None:
            return self.operands.needed("X")
        tensor = self.operands.ops[self.before].operands[0]
        assert tensor is not None
        return step_table.Operand(self.before, 0, tensor)

    @property
    def dropped(self) -> frozenset[str]:
        """Buffers that its kernels write and the phase does not."""
        return frozenset(() if self.before is None else (self.operands.needed("X").tensor.buffer,))

    @property
    def reads(self) -> tuple[step_table.Operand, ...]:
        """Operands that another phase may have written."""
        residual = self.operands.operand("RESIDUAL")
        return (self.x,) if residual is None else (self.x, residual)

    @property
    def writes(self) -> tuple[step_table.Operand, ...]:
        """The results."""
        count = 1 if self.operands.number("GATE") is not None else len(self.formats)
        return tuple(self.operands.needed(f"Y{i}") for i in range(count))

    def row_units(self, warps: int) -> int:
        """Units of its rows that each warp quantizes."""
        return -(-self.tokens * self.units // warps)

    def slot_bits(self) -> tuple[int, ...]:
        """Possible numbers of tile slots as powers of two, largest first."""
        tile_units = self.units * (2 if self.operands.number("GATE") is not None else 1)
        return (3, 2, 1, 0) if tile_units <= 32 else (1, 0)

    def memory_bytes(self, tokens: int, slot_bits: int) -> int:
        """Shared memory of the phase apart from the ring, in a kernel for ``tokens`` tokens."""
        tile_units = self.units * (2 if self.operands.number("GATE") is not None else 1)
        values = (tile_units << slot_bits) * tokens * UNIT_ROWS * 4
        return tokens * self.units * (UNIT_ACTIVATION_BYTES + SQUARE_BYTES) + values

    def record(self, bound: step_table.Bound, formats: Sequence[int], slot_bits: int) -> Records:
        """PRODUCT_RECORD[1]; ``formats`` are those of the kernel."""
        operands, packets = self.operands, bound.packets
        record = np.zeros(1, step_table.PRODUCT_RECORD)
        one = record[0]
        product = packets[operands.macros["PRODUCT"] + operands.first]
        one["kind"] = step_table.PRODUCT_KIND
        one["multiplier"], one["counted"] = product["size"][0], product["counted"]
        one["columns"] = step_table.size_of(product, "matmul", "columns")
        one["x"], one["x_stride"] = bound.read(self.x)
        one["norm_weight"], _ = bound.stored(operands.operand("NORM_WEIGHT"))
        one["residual"], one["residual_stride"] = bound.read(operands.operand("RESIDUAL"))
        one["turned"] = self.turned
        if self.before is not None and not self.turned:
            one["picked"] = packets[self.before]["operand"][
                operands.ops[self.before].device.index_of["output_rows"]
            ]
        for i, dtype in enumerate(self.formats):
            weight = operands.needed(f"W{i}")
            one["units"][i], _ = bound.stored(weight)
            one["rows"][i] = step_table.size_of(packets[weight.op], "matmul", "rows")
            one["bias"][i], _ = bound.stored(operands.operand(f"B{i}"))
            one["formats"] |= formats.index(dtype) << 4 * i
        for i, y in enumerate(self.writes):
            for name, value in zip(step_table.RESULT_FIELDS, bound.written(y), strict=True):
                one[name][i] = value
        if (norm := operands.number("NORM")) is not None:
            one["norm"], one["eps"] = 1, step_table.real_of(packets[norm], "rms_norm", "eps")
        if (gate := operands.number("GATE")) is not None:
            one["paired"] = 1
            one["activation"] = step_table.size_of(packets[gate], "swiglu", "activation")
        one["slot_bits"] = slot_bits
        everywhere = (y.tensor in bound.exchange.everywhere for y in self.writes)
        one["everywhere"] = sum(1 << i for i, every in enumerate(everywhere) if every)
        return record


@dataclass(frozen=True, slots=True)
class AttentionPhase:
    """The phase of one launch of ``attention_clusters.cu``."""

    operands: step_table.LaunchOperands
    length: int

    @property
    def first(self) -> int:
        """The index of its first op."""
        return self.operands.first

    @property
    def tokens(self) -> int:
        """Most tokens."""
        return self._part.max_sizes()["tokens"]

    @property
    def formats(self) -> tuple[int, ...]:
        """Empty: attention reads no matrices."""
        return ()

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.operands.macros["HEAD_DIM"]

    @property
    def dtype(self) -> DType:
        """The storage type of its pages."""
        return next(one for one in KV_DTYPES if one.ggml_id == self.operands.macros["DTYPE"])

    @property
    def part(self) -> int:
        """The index of its ``flash_attn_part``."""
        number = self.operands.number("PART")
        assert number is not None
        return number

    @property
    def _part(self) -> Op:
        return self.operands.ops[self.part]

    @property
    def slots(self) -> int:
        """Most parts of a context."""
        tiles = -(-self.operands.needed("PAGES_AT").tensor.columns * PAGE_TOKENS // KV_TILE)
        return min(tiles, max(MAX_TILE_PARTS, -(-tiles // SPAN_TILES) + 1))

    @property
    def parts_bytes(self) -> int:
        """Workspace for U, l and o of all parts."""
        shares = self._part.max_sizes()["heads"] * self.head_dim // SHARE_CHANNELS
        return aligned(self.tokens * shares * self.slots * SHARE_BYTES)

    @property
    def turns_halves(self) -> bool:
        """Whether rotation pairs channel m with the one half a row later, for all channels."""
        rope = self.operands.ops[self.first + self.operands.macros["Q_ROPE"]].max_sizes()
        return bool(rope["neox"]) and 2 * rope["rotary_pairs"] == self.head_dim

    @property
    def dropped(self) -> frozenset[str]:
        """Buffers that its kernels write and the phase does not."""
        return frozenset((self.operands.needed("Q_RESULT_AT").tensor.buffer,))

    @property
    def reads(self) -> tuple[step_table.Operand, ...]:
        """Operands that another phase may have written."""
        return tuple(self.operands.needed(name) for name in ("Q_AT", "K_AT", "V_AT"))

    @property
    def writes(self) -> tuple[step_table.Operand, ...]:
        """The results."""
        return (self.operands.needed("Y_AT"),)

    def memory_bytes(self, warps: int, groups: int) -> int:
        """Shared memory of the phase apart from the ring, with ``groups`` tiles in progress at
        once."""
        rows = 0 if self.turns_halves else 4 * self.head_dim * warps
        return groups_bytes(self.head_dim, groups * TILE_WARPS, 1, self.dtype) + rows

    def record(self, bound: step_table.Bound, parts: int) -> Records:
        """ATTENTION_RECORD[1]; ``parts`` is the offset of its parts in the workspace."""
        operands, packets = self.operands, bound.packets
        record = np.zeros(1, step_table.ATTENTION_RECORD)
        one = record[0]
        part = packets[self.part]
        one["kind"] = step_table.ATTENTION_KIND
        one["multiplier"], one["counted"] = part["size"][0], part["counted"]
        for name in ("heads", "kv_heads", "window"):
            one[name] = np.int32(step_table.size_of(part, "flash_attn_part", name))
        one["slots"], one["divided_from"] = self.slots, DIVIDED_FROM
        one["own_heads"] = self.writes[0].tensor in bound.exchange.everywhere
        one["scale"] = step_table.real_of(part, "flash_attn_part", "scale")
        for name in ("q", "k", "v"):
            one[name], one[f"{name}_stride"] = bound.read(operands.needed(f"{name.upper()}_AT"))
        for name in ("query", "pages"):
            one[name], one[f"{name}_stride"] = bound.stored(operands.needed(f"{name.upper()}_AT"))
        one["rope_table"], _ = bound.stored(operands.needed("TABLE_AT"))
        one["kv"], _ = bound.stored(operands.needed("KV_AT"))
        one["parts"] = parts
        for name, value in zip(
            step_table.RESULT_FIELDS, bound.written(self.writes[0]), strict=True
        ):
            one[name] = value
        rope = packets[operands.macros["Q_ROPE"] + operands.first]
        one["rotary_pairs"] = step_table.size_of(rope, "rope", "rotary_pairs")
        one["neox"] = step_table.size_of(rope, "rope", "neox")
        for name in ("q", "k"):
            if (norm := operands.number(f"{name.upper()}_NORM")) is not None:
                one[f"{name}_norm"] = 1
                one[f"{name}_eps"] = step_table.real_of(packets[norm], "rms_norm", "eps")
                weight = operands.operand(f"{name.upper()}_WEIGHT_AT")
                one[f"{name}_weight"], _ = bound.stored(weight)
        return record


Phase = ProductPhase | AttentionPhase
Readers = Mapping[str, Collection[int]]
"""The indices of the ops that read each buffer."""


def next_phase(
    launches: Sequence[PlannedLaunch], ops: Sequence[Op], reading: Readers
) -> tuple[Phase, int] | None:
    """The phase of the first one or two launches, and their number; None if they are none."""
    for found in (
        _product(launches, ops),
        _selected(launches, ops, reading),
        _attention(launches, ops),
    ):
        if found is not None and _readable(found[0]):
            return found
    return None


def _product(
    launches: Sequence[PlannedLaunch], ops: Sequence[Op]
) -> tuple[ProductPhase, int] | None:
    first = launches[0]
    if first.entry != "unit_product" or first.grid[1] != 1:
        return None
    operands = _operands_of(first, ops)
    if operands.macros["MATRICES"] > step_table.MATRICES:
        return None
    return (ProductPhase(operands, first.count), 1) if operands.operand("X") else None


def _selected(
    launches: Sequence[PlannedLaunch], ops: Sequence[Op], reading: Readers
) -> tuple[ProductPhase, int] | None:
    """A product of rows selected, or of one row rotated back, that no other op reads."""
    if len(launches) < 2 or not _prepares(ops[launches[0].first]):
        return None
    first, found = launches[0], _product(launches[1:], ops)
    if found is None:
        return None
    phase, _ = found
    rows = result(ops[first.first])
    if rows is None or phase.x.tensor != rows or reading.get(rows.buffer) != {phase.x.op}:
        return None
    made = ProductPhase(phase.operands, phase.length + first.count, first.first)
    return None if made.turned and made.tokens > 1 else (made, 2)


def _prepares(op: Op) -> bool:
    """Whether a product phase can do what the op does to its rows."""
    sizes = op.max_sizes()
    turns = op.name == "rotate_heads" and bool(sizes["back"]) and sizes["head_dim"] in HEAD_DIMS
    return turns or op.name == "select_rows"


def _attention(
    launches: Sequence[PlannedLaunch], ops: Sequence[Op]
) -> tuple[AttentionPhase, int] | None:
    first = launches[0]
    if first.entry != "attention_clusters":
        return None
    phase = AttentionPhase(_operands_of(first, ops), first.count)
    # Of several tokens nothing rotates the results back.
    return None if phase.dtype in ROTATED_KV and phase.tokens > 1 else (phase, 1)


def readers_of(ops: Sequence[Op]) -> Readers:
    """The indices of the ops that read each buffer."""
    found: dict[str, set[int]] = {}
    for number, op in enumerate(ops):
        for tensor in op.read_tensors():
            found.setdefault(tensor.buffer, set()).add(number)
    return found


def _readable(phase: Phase) -> bool:
    """Whether rows can be read 16 bytes at a time."""
    return all(
        read.tensor.begins_at(ALIGNED_FLOATS)
        for read in (phase.reads if isinstance(phase, AttentionPhase) else (phase.x,))
    )


def _operands_of(launch: PlannedLaunch, ops: Sequence[Op]) -> step_table.LaunchOperands:
    return step_table.LaunchOperands(ops, launch.first, dict(launch.source.macros))
