"""Building a step op by op: what a graph's views become, and the ops that opcodes share."""

from __future__ import annotations

from collections.abc import Sequence

from accel.packets.step import Op, Split, Step, Tensor
from contract.arithmetic import PAGE_TOKENS, SEGMENT
from contract.dtypes import F16, F32, I32, DType, StorageClass
from contract.ir.nodes import BufferKind, Graph, Node, View
from contract.ir.scratch import buffer_bytes
from contract.ops import TABLE
from contract.shape_key import ShapeKey
from contract.spec import bind_shapes

ROWS, COLUMNS, ANY = Split.ROWS, Split.COLUMNS, Split.ANY

PRIVATE_ELEMENTS = 8192
"""An op over at most this many elements costs less than the barrier it saves."""
ITEM_BYTES = {F32: 4, I32: 4, F16: 2}


class Lowering:
    """Collects the ops of one graph for one ShapeKey; ``tier`` names the device in errors."""

    def __init__(self, graph: Graph, key: ShapeKey, parts: int, tier: str) -> None:
        self.graph = graph
        self.key = key
        self.parts = parts
        self.tier = tier
        self.step = Step()
        self._quantized: dict[Tensor, tuple[Tensor, Tensor, Tensor]] = {}
        self.expert_groups: dict[Tensor, tuple[Tensor, Tensor]] = {}
        """Of each routing its chunks and order, see ``rules_experts``."""
        for decl in graph.of_kind(BufferKind.SCRATCH):
            self.step.scratch[decl.name] = buffer_bytes(decl, key)

    def tensor(self, view: View) -> Tensor:
        """The view as a tensor of binary32, binary16 or int32 elements."""
        decl = self.graph.buffers[view.buffer]
        width = self._size(decl.shape[-1]) if len(decl.shape) > 1 else 1
        start, stop = view.columns or (0, self._size(decl.shape[-1]))
        return Tensor(view.buffer, start, stop - start, width, ITEM_BYTES[decl.dtype])

    def stored(self, view: View) -> Tensor:
        """A matrix of any storage type, rows of bytes as the model file holds them."""
        decl = self.graph.buffers[view.buffer]
        row_bytes = decl.dtype.row_bytes(self._size(decl.shape[-1]))
        return Tensor(view.buffer, 0, row_bytes, row_bytes, 1)

    def pages(self, view: View) -> Tensor:
        """KV pages of any storage type."""
        return self.tensor(view) if self.dtype(view) in ITEM_BYTES else self.stored(view)

    def new(self, name: str, rows: int, columns: int, item_bytes: int = 4) -> Tensor:
        """A step-local tensor that no buffer of the graph holds."""
        self.step.scratch[name] = rows * columns * item_bytes
        return Tensor(name, 0, columns, columns, item_bytes)

    def add(self, op: Op) -> None:
        """Append ``op``."""
        self.step.ops.append(op)

    def dtype(self, view: View) -> DType:
        """Storage type of the buffer behind ``view``."""
        return self.graph.buffers[view.buffer].dtype

    def dims(self, node: Node) -> dict[str, int]:
        """Every dimension and integer parameter of ``node`` by name."""
        shapes = {name: self.graph.shape(view) for name, view in node.operands.items()}
        bound = bind_shapes(TABLE[node.opcode], shapes, node.params)
        return {name: self._size(dim) for name, dim in bound.items()}

    def quantized(self, x: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """x by rule R5: integers, scales and block sums, made once for all products of ``x``."""
        if x not in self._quantized:
            name = f"{x.buffer}[{x.start}:{x.stop}]"
            segments = -(-x.columns // SEGMENT)
            padded = segments * SEGMENT
            parts = (
                self.new(f"{name}.m", tokens, padded, 2),
                self.new(f"{name}.scale", tokens, segments),
                self.new(f"{name}.sums", tokens, padded // 32),
            )
            self._quantized[x] = parts
            self.add(
                Op(
                    "quantize_activation",
                    (x, *parts),
                    (ROWS,) * 4,
                    (1, 2, 3),
                    (tokens, x.columns),
                    private=cheap(tokens, x.columns),
                )
            )
        return self._quantized[x]

    def product(self, x: Tensor, weight: View, y: Tensor, tokens: int) -> None:
        """y = x weight^T."""
        dtype = self.dtype(weight)
        inputs: tuple[Tensor | None, ...] = (x, None, None)
        if dtype.storage is not StorageClass.FLOAT:
            inputs = self.quantized(x, tokens)
        self.add(
            Op(
                "matmul",
                (*inputs, self.stored(weight), y),
                (ANY, ANY, ANY, ANY, COLUMNS),
                (4,),
                (tokens, y.columns, x.columns),
                dtype=dtype,
                matrix=3,
            )
        )

    def norm(
        self, x: Tensor, weight: Tensor | None, y: Tensor, tokens: int, groups: int, eps: float
    ) -> None:
        """y = rms_norm(x) weight in each of ``groups``."""
        self.add(
            Op(
                "rms_norm",
                (x, weight, y),
                (ROWS, ANY, ROWS),
                (2,),
                (tokens, groups, x.columns // groups),
                (eps,),
                private=cheap(tokens, x.columns),
            )
        )

    def elementwise(
        self,
        name: str,
        operands: Sequence[Tensor],
        tokens: int,
        sizes: tuple[int, ...] = (),
        reals: tuple[float, ...] = (),
    ) -> None:
        """The last operand is the result."""
        y = operands[-1]
        self.add(
            Op(
                name,
                tuple(operands),
                (ROWS,) * len(operands),
                (len(operands) - 1,),
                (tokens, y.columns, *sizes),
                reals,
                by_columns=True,
                private=cheap(tokens, y.columns),
            )
        )

    def rotate(self, x: Tensor, node: Node, heads: int, tokens: int, pairs: int, y: Tensor) -> None:
        """y = rope(x) of ``heads`` heads."""
        self.add(
            Op(
                "rope",
                (
                    x,
                    self.tensor(node.operands["rope_table"]),
                    self.tensor(node.operands["query"]),
                    y,
                ),
                (ROWS, ANY, ANY, ROWS),
                (3,),
                (tokens, heads, int(node.params["head_dim"]), int(node.params["neox"]), pairs),
                private=cheap(tokens, x.columns),
            )
        )

    def store_kv(self, k: Tensor, v: Tensor, node: Node, tokens: int) -> None:
        """Put k and v into their pages."""
        kv = node.operands["kv"]
        self.add(
            Op(
                "kv_write_batched",
                (
                    k,
                    v,
                    self.tensor(node.operands["query"]),
                    self.tensor(node.operands["page_table"]),
                    self.pages(kv),
                ),
                (ROWS, ROWS, ANY, ANY, ANY),
                (4,),
                (tokens, k.columns, PAGE_TOKENS, int(node.params["head_dim"])),
                dtype=self.dtype(kv),
                private=cheap(tokens, k.columns),
            )
        )

    def _size(self, dim: int | str) -> int:
        return self.key.sizes()[dim] if isinstance(dim, str) else dim


def cheap(tokens: int, columns: int) -> bool:
    """Whether an op is small enough for every worker to compute it for itself."""
    return tokens * columns <= PRIVATE_ELEMENTS
