"""Translates a kernel of SPIR-V to C, instruction by instruction, so that the simulated GPU
executes the module that a real one would get."""

from accel.vulkan.spirv import Instruction, instructions, words_of
from tests.intel.spirv_types import (
    CROSS_WORKGROUP,
    FUNCTION,
    WORKGROUP,
    Module,
    Type,
    Untranslated,
    declare,
)

BINARY = {
    128: "+", 130: "-", 132: "*", 134: "/", 137: "%", 129: "+", 131: "-", 133: "*", 136: "/",
    194: ">>", 196: "<<", 197: "|", 198: "^", 199: "&", 164: "==", 165: "!=", 166: "|", 167: "&",
    170: "==", 171: "!=", 172: ">", 174: ">=", 176: "<", 178: "<=", 180: "==", 182: "!=", 183: "!=",
    184: "<", 186: ">", 188: "<=", 190: ">=",
}  # fmt: skip
"""Operators of integers without a sign, of floats and of truth values."""
SIGNED = {135: "/", 138: "%", 195: ">>", 173: ">", 175: ">=", 177: "<", 179: "<="}
UNORDERED = {181: "==", 185: "<", 187: ">", 189: "<=", 191: ">="}
EXTENDED = {
    23: "__builtin_fabsf({0})", 61: "__builtin_sqrtf({0})", 141: "(i{w})({0}) < 0 ? -({0}) : ({0})",
    151: "({0}) ? __builtin_clz({0}) : 32", 152: "({0}) ? __builtin_ctz({0}) : 32",
    156: "(i{w})({0}) > (i{w})({1}) ? ({0}) : ({1})", 157: "({0}) > ({1}) ? ({0}) : ({1})",
    158: "(i{w})({0}) < (i{w})({1}) ? ({0}) : ({1})", 159: "({0}) < ({1}) ? ({0}) : ({1})",
    163: "({0}) > ({1}) ? ({0}) - ({1}) : 0",
}  # fmt: skip


def translated(code: bytes) -> str:
    """The C text of the only kernel of a module. Raises Untranslated, and ValueError for bytes that
    are no module."""
    module = Module()
    body: list[Instruction] | None = None
    for i in instructions(words_of(code)):
        if i.opcode == 54:
            body = []
            module.functions.append(body)
        if body is None:
            declare(module, i)
        else:
            body.append(i)
        if i.opcode == 56:
            body = None
    functions = {int(body[0].words[2]): body for body in module.functions}
    for body in module.functions:
        module.of[int(body[0].words[2])] = module.types[int(body[0].words[1])]
    needed = _called(functions, module.entry)
    texts = [_function(module, functions[number]) for number in functions if number in needed]
    heads = [
        _signature(module, functions[number]) + ";" for number in functions if number in needed
    ]
    barriers = any(i.opcode == 224 for number in needed for i in functions[number])
    vectors = [
        f"typedef struct {{ {c} e[{n}]; }} ALIAS {name};"
        for name, (c, n) in ((k, v.split()) for k, v in module.vectors.items())
    ]
    parameters = [module.types[int(i.words[1])] for i in functions[module.entry] if i.opcode == 55]
    given = ", ".join(f"({p.c})arguments_now[{n}]" for n, p in enumerate(parameters))
    sizes = ", ".join(str(p.nbytes) for p in parameters)
    tail = [
        f"static void run_kernel(void) {{ f{module.entry}({given}); }}",
        f"static void clear_group_memory(void) {{ {' '.join(module.group)} }}",
        f'const char kernel_name[] = "{module.name}";',
        f"const uint32_t kernel_items = {module.items}, kernel_arguments = {len(parameters)};",
        f"const uint32_t kernel_sizes[] = {{ {sizes}, 0 }};",
        "void kernel_run(const HOST *given, const uint64_t *arguments, uint32_t groups,"
        f" uint32_t items) {{ run_groups(given, arguments, groups, items, {int(barriers)}); }}",
    ]
    signed = [f"typedef int{w}_t i{w};" for w in (8, 16, 32, 64)]
    head = ['#include "kernel.h"', *signed, *vectors, *module.globals]
    return "\n".join([*head, *heads, *texts, *tail]) + "\n"


def _called(functions: dict[int, list[Instruction]], entry: int) -> set[int]:
    """The functions that a kernel reaches."""
    found, waiting = {entry}, [entry]
    while waiting:
        for i in functions[waiting.pop()]:
            if i.opcode == 57 and int(i.words[3]) not in found:
                found.add(int(i.words[3]))
                waiting.append(int(i.words[3]))
    return found


