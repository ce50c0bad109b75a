"""The C text of the native library, in units that are compiled separately and then linked."""

from __future__ import annotations

from pathlib import Path

from accel.native.names import ARRANGE, FINITE
from accel.opencl.contents import format_lists
from accel.opencl.program import CONSTANTS_FILE, HEADERS, kernel_text
from accel.packets.accessors import packet_accessors, packet_constants
from accel.packets.ops import OPS, TABLE
from accel.packets.packet import PACKET
from contract.dtypes import WEIGHT_DTYPES, DType, StorageClass

FOLDER = Path(__file__).parent
PRODUCT = "matmul"
"""The op that has one unit for each weight format."""
ATTENTION = ("flash_attn", "flash_attn_batched", "kv_write_batched")
RECURRENCE = ("ssm_delta_net",)
"""Kernel files that take long to compile; ATTENTION and RECURRENCE are a unit each."""
OP_SIGNATURE = "(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers)"


def library_units() -> dict[str, str]:
    """The text of each unit by its name, those first that take longest to compile."""
    names = dict.fromkeys(op.source for op in OPS if op.name in _processor_ops())
    others = [name for name in names if name not in (*ATTENTION, *RECURRENCE, PRODUCT)]
    return {
        "recurrence": _ops_unit(RECURRENCE),
        "attention": _ops_unit(ATTENTION),
        **{f"products_{_name(dtype)}": _products_unit(dtype) for dtype in WEIGHT_DTYPES},
        "ops": _ops_unit(others),
        **{f"arrange_{_name(dtype)}": _arrange_unit(dtype) for dtype in _arranged_dtypes()},
        "finite": _begin() + _joined(("finite.c", _text("finite.c"))),
        "guard": _text("guard.c"),
        "pool": _pool_unit(),
    }


def processor_unit() -> dict[str, str]:
    """The unit of the library that reports the processor's features."""
    return {"processor": _text("processor.c")}


def _text(file: str) -> str:
    """The text of a file of this package."""
    return (FOLDER / file).read_text(encoding="utf-8")


def _name(dtype: DType) -> str:
    return dtype.name.upper()


def _processor_ops() -> tuple[str, ...]:
    """The names of all ops that have a kernel for processors."""
    return tuple(TABLE)


def _arranged_dtypes() -> list[DType]:
    return [dtype for dtype in WEIGHT_DTYPES if dtype.storage is not StorageClass.FLOAT]


def _joined(*files: tuple[str, str]) -> str:
    """Join files to one text; ``#line`` makes the compiler name the file of an error."""
    return "".join(f'#line 1 "{name}"\n{text}\n' for name, text in files)


def _begin(*headers: str) -> str:
    """The headers at the begin of every unit."""
    return _joined(
        ("opencl_c.h", _text("opencl_c.h")),
        (CONSTANTS_FILE, "#define SHARED_ADDRESSES 1\n" + packet_constants()),
        *((name, kernel_text(name)) for name in ("packet.h", *headers)),
    )


def _kernels(sources: tuple[str, ...] | list[str], formats: frozenset[str]) -> str:
    """Kernel files, after the headers that they use."""
    ops = [op for op in OPS if op.source in sources]
    return _begin(*HEADERS[1:]) + _joined(
        ("formats.h", format_lists(formats)),
        ("accessors.h", packet_accessors(ops)),
        *((f"{name}.cl", kernel_text(f"{name}.cl")) for name in sources),
    )


def _ops_unit(sources: tuple[str, ...] | list[str]) -> str:
    return _kernels(sources, frozenset())


def _products_unit(dtype: DType) -> str:
    name = _name(dtype)
    renamed = f"#define op_{PRODUCT} op_{PRODUCT}_{name}\n"
    return renamed + _kernels([TABLE[PRODUCT].source], frozenset((name,)))


def _arrange_unit(dtype: DType) -> str:
    defined = f"#define DTYPE {dtype.ggml_id}\n"
    entry = f"""\
void op_arrange_{_name(dtype)}{OP_SIGNATURE} {{
    arrange_groups((const GLOBAL uchar *)packet->operand[0], (GLOBAL uchar *)packet->operand[1],
                   packet->size[1], packet->size[2], packet->size[3], packet->size[0], worker,
                   workers);
}}
"""
    return defined + _begin("blocks.h", "lanes_layout.h", "arrange.cl") + entry


def _pool_unit() -> str:
    """The worker pool, after tables of the functions that execute ops."""
    whole = [op for op in _processor_ops() if op != PRODUCT]
    products = {_name(dtype): dtype.ggml_id for dtype in WEIGHT_DTYPES}
    arranged = {_name(dtype): dtype.ggml_id for dtype in _arranged_dtypes()}
    functions = [
        *(f"op_{name}" for name in whole),
        *(f"op_{PRODUCT}_{name}" for name in products),
        *(f"op_arrange_{name}" for name in arranged),
        "op_finite",
    ]
    number = {op.name: index for index, op in enumerate(OPS)}
    tables = [
        _table("OPS", {number[name]: f"op_{name}" for name in whole}),
        _table("PRODUCTS", {key: f"op_{PRODUCT}_{name}" for name, key in products.items()}),
        _table("ARRANGERS", {key: f"op_arrange_{name}" for name, key in arranged.items()}),
    ]
    dispatch = f"""\
typedef void (*OP){OP_SIGNATURE};
{"".join(f"void {name}{OP_SIGNATURE};{chr(10)}" for name in functions)}{"".join(tables)}
static inline OP op_of(const PACKET *packet) {{
    if (packet->op == {number[PRODUCT]}) return PRODUCTS[packet->dtype];
    if (packet->op == {ARRANGE}) return ARRANGERS[packet->dtype];
    return packet->op == {FINITE} ? op_finite : OPS[packet->op];
}}
{_layout_checks()}"""
    return _begin() + _joined(("ops.h", dispatch), ("pool.c", _text("pool.c")))


def _table(name: str, functions: dict[int, str]) -> str:
    entries = "".join(f"    [{key}] = {function},\n" for key, function in functions.items())
    return f"static const OP {name}[] = {{\n{entries}}};\n"


def _layout_checks() -> str:
    """Assertions that the compiler lays out a packet as the host does."""
    assert PACKET.fields is not None
    offsets = {field: PACKET.fields[field][1] for field in PACKET.names or ()}
    checks = [f"offsetof(PACKET, {field}) == {offset}" for field, offset in offsets.items()]
    checks.append(f"sizeof(PACKET) == {PACKET.itemsize}")
    return "".join(f'_Static_assert({check}, "the layout of a packet");\n' for check in checks)
