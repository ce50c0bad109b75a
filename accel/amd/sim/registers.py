"""The registers of a block while its text is written: the names of their values, as which types.

Types are those of ``semantics.txt`` and "r", a scalar register in either of its forms, "v"
and "c", one as a column of unsigned or float numbers, "low" and "high", the halves of 64 bits."""

from typing import Any

import numpy as np

from accel.amd.isa.blocks import Function
from accel.amd.isa.decode import EXEC, NULL, SCC, Kind
from accel.amd.isa.semantics import VECTOR_OFFSET, Typed
from accel.amd.sim import arithmetic
from contract.errors import CodecError

VIEWS = {"u": "u32", "i": "i32", "f": "f32"}
DTYPES = {"u": np.uint32, "i": np.int32, "f": np.float32, "U": np.uint64, "I": np.int64}


class Registers:
    """The registers of a block in which not all lanes (``partial``) or not all waves (``subset``)
    take part.

    ``lines`` is the text so far, ``names`` the values it refers to."""

    def __init__(self, partial: bool, subset: bool) -> None:
        self.partial = partial
        self.subset = subset
        self.lines: list[str] = []
        self.names: dict[str, Any] = dict(vars(arithmetic)) | {"taken": taken, "put": put}
        self._forms: dict[int, dict[str, str]] = {EXEC: {"m": "E"}}
        self._whole: set[int] = set()
        self._written: dict[int, None] = {}
        self._count = 0

    def function(self, condition: str, name: str) -> Function:
        """Compile the text to a function that returns the value of ``condition``."""
        body = "\n".join(f"    {line}" for line in [*self.lines, f"return {condition}"])
        text = f"def block(machine, S, V, E, L, waves):\n{body}\n"
        exec(compile(text, name, "exec"), self.names)
        return self.names["block"]  # type: ignore[no-any-return]

    def keep_all(self, number: int) -> None:
        """Note that a written register is valid for lanes that take no part too."""
        self._whole.add(number)

    def let(self, expression: str) -> str:
        """Assign an expression to a new name."""
        self._count += 1
        name = f"t{self._count}"
        self.lines.append(f"{name} = {expression}")
        return name

    def constant(self, value: int, letter: str, column: bool) -> str:
        if letter == "m":
            name, array = f"km_{value}", np.full((1, 1), value != 0)
        else:
            kind = {"b": "u", "v": "u", "w": "u", "s": "u"}.get(letter, letter)
            if kind in "UI":
                array = np.array([value], np.uint64).view(DTYPES[kind])
            else:
                array = np.array([value], np.uint32).view(DTYPES[kind])
            name = f"k{kind}_{value & 0xFFFF_FFFF_FFFF_FFFF:x}" + ("_column" if column else "")
            array = array[:, None] if column else array
        self.names[name] = array
        return name

    def loaded(self, number: int) -> str:
        """The name of a register's value in the state."""
        target = f"V[{number - VECTOR_OFFSET}]" if number >= VECTOR_OFFSET else f"S[{number}]"
        return self.let(f"taken({target}, waves)" if self.subset else target)

    def read(self, number: int, form: str) -> str:
        """The name of a register's value as a type: u i f v m r s, or c, a float column."""
        forms = self._forms.setdefault(number, {})
        if form not in forms:
            forms[form] = self.made(number, form, forms)
        return forms[form]

    def made(self, number: int, form: str, forms: dict[str, str]) -> str:
        if form == "s":
            return self.loaded(number)
        vector = number >= VECTOR_OFFSET
        if form == "u":
            for other in "fi":
                if other in forms:
                    return self.let(f"{forms[other]}.view(u32)")
            if "low" in forms:
                return self.let(f"{forms['low']}.astype(u32)")
            if "high" in forms:
                return self.let(f"({forms['high']} >> 32).astype(u32)")
            if vector:
                return self.loaded(number)
            return self.let(f"as_words({self.either(number)})")
        if form == "r":
            return self.either(number)
        if form == "m":
            return self.let(f"as_lanes({self.either(number)})")
        if form == "v":
            return self.let(f"{self.read(number, 'u')}[:, None]")
        if form == "c":
            return self.let(f"{self.read(number, 'f')}[:, None]")
        return self.let(f"{self.read(number, 'u')}.view({VIEWS[form]})")

    def either(self, number: int) -> str:
        """The name of a scalar register's value in any form that exists."""
        forms = self._forms.setdefault(number, {})
        for form in ("r", "m", "u"):
            if form in forms:
                return forms[form]
        if any(form in forms for form in ("f", "i", "low", "high")):
            return self.read(number, "u")
        forms["r"] = self.loaded(number)
        return forms["r"]

    def pair(self, number: int, letter: str, column: bool) -> str:
        """Two registers as 64 bits."""
        low, high = (self._forms.setdefault(number + n, {}) for n in (0, 1))
        name = low.get("low")
        if name is None or high.get("high") != name:
            a, b = self.read(number, "u"), self.read(number + 1, "u")
            name = self.let(f"{b}.astype(u64) << 32 | {a}")
            low["low"] = high["high"] = name
        if letter == "I":
            name = self.let(f"{name}.view(i64)")
        return self.let(f"{name}[:, None]") if column else name

    def source(self, typed: Typed, column: bool) -> str:
        """An operand; ``column`` where a vector instruction reads it."""
        letter, operand = typed.type, typed.operand
        if operand.kind is Kind.CONSTANT:
            value = operand.value
            if letter == "I" and operand.literal and value >> 31:
                raise CodecError(f"literal {value:#x} of signed 64 bits is not supported")
            if letter in "UI" and value >> 31 and not operand.literal:
                value |= 0xFFFF_FFFF_0000_0000
            if letter == "h":
                raise CodecError("constant of binary16 is not supported")
            return self.constant(value, letter, column and letter not in "m")
        number, scalar = operand.value, operand.kind is Kind.SCALAR
        if scalar and number == NULL:
            return self.constant(0, letter, column)
        if not scalar:
            number += VECTOR_OFFSET
        column = column and scalar
        if letter in "UI":
            return self.pair(number, letter, column)
        if letter == "b":
            return self.either(number)
        if letter in "ms":
            return self.read(number, letter)
        if letter == "h":
            bits = self.read(number, "v" if column else "u")
            return self.let(f"{bits}.astype(u16).view(f16)")
        if letter == "w":
            return self.let(f"{self.read(number, 'v' if column else 'u')} & 0xFFFF")
        if column:
            if letter == "i":
                return self.let(f"{self.read(number, 'i')}[:, None]")
            return self.read(number, {"u": "v", "f": "c"}[letter])
        return self.read(number, letter)

    def write(self, number: int, form: str, name: str) -> None:
        self._forms[number] = {form: name}
        self._written[number] = None
        self._whole.discard(number)

    def wide(self, value: int) -> str:
        name = f"wide_{value:x}"
        self.names[name] = np.uint64(value)
        return name

    @property
    def lanes(self) -> str:
        return "E" if self.partial else "None"

    def all_lanes(self, number: int) -> str:
        """The name of a vector register's value that keeps lanes taking no part."""
        value = self.read(number, "u")
        if self.partial and number in self._written and number not in self._whole:
            value = self.let(f"where(E, {value}, {self.loaded(number)})")
            self._forms[number] = {"u": value}
        if number in self._written:
            self._whole.add(number)
        return value

    def store(self, live: frozenset[int]) -> None:
        """Store written registers that something later may read."""
        for number in self._written:
            if number not in live and number != EXEC:
                continue
            if number < VECTOR_OFFSET:
                target = f"S[{number}]"
                value = self.read(number, "s") if number == SCC else self.either(number)
            else:
                target, value = f"V[{number - VECTOR_OFFSET}]", self.read(number, "u")
                if self.partial and number not in self._whole:
                    old = self.loaded(number)
                    value = self.let(f"where(E, {value}, {old})")
            if self.subset:
                value = f"put({target}, waves, {value}, machine.waves)"
            self.lines.append(f"{target} = {value}")


def taken(register: Any, waves: Any) -> Any:
    """The values of a register for some waves."""
    return register if len(register) == 1 else register[waves]


def put(register: Any, waves: Any, value: Any, count: int) -> Any:
    """A register in which the values of some waves are replaced, of ``count`` waves in all."""
    if register.ndim != value.ndim:
        register, value = (arithmetic.as_words(x) for x in (register, value))
    if len(register) == count and register.shape[1:] == value.shape[1:]:
        result = register.copy()
    else:
        width = (max(register.shape[1], value.shape[1]),) if register.ndim == 2 else ()
        result = np.empty((count, *width), register.dtype)
        result[:] = register
    result[waves] = value
    return result
