"""Translates basic blocks to Python functions over the registers of all their waves.

Registers are values: nothing is changed in place. What a block wrote goes back to the state at its
end, for lanes that take part, if anything later reads it."""

import re

from accel.amd.isa.blocks import Block, Function, blocks_of, needed
from accel.amd.isa.decode import CARRYING, EXEC, NULL, SCC, VCC, Instruction, Kind, isa_of, signed
from accel.amd.isa.semantics import (
    ATOMIC,
    GLOBAL,
    LOCAL,
    MATRIX,
    MATRIX_DWORDS,
    NO_OPERATION,
    SCALAR_LOAD,
    SIZES,
    VECTOR_OFFSET,
    Meaning,
    Typed,
    local_sizes,
    matrix_sources,
    meaning,
)
from accel.amd.sim.registers import Registers
from contract.errors import CodecError
from contract.kernel import KernelHeader

OPERAND = re.compile(r"(?<![\w.])[a-erx](?![\w(])")
"""A name of an operand in an expression of the table."""


def block_function(block: Block, partial: bool, subset: bool) -> Function:
    """``f(machine, S, V, E, L, waves)``, which returns the condition of the block's branch if it
    has one.

    ``S`` and ``V`` are the registers, ``E`` the lanes that take part, all of them unless
    ``partial``, ``L`` the first word of group memory, ``waves`` those that take part if ``subset``.
    Raises CodecError for an instruction that is not supported."""
    key = partial, subset
    if key not in block.functions:
        block.functions[key] = _Emitter(block, partial, subset).function()
    return block.functions[key]


def check_translation(kernel: KernelHeader) -> None:
    """Raise CodecError for code with an instruction that the simulator cannot execute."""
    try:
        for block in blocks_of(kernel.code, isa_of(kernel.target)).values():
            for partial in (True, False):
                block_function(block, partial, subset=False)
    except CodecError as error:
        raise CodecError(f"{kernel.name}: {error}") from None


