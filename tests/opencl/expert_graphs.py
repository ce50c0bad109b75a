"""Feed-forward layers of a mixture of experts, as graphs."""

from __future__ import annotations

from collections.abc import Callable

from contract.dtypes import F32, I32, Q4_K, Q6_K, Q8_0, DType
from contract.ir.graph import BufferKind, Graph, GraphBuilder, View
from contract.opcodes import Opcode


def expert_layers(
    layers: int,
    *,
    hidden: int = 256,
    experts: int = 8,
    used: int = 3,
    width: int = 256,
    shared: bool = False,
) -> Graph:
    """x f32[tokens, hidden] -> y: ``layers`` of norm, routing, experts and residual."""
    builder = GraphBuilder("expert layers")
    x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", hidden))
    for layer in range(layers):

        def of_layer(name: str, dtype: DType, *shape: int, layer: int = layer) -> View:
            full = f"{layer}.{name}"
            return builder.buffer(full, BufferKind.WEIGHT, dtype, shape, full)

        def between(name: str, dtype: DType, *shape: int, layer: int = layer) -> View:
            decl = ("tokens", *shape)
            return builder.buffer(f"{layer}.{name}", BufferKind.SCRATCH, dtype, decl)

        last = layer == layers - 1
        h = builder.emit(Opcode.RMS_NORM, x=x, weight=of_layer("norm", F32, hidden), eps=1e-5)
        ids, weights = between("ids", I32, used), between("weights", F32, used)
        builder.emit(
            Opcode.MOE_GATE_TOPK,
            x=h,
            gate_weight=of_layer("router", F32, experts, hidden),
            ids=ids,
            weights=weights,
            used=used,
        )
        up = between("up.y", F32, used, width)
        gate = builder.emit(
            Opcode.MOE_GATE_UP,
            x=h,
            gate_weight=of_layer("gate", Q4_K, experts, width, hidden),
            up_weight=of_layer("up", Q4_K, experts, width, hidden),
            ids=ids,
            up=up,
        )
        output = builder.output("y", "tokens", hidden) if last else None
        x = builder.emit(
            Opcode.MOE_DOWN_ACC,
            x=builder.emit(Opcode.MOE_SWIGLU, gate=gate, up=up),
            down_weight=of_layer("down", Q6_K, experts, hidden, width),
            ids=ids,
            weights=weights,
            residual=x,
            y=None if shared else output,
        )
        if shared:
            matrices = shared_matrices(of_layer, hidden, width)
            x = builder.emit(Opcode.SHARED_EXPERT, x=h, residual=x, y=output, **matrices)
    return builder.build()


def shared_matrices(weight: Callable[..., View], hidden: int, width: int) -> dict[str, View]:
    """Those of the expert that every token has."""
    shapes = {
        "gate": (Q8_0, width, hidden),
        "up": (Q8_0, width, hidden),
        "down": (Q8_0, hidden, width),
        "router": (F32, hidden),
    }
    return {f"{name}_weight": weight(f"shared.{name}", *of) for name, of in shapes.items()}
