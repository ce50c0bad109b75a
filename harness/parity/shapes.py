"""The sizes and parameters each opcode is tested with: one entry of STRATEGIES per opcode.

A shape names every dimension of the opcode's table row that its parameters do not bind. ``runs``
lists the tokens of the step as (slot, first position, count); the numbers of tokens and slots and
the page-table size follow from it.
"""

from __future__ import annotations

from contract.arithmetic import digest_words
from contract.dtypes import DType
from contract.opcodes import Opcode
from contract.spec import Scalar
from harness.parity.shape import (
    CHUNK_LONG,
    CHUNK_SPANS,
    CHUNK_TWO,
    DECODE_MANY,
    DECODE_ONE,
    DECODE_SPANS,
    EMPTY,
    MIXED,
    SHORT,
    OpShape,
    Run,
    Strategy,
    activations,
    always,
    grid,
    inner_lengths,
)
from harness.parity.shapes_experts import EXPERT_STRATEGIES
from harness.parity.shapes_recurrent import RECURRENT_STRATEGIES


def _product(tokens: str, inner: str, outputs: str) -> Strategy:
    def strategy(dtype: DType | None) -> tuple[OpShape, ...]:
        sizes = zip(
            (1, 3, 17, 0),
            (*inner_lengths(dtype), inner_lengths(dtype)[0]),
            (7, 33, 2, 5),
            strict=True,
        )
        return tuple(
            OpShape(f"{t}x{k}x{n}", {tokens: t, inner: k, outputs: n}) for t, k, n in sizes
        )

    return strategy


def _fused_product(*outputs: str) -> Strategy:
    def strategy(dtype: DType | None) -> tuple[OpShape, ...]:
        widths = ((9, 5), (16, 8), (33, 3))
        return tuple(
            OpShape(
                f"{t}x{k}",
                {"tokens": t, "hidden": k} | dict(zip(outputs, width, strict=False)),
                {"eps": 1e-5},
            )
            for t, k, width in zip((2, 17, 1), inner_lengths(dtype), widths, strict=True)
        )

    return strategy


def _embed(dtype: DType | None) -> tuple[OpShape, ...]:
    short, middle, long = inner_lengths(dtype)
    return (
        OpShape(f"chunk-{short}", {"vocab": 11, "hidden": short}, runs=CHUNK_TWO),
        OpShape(f"mixed-{middle}", {"vocab": 50, "hidden": middle}, runs=MIXED),
        OpShape(f"long-{long}", {"vocab": 3, "hidden": long}, runs=SHORT),
        OpShape("empty", {"vocab": 3, "hidden": short}, runs=EMPTY),
    )


NONE: frozenset[str] = frozenset()


def _heads(
    label: str,
    runs: tuple[Run, ...],
    heads: int,
    kv_heads: int,
    head_dim: int,
    absent: frozenset[str] = frozenset({"sinks"}),
    **params: Scalar,
) -> OpShape:
    given = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, **params}
    return OpShape(f"{label}-{heads}x{kv_heads}x{head_dim}", {}, given, runs, absent)


def _paged(*shapes: OpShape) -> Strategy:
    """The shapes whose heads are whole blocks of the pages' storage type."""

    def strategy(dtype: DType | None) -> tuple[OpShape, ...]:
        block = dtype.block_elements if dtype is not None else 1
        return tuple(shape for shape in shapes if shape.params["head_dim"] % block == 0)

    return strategy


def _rope(label: str, runs: tuple[Run, ...], heads: int, head_dim: int, pairs: int) -> OpShape:
    return OpShape(
        label,
        {"rotary_pairs": pairs},
        {"heads": heads, "head_dim": head_dim, "neox": int("neox" in label)},
        runs,
    )


def _kv_write(label: str, runs: tuple[Run, ...], kv_heads: int, head_dim: int) -> OpShape:
    return OpShape(label, {}, {"kv_heads": kv_heads, "head_dim": head_dim}, runs)


def _fused_rope(
    label: str,
    runs: tuple[Run, ...],
    heads: int,
    kv_heads: int,
    head_dim: int,
    pairs: int,
    *absent: str,
) -> OpShape:
    return OpShape(
        label,
        {"rotary_pairs": pairs, "qkv_width": (heads + 2 * kv_heads) * head_dim},
        {
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "neox": int("neox" in label),
            "eps": 1e-6,
        },
        runs,
        frozenset(absent),
    )


def _norm(label: str, tokens: int, groups: int, width: int, *absent: str) -> OpShape:
    dims = {"tokens": tokens, "width": width}
    return OpShape(label, dims, {"eps": 1e-5, "groups": groups}, absent=frozenset(absent))


def _stream_out(rows: int, ring_events: int, runs: tuple[Run, ...]) -> OpShape:
    return OpShape(f"{rows}x{ring_events}", {"rows": rows, "ring_events": ring_events}, runs=runs)


def _verify_k(rows: int, ring_events: int, draft_tokens: int, runs: tuple[Run, ...]) -> OpShape:
    dims = {"rows": rows, "ring_events": ring_events}
    return OpShape(f"{rows}x{draft_tokens}", dims, {"draft_tokens": draft_tokens}, runs)


