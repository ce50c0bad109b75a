"""Rules for products with few tokens, and the ops around them, as one launch.

A run of consecutive ops becomes one launch of ``kernels/unit_product.cu``:

    rms_norm?  quantize_activation  matmul bias_add? (up to four times)  [swiglu or add]?

wherever no later op reads the results inside the run. A product whose integers another op made is a
launch of its own. Only the ops matter, never the model."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from accel.cuda.device import Device, cluster_grid
from accel.cuda.packed_tiles import UNIT_ROWS, in_units, unit_bytes, unit_count
from accel.cuda.runs import are_unread, operand_indices, packet_number, result, size_indices, source
from accel.cuda.tuned import KernelLaunch, Remaining, Replacement
from accel.packets.step import Op, Tensor
from contract.dtypes import DType

MAX_MATRICES = 4
MAX_FORMATS = 2
CHUNK_UNITS = 2
"""Units that a warp copies at a time."""
RING_SLOTS = 2
"""Chunks that a warp copies ahead for one token and a pair of matrices; else it is one, since there
are enough warps."""
SHARED_WARPS = (16, 12, 8)
"""Warps of a block that shares columns with another; the first that fit are used."""
MAX_HELD_UNITS = 4
MAX_ASKED_UNITS = 6
"""Most units of rows in the registers of a warp: while the factor of a norm is computed, and while
others are being loaded."""
SINGLE, FEW = 1, 4
"""Tokens for which kernels are built."""
UNIT_ACTIVATION_BYTES = 512 + 32 + 4
"""Bytes of one token: two planes of 256 bytes, 16 sums and a scale."""
SQUARE_BYTES = 4
"""Bytes of the sum of squares of one token and unit, whichever block computed it."""
MAX_TILE_SLOTS = 8
MAX_SHARED_TILES = 4 * MAX_TILE_SLOTS
"""Most tiles of a block: with more the communication in a cluster costs more than computing its own
activations."""
BARRIER_BYTES = 8
TILE_SLOT_BYTES = BARRIER_BYTES + 4
"""The barrier of a tile's values, and the count of tiles that used the slot."""
BLOCK_BYTES = TILE_SLOT_BYTES * MAX_TILE_SLOTS + 2 * BARRIER_BYTES
"""The tile slots and the barriers of a block."""
CLUSTER_BYTES = TILE_SLOT_BYTES * MAX_TILE_SLOTS
"""The tile slots for tiles that another block of the cluster folds."""
ALIGNED_FLOATS = 4
"""Floats that are read at a time, 16 bytes."""


@dataclass(frozen=True, slots=True)
class Run:
    """Ops that become one launch, by their indices among the remaining ops of the step.

    ``norm`` and ``quantize`` come before the ``products``; ``biases`` has an index or None for each
    product; ``gate`` or ``residual`` comes last. ``length`` counts all ops."""

    products: tuple[int, ...]
    length: int
    quantize: int | None = None
    norm: int | None = None
    biases: tuple[int | None, ...] = (None,)
    gate: int | None = None
    residual: int | None = None


def product_rule(ops: Remaining, device: Device) -> Replacement | None:
    """Replaces the longest run that the ops begin with."""
    for run in runs(ops):
        if is_private(ops, run) and (launch := _launch(ops, run, device)) is not None:
            return Replacement(run.length, (launch,))
    return None


def runs(ops: Sequence[Op]) -> Iterator[Run]:
    """Runs that ``ops`` begin with, longer ones first."""
    at = 0
    norm = quantize = None
    if ops[0].name == "rms_norm" and ops[0].max_sizes()["groups"] == 1:
        norm, at = 0, 1
    if at < len(ops) and ops[at].name == "quantize_activation":
        quantize, at = at, at + 1
    if norm is not None and (quantize is None or result(ops[norm]) != source(ops[at - 1])):
        return
    found = _products(ops, at, quantize)
    for count in range(len(found), 0, -1):
        products = tuple(product for product, _ in found[:count])
        biases = tuple(bias for _, bias in found[:count])
        last = max(index for pair in found[:count] for index in pair if index is not None) + 1
        run = Run(products, last, quantize, norm, biases)
        yield from _with_end(ops, run)
        yield run
    if found and found[0][1] is not None:
        # Where another op reads the product itself, its bias is an op of its own.
        first = found[0][0]
        yield Run((first,), first + 1, quantize, norm)


