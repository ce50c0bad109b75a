"""A step's inputs as one block of bytes: its STEP record, then every REQUEST buffer.

One block is one copy: what a tier takes a snapshot of, whatever the graph asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.ir.nodes import BufferKind, Graph
from contract.ir.scratch import ALIGNMENT, buffer_bytes
from contract.records import STEP
from contract.shape_key import ShapeKey

STEP_BUFFER = "request.step"
"""The REQUEST buffer, [1, 4], by which a node reads the STEP record itself."""


@dataclass(frozen=True, slots=True)
class InputLayout:
    """Where every REQUEST buffer lies in a block of ``nbytes``: byte offsets by buffer name.

    The STEP record is at offset 0.
    """

    offsets: Mapping[str, int]
    nbytes: int


def input_layout(graph: Graph, largest: ShapeKey) -> InputLayout:
    """The block for steps of ``graph`` up to ``largest``, the same for all of them."""
    offsets = {}
    end = _aligned(STEP.itemsize)
    for decl in graph.of_kind(BufferKind.REQUEST):
        if decl.name == STEP_BUFFER:
            offsets[decl.name] = 0
            continue
        offsets[decl.name] = end
        end += _aligned(buffer_bytes(decl, largest))
    return InputLayout(MappingProxyType(offsets), end)


def pack_inputs(
    layout: InputLayout, step: ShapeKey, arrays: Mapping[str, NDArray[Any]], first_event: int = 0
) -> NDArray[np.uint8]:
    """A new block: the STEP record of ``step`` and the bytes of ``arrays`` by buffer name.

    Raises KeyError for a buffer the layout does not have.
    """
    block = np.zeros(layout.nbytes, np.uint8)
    for name, array in arrays.items():
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start = layout.offsets[name]
        block[start : start + data.nbytes] = data
    block[: STEP.itemsize].view(STEP)[0] = (step.tokens, step.rows, first_event, 0)
    return block


def step_of(block: NDArray[np.uint8]) -> ShapeKey:
    """The counts in a block's STEP record."""
    record = block[: STEP.itemsize].view(STEP)[0]
    return ShapeKey(int(record["tokens"]), int(record["rows"]))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
