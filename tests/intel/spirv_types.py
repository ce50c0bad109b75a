"""The types, constants and variables of a module of SPIR-V, as C has them."""

from __future__ import annotations

from dataclasses import dataclass, field

from accel.vulkan.spirv import Instruction

INPUT, WORKGROUP, CROSS_WORKGROUP, FUNCTION = 1, 4, 5, 7
BUILT_INS = {26: "group_now", 24: "groups_now", 27: "item_now"}
"""WorkgroupId, NumWorkgroups, LocalInvocationId."""


class Untranslated(Exception):
    """A module has an instruction that this translation does not know."""


@dataclass(frozen=True)
class Type:
    """A type of SPIR-V. Sizes in bytes; ``c`` is its name in C, empty for those in memory only.

    ``parts`` are the types of members, or of the element or pointee."""

    kind: str
    c: str = ""
    nbytes: int = 0
    align: int = 1
    parts: tuple[Type, ...] = ()
    storage: int = -1

    @property
    def offsets(self) -> list[int]:
        """Where each member of a structure begins."""
        offsets, end = [], 0
        for part in self.parts:
            offsets.append(-(-end // part.align) * part.align)
            end = offsets[-1] + part.nbytes
        return offsets


@dataclass
class Module:
    """What is known of a module while it is translated."""

    types: dict[int, Type] = field(default_factory=dict)
    of: dict[int, Type] = field(default_factory=dict)
    values: dict[int, str] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)
    built_ins: dict[int, str] = field(default_factory=dict)
    globals: list[str] = field(default_factory=list)
    group: list[str] = field(default_factory=list)
    functions: list[list[Instruction]] = field(default_factory=list)
    entry: int = 0
    name: str = ""
    items: int = 0
    vectors: dict[str, str] = field(default_factory=dict)

    def value(self, number: object) -> str:
        """The C expression of an id."""
        return self.values.get(int(str(number)), f"v{number}")


def declare(module: Module, i: Instruction) -> None:
    """An instruction before the first function."""
    w = [int(word) for word in i.words]
    if 19 <= i.opcode <= 33:
        module.types[w[1]] = _type(module, i.opcode, w)
    elif i.opcode == 15:
        module.entry = w[2]
        module.name = i.words[3:].tobytes().split(b"\0")[0].decode()
    elif i.opcode == 16 and w[2] == 17:
        module.items = w[3]
    elif i.opcode == 71 and w[2] == 11:
        module.built_ins[w[1]] = BUILT_INS[w[3]]
    elif i.opcode in (41, 42, 43, 44, 46, 1):
        module.of[w[2]] = module.types[w[1]]
        module.values[w[2]] = _constant(module, i.opcode, w)
    elif i.opcode == 59:
        _variable(module, w)


def _type(module: Module, opcode: int, w: list[int]) -> Type:
    known = module.types
    if opcode == 21:
        return Type("int", f"u{w[2]}", w[2] // 8, w[2] // 8)
    if opcode == 22:
        return Type("float", "f32", 4, 4) if w[2] == 32 else Type("half", "u16", 2, 2)
    if opcode == 20:
        return Type("bool", "u8", 1, 1)
    if opcode == 23:
        element, count = known[w[2]], w[3]
        name = f"{element.c}x{count}"
        module.vectors[name] = f"{element.c} {count}"
        nbytes = element.nbytes * (4 if count == 3 else count)
        return Type("vector", name, nbytes, nbytes, (element,))
    if opcode == 28:
        element = known[w[2]]
        return Type("array", "", element.nbytes * module.numbers[w[3]], element.align, (element,))
    if opcode == 30:
        parts = tuple(known[part] for part in w[2:])
        made = Type("struct", "", 0, max(part.align for part in parts), parts)
        end = made.offsets[-1] + parts[-1].nbytes
        return Type("struct", "", -(-end // made.align) * made.align, made.align, parts)
    if opcode == 32:
        return Type("pointer", "u64", 8, 8, (known[w[3]],), w[2])
    if opcode == 19:
        return Type("void", "void")
    if opcode == 33:
        return Type("function", "", 0, 1, (known[w[2]],))
    raise Untranslated(f"type {opcode}")


def _constant(module: Module, opcode: int, w: list[int]) -> str:
    kind = module.types[w[1]]
    if opcode == 43:
        number = w[3] | (w[4] << 32 if len(w) > 4 else 0)
        module.numbers[w[2]] = number
        return f"as_f32({number}u)" if kind.kind == "float" else f"(({kind.c}){number}ull)"
    if opcode in (41, 42):
        return str(int(opcode == 41))
    if opcode == 44:
        parts = ", ".join(module.values[part] for part in w[3:])
        if kind.kind == "vector":
            return f"(({kind.c}){{{{ {parts} }}}})"
        return f"{{ {parts} }}"
    module.numbers[w[2]] = 0
    if kind.kind == "vector":
        return f"(({kind.c}){{{{ 0 }}}})"
    return "{ 0 }" if not kind.c else f"(({kind.c})0)"


def _variable(module: Module, w: list[int]) -> None:
    """A variable outside of functions."""
    pointer, name = module.types[w[1]], f"m{w[2]}"
    pointee = pointer.parts[0]
    module.of[w[2]] = pointer
    module.values[w[2]] = f"((u64){name})"
    if pointer.storage == INPUT:
        return
    if pointer.storage == WORKGROUP:
        module.globals.append(f"static _Alignas(16) char {name}[{pointee.nbytes}];")
        module.group.append(f"memset({name}, 0xAA, {pointee.nbytes});")
        return
    element = pointee
    while element.kind == "array":
        element = element.parts[0]
    if len(w) < 5 or not element.c:
        raise Untranslated(f"a variable of storage class {pointer.storage}")
    count = pointee.nbytes // element.nbytes
    module.globals.append(
        f"static const _Alignas(16) {element.c} {name}[{count}] = {module.values[w[4]]};"
    )
