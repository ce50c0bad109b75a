"""The flat byte form of graphs: exact round trips, one encoding per graph, no damage accepted."""

import hashlib
import mmap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import CodecError, VerifyError
from contract.ir import codec
from contract.ir.codec import HEADER, SECTIONS, decode, encode, graph_digest
from contract.ir.graph import Graph
from contract.opcodes import Opcode
from contract.ops import TABLE
from tests.contract.graphs import decoder, well_formed

GRAPH = decoder()
BLOB = encode(GRAPH)
DIGEST = slice(HEADER.itemsize - 32, HEADER.itemsize)


def signed(blob: bytearray) -> bytes:
    """``blob`` with a digest that matches whatever it now holds."""
    digest = hashlib.sha256(blob[: DIGEST.start] + blob[DIGEST.stop :]).digest()
    blob[DIGEST] = digest
    return bytes(blob)


def test_a_graph_survives():
    again = decode(BLOB)
    assert again == GRAPH
    assert list(again.buffers) == list(GRAPH.buffers)
    assert encode(again) == BLOB


@pytest.mark.parametrize(
    "opcode", sorted(set(Opcode) - {Opcode.BARRIER}), ids=lambda opcode: TABLE[opcode].name
)
@settings(max_examples=10)
@given(data=st.data())
def test_every_opcode_survives(opcode, data):
    graph = data.draw(well_formed(opcode)).build()
    assert decode(encode(graph)) == graph


def test_building_a_graph_again_gives_the_same_bytes():
    assert encode(decoder()) == BLOB
    assert graph_digest(decoder()) == graph_digest(GRAPH) == BLOB[DIGEST].hex()


def test_the_order_of_arguments_does_not_show():
    """Operands and parameters are encoded in table order, whatever order they were given in."""
    nodes = tuple(
        type(node)(
            node.name,
            node.opcode,
            dict(reversed(node.operands.items())),
            dict(reversed(node.params.items())),
        )
        for node in GRAPH.nodes
    )
    assert encode(Graph(GRAPH.name, GRAPH.stage, GRAPH.buffers, nodes)) == BLOB


def test_another_graph_has_another_digest():
    assert graph_digest(decoder(1)) != graph_digest(decoder(2))


def test_a_mapped_file_decodes_in_place(tmp_path):
    """Sections are views of the mapping: the decoder's arrays do not own their memory."""
    path = tmp_path / "graph.zir"
    path.write_bytes(BLOB)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        view = memoryview(data)
        reader = codec._Reader(view, codec._header(view))
        assert not any(section.flags.owndata for section in reader._sections.values())
        assert decode(view) == GRAPH
        del reader
        view.release()


def test_sections_are_aligned():
    header = np.frombuffer(BLOB, HEADER, 1)[0]
    assert all(start % codec.ALIGNMENT == 0 for _, start, _ in codec._layout(header))
    assert len(header["sections"]) == len(SECTIONS)


def test_any_changed_byte_is_noticed():
    for offset in range(len(BLOB)):
        damaged = bytearray(BLOB)
        damaged[offset] ^= 1 << offset % 8
        with pytest.raises(CodecError):
            decode(damaged)


def test_any_truncation_is_noticed():
    for length in range(len(BLOB)):
        with pytest.raises(CodecError):
            decode(BLOB[:length])
    with pytest.raises(CodecError):
        decode(BLOB + b"\0")


@settings(max_examples=120)
@given(offset=st.integers(0, len(BLOB) - 1), change=st.integers(1, 255))
def test_a_forged_digest_gets_no_further_than_a_typed_error(offset, change):
    """Bytes that were changed and signed again decode to a verified graph or raise our errors."""
    forged = bytearray(BLOB)
    forged[offset] ^= change
    try:
        graph = decode(signed(forged))
    except (CodecError, VerifyError):
        return
    encode(graph)


def test_a_later_version_says_so():
    later = bytearray(BLOB)
    later[4:6] = (codec.IR_VERSION + 1).to_bytes(2, "little")
    with pytest.raises(CodecError, match="newer release; this build reads version 2") as caught:
        decode(signed(later))
    assert (caught.value.section, caught.value.offset) == ("header", 4)


def test_another_kind_of_file_says_so():
    with pytest.raises(CodecError, match="not a graph"):
        decode(b"GGUF" + BLOB[4:])
    with pytest.raises(CodecError, match="not a graph"):
        decode(b"")


def test_a_graph_that_breaks_a_rule_is_neither_written_nor_read(monkeypatch):
    empty = Graph(GRAPH.name, GRAPH.stage, GRAPH.buffers, ())
    with pytest.raises(VerifyError):
        encode(empty)
    with monkeypatch.context() as patch:
        patch.setattr(codec, "verify", lambda graph: None)
        blob = encode(empty)
    with pytest.raises(VerifyError):
        decode(blob)


def test_the_error_names_section_and_offset():
    forged = bytearray(BLOB)
    header = np.frombuffer(BLOB, HEADER, 1)[0]
    starts = {name: start for name, start, _ in codec._layout(header)}
    forged[starts["nodes"] + 4] = 200
    with pytest.raises(CodecError, match="opcode 200") as caught:
        decode(signed(forged))
    assert (caught.value.section, caught.value.offset) == ("nodes section", starts["nodes"])
