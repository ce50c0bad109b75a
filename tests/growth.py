"""What steps share is to grow, and there is no memory for it."""

from typing import Any

import numpy as np
import pytest

from contract.dtypes import F32
from contract.errors import OutOfMemory
from contract.ir.graph import BufferDecl, BufferKind, Graph, GraphBuilder
from contract.ir.inputs import input_layout, pack_inputs
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from contract.tier import Tier

WIDTH = 40
SMALL, LARGE = ShapeKey(2, 0), ShapeKey(4096, 0)
STATE = BufferDecl("state", BufferKind.STATE, F32, (LARGE.tokens, WIDTH))


def refused_growth(tier: Tier, memory: Any, what: str, patch: pytest.MonkeyPatch) -> None:
    """A batch goes on after a larger one had no memory for ``what``, and writes nothing into memory
    that others were given since. ``memory`` allocates for ``tier``."""
    graph = tripling()
    small = input_layout(graph, SMALL)
    y = tier.alloc(graph.buffers["y"], LARGE.tokens * WIDTH * 4)
    batch = tier.lower(graph, {"y": y}, SMALL, small)
    allocate = type(memory).allocate

    def refusing(self: Any, name: str, nbytes: int, *rest: Any, **options: Any) -> Any:
        if name == what:
            raise OutOfMemory(name, nbytes, 0, 0)
        return allocate(self, name, nbytes, *rest, **options)

    with patch.context() as patched:
        patched.setattr(type(memory), "allocate", refusing)
        with pytest.raises(OutOfMemory, match=what):
            tier.lower(graph, {"y": y}, LARGE, input_layout(graph, LARGE))
    others = [tier.alloc(STATE, nbytes) for nbytes in (256, 1 << 12, 1 << 16)]
    for other in others:
        tier.write(other, 0, np.full(other.nbytes, 7, np.uint8))
    values = np.arange(SMALL.tokens * WIDTH, dtype=np.float32).reshape(SMALL.tokens, WIDTH)
    inputs = pack_inputs(small, SMALL, {"x": values})
    fence = tier.submit(batch, inputs, ["y"])
    tier.wait(fence)
    assert np.array_equal(fence.outputs["y"].view(np.float32).reshape(-1, WIDTH), 3 * values)
    for other in others:
        assert (tier.read(other, 0, other.nbytes) == 7).all()


def tripling() -> Graph:
    """y = (x + x) + x, the first sum in scratch memory."""
    builder = GraphBuilder("tripling")
    x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", WIDTH))
    total = builder.emit(Opcode.ADD, a=x, b=x)
    builder.emit(Opcode.ADD, a=total, b=x, y=builder.output("y", "tokens", WIDTH))
    return builder.build()
