"""Every rule of the verifier: the smallest graph that breaks it, the node and the rule it names."""

import dataclasses
import math
import re

import pytest

from contract.dtypes import F16, F32, I32, Q4_0, Q4_K, Q8_0, DType
from contract.errors import VerifyError
from contract.ir.graph import BufferKind, Graph, GraphBuilder, Node, View
from contract.ir.verify import Rule, verify
from contract.opcodes import Opcode
from contract.ops import TABLE
from contract.spec import MAX_BINDINGS, Dim, Scalar, Stage
from tests.contract.graphs import decoder
from tests.contract.small_graphs import INPUT, OUT, TMP, K, add, buffer, graph, rejected, scale


def test_a_good_graph_passes():
    verify(graph(scale("s", "in", "out")))
    verify(decoder())


def odd(kind: BufferKind, shape: tuple[Dim, ...], dtype: DType = F32) -> Graph:
    """A good graph beside a buffer that is not."""
    buffers = INPUT, OUT, buffer("odd", kind, shape, dtype)
    return graph(scale("s", "in", "out"), buffers=buffers)


def node(opcode: Opcode, params: dict[str, Scalar], **operands: str | View) -> Node:
    views = {k: v if isinstance(v, View) else View(v) for k, v in operands.items()}
    return Node("n", opcode, views, params)


def norm(**params: Scalar) -> Graph:
    return graph(node(Opcode.RMS_NORM, {"eps": 1e-6, **params}, x="in", y="out"))


SELECTED = (INPUT, buffer("rows", K.REQUEST, ("rows",), I32), buffer("y", K.OUTPUT, ("rows", 8)))
PACKED = (buffer("w", K.WEIGHT, (8, 64), Q4_0), buffer("x", K.REQUEST, ("tokens", 48)), OUT)
ROWS = (buffer("w", K.WEIGHT, (16, 64), Q4_0), buffer("x64", K.REQUEST, ("tokens", 64)), OUT,
        buffer("query", K.REQUEST, ("tokens", 4), I32),
        buffer("y64", K.OUTPUT, ("tokens", 64)))  # fmt: skip
WIDE = buffer("wide", K.REQUEST, ("tokens", 16))
ADDED = {"a": "in", "b": "in", "y": "out"}
BAD: list[tuple[Graph, str, Rule, str]] = [
    (graph(), "", Rule.NOT_EMPTY, ""),
    (graph(scale("s", "in", "tmp"), scale("s", "tmp", "out")), "s", Rule.UNIQUE_NAME, ""),
    (graph(scale("", "in", "out")), "", Rule.UNIQUE_NAME, ""),
    (Graph("g", Stage.BOTH, {"in": OUT, "out": OUT}, (scale("s", "in", "out"),)), "in",
     Rule.ONE_DECLARATION, ""),
    *((odd(K.REQUEST, shape), "odd", Rule.BUFFER_SHAPE, "")
      for shape in ((), (0, 8), (-1, 8), ("slots", 8), (8, "tokens"))),
    (odd(K.STATE, ("tokens", 8)), "odd", Rule.BUFFER_SHAPE, ""),
    (odd(K.WEIGHT, (4, 48), Q4_0), "odd", Rule.WHOLE_BLOCKS, ""),
    (odd(K.WEIGHT, (4, 128), Q4_K), "odd", Rule.WHOLE_BLOCKS, ""),
    (graph(Node("n", 4711, {}, {})), "n", Rule.KNOWN_OPCODE, ""),  # type: ignore[arg-type]
    (graph(node(Opcode.ADD, {}, a="in", y="out")), "n", Rule.OPERANDS, "b missing"),
    (graph(node(Opcode.ADD, {}, **ADDED, c="in")), "n", Rule.OPERANDS, "no operand c"),
    (graph(node(Opcode.SCALE, {}, x="in", y="out")), "n", Rule.PARAMS, "factor is missing"),
    (graph(scale("n", "in", "out", factor=1.0, bias=1.0)), "n", Rule.PARAMS, "no parameter bias"),
    *((graph(scale("n", "in", "out", factor=value)), "n", Rule.PARAMS, "")
      for value in (math.nan, math.inf, -math.inf, 1, True, "1")),
    *((norm(groups=value), "n", Rule.PARAMS, "") for value in (0, -1, 1.0, 2**31, 10**400, True)),
    *((graph(node(Opcode.SWIGLU, {"activation": value}, gate="in", up="in", y="out")), "n",
       Rule.PARAMS, "") for value in (-1, 5)),
    (graph(scale("n", "ghost", "out")), "n", Rule.DECLARED_BUFFERS, "ghost"),
    *((graph(add("n", View("in", columns), "in", "out")), "n", Rule.VIEW_COLUMNS, "")
      for columns in ((0, 9), (-1, 4), (4, 4), (5, 4))),
    (graph(node(Opcode.SELECT_ROWS, {}, x="in", output_rows=View("rows", (0, 1)), y="y"),
           buffers=SELECTED), "n", Rule.VIEW_COLUMNS, ""),
    (graph(node(Opcode.MATMUL, {}, x="x", weight=View("w", (0, 48)), y="out"), buffers=PACKED), "n",
     Rule.VIEW_COLUMNS, ""),
    *((graph(node(Opcode.MATMUL, {}, x="x64", weight=View("w", rows=rows), y="out"), buffers=ROWS),
       "n", Rule.VIEW_ROWS, "") for rows in (0, -1, 17)),
    (graph(node(Opcode.MATMUL, {}, x="x64", weight=View("w", (0, 32), 8), y="out"), buffers=ROWS),
     "n", Rule.VIEW_ROWS, ""),
    (graph(node(Opcode.MATMUL, {}, x=View("x64", rows=1), weight=View("w", rows=8), y="out"),
           buffers=ROWS), "n", Rule.VIEW_ROWS, ""),
    (graph(node(Opcode.EMBED, {}, query="query", table=View("w", rows=8), y="y64"), buffers=ROWS),
     "n", Rule.VIEW_ROWS, "reads whole matrices"),
    (graph(add("n", "in", "wide", "out"), buffers=(INPUT, WIDE, OUT)), "n", Rule.SHAPE_RULE,
     "expected 8"),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "name", "rule", "detail"), BAD)
