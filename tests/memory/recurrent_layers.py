"""Two small recurrent layers as a graph, run on a tier like a model: tokens in, a row a token out.

What a token brings is a function of its id, so a sequence is a list of ids."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.dtypes import F32
from contract.execution import STEP_LOCAL, ExecutableGraph
from contract.ir.graph import BufferKind, Graph, GraphBuilder, View
from contract.ir.inputs import pack_inputs
from contract.ir.scratch import buffer_bytes
from contract.opcodes import Opcode
from contract.records import QUERY_TOKEN
from contract.shape_key import ShapeKey
from contract.tier import Buffer, Tier
from reference.cpu.tier import CpuTier
from reference.memory.recurrent import RecurrentMemory

KEYS, VALUES, SIZE, HISTORY = 2, 4, 24, 3
CHANNELS, WIDTH = SIZE * (2 * KEYS + VALUES), SIZE * VALUES
VOCABULARY = 8
MAX_TOKENS = 64
STATE_SLOTS = 2

Token = tuple[int, int, int]
"""Token id, slot, position."""


def graph(slots: int, layers: int = 2, states: int = 1) -> Graph:
    """Convolution, recurrence and gated norm; every layer reads the tokens and adds to the sum.
    Each slot has its latest ``states``."""
    rows = slots * states
    b = GraphBuilder("recurrent layers")

    def activation(name: str, width: int) -> View:
        return b.buffer(name, BufferKind.REQUEST, F32, ("tokens", width))

    def weight(name: str, *shape: int) -> View:
        return b.buffer(name, BufferKind.WEIGHT, F32, shape, name)

    query = b.request("request.query", "tokens", 4)
    x, gate = activation("x", CHANNELS), activation("gate", WIDTH)
    alpha, beta = activation("alpha", VALUES), activation("beta", VALUES)
    total = gate
    for layer in range(layers):
        name = f"blk.{layer}"
        mixed = b.emit(
            Opcode.SSM_CONV1D, x=x, weight=weight(f"{name}.taps", CHANNELS, HISTORY + 1),
            query=query,
            state=b.buffer(f"{name}.conv", BufferKind.STATE, F32, (rows, HISTORY, CHANNELS)),
            history=HISTORY, states=states,
        )  # fmt: skip
        read = b.emit(
            Opcode.SSM_DELTA_NET, x=mixed, alpha=alpha, beta=beta,
            decay=weight(f"{name}.decay", VALUES), dt_bias=weight(f"{name}.dt_bias", VALUES),
            query=query,
            state=b.buffer(f"{name}.memory", BufferKind.STATE, F32, (rows, VALUES, SIZE, SIZE)),
            key_heads=KEYS, value_heads=VALUES, state_size=SIZE, eps=1e-6, states=states,
        )  # fmt: skip
        normed = b.emit(
            Opcode.SSM_GATED_NORM, x=read, gate=gate, weight=weight(f"{name}.norm", SIZE), eps=1e-6,
            heads=VALUES,
        )  # fmt: skip
        last = layer == layers - 1
        total = b.emit(
            Opcode.ADD, a=total, b=normed, y=b.output("y", "tokens", WIDTH) if last else None
        )
    return b.build()


def weights(name: str, shape: Sequence[int]) -> NDArray[np.float32]:
    """The values of a weight: a function of its name."""
    rng = np.random.default_rng(list(name.encode()))
    values = rng.standard_normal(tuple(shape), dtype=np.float32)
    return -np.exp(values) if name.endswith("decay") else values


@lru_cache
def embeddings(name: str, width: int) -> NDArray[np.float32]:
    """What each token id brings to one input, [VOCABULARY, width]."""
    return weights(name, (VOCABULARY, width))


class Layers:
    """The graph on ``tier``. ``recurrent`` is under test."""

    def __init__(self, tier: Tier, slots: int, layers: int = 2, states: int = 1) -> None:
        self.tier = tier
        self.slots = slots
        self.graph = graph(slots, layers, states)
        self.buffers: dict[str, Buffer] = {}
        most = ShapeKey(MAX_TOKENS, 0)
        for decl in self.graph.buffers.values():
            if decl.kind is BufferKind.WEIGHT:
                values = weights(decl.name, [int(dim) for dim in decl.shape])
                rows = values.reshape(-1, values.shape[-1])
                self.buffers[decl.name] = tier.upload(decl, rows.view(np.uint8))
            elif decl.kind not in STEP_LOCAL:
                self.buffers[decl.name] = tier.alloc(decl, buffer_bytes(decl, most))
        self.recurrent = RecurrentMemory(tier, self.graph, self.buffers, STATE_SLOTS)
        self._executable = ExecutableGraph(tier, self.graph, self.buffers, most)

    def step(self, tokens: Sequence[Token]) -> NDArray[np.float32]:
        """The output rows of one step, [tokens, WIDTH]."""
        query = np.array([(*token, 0) for token in tokens], QUERY_TOKEN)
        self.recurrent.advance(query)
        inputs: dict[str, NDArray[Any]] = {"request.query": query}
        for name in ("x", "gate", "alpha", "beta"):
            width = int(self.graph.buffers[name].shape[1])
            inputs[name] = embeddings(name, width)[query["token"]]
        block = pack_inputs(self._executable.inputs, ShapeKey(len(tokens), 0), inputs)
        fence = self._executable.replay(block, ["y"])
        self.tier.wait(fence)
        return fence.outputs["y"].view(np.float32).reshape(-1, WIDTH)

    def close(self) -> None:
        """Free the buffers."""
        self.recurrent.close()
        for buffer in self.buffers.values():
            self.tier.free(buffer)


@lru_cache(maxsize=512)
def uninterrupted(sequence: tuple[int, ...]) -> NDArray[np.float32]:
    """The rows of a sequence of token ids, alone, one token at a time, by the definitions."""
    with CpuTier(1, definitions_only=True) as tier:
        layers = Layers(tier, 1)
        rows = [layers.step([(token, 0, position)]) for position, token in enumerate(sequence)]
        layers.close()
    return np.concatenate(rows)