def _load_state(label: str, recent_tokens: int, runs: tuple[Run, ...]) -> OpShape:
    return OpShape(f"{label}-{recent_tokens}", {"recent_tokens": recent_tokens}, runs=runs)


def _store_state(rows: int, runs: tuple[Run, ...]) -> OpShape:
    return OpShape(f"{rows}", {"rows": rows}, runs=runs)


def _sample(rows: int, vocab: int, recent_tokens: int, slots: int, **tables: int) -> OpShape:
    """A shape of SAMPLE. ``tables`` are the dimensions of masks and biases, absent without them."""
    dims = {"rows": rows, "vocab": vocab, "recent_tokens": recent_tokens, "slots": slots}
    sizes = {"allowed": "masks", "bias": "biases"}
    absent = frozenset(name for name, size in sizes.items() if size not in tables)
    label = "x".join(map(str, dims.values()))
    label += "".join(f"-{size}" for size in sizes.values() if size in tables)
    return OpShape(label, dims | tables, absent=absent)


WIDE = ((1, 1), (3, 257), (17, 40), (65, 16), (0, 8))
"""Pairs of tokens and width."""

STRATEGIES: dict[Opcode, Strategy] = {
    Opcode.EMBED: _embed,
    Opcode.SELECT_ROWS: grid(
        "tokens hidden rows", (1, 1, 1), (17, 257, 3), (65, 40, 65), (5, 8, 0)
    ),
    Opcode.LM_HEAD: _product("rows", "hidden", "vocab"),
    Opcode.SAMPLE: always(
        *(_sample(*row) for row in ((1, 1, 1, 1), (3, 257, 8, 2), (17, 1000, 64, 9), (0, 7, 4, 1))),
        _sample(1, 1, 1, 1, masks=1, mask_words=1, biases=1),
        _sample(17, 257, 8, 3, masks=5, mask_words=10),
        _sample(17, 300, 8, 3, biases=40),
        _sample(33, 1000, 64, 9, masks=9, mask_words=32, biases=100),
        _sample(0, 7, 4, 1, masks=2, mask_words=1, biases=3),
    ),
    Opcode.LOG_PROBABILITIES: always(
        *(
            OpShape(f"{rows}x{vocab}x{top}", {"rows": rows, "vocab": vocab}, {"top": top})
            for rows, vocab, top in (
                *((1, 1, 1), (3, 257, 20), (17, 1000, 5), (5, 5000, 20), (2, 20, 20), (0, 7, 2)),
            )
        )
    ),
    Opcode.ROW_DIGEST: always(
        *(
            OpShape(
                f"{rows}x{vocab}",
                {"rows": rows, "vocab": vocab, "digest_words": digest_words(vocab)},
            )
            for rows, vocab in ((1, 1), (3, 257), (2, 1024), (5, 2100), (2, 20000), (0, 7))
        )
    ),
    Opcode.STREAM_OUT: always(
        _stream_out(1, 1, DECODE_ONE),
        _stream_out(5, 8, DECODE_MANY),
        _stream_out(9, 16, MIXED),
        _stream_out(0, 4, MIXED),
    ),
    Opcode.LOAD_REQUEST_STATE: always(
        _load_state("one", 1, DECODE_ONE),
        _load_state("many", 8, DECODE_MANY),
        _load_state("mixed", 64, MIXED),
        _load_state("wrapped", 7, CHUNK_LONG),
        _load_state("empty", 4, EMPTY),
    ),
    Opcode.STORE_REQUEST_STATE: always(
        _store_state(1, DECODE_ONE),
        _store_state(5, DECODE_MANY),
        _store_state(12, MIXED),
        _store_state(0, MIXED),
    ),
    Opcode.COPY_ROWS: grid(
        "sources targets width rows", (1, 1, 1, 1), (9, 4, 257, 3), (3, 17, 1300, 17), (2, 2, 8, 0)
    ),
    Opcode.VERIFY_K: always(
        _verify_k(1, 4, 1, DECODE_ONE),
        _verify_k(5, 8, 3, DECODE_MANY),
        _verify_k(15, 64, 3, MIXED),
        _verify_k(17, 64, 16, MIXED),
        _verify_k(60, 256, 16, CHUNK_LONG),
        _verify_k(9, 4, 2, MIXED),
        _verify_k(0, 4, 3, MIXED),
    ),
    Opcode.RMS_NORM: always(
        _norm("whole", 3, 1, 257),
        _norm("span", 2, 1, 1300),
        _norm("heads", 17, 4, 40),
        _norm("bare", 2, 3, 80, "weight"),
        _norm("single", 1, 1, 1),
        _norm("empty", 0, 2, 16),
    ),
    Opcode.RESIDUAL_RMS_NORM: grid(
        "tokens hidden", (1, 1), (3, 257), (17, 1300), (0, 40), eps=1e-6
    ),
    Opcode.MATMUL: _product("tokens", "inner", "outputs"),
    Opcode.RMS_NORM_FUSED_QKV: _fused_product("q_width", "kv_width"),
    Opcode.RMS_NORM_FUSED_MLP_GATE_UP: _fused_product("width"),
    Opcode.ROPE: always(
        _rope("interleaved", MIXED, 2, 16, 8),
        _rope("neox", MIXED, 3, 40, 20),
        _rope("interleaved-partial", CHUNK_LONG, 2, 80, 16),
        _rope("neox-partial", DECODE_MANY, 1, 256, 32),
        _rope("neox-empty", EMPTY, 2, 16, 8),
    ),
    Opcode.KV_WRITE_BATCHED: _paged(
        _kv_write("mixed", MIXED, 2, 16),
        _kv_write("decode", DECODE_MANY, 1, 80),
        _kv_write("chunk", CHUNK_LONG, 3, 40),
        _kv_write("empty", EMPTY, 1, 16),
        _kv_write("blocks", MIXED, 2, 96),
        _kv_write("wide", DECODE_MANY, 1, 512),
        _kv_write("blocks-empty", EMPTY, 1, 32),
    ),
    Opcode.RMS_NORM_FUSED_ROPE_KV_WRITE: _paged(
        _fused_rope("neox", MIXED, 4, 2, 16, 8),
        _fused_rope("interleaved-bare", DECODE_MANY, 2, 1, 40, 20, "q_norm", "k_norm"),
        _fused_rope("neox-partial", CHUNK_LONG, 2, 2, 64, 16, "q_norm"),
        _fused_rope("interleaved-empty", EMPTY, 2, 1, 16, 8),
        _fused_rope("interleaved-wide", MIXED, 2, 1, 256, 32),
    ),
    Opcode.FLASH_ATTN: _paged(
        _heads("one", DECODE_ONE, 1, 1, 16, scale=0.25),
        _heads("many", DECODE_MANY, 4, 2, 40, scale=0.158),
        _heads("window", DECODE_MANY, 3, 1, 64, scale=0.125, window=65),
        _heads("window-one", DECODE_MANY, 2, 2, 80, scale=0.1, window=1),
        _heads("soft-cap", DECODE_MANY, 2, 1, 128, scale=0.09, soft_cap=5.0),
        _heads("wide", DECODE_MANY, 2, 1, 256, scale=0.0625, window=64, soft_cap=30.0),
        _heads("widest", DECODE_MANY, 8, 1, 512, scale=1.0),
        _heads("widest-window", DECODE_MANY, 2, 2, 512, scale=0.04, window=65),
        _heads("blocks", DECODE_ONE, 3, 1, 96, scale=0.1),
        _heads("empty", EMPTY, 2, 1, 16, scale=0.25),
        _heads("spans", DECODE_SPANS, 2, 1, 32, scale=0.2),
        _heads("spans-window", DECODE_SPANS, 2, 2, 16, scale=0.25, window=1000),
        _heads("sinks", DECODE_MANY, 4, 2, 64, NONE, scale=0.125),
        _heads("sinks-window-cap", DECODE_MANY, 6, 1, 32, NONE, scale=0.2, window=65, soft_cap=9.0),
    ),
    Opcode.FLASH_ATTN_BATCHED: _paged(
        _heads("two", CHUNK_TWO, 2, 1, 16, scale=0.25),
        _heads("mixed", MIXED, 4, 2, 40, scale=0.158),
        _heads("mixed-window", MIXED, 2, 1, 64, scale=0.125, window=63),
        _heads("long", CHUNK_LONG, 2, 1, 16, scale=0.25),
        _heads("long-window", CHUNK_LONG, 1, 1, 80, scale=0.1, window=17),
        _heads("start", SHORT, 2, 2, 24, scale=0.2, soft_cap=20.0),
        _heads("soft-cap", MIXED, 2, 1, 128, scale=0.09, soft_cap=5.0, window=64),
        _heads("wide-window", MIXED, 4, 2, 256, scale=1.0, window=65),
        _heads("widest", MIXED, 8, 1, 512, scale=0.04),
        _heads("widest-window", CHUNK_LONG, 2, 1, 512, scale=1.0, window=63),
        _heads("blocks", CHUNK_LONG, 3, 1, 96, scale=0.1),
        _heads("empty", EMPTY, 2, 1, 16, scale=0.25),
        _heads("spans", CHUNK_SPANS, 2, 1, 32, scale=0.2),
        _heads("spans-window", CHUNK_SPANS, 2, 2, 16, scale=0.25, window=1000),
        _heads("sinks", MIXED, 4, 2, 64, NONE, scale=0.125),
        _heads("sinks-window-cap", MIXED, 6, 1, 32, NONE, scale=0.2, window=65, soft_cap=9.0),
    ),
    Opcode.ADD: grid("tokens width", *WIDE),
    Opcode.SCALE: grid("tokens width", *WIDE, factor=0.1),
    Opcode.SOFT_CAP: grid("rows width", *WIDE, cap=30.0),
    Opcode.BIAS_ADD: grid("tokens width", *WIDE),
    Opcode.SWIGLU: activations("tokens width", *WIDE, silu=""),
    **EXPERT_STRATEGIES,
    **RECURRENT_STRATEGIES,
}
