"""The byte format of a graph, for files, memory maps, hashes and comparisons.

Little-endian. A fixed header gives the number of entries of each section. The sections follow in a
fixed order, each at a multiple of 8 bytes, so the header alone determines every offset and a mapped
file is read in place. A SHA-256 in the header covers every other byte. Operands and parameters are
written in table order and strings in order of first use, so a graph has exactly one encoding."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from contract.arrays import Array
from contract.dtypes import BY_NAME
from contract.errors import CodecError
from contract.ir.nodes import IR_VERSION, BufferDecl, BufferKind, Graph, Node, View
from contract.ir.verify import verify
from contract.opcodes import Opcode
from contract.ops import TABLE
from contract.records import record
from contract.shape_key import SYMBOLS
from contract.spec import Dim, Scalar, Stage

MAGIC = b"ZIRG"
ALIGNMENT = 8
WHOLE, FIRST_ROWS = -1, -2
"""The start of an operand that is a whole buffer, as its stop is, or its first ``stop`` rows."""
INTEGER, REAL = 0, 1

Item = TypeVar("Item")


SECTIONS = {
    "text": np.dtype("u1"),
    "strings": record("u4 start size"),
    "dims": np.dtype("<i8"),
    "buffers": record("u4 name source, u2 dtype kind, u4 first_dim dims"),
    "operands": record("u4 name buffer, i8 start stop"),
    "params": record("u4 name kind, u8 bits"),
    "nodes": record("u4 name opcode first_operand operands first_param params"),
}
"""Sections in file order. A dimension below 0 means the symbol ``SYMBOLS[-1 - dimension]``."""

HEADER = record(f"V4 magic, u2 version stage, u4 name sections[{len(SECTIONS)}], V32 sha256")
_DIGEST = slice(HEADER.itemsize - 32, HEADER.itemsize)

_DTYPES = {dtype.ggml_id: dtype for dtype in BY_NAME.values()}
_KINDS = {kind.value: kind for kind in BufferKind}
_OPCODES = {opcode.value: opcode for opcode in Opcode}


def encode(graph: Graph) -> bytes:
    """Encode a graph; equal graphs have equal bytes. Raises VerifyError."""
    verify(graph)
    writer = _Writer()
    header = np.zeros((), HEADER)
    header["magic"] = np.void(MAGIC)
    header["version"] = IR_VERSION
    header["stage"] = graph.stage.value
    header["name"] = writer.string(graph.name)
    indices = {name: index for index, name in enumerate(graph.buffers)}
    for decl in graph.buffers.values():
        writer.buffer(decl)
    for node in graph.nodes:
        writer.node(node, indices)
    sections = writer.sections()
    header["sections"] = [len(section) for section in sections.values()]
    blob = bytearray(header.tobytes())
    for section in sections.values():
        blob += bytes(-len(blob) % ALIGNMENT) + section.tobytes()
    blob[_DIGEST] = _digest(memoryview(blob))
    return bytes(blob)


def graph_digest(graph: Graph) -> str:
    """The SHA-256 in the encoded graph's header, in hexadecimal."""
    return encode(graph)[_DIGEST].hex()


def decode(buffer: bytes | bytearray | memoryview) -> Graph:
    """Decode and verify the graph in ``buffer``.

    Sections are viewed in place. Raises CodecError naming the section and the byte offset, or
    VerifyError when the bytes are intact but the graph breaks a rule."""
    data = memoryview(buffer).cast("B")
    header = _header(data)
    reader = _Reader(data, header)
    graph = reader.graph(int(header["name"]), int(header["stage"]))
    verify(graph)
    return graph


def _digest(data: memoryview) -> bytes:
    digest = hashlib.sha256(data[: _DIGEST.start])
    digest.update(data[_DIGEST.stop :])
    return digest.digest()


def _damaged(problem: str, offset: int) -> CodecError:
    return CodecError(problem, section="header", offset=offset)


