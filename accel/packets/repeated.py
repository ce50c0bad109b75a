"""Moves small ops of one token into the work-groups of the ops after them, which repeat them.

Repeating the heads before attention, or a norm and its quantization before products, costs less
than a separate launch to wait for, as long as all groups run at once. Two products and the gate
after them become one ``gate_row``. The bits are the same. Devices whose launches wait for one
another use this pass after ``fuse``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from accel.packets.device_op import pieces
from accel.packets.fused import fused_op, operands_of
from accel.packets.layouts import TILE_ROWS
from accel.packets.step import Op, Step, Tensor
from contract.arithmetic import SEGMENT
from contract.dtypes import I12

MAX_GROUPS = 512
"""Most work-groups of the products after a norm: more would not run at once, and each would repeat
the norm."""
HEAD_CHANNELS = 32
MAX_HEAD_DIM, WIDE_FROM = 256, 129
"""Most channels of a head for ``accel/kernels/row_attention.k``, and from how many on
``flash_attn_row_wide`` is used. Channels are a multiple of HEAD_CHANNELS."""
MAX_SEGMENTS = 24
"""Most segments of a row of activations for a group of ``accel/kernels/gate_row.k``."""
ALIGNED_ELEMENTS = 4
"""Activations that a group loads at once."""
NO_NORM = -1.0
"""The value of eps for products without a norm."""
INTEGERS = ("m", "scale", "sums")


@dataclass(slots=True)
class _Changes:
    """The ops, by identity, to remove or replace, and new step-local buffers."""

    dropped: set[int] = field(default_factory=set)
    made: dict[int, Op] = field(default_factory=dict)
    scratch: dict[str, int] = field(default_factory=dict)

    def applied(self, step: Step) -> Step:
        ops = [self.made.get(id(op), op) for op in step.ops if id(op) not in self.dropped]
        return Step.of(ops, step.scratch | self.scratch)


def repeat_small(step: Step) -> Step:
    """The step in which attention of one token makes its heads, gates are one op, and products of
    one token make the norm and the integers they read."""
    return _without_integers(_with_gates(_with_heads(step)))


def _with_heads(step: Step) -> Step:
    """The step in which attention of one token makes its own heads."""
    users, changes = _Users(step), _Changes()
    for heads, parts in pairwise(step.ops):
        if (heads.name, parts.name) != ("head_rows", "flash_attn_part"):
            continue
        if _fits_attention(heads, parts) and users.alone(operands_of(heads)["y"]):
            changes.dropped.add(id(heads))
            changes.made[id(parts)] = _attention(heads, parts)
    return changes.applied(step)


def _fits_attention(heads: Op, parts: Op) -> bool:
    head, part = operands_of(heads), operands_of(parts)
    sizes, table = heads.max_sizes(), head["rope_table"]
    return (
        heads.count == parts.count
        and heads.count.maximum == 1
        and heads.dtype == parts.dtype == I12
        and head["y"] == part["q"]
        and all(head[name] == part[name] for name in ("kv", "query", "page_table"))
        and parts.max_sizes()["window"] == 0
        and parts.reals[1] == 0
        and heads.reals[0] == heads.reals[1]
        and sizes["head_dim"] <= MAX_HEAD_DIM
        and sizes["head_dim"] % HEAD_CHANNELS == 0
        and table is not None
        and (table.start, table.stride) == (0, sizes["rotary_pairs"])
    )


def _attention(heads: Op, parts: Op) -> Op:
    tensors = operands_of(heads) | {"parts": operands_of(parts)["parts"]}
    sizes = heads.max_sizes() | parts.max_sizes()
    name = "flash_attn_row_wide" if sizes["head_dim"] >= WIDE_FROM else "flash_attn_row"
    return fused_op(parts, name, tensors, sizes, (parts.reals[0], heads.reals[0]))


def _with_gates(step: Step) -> Step:
    users, changes = _Users(step), _Changes()
    for op in step.ops:
        if op.name != "swiglu_quantize" or (down := users.products(op)) is None:
            continue
        tensors = operands_of(op)
        gate, up = users.product(tensors["gate"]), users.product(tensors["up"])
        if gate is None or up is None or not _alike(gate, up):
            continue
        integers = users.integers(gate)
        if integers is None or users.products(integers, of=2) != [gate, up]:
            continue
        gated = Tensor(f"{gate.results().pop()}.gated", 0, *2 * (gate.max_sizes()["rows"],))
        changes.scratch[gated.buffer] = 4 * gated.columns
        changes.dropped |= {id(integers), id(gate), id(op)}
        changes.made[id(up)] = _gate(integers, gate, up, op.max_sizes()["activation"], gated)
        changes.made |= {id(p): _product({"x": gated}, (NO_NORM,), p) for p in down}
    return changes.applied(step)


def _without_integers(step: Step) -> Step:
    users, changes = _Users(step), _Changes()
    for op in step.ops:
        if op.name in _REALS and (products := users.products(op)) is not None:
            changes.dropped.add(id(op))
            changes.made |= {id(p): _product(operands_of(op), _eps(op), p) for p in products}
    return changes.applied(step)


_REALS = ("rms_norm_quantize", "quantize_activation")


def _eps(op: Op) -> tuple[float, ...]:
    return op.reals or (NO_NORM,)


class _Users:
    """The ops that write and read each buffer of a step."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._readers: dict[str, list[Op]] = defaultdict(list)
        self._writers: dict[str, list[Op]] = defaultdict(list)
        for op in step.ops:
            for index, tensor in enumerate(op.operands):
                if tensor is not None:
                    users = self._writers if index in op.written else self._readers
                    users[tensor.buffer].append(op)

    def products(self, op: Op, of: int = 1) -> list[Op] | None:
        """The products of one token that read the integers made by ``op``; None if others read them
        or the products have partial segments or too many groups. Each op multiplies ``of``
        matrices."""
        tensors = operands_of(op)
        read = [t for name in ("x", "factors") if (t := tensors.get(name)) is not None]
        if op.count.maximum != 1 or tensors.get("y") is not None:
            return None
        made = [t for name in INTEGERS if (t := tensors[name]) is not None]
        if any(t.start % ALIGNED_ELEMENTS for t in read) or not self._local(made):
            return None
        found = _distinct(reader for t in made for reader in self._readers[t.buffer])
        if any(p.name != "matmul_row" or p.count != op.count for p in found):
            return None
        sizes = [product.max_sizes() for product in found]
        groups = sum(pieces(size["rows"], TILE_ROWS) for size in sizes)
        whole = all(size["columns"] % SEGMENT == 0 for size in sizes)
        return found if found and whole and groups <= of * MAX_GROUPS else None

    def product(self, y: Tensor | None) -> Op | None:
        """The product whose whole result is ``y``, if one op only reads it."""
        if y is None or not self._local([y]):
            return None
        makes = [op for op in self._writers[y.buffer] if y in op.operands]
        readers = self._readers[y.buffer]
        reads = [op for op in readers if any(t is not None and t.overlaps(y) for t in op.operands)]
        alone = len(makes) == len(reads) == 1 and makes[0].name == "matmul_row"
        return makes[0] if alone else None

    def alone(self, y: Tensor | None) -> bool:
        """Whether exactly one op reads the step-local ``y``."""
        return y is not None and self._local([y]) and len(self._readers[y.buffer]) == 1

    def integers(self, product: Op) -> Op | None:
        """The op that makes the integers a product reads."""
        m = operands_of(product)["x"]
        writers = self._writers[m.buffer] if m is not None else []
        return writers[0] if len(writers) == 1 and writers[0].name in _REALS else None

    def _local(self, tensors: Iterable[Tensor]) -> bool:
        return all(tensor.buffer in self._step.scratch for tensor in tensors)


