"""What a graph takes of memory: as declared, and as a tier holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from contract.ir.nodes import BufferDecl, BufferKind, Graph
from contract.ir.scratch import buffer_bytes, plan_scratch
from contract.ir.source import parse_source
from contract.lazy_dataclass import dataclass
from contract.shape_key import ShapeKey


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a graph whose largest step is one ShapeKey.

    ``buffers`` are allocated, by name of the buffer; ``mapped`` are read in place where the model
    file is mapped. ``scratch`` is shared by all steps, ``variants`` is what the lowered forms keep.
    ``workspace`` is what a step takes and gives back at most. ``staging`` is host memory beside
    the memory of a device that does not share the host's.
    """

    buffers: Mapping[str, int]
    mapped: Mapping[str, int] = field(default_factory=dict)
    scratch: int = 0
    variants: int = 0
    workspace: int = 0
    staging: int = 0


def declared_footprint(graph: Graph, largest: ShapeKey) -> Footprint:
    """Every buffer as declared, weights in place: what no tier can do without."""

    def declared(*kinds: BufferKind) -> dict[str, int]:
        return {decl.name: buffer_bytes(decl, largest) for decl in graph.of_kind(*kinds)}

    return Footprint(
        buffers=declared(
            BufferKind.CONSTANT, BufferKind.STATE, BufferKind.REQUEST, BufferKind.OUTPUT
        ),
        mapped=declared(BufferKind.WEIGHT),
        scratch=plan_scratch(graph, largest).nbytes,
    )


def owns_upload(decl: BufferDecl) -> bool:
    """False for a view of the model file; slices of its rows and scaled columns are copies."""
    if decl.kind is not BufferKind.WEIGHT:
        return True
    if not decl.source:
        return False
    source = parse_source(decl.source)
    return source.rows is not None or bool(source.powers)