def test_a_graph_that_breaks_a_rule(bad, name, rule, detail):
    assert detail in rejected(bad, name, rule)


def test_an_optional_operand_may_be_absent_and_others_not():
    verify(norm(groups=1))


@pytest.mark.parametrize("heads", [2, 4])
def test_heads_that_share_a_block_of_their_pages(heads):
    """A row of the pages is one head: one of 16 channels is half a block."""

    def written(head_dim: int) -> Graph:
        b = GraphBuilder("pages")
        k = b.buffer("k", BufferKind.REQUEST, F32, ("tokens", heads * head_dim))
        kv = b.buffer("kv", BufferKind.STATE, Q8_0, (1, 2, 16, heads, head_dim))
        query, pages = b.request("query", "tokens", 4), b.request("page_table", 1, 1)
        paged = {"query": query, "page_table": pages, "kv": kv}
        b.emit(Opcode.KV_WRITE_BATCHED, "w", k=k, v=k, **paged, kv_heads=heads, head_dim=head_dim)
        return b.build()

    verify(written(32))
    with pytest.raises(VerifyError, match="rows of 16 elements are not a multiple of 32") as caught:
        written(16)
    assert (caught.value.node, caught.value.rule) == ("kv", Rule.WHOLE_BLOCKS)


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        (scale("s", "in", "out", factor=math.inf), Rule.PARAMS),
        (scale("s", "in", "out", factor=2), Rule.PARAMS),
        (scale("s", "in", "out", factor=2.0, more=1), Rule.PARAMS),
        (scale("s", "half", "out"), Rule.DTYPE),
        (scale("s", "narrow", "out"), Rule.SHAPE_RULE),
        (scale("s", "tmp", "in"), Rule.WRITABLE_BUFFER),
        (scale("s", "in", "absent"), Rule.DECLARED_BUFFERS),
        (dataclasses.replace(scale("s", "in", "out"), operands={"x": View("in")}), Rule.OPERANDS),
        (
            dataclasses.replace(
                scale("s", "in", "out"), operands={"x": View("in", (0, 9)), "y": View("out")}
            ),
            Rule.VIEW_COLUMNS,
        ),
    ],
)
def test_a_node_behind_one_that_is_almost_the_same(wrong, rule):
    """Nodes that are alike are checked once: those that differ in anything are not alike."""
    others = buffer("half", K.REQUEST, dtype=F16), buffer("narrow", K.REQUEST, ("tokens", 4))
    buffers = INPUT, TMP, OUT, buffer("like out", K.OUTPUT), *others
    first = scale("first", "in", "like out")
    verify(graph(first, scale("s", "in", "out"), buffers=buffers))
    rejected(graph(first, wrong, buffers=buffers), "s", rule)


def test_a_constraint_of_the_table():
    buffers = (
        buffer("q", K.REQUEST, ("tokens", 12)), buffer("kv", K.STATE, (3, 2, 16, 2, 4)),
        buffer("pages", K.REQUEST, (1, 3), I32), buffer("query", K.REQUEST, ("tokens", 4), I32),
        buffer("y", K.OUTPUT, ("tokens", 12)),
    )  # fmt: skip
    operands = {name: View(name) for name in ("q", "kv", "query", "y")}
    operands["page_table"] = View("pages")
    params = {
        "heads": 3, "kv_heads": 2, "head_dim": 4, "scale": 0.5, "window": 0, "soft_cap": 0.0,
    }  # fmt: skip
    node = Node("n", Opcode.FLASH_ATTN_BATCHED, operands, params)
    assert "multiple of kv_heads" in rejected(graph(node, buffers=buffers), "n", Rule.CONSTRAINT)
    decode_only = dataclasses.replace(node, opcode=Opcode.FLASH_ATTN, params={**params, "heads": 2})
    rejected(graph(decode_only, buffers=buffers), "n", Rule.STAGE)


