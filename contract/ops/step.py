"""Rows of the opcode table: what enters and leaves a step, and its bookkeeping."""

from __future__ import annotations

from collections.abc import Mapping

from contract.opcodes import Opcode
from contract.ops.common import (
    EXP_FLOPS,
    QUERY,
    TOKEN_ACTIVATION,
    UPDATE,
    WRITE,
    activation,
    each,
    index,
    product,
    weight,
)
from contract.spec import Dim, OpSpec, Param, Scalar

FIELD = Param("field", int, "word of the slot record", minimum=0)


def _field_exists(dims: Mapping[str, Dim], params: Mapping[str, Scalar]) -> str | None:
    words = dims["slot_words"]
    if isinstance(words, str) or params["field"] >= words:
        return f"field {params['field']} is not one of the {words} words of a slot"
    return None


def _ring_has_room(dims: Mapping[str, Dim], params: Mapping[str, Scalar]) -> str | None:
    if dims["ring_events"] in (0, 1):
        return f"ring_events is {dims['ring_events']}, entry 0 is the header: at least 2 are needed"
    return None


STEP = (
    OpSpec(
        Opcode.EMBED,
        (
            QUERY,
            weight("table", "vocab", "hidden"),
            activation("y", "tokens", "hidden", access=WRITE),
        ),
        (),
        rule="R0 R1",
        formula="y[t] = table[query[t].token]",
        touched={"table": lambda work: work["tokens"] * work["hidden"]},
    ),
    OpSpec(
        Opcode.SELECT_ROWS,
        (
            TOKEN_ACTIVATION,
            index("output_rows", "rows"),
            activation("y", "rows", "hidden", access=WRITE),
        ),
        (),
        rule="R1",
        formula="y[r] = x[output_rows[r]]",
        touched={"x": lambda work: work["rows"] * work["hidden"]},
    ),
    OpSpec(
        Opcode.LM_HEAD,
        (
            activation("x", "rows", "hidden"),
            weight("weight", "vocab", "hidden"),
            activation("logits", "rows", "vocab", access=WRITE),
        ),
        (),
        rule="R3 R4 R5",
        formula="logits = x weight^T",
        flops=product("rows", "vocab", "hidden"),
    ),
    OpSpec(
        Opcode.ARGMAX,
        (activation("logits", "rows", "vocab"), index("token", "rows", access=WRITE)),
        (),
        rule="R9",
        formula="token[r] = the lowest v with the largest logits[r, v]",
    ),
    OpSpec(
        Opcode.SAMPLE,
        (
            activation("logits", "rows", "vocab"),
            index("sampling", "rows", "16"),
            index("recent", "rows", "recent_tokens"),
            index("token", "rows", access=WRITE),
        ),
        (),
        rule="R2 R9",
        formula="penalties, temperature, top-k, top-p, min-p, draw; arg-max at temperature 0",
        flops=each(EXP_FLOPS + 3, "rows", "vocab"),
    ),
    OpSpec(
        Opcode.STREAM_OUT,
        (
            index("token", "rows"),
            index("output_rows", "rows"),
            QUERY,
            index("ring", "ring_events", "8", access=UPDATE),
        ),
        (),
        rule="R1",
        formula="ring[1 + n mod (ring_events - 1)] = event n of (query[output_rows[r]], token[r]);"
        " ring[0] counts the events",
        touched={
            "query": lambda work: 4 * work["rows"],
            "ring": lambda work: 8 * (work["rows"] + 1),
        },
        stored=("ring",),
        constraint=_ring_has_room,
    ),
    OpSpec(
        Opcode.FEED_TOKENS,
        (
            index("token", "rows"),
            index("output_rows", "rows"),
            index("query", "tokens", "4", access=UPDATE),
            index("sampling", "rows", "16", access=UPDATE),
            index("recent", "rows", "recent_tokens", access=UPDATE),
        ),
        (),
        rule="R1",
        formula="query[output_rows[r]] becomes the query of token[r] at the next position, "
        "sampling[r] and recent[r] those of the token after it; output_rows are distinct",
        touched={
            "query": lambda work: 4 * work["rows"],
            "recent": lambda work: work["rows"],
        },
    ),
    OpSpec(
        Opcode.LOAD_REQUEST_STATE,
        (
            index("slot_ids", "rows"),
            index("slot_table", "slots", "slot_words"),
            index("value", "rows", access=WRITE),
        ),
        (FIELD,),
        rule="R1",
        formula="value[r] = slot_table[slot_ids[r], field]",
        touched={"slot_table": lambda work: work["rows"]},
        constraint=_field_exists,
    ),
    OpSpec(
        Opcode.STORE_REQUEST_STATE,
        (
            index("slot_ids", "rows"),
            index("value", "rows"),
            index("slot_table", "slots", "slot_words", access=UPDATE),
        ),
        (FIELD,),
        rule="R1",
        formula="slot_table[slot_ids[r], field] = value[r]",
        touched={"slot_table": lambda work: work["rows"]},
        stored=("slot_table",),
        constraint=_field_exists,
    ),
    OpSpec(
        Opcode.VERIFY_K,
        (
            index("draft", "rows", "draft_tokens"),
            index("target", "rows", "draft_tokens"),
            index("accepted", "rows", access=WRITE),
        ),
        (),
        rule="R1",
        formula="accepted[r] = length of the longest common prefix of draft[r] and target[r]",
    ),
    OpSpec(Opcode.BARRIER, (), (), rule="-", formula="orders in-place writes before later reads"),
)
