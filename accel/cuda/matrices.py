"""Products with many tokens: activations packed once, then the products.

The runs are those of ``accel.cuda.products``: ``rms_norm? quantize_activation``, the products of
those integers with their biases, a gate behind a pair or a residual behind a single one. Where
there are products of warp groups, matrices of one format share a launch; else each has its own, and
a gate is left to the plain kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

from accel.cuda.clusters import LEAST_CAPABILITY as CLUSTER_CAPABILITY
from accel.cuda.device import Device
from accel.cuda.group_shapes import (
    GROUP_WARPS,
    MOST_SPLIT_TOKENS,
    SUM_BYTES,
    TOKEN_BYTES,
    GroupShape,
    by_single_warps,
    group_shape,
    shapes_beside,
    span_count,
)
from accel.cuda.products import (
    ALIGNED_FLOATS,
    FEW,
    Run,
    aligned_rows,
    is_private,
    residual_operand,
    runs,
    writer,
)
from accel.cuda.runs import operand_place, packet_number, result, size_places, source
from accel.cuda.span_products import span_launch
from accel.cuda.tuned import KernelLaunch, Remaining, Replacement
from accel.cuda.units import UNIT_COLUMNS, UNIT_ROWS, unit_bytes, unit_count
from accel.packets.step import Op, Tensor
from contract.dtypes import Q4_K, Q5_K, Q6_K, DType

FORMATS = (Q4_K, Q5_K, Q6_K)
WARPS = 8
BLOCK_ROWS = WARPS * UNIT_ROWS
BLOCK_TOKENS = 64
STAGES = 2
MOST_PACKING_BLOCKS = 1 << 12
ROW_WARPS = 16
"""Where a norm or the sum of spans comes first; else warps take units, whichever row's."""
MOST_PIECES = 4
"""Blocks of a row then, a cluster where there is a norm."""
FOUR = 4
"""Tokens of a warp where there are many."""
MOST_FOUR_WARPS = 32
"""Of a block, which has a whole row of units where a norm comes first."""

GROUP_CAPABILITY = (9, 0)
"""The one with products of four warps."""


def matrix_rule(ops: Remaining, device: Device) -> Replacement | None:
    """The longest run of many tokens the ops begin with; where that leaves spans, with the next run
    if that packs their sum, else with a launch that makes it."""
    run = _run_of_many(ops, device)
    if run is None:
        return None
    if not _leaves_spans(ops, run, device):
        return Replacement(run.length, tuple(_launches(ops, run, device)))
    found = _reader(ops, run, device)
    folding = [_fold(ops, run)] if found is None else _launches(ops, found, device, run)
    launches = _launches(ops, run, device, parted=True) + folding
    sizes = ops[run.products[0]].most_sizes()
    values = span_count(sizes["columns"]) * sizes["tokens"] * sizes["rows"]
    length = run.length if found is None else found.length
    return Replacement(length, tuple(launches), passing_bytes=4 * values)


def _launches(
    ops: Remaining, run: Run, device: Device, folded: Run | None = None, parted: bool = False
) -> list[KernelLaunch]:
    """Packing and the products; ``folded`` and ``parted`` as ``_pack`` and ``group_shape`` have
    them."""
    products = [ops[place] for place in run.products]
    if not _has_groups(device):
        return [_pack(ops, run, device), *(_single(ops, run, i) for i in range(len(products)))]
    if (spans := span_launch(ops, run, device, parted)) is not None:
        return [_pack(ops, run, device, folded), spans]
    shared = _shared(products)
    if len(shared) > 1:
        shapes = list(_shapes_beside(ops, run, shared, device))
    else:
        shapes = [_group_shape(ops, run, shared[0], device, parted)]
    launches = [_pack(ops, run, device, folded)]
    last = len(shared) - 1
    launches += [
        _grouped(ops, run, numbers, shapes[i], device, beside=i > 0, followed=i < last)
        for i, numbers in enumerate(shared)
    ]
    return launches


