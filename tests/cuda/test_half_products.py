"""Products of prompts in binary16: where they run, and their bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from accel.cuda.device import Device
from accel.cuda.half_products import HALF_TOKENS, halves_are_faster
from accel.cuda.plan import plan_launches
from accel.packets.rules import lower_graph
from contract import dtypes
from contract.dtypes import F32, DType
from contract.ir.graph import BufferKind, GraphBuilder
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from reference.ops.rms_norm import rms_norm
from reference.ops.swiglu import swiglu
from reference.quant.dot import matmul
from tests.cuda.emulated_step import DEVICE, OLDER
from tests.cuda.product_cases import WIDE, Case, activations, one_product, run, weights

FORM = 400
"""Tokens of a form of prompts; a step may have fewer."""
LAUNCHES = ["unit_pack_fours", "half_groups"]


def entries(case: Case) -> list[str]:
    step = lower_graph(case.graph, ShapeKey(FORM, 0), 1, "cuda")
    return [launch.entry for launch in plan_launches(step.ops, DEVICE, step.scratch).launches]


@pytest.mark.parametrize(
    ("tokens", "rows", "columns"), [(70, 250, 1280), (HALF_TOKENS + 13, 278, 512), (1, 20, 256)]
)
def test_a_prompt_has_the_bits_of_the_definition(
    tokens: int, rows: int, columns: int, folder: Path
) -> None:
    """Two blocks of rows and of tokens, neither full; spans of four units and of one; a broken
    segment, a token of zeros, a segment of very small numbers."""
    case = one_product(dtypes.Q5_K, rows, columns, tokens)
    if tokens > 1:
        case.x[3, 250] = np.inf
        case.x[tokens - 4] = 0
        case.x[tokens - 6, :256] = 1e-30
    assert entries(case) == LAUNCHES
    want = matmul(case.matrices["w"][1], dtypes.Q5_K, case.x)
    assert np.array_equal(run(case, folder, FORM)["y"], want, equal_nan=True)


@pytest.mark.parametrize("period", [2, 3, 256])
def test_the_largest_sums_of_halves(period: int, folder: Path) -> None:
    """Codes, scales, minima and integers as large as they can be, of one sign or of both: partial
    sums reach 2^24."""
    case = one_product(dtypes.Q5_K, 16, 512, 9)
    _, stored = case.matrices["w"]
    stored[:] = 0xFF
    stored.reshape(-1, dtypes.Q5_K.block_bytes).view(np.float16)[:, :2] = 1
    case.x[:] = np.float32(2047 / 1024)
    case.x[:, ::period] *= -1
    case.x[0] = np.float32(2047 / 1024)
    assert entries(case) == LAUNCHES
    assert np.array_equal(run(case, folder, FORM)["y"], matmul(stored, dtypes.Q5_K, case.x))


@pytest.mark.parametrize("zeros", ["minima", "scales"])
def test_minima_or_scales_of_zero(zeros: str, folder: Path) -> None:
    """Each of both terms by itself."""
    case = one_product(dtypes.Q5_K, 32, 256, 5)
    _, stored = case.matrices["w"]
    of_both = stored.reshape(-1, dtypes.Q5_K.block_bytes).view(np.float16)
    of_both[:, 1 if zeros == "minima" else 0] = 0
    want = matmul(stored, dtypes.Q5_K, case.x)
    assert want.any()
    assert np.array_equal(run(case, folder, FORM)["y"], want)


def test_matrices_of_a_prompt_share_a_launch(folder: Path) -> None:
    """Three matrices with biases of one norm, a pair with its gate, and a product with a residual,
    of rows that fill no block."""
    tokens, hidden, width = 21, 512, 200
    builder = GraphBuilder("layer")
    x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", hidden))
    rows = {"q": (120, hidden), "k": (72, hidden), "v": (24, hidden)}
    rows |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width + 56)}
    stored = {
        name: (dtypes.Q5_K, weights(dtypes.Q5_K, *shape, i + 1))
        for i, (name, shape) in enumerate(rows.items())
    }
    vectors = {"norm": activations(1, hidden, 3)[0]}
    vectors |= {f"b.{name}": activations(1, rows[name][0], 4)[0] for name in "qkv"}

    def matrix(name: str) -> dict[str, object]:
        return {"weight": builder.buffer(name, BufferKind.WEIGHT, dtypes.Q5_K, rows[name])}

    kept = {
        name: builder.buffer(name, BufferKind.WEIGHT, F32, (len(vector),))
        for name, vector in vectors.items()
    }
    norm = builder.emit(Opcode.RMS_NORM, x=x, weight=kept["norm"], eps=1e-6, groups=1)
    for name in "qkv":
        y = builder.output(f"y.{name}", "tokens", rows[name][0])
        product = builder.emit(Opcode.MATMUL, x=norm, **matrix(name))
        builder.emit(Opcode.BIAS_ADD, x=product, bias=kept[f"b.{name}"], y=y)
    other = builder.emit(Opcode.RMS_NORM, x=x, weight=kept["norm"], eps=1e-5, groups=1)
    gate, up = (builder.emit(Opcode.MATMUL, x=other, **matrix(name)) for name in ("gate", "up"))
    gated = builder.output("gated", "tokens", width)
    builder.emit(Opcode.SWIGLU, gate=gate, up=up, activation=0, y=gated)
    part = x[0 : width + 56]
    down = builder.emit(Opcode.MATMUL, x=part, **matrix("down"))
    builder.emit(Opcode.ADD, a=x, b=down, y=builder.output("y", "tokens", hidden))
    case = Case(builder.build(), activations(tokens, hidden, 7), stored, vectors)
    got = run(case, folder, FORM)
    normed = rms_norm(x=case.x, weight=vectors["norm"], eps=1e-6)
    for name in "qkv":
        want = matmul(stored[name][1], dtypes.Q5_K, normed) + vectors[f"b.{name}"]
        assert np.array_equal(got[f"y.{name}"], want), name
    normed = rms_norm(x=case.x, weight=vectors["norm"], eps=1e-5)
    gates, others = (matmul(stored[name][1], dtypes.Q5_K, normed) for name in ("gate", "up"))
    assert np.array_equal(got["gated"], swiglu(gate=gates, up=others))
    part_of_x = np.ascontiguousarray(case.x[:, : width + 56])
    assert np.array_equal(got["y"], case.x + matmul(stored["down"][1], dtypes.Q5_K, part_of_x))
    assert entries(case) == LAUNCHES * 3


def test_another_code_changes_its_row(folder: Path) -> None:
    case = one_product(dtypes.Q5_K, 16, 256, 3)
    before = run(case, folder, FORM)["y"].copy()
    case.matrices["w"][1][5, -1] ^= 0x10
    after = run(case, folder, FORM)["y"]
    assert np.array_equal(after, matmul(case.matrices["w"][1], dtypes.Q5_K, case.x))
    assert np.argwhere(before != after)[:, 1].tolist() == [5] * 3


@pytest.mark.parametrize(
    ("dtype", "columns", "tokens", "rows", "device", "faster"),
    [
        (dtypes.Q5_K, 4096, 512, (4096,), WIDE, True),
        (dtypes.Q5_K, 4096, 2048, (24576,), WIDE, True),
        (dtypes.Q5_K, 4096, 2048, (4096, 1024), WIDE, True),
        (dtypes.Q5_K, 4096, 512, (4096, 1024), WIDE, False),
        (dtypes.Q5_K, 2304, 777, (1000,), WIDE, False),
        (dtypes.Q5_K, 4096, 384, (4096,), WIDE, False),
        (dtypes.Q4_K, 4096, 512, (4096,), WIDE, False),
        (dtypes.Q6_K, 4096, 512, (4096,), WIDE, False),
        (dtypes.Q5_K, 4096, 512, (4096,), replace(WIDE, shared_bytes=163 << 10), False),
    ],
    ids=str,
)
def test_where_it_is_faster(
    dtype: DType, columns: int, tokens: int, rows: tuple[int, ...], device: Device, faster: bool
) -> None:
    """Of few rows smaller blocks fill more multiprocessors."""
    assert halves_are_faster(dtype, columns, tokens, rows, device) == faster


def test_older_devices_have_no_such_products() -> None:
    case = one_product(dtypes.Q5_K, 150, 512, 70)
    step = lower_graph(case.graph, ShapeKey(FORM, 0), 1, "cuda")
    plan = plan_launches(step.ops, OLDER, step.scratch)
    assert [launch.entry for launch in plan.launches] == ["unit_pack_fours", "unit_matrix"]
