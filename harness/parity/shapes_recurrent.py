"""The sizes and parameters that opcodes of recurrent layers are tested with."""

from dataclasses import replace

from contract.opcodes import Opcode
from harness.parity.shape import (
    CHUNK_LONG,
    DECODE_MANY,
    DECODE_ONE,
    EMPTY,
    MIXED,
    SHORT,
    OpShape,
    Run,
    Strategy,
    always,
    grid,
    listed,
)

RESTART: tuple[Run, ...] = ((1, 7, 3), (0, 0, 2), (1, 0, 2), (0, 2, 3))
"""Runs of a step in which slot 1 begins a new sequence in the middle."""


CONV_EXTRAS = frozenset(("bias", "input_gate", "output_gate"))


RING: tuple[Run, ...] = ((1, 9, 4), (0, 6, 1), (2, 0, 7), (0, 7, 2))
"""Runs shorter and longer than a ring of four states, one of which another slot interrupts."""


def _ringed(shape: OpShape, states: int) -> OpShape:
    """The same with several states of every slot."""
    given = {**shape.given, "states": states}
    return replace(shape, label=f"{shape.label}-of-{states}", given=given)


def _conv(label: str, runs: tuple[Run, ...], channels: int, history: int, *extras: str) -> OpShape:
    """A convolution with these of its optional operands."""
    given = {"channels": channels, "taps": history + 1, "history": history}
    return OpShape(f"{label}-{channels}x{history}", given, runs, CONV_EXTRAS - set(extras))


def _delta(
    label: str,
    runs: tuple[Run, ...],
    size: int,
    keys: int,
    values: int,
    grouped: int,
    decays: int = 1,
) -> OpShape:
    """Heads with this many decays each: 1, or one for each key."""
    channels = size * (2 * keys + values)
    heads = {"key_heads": keys, "value_heads": values, "grouped": grouped}
    given = {**heads, "state_size": size, "channels": channels, "eps": 1e-6}
    given["rates"] = values * decays
    order = ("grouped" if grouped else "tiled") + ("-by-key" if decays > 1 else "")
    return OpShape(f"{label}-{size}x{keys}x{values}-{order}", given, runs)


def _scan(
    label: str, runs: tuple[Run, ...], heads: int, groups: int, head_dim: int, size: int
) -> OpShape:
    given = {"heads": heads, "groups": groups, "head_dim": head_dim, "state_size": size}
    given["channels"] = heads * head_dim + 2 * groups * size
    return OpShape(f"{label}-{heads}x{groups}x{head_dim}x{size}", given, runs)


RECURRENT_STRATEGIES: dict[Opcode, Strategy] = {
    Opcode.SSM_CONV1D: always(
        _conv("one", DECODE_ONE, 16, 3),
        _conv("many", DECODE_MANY, 257, 3),
        _conv("chunk", CHUNK_LONG, 40, 1),
        _conv("mixed", MIXED, 320, 3),
        _conv("restart", RESTART, 33, 9),
        _conv("start", SHORT, 8, 2),
        _conv("empty", EMPTY, 16, 3),
        _conv("biased", MIXED, 72, 3, "bias"),
        _conv("gated", MIXED, 257, 2, "input_gate", "output_gate"),
        _conv("gated-one", DECODE_ONE, 40, 2, "input_gate", "output_gate"),
        _conv("input-gated", RESTART, 33, 3, "input_gate"),
        _conv("all", CHUNK_LONG, 48, 9, *CONV_EXTRAS),
        _ringed(_conv("ring", RING, 257, 3, "bias"), 4),
        _ringed(_conv("restart", RESTART, 33, 3), 2),
    ),
    Opcode.SSM_DELTA_NET: always(
        _delta("one", DECODE_ONE, 128, 1, 2, 0),
        _delta("many", DECODE_MANY, 16, 2, 6, 1),
        _delta("chunk", CHUNK_LONG, 16, 2, 4, 0),
        _delta("mixed", MIXED, 40, 2, 4, 1),
        _delta("mixed", MIXED, 128, 2, 2, 0),
        _delta("restart", RESTART, 40, 2, 6, 0),
        _delta("start", SHORT, 256, 1, 1, 0),
        _delta("odd", RESTART, 131, 1, 1, 1),
        _delta("empty", EMPTY, 16, 1, 2, 0),
        _ringed(_delta("ring", RING, 128, 2, 4, 0), 4),
        _ringed(_delta("restart", RESTART, 40, 1, 2, 1), 2),
        _delta("one", DECODE_ONE, 128, 2, 2, 0, 128),
        _delta("mixed", MIXED, 128, 1, 2, 1, 128),
        _delta("restart", RESTART, 40, 2, 4, 0, 40),
        _delta("odd", RESTART, 131, 1, 1, 0, 131),
        _delta("empty", EMPTY, 16, 1, 2, 0, 16),
        _ringed(_delta("ring", RING, 32, 2, 2, 0, 32), 4),
    ),
    Opcode.SSM_GATED_NORM: listed(
        "label tokens heads width",
        ("single", 1, 1, 1),
        ("heads", 3, 4, 128),
        ("odd", 17, 3, 40),
        ("span", 2, 2, 1300),
        ("empty", 0, 2, 16),
        eps=1e-5,
    ),
    Opcode.SSM_SCAN: always(
        _scan("one", DECODE_ONE, 4, 1, 64, 128),
        _scan("many", DECODE_MANY, 6, 2, 16, 16),
        _scan("chunk", CHUNK_LONG, 4, 4, 24, 40),
        _scan("mixed", MIXED, 4, 1, 32, 128),
        _scan("restart", RESTART, 6, 3, 40, 33),
        _scan("start", SHORT, 2, 1, 8, 256),
        _scan("odd", RESTART, 1, 1, 131, 131),
        _scan("empty", EMPTY, 2, 1, 16, 16),
        _ringed(_scan("ring", RING, 4, 2, 24, 128), 4),
        _ringed(_scan("restart", RESTART, 2, 1, 40, 33), 2),
    ),
    Opcode.SCALE_COLUMNS: grid(
        "tokens width factors",
        *((1, 1, 1), (3, 257, 257), (3, 257, 1), (65, 40, 40), (17, 16, 1), (0, 8, 8)),
    ),
}