def _products(ops: Sequence[Op], at: int, quantize: int | None) -> list[tuple[int, int | None]]:
    """Consecutive products of the same integers, each with the bias after it."""
    found: list[tuple[int, int | None]] = []
    formats: set[DType | None] = set()
    max_matrices = MAX_MATRICES if quantize is not None else 1
    while at < len(ops) and in_units(ops[at]) and len(found) < max_matrices:
        shared = ops[quantize].operands[1] if quantize is not None else source(ops[at])
        if source(ops[at]) != shared or len(formats | {ops[at].dtype}) > MAX_FORMATS:
            break
        formats.add(ops[at].dtype)
        product, at = at, at + 1
        bias = None
        if at < len(ops) and ops[at].name == "bias_add" and source(ops[at]) == result(ops[product]):
            bias, at = at, at + 1
        found.append((product, bias))
    return found


def _with_end(ops: Sequence[Op], run: Run) -> Iterator[Run]:
    """The run with the op after it, if that reads all results of the products."""
    if run.length >= len(ops):
        return
    end = ops[run.length]
    results = [result(ops[writer(run, i)]) for i in range(len(run.products))]
    more = replace(run, length=run.length + 1)
    if end.name == "swiglu" and len(results) == 2 and list(end.operands[:2]) == results:
        first, second = (ops[product] for product in run.products)
        if first.dtype == second.dtype and run.biases == (None, None):
            yield replace(more, gate=run.length)
    if end.name == "add" and len(results) == 1 and results[0] in end.operands[:2]:
        others = [tensor for tensor in end.operands[:2] if tensor != results[0]]
        inside = {name for op in ops[: run.length] for name in op.results()}
        if others and others[0] is not None and others[0].buffer not in inside:
            yield replace(more, residual=run.length)


def writer(run: Run, number: int) -> int:
    """The index of the op whose result is that of product ``number`` with its bias."""
    bias = run.biases[number]
    return run.products[number] if bias is None else bias


def is_private(ops: Remaining, run: Run) -> bool:
    """Whether no later op reads a result that the launches do not write."""
    last = [run.gate, run.residual]
    ends = [end for end in last if end is not None] or [
        writer(run, i) for i in range(len(run.products))
    ]
    return are_unread(ops, run.length, (result(ops[end]) for end in ends))