def _distinct(ops: Iterable[Op]) -> list[Op]:
    return list({id(op): op for op in ops}.values())


def _alike(gate: Op, up: Op) -> bool:
    """Whether two products differ only in their matrices."""
    sizes = gate.max_sizes()
    plain = [operands_of(op)[name] is None for op in (gate, up) for name in ("bias", "residual")]
    return (
        gate is not up
        and (gate.dtype, sizes) == (up.dtype, up.max_sizes())
        and pieces(sizes["rows"], TILE_ROWS) <= MAX_GROUPS
        and sizes["columns"] <= MAX_SEGMENTS * SEGMENT
        and all(plain)
    )


def _product(x: dict[str, Tensor | None], reals: tuple[float, ...], product: Op) -> Op:
    """A product that makes the integers of ``x`` itself."""
    read = {name: x.get(name) for name in ("x", "factors")}
    return fused_op(product, "norm_row", operands_of(product) | read, product.max_sizes(), reals)


def _gate(integers: Op, gate: Op, up: Op, activation: int, y: Tensor) -> Op:
    weights = {"gate": operands_of(gate)["weight"], "up": operands_of(up)["weight"]}
    tensors, sizes = operands_of(integers) | weights | {"y": y}, up.max_sizes()
    return fused_op(up, "gate_row", tensors, sizes | {"activation": activation}, _eps(integers))