def _signature(module: Module, body: list[Instruction]) -> str:
    number = int(body[0].words[2])
    parameters = [i for i in body if i.opcode == 55]
    for i in parameters:
        module.of[int(i.words[2])] = module.types[int(i.words[1])]
    given = ", ".join(f"{module.types[int(i.words[1])].c} v{i.words[2]}" for i in parameters)
    return f"static {module.types[int(body[0].words[1])].c} f{number}({given or 'void'})"


def _function(module: Module, body: list[Instruction]) -> str:
    signature = _signature(module, body)
    phis: dict[int, list[Instruction]] = {}
    label = 0
    for i in body:
        if i.opcode == 248:
            label = int(i.words[1])
            phis[label] = []
        elif i.opcode == 245:
            phis[label].append(i)
    declared: list[str] = []
    lines: list[str] = []
    for i in body[1:]:
        if i.opcode == 248:
            label = int(i.words[1])
            lines.append(f"L{label}:;")
        lines.append(_statement(module, i, label, phis, declared))
    return "\n".join([f"{signature} {{", *declared, *(x for x in lines if x), "}"])


def _jump(module: Module, target: int, label: int, phis: dict[int, list[Instruction]]) -> str:
    """Go to a block, with the values of its phis."""
    moved = []
    for phi in phis[target]:
        pairs = dict(zip(phi.words[4::2].tolist(), phi.words[3::2].tolist(), strict=True))
        moved.append(f"p{phi.words[2]} = {module.value(pairs[label])};")
    return f"{{ {' '.join(moved)} goto L{target}; }}"


def _statement(
    module: Module,
    i: Instruction,
    label: int,
    phis: dict[int, list[Instruction]],
    declared: list[str],
) -> str:
    w, v, op = [int(word) for word in i.words], module.value, i.opcode
    if op in (55, 56, 248, 246, 247, 256, 257):
        return ""
    if op == 249:
        return _jump(module, w[1], label, phis)
    if op == 250:
        yes, no = (_jump(module, target, label, phis) for target in w[2:4])
        return f"if ({v(w[1])}) {yes} else {no}"
    if op == 251:
        return _switch(module, w, label, phis)
    if op == 253:
        return "return;"
    if op == 254:
        return f"return {v(w[1])};"
    if op == 255:
        return "__builtin_unreachable();"
    if op == 62:
        pointer = module.of[w[1]]
        return f"*({pointer.parts[0].c} *){_address(pointer, v(w[1]))} = {v(w[2])};"
    if op == 64:
        target, source = (_bytes(module, word, w[3]) for word in w[1:3])
        return f"memcpy({target}, {source}, {v(w[3])});"
    if op == 224:
        return f"meet({label});"
    kind = module.types[w[1]]
    module.of[w[2]] = kind
    if op == 59:
        declared.append(f"_Alignas(16) char m{w[2]}[{kind.parts[0].nbytes}];")
        module.values[w[2]] = f"((u64)m{w[2]})"
        return ""
    if op == 57:
        called = f"f{w[3]}({', '.join(map(v, w[4:]))});"
        if kind.kind == "void":
            return called
        declared.append(f"{kind.c} v{w[2]};")
        return f"v{w[2]} = {called}"
    declared.append(f"{kind.c} v{w[2]};")
    if op == 245:
        declared.append(f"{kind.c} p{w[2]};")
        return f"v{w[2]} = p{w[2]};"
    return f"v{w[2]} = {_expression(module, op, w, kind)};"


def _switch(module: Module, w: list[int], label: int, phis: dict[int, list[Instruction]]) -> str:
    wide = module.of[w[1]].nbytes == 8
    cases, n = [], 3
    while n < len(w):
        number, n = (w[n] | w[n + 1] << 32, n + 2) if wide else (w[n], n + 1)
        cases.append(f"case {number}ull: {_jump(module, w[n], label, phis)}")
        n += 1
    default = f"default: {_jump(module, w[2], label, phis)}"
    return f"switch ({module.value(w[1])}) {{ {' '.join(cases)} {default} }}"


def _address(pointer: Type, address: str) -> str:
    """Where the host has the bytes that a pointer names, after a check."""
    pointee = pointer.parts[0]
    if pointer.storage == CROSS_WORKGROUP:
        align = min(pointee.align, 16)
        return f"global_at({address}, {pointee.nbytes}, {align})"
    if pointer.storage not in (0, WORKGROUP, FUNCTION):
        raise Untranslated(f"storage class {pointer.storage}")
    return f"(uintptr_t)({address})"