def _launch(ops: Sequence[Op], run: Run, device: Device) -> KernelLaunch | None:
    products = [ops[index] for index in run.products]
    first = products[0]
    tokens, columns = first.count.maximum, first.max_sizes()["columns"]
    units = unit_count(columns)
    if run.quantize is not None and not aligned_rows(ops, run):
        return None
    formats = list(dict.fromkeys(product.dtype for product in products))
    together = SINGLE if tokens == 1 else FEW
    tiles = sum(-(-product.max_sizes()["rows"] // UNIT_ROWS) for product in products)
    tiles //= 2 if run.gate is not None else 1
    cluster, blocks, shape = 1, min(tiles, device.multiprocessors), None
    if run.quantize is not None and SINGLE < tokens <= FEW and units > CHUNK_UNITS:
        cluster, blocks = cluster_grid(tiles, device.multiprocessors, device)
        shape = _shared_shape(formats, run, units, cluster, -(-tiles // blocks), device)
    if shape is None:
        cluster, blocks = 1, min(tiles, device.multiprocessors)
        shape = _shape(formats, together, units, run.gate is not None, device)
    if shape is None:
        return None
    numbers = {
        **format_macros(products),
        "WARPS": shape.warps,
        "SLOTS": shape.slots,
        "TOKENS": together,
        "SLOT_BITS": shape.slot_bits,
        "CLUSTER": cluster,
        "GRID": blocks,
        "COLUMNS": columns,
        **_row_macros(run, together, share_units(units, cluster), shape.warps),
    }
    macros = {**numbers, **_operand_macros(ops, run)}
    return KernelLaunch(
        "unit_product", (blocks, -(-tokens // together)), shape.warps * 32, shape.nbytes, macros
    )


def held_units(run: Run, units: int, warps: int) -> int:
    """Units in the registers of a warp; without a norm one, unless a row is long."""
    each = -(-units // warps)
    return 1 if run.norm is None and each < MAX_HELD_UNITS else min(MAX_HELD_UNITS, each)


def _row_macros(run: Run, tokens: int, units: int, warps: int) -> dict[str, int]:
    """Macros for rows of ``tokens`` that a block quantizes, each row by a team of warps if
    possible."""
    if warps % tokens == 0:
        of_team = -(-units * tokens // warps)
        macros = row_macros(*((0, of_team) if run.norm is None else (of_team, 0)), SINGLE)
        if macros["WHOLE_ROWS"]:
            return macros
    held = held_units(run, tokens * units, warps)
    return {"WHOLE_ROWS": 0, "NORM_UNITS": 1, "HELD_UNITS": held}


def row_macros(normed: int, plain: int, tokens: int) -> dict[str, int]:
    """Macros of ``row_quantizer.h``. A warp has at most ``normed`` units of a row with a norm, and
    ``plain`` of one without."""
    whole = tokens == SINGLE and normed <= MAX_HELD_UNITS
    normal = min(MAX_HELD_UNITS, max(1, normed))
    held = min(MAX_ASKED_UNITS if whole else MAX_HELD_UNITS, max(normed, plain))
    return {
        "WHOLE_ROWS": int(whole),
        "NORM_UNITS": normal,
        "HELD_UNITS": -(-held // normal) * normal,
    }


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Warps of a block, ring slots of each, bits of a tile slot's number and bytes of shared
    memory."""

    warps: int
    slots: int
    slot_bits: int
    nbytes: int


def share_units(units: int, cluster: int) -> int:
    """Units of a row that each of ``cluster`` blocks quantizes; the last may have fewer."""
    chunks = -(-units // CHUNK_UNITS)
    return units if cluster == 1 else -(-chunks // cluster) * CHUNK_UNITS


def _shape(
    formats: Sequence[DType | None], tokens: int, units: int, paired: bool, device: Device
) -> BlockShape | None:
    """The block of a product that shares no columns; None if nothing fits."""
    several = (3, 2, 1) if _tile_units(units, paired) <= 32 else (1,)
    shapes = list(itertools.product((16, 12, 8, 4, 2), (*several, 0)))
    if tokens == FEW:
        # With a single tile slot the next tile has to wait, so fewer warps are better.
        shapes = [*itertools.product((16, 12), several), *shapes]
    slots = RING_SLOTS if tokens == SINGLE and paired else 1
    choices = ((warps, slots, slot_bits) for warps, slot_bits in shapes)
    return _first_that_fits(choices, formats, tokens, units, paired, 1, device)


def _shared_shape(
    formats: Sequence[DType | None], run: Run, units: int, cluster: int, tiles: int, device: Device
) -> BlockShape | None:
    """The block of a product whose columns a cluster shares, each block folding ``tiles``; None
    without a cluster or where a row needs more warps."""
    if cluster == 1 or tiles > MAX_SHARED_TILES:
        return None
    max_bits = min((tiles - 1).bit_length(), (MAX_TILE_SLOTS - 1).bit_length())
    choices = (
        (warps, 1, slot_bits)
        for slot_bits in range(max_bits, -1, -1)
        for warps in SHARED_WARPS
        if _row_macros(run, FEW, share_units(units, cluster), warps)["WHOLE_ROWS"]
    )
    return _first_that_fits(choices, formats, FEW, units, run.gate is not None, cluster, device)


def _first_that_fits(
    choices: Iterable[tuple[int, int, int]],
    formats: Sequence[DType | None],
    tokens: int,
    units: int,
    paired: bool,
    cluster: int,
    device: Device,
) -> BlockShape | None:
    """The first of ``choices`` of warps, ring slots and slot bits that fits in shared memory."""
    chunk = CHUNK_UNITS * max(unit_bytes(dtype) for dtype in formats if dtype is not None)
    held = share_units(units, cluster) * UNIT_ACTIVATION_BYTES + units * SQUARE_BYTES
    for warps, slots, slot_bits in choices:
        nbytes = warps * slots * (chunk + BARRIER_BYTES) + BLOCK_BYTES
        nbytes += CLUSTER_BYTES if cluster > 1 else 0
        nbytes += tokens * held
        nbytes += (_tile_units(units, paired) << slot_bits) * tokens * UNIT_ROWS * 4
        if nbytes <= device.shared_bytes:
            return BlockShape(warps, slots, slot_bits, nbytes)
    return None


def _tile_units(units: int, paired: bool) -> int:
    return units * (2 if paired else 1)


def _operand_macros(ops: Sequence[Op], run: Run) -> dict[str, int]:
    """Macros of the kernel's operands: see the head of ``kernels/unit_product.cu``."""
    x = run.norm if run.norm is not None else run.quantize
    integers = run.products[0] if run.quantize is None else None
    numbers = {
        **operand_indices(ops, x, "x"),
        **operand_indices(ops, run.norm, "NORM_WEIGHT=weight"),
        **operand_indices(ops, integers, "M=x scale sums"),
        **operand_indices(ops, run.residual, f"RESIDUAL={residual_operand(ops, run)}"),
        "NORM": packet_number(run.norm),
        "PRODUCT": run.products[0],
        "GATE": packet_number(run.gate),
        **size_indices("matmul", "rows", "columns"),
        **size_indices("swiglu", "activation"),
        **size_indices("rms_norm", "eps"),
    }
    return numbers | matrix_macros(ops, run, range(len(run.products)))


def matrix_macros(ops: Sequence[Op], run: Run, numbers: Iterable[int]) -> dict[str, int]:
    """Macros of the weights, biases and results of the products ``numbers`` of a run."""
    end = run.gate if run.gate is not None else run.residual
    macros: dict[str, int] = {}
    for i, number in enumerate(numbers):
        macros |= operand_indices(ops, run.products[number], f"W{i}=weight")
        macros |= operand_indices(ops, run.biases[number], f"B{i}=bias")
        macros |= operand_indices(ops, writer(run, number) if end is None else end, f"Y{i}=y")
    return macros


def format_macros(products: Sequence[Op]) -> dict[str, int]:
    """Macros of the formats of matrices, of which there are one or two."""
    formats = [_id(product.dtype) for product in products]
    others = [other for other in formats if other != formats[0]]
    return {
        "FIRST": formats[0],
        "SECOND": others[0] if others else formats[0],
        "NUMBERS": sum(1 << 4 * i for i, dtype in enumerate(formats) if dtype != formats[0]),
        "MATRICES": len(formats),
    }


def residual_operand(ops: Sequence[Op], run: Run) -> str:
    """The name of the operand of the addition that is not the product."""
    if run.residual is None:
        return "a"
    return "b" if source(ops[run.residual]) == result(ops[writer(run, 0)]) else "a"


def aligned_rows(ops: Sequence[Op], run: Run) -> bool:
    """Whether rows of x, and a norm's weights, can be read 16 bytes at a time."""
    first = ops[run.norm if run.norm is not None else run.quantize or 0]
    weight = first.operands[1] if run.norm is not None else None
    tensors = [tensor for tensor in (source(first), weight) if tensor is not None]
    return all_aligned(tensors)


def all_aligned(tensors: Iterable[Tensor]) -> bool:
    """Whether the rows of these tensors lie 16 bytes apart; tensors of one value a row may lie
    anywhere."""
    return all(tensor.begins_at(ALIGNED_FLOATS) for tensor in tensors if tensor.stride > 1)


def _id(dtype: DType | None) -> int:
    assert dtype is not None
    return dtype.ggml_id


def shifted_run(run: Run, ops: int) -> Run:
    """The run with indices that count from ``ops`` ops earlier."""

    def moved(index: int | None) -> int | None:
        return None if index is None else index + ops

    return Run(
        tuple(index + ops for index in run.products),
        run.length + ops,
        moved(run.quantize),
        moved(run.norm),
        tuple(map(moved, run.biases)),
        moved(run.gate),
        moved(run.residual),
    )
