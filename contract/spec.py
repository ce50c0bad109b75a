"""The records of an opcode table row, and the shape rule derived from them.

Dimensions are written as strings: a name (``tokens``), a literal (``2``) or a product of names
(``heads*head_dim``). An integer parameter of a node binds the name of the same spelling; every
other name is bound by the first operand that has it and must agree in all others. A bound value is
an integer, or a symbol (``tokens``, ``rows``) that a ShapeKey replaces later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from enum import Enum, Flag, auto
from functools import lru_cache

from contract import dtypes
from contract.dtypes import DType
from contract.lazy_dataclass import dataclass
from contract.opcodes import Opcode

Dim = int | str
Scalar = int | float
Bindings = dict[str, Dim]

MAX_CACHED_SHAPES = 4096
"""Size of the cache of bound shapes; the layers of a model repeat a few dozen."""
MAX_BINDINGS = 8
"""Most distinct buffers of one node: every device can bind this many without an indirection
table."""


class Stage(Flag):
    """The kind of step an opcode or a graph can run in."""

    PREFILL = auto()
    DECODE = auto()
    BOTH = PREFILL | DECODE


ACTIVATION = (dtypes.F32,)
INDEX = (dtypes.I32,)
WEIGHT = dtypes.WEIGHT_DTYPES
KV = dtypes.KV_DTYPES


class Access(Enum):
    """The access of a node to an operand."""

    READ = "read"
    WRITE = "write"
    UPDATE = "update"
    """Read and written in place; a later reader needs a BARRIER in between."""


@dataclass(frozen=True, slots=True)
class Operand:
    """One named operand of an opcode."""

    name: str
    dims: tuple[str, ...]
    dtypes: tuple[DType, ...]
    access: Access = Access.READ
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Param:
    """One scalar parameter, fixed when the graph is built. ``choices`` names the values 0, 1 and so
    on."""

    name: str
    kind: type[int] | type[float]
    unit: str
    default: Scalar | None = None
    minimum: float | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Work:
    """The sizes a cost is computed for: the bound dimensions, and ``context``, the mean number of
    positions that a query token attends to."""

    dims: Mapping[str, int]
    context: int

    def __getitem__(self, name: str) -> int:
        return self.dims[name]


@dataclass(frozen=True, slots=True, eq=False)
class OpSpec:
    """One opcode: operands, parameters, shape rule, arithmetic rule and cost.

    ``flops`` counts the multiplications and additions of the rule as written. ``touched`` maps an
    operand's name to the number of its elements that are read, where that is not all of them: an
    embedding lookup reads rows, attention reads the context and not the whole pool. ``stored``
    names the updated operands whose old contents are not read (a scatter). ``constraint`` returns a
    sentence for a node whose dimensions or parameters it rejects."""

    opcode: Opcode
    operands: tuple[Operand, ...]
    params: tuple[Param, ...]
    rule: str
    formula: str
    stages: Stage = Stage.BOTH
    flops: Callable[[Work], int] = lambda work: 0
    touched: Mapping[str, Callable[[Work], int]] = field(default_factory=dict)
    stored: tuple[str, ...] = ()
    constraint: Callable[[Mapping[str, Dim], Mapping[str, Scalar]], str | None] = (
        lambda dims, params: None
    )

    @property
    def name(self) -> str:
        """The lower-case name, which the numpy module, the kernels and the tests share."""
        return self.opcode.name.lower()

    @property
    def inputs(self) -> tuple[Operand, ...]:
        """Operands the node reads, updated ones included."""
        return tuple(o for o in self.operands if o.access is not Access.WRITE)

    @property
    def outputs(self) -> tuple[Operand, ...]:
        """Operands the node writes, updated ones included."""
        return tuple(o for o in self.operands if o.access is not Access.READ)

    def operand(self, name: str) -> Operand:
        """The operand called ``name``; raises KeyError when there is none."""
        for operand in self.operands:
            if operand.name == name:
                return operand
        raise KeyError(name)


class ShapeMismatch(Exception):
    """A shape that does not fit its operand; the message is the sentence the verifier reports."""


def _factor(text: str, bound: Mapping[str, Dim]) -> Dim | None:
    return int(text) if text.isdigit() else bound.get(text)


def _match(expression: str, actual: Dim, bound: Bindings) -> bool:
    """Check one dimension and bind the only unbound name in it; False while several are unbound."""
    factors = expression.split("*")
    if len(factors) == 1 and _factor(expression, bound) is None:
        bound[expression] = actual
        return True
    unknown = [name for name in factors if _factor(name, bound) is None]
    if len(unknown) > 1:
        return False
    known = 1
    for name in factors:
        value = _factor(name, bound)
        if value is None:
            continue
        if isinstance(value, str):
            if len(factors) > 1 or value != actual:
                raise ShapeMismatch(f"{expression} is {actual}, expected {value}")
            return True
        known *= value
    if not unknown:
        if known != actual:
            raise ShapeMismatch(f"{expression} is {actual}, expected {known}")
        return True
    if isinstance(actual, str) or actual % known:
        raise ShapeMismatch(f"{expression} is {actual}, not a multiple of {known}")
    bound[unknown[0]] = actual // known
    return True


def bind_shapes(
    spec: OpSpec, shapes: Mapping[str, tuple[Dim, ...]], params: Mapping[str, Scalar]
) -> Bindings:
    """Bind every dimension name of ``spec`` from operand shapes and integer parameters. Raises
    ShapeMismatch when a rank or a dimension disagrees, or when a name of a given operand cannot be
    determined."""
    numbers = tuple(
        (p.name, int(params[p.name])) for p in spec.params if p.kind is int and p.name in params
    )
    return dict(_bound(spec, tuple(shapes.items()), numbers))


@lru_cache(MAX_CACHED_SHAPES)
def _bound(
    spec: OpSpec,
    shapes: tuple[tuple[str, tuple[Dim, ...]], ...],
    numbers: tuple[tuple[str, int], ...],
) -> Bindings:
    bound: Bindings = dict(numbers)
    pending: list[tuple[str, str, Dim]] = []
    given = dict(shapes)
    for operand in spec.operands:
        shape = given.get(operand.name)
        if shape is None:
            continue
        if len(shape) != len(operand.dims):
            raise ShapeMismatch(
                f"{operand.name} has {len(shape)} dimensions, expected "
                f"{len(operand.dims)} ({', '.join(operand.dims)})"
            )
        pending += [(operand.name, e, a) for e, a in zip(operand.dims, shape, strict=True)]
    while pending:
        waiting = []
        for name, expression, actual in pending:
            try:
                if not _match(expression, actual, bound):
                    waiting.append((name, expression, actual))
            except ShapeMismatch as error:
                raise ShapeMismatch(f"{name}: {error}") from None
        if len(waiting) == len(pending):
            raise ShapeMismatch(f"{waiting[0][0]}: {waiting[0][1]} is not determined")
        pending = waiting
    return bound


def shape_of(operand: Operand, bound: Mapping[str, Dim]) -> tuple[Dim, ...]:
    """The shape of an operand once its names are bound; raises ShapeMismatch while one is not."""
    shape: list[Dim] = []
    for expression in operand.dims:
        factors = [_factor(name, bound) for name in expression.split("*")]
        if None in factors:
            raise ShapeMismatch(f"{operand.name}: {expression} is not determined by the inputs")
        if len(factors) == 1 and factors[0] is not None:
            shape.append(factors[0])
            continue
        product = 1
        for value in factors:
            if not isinstance(value, int):
                raise ShapeMismatch(f"{operand.name}: {expression} multiplies the symbol {value}")
            product *= value
        shape.append(product)
    return tuple(shape)