def _bytes(module: Module, number: int, size: int) -> str:
    if module.of[number].storage == CROSS_WORKGROUP:
        return f"global_at({module.value(number)}, {module.value(size)}, 1)"
    return f"(char *){module.value(number)}"


def _expression(module: Module, op: int, w: list[int], kind: Type) -> str:
    v, c = module.value, kind.c
    if op == 61:
        if w[3] in module.built_ins:
            return f"({c}){{{{ {module.built_ins[w[3]]}, 0, 0 }}}}"
        return f"*({c} *){_address(module.of[w[3]], v(w[3]))}"
    if op in (65, 66, 67, 70):
        return _chain(module, w, op in (67, 70))
    if op == 1:
        return f"({c}){{0}}"
    if op == 81:
        return f"{v(w[3])}.e[{w[4]}]"
    if op == 82:
        return f"({{ {c} x = {v(w[4])}; x.e[{w[5]}] = {v(w[3])}; x; }})"
    if op == 234:
        address = _address(module.of[w[3]], v(w[3]))
        return f"({{ u32 *x = (u32 *){address}; u32 y = *x; *x = y + {v(w[6])}; y; }})"
    if op == 12:
        given = [v(word) for word in w[5:]]
        if kind.kind == "half":
            if w[4] != 23:
                raise Untranslated(f"extended instruction {w[4]} of binary16")
            return f"({c})({given[0]} & 0x7fff)"
        return EXTENDED[w[4]].format(*given, w=8 * kind.nbytes)
    return _computed(module, op, w, kind)


def _computed(module: Module, op: int, w: list[int], kind: Type) -> str:
    """The value of an operator or a conversion."""
    v, c = module.value, kind.c
    first = module.of[w[3]]
    a = v(w[3])
    if (kind.kind == "vector" and op not in (124, 169)) or (
        "half" in (kind.kind, first.kind) and op not in (115, 124, 169)
    ):
        raise Untranslated(f"instruction {op} of a {kind.kind} from a {first.kind}")
    if op == 124:
        return _bitcast(kind, first, a)
    if op in (113, 117, 120, 112):
        return f"({c}){a}"
    if op == 114:
        return f"({c})(i{8 * kind.nbytes})(i{8 * first.nbytes}){a}"
    if op == 110:
        return f"({c})(i{8 * kind.nbytes}){a}"
    if op == 109:
        return f"({c}){a}"
    if op == 111:
        return f"({c})(i{8 * first.nbytes}){a}"
    if op == 115 and (first.kind, kind.kind) == ("half", "float"):
        return f"widened({a})"
    if op in (126, 127):
        return f"-{a}"
    if op == 200:
        return f"({c})~{a}"
    if op == 168:
        return f"!{a}"
    if op == 169:
        return f"{a} ? {v(w[4])} : {v(w[5])}"
    b = v(w[4])
    if op in SIGNED:
        signed = f"i{8 * first.nbytes}"
        return f"({c})(({signed}){a} {SIGNED[op]} ({signed}){b})"
    if op in UNORDERED:
        return f"{a} != {a} || {b} != {b} || {a} {UNORDERED[op]} {b}"
    if op == 182:
        return f"{a} < {b} || {a} > {b}"
    if op in BINARY:
        return f"({c})({a} {BINARY[op]} {b})"
    raise Untranslated(f"instruction {op}")


def _bitcast(kind: Type, first: Type, a: str) -> str:
    if kind.c == first.c:
        return a
    if (first.kind, kind.kind) == ("int", "float"):
        return f"as_f32({a})"
    if (first.kind, kind.kind) == ("float", "int"):
        return f"as_u32({a})"
    return f"({{ {first.c} x = {a}; {kind.c} y; memcpy(&y, &x, {kind.nbytes}); y; }})"


def _chain(module: Module, w: list[int], steps: bool) -> str:
    """The address that an access chain computes."""
    kind = module.of[w[3]].parts[0]
    terms, rest = [module.value(w[3])], w[4:]
    if steps:
        terms.append(_stride(module, rest[0], kind.nbytes))
        rest = rest[1:]
    for index in rest:
        if kind.kind == "struct":
            number = module.numbers[index]
            terms.append(f"{kind.offsets[number]}u")
            kind = kind.parts[number]
        else:
            kind = kind.parts[0]
            terms.append(_stride(module, index, kind.nbytes))
    return " + ".join(terms)


def _stride(module: Module, index: int, nbytes: int) -> str:
    return f"(u64)((i64)(i{8 * module.of[index].nbytes}){module.value(index)} * {nbytes})"