def _header(data: memoryview) -> np.void:
    """Return the header after every check that needs no section."""
    if bytes(data[: len(MAGIC)]) != MAGIC[: len(data)] or not data:
        raise _damaged(f"not a graph: no {MAGIC!r} magic", 0)
    if len(data) < HEADER.itemsize:
        raise _damaged("the file ends inside its header", len(data))
    header: np.void = np.frombuffer(data, HEADER, 1)[0]
    version = int(header["version"])
    if version != IR_VERSION:
        age = "from a newer release" if version > IR_VERSION else "no longer readable"
        raise _damaged(f"version {version} is {age}; this build reads version {IR_VERSION}", 4)
    end = _layout(header)[-1][2]
    if end != len(data):
        problem = f"the sections end at byte {end}, the file at {len(data)}"
        raise _damaged(problem, min(end, len(data)))
    if _digest(data) != bytes(data[_DIGEST]):
        raise _damaged("SHA-256 does not match the contents: the file is damaged", _DIGEST.start)
    return header


def _layout(header: np.void) -> list[tuple[str, int, int]]:
    """(section, first byte, byte after the last) in file order."""
    sections = []
    end = HEADER.itemsize
    for (name, dtype), count in zip(SECTIONS.items(), header["sections"], strict=True):
        start = end + -end % ALIGNMENT
        end = start + int(count) * dtype.itemsize
        sections.append((name, start, end))
    return sections


@dataclass(slots=True)
class _Writer:
    """Collects the rows of every section."""

    text: bytearray = field(default_factory=bytearray)
    known: dict[str, int] = field(default_factory=dict)
    rows: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in SECTIONS})

    def string(self, value: str) -> int:
        """The number of a string, which is added when it is new."""
        if value not in self.known:
            raw = value.encode()
            self.rows["strings"].append((len(self.text), len(raw)))
            self.text += raw
            self.known[value] = len(self.known)
        return self.known[value]

    def buffer(self, decl: BufferDecl) -> None:
        """Append one declaration."""
        dims = self.rows["dims"]
        first = len(dims)
        dims += [-1 - SYMBOLS.index(d) if isinstance(d, str) else d for d in decl.shape]
        names = self.string(decl.name), self.string(decl.source)
        record = (*names, decl.dtype.ggml_id, decl.kind.value, first, len(decl.shape))
        self.rows["buffers"].append(record)

    def node(self, node: Node, indices: dict[str, int]) -> None:
        """Append one node; ``indices`` maps buffer names to their numbers."""
        spec = TABLE[node.opcode]
        operands, params = self.rows["operands"], self.rows["params"]
        first_operand, first_param = len(operands), len(params)
        for operand in spec.operands:
            view = node.operands.get(operand.name)
            if view is not None:
                start, stop = view.columns or (WHOLE, WHOLE)
                if view.rows is not None:
                    start, stop = FIRST_ROWS, view.rows
                operands.append((self.string(operand.name), indices[view.buffer], start, stop))
        for param in spec.params:
            value = node.params[param.name]
            kind, dtype = (REAL, "<f8") if isinstance(value, float) else (INTEGER, "<i8")
            bits = int(np.array(value, dtype).view("<u8"))
            params.append((self.string(param.name), kind, bits))
        operand_count, param_count = len(operands) - first_operand, len(params) - first_param
        record = (node.opcode.value, first_operand, operand_count, first_param, param_count)
        self.rows["nodes"].append((self.string(node.name), *record))

    def sections(self) -> dict[str, Array]:
        """The arrays, in file order."""
        arrays = {name: np.array(self.rows[name], dtype) for name, dtype in SECTIONS.items()}
        arrays["text"] = np.frombuffer(bytes(self.text), np.uint8)
        return arrays