def test_masks_and_lists_fit_the_vocabulary():
    """33 tokens need two words of mask; no more of them can be listed, nor more than 20 of many."""
    buffers = (
        buffer("logits", K.REQUEST, ("rows", 33)), buffer("sampling", K.REQUEST, ("rows", 16), I32),
        buffer("recent", K.STATE, (1, 8), I32), buffer("allowed", K.STATE, (1, 1), I32),
        buffer("token", K.OUTPUT, ("rows",), I32),
    )  # fmt: skip
    operands = {decl.name: View(decl.name) for decl in buffers}
    node = Node("n", Opcode.SAMPLE, operands, {})
    assert "mask_words is 1" in rejected(graph(node, buffers=buffers), "n", Rule.CONSTRAINT)
    for vocab, top in ((33, 21), (5, 6)):
        lists = (
            buffer("logits", K.REQUEST, ("rows", vocab)),
            buffer("token", K.REQUEST, ("rows",), I32),
            buffer("chosen", K.OUTPUT, ("rows",)),
            buffer("top_ids", K.OUTPUT, ("rows", top), I32),
            buffer("top_logs", K.OUTPUT, ("rows", top)),
        )
        operands = {decl.name: View(decl.name) for decl in lists}
        node = Node("n", Opcode.LOG_PROBABILITIES, operands, {"top": top})
        expected = f"top is {top}, expected at most {top - 1}"
        assert expected in rejected(graph(node, buffers=lists), "n", Rule.CONSTRAINT)


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"head_dim": 577}, "head_dim is 577, attention is exact up to 576"),
        ({"scale": 2.0**21}, "scale is 2097152.0, attention is exact up to 2^20"),
        ({"scale": 2.0**-21}, "scale is 4.76837158203125e-07, below 9.53674e-07"),
    ],
)
def test_what_attention_cannot_do_exactly(params, problem):
    """A product would leave int32, or a score the normal numbers."""
    given = {"heads": 1, "kv_heads": 1, "head_dim": 8, "scale": 0.5, **params}
    size = int(given["head_dim"])
    b = GraphBuilder("g")
    operands = {
        "q": b.buffer("q", K.REQUEST, F32, ("tokens", size)),
        "kv": b.buffer("kv", K.STATE, F32, (3, 2, 16, 1, size)),
        "page_table": b.request("pages", 1, 3),
        "query": b.request("query", "tokens", 4),
        "y": b.output("y", "tokens", size),
    }

    def built() -> None:
        b.emit(Opcode.FLASH_ATTN_BATCHED, **operands, **given)
        b.build()

    with pytest.raises(VerifyError, match=re.escape(problem)):
        built()


def test_a_storage_type_the_operand_does_not_take():
    half = buffer("half", K.REQUEST, dtype=F16)
    bad = graph(add("n", "in", "half", "out"), buffers=(INPUT, half, OUT))
    assert "expected f32" in rejected(bad, "n", Rule.DTYPE)


def test_a_decode_op_serves_a_decode_graph_only():
    assert TABLE[Opcode.FLASH_ATTN].stages is Stage.DECODE
    b = GraphBuilder("g", Stage.DECODE)
    y = b.emit(
        Opcode.FLASH_ATTN, "n", q=b.buffer("q", K.REQUEST, F32, ("tokens", 8)),
        kv=b.buffer("kv", K.STATE, F32, (3, 2, 16, 2, 4)), page_table=b.request("pages", 1, 3),
        query=b.request("query", "tokens", 4), heads=2, kv_heads=2, head_dim=4, scale=0.5,
        y=b.output("y", "tokens", 8),
    )  # fmt: skip
    good = b.build()
    assert y == View("y")
    for stage in (Stage.BOTH, Stage.PREFILL):
        rejected(dataclasses.replace(good, stage=stage), "n", Rule.STAGE)


def test_more_buffers_than_can_be_bound(monkeypatch):
    """No opcode has more than MAX_BINDINGS operands, so the limit is lowered to reach the rule."""
    assert max(len(spec.operands) for spec in TABLE.values()) <= MAX_BINDINGS
    b = buffer("in2", K.REQUEST)
    three = graph(add("n", "in", "in2", "out"), buffers=(INPUT, b, OUT))
    monkeypatch.setattr("contract.ir.verify.MAX_BINDINGS", 3)
    verify(three)
    monkeypatch.setattr("contract.ir.verify.MAX_BINDINGS", 2)
    rejected(three, "n", Rule.BINDINGS)
    verify(graph(add("n", "in", "in", "out")))


def test_every_rule_has_a_distinct_stable_value():
    assert len({rule.value for rule in Rule}) == len(Rule)
    assert Rule("unguarded read after in-place write") is Rule.UNGUARDED_READ
