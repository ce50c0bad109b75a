"""What a model's graph keeps for an EAGLE-3 head: the inputs of some layers, joined by the head's
product to a row for each token."""

from __future__ import annotations

from contract.ir.graph import GraphBuilder, View
from contract.opcodes import Opcode
from reference.model.eagle import STORED, EagleHead
from reference.model.families.tensors import ModelTensors

JOIN, JOIN_NORM = "fc.weight", "enc.output_norm.weight"


def keep_input(
    builder: GraphBuilder, head: EagleHead | None, x: View, layer: int, width: int
) -> None:
    """Emit the copy of the input of ``layer``, [tokens, width], for each part of what the head
    joins that it is."""
    for part, wanted in enumerate(() if head is None else head.layers):
        if wanted == layer:
            y = _kept(builder, head, width)[part * width : (part + 1) * width]
            builder.emit(Opcode.SCALE, f"kept_input[{part}]", x=x, factor=1.0, y=y)


def joined_inputs(builder: GraphBuilder, head: EagleHead | None, width: int) -> View | None:
    """Emit the head's product of the kept inputs, [tokens, head.hidden]; None without a head."""
    if head is None:
        return None
    x, inner, tensors = _kept(builder, head, width), len(head.layers) * width, head_tensors(head)
    if head.fc_norm:
        weight = tensors.parameters(builder, "model.kept_norm.weight", JOIN_NORM, inner)
        eps = head.config.rms_eps
        x = builder.emit(Opcode.RMS_NORM, "kept_norm", x=x, weight=weight, eps=eps)
    weight = tensors.weight(builder, "model.kept_join.weight", JOIN, head.hidden, inner)
    return builder.emit(Opcode.MATMUL, "kept_join", x=x, weight=weight)


def _kept(builder: GraphBuilder, head: EagleHead | None, width: int) -> View:
    assert head is not None
    return builder.scratch("scratch.kept_inputs", "tokens", len(head.layers) * width)


def head_tensors(head: EagleHead) -> ModelTensors:
    """The tensors of a head, none of them used yet."""
    return ModelTensors(str(head.file.path), head.file.tensors, prefix=STORED)
