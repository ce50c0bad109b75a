"""The first and the last nodes of a step: token ids are filled in, tokens are sampled, written and
verified."""

from __future__ import annotations

from contract.arithmetic import digest_words
from contract.dtypes import I32
from contract.ir.graph import BufferKind, GraphBuilder, View
from contract.ir.inputs import STEP_BUFFER
from contract.opcodes import Opcode
from reference.limits import Limits, mask_words


def open_step(builder: GraphBuilder, limits: Limits, query: View, resolved: View) -> None:
    """Emit LOAD_REQUEST_STATE, which fills in token ids and records each slot's recent tokens."""
    builder.emit(
        Opcode.LOAD_REQUEST_STATE,
        "open_step",
        query=query,
        slot_table=_slot_table(builder, limits),
        recent=_recent(builder, limits),
        resolved=resolved,
    )
    builder.barrier()


def emit_tokens(
    builder: GraphBuilder,
    limits: Limits,
    vocab: int,
    logits: View,
    rows: View,
    query: View,
    resolved: View,
    table: View | None = None,
) -> None:
    """Emit the sampling of every output row, its event in the ring, the slot's new last token, and
    how many drafted tokens are right where a step has room for some."""
    allowed = bias = None
    if limits.masks:
        allowed = builder.request("request.allowed", limits.masks, mask_words(vocab))
    if limits.bias_records:
        bias = builder.request("request.bias", limits.bias_records, 2)
    token = builder.emit(
        Opcode.SAMPLE,
        "sample",
        logits=logits,
        sampling=builder.request("request.sampling", "rows", 16),
        recent=_recent(builder, limits),
        allowed=allowed,
        bias=bias,
    )
    if table is not None:
        token = builder.emit(Opcode.MAP_TOKENS, "map_tokens", token=token, table=table)
    if limits.top_log_probabilities:
        _emit_log_probabilities(builder, limits.top_log_probabilities, logits, token)
    written = {"token": token, "output_rows": rows, "query": query}
    step = builder.request(STEP_BUFFER, 1, 4)
    ring = builder.output("output.ring", limits.ring_events, 8, dtype=I32)
    builder.emit(Opcode.STREAM_OUT, "stream_out", **written, step=step, ring=ring)
    slots = _slot_table(builder, limits)
    builder.emit(Opcode.STORE_REQUEST_STATE, "close_step", **written, slot_table=slots)
    # The others are behind the ops that tiers execute together with SAMPLE.
    if limits.draft_tokens:
        builder.barrier()
        verified = {**written, "query": resolved, "step": step, "ring": ring}
        builder.emit(Opcode.VERIFY_K, "verify", **verified, draft_tokens=limits.draft_tokens)
    if limits.digests:
        digest = builder.output("output.row_digest", "rows", digest_words(vocab), dtype=I32)
        digested = builder.request("request.digested", "rows")
        builder.emit(
            Opcode.ROW_DIGEST, "row_digest", logits=logits, digested=digested, digest=digest
        )


def _emit_log_probabilities(builder: GraphBuilder, top: int, logits: View, token: View) -> None:
    builder.emit(
        Opcode.LOG_PROBABILITIES,
        "log_probabilities",
        logits=logits,
        token=token,
        chosen=builder.output("output.log_probability", "rows"),
        top_ids=builder.output("output.top_ids", "rows", top, dtype=I32),
        top_logs=builder.output("output.top_log_probabilities", "rows", top),
        top=top,
    )


def _slot_table(builder: GraphBuilder, limits: Limits) -> View:
    return builder.buffer("state.slots", BufferKind.STATE, I32, (limits.slots, 8))


def _recent(builder: GraphBuilder, limits: Limits) -> View:
    shape = (limits.slots, limits.recent_tokens)
    return builder.buffer("state.recent", BufferKind.STATE, I32, shape)
