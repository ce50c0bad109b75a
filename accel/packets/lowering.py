"""Builds a step op by op: converts a graph's views to tensors, and adds the ops that several
opcodes share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TypeAlias

from accel.packets.device_op import DeviceOp, DeviceOperand
from accel.packets.ops import TABLE as DEVICE_OPS
from accel.packets.shape_buckets import SPLIT_TOKENS
from accel.packets.step import Count, Op, Per, Step, Tensor
from contract.arithmetic import PAGE_TOKENS, SEGMENT
from contract.dtypes import F16, F32, I32, ROTATED_KV, DType, StorageClass
from contract.ir.nodes import BufferKind, Graph, Node, View
from contract.ir.scratch import buffer_bytes
from contract.ops import TABLE
from contract.shape_key import ShapeKey
from contract.spec import bind_shapes

PRIVATE_ELEMENTS = 8192
"""Most elements of an op that is cheaper to repeat in every worker than the barrier it saves."""
PAGE_WRITERS = 2
"""Most workers that write the same keys and values to save a barrier: with more, the lines of a
page go from core to core for longer than a barrier takes."""
ITEM_BYTES = {F32: 4, I32: 4, F16: 2}
PER = {"tokens": Per.TOKEN, "rows": Per.ROW}

Field: TypeAlias = Tensor | Count | int | float | None
"""The value of an operand, count, size or real of an op."""

Rule: TypeAlias = "Callable[[Lowering, Node], None]"
"""Lowers a node of one opcode."""

NO_EXPERTS: Mapping[str, Field] = {"used": 0, "max_chunks": 0}
"""The routing fields of a product by a single matrix."""


class Lowering:
    """Collects the ops of one graph for steps of ``bucket``, the largest tokens and rows.

    ``tier`` names the device in errors. Attention of at most ``split_tokens`` tokens divides the
    context into parts."""

    def __init__(
        self,
        graph: Graph,
        bucket: ShapeKey,
        parts: int,
        tier: str,
        split_tokens: int = SPLIT_TOKENS,
    ) -> None:
        self.graph = graph
        self.bucket = bucket
        self.parts = parts
        self.tier = tier
        self.split_tokens = split_tokens
        self.step = Step()
        self._quantized: dict[Tensor, tuple[Tensor, Tensor, Tensor]] = {}
        self.expert_groups: dict[tuple[Tensor, Count], tuple[Tensor, Tensor]] = {}
        """Chunks and order by router result and number of tokens, see ``rules_experts``."""
        for decl in graph.of_kind(BufferKind.SCRATCH):
            self.step.scratch[decl.name] = buffer_bytes(decl, bucket)

    @cached_property
    def read_buffers(self) -> frozenset[str]:
        """The buffers that some node reads, or the host."""
        read = {decl.name for decl in self.graph.of_kind(BufferKind.OUTPUT)}
        for node in self.graph.nodes:
            names = {operand.name for operand in TABLE[node.opcode].inputs}
            read |= {view.buffer for name, view in node.operands.items() if name in names}
        return frozenset(read)

    def tensor(self, view: View) -> Tensor:
        """The view as a tensor of binary32, binary16 or int32 elements."""
        decl = self.graph.buffers[view.buffer]
        width = self._size(decl.shape[-1]) if len(decl.shape) > 1 else 1
        start, stop = view.columns or (0, self._size(decl.shape[-1]))
        return Tensor(view.buffer, start, stop - start, width, ITEM_BYTES[decl.dtype])

    def tensors(self, node: Node) -> dict[str, Tensor]:
        """Every operand of the node, by the name in the opcode table."""
        return {name: self.tensor(view) for name, view in node.operands.items()}

    def stored(self, view: View) -> Tensor:
        """A matrix of any storage type as rows of bytes, as the model file stores it."""
        decl = self.graph.buffers[view.buffer]
        row_bytes = decl.dtype.row_bytes(self._size(decl.shape[-1]))
        return Tensor(view.buffer, 0, row_bytes, row_bytes, 1)

    def pages(self, view: View) -> Tensor:
        """KV pages of any storage type, as a tensor."""
        return self.tensor(view) if self.dtype(view) in ITEM_BYTES else self.stored(view)

    def new(self, name: str, rows: int, columns: int, item_bytes: int = 4) -> Tensor:
        """A new step-local tensor."""
        self.step.scratch[name] = rows * columns * item_bytes
        return Tensor(name, 0, columns, columns, item_bytes)

    def add(
        self,
        name: str,
        *shared: Mapping[str, Field],
        dtype: DType | None = None,
        private: bool = False,
        matrix: bool = True,
        **fields: Field,
    ) -> None:
        """Append op ``name``. ``shared`` and ``fields`` together give its operands, count, sizes
        and reals by the names of the table.

        ``matrix`` False: its weights are a vector. Optional operands may be absent. Raises
        ValueError naming the op and a field that is missing, unknown or of the wrong kind."""
        device = _device_op(name)
        for some in shared:
            fields |= some
        _refuse_unknown(device, fields)
        operands = tuple(_operand(device, operand, fields) for operand in device.operands)
        count, *sizes = (_field(device, size, fields) for size in device.sizes)
        reals = (_field(device, real, fields) for real in device.reals)
        if not isinstance(count, Count):
            raise ValueError(f"{name}: {device.sizes[0]} is {count!r}, not a count")
        self.step.ops.append(
            Op(
                device,
                operands,
                device.splits,
                count,
                tuple(_number(device, size) for size in sizes),
                tuple(_real(device, real) for real in reals),
                dtype,
                private,
                device.matrix if matrix else None,
            )
        )

    def lower(
        self,
        node: Node,
        name: str,
        *,
        dtype: DType | None = None,
        private: str = "",
        **fields: Field,
    ) -> None:
        """Append op ``name`` for ``node``. The node's operands, dimensions and parameters become
        the op's fields of the same names; ``fields`` replace or add some.

        The op is private if operand ``private`` has few elements."""
        device, sizes = _device_op(name), self._bound(node)
        for operand in device.operands:
            if operand.name in node.operands and operand.name not in fields:
                view = node.operands[operand.name]
                fields[operand.name] = self.stored(view) if operand.matrix else self.pages(view)
        if device.sizes[0] not in fields:
            fields[device.sizes[0]] = self.count(node, device.sizes[0])
        dims = {size: self._size(sizes[size]) for size in device.sizes[1:] if size in sizes}
        reals = {real: node.params[real] for real in device.reals if real in node.params}
        count, seen = fields[device.sizes[0]], fields.get(private)
        few = isinstance(count, Count) and isinstance(seen, Tensor) and cheap(count, seen.columns)
        self.add(name, {**dims, **reals, **fields}, dtype=dtype, private=few)

    def dtype(self, view: View) -> DType:
        """The storage type of the buffer of ``view``."""
        return self.graph.buffers[view.buffer].dtype

    def dims(self, node: Node) -> dict[str, int]:
        """Every dimension and integer parameter of ``node`` by name, for the largest step."""
        return {name: self._size(dim) for name, dim in self._bound(node).items()}

    def count(self, node: Node, name: str = "tokens") -> Count:
        """The count of the op of ``node``: its dimension ``name``."""
        dim = self._bound(node)[name]
        if isinstance(dim, str):
            return Count(1, PER[dim], self._size(dim))
        return Count(dim, Per.STEP, dim)

    def quantized(self, x: Tensor, tokens: Count) -> tuple[Tensor, Tensor, Tensor]:
        """Integers, scales and block sums of x (rule R5), computed once for all products of x."""
        if x not in self._quantized:
            name = f"{x.buffer}[{x.start}:{x.stop}]"
            segments = -(-x.columns // SEGMENT)
            padded = segments * SEGMENT
            rows = self.rounded(tokens.maximum)
            m = self.new(f"{name}.m", rows, padded, 2)
            scale = self.new(f"{name}.scale", rows, segments)
            sums = self.new(f"{name}.sums", rows, padded // 32)
            self._quantized[x] = m, scale, sums
            self.add(
                "quantize_activation",
                x=x,
                m=m,
                scale=scale,
                sums=sums,
                tokens=tokens,
                columns=x.columns,
                private=cheap(tokens, x.columns),
            )
        return self._quantized[x]

    @staticmethod
    def rounded(tokens: int) -> int:
        """Rows of memory for ``tokens`` tokens: kernels for many tokens store integers in groups of
        eight tokens."""
        return tokens if tokens <= SPLIT_TOKENS else -(-tokens // 8) * 8

    def product(
        self,
        x: Tensor,
        weight: View,
        y: Tensor,
        tokens: Count,
        routing: Mapping[str, Field] = NO_EXPERTS,
        row_pairs: int = 0,
    ) -> None:
        """y = x weight^T. With ``routing`` the matrices are experts; a row of y is a token and an
        expert, and ``row_pairs`` of them share one row of x."""
        dtype = self.dtype(weight)
        inputs: dict[str, Field] = {"x": x}
        if dtype.storage is not StorageClass.FLOAT:
            share = max(row_pairs, 1)
            rows = Count(tokens.multiplier // share, tokens.per, tokens.maximum // share)
            inputs = dict(zip(("x", "scale", "sums"), self.quantized(x, rows), strict=True))
        self.add(
            "matmul",
            inputs,
            routing,
            row_pairs=row_pairs,
            weight=self.stored(weight),
            y=y,
            tokens=tokens,
            rows=y.columns,
            columns=x.columns,
            dtype=dtype,
        )

    def elementwise(
        self, name: str, tokens: Count, tensors: Mapping[str, Tensor], **fields: Field
    ) -> None:
        """Add op ``name`` over the tensor y [tokens, width]."""
        width = tensors["y"].columns
        fields |= {"tokens": tokens, "width": width}
        self.add(name, tensors, fields, private=cheap(tokens, width))

    def rotate_heads(self, x: Tensor, node: Node, y: Tensor, back: bool = False) -> None:
        """y = x rotated by rule R13, or with ``back`` rotated back."""
        heads = x.columns // int(node.params["head_dim"])
        self.lower(node, "rotate_heads", x=x, y=y, heads=heads, back=int(back), private="x")

    def rotated(self, x: Tensor, node: Node, name: str) -> Tensor:
        """A new tensor: the heads of ``x``, rotated by rule R13."""
        y = self.new(f"{node.name}.{name}", self.count(node).maximum, x.columns)
        self.rotate_heads(x, node, y)
        return y

    def store_kv(self, k: Tensor, v: Tensor, node: Node) -> None:
        """Write k and v to their KV pages, rotated if the pages store rotated rows."""
        kv = node.operands["kv"]
        if self.dtype(kv) in ROTATED_KV:
            k, v = (self.rotated(x, node, f"rotated_{side}") for side, x in (("k", k), ("v", v)))
        sizes = {"width": k.columns, "page_tokens": PAGE_TOKENS}
        private = "k" if self.parts <= PAGE_WRITERS else ""
        dtype = self.dtype(kv)
        self.lower(node, "kv_write_batched", k=k, v=v, dtype=dtype, private=private, **sizes)

    def _bound(self, node: Node) -> Mapping[str, int | str]:
        shapes = {name: self.graph.shape(view) for name, view in node.operands.items()}
        return bind_shapes(TABLE[node.opcode], shapes, node.params)

    def _size(self, dim: int | str) -> int:
        return self.bucket.sizes()[dim] if isinstance(dim, str) else dim


def named(name: str, private: str = "") -> Rule:
    """The rule of an opcode that is a single op with the fields of the node, see
    ``Lowering.lower``."""
    return lambda low, node: low.lower(node, name, private=private)


def cheap(count: Count, columns: int) -> bool:
    """Whether an op is so small that every worker may compute it whole."""
    return count.maximum * columns <= PRIVATE_ELEMENTS


def _device_op(name: str) -> DeviceOp:
    try:
        return DEVICE_OPS[name]
    except KeyError:
        raise ValueError(f"{name}: the table of device ops has no such row") from None


def _refuse_unknown(device: DeviceOp, fields: Mapping[str, Field]) -> None:
    for name in fields:
        if name not in device.fields:
            raise ValueError(f"{device.name}: the table of device ops has no {name!r} for it")


def _field(device: DeviceOp, name: str, fields: Mapping[str, Field]) -> Field:
    try:
        return fields[name]
    except KeyError:
        raise ValueError(f"{device.name}: {name} is missing") from None


def _operand(
    device: DeviceOp, operand: DeviceOperand, fields: Mapping[str, Field]
) -> Tensor | None:
    value = fields.get(operand.name)
    if isinstance(value, Tensor) or (value is None and operand.optional):
        return value
    raise ValueError(f"{device.name}: operand {operand.name} is {value!r}, not a tensor")


def _number(device: DeviceOp, value: Field) -> int:
    if isinstance(value, int):
        return value
    raise ValueError(f"{device.name}: a size is {value!r}, not a whole number")


def _real(device: DeviceOp, value: Field) -> float:
    if isinstance(value, float):
        return value
    raise ValueError(f"{device.name}: a real is {value!r}, not a float")
