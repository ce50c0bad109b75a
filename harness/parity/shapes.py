"""The sizes and parameters each opcode is tested with: one entry of STRATEGIES per opcode.

A shape names every dimension of the opcode's table row that its parameters do not bind. ``runs``
lists the tokens of the step as (slot, first position, count); the numbers of tokens and slots and
the page-table size follow from it. Names after the sizes of a row are operands that are absent."""

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
    listed,
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
                {"tokens": t, "hidden": k, **dict(zip(outputs, width, strict=False)), "eps": 1e-5},
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
    return OpShape(f"{label}-{heads}x{kv_heads}x{head_dim}", given, runs, absent)


def _paged(shapes: Strategy) -> Strategy:
    """The shapes whose heads are whole blocks of the pages' storage type."""

    def strategy(dtype: DType | None) -> tuple[OpShape, ...]:
        block = dtype.block_elements if dtype is not None else 1
        return tuple(shape for shape in shapes(dtype) if shape.given["head_dim"] % block == 0)

    return strategy


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
    Opcode.LOG_PROBABILITIES: grid(
        "rows vocab top",
        *((1, 1, 1), (3, 257, 20), (17, 1000, 5), (5, 5000, 20), (2, 20, 20), (0, 7, 2)),
    ),
    Opcode.ROW_DIGEST: listed(
        "rows vocab digest_words",
        *(
            (rows, vocab, digest_words(vocab))
            for rows, vocab in ((1, 1), (3, 257), (2, 1024), (5, 2100), (2, 20000), (0, 7))
        ),
        label="{rows}x{vocab}",
    ),
    Opcode.MAP_TOKENS: grid("rows vocab", (1, 1), (3, 257), (65, 40), (0, 8)),
    Opcode.STREAM_OUT: listed(
        "rows ring_events runs",
        *((1, 1, DECODE_ONE), (5, 8, DECODE_MANY), (9, 16, MIXED), (0, 4, MIXED)),
        label="{rows}x{ring_events}",
    ),
    Opcode.LOAD_REQUEST_STATE: listed(
        "label recent_tokens runs",
        ("one", 1, DECODE_ONE),
        ("many", 8, DECODE_MANY),
        ("mixed", 64, MIXED),
        ("wrapped", 7, CHUNK_LONG),
        ("empty", 4, EMPTY),
        label="{label}-{recent_tokens}",
    ),
    Opcode.STORE_REQUEST_STATE: listed(
        "rows runs", *((1, DECODE_ONE), (5, DECODE_MANY), (12, MIXED), (0, MIXED)), label="{rows}"
    ),
    Opcode.COPY_ROWS: grid(
        "sources targets width rows", (1, 1, 1, 1), (9, 4, 257, 3), (3, 17, 1300, 17), (2, 2, 8, 0)
    ),
    Opcode.VERIFY_K: listed(
        "rows ring_events draft_tokens runs",
        (1, 4, 1, DECODE_ONE),
        (5, 8, 3, DECODE_MANY),
        (15, 64, 3, MIXED),
        (17, 64, 16, MIXED),
        (60, 256, 16, CHUNK_LONG),
        (9, 4, 2, MIXED),
        (0, 4, 3, MIXED),
        label="{rows}x{draft_tokens}",
    ),
    Opcode.RMS_NORM: listed(
        "label tokens groups width",
        ("whole", 3, 1, 257),
        ("span", 2, 1, 1300),
        ("heads", 17, 4, 40),
        ("bare", 2, 3, 80, "weight"),
        ("single", 1, 1, 1),
        ("empty", 0, 2, 16),
        eps=1e-5,
    ),
    Opcode.RESIDUAL_RMS_NORM: grid(
        "tokens hidden", (1, 1), (3, 257), (17, 1300), (0, 40), eps=1e-6
    ),
    Opcode.MATMUL: _product("tokens", "inner", "outputs"),
    Opcode.RMS_NORM_FUSED_QKV: _fused_product("q_width", "kv_width"),
    Opcode.RMS_NORM_FUSED_MLP_GATE_UP: _fused_product("width"),
    Opcode.ROPE: listed(
        "label runs heads head_dim rotary_pairs neox",
        ("interleaved", MIXED, 2, 16, 8, 0),
        ("neox", MIXED, 3, 40, 20, 1),
        ("interleaved-partial", CHUNK_LONG, 2, 80, 16, 0),
        ("neox-partial", DECODE_MANY, 1, 256, 32, 1),
        ("neox-empty", EMPTY, 2, 16, 8, 1),
    ),
    Opcode.KV_WRITE_BATCHED: _paged(
        listed(
            "label runs kv_heads head_dim",
            ("mixed", MIXED, 2, 16),
            ("decode", DECODE_MANY, 1, 80),
            ("chunk", CHUNK_LONG, 3, 40),
            ("empty", EMPTY, 1, 16),
            ("blocks", MIXED, 2, 96),
            ("wide", DECODE_MANY, 1, 576),
            ("blocks-empty", EMPTY, 1, 32),
        )
    ),
    Opcode.RMS_NORM_FUSED_ROPE_KV_WRITE: _paged(
        listed(
            "label runs heads kv_heads head_dim qkv_width rotary_pairs neox",
            ("neox", MIXED, 4, 2, 16, 128, 8, 1),
            ("interleaved-bare", DECODE_MANY, 2, 1, 40, 160, 20, 0, "q_norm", "k_norm"),
            ("neox-partial", CHUNK_LONG, 2, 2, 64, 384, 16, 1, "q_norm"),
            ("interleaved-empty", EMPTY, 2, 1, 16, 64, 8, 0),
            ("interleaved-wide", MIXED, 2, 1, 256, 1024, 32, 0),
            eps=1e-6,
        )
    ),
    Opcode.FLASH_ATTN: _paged(
        always(
            _heads("one", DECODE_ONE, 1, 1, 16, scale=0.25),
            _heads("many", DECODE_MANY, 4, 2, 40, scale=0.158),
            _heads("window", DECODE_MANY, 3, 1, 64, scale=0.125, window=65),
            _heads("window-one", DECODE_MANY, 2, 2, 80, scale=0.1, window=1),
            _heads("soft-cap", DECODE_MANY, 2, 1, 128, scale=0.09, soft_cap=5.0),
            _heads("wide", DECODE_MANY, 2, 1, 256, scale=0.0625, window=64, soft_cap=30.0),
            _heads("widest", DECODE_MANY, 8, 1, 512, scale=1.0),
            _heads("widest-window", DECODE_MANY, 2, 2, 512, scale=0.04, window=65),
            _heads("latent", DECODE_MANY, 5, 1, 576, scale=0.07),
            _heads("blocks", DECODE_ONE, 3, 1, 96, scale=0.1),
            _heads("empty", EMPTY, 2, 1, 16, scale=0.25),
            _heads("spans", DECODE_SPANS, 2, 1, 32, scale=0.2),
            _heads("spans-window", DECODE_SPANS, 2, 2, 16, scale=0.25, window=1000),
            _heads("chunk", DECODE_MANY, 3, 1, 64, scale=0.125, window=-37),
            _heads("spans-chunk", DECODE_SPANS, 2, 2, 16, scale=0.25, window=-1100),
            _heads("sinks", DECODE_MANY, 4, 2, 64, NONE, scale=0.125),
            _heads(
                "sinks-window-cap", DECODE_MANY, 6, 1, 32, NONE, scale=0.2, window=65, soft_cap=9.0
            ),
        )
    ),
    Opcode.FLASH_ATTN_BATCHED: _paged(
        always(
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
            _heads("latent", MIXED, 3, 1, 576, scale=0.07),
            _heads("blocks", CHUNK_LONG, 3, 1, 96, scale=0.1),
            _heads("empty", EMPTY, 2, 1, 16, scale=0.25),
            _heads("spans", CHUNK_SPANS, 2, 1, 32, scale=0.2),
            _heads("spans-window", CHUNK_SPANS, 2, 2, 16, scale=0.25, window=1000),
            _heads("mixed-chunk", MIXED, 4, 2, 128, scale=0.09, window=-19),
            _heads("long-chunk", CHUNK_LONG, 2, 1, 64, scale=0.125, window=-48),
            _heads("spans-chunk", CHUNK_SPANS, 2, 2, 16, scale=0.25, window=-1100),
            _heads("sinks", MIXED, 4, 2, 64, NONE, scale=0.125),
            _heads("sinks-window-cap", MIXED, 6, 1, 32, NONE, scale=0.2, window=65, soft_cap=9.0),
        )
    ),
    Opcode.ADD: grid("tokens width", *WIDE),
    Opcode.SCALE: grid("tokens width", *WIDE, factor=0.1),
    Opcode.XIELU: grid("tokens width", *WIDE),
    Opcode.SOFT_CAP: grid("rows width", *WIDE, cap=30.0),
    Opcode.BIAS_ADD: grid("tokens width", *WIDE),
    Opcode.SWIGLU: activations("tokens width", *WIDE, silu=""),
    **EXPERT_STRATEGIES,
    **RECURRENT_STRATEGIES,
}
