"""The builder of graphs. It also exports the records of ``contract.ir.nodes``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from contract.dtypes import F32, I32, DType
from contract.errors import VerifyError
from contract.ir.nodes import BufferDecl, BufferKind, Graph, Node, View
from contract.ir.verify import Rule, signature_problems, verify
from contract.opcodes import Opcode
from contract.ops import TABLE
from contract.spec import Access, Dim, OpSpec, Scalar, ShapeMismatch, Stage, bind_shapes, shape_of

__all__ = ["BufferDecl", "BufferKind", "Graph", "GraphBuilder", "Node", "View"]


class GraphBuilder:
    """Collects buffers and nodes; ``build()`` verifies and freezes them.

    ``emit`` declares the scratch buffers of a node's outputs by the opcode's shape rule, so that
    the code of a model family reads like its formulas."""

    def __init__(self, name: str, stage: Stage = Stage.BOTH) -> None:
        self.name = name
        self.stage = stage
        self._buffers: dict[str, BufferDecl] = {}
        self._nodes: list[Node] = []
        self._names: dict[str, int] = {}

    def buffer(
        self, name: str, kind: BufferKind, dtype: DType, shape: Iterable[Dim], source: str = ""
    ) -> View:
        """Declare a buffer; a second identical declaration returns the same view."""
        decl = BufferDecl(name, kind, dtype, tuple(shape), source)
        known = self._buffers.setdefault(name, decl)
        if known != decl:
            raise VerifyError(
                self.name, name, Rule.ONE_DECLARATION, f"declared as {known}, again as {decl}"
            )
        return View(name)

    def request(self, name: str, *shape: Dim) -> View:
        """Declare a step input of 32-bit words."""
        return self.buffer(name, BufferKind.REQUEST, I32, shape)

    def scratch(self, name: str, *shape: Dim, dtype: DType = F32) -> View:
        """Declare a named activation buffer, for nodes that write column ranges of it."""
        return self.buffer(name, BufferKind.SCRATCH, dtype, shape)

    def output(self, name: str, *shape: Dim, dtype: DType = F32) -> View:
        """Declare a buffer that the host reads after the step."""
        return self.buffer(name, BufferKind.OUTPUT, dtype, shape)

    def barrier(self) -> None:
        """Append a BARRIER: in-place writes before it are complete before later reads."""
        empty: Mapping[str, View] = MappingProxyType({})
        self._nodes.append(
            Node(self._unique("barrier"), Opcode.BARRIER, empty, MappingProxyType({}))
        )

    def emit(self, opcode: Opcode, label: str = "", /, **arguments: View | Scalar | None) -> View:
        """Append a node and return the view of its result.

        The result is the first operand the opcode writes or, when it writes none, updates.
        Arguments are operands (views) and parameters (numbers) by name; None means absent. An
        omitted output gets a scratch buffer of the shape the opcode's rule gives; a parameter with
        a default may be omitted. Raises VerifyError on a bad argument or shape."""
        spec = TABLE[opcode]
        if not spec.outputs:
            raise VerifyError(self.name, spec.name, Rule.OPERANDS, "has no result; use barrier()")
        name = self._unique(label or spec.name)
        operands = {k: v for k, v in arguments.items() if isinstance(v, View)}
        params = self._params(spec, name, arguments)
        for rule, problem in signature_problems(Node(name, opcode, operands, params)):
            raise VerifyError(self.name, name, rule, problem)
        try:
            self._complete(spec, name, operands, params)
        except ShapeMismatch as error:
            raise VerifyError(self.name, name, Rule.SHAPE_RULE, str(error)) from None
        self._nodes.append(Node(name, opcode, MappingProxyType(operands), MappingProxyType(params)))
        written = [o for o in spec.outputs if o.access is Access.WRITE]
        return operands[(written or spec.outputs)[0].name]

    def build(self) -> Graph:
        """Freeze and verify the graph. Raises VerifyError naming the node and the rule."""
        graph = Graph(
            self.name, self.stage, MappingProxyType(dict(self._buffers)), tuple(self._nodes)
        )
        verify(graph)
        return graph

    def _params(
        self, spec: OpSpec, name: str, arguments: Mapping[str, View | Scalar | None]
    ) -> dict[str, Scalar]:
        """The node's parameters in table order, with defaults filled in and integers converted to
        float."""
        given: dict[str, Scalar] = {}
        for key, value in arguments.items():
            if isinstance(value, (int, float)):
                given[key] = value
            elif not isinstance(value, View) and value is not None:
                raise VerifyError(
                    self.name, name, Rule.OPERANDS, f"{key} is {value!r}, not a view or a number"
                )
        params: dict[str, Scalar] = {}
        for param in spec.params:
            value = given.pop(param.name, param.default)
            if value is not None:
                widen = param.kind is float and type(value) is int
                params[param.name] = float(value) if widen else value
        return params | given

    def _complete(
        self, spec: OpSpec, name: str, operands: dict[str, View], params: Mapping[str, Scalar]
    ) -> None:
        """Declare a scratch buffer for every omitted output of ``spec``. Raises ShapeMismatch."""
        written = [o for o in spec.operands if o.access is Access.WRITE]
        shapes = {key: self._shape(view) for key, view in operands.items()}
        bound = bind_shapes(spec, shapes, params)
        for output in written:
            if output.name in operands or output.optional:
                continue
            buffer = name if len(written) == 1 else f"{name}.{output.name}"
            operands[output.name] = self.buffer(
                f"scratch.{buffer}", BufferKind.SCRATCH, output.dtypes[0], shape_of(output, bound)
            )

    def _shape(self, view: View) -> tuple[Dim, ...]:
        decl = self._buffers.get(view.buffer)
        if decl is None:
            raise ShapeMismatch(f"{view.buffer} is not declared")
        return view.shape(decl.shape)

    def _unique(self, label: str) -> str:
        count = self._names.get(label, 0)
        self._names[label] = count + 1
        return f"{label}.{count}" if count else label
