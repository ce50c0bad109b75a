"""Rows of the opcode table: inputs, outputs and bookkeeping of a step."""

from __future__ import annotations

from collections.abc import Mapping

from contract.arithmetic import MASK_WORD_BITS, MOST_LOG_PROBABILITIES, digest_words
from contract.opcodes import Opcode
from contract.ops.common import (
    DIGEST_FLOPS,
    EXP_FLOPS,
    QUERY,
    SLOT_TABLE,
    TOKEN_ACTIVATION,
    UPDATE,
    WRITE,
    activation,
    active_slots,
    each,
    index,
    product,
    weight,
)
from contract.spec import Dim, OpSpec, Param, Scalar, Work


def _masks_hold_the_vocabulary(dims: Mapping[str, Dim], params: Mapping[str, Scalar]) -> str | None:
    words, vocab = dims.get("mask_words"), dims["vocab"]
    if words is None or (int(words) * MASK_WORD_BITS >= int(vocab)):
        return None
    return f"mask_words is {words}, too few for the {vocab} tokens of vocab"


def _listed_tokens(dims: Mapping[str, Dim], params: Mapping[str, Scalar]) -> str | None:
    most = min(int(dims["vocab"]), MOST_LOG_PROBABILITIES)
    if int(params["top"]) > most:
        return f"top is {params['top']}, expected at most {most}"
    return None


def _digests_of_all_spans(dims: Mapping[str, Dim], params: Mapping[str, Scalar]) -> str | None:
    words = digest_words(int(dims["vocab"]))
    if int(dims["digest_words"]) != words:
        return f"digest_words is {dims['digest_words']}, expected {words} for the vocabulary"
    return None


def _mask_words(work: Work) -> int:
    return min(work["rows"], work["masks"]) * work["mask_words"]


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
        Opcode.SAMPLE,
        (
            activation("logits", "rows", "vocab"),
            index("sampling", "rows", "16"),
            index("recent", "slots", "recent_tokens"),
            index("allowed", "masks", "mask_words", optional=True),
            index("bias", "biases", "2", optional=True),
            index("token", "rows", access=WRITE),
        ),
        (),
        rule="R2 R9",
        formula="allowed tokens only, bias, penalties, temperature, top-k, top-p, min-p, draw; "
        "arg-max at temperature 0",
        flops=each(EXP_FLOPS + 3, "rows", "vocab"),
        touched={
            "recent": lambda work: work["rows"] * work["recent_tokens"],
            "allowed": _mask_words,
        },
        constraint=_masks_hold_the_vocabulary,
    ),
    OpSpec(
        Opcode.LOG_PROBABILITIES,
        (
            activation("logits", "rows", "vocab"),
            index("token", "rows"),
            activation("chosen", "rows", access=WRITE),
            index("top_ids", "rows", "top", access=WRITE),
            activation("top_logs", "rows", "top", access=WRITE),
        ),
        (Param("top", int, "likeliest tokens listed", minimum=1),),
        rule="R2 R3 R4 R10",
        formula="log p(v) = (logits[v] - m) - log(sum exp(logits - m)), m = max logits: of token, "
        "and of the top tokens",
        flops=each(EXP_FLOPS + 2, "rows", "vocab"),
        constraint=_listed_tokens,
    ),
    OpSpec(
        Opcode.ROW_DIGEST,
        (
            activation("logits", "rows", "vocab"),
            index("digested", "rows"),
            index("digest", "rows", "digest_words", access=WRITE),
        ),
        (),
        rule="R12",
        formula="of each 1,024 logits eight words: the root of a tree of BLAKE3 digests; 0 in rows "
        "whose digested is 0",
        flops=each(DIGEST_FLOPS, "rows", "vocab"),
        constraint=_digests_of_all_spans,
    ),
    OpSpec(
        Opcode.STREAM_OUT,
        (
            index("token", "rows"),
            index("output_rows", "rows"),
            QUERY,
            index("step", "1", "4"),
            index("ring", "ring_events", "8", access=UPDATE),
        ),
        (),
        rule="R1",
        formula="ring[n mod ring_events] = event n of (query[output_rows[r]], token[r]), "
        "n = step.first_event + r",
        touched={"query": lambda work: 4 * work["rows"], "ring": lambda work: 8 * work["rows"]},
        stored=("ring",),
    ),
    OpSpec(
        Opcode.LOAD_REQUEST_STATE,
        (
            QUERY,
            SLOT_TABLE,
            index("recent", "slots", "recent_tokens", access=UPDATE),
            index("resolved", "tokens", "4", access=WRITE),
        ),
        (),
        rule="R1",
        formula="resolved[t] = query[t], its token slot_table[slot].last_token where it is -1 "
        "(0 where that is -1 too), recent[slot, position mod recent_tokens] where it is -2; "
        "recent[slot, position mod recent_tokens] = the token, "
        "of several at one place the last",
        touched={
            "slot_table": lambda work: active_slots(work),
            "recent": lambda work: work["tokens"],
        },
        stored=("recent",),
    ),
    OpSpec(
        Opcode.STORE_REQUEST_STATE,
        (
            index("token", "rows"),
            index("output_rows", "rows"),
            QUERY,
            index("slot_table", "slots", "8", access=UPDATE),
        ),
        (),
        rule="R1",
        formula="slot_table[slot of query[output_rows[r]]] takes token[r] as last_token and the "
        "position after the query's, of several rows of a slot those of the last",
        touched={
            "query": lambda work: 4 * work["rows"],
            "slot_table": lambda work: 2 * work["rows"],
        },
        stored=("slot_table",),
    ),
    OpSpec(
        Opcode.VERIFY_K,
        (
            index("token", "rows"),
            index("output_rows", "rows"),
            QUERY,
            index("step", "1", "4"),
            index("ring", "ring_events", "8", access=UPDATE),
        ),
        (Param("draft_tokens", int, "most drafted tokens of a sequence", minimum=1),),
        rule="R1",
        formula="ring[n mod ring_events].flags = length, at most draft_tokens, of the run of "
        "rows from r on that sampled the next token of the query, of the same slot and with the "
        "next row; n = step.first_event + r",
        touched={"query": lambda work: 8 * work["rows"], "ring": lambda work: work["rows"]},
    ),
    OpSpec(
        Opcode.COPY_ROWS,
        (
            activation("source", "sources", "width"),
            index("pairs", "rows", "2"),
            activation("target", "targets", "width", access=UPDATE),
        ),
        (),
        rule="R1",
        formula="target[pairs[r, 1]] = source[pairs[r, 0]]; the targets of a step are distinct",
        touched={
            "source": lambda work: work["rows"] * work["width"],
            "target": lambda work: work["rows"] * work["width"],
        },
    ),
    OpSpec(Opcode.BARRIER, (), (), rule="-", formula="orders in-place writes before later reads"),
)
