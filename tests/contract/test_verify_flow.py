"""Rules of the verifier on what is written, and read, when: the smallest graph that breaks each."""

import dataclasses

import pytest

from contract.ir.graph import Graph, Node, View
from contract.ir.verify import Rule, verify
from contract.spec import Dim
from tests.contract.small_graphs import (
    ACROSS,
    BARRIER,
    INPUT,
    LOADED,
    OUT,
    RIGHT,
    STORED,
    TABLE_STATE,
    TMP,
    K,
    add,
    buffer,
    graph,
    load,
    rejected,
    scale,
    store,
)


@pytest.mark.parametrize("kind", [K.SCRATCH, K.OUTPUT])
def test_reading_what_nothing_wrote(kind):
    early = buffer("early", kind)
    bad = graph(
        add("n", "in", "early", "out"), scale("m", "in", "early"), buffers=(INPUT, early, OUT)
    )
    rejected(bad, "n", Rule.READ_BEFORE_WRITE)


def test_reading_columns_of_which_some_were_not_written():
    half = buffer("half", K.REQUEST, ("tokens", 4))
    nodes = (
        add("low", "half", "half", View("tmp", (0, 4))),
        add("high", "half", "half", View("tmp", (4, 8))),
        scale("n", "tmp", "out"),
    )
    buffers = (INPUT, half, TMP, OUT)
    verify(graph(*nodes, buffers=buffers))
    for written in nodes[:2]:
        rejected(graph(written, nodes[2], buffers=buffers), "n", Rule.READ_BEFORE_WRITE)
    rejected(graph(nodes[0], nodes[2], nodes[1], buffers=buffers), "n", Rule.READ_BEFORE_WRITE)


def test_updating_what_nothing_wrote():
    table = buffer("table", K.SCRATCH, (4, 16))
    bad = graph(store("n"), load("m"), buffers=(*STORED, *LOADED, table))
    rejected(bad, "n", Rule.READ_BEFORE_WRITE)


def test_what_an_update_may_go_on_with():
    """A state, and an output: it keeps what the step before left."""
    both = store("left"), store("right", RIGHT)
    for kind in (K.OUTPUT, K.STATE):
        verify(graph(*both, buffers=(*STORED, buffer("table", kind, (4, 16)))))


@pytest.mark.parametrize("kind", [K.WEIGHT, K.CONSTANT, K.REQUEST, K.STATE])
def test_writing_what_is_not_the_steps_to_write(kind):
    shape: tuple[Dim, ...] = ("tokens", 8) if kind is K.REQUEST else (3, 8)
    target, source = buffer("target", kind, shape), buffer("source", K.REQUEST, shape)
    bad = graph(scale("n", "source", "target"), buffers=(source, target))
    rejected(bad, "n", Rule.WRITABLE_BUFFER)


@pytest.mark.parametrize("kind", [K.WEIGHT, K.CONSTANT, K.REQUEST])
def test_updating_what_is_read_only(kind):
    """A step's inputs are a snapshot: what was written there nobody would ever see."""
    bad = graph(store("n"), buffers=(*STORED, buffer("table", kind, (4, 16))))
    rejected(bad, "n", Rule.WRITABLE_BUFFER)
    verify(graph(store("n"), buffers=(*STORED, TABLE_STATE)))


def test_two_writers_of_one_buffer():
    bad = graph(scale("first", "in", "out"), scale("n", "in", "out"))
    assert "first already wrote" in rejected(bad, "n", Rule.DISJOINT_WRITES)


@pytest.mark.parametrize("second", [(3, 7), None])
def test_two_writers_of_overlapping_columns(second):
    """A slice conflicts with an overlapping slice and with the whole buffer."""
    width = 8 if second is None else 4
    source = buffer("source", K.REQUEST, ("tokens", width))
    half = buffer("half", K.REQUEST, ("tokens", 4))
    bad = graph(
        add("first", "half", "half", View("out", (0, 4))),
        add("n", "source", "source", View("out", second)),
        buffers=(half, source, OUT),
    )
    rejected(bad, "n", Rule.DISJOINT_WRITES)


def test_writing_an_input_of_the_same_node():
    bad = graph(scale("m", "in", "tmp"), scale("n", "tmp", "tmp"), buffers=(INPUT, TMP))
    rejected(bad, "n", Rule.ALIASED_OPERANDS)
    verify(graph(add("n", "in", "in", "out")))


def table_graph(*nodes: Node) -> Graph:
    return graph(*nodes, buffers=(*STORED, *LOADED, TABLE_STATE))


def test_reading_after_an_update_needs_a_barrier():
    update, read = store("update"), load("n")
    verify(table_graph(update, BARRIER, read))
    detail = rejected(table_graph(update, read), "n", Rule.UNGUARDED_READ)
    assert "update; put a barrier" in detail
    rejected(table_graph(BARRIER, update, read), "n", Rule.UNGUARDED_READ)


def test_updating_after_an_update_needs_a_barrier():
    first, second = store("first"), store("n")
    tail = (dataclasses.replace(BARRIER, name="f2"), load("end"))
    verify(table_graph(first, BARRIER, second, *tail))
    rejected(table_graph(first, second, *tail), "n", Rule.UNGUARDED_READ)


def test_reading_other_columns_than_were_updated_needs_none():
    update = store("update")
    verify(table_graph(update, load("n", RIGHT)))
    rejected(table_graph(update, load("n", ACROSS)), "n", Rule.UNGUARDED_READ)


def test_an_output_nothing_writes():
    extra = buffer("extra", K.OUTPUT)
    bad = graph(scale("n", "in", "out"), buffers=(INPUT, OUT, extra))
    rejected(bad, "extra", Rule.OUTPUT_WRITTEN)


def test_an_output_of_which_some_columns_are_not_written():
    half = buffer("half", K.REQUEST, ("tokens", 4))
    bad = graph(add("n", "half", "half", View("out", (0, 4))), buffers=(half, OUT))
    rejected(bad, "out", Rule.OUTPUT_WRITTEN)
