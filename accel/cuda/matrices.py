"""Rules for products with many tokens: activations are packed once, then multiplied.

The runs are those of ``accel.cuda.products``: ``rms_norm? quantize_activation``, the products of
those integers with their biases, a gate after a pair or a residual after a single one. Where the
device has products of warp groups, matrices of one format share a launch; else each has its own,
and the gate is left to the plain kernel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from accel.cuda import head_rows
from accel.cuda.attention import MAX_SINGLE_TOKENS, attention_tokens, groups_are_units
from accel.cuda.device import Device
from accel.cuda.gathers import gathered_alone, packed_on_all
from accel.cuda.group_shapes import (
    GROUP_WARPS,
    SUM_BYTES,
    TOKEN_BYTES,
    GroupShape,
    by_single_warps,
    group_shape,
    overlapping_shapes,
    span_count,
)
from accel.cuda.half_products import HALF_TOKENS, half_launch, halves_are_faster
from accel.cuda.packed_tiles import UNIT_COLUMNS, UNIT_ROWS, unit_bytes
from accel.cuda.packing import fold_launch, pack_launch, packs_fours
from accel.cuda.products import (
    ALIGNED_FLOATS,
    FEW,
    Run,
    aligned_rows,
    is_private,
    matrix_macros,
    residual_operand,
    runs,
    shifted_run,
    writer,
)
from accel.cuda.runs import (
    are_unread,
    operand_indices,
    operand_of,
    packet_number,
    result,
    size_indices,
    source,
)
from accel.cuda.split_k_products import span_launch
from accel.cuda.tuned import KernelLaunch, Remaining, Replacement
from accel.packets.step import Op, Tensor
from contract.dtypes import Q4_K, Q5_K, Q6_K, DType

FORMATS = (Q4_K, Q5_K, Q6_K)
WARPS = 8
BLOCK_ROWS = WARPS * UNIT_ROWS
BLOCK_TOKENS = 64
STAGES = 2
GROUP_CAPABILITY = (9, 0)
"""The compute capability with products of four warps."""


def matrix_rule(ops: Remaining, device: Device) -> Replacement | None:
    """Replaces the longest run of products of many tokens at the start of ``ops``.

    If its launches leave partial sums, one per span of columns, the run after it adds them up while
    it packs its activations; if there is no such run, one more launch adds them up."""
    run = run_of_many(ops, device)
    return None if run is None else replaced_run(ops, run, device)


def attention_matrix_rule(ops: Remaining, device: Device) -> Replacement | None:
    """Replaces attention of few tokens that packs its rows for the product after it, on every
    device if these gather them."""
    if ops[0].name != "flash_attn_batched" or not groups_are_units(ops[0]):
        return None
    if ops[0].count.maximum > MAX_SINGLE_TOKENS:
        return None
    gather, packed = gathered_alone(ops, 1, result(ops[0]))
    following = Remaining(ops.step, ops.start + gather, ops.last_read)
    found = run_of_many(following, device) if len(following) else None
    if found is None or found.norm is not None:
        return None
    run = shifted_run(found, gather)
    assert run.quantize is not None
    if source(ops[run.quantize]) != packed or ops[run.quantize].count != ops[0].count:
        return None
    if not is_private(ops, run):
        return None
    attention = attention_tokens(ops, device, run.quantize)
    if attention is None:
        return None
    if gather > 1:
        units = ops[run.quantize].max_sizes()["columns"] // UNIT_COLUMNS
        attention = packed_on_all(attention, ops, gather - 1, run.quantize, units)
    replaced = replaced_run(ops, run, device)
    return replace(replaced, launches=(attention, *replaced.launches[1:]))


def replaced_run(ops: Remaining, run: Run, device: Device) -> Replacement:
    """The replacement of a run by launches that pack, multiply, and add up partial sums."""
    if not _leaves_spans(ops, run, device):
        return _with_heads(ops, run, device)
    launches = _launches(ops, run, device, parted=True)
    found = _reader(ops, run, device)
    if found is None:
        behind = Replacement(run.length, (fold_launch(ops, run),))
    else:
        behind = _with_heads(ops, found, device, run)
    transient = max(behind.transient_bytes, span_bytes(ops, run))
    return replace(behind, launches=(*launches, *behind.launches), transient_bytes=transient)


def _with_heads(ops: Remaining, run: Run, device: Device, folded: Run | None = None) -> Replacement:
    """The replacement of a run; that of q, k and v includes the heads that follow if it is faster
    to add up partial sums there."""
    whole = Replacement(run.length, tuple(_launches(ops, run, device, folded)))
    heads = _following_heads(ops, run, folded)
    if heads is None or not has_groups(device):
        return whole
    launches = _launches(ops, run, device, folded, parted=True)
    if launches[-1].macros["PARTS"] == 1:
        return whole
    columns = ops[run.products[0]].max_sizes()["columns"]
    left = head_rows.LeftSpans(span_count(columns), run.biases)
    launches.append(head_rows.head_launch(ops, heads, device, left))
    return Replacement(heads.length, tuple(launches), transient_bytes=span_bytes(ops, run))


def _following_heads(ops: Remaining, run: Run, folded: Run | None) -> head_rows.HeadRun | None:
    """The heads that read exactly the three products of the run, if no other op reads those."""
    following = Remaining(ops.step, ops.start + run.length, ops.last_read)
    found = head_rows.head_run(following) if len(following) else None
    if found is None or run.gate is not None or run.residual is not None:
        return None
    heads = found.behind(run.length)
    products = tuple(result(ops[writer(run, i)]) for i in range(len(run.products)))
    if products != head_rows.head_sources(ops, heads):
        return None
    same = ops[heads.q_rope].count == ops[run.products[0]].count
    written = head_rows.head_results(ops, heads)
    if folded is not None and folded.residual is not None:
        written += (result(ops[folded.residual]),)
    return heads if same and are_unread(ops, heads.length, written) else None


def span_bytes(ops: Sequence[Op], run: Run) -> int:
    """Bytes of the partial sums of all spans."""
    sizes = ops[run.products[0]].max_sizes()
    rows = sum(ops[product].max_sizes()["rows"] for product in run.products)
    return 4 * span_count(sizes["columns"]) * sizes["tokens"] * rows


def _launches(
    ops: Remaining, run: Run, device: Device, folded: Run | None = None, parted: bool = False
) -> list[KernelLaunch]:
    """Packing and the products; ``folded`` as in ``pack_launch``, ``parted`` as in
    ``group_shape``."""
    products = [ops[index] for index in run.products]
    if not has_groups(device):
        return [
            pack_launch(ops, run, device),
            *(_single(ops, run, i) for i in range(len(products))),
        ]
    if (spans := span_launch(ops, run, device, parted)) is not None:
        return [pack_launch(ops, run, device, folded), spans]
    shared = _shared(products)
    if folded is None and (halves := _halves(ops, run, shared, device)) is not None:
        return halves
    if len(shared) > 1:
        shapes = list(_overlapping_shapes(ops, run, shared, device, parted))
    else:
        shapes = [_group_shape(ops, run, shared[0], device, parted)]
    launches = [pack_launch(ops, run, device, folded)]
    last = len(shared) - 1
    launches += [
        group_launch(ops, run, numbers, shapes[i], device, overlaps=i > 0, followed=i < last)
        for i, numbers in enumerate(shared)
    ]
    return launches


def _halves(
    ops: Sequence[Op], run: Run, shared: Sequence[tuple[int, ...]], device: Device
) -> list[KernelLaunch] | None:
    """Packing and the products in binary16, where all are of one format and that is faster."""
    product, rows = ops[run.products[0]], product_rows(ops, run, shared[0])
    columns, tokens, dtype = product.max_sizes()["columns"], product.count.maximum, product.dtype
    if len(shared) > 1 or not packs_fours(ops, run):
        return None
    if dtype is None or not halves_are_faster(dtype, columns, tokens, rows, device):
        return None
    products = half_launch(dtype, tokens, rows, device, _product_macros(ops, run, shared[0]))
    return [pack_launch(ops, run, device, half_tokens=HALF_TOKENS), products]


def _leaves_spans(ops: Sequence[Op], run: Run, device: Device) -> bool:
    """Whether the columns of a product with a residual are better split among blocks."""
    if run.residual is None or not has_groups(device):
        return False
    total = result(ops[run.residual])
    residual = operand_of(ops[run.residual], residual_operand(ops, run))
    bias = operand_of(ops[run.biases[0]], "bias") if run.biases[0] is not None else None
    rows = ops[run.products[0]].max_sizes()["rows"]
    if rows % ALIGNED_FLOATS or not all(map(_is_aligned, (total, residual, bias))):
        return False
    return _parts(ops, run, device) > 1


def _reader(ops: Remaining, run: Run, device: Device) -> Run | None:
    """The run after ``run``, if it packs the sum with the residual that ends ``run``."""
    following = Remaining(ops.step, ops.start + run.length, ops.last_read)
    found = run_of_many(following, device) if len(following) else None
    if found is None or run.residual is None:
        return None
    found = shifted_run(found, run.length)
    assert found.quantize is not None
    packed = source(ops[found.quantize if found.norm is None else found.norm])
    same = ops[found.quantize].count == ops[run.products[0]].count
    return found if same and packed == result(ops[run.residual]) else None


def _parts(ops: Sequence[Op], run: Run, device: Device) -> int:
    """The number of blocks that share the columns of a product, if a later launch adds up their
    partial sums."""
    if (spans := span_launch(ops, run, device, parted=True)) is not None:
        return spans.macros["PARTS"]
    return _group_shape(ops, run, (0,), device, parted=True).parts


def run_of_many(ops: Remaining, device: Device) -> Run | None:
    """The first run of products of more tokens than FEW that packed activations can serve; None if
    the next ops are no such run."""
    for run in runs(ops):
        products = [ops[index] for index in run.products]
        if run.quantize is None or products[0].count.maximum <= FEW:
            continue
        if any(product.dtype not in FORMATS for product in products):
            continue
        if run.gate is not None and not has_groups(device):
            continue
        if aligned_rows(ops, run) and is_private(ops, run):
            return run
    return None


def _is_aligned(tensor: Tensor | None) -> bool:
    """Whether its rows can be read and written 16 bytes at a time."""
    if tensor is not None and tensor.stride == 1:
        return tensor.start % ALIGNED_FLOATS == 0
    return tensor is None or tensor.begins_at(ALIGNED_FLOATS)


def has_groups(device: Device) -> bool:
    """Whether the device has products of warp groups."""
    return device.capability == GROUP_CAPABILITY


def _shared(products: Sequence[Op]) -> list[tuple[int, ...]]:
    """For each launch the indices of its products: neighbours of one format share a launch."""
    found: list[tuple[int, ...]] = []
    for number, product in enumerate(products):
        before = products[found[-1][0]] if found else None
        if before is not None and before.dtype == product.dtype:
            found[-1] = (*found[-1], number)
        else:
            found.append((number,))
    return found


def shared_bytes(dtype: DType) -> int:
    """Shared memory: two stages of what a block reads of one unit."""
    tokens = BLOCK_TOKENS * (TOKEN_BYTES + SUM_BYTES + 4)
    return STAGES * (tokens + WARPS * unit_bytes(dtype))


def _single(ops: Sequence[Op], run: Run, number: int) -> KernelLaunch:
    """The launch of a product by single warps, on any device."""
    product = ops[run.products[number]]
    rows = product.max_sizes()["rows"]
    assert product.dtype is not None
    end = run.residual if run.residual is not None else writer(run, number)
    macros = {
        **operand_indices(ops, run.products[number], "W=weight"),
        **operand_indices(ops, run.biases[number], "B=bias"),
        **operand_indices(ops, end, "y"),
        **_common_macros(ops, run, number),
    }
    grid = (-(-rows // BLOCK_ROWS), -(-product.count.maximum // BLOCK_TOKENS))
    return KernelLaunch("unit_matrix", grid, WARPS * 32, shared_bytes(product.dtype), macros)


def product_rows(ops: Sequence[Op], run: Run, numbers: Iterable[int]) -> list[int]:
    """Rows of the matrices of a launch; a pair counts as one matrix."""
    rows = [ops[run.products[number]].max_sizes()["rows"] for number in numbers]
    return [sum(rows)] if run.gate is not None else rows


def _group_shape(
    ops: Sequence[Op], run: Run, numbers: tuple[int, ...], device: Device, parted: bool
) -> GroupShape:
    product = ops[run.products[numbers[0]]]
    assert product.dtype is not None
    columns, tokens = product.max_sizes()["columns"], product.count.maximum
    rows = product_rows(ops, run, numbers)
    return group_shape(product.dtype, columns, tokens, rows, device, parted)


def _overlapping_shapes(
    ops: Sequence[Op], run: Run, shared: Sequence[tuple[int, ...]], device: Device, parted: bool
) -> tuple[GroupShape, ...]:
    first = ops[run.products[0]]
    rows: list[tuple[DType, tuple[int, ...]]] = []
    for numbers in shared:
        dtype = ops[run.products[numbers[0]]].dtype
        assert dtype is not None
        rows.append((dtype, tuple(product_rows(ops, run, numbers))))
    columns, tokens = first.max_sizes()["columns"], first.count.maximum
    return overlapping_shapes(columns, tokens, tuple(rows), device, parted)


def group_launch(
    ops: Sequence[Op],
    run: Run,
    numbers: tuple[int, ...],
    shape: GroupShape,
    device: Device,
    overlaps: bool = False,
    followed: bool = False,
) -> KernelLaunch:
    """The launch of products by warp groups. It ``overlaps`` the launch before it, or is
    ``followed`` by one that overlaps it."""
    product = ops[run.products[numbers[0]]]
    dtype, tokens, rows = product.dtype, product.count.maximum, product_rows(ops, run, numbers)
    assert dtype is not None
    blocks = shape.row_blocks(rows), -(-tokens // shape.tokens) * shape.parts
    if shape.split or shape.parts > 1:
        grid = (*blocks, 1)
    else:
        # Where launches overlap, a block that takes several tiles in turn would leave no room for
        # the other launch.
        in_all = blocks[0] * blocks[1]
        grid = (in_all if overlaps or followed else min(in_all, device.multiprocessors), 1, 1)
    macros = {
        "WARP_GROUPS": shape.groups,
        "BLOCK_TOKENS": shape.tokens,
        "SPLIT": int(shape.split),
        "PARTS": shape.parts,
        "STAGES": shape.stages,
        "WARP_PRODUCTS": int(by_single_warps(dtype, shape)),
        "BESIDE": int(overlaps),
        "FOLLOWED": int(followed),
        **_product_macros(ops, run, numbers),
    }
    return KernelLaunch(
        "unit_groups", grid, shape.groups * GROUP_WARPS * 32, shape.shared_bytes(dtype), macros
    )


def _product_macros(ops: Sequence[Op], run: Run, numbers: tuple[int, ...]) -> dict[str, int]:
    """Macros of a launch of several products by groups."""
    return {
        "MATRICES": len(numbers),
        "EXPERT_PAIRS": 0,
        "GATE": packet_number(run.gate),
        "ROWS_IN_FRONT": sum(product_rows(ops, run, tuple(range(numbers[0])))),
        **size_indices("swiglu", "activation"),
        **matrix_macros(ops, run, numbers),
        **_common_macros(ops, run, numbers[0]),
    }


def _common_macros(ops: Sequence[Op], run: Run, number: int) -> dict[str, int]:
    """Macros that the launches of products share; ``number`` is that of the first product."""
    product = ops[run.products[number]]
    assert product.dtype is not None
    return {
        "FORMAT_ID": product.dtype.ggml_id,
        "PRODUCT": run.products[number],
        **operand_indices(ops, run.quantize, "m scale sums"),
        **operand_indices(ops, run.residual, f"RESIDUAL={residual_operand(ops, run)}"),
        **size_indices("matmul", "rows", "columns"),
    }