class _Reader:
    """Views of a file's sections; every reference between them is checked."""

    def __init__(self, data: memoryview, header: np.void) -> None:
        self._starts: dict[str, int] = {}
        self._sections: dict[str, Array] = {}
        for name, start, end in _layout(header):
            self._starts[name] = start
            self._sections[name] = np.frombuffer(data[start:end], SECTIONS[name])
        self._strings = [self._string(row) for row in range(len(self._sections["strings"]))]

    def graph(self, name: int, stage: int) -> Graph:
        """Assemble the graph. Raises CodecError on a reference or number out of range."""
        if not 1 <= stage <= Stage.BOTH.value:
            raise _damaged(f"stage {stage} is unknown", 6)
        if name >= len(self._strings):
            raise _damaged(f"string {name} does not exist", 8)
        decls = [self._buffer(row) for row in range(len(self._sections["buffers"]))]
        buffers = {decl.name: decl for decl in decls}
        if len(buffers) != len(decls):
            raise self._error("buffers", 0, "two buffers have one name")
        nodes = tuple(self._node(row, decls) for row in range(len(self._sections["nodes"])))
        return Graph(self._strings[name], Stage(stage), MappingProxyType(buffers), nodes)

    def _error(self, section: str, row: int, problem: str) -> CodecError:
        offset = self._starts[section] + row * SECTIONS[section].itemsize
        return CodecError(problem, section=f"{section} section", offset=offset)

    def _range(self, section: str, row: int, target: str, first: int, count: int) -> range:
        if first + count > len(self._sections[target]):
            raise self._error(
                section, row, f"{target} {first}..{first + count} reach past the section"
            )
        return range(first, first + count)

    def _string(self, row: int) -> str:
        start, size = (int(value) for value in self._sections["strings"][row])
        text = self._range("strings", row, "text", start, size)
        try:
            return self._sections["text"][text.start : text.stop].tobytes().decode()
        except UnicodeDecodeError:
            raise self._error("strings", row, "is not UTF-8") from None

    def _named(self, section: str, row: int, number: int) -> str:
        if number >= len(self._strings):
            raise self._error(section, row, f"string {number} does not exist")
        return self._strings[number]

    def _buffer(self, row: int) -> BufferDecl:
        name, source, ggml_id, kind, first, count = self._sections["buffers"][row].item()
        dims = tuple(self._dim(at) for at in self._range("buffers", row, "dims", first, count))
        dtype = _DTYPES.get(ggml_id)
        if dtype is None:
            raise self._error("buffers", row, f"storage type {ggml_id} is unknown")
        if kind not in _KINDS:
            raise self._error("buffers", row, f"buffer kind {kind} is unknown")
        return BufferDecl(
            self._named("buffers", row, name),
            _KINDS[kind],
            dtype,
            dims,
            self._named("buffers", row, source),
        )

    def _dim(self, row: int) -> Dim:
        value = int(self._sections["dims"][row])
        if value >= 0:
            return value
        if -1 - value >= len(SYMBOLS):
            raise self._error("dims", row, f"symbol {-1 - value} is unknown")
        return SYMBOLS[-1 - value]

    def _node(self, row: int, decls: list[BufferDecl]) -> Node:
        record = self._sections["nodes"][row].item()
        name, opcode, first_operand, operand_count, first_param, param_count = record
        if opcode not in _OPCODES:
            raise self._error("nodes", row, f"opcode {opcode} is unknown to this build")
        operands = self._range("nodes", row, "operands", first_operand, operand_count)
        params = self._range("nodes", row, "params", first_param, param_count)
        return Node(
            self._named("nodes", row, name),
            _OPCODES[opcode],
            self._unique("nodes", row, (self._operand(at, decls) for at in operands)),
            self._unique("nodes", row, (self._param(at) for at in params)),
        )

    def _unique(
        self, section: str, row: int, items: Iterable[tuple[str, Item]]
    ) -> MappingProxyType[str, Item]:
        collected = list(items)
        mapping = dict(collected)
        if len(mapping) != len(collected):
            raise self._error(section, row, "names an operand or parameter twice")
        return MappingProxyType(mapping)

    def _operand(self, row: int, decls: list[BufferDecl]) -> tuple[str, View]:
        name, buffer, start, stop = self._sections["operands"][row].item()
        if buffer >= len(decls):
            raise self._error("operands", row, f"buffer {buffer} does not exist")
        columns = None if start == stop == WHOLE or start == FIRST_ROWS else (start, stop)
        rows = stop if start == FIRST_ROWS else None
        return self._named("operands", row, name), View(decls[buffer].name, columns, rows)

    def _param(self, row: int) -> tuple[str, Scalar]:
        name, kind, bits = self._sections["params"][row].item()
        if kind not in (INTEGER, REAL):
            raise self._error("params", row, f"parameter kind {kind} is unknown")
        raw = np.array(bits, "<u8")
        value = float(raw.view("<f8")) if kind == REAL else int(raw.view("<i8"))
        return self._named("params", row, name), value
