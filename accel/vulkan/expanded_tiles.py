"""Products of many tokens in tiles of 128 rows and 128 tokens of expanded bytes, on matrix units.

A matrix is expanded to planes of bytes once a step, while the ops before its product run;
activations are expanded once for all products that read them. The bits are those of
``matmul_tiles``; see ``accel/kernels/plane_steps.k``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from accel.kernels.matrix_tiles import plane_bytes, product_format
from accel.packets.fused import operands_of
from accel.packets.fused_ops import FUSED
from accel.packets.step import Count, Op, Per, Step, Tensor
from contract.dtypes import Q2_K, Q3_K, Q6_K

FORMATS = (Q2_K, Q3_K, Q6_K)
"""Formats that are faster expanded: halves of their blocks have scales of their own, so that
``matmul_tiles`` multiplies zeros."""
PLANES_FROM = 512
"""Fewest tokens of a bucket's largest step for which expanding is faster: with fewer, a matrix of
MIN_ROWS leaves most multiprocessors idle."""
TILED = 256
"""Most tokens of the bucket below, in tiles that are not expanded: expanding a matrix takes as long
for few tokens as for many."""
MAX_BYTES = 1 << 29
"""Largest matrix in planes, in bytes: it is scratch memory of a step."""
MIN_ROWS = 2048
"""Fewest rows of a matrix that is expanded."""


@dataclass(slots=True)
class _Expanding:
    """The ops made so far, the op that wrote each buffer last, and the planes of activations that
    exist."""

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
        """Replace a product by expansion of its operands and a product of planes."""
        assert op.dtype is not None
        tensors, sizes = operands_of(op), op.max_sizes()
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
        index = next((i for i, o in enumerate(self.ops) if o is writer), len(self.ops))
        self.ops.insert(index, expand)
        if x not in self.expanded:
            planes = self.planes(f"{x.buffer}.{len(self.ops)}.planes", op.count.maximum, columns)
            operands = tensors["x"], tensors["scale"], tensors["sums"], planes
            self.add(_tiled(op, "expand_tokens", operands, (columns,)))
            self.expanded[x] = planes
        found = tensors | {"x": self.expanded[x], "weight": weight}
        named = tuple(found[name] for name in FUSED["matmul_planes"].index_of)
        made = _tiled(op, "matmul_planes", named, (rows, columns))
        self.add(replace(made, dtype=product_format(op.dtype)))


def _tiled(like: Op, name: str, operands: tuple[Tensor | None, ...], sizes: tuple[int, ...]) -> Op:
    device = FUSED[name]
    return Op(device, operands, device.splits, like.count, sizes)


def with_expanded_tiles(step: Step) -> Step:
    """The step in which products multiply planes where that is faster."""
    made = _Expanding(scratch=dict(step.scratch))
    for op in step.ops:
        if _is_worth_it(op):
            made.product(op)
        else:
            made.add(op)
    return Step(made.ops, made.scratch)


def _is_worth_it(op: Op) -> bool:
    if op.name != "matmul_tiles" or op.dtype not in FORMATS or op.count.maximum < PLANES_FROM:
        return False
    sizes = op.max_sizes()
    return sizes["rows"] >= MIN_ROWS and plane_bytes(sizes["rows"], sizes["columns"]) <= MAX_BYTES
