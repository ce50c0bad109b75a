"""Products with few tokens, and what stands around them in a step, as one launch.

A run of ops that follow each other becomes one launch of ``kernels/unit_product.cu``:

    rms_norm?  quantize_activation  matmul bias_add? (up to four times)  [swiglu or add]?

wherever nobody reads later what lies between. A product whose integers another op made is a launch
of its own. Nothing here knows a model: the run is found in the ops.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from accel.cuda.clusters import cluster_grid
from accel.cuda.device import Device
from accel.cuda.packed_tiles import UNIT_ROWS, in_units, unit_bytes, unit_count
from accel.cuda.runs import (
    nobody_reads,
    operand_index,
    packet_number,
    result,
    size_indices,
    source,
)
from accel.cuda.tuned import KernelLaunch, Remaining, Replacement
from accel.packets.step import Op
from contract.dtypes import DType

MOST_MATRICES = 4
MOST_FORMATS = 2
CHUNK_UNITS = 2
"""Units a warp copies at a time."""
RING_SLOTS = 2
"""Chunks a warp has under way for one token and a pair of matrices; else one: those of the other
warps are enough."""
SHARED_WARPS = (16, 12, 8)
"""Of a block that shares columns with another, the first that fit."""
MOST_HELD_UNITS = 4
MOST_ASKED_UNITS = 6
"""Units of rows a warp holds in registers at once, while a norm's factor is found or others are
on their way."""
SINGLE, FEW = 1, 4
"""Tokens kernels are built for."""
UNIT_ACTIVATION_BYTES = 512 + 32 + 4
"""Of one token: two planes of 256 bytes, 16 sums and a scale."""
SQUARE_BYTES = 4
"""Of one token and unit, whichever block made it."""
MOST_TILE_SLOTS = 8
MOST_SHARED_TILES = 4 * MOST_TILE_SLOTS
"""Of a block: with more what it tells the other of places costs more than its own activations."""
BARRIER_BYTES = 8
TILE_SLOT_BYTES = BARRIER_BYTES + 4
"""What says whether the values of a tile are there, and how many tiles were in its place."""
BLOCK_BYTES = TILE_SLOT_BYTES * MOST_TILE_SLOTS + 2 * BARRIER_BYTES
"""That and the barriers of a block."""
CLUSTER_BYTES = TILE_SLOT_BYTES * MOST_TILE_SLOTS
"""As much for tiles that another block of a cluster folds, and for what comes from there."""
ALIGNED_FLOATS = 4
"""Rows are read 16 bytes at a time."""


@dataclass(frozen=True, slots=True)
class Run:
    """Ops that become one launch, by their places among the ops of the step that are left.

    ``norm`` and ``quantize`` stand before the ``products``; ``biases`` has one place or None for
    each of them; ``gate`` or ``residual`` stands behind. ``length`` counts all.
    """

    products: tuple[int, ...]
    length: int
    quantize: int | None = None
    norm: int | None = None
    biases: tuple[int | None, ...] = (None,)
    gate: int | None = None
    residual: int | None = None


def product_rule(ops: Remaining, device: Device) -> Replacement | None:
    """The longest run the ops begin with."""
    for run in runs(ops):
        if is_private(ops, run) and (launch := _launch(ops, run, device)) is not None:
            return Replacement(run.length, (launch,))
    return None


def runs(ops: Sequence[Op]) -> Iterator[Run]:
    """Runs that ``ops`` begin with, longer ones first."""
    at = 0
    norm = quantize = None
    if ops[0].name == "rms_norm" and ops[0].most_sizes()["groups"] == 1:
        norm, at = 0, 1
    if at < len(ops) and ops[at].name == "quantize_activation":
        quantize, at = at, at + 1
    if norm is not None and (quantize is None or result(ops[norm]) != source(ops[at - 1])):
        return
    found = _products(ops, at, quantize)
    for count in range(len(found), 0, -1):
        products = tuple(product for product, _ in found[:count])
        biases = tuple(bias for _, bias in found[:count])
        last = max(place for pair in found[:count] for place in pair if place is not None) + 1
        run = Run(products, last, quantize, norm, biases)
        yield from _with_end(ops, run)
        yield run
    if found and found[0][1] is not None:
        # Where somebody reads the product itself, its bias is an op of its own.
        first = found[0][0]
        yield Run((first,), first + 1, quantize, norm)


def _products(ops: Sequence[Op], at: int, quantize: int | None) -> list[tuple[int, int | None]]:
    """Products of the same integers one after the other, each with the bias behind it."""
    found: list[tuple[int, int | None]] = []
    formats: set[DType | None] = set()
    most = MOST_MATRICES if quantize is not None else 1
    while at < len(ops) and in_units(ops[at]) and len(found) < most:
        shared = ops[quantize].operands[1] if quantize is not None else source(ops[at])
        if source(ops[at]) != shared or len(formats | {ops[at].dtype}) > MOST_FORMATS:
            break
        formats.add(ops[at].dtype)
        product, at = at, at + 1
        bias = None
        if at < len(ops) and ops[at].name == "bias_add" and source(ops[at]) == result(ops[product]):
            bias, at = at, at + 1
        found.append((product, bias))
    return found


def _with_end(ops: Sequence[Op], run: Run) -> Iterator[Run]:
    """The same with the op behind it, where that takes all there is of the products."""
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
    """Which op of the run writes what is left of product ``number``."""
    bias = run.biases[number]
    return run.products[number] if bias is None else bias


def is_private(ops: Remaining, run: Run) -> bool:
    """Whether nobody behind the run reads what its launches do not write."""
    last = [run.gate, run.residual]
    ends = [end for end in last if end is not None] or [
        writer(run, i) for i in range(len(run.products))
    ]
    return nobody_reads(ops, run.length, (result(ops[end]) for end in ends))


def _launch(ops: Sequence[Op], run: Run, device: Device) -> KernelLaunch | None:
    products = [ops[place] for place in run.products]
    first = products[0]
    tokens, columns = first.count.most, first.most_sizes()["columns"]
    units = unit_count(columns)
    if run.quantize is not None and not aligned_rows(ops, run):
        return None
    formats = list(dict.fromkeys(product.dtype for product in products))
    together = SINGLE if tokens == 1 else FEW
    tiles = sum(-(-product.most_sizes()["rows"] // UNIT_ROWS) for product in products)
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
        "FIRST": _id(formats[0]),
        "SECOND": _id(formats[-1]),
        "NUMBERS": sum(1 << 4 * i for i, p in enumerate(products) if p.dtype != formats[0]),
        "MATRICES": len(products),
        "WARPS": shape.warps,
        "SLOTS": shape.slots,
        "TOKENS": together,
        "SLOT_BITS": shape.slot_bits,
        "CLUSTER": cluster,
        "GRID": blocks,
        "COLUMNS": columns,
        **_row_macros(run, together, share_units(units, cluster), shape.warps),
    }
    return KernelLaunch(
        "unit_product.cu",
        "unit_product",
        (blocks, -(-tokens // together), 1),
        (shape.warps * 32, 1, 1),
        shape.nbytes,
        {**numbers, **_places(ops, run)},
    )


def held_units(run: Run, units: int, warps: int) -> int:
    """Without a norm a warp quantizes what it loads at once, unless there is much of it."""
    each = -(-units // warps)
    return 1 if run.norm is None and each < MOST_HELD_UNITS else min(MOST_HELD_UNITS, each)


def _row_macros(run: Run, tokens: int, units: int, warps: int) -> dict[str, int]:
    """For rows of ``tokens`` that a block makes, each by a team of its warps where that is so."""
    if warps % tokens == 0:
        of_team = -(-units * tokens // warps)
        macros = row_macros(*((0, of_team) if run.norm is None else (of_team, 0)), SINGLE)
        if macros["WHOLE_ROWS"]:
            return macros
    held = held_units(run, tokens * units, warps)
    return {"WHOLE_ROWS": 0, "NORM_UNITS": 1, "HELD_UNITS": held}


def row_macros(normed: int, plain: int, tokens: int) -> dict[str, int]:
    """What ``row_quantizer.h`` is compiled with for rows of which a warp has so many units at most,
    with a norm and without one."""
    whole = tokens == SINGLE and normed <= MOST_HELD_UNITS
    normal = min(MOST_HELD_UNITS, max(1, normed))
    held = min(MOST_ASKED_UNITS if whole else MOST_HELD_UNITS, max(normed, plain))
    return {
        "WHOLE_ROWS": int(whole),
        "NORM_UNITS": normal,
        "HELD_UNITS": -(-held // normal) * normal,
    }


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Warps of a block, ring slots of each, bits of a tile's place and bytes of shared memory."""

    warps: int
    slots: int
    slot_bits: int
    nbytes: int


