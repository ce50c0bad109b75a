"""Where products of many tokens are expanded to planes of bytes."""

from __future__ import annotations

from accel.kernels.matrix_tiles import plane_bytes
from accel.packets.fused_ops import FUSED
from accel.packets.schedule import schedule_levels
from accel.packets.step import Count, Op, Per, Step, Tensor
from accel.vulkan.expanded_tiles import LEAST_ROWS, PLANES_FROM, with_expanded_tiles
from contract.dtypes import Q4_0, Q6_K, DType

COLUMNS = 512


def made(name: str, tensors: dict[str, str], sizes: tuple[int, ...], most: int) -> Op:
    """An op of ``name`` whose operands are whole buffers."""
    device = FUSED[name]
    operands = (tensors.get(operand.name) for operand in device.operands)
    tensors_of = tuple(None if o is None else Tensor(o, 0, COLUMNS, COLUMNS) for o in operands)
    count = Count(1, Per.TOKEN, most)
    return Op(device, tensors_of, device.splits, count, sizes, matrix=device.matrix)


def product(name: str, dtype: DType = Q6_K, rows: int = LEAST_ROWS, most: int = PLANES_FROM) -> Op:
    tensors = {"x": "m", "scale": "scale", "sums": "sums", "weight": f"{name}.weight", "y": name}
    op = made("matmul_tiles", tensors, (rows, COLUMNS), most)
    op.dtype = dtype
    return op


def step(*products: Op) -> Step:
    """A norm and what multiplies its integers."""
    results = {"x": "x", "m": "m", "scale": "scale", "sums": "sums"}
    norm = made("rms_norm_quantize", results, (COLUMNS,), PLANES_FROM)
    buffers = dict.fromkeys(("m", "scale", "sums"), 4 * COLUMNS)
    return Step([norm, *products], buffers)


def names(step: Step) -> list[str]:
    return [op.name for op in step.ops]


def test_matrices_are_expanded_beside_the_norm_and_activations_once() -> None:
    expanded = with_expanded_tiles(step(product("gate"), product("up")))
    assert names(expanded) == [
        *("expand_weight", "expand_weight", "rms_norm_quantize", "expand_tokens"),
        *("matmul_planes", "matmul_planes"),
    ]
    levels = [placement.level for placement in schedule_levels(expanded).placements]
    assert levels == [0, 0, 0, 1, 2, 2]
    sizes = sorted(set(expanded.scratch.values()))[1:]
    assert sizes == [plane_bytes(PLANES_FROM, COLUMNS), plane_bytes(LEAST_ROWS, COLUMNS)]


def test_new_integers_in_the_same_place_are_expanded_again() -> None:
    first, second = step(product("gate")), step(product("up"))
    expanded = with_expanded_tiles(Step([*first.ops, *second.ops], first.scratch))
    assert names(expanded) == [
        *("expand_weight", "rms_norm_quantize", "expand_tokens", "matmul_planes"),
        *("expand_weight", "rms_norm_quantize", "expand_tokens", "matmul_planes"),
    ]


def test_others_are_multiplied_in_tiles() -> None:
    """Few tokens, few or very many rows, scales a block."""
    for other in (
        product("y", most=PLANES_FROM - 1),
        product("y", rows=LEAST_ROWS - 1),
        product("y", rows=1 << 19),
        product("y", Q4_0),
    ):
        assert names(with_expanded_tiles(step(other))) == ["rms_norm_quantize", "matmul_tiles"]