def _leaves_spans(ops: Sequence[Op], run: Run, device: Device) -> bool:
    """Whether it is a product with a residual whose columns are better split among blocks."""
    if run.residual is None or not _has_groups(device):
        return False
    total = result(ops[run.residual])
    residual = _operand(ops[run.residual], residual_operand(ops, run))
    bias = _operand(ops[run.biases[0]], "bias") if run.biases[0] is not None else None
    rows = ops[run.products[0]].most_sizes()["rows"]
    if rows % ALIGNED_FLOATS or not all(map(_is_aligned, (total, residual, bias))):
        return False
    return _parts(ops, run, device) > 1


def _reader(ops: Remaining, run: Run, device: Device) -> Run | None:
    """The run behind, if it packs the sum."""
    following = Remaining(ops.step, ops.start + run.length, ops.last_read)
    found = _run_of_many(following, device) if len(following) else None
    if found is None or run.residual is None:
        return None
    found = _behind(found, run.length)
    assert found.quantize is not None
    packed = source(ops[found.quantize if found.norm is None else found.norm])
    same = ops[found.quantize].count == ops[run.products[0]].count
    return found if same and packed == result(ops[run.residual]) else None


def _parts(ops: Sequence[Op], run: Run, device: Device) -> int:
    """How many blocks share rows of a product whose spans the run behind may fold."""
    if (spans := span_launch(ops, run, device, parted=True)) is not None:
        return spans.macros["PARTS"]
    return _group_shape(ops, run, (0,), device, parted=True).parts


def _run_of_many(ops: Remaining, device: Device) -> Run | None:
    for run in runs(ops):
        products = [ops[place] for place in run.products]
        if run.quantize is None or products[0].count.most <= FEW:
            continue
        if any(product.dtype not in FORMATS for product in products):
            continue
        if run.gate is not None and not _has_groups(device):
            continue
        if aligned_rows(ops, run) and is_private(ops, run):
            return run
    return None


def _behind(run: Run, ops: int) -> Run:
    """The same, counted from so many ops earlier."""

    def moved(place: int | None) -> int | None:
        return None if place is None else place + ops

    return Run(
        tuple(place + ops for place in run.products),
        run.length + ops,
        moved(run.quantize),
        moved(run.norm),
        tuple(map(moved, run.biases)),
        moved(run.gate),
        moved(run.residual),
    )


def _operand(op: Op, name: str) -> Tensor | None:
    return op.operands[[operand.name for operand in op.device.operands].index(name)]


def _is_aligned(tensor: Tensor | None) -> bool:
    """Whether its rows can be read and written 16 bytes at a time."""
    if tensor is None:
        return True
    return tensor.start % ALIGNED_FLOATS == 0 and (
        tensor.stride <= 1 or tensor.stride % ALIGNED_FLOATS == 0
    )


def _has_groups(device: Device) -> bool:
    return device.capability == GROUP_CAPABILITY


def _shared(products: Sequence[Op]) -> list[tuple[int, ...]]:
    """Numbers of the products of each launch."""
    found: list[tuple[int, ...]] = []
    for number, product in enumerate(products):
        before = products[found[-1][0]] if found else None
        if before is not None and before.dtype == product.dtype:
            found[-1] = (*found[-1], number)
        else:
            found.append((number,))
    return found


def shared_bytes(dtype: DType) -> int:
    """Two stages of what a block reads of one unit."""
    tokens = BLOCK_TOKENS * (TOKEN_BYTES + SUM_BYTES + 4)
    return STAGES * (tokens + WARPS * unit_bytes(dtype))


def _row_pieces(tokens: int, units: int, device: Device) -> int:
    """Blocks that share a row: more while there are multiprocessors for them."""
    pieces = 1
    while (
        device.capability >= CLUSTER_CAPABILITY
        and 2 * pieces <= min(MOST_PIECES, units)
        and 2 * pieces * tokens <= device.multiprocessors
    ):
        pieces *= 2
    return pieces


