"""The products of LoRA adapters: each token's own, chosen like the experts of a mixture."""

from __future__ import annotations

from contract.dtypes import F32
from contract.ir.graph import BufferKind, GraphBuilder, View
from contract.ir.source import RowSlice, WeightSource
from contract.ir.unread_outputs import ADAPTER_IDS
from contract.lazy_dataclass import dataclass
from contract.opcodes import Opcode
from reference.adapter_inputs import ADAPTER_SCALES
from reference.model.adapters import FACTOR, STACKED, A, B
from reference.model.families.tensors import ModelTensors


@dataclass(frozen=True, slots=True)
class LowRank:
    """The sum that adapters add to the projection ``name`` with the matrix ``tensor`` of the file,
    or with ``rows`` of it. ``layer`` ends the names of nodes and buffers, and each token combines
    ``combined`` adapters."""

    name: str
    layer: str
    tensor: str
    rows: RowSlice | None
    combined: int

    def add(
        self, builder: GraphBuilder, tensors: ModelTensors, x: View, product: View, y: View | None
    ) -> View:
        """Emit ``product`` + s (r (B (A x))) for each adapter of a token, one after the other."""
        tensors.adapted.add(self.tensor)
        adapters = tensors.adapters
        (outputs, rank, inner), entries = adapters.shapes[self.tensor], adapters.entries
        if self.rows is not None:
            outputs = outputs // self.rows.group * len(self.rows.selected())

        def stacked(part: str, *shape: int, rows: RowSlice | None = None) -> View:
            source = str(WeightSource(f"{STACKED}{self.tensor}{part}", rows))
            name = f"model.{self.name}{part}{self.layer}"
            return builder.buffer(name, BufferKind.WEIGHT, F32, (entries, *shape), source=source)

        shape = "tokens", self.combined
        chosen = {
            "ids": builder.request(ADAPTER_IDS, *shape),
            "weights": builder.buffer(ADAPTER_SCALES, BufferKind.REQUEST, F32, shape),
        }
        a = stacked(A, rank, inner)
        h = builder.emit(
            Opcode.MOE_GATE_UP,
            f"{self.name}{A}{self.layer}",
            x=x,
            gate_weight=a,
            up_weight=a,
            ids=chosen["ids"],
        )
        return builder.emit(
            Opcode.MOE_DOWN_ACC,
            f"{self.name}{B}{self.layer}",
            x=h,
            down_weight=stacked(B, outputs, rank, rows=self.rows),
            expert_scale=stacked(FACTOR),
            residual=product,
            y=y,
            **chosen,
        )
