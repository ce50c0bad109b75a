"""Rows of the opcode table: inputs, outputs and bookkeeping of a step."""

from __future__ import annotations

from collections.abc import Mapping

from contract.arithmetic import MASK_WORD_BITS, MAX_LOG_PROBABILITIES, digest_words
from contract.opcodes import Opcode
from contract.ops.common import DIGEST_FLOPS, EXP_FLOPS, active_slots, each, operands, product
from contract.spec import Dim, OpSpec, Param, Scalar, Work


def _mask_covers_vocab(dims: Mapping[str, Dim], params: Mapping[str, Scalar]) -> str | None:
    words, vocab = dims.get("mask_words"), dims["vocab"]
    if words is None or (int(words) * MASK_WORD_BITS >= int(vocab)):
        return None
    return f"mask_words is {words}, too few for the {vocab} tokens of vocab"


def _top_fits_vocab(dims: Mapping[str, Dim], params: Mapping[str, Scalar]) -> str | None:
    limit = min(int(dims["vocab"]), MAX_LOG_PROBABILITIES)
    if int(params["top"]) > limit:
        return f"top is {params['top']}, expected at most {limit}"
    return None


def _digests_cover_vocab(dims: Mapping[str, Dim], params: Mapping[str, Scalar]) -> str | None:
    words = digest_words(int(dims["vocab"]))
    if int(dims["digest_words"]) != words:
        return f"digest_words is {dims['digest_words']}, expected {words} for the vocabulary"
    return None


def _mask_words(work: Work) -> int:
    """Most words of masks that a step reads: a row reads one mask at most."""
    return min(work["rows"], work["masks"]) * work["mask_words"]


STEP = (
    OpSpec(
        Opcode.EMBED,
        operands("query, weight table[vocab, hidden], *y[tokens, hidden]"),
        (),
        rule="R0 R1",
        formula="y[t] = table[query[t].token]",
        touched={"table": lambda work: work["tokens"] * work["hidden"]},
    ),
    OpSpec(
        Opcode.SELECT_ROWS,
        operands("x[tokens, hidden], int output_rows[rows], *y[rows, hidden]"),
        (),
        rule="R1",
        formula="y[r] = x[output_rows[r]]",
        touched={"x": lambda work: work["rows"] * work["hidden"]},
    ),
    OpSpec(
        Opcode.LM_HEAD,
        operands("x[rows, hidden], weight weight[vocab, hidden], *logits[rows, vocab]"),
        (),
        rule="R3 R4 R5",
        formula="logits = x weight^T",
        flops=product("rows", "vocab", "hidden"),
    ),
    OpSpec(
        Opcode.SAMPLE,
        operands(
            "logits[rows, vocab], int sampling[rows, 16], int recent[slots, recent_tokens], "
            "int allowed[masks, mask_words]?, int bias[biases, 2]?, int *token[rows]"
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
        constraint=_mask_covers_vocab,
    ),
    OpSpec(
        Opcode.LOG_PROBABILITIES,
        operands(
            "logits[rows, vocab], int token[rows], *chosen[rows], int *top_ids[rows, top], "
            "*top_logs[rows, top]"
        ),
        (Param("top", int, "likeliest tokens listed", minimum=1),),
        rule="R2 R3 R4 R10",
        formula="log p(v) = (logits[v] - m) - log(sum exp(logits - m)), m = max logits: of token, "
        "and of the top tokens",
        flops=each(EXP_FLOPS + 2, "rows", "vocab"),
        constraint=_top_fits_vocab,
    ),
    OpSpec(
        Opcode.ROW_DIGEST,
        operands("logits[rows, vocab], int digested[rows], int *digest[rows, digest_words]"),
        (),
        rule="R12",
        formula="8 words for every 1,024 logits of a row: root of their tree of BLAKE3 digests; "
        "0 in rows whose digested is 0",
        flops=each(DIGEST_FLOPS, "rows", "vocab"),
        constraint=_digests_cover_vocab,
    ),
    OpSpec(
        Opcode.MAP_TOKENS,
        operands("int token[rows], int table[vocab], int *mapped[rows]"),
        (),
        rule="R1",
        formula="mapped[r] = table[token[r]], -1 where token[r] is -1",
        touched={"table": lambda work: work["rows"]},
    ),
    OpSpec(
        Opcode.STREAM_OUT,
        operands(
            "int token[rows], int output_rows[rows], query, int step[1, 4], "
            "int &ring[ring_events, 8]"
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
        operands(
            "query, int slot_table[slots, 8], int &recent[slots, recent_tokens], "
            "int *resolved[tokens, 4]"
        ),
        (),
        rule="R1",
        formula="resolved[t] = query[t], its token slot_table[slot].last_token where it is -1 "
        "(0 where that is -1 too), recent[slot, position mod recent_tokens] where it is -2; then "
        "recent[slot, position mod recent_tokens] = the token; of several with the same index the "
        "last is stored",
        touched={"slot_table": active_slots, "recent": lambda work: work["tokens"]},
        stored=("recent",),
    ),
    OpSpec(
        Opcode.STORE_REQUEST_STATE,
        operands("int token[rows], int output_rows[rows], query, int &slot_table[slots, 8]"),
        (),
        rule="R1",
        formula="with q = query[output_rows[r]]: slot_table[q.slot].last_token = token[r], "
        "slot_table[q.slot].position = q.position + 1; of several rows of a slot the last counts",
        touched={
            "query": lambda work: 4 * work["rows"],
            "slot_table": lambda work: 2 * work["rows"],
        },
        stored=("slot_table",),
    ),
    OpSpec(
        Opcode.VERIFY_K,
        operands(
            "int token[rows], int output_rows[rows], query, int step[1, 4], "
            "int &ring[ring_events, 8]"
        ),
        (Param("draft_tokens", int, "most drafted tokens of a sequence", minimum=1),),
        rule="R1",
        formula="ring[n mod ring_events].flags = the number, at most draft_tokens, of consecutive "
        "rows i = r, r + 1, ... whose token[i] is the token of query[output_rows[i + 1]], where "
        "that is the next query token and of the same slot; n = step.first_event + r",
        touched={"query": lambda work: 8 * work["rows"], "ring": lambda work: work["rows"]},
    ),
    OpSpec(
        Opcode.COPY_ROWS,
        operands("source[sources, width], int pairs[rows, 2], &target[targets, width]"),
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