def _pack(ops: Sequence[Op], run: Run, device: Device, folded: Run | None = None) -> KernelLaunch:
    """The activations of a run, whose rows are the result of ``folded`` if there is one."""
    assert run.quantize is not None
    quantize = ops[run.quantize]
    tokens, units = quantize.count.most, unit_count(quantize.most_sizes()["columns"])
    fits = run.norm is None or units <= MOST_FOUR_WARPS
    if folded is None and tokens > MOST_SPLIT_TOKENS and fits:
        return _pack_fours(ops, run, tokens, units)
    whole = run.norm is not None or folded is not None
    pieces = _row_pieces(tokens, units, device) if whole else -(-units // WARPS)
    warps = min(ROW_WARPS if whole else WARPS, -(-units // pieces))
    return KernelLaunch(
        "unit_pack.cu",
        "unit_pack",
        (min(tokens, MOST_PACKING_BLOCKS) * pieces, 1, 1),
        (warps * 32, 1, 1),
        4 * units,
        {
            "WARPS": warps,
            "HELD_UNITS": -(-units // (pieces * warps)),
            "PIECES": pieces,
            "CLUSTER": 1 if run.norm is None else pieces,
            **_fold_places(ops, folded),
            **_packing_places(ops, run),
        },
    )


def _pack_fours(ops: Sequence[Op], run: Run, tokens: int, units: int) -> KernelLaunch:
    """The activations of many tokens."""
    warps = min(WARPS, units) if run.norm is None else units
    pieces = -(-units // warps)
    weights = 0 if run.norm is None else 4 * UNIT_COLUMNS * warps
    return KernelLaunch(
        "unit_pack_fours.cu",
        "unit_pack_fours",
        (-(-tokens // FOUR) * pieces, 1, 1),
        (warps * 32, 1, 1),
        4 * FOUR * warps + weights,
        {"WARPS": warps, "PIECES": pieces, **_packing_places(ops, run)},
    )


def _packing_places(ops: Sequence[Op], run: Run) -> dict[str, int]:
    """What the launches that pack have in common."""
    assert run.quantize is not None
    first = run.quantize if run.norm is None else run.norm
    return {
        "X": operand_place(ops, first, "x"),
        "NORM_WEIGHT": operand_place(ops, run.norm, "weight"),
        "M": operand_place(ops, run.quantize, "m"),
        "SCALE": operand_place(ops, run.quantize, "scale"),
        "SUMS": operand_place(ops, run.quantize, "sums"),
        "NORM": packet_number(run.norm),
        "QUANTIZE": run.quantize,
        **size_places("quantize_activation", "columns"),
        **size_places("rms_norm", "eps"),
    }


def _fold(ops: Sequence[Op], run: Run) -> KernelLaunch:
    """The sum of spans that nobody packs."""
    tokens = ops[run.products[0]].count.most
    return KernelLaunch(
        "unit_fold.cu",
        "unit_fold",
        (min(tokens, MOST_PACKING_BLOCKS), 1, 1),
        (ROW_WARPS * 32, 1, 1),
        macros={
            "Y": operand_place(ops, run.residual, "y"),
            **_fold_places(ops, run),
            **size_places("matmul", "rows"),
        },
    )


def _fold_places(ops: Sequence[Op], folded: Run | None) -> dict[str, int]:
    if folded is None:
        return {"FOLDED": packet_number(None)}
    return {
        "FOLDED": folded.products[0],
        "BIAS": operand_place(ops, folded.biases[0], "bias"),
        "RESIDUAL": operand_place(ops, folded.residual, residual_operand(ops, folded)),
        "SPANS": span_count(ops[folded.products[0]].most_sizes()["columns"]),
    }


def _single(ops: Sequence[Op], run: Run, number: int) -> KernelLaunch:
    """By single warps, on any device."""
    product = ops[run.products[number]]
    rows = product.most_sizes()["rows"]
    assert product.dtype is not None
    end = run.residual if run.residual is not None else writer(run, number)
    return KernelLaunch(
        "unit_matrix.cu",
        "unit_matrix",
        (-(-rows // BLOCK_ROWS), -(-product.count.most // BLOCK_TOKENS), 1),
        (WARPS * 32, 1, 1),
        shared_bytes(product.dtype),
        {
            "W": operand_place(ops, run.products[number], "weight"),
            "B": operand_place(ops, run.biases[number], "bias"),
            "Y": operand_place(ops, end, "y"),
            **_places(ops, run, number),
        },
    )


def _rows(ops: Sequence[Op], run: Run, numbers: tuple[int, ...]) -> list[int]:
    """Of the matrices of a launch; a pair counts as one."""
    rows = [ops[run.products[number]].most_sizes()["rows"] for number in numbers]
    return [sum(rows)] if run.gate is not None else rows


def _group_shape(
    ops: Sequence[Op], run: Run, numbers: tuple[int, ...], device: Device, parted: bool
) -> GroupShape:
    product = ops[run.products[numbers[0]]]
    assert product.dtype is not None
    columns, tokens = product.most_sizes()["columns"], product.count.most
    rows = _rows(ops, run, numbers)
    return group_shape(product.dtype, columns, tokens, rows, device, parted)


def _shapes_beside(
    ops: Sequence[Op], run: Run, shared: Sequence[tuple[int, ...]], device: Device
) -> tuple[GroupShape, ...]:
    first = ops[run.products[0]]
    rows: list[tuple[DType, tuple[int, ...]]] = []
    for numbers in shared:
        dtype = ops[run.products[numbers[0]]].dtype
        assert dtype is not None
        rows.append((dtype, tuple(_rows(ops, run, numbers))))
    return shapes_beside(first.most_sizes()["columns"], first.count.most, tuple(rows), device)


def _grouped(
    ops: Sequence[Op],
    run: Run,
    numbers: tuple[int, ...],
    shape: GroupShape,
    device: Device,
    beside: bool,
    followed: bool,
) -> KernelLaunch:
    """By groups of four warps, ``beside`` the launch in front and ``followed`` by one beside it."""
    product = ops[run.products[numbers[0]]]
    dtype, tokens, rows = product.dtype, product.count.most, _rows(ops, run, numbers)
    assert dtype is not None
    end = run.gate if run.gate is not None else run.residual
    blocks = shape.row_blocks(rows), -(-tokens // shape.tokens) * shape.parts
    if shape.split or shape.parts > 1:
        grid = (*blocks, 1)
    else:
        # Of launches beside each other a block that takes several leaves no room for the other's.
        most = blocks[0] * blocks[1]
        grid = (most if beside or followed else min(most, device.multiprocessors), 1, 1)
    places = {}
    for i, number in enumerate(numbers):
        places[f"W{i}"] = operand_place(ops, run.products[number], "weight")
        places[f"B{i}"] = operand_place(ops, run.biases[number], "bias")
        places[f"Y{i}"] = operand_place(ops, writer(run, number) if end is None else end, "y")
    return KernelLaunch(
        "unit_groups.cu",
        "unit_groups",
        grid,
        (shape.groups * GROUP_WARPS * 32, 1, 1),
        shape.shared_bytes(dtype),
        {
            "WARP_GROUPS": shape.groups,
            "BLOCK_TOKENS": shape.tokens,
            "SPLIT": int(shape.split),
            "PARTS": shape.parts,
            "STAGES": shape.stages,
            "WARP_PRODUCTS": int(by_single_warps(dtype, shape)),
            "MATRICES": len(numbers),
            "BESIDE": int(beside),
            "FOLLOWED": int(followed),
            "GATE": packet_number(run.gate),
            **size_places("swiglu", "activation"),
            **places,
            **_places(ops, run, numbers[0]),
        },
    )


def _places(ops: Sequence[Op], run: Run, number: int) -> dict[str, int]:
    """What the launches of products have in common; ``number`` is the first product's."""
    product = ops[run.products[number]]
    assert product.dtype is not None
    return {
        "FORMAT_ID": product.dtype.ggml_id,
        "PRODUCT": run.products[number],
        "M": operand_place(ops, run.quantize, "m"),
        "SCALE": operand_place(ops, run.quantize, "scale"),
        "SUMS": operand_place(ops, run.quantize, "sums"),
        "RESIDUAL": operand_place(ops, run.residual, residual_operand(ops, run)),
        **size_places("matmul", "rows", "columns"),
    }
