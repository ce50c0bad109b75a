"""Graph nodes that every family emits: inputs, weights, norms, products, embedding, output head.

Names follow the file: tensor ``blk.3.attn_q.weight`` is buffer ``model.attn_q.weight[3]``, and the
node that multiplies with it is ``attn_q[3]``."""

from __future__ import annotations

from collections.abc import Mapping

from contract.dtypes import F32, I32
from contract.ir.graph import BufferKind, GraphBuilder, View
from contract.ir.source import ONES, ZEROS, RowSlice, WeightSource
from contract.lazy_dataclass import dataclass
from contract.opcodes import Opcode
from reference.hidden_rows import HIDDEN_TABLE
from reference.limits import Limits
from reference.model.config import ModelConfig
from reference.model.config.rope import GROWTH_TABLE
from reference.model.families.low_rank import LowRank
from reference.model.families.smooth_keys import Channels
from reference.model.families.tensors import ModelTensors

SILU, GELU, SIGMOID, CLAMPED, RELU = 0, 1, 2, 3, 4
"""Values of the opcode parameter ``activation``."""


@dataclass(frozen=True, slots=True)
class Emitter:
    """Appends the nodes of one model to ``builder``; ``final_norm`` is the norm before the head."""

    builder: GraphBuilder
    config: ModelConfig
    tensors: ModelTensors
    limits: Limits
    final_norm: str = "output_norm"

    @property
    def query(self) -> View:
        """The step's query tokens, each (token, slot, position, flags)."""
        return self.builder.request("request.query", "tokens", 4)

    @property
    def resolved(self) -> View:
        """The query tokens with all token ids filled in."""
        return self.builder.scratch("scratch.query", "tokens", 4, dtype=I32)

    @property
    def page_table(self) -> View:
        """The page table: the KV page of every 16 positions of every slot."""
        limits = self.limits
        return self.builder.request("request.page_table", limits.slots, limits.slot_pages)

    def has(self, name: str, layer: int | None = None) -> bool:
        """Whether the file has tensor ``name`` (given with its suffix) for the layer."""
        return self.tensors.has(file_name(name, layer))

    def is_plain(self, name: str, layer: int | None = None) -> bool:
        """Whether the product with ``name`` is only its matrix, without bias, scale or adapter."""
        more = (self.has(f"{name}.{part}", layer) for part in ("bias", "scale"))
        return not any(more) and file_name(f"{name}.weight", layer) not in self.adapted

    @property
    def adapted(self) -> Mapping[str, tuple[int, int, int]]:
        """The tensors that adapters change, of a graph whose limits have adapters."""
        return self.tensors.adapters.shapes

    def weight(
        self,
        name: str,
        layer: int | None,
        *shape: int,
        tensor: str = "",
        rows: RowSlice | None = None,
    ) -> View:
        """The matrix ``name``; ``tensor`` and ``rows`` say where it is part of another tensor."""
        stored = file_name(f"{tensor or name}.weight", layer)
        logical = f"{self.tensors.owner}.{label(f'{name}.weight', layer)}"
        return self.tensors.weight(self.builder, logical, stored, *shape, rows=rows)

    def parameters(self, name: str, layer: int | None, *shape: int, powers: Channels = ()) -> View:
        """The F32 tensor ``name`` (given with its suffix), with columns times powers of two."""
        logical, stored = f"{self.tensors.owner}.{label(name, layer)}", file_name(name, layer)
        return self.tensors.parameters(self.builder, logical, stored, *shape, powers=powers)

    def vector(
        self, name: str, layer: int, *shape: int, stored: str = "", rows: RowSlice | None = None
    ) -> View:
        """An F32 matrix of the file, or ``rows`` of it, as a vector of its elements; ``stored``
        is the name of a tensor of which it is a part."""
        logical = f"{self.tensors.owner}.{label(name, layer)}"
        file = file_name(stored or name, layer)
        return self.tensors.vector(self.builder, logical, file, *shape, rows=rows)

    def powers(self, layer: int) -> tuple[Channels, Channels]:
        """The powers of two of the layer's queries and of its keys, empty if it has no outliers."""
        found = self.tensors.powers.get(layer)
        return ((), ()) if found is None else (found.queries, found.keys)

    def scale_powers(
        self, x: View, name: str, layer: int, powers: Channels, y: View | None
    ) -> View:
        """Emit x with each column times a power of two."""
        source = str(WeightSource(ONES, powers=powers))
        logical = f"{self.tensors.owner}.{label(name, layer)}"
        factors = self.builder.buffer(
            logical, BufferKind.WEIGHT, F32, (len(powers),), source=source
        )
        return self.builder.emit(
            Opcode.SCALE_COLUMNS, label(name, layer), x=x, factors=factors, y=y
        )

    def norm_weight(self, name: str, layer: int | None = None) -> View | None:
        """The weight of a norm over the residual width, which Falcon-H1 stores without a suffix;
        None in families whose norms have none."""
        if self.config.bare_norms:
            return None
        stored = name if self.has(name, layer) else f"{name}.weight"
        return self.parameters(stored, layer, self.config.hidden)

    def norm(self, x: View, name: str, layer: int | None = None, y: View | None = None) -> View:
        """RMS norm over the residual width, plus its bias if the file has one."""
        bias = f"{name}.bias"
        has_bias = self.has(bias, layer)
        normed = self.builder.emit(
            Opcode.RMS_NORM,
            label(name, layer),
            x=x,
            weight=self.norm_weight(name, layer),
            eps=self.config.rms_eps,
            y=None if has_bias else y,
        )
        if not has_bias:
            return normed
        added = self.parameters(bias, layer, self.config.hidden)
        return self.builder.emit(
            Opcode.BIAS_ADD, label(f"{name}_bias", layer), x=normed, bias=added, y=y
        )

    def layer_norm(self, x: View, name: str, layer: int) -> View:
        """The norm of x without its mean."""
        return self.norm(self.centred(x, name, layer), name, layer)

    def ones(self, kind: str, *shape: int, source: str = ONES) -> View:
        """A weight of ones, one of each ``kind`` in a graph; or of zeros."""
        name = f"model.{'zeros' if source == ZEROS else 'ones'}_{kind}"
        return self.builder.buffer(name, BufferKind.WEIGHT, F32, shape, source=source)

    def centred(self, x: View, name: str, layer: int | None = None) -> View:
        """Emit x minus the mean of its row: with an RMS norm behind it, a layer norm.

        The sum of a row and its copy to all columns are products with ones."""
        hidden = self.config.hidden
        row, column = self.ones("row", 1, hidden), self.ones("column", hidden, 1)
        emit = self.builder.emit
        total = emit(Opcode.MATMUL, label(f"{name}_sum", layer), x=x, weight=row)
        factor = -1.0 / hidden
        mean = emit(Opcode.SCALE, label(f"{name}_mean", layer), x=total, factor=factor)
        means = emit(Opcode.MATMUL, label(f"{name}_means", layer), x=mean, weight=column)
        return self.add(f"{name}_centred", layer, x, means)

    def add(self, name: str, layer: int | None, x: View, y: View, to: View | None = None) -> View:
        """x + y, written to ``to`` if given."""
        return self.builder.emit(Opcode.ADD, label(name, layer), a=x, b=y, y=to)

    def add_scaled(self, name: str, layer: int, x: View, y: View) -> View:
        """x + y, y times the factor of the model's residuals if it has one."""
        if self.config.residual_scale != 1.0:
            factor = self.config.residual_scale
            y = self.builder.emit(Opcode.SCALE, label(f"{name}_scale", layer), x=y, factor=factor)
        return self.add(name, layer, x, y)

    def add_and_norm(self, x: View, y: View, layer: int, norm: str) -> tuple[View, View]:
        """Emit x + y and its RMS norm."""
        h = self.builder.scratch(f"scratch.{label(norm, layer)}", "tokens", self.config.hidden)
        total = self.builder.emit(
            Opcode.RESIDUAL_RMS_NORM,
            label(norm, layer),
            x=y,
            residual=x,
            norm_weight=self.norm_weight(norm, layer),
            eps=self.config.rms_eps,
            y=h,
        )
        return total, h

    def linear(
        self,
        x: View,
        name: str,
        layer: int | None,
        outputs: int,
        inner: int,
        *,
        y: View | None = None,
        tensor: str = "",
        rows: RowSlice | None = None,
    ) -> View:
        """Emit x W^T plus what adapters add to it, times the scale and plus the bias if the file
        has them for this matrix."""
        weight = self.weight(name, layer, outputs, inner, tensor=tensor, rows=rows)
        has_scale, has_bias = (self.has(f"{name}.{part}", layer) for part in ("scale", "bias"))
        stored = file_name(f"{tensor or name}.weight", layer)
        adapted, linear_y = stored in self.adapted, None if has_scale or has_bias else y
        alone = f"scratch.{label(f'{name}.alone', layer)}"
        product_y = self.builder.scratch(alone, "tokens", outputs) if adapted else linear_y
        product = self.builder.emit(
            Opcode.MATMUL, label(name, layer), x=x, weight=weight, y=product_y
        )
        if adapted:
            low_rank = LowRank(name, label("", layer), stored, rows, self.limits.adapters)
            product = low_rank.add(self.builder, self.tensors, x, product, linear_y)
        if has_scale:
            product = self.builder.emit(
                Opcode.SCALE_COLUMNS,
                label(f"{name}_scale", layer),
                x=product,
                factors=self.parameters(f"{name}.scale", layer, 1),
                y=None if has_bias else y,
            )
        if has_bias:
            bias = self.parameters(f"{name}.bias", layer, outputs)
            product = self.builder.emit(
                Opcode.BIAS_ADD, label(f"{name}_bias", layer), x=product, bias=bias, y=y
            )
        return product

    def rope_table(self, layer: int) -> View:
        """The table of the layer's rotation: cosines and sines, [context, 2, pairs]."""
        rope = self.config.ropes[layer]
        for name in rope.factor_tensors:
            self.tensors.take(name, rope.dims // 2)
        shape = (self.limits.context, 2, rope.dims // 2)
        return self.builder.buffer(rope.table, BufferKind.CONSTANT, F32, shape)

    def rope(
        self, x: View, name: str, layer: int, heads: int, size: int, y: View | None = None
    ) -> View:
        """Emit the layer's rotation of ``heads`` heads of ``size`` channels."""
        return self.builder.emit(
            Opcode.ROPE,
            label(name, layer),
            x=x,
            rope_table=self.rope_table(layer),
            query=self.query,
            heads=heads,
            head_dim=size,
            neox=int(self.config.ropes[layer].neox),
            y=y,
        )

    def head_norm(self, x: View, side: str, layer: int, heads: int, powers: Channels) -> View:
        """Emit the norm of each head of the queries or keys, ``side`` "q" or "k"."""
        size = self.config.head_dims[layer]
        return self.builder.emit(
            Opcode.RMS_NORM,
            label(f"{side}_norm", layer),
            x=x,
            weight=self.parameters(f"attn_{side}_norm.weight", layer, size, powers=powers),
            eps=self.config.rms_eps,
            groups=heads,
        )

    @property
    def growth_table(self) -> View:
        """The factors of queries by position, as a rotation of one pair."""
        shape = (self.limits.context, 2, 1)
        return self.builder.buffer(GROWTH_TABLE, BufferKind.CONSTANT, F32, shape)

    def state(self, name: str, *shape: int) -> View:
        """The latest recurrent states of every slot, of this shape each."""
        rows = self.limits.slots * self.limits.slot_states
        return self.builder.buffer(name, BufferKind.STATE, F32, (rows, *shape))

    @property
    def output_rows(self) -> View:
        """The indices of the query tokens whose logits are computed."""
        return self.builder.request("request.output_rows", "rows")

    @property
    def hidden_table(self) -> View:
        """The table of hidden states, which outlive a step."""
        head = self.tensors.head
        width = self.config.hidden if head is None else head.hidden
        shape = (self.limits.hidden_table, width)
        return self.builder.buffer(HIDDEN_TABLE, BufferKind.STATE, F32, shape)


def label(name: str, layer: int | None) -> str:
    """The name of a node or buffer; names of a layer contain its number."""
    return name if layer is None else f"{name}[{layer}]"


def file_name(name: str, layer: int | None) -> str:
    """The name of a tensor in the file."""
    return name if layer is None else f"blk.{layer}.{name}"
