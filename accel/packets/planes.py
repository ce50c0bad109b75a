"""Products of many tokens from planes of bytes: matrices and activations are expanded in front of
them, see ``accel/kernels/plane_steps.k``.

A matrix is expanded once a step, beside what is done before its product; activations once for all
products that read them. The bits are those of ``matmul_tiles``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from accel.packets.device_op import pieces
from accel.packets.fused import operands_of
from accel.packets.fused_ops import FUSED
from accel.packets.layouts import UNIT_COLUMNS
from accel.packets.step import Count, Op, Per, Step, Tensor
from contract.dtypes import Q2_K, Q3_K, Q4_K, Q6_K, DType

EXPANDED_FORMATS = (Q2_K, Q3_K, Q4_K, Q6_K)
"""Those with planes, integers times the scales of their sub-blocks being below 2^13: FORMATS and
the one with minima that a device is asked about."""
WITH_MINIMA = (Q2_K, Q4_K)
PRODUCT_FORMATS = (Q4_K, Q6_K)
"""Of the kernels that multiply planes: with minima and without."""
FORMATS = (Q2_K, Q3_K, Q6_K)
"""Those worth an expansion: halves of their blocks have scales of their own, so that tiles multiply
zeros."""
PLANES_FROM = 512
"""Tokens a step has at most from which on an expansion is worth its while: with fewer a matrix of
LEAST_ROWS and more columns leaves most multiprocessors idle."""
TILED = 256
"""Tokens up to which steps are a form of their own, in tiles: a matrix is expanded whatever their
number is."""
MOST_BYTES = 1 << 29
"""Of a matrix in planes, which is step-local memory."""
LEAST_ROWS = 2048
"""Of a matrix."""
GROUP_ROWS = 128
"""Rows and tokens of a group of ``accel/kernels/matmul_planes.k``."""
STEP_BYTES, UNIT_BYTES = 128, 6 * 128 + 48
"""Of a row, of a step and of a unit with what stands behind it."""


def plane_bytes(rows: int, columns: int) -> int:
    """Bytes of a matrix of so many rows or tokens. A step is loaded behind the last one."""
    units, padded = pieces(columns, UNIT_COLUMNS), pieces(rows, GROUP_ROWS) * GROUP_ROWS
    return padded * (UNIT_BYTES * units + STEP_BYTES)


def product_format(dtype: DType) -> DType:
    """The one of PRODUCT_FORMATS whose kernel multiplies planes of ``dtype``."""
    return Q4_K if dtype in WITH_MINIMA else Q6_K


@dataclass(slots=True)
class _Expanding:
    """The ops made so far, ``written`` the place in them of what wrote a buffer last, ``expanded``
    the planes there are of activations."""

    ops: list[Op] = field(default_factory=list)
    scratch: dict[str, int] = field(default_factory=dict)
    written: dict[str, Op] = field(default_factory=dict)
    expanded: dict[Tensor, Tensor] = field(default_factory=dict)

    def add(self, op: Op) -> None:
        results = op.results()
        self.ops.append(op)
        self.written |= dict.fromkeys(results, op)
        self.expanded = {m: p for m, p in self.expanded.items() if m.buffer not in results}

    def planes(self, name: str, rows: int, columns: int) -> Tensor:
        nbytes = plane_bytes(rows, columns)
        self.scratch[name] = nbytes
        return Tensor(name, 0, nbytes, 0, 1)

    def product(self, op: Op) -> None:
        """A product, its operands expanded."""
        assert op.dtype is not None
        tensors, sizes = operands_of(op), op.most_sizes()
        rows, columns = sizes["rows"], sizes["columns"]
        y, x = tensors["y"], tensors["x"]
        assert y is not None
        assert x is not None
        weight = self.planes(f"{y.buffer}.{y.start}.weight", rows, columns)
        expand = replace(
            op,
            device=(device := FUSED["expand_weight"]),
            operands=(tensors["weight"], weight),
            splits=device.splits,
            count=Count(rows, Per.STEP, rows),
            sizes=(columns,),
            matrix=device.matrix,
        )
        writer = self.written.get(x.buffer)
        place = next((i for i, o in enumerate(self.ops) if o is writer), len(self.ops))
        self.ops.insert(place, expand)
        if x not in self.expanded:
            planes = self.planes(f"{x.buffer}.{len(self.ops)}.planes", op.count.most, columns)
            operands = tensors["x"], tensors["scale"], tensors["sums"], planes
            self.add(_made(op, "expand_tokens", operands, (columns,)))
            self.expanded[x] = planes
        found = tensors | {"x": self.expanded[x], "weight": weight}
        names = [operand.name for operand in FUSED["matmul_planes"].operands]
        made = _made(op, "matmul_planes", tuple(found[n] for n in names), (rows, columns))
        self.add(replace(made, dtype=product_format(op.dtype)))


def _made(like: Op, name: str, operands: tuple[Tensor | None, ...], sizes: tuple[int, ...]) -> Op:
    device = FUSED[name]
    return Op(device, operands, device.splits, like.count, sizes)


def with_planes(step: Step) -> Step:
    """The step with those of its products from planes that are faster so."""
    made = _Expanding(scratch=dict(step.scratch))
    for op in step.ops:
        if _is_worth_it(op):
            made.product(op)
        else:
            made.add(op)
    return Step(made.ops, made.scratch)


def _is_worth_it(op: Op) -> bool:
    if op.name != "matmul_tiles" or op.dtype not in FORMATS or op.count.most < PLANES_FROM:
        return False
    sizes = op.most_sizes()
    return (
        sizes["rows"] >= LEAST_ROWS and plane_bytes(sizes["rows"], sizes["columns"]) <= MOST_BYTES
    )