def share_units(units: int, cluster: int) -> int:
    """Units of a row that each of ``cluster`` blocks makes; the last may have fewer."""
    chunks = -(-units // CHUNK_UNITS)
    return units if cluster == 1 else -(-chunks // cluster) * CHUNK_UNITS


def _shape(
    formats: Sequence[DType | None], tokens: int, units: int, paired: bool, device: Device
) -> BlockShape | None:
    """The block of a product whose columns no others share; None where nothing fits."""
    several = (3, 2, 1) if _tile_units(units, paired) <= 32 else (1,)
    shapes = list(itertools.product((16, 12, 8, 4, 2), (*several, 0)))
    if tokens == FEW:
        # A tile with the only place for values keeps the next one waiting: rather fewer warps.
        shapes = [*itertools.product((16, 12), several), *shapes]
    slots = RING_SLOTS if tokens == SINGLE and paired else 1
    choices = ((warps, slots, slot_bits) for warps, slot_bits in shapes)
    return _first_that_fits(choices, formats, tokens, units, paired, 1, device)


def _shared_shape(
    formats: Sequence[DType | None], run: Run, units: int, cluster: int, tiles: int, device: Device
) -> BlockShape | None:
    """The block of a product whose columns those of a cluster share, each folding ``tiles``; None
    where there is no cluster or each of its rows needs more warps."""
    if cluster == 1 or tiles > MOST_SHARED_TILES:
        return None
    most_bits = min((tiles - 1).bit_length(), (MOST_TILE_SLOTS - 1).bit_length())
    choices = (
        (warps, 1, slot_bits)
        for slot_bits in range(most_bits, -1, -1)
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
    """Of ``choices`` of warps, ring slots and slot bits."""
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


def _places(ops: Sequence[Op], run: Run) -> dict[str, int]:
    """Where the kernel finds its operands: see the head of ``kernels/unit_product.cu``."""
    x = run.norm if run.norm is not None else run.quantize
    integers = run.products[0] if run.quantize is None else None
    numbers = {
        "X": operand_index(ops, x, "x"),
        "NORM_WEIGHT": operand_index(ops, run.norm, "weight"),
        "M": operand_index(ops, integers, "x"),
        "SCALE": operand_index(ops, integers, "scale"),
        "SUMS": operand_index(ops, integers, "sums"),
        "RESIDUAL": operand_index(ops, run.residual, residual_operand(ops, run)),
        "NORM": packet_number(run.norm),
        "PRODUCT": run.products[0],
        "GATE": packet_number(run.gate),
        **size_indices("matmul", "rows", "columns"),
        **size_indices("swiglu", "activation"),
        **size_indices("rms_norm", "eps"),
    }
    end = run.gate if run.gate is not None else run.residual
    for i, product in enumerate(run.products):
        numbers[f"W{i}"] = operand_index(ops, product, "weight")
        numbers[f"B{i}"] = operand_index(ops, run.biases[i], "bias")
        numbers[f"Y{i}"] = operand_index(ops, writer(run, i) if end is None else end, "y")
    return numbers


def residual_operand(ops: Sequence[Op], run: Run) -> str:
    """Which operand of the addition is not the product."""
    if run.residual is None:
        return "a"
    return "b" if source(ops[run.residual]) == result(ops[writer(run, 0)]) else "a"


def aligned_rows(ops: Sequence[Op], run: Run) -> bool:
    """Whether rows of x, and a norm's weights, can be read 16 bytes at a time."""
    first = ops[run.norm if run.norm is not None else run.quantize or 0]
    weight = first.operands[1] if run.norm is not None else None
    tensors = [tensor for tensor in (source(first), weight) if tensor is not None]
    return all(
        tensor.start % ALIGNED_FLOATS == 0 and tensor.stride % ALIGNED_FLOATS == 0
        for tensor in tensors
        if tensor.stride > 1
    )


def _id(dtype: DType | None) -> int:
    assert dtype is not None
    return dtype.ggml_id
