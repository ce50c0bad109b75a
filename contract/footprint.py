"""The memory a graph needs: as declared, and as a tier allocates it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from contract.ir.nodes import BufferDecl, BufferKind, Graph
from contract.ir.scratch import buffer_bytes, plan_scratch
from contract.ir.source import MADE, parse_source
from contract.lazy_dataclass import dataclass
from contract.shape_key import ShapeKey


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes a graph needs if its largest step is a given ShapeKey.

    - ``buffers``: allocated buffers by name, of which ``on_disk`` bytes are mapped from files of
      the tier.
    - ``mapped``: buffers read in place from the mapped model file.
    - ``scratch``: shared by all steps. ``variants``: held by the lowered batches of all shape
      buckets. ``workspace``: the most that a step allocates and frees again.
    - ``staging``: host memory for copies to a device that has its own memory.
    - ``streamed``: host memory of weights that every step copies to the ``ring`` on the device; a
      step of one token copies only ``moved`` bytes of them."""

    buffers: Mapping[str, int]
    mapped: Mapping[str, int] = field(default_factory=dict)
    scratch: int = 0
    variants: int = 0
    workspace: int = 0
    staging: int = 0
    ring: int = 0
    streamed: int = 0
    moved: int = 0
    on_disk: int = 0


def declared_footprint(graph: Graph, largest: ShapeKey) -> Footprint:
    """The least any tier needs: every buffer as declared, with weights read from the mapped
    file."""

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
    """True when an upload of ``decl`` needs memory of its own: it is not a plain tensor of the
    mapped model file, but a constant, a slice of rows, scaled columns, ones or zeros."""
    if decl.kind is not BufferKind.WEIGHT:
        return True
    if not decl.source:
        return False
    source = parse_source(decl.source)
    return source.tensor in MADE or source.rows is not None or bool(source.powers)
