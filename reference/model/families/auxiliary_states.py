"""The auxiliary states that a model's graph computes for a head: the inputs of some layers, fused
by the head's product to a row for each token."""

from __future__ import annotations

from contract.ir.graph import GraphBuilder, View
from contract.opcodes import Opcode
from reference.model.draft_head import STORED, DraftHead
from reference.model.eagle import EagleHead
from reference.model.families.tensors import ModelTensors

FUSE, FUSE_NORM = "fc.weight", "enc.output_norm.weight"


def copy_auxiliary_state(
    builder: GraphBuilder, head: DraftHead, x: View, layer: int, width: int
) -> None:
    """Emit the copy of the input of ``layer``, [tokens, width], for each part of what the head
    fuses that it is."""
    for part, head_layer in enumerate(head.layers):
        if head_layer == layer:
            y = _auxiliary_states(builder, head, width)[part * width : (part + 1) * width]
            builder.emit(Opcode.SCALE, f"auxiliary_state[{part}]", x=x, factor=1.0, y=y)


def fuse_auxiliary_states(builder: GraphBuilder, head: DraftHead, width: int) -> View:
    """Emit the head's product of the copied inputs, [tokens, head.hidden]."""
    x, inner = _auxiliary_states(builder, head, width), len(head.layers) * width
    tensors = head_tensors(head)
    if isinstance(head, EagleHead) and head.fc_norm:
        weight = tensors.parameters(builder, "model.auxiliary_norm.weight", FUSE_NORM, inner)
        eps = head.config.rms_eps
        x = builder.emit(Opcode.RMS_NORM, "auxiliary_norm", x=x, weight=weight, eps=eps)
    weight = tensors.weight(builder, "model.auxiliary_fuse.weight", FUSE, head.hidden, inner)
    return builder.emit(Opcode.MATMUL, "auxiliary_fuse", x=x, weight=weight)


def _auxiliary_states(builder: GraphBuilder, head: DraftHead, width: int) -> View:
    return builder.scratch("scratch.auxiliary_states", "tokens", len(head.layers) * width)


def head_tensors(head: DraftHead) -> ModelTensors:
    """The tensors of a head, none of them used yet."""
    return ModelTensors(str(head.file.path), head.file.tensors, prefix=STORED)