class _Emitter:
    """Writes the text of one block."""

    def __init__(self, block: Block, partial: bool, subset: bool) -> None:
        self._block = block
        self._registers = Registers(partial, subset)
        self._needed = dict(needed(block))

    def function(self) -> Function:
        """The compiled function."""
        condition = "None"
        for instruction in self._block.instructions:
            if instruction.name.startswith("s_cbranch_"):
                condition = self._condition(instruction)
            else:
                self._emit(instruction)
        self._registers.store(self._block.live)
        return self._registers.function(condition, f"<block {self._block.address:#x}>")

    def _emit(self, instruction: Instruction) -> None:
        name = instruction.name
        found = meaning(instruction)
        if found is not None:
            self._arithmetic(instruction, found)
        elif SCALAR_LOAD.match(name):
            self._scalar_load(instruction)
        elif GLOBAL.match(name):
            self._global(instruction)
        elif LOCAL.match(name) or ATOMIC.match(name):
            self._local(instruction)
        elif not NO_OPERATION.match(name):
            self._special(instruction)

    def _arithmetic(self, instruction: Instruction, found: Meaning) -> None:
        vector = instruction.encoding.startswith("VOP")
        column = vector and "F" not in found.row.results
        values = [self._registers.source(typed, column) for typed in found.sources]
        for n in range(len(values)):
            values[n] = self._signed(instruction, found.sources[n].type, n, values[n])
        names = dict(zip("abce", values, strict=False))
        first = found.results[0] if found.results else None
        if found.row.keeps:
            assert first is not None
            names["d"] = self._registers.source(first, column)
        if "X" in found.row.results:
            names["x"] = "E"
        self._results(found, names, vector, self._needed[instruction.address])

    def _results(
        self, found: Meaning, names: dict[str, str], vector: bool, needed: frozenset[int]
    ) -> None:
        expressions, letters = found.row.expressions, found.row.results
        if len(expressions) < len(letters):
            pair = self._registers.let(_filled(expressions[0], names))
            expressions = (f"{pair}[0]", f"{pair}[1]")
        results = list(found.results)
        if letters[0] == "X":
            self._execution(expressions[0], names, results[0] if not vector else None)
            expressions, letters = expressions[1:], letters[1:]
            results = results[1:]
        useful = [
            typed.operand.kind is Kind.VECTOR or not needed.isdisjoint(typed.registers)
            for typed in results
        ]
        for n, (expression, letter, typed) in enumerate(
            zip(expressions, letters, results, strict=True)
        ):
            # Later results may use the first one.
            if any(useful[n:] if n == 0 else useful[n : n + 1]):
                value = self._registers.let(_filled(expression, names))
                names.setdefault("r", value)
                if useful[n]:
                    self._result(letter, typed, value, vector)

    def _execution(self, expression: str, names: dict[str, str], saved: Typed | None) -> None:
        value = self._registers.let(_filled(expression, names))
        names["r"] = value
        if saved is not None and saved.operand.value != NULL:
            self._registers.write(saved.operand.value, "m", "E")
            value = self._registers.let(f"as_lanes({value})")
        elif self._registers.partial:
            value = self._registers.let(f"{value} & E")
        self._registers.write(EXEC, "m", value)

    def _result(self, letter: str, typed: Typed, value: str, vector: bool) -> None:
        number = typed.operand.value
        if typed.operand.kind is Kind.VECTOR:
            number += VECTOR_OFFSET
        if letter in "UI":
            if letter == "I":
                value = self._registers.let(f"{value}.view(u64)")
            self._registers.write(number, "low", value)
            self._registers.write(number + 1, "high", value)
        elif letter in "wh":
            if letter == "h":
                value = self._registers.let(f"{value}.view(u16).astype(u32)")
            old = self._registers.read(number, "u")
            self._registers.write(
                number, "u", self._registers.let(f"{old} & 0xFFFF0000 | {value} & 0xFFFF")
            )
        elif letter == "m":
            self._registers.write(
                number,
                "m",
                self._registers.let(f"{value} & E") if self._registers.partial else value,
            )
        elif letter == "F":
            self._registers.write(number, "f", value)
        else:
            self._registers.write(number, {"b": "r"}.get(letter, letter), value)

    def _signed(self, instruction: Instruction, letter: str, index: int, value: str) -> str:
        """The operand with its modifiers of sign."""
        if instruction.encoding != "VOP3":
            return value
        absolute = 0 if instruction.name in CARRYING else instruction.fields["abs"]
        bits = letter not in "fh"
        if absolute >> index & 1:
            value = f"({value} & 0x7FFFFFFF)" if bits else f"absolute({value})"
        if instruction.fields["neg"] >> index & 1:
            value = f"({value} ^ 0x80000000)" if bits else f"(-{value})"
        return value

    def _scalar_load(self, instruction: Instruction) -> None:
        fields = instruction.fields
        kind = SCALAR_LOAD.match(instruction.name)
        assert kind is not None
        nbytes = SIZES[kind[1]]
        if nbytes < 4:
            raise CodecError(f"{instruction.name} is not supported")
        address = self._registers.pair(2 * fields["sbase"], "U", False)
        offset = signed(fields["offset"], 24) & (1 << 64) - 1
        if offset:
            address = f"{address} + {self._registers.wide(offset)}"
        if fields["soffset"] != NULL:
            address = f"{address} + {self._registers.read(fields['soffset'], 'u')}"
        loaded = self._registers.let(f"machine.scalar_load({address}, {nbytes // 4})")
        for n in range(nbytes // 4):
            self._registers.write(fields["sdata"] + n, "u", self._registers.let(f"{loaded}[{n}]"))

    def _global(self, instruction: Instruction) -> None:
        fields = instruction.fields
        found = GLOBAL.match(instruction.name)
        assert found is not None
        vector = VECTOR_OFFSET + fields["vaddr"]
        if fields["saddr"] == NULL:
            address = self._registers.pair(vector, "U", False)
        else:
            base = self._registers.pair(fields["saddr"], "U", True)
            address = f"{base} + {self._registers.read(vector, 'u')}"
        if offset := signed(fields["offset"], 24) & (1 << 64) - 1:
            address = f"{address} + {self._registers.wide(offset)}"
        nbytes = SIZES[found[3]]
        count = -(-nbytes // 4)
        if found[1] == "load":
            if found[2]:
                raise CodecError(f"{instruction.name} is not supported")
            value = self._registers.let(
                f"machine.load({address}, {nbytes}, {found[3][0] == 'i'}, {self._registers.lanes})"
            )
            for n in range(count):
                self._registers.write(
                    VECTOR_OFFSET + fields["vdst"] + n, "u", self._registers.let(f"{value}[{n}]")
                )
            return
        data = [self._registers.read(VECTOR_OFFSET + fields["vsrc"] + n, "u") for n in range(count)]
        if found[2]:
            data = [f"{data[0]} >> 16"]
        listed = ", ".join(data)
        self._registers.lines.append(
            f"machine.store({address}, {nbytes}, ({listed},), {self._registers.lanes})"
        )

    def _local(self, instruction: Instruction) -> None:
        fields, name = instruction.fields, instruction.name
        address = self._registers.read(VECTOR_OFFSET + fields["addr"], "u")
        offset = fields["offset0"] | fields["offset1"] << 8
        if (found := ATOMIC.match(name)) is not None:
            data = self._registers.read(VECTOR_OFFSET + fields["data0"], "u")
            call = f"machine.local_add({address}, {offset}, L, {data}, {self._registers.lanes})"
            if found[1]:
                self._registers.write(
                    VECTOR_OFFSET + fields["vdst"], "u", self._registers.let(call)
                )
            else:
                self._registers.lines.append(call)
            return
        dwords, addresses, unit = local_sizes(name)
        offsets = [offset] if addresses == 1 else [fields["offset0"], fields["offset1"]]
        for n, first in enumerate(offsets):
            words = f"{address}, {first * unit}, {dwords}, L"
            if "load" in name:
                value = self._registers.let(f"machine.local_load({words}, {self._registers.lanes})")
                for k in range(dwords):
                    number = VECTOR_OFFSET + fields["vdst"] + n * dwords + k
                    self._registers.write(number, "u", self._registers.let(f"{value}[{k}]"))
            else:
                source = VECTOR_OFFSET + fields[f"data{n}"]
                data = ", ".join(self._registers.read(source + k, "u") for k in range(dwords))
                self._registers.lines.append(
                    f"machine.local_store({words}, ({data},), {self._registers.lanes})"
                )

    def _special(self, instruction: Instruction) -> None:
        name, fields = instruction.name, instruction.fields
        if name == "v_readfirstlane_b32":
            value = self._registers.source(Typed("u", instruction.source("src0")), True)
            self._registers.write(
                fields["vdst"],
                "u",
                self._registers.let(f"first_lane({value}, {self._registers.lanes})"),
            )
        elif name == "v_readlane_b32":
            value = self._registers.all_lanes(VECTOR_OFFSET + instruction.source("src0").value)
            lane = self._registers.source(Typed("u", instruction.source("src1")), False)
            self._registers.write(
                fields["vdst"], "u", self._registers.let(f"lane_of({value}, {lane})")
            )
        elif name == "v_writelane_b32":
            number = VECTOR_OFFSET + fields["vdst"]
            old = self._registers.all_lanes(number)
            value = self._registers.source(Typed("u", instruction.source("src0")), False)
            lane = self._registers.source(Typed("u", instruction.source("src1")), False)
            count = "len(waves)" if self._registers.subset else "machine.waves"
            self._registers.write(
                number, "u", self._registers.let(f"with_lane({old}, {lane}, {value}, {count})")
            )
            self._registers.keep_all(number)
        elif name == "v_dot4_i32_iu8":
            self._dot(instruction)
        elif name == MATRIX:
            self._matrix(instruction)
        else:
            raise CodecError(f"{name} at {instruction.address:#x}: has no semantics")

    def _dot(self, instruction: Instruction) -> None:
        fields = instruction.fields
        if fields["clamp"]:
            raise CodecError(f"v_dot4_i32_iu8 at {instruction.address:#x}: clamp is not supported")
        sources = ("src0", "src1", "src2")
        a, b, c = (self._registers.source(Typed("u", instruction.source(p)), True) for p in sources)
        self._registers.write(
            VECTOR_OFFSET + fields["vdst"],
            "u",
            self._registers.let(f"dot4({a}, {b}, {c}, {fields['neg']})"),
        )

    def _matrix(self, instruction: Instruction) -> None:
        fields = instruction.fields
        if fields["clamp"]:
            raise CodecError(f"{MATRIX} at {instruction.address:#x}: clamp is not supported")
        groups = []
        for first, count in matrix_sources(instruction):
            names = [self._registers.read(VECTOR_OFFSET + first + n, "u") for n in range(count)]
            groups.append(f"({''.join(f'{name}, ' for name in names)})")
        lanes = self._registers.lanes
        product = self._registers.let(
            f"matrix_product({', '.join(groups)}, {fields['neg']}, {lanes})"
        )
        for n in range(MATRIX_DWORDS[2]):
            number = VECTOR_OFFSET + fields["vdst"] + n
            self._registers.write(number, "u", self._registers.let(f"{product}[{n}]"))

    def _condition(self, instruction: Instruction) -> str:
        what = instruction.name.removeprefix("s_cbranch_")
        register = {"scc": SCC, "vcc": VCC, "exe": EXEC}[what[:3]]
        if register == SCC:
            value = self._registers.read(SCC, "s")
            return f"~{value}" if what == "scc0" else value
        value = f"nonzero({self._registers.either(register)})"
        return value if what.endswith("nz") else f"~{value}"


def _filled(expression: str, names: dict[str, str]) -> str:
    """An expression of the table with the names of its operands."""
    return OPERAND.sub(lambda found: names.get(found[0], found[0]), expression)
