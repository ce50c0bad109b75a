"""Finds blocks of experts among the ops of a step: norm, router, choice, products, weighted sum.

Where devices share a step, ALL_GATHERs bring each all of what gates and ups make; they stand before
the first down, and the shared expert's gate and up before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from accel.cuda.runs import operand_indices, operand_of, packet_number, result
from accel.packets.shares import ALL_GATHER
from accel.packets.step import Op, Tensor
from contract.dtypes import F32, DType

MAX_OPS = 24
"""Most ops among which those of a block are looked for."""


@dataclass(frozen=True, slots=True)
class ExpertBlock:
    """Indices of the ops of a block of experts among the remaining ops; None where absent.
    ``gathers`` are those of its ALL_GATHERs, which follow each other."""

    norm: int
    router: int
    topk: int
    quantize: int
    gates: int
    ups: int
    activation: int
    hidden: int
    downs: int
    total: int
    length: int = 0
    gathers: range = range(0)
    gate_logit: int | None = None
    shared_gate: int | None = None
    shared_up: int | None = None
    shared_activation: int | None = None
    shared_hidden: int | None = None
    shared_down: int | None = None
    shared_total: int | None = None

    @property
    def end(self) -> int:
        """The index of the op that writes the result."""
        return self.total if self.shared_total is None else self.shared_total


@dataclass(slots=True)
class _Reader:
    """Takes ops that belong to a block of experts, each once. ``whole`` is what ALL_GATHERs make of
    parts."""

    ops: Sequence[Op]
    taken: set[int] = field(default_factory=set)
    whole: dict[Tensor | None, Tensor | None] = field(init=False)

    def __post_init__(self) -> None:
        near = self.ops[:MAX_OPS]
        self.whole = {one.operands[0]: one.operands[1] for one in near if one.device is ALL_GATHER}

    def take(self, name: str, **operands: Tensor | None) -> int | None:
        """The index of the first op left whose name is ``name`` and that reads these tensors."""
        for at in range(min(MAX_OPS, len(self.ops))):
            op = self.ops[at]
            if op.name == name and at not in self.taken:
                wanted = ((operand_of(op, which), tensor) for which, tensor in operands.items())
                if all(has in (one, self.whole.get(one, one)) for has, one in wanted):
                    self.taken.add(at)
                    return at
        return None

    def closed(self, block: ExpertBlock) -> ExpertBlock | None:
        """The block with its length, None if other ops stand between those taken."""
        length = max(self.taken) + 1
        gathers = [at for at in range(length) if self.ops[at].device is ALL_GATHER]
        if len(self.taken) + len(gathers) != length:
            return None
        if gathers:
            made = [block.activation]
            made += [] if block.shared_activation is None else [block.shared_activation]
            if [self.ops[at].operands[0] for at in gathers] != [
                result(self.ops[at]) for at in made
            ]:
                return None
            block = replace(block, gathers=range(gathers[0], gathers[0] + len(gathers)))
        adjacent = gathers == list(block.gathers)
        return replace(block, length=length) if adjacent else None


def expert_block(ops: Sequence[Op]) -> ExpertBlock | None:
    """The block that ``ops`` begin with, None if they begin with none."""
    read = _Reader(ops)
    norm = read.take("rms_norm")
    assert norm is not None
    x = result(ops[norm])
    router = read.take("matmul", x=x)
    if router is None or ops[router].dtype != F32 or ops[router].max_sizes()["row_pairs"]:
        return None
    topk = read.take("expert_topk", logits=result(ops[router]))
    if topk is None:
        return None
    ids = operand_of(ops[topk], "ids")
    read.take("expert_group", ids=ids)
    quantize = read.take("quantize_activation", x=x)
    if quantize is None:
        return None
    m = operand_of(ops[quantize], "m")
    products = _products(read, m, ids)
    if products is None:
        return None
    downs, weights = products[-1], operand_of(ops[topk], "weights")
    total = read.take("expert_sum", products=result(ops[downs]), ids=ids)
    if total is None or operand_of(ops[total], "weights") != weights:
        return None
    block = ExpertBlock(norm, router, topk, quantize, *products, total)
    alone = set(read.taken)
    found = _with_shared(read, block)
    read.taken = read.taken if found is not None else alone
    return read.closed(found or block)


def _with_shared(read: _Reader, block: ExpertBlock) -> ExpertBlock | None:
    """The block with the shared expert that follows it."""
    ops = read.ops
    x, m = result(ops[block.norm]), operand_of(ops[block.quantize], "m")
    gate_logit = read.take("matmul", x=x)
    products = _products(read, m, None)
    if products is None:
        return None
    gate, up, activation, hidden, down = products
    total = read.take(
        "gated_add",
        residual=result(ops[block.total]),
        x=result(ops[down]),
        gate=None if gate_logit is None else result(ops[gate_logit]),
    )
    if total is None:
        return None
    return replace(
        block,
        gate_logit=gate_logit,
        shared_gate=gate,
        shared_up=up,
        shared_activation=activation,
        shared_hidden=hidden,
        shared_down=down,
        shared_total=total,
    )


def _products(
    read: _Reader, m: Tensor | None, ids: Tensor | None
) -> tuple[int, int, int, int, int] | None:
    """The indices of a gated feed-forward network of ``m``, with the experts ``ids`` if it is
    routed: gate, up, activation, its quantization, down. None if the next ops are no such
    network."""
    ops = read.ops
    gate, up = read.take("matmul", x=m, ids=ids), read.take("matmul", x=m, ids=ids)
    if gate is None or up is None:
        return None
    activation = read.take("swiglu", gate=result(ops[gate]), up=result(ops[up]))
    if activation is None:
        return None
    hidden = read.take("quantize_activation", x=result(ops[activation]))
    if hidden is None:
        return None
    down = read.take("matmul", x=operand_of(ops[hidden], "m"), ids=ids)
    return None if down is None else (gate, up, activation, hidden, down)


def formats_of(ops: Sequence[Op], product: int, shared: int | None) -> tuple[DType, DType]:
    """The formats of a product with a stack and of the shared expert's product; the same where
    there is no shared expert."""
    first = ops[product].dtype
    second = first if shared is None else ops[shared].dtype
    assert first is not None
    assert second is not None
    return first, second


def gate_macros(ops: Sequence[Op], block: ExpertBlock) -> dict[str, int]:
    """Macros of a kernel that multiplies gate and up: formats, operands and packets."""
    first, second = formats_of(ops, block.gates, block.shared_gate)
    return {
        "FORMAT_ID": first.ggml_id,
        "SHARED_FORMAT": second.ggml_id,
        **operand_indices(ops, block.quantize, "m scale sums"),
        **operand_indices(ops, block.gates, "GATES=weight"),
        **operand_indices(ops, block.ups, "UPS=weight"),
        **operand_indices(ops, block.activation, "H=y"),
        **operand_indices(ops, block.shared_gate, "SHARED_GATE=weight"),
        **operand_indices(ops, block.shared_up, "SHARED_UP=weight"),
        **operand_indices(ops, block.shared_activation, "SHARED_H=y"),
        "PRODUCT": block.gates,
        "ACTIVATION": block.activation,
        "SHARED_ACTIVATION": packet_number(block.shared_activation),
    }
