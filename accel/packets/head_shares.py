"""Divides KV pages among devices by KV heads, and with them the ops that make and read them.

If the KV heads of a layer divide evenly, a device has pages of its own KV heads only. It computes
the queries, keys and values of its own heads, and attention of them: columns of attention's result.
Copies of pages bring the bytes of all heads together, in the order in which one device has them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from accel.packets.device_op import DeviceOp, DeviceOperand
from accel.packets.step import Op, Tensor
from contract.dtypes import F32, I12, ROTATED_KV
from contract.ir.nodes import BufferDecl, BufferKind

GRANULE = 16
"""Rows that are never divided: a unit of the tuned products, the largest row group of all layouts
whose matrices are divided."""
OF_HEADS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "rms_norm": (("x", "y"), ("groups",)),
    "rope": (("x", "y"), ("heads",)),
    "rotate_heads": (("x", "y"), ("heads",)),
    "kv_write_batched": (("k", "v"), ("width",)),
    "unpack_pages": ((), ("kv_heads",)),
    "flash_attn_part": (("q",), ("heads", "kv_heads")),
    "flash_attn": (("y", "sinks"), ("heads",)),
    "flash_attn_batched": (("q", "y", "sinks"), ("heads", "kv_heads")),
}
"""Ops that can be divided by heads: operands with columns of each head, and the sizes that count
heads."""
MAKERS = ("rms_norm", "rope", "rotate_heads")
"""Those that make queries, keys and values, if their sizes divide."""
PASSED_ON = ("unpack_pages", "flash_attn_part")
"""Those whose results other ops of heads read, in buffers that have own heads too."""
COPY_HEADS = DeviceOp(
    "copy_heads",
    (
        DeviceOperand("source", "uint"),
        DeviceOperand("pairs", "int"),
        DeviceOperand("target", "uint", written=True),
    ),
    ("rows", "stretches", "words", "source_step", "target_step"),
    (),
    lambda rows, stretches, words, **_: rows * stretches * words,
    False,
    False,
    "copy_heads",
)
"""COPY_ROWS of some words of each of several stretches of a row. Stretches begin so many words
apart in the source, and in the target."""
Pages = Mapping[str, int]
"""The KV buffers of which a device has its own heads, with the stretches of each page, which hold
all heads."""
NO_PAGES: Pages = {}


def has_own_heads(decl: BufferDecl, devices: int) -> bool:
    """Whether each of ``devices`` devices can have pages of its own KV heads of a buffer: their
    rows divide, and the bytes of a stretch are words."""
    if devices == 1 or decl.kind is not BufferKind.STATE or len(decl.shape) != 5:
        return False
    _, kinds, positions, kv_heads, head_dim = map(int, decl.shape)
    own, rest = divmod(kv_heads, devices)
    rows = own * kinds * positions // stretches_of(decl)
    words = not rows * decl.dtype.row_bytes(head_dim) % F32.block_bytes
    return not rest and not own * head_dim % GRANULE and words


def pages_of_heads(decl: BufferDecl, devices: int) -> BufferDecl:
    """The declaration of a KV buffer with the KV heads of one of ``devices`` devices."""
    *pages, kv_heads, head_dim = decl.shape
    return replace(decl, shape=(*pages, int(kv_heads) // devices, head_dim))


def stretches_of(decl: BufferDecl) -> int:
    """The stretches of a page that hold all heads: the page, or keys or values of a position."""
    by_head = decl.dtype in (I12, *ROTATED_KV)
    return 1 if by_head else int(decl.shape[1]) * int(decl.shape[2])


def ops_of_heads(ops: Sequence[Op], pages: Collection[str], devices: int) -> frozenset[int]:
    """Indices of the ops of which a device computes its own heads: those that write and read
    ``pages``, and those that make their queries, keys and values."""
    return _Finding(ops, set(pages), devices).found() if pages else frozenset()


def operands_of_heads(op: Op) -> list[Tensor]:
    """The tensors that the op reads or writes head by head."""
    names, _ = OF_HEADS[op.name]
    found = (op.operand(name) for name in names)
    return [tensor for tensor in found if tensor is not None]


def of_own_heads(op: Op, index: int, devices: int) -> Op:
    """The op of the heads of device ``index``."""
    names, counts = OF_HEADS[op.name]
    indices = {op.device.index_of[name] for name in names}
    operands = tuple(
        _columns(tensor, index, devices) if at in indices and tensor is not None else tensor
        for at, tensor in enumerate(op.operands)
    )
    sizes = tuple(
        size // devices if name in counts else size
        for name, size in zip(op.device.sizes[1:], op.sizes, strict=True)
    )
    return replace(op, operands=operands, sizes=sizes)


def _columns(tensor: Tensor, index: int, devices: int) -> Tensor:
    own = tensor.columns // devices
    return tensor._replace(start=tensor.start + index * own, columns=own)


@dataclass(frozen=True, slots=True)
class HeadCopy:
    """A copy of the own heads of rows of pages: ``op``, and where they are ``part`` of what every
    device needs ``whole``: the ``rows`` of both for each row that is copied."""

    op: Op
    part: Tensor | None = None
    whole: Tensor | None = None
    rows: int = 1

    def follows(self, other: HeadCopy) -> bool:
        """Whether its stretches lie behind those of another one, equally far apart."""
        mine, theirs = self.whole, other.whole
        if mine is None or theirs is None or mine.columns != mine.stride:
            return False
        return mine == theirs._replace(start=theirs.start + other.rows * theirs.stride)


def copy_of_heads(op: Op, pages: Pages, index: int, devices: int) -> HeadCopy | None:
    """What device ``index`` does of a COPY_ROWS of pages; None for rows of other buffers."""
    if op.name != "copy_rows":
        return None
    source, pairs, target = op.operands
    assert source is not None
    assert target is not None
    paged = [tensor.buffer in pages for tensor in (source, target)]
    if not pages or not any(paged):
        return None
    width = op.max_sizes()["width"]
    stretches = 1 if all(paged) else pages[(source if paged[0] else target).buffer]
    words, step = width // stretches // devices, width // stretches
    ends, steps = list[Tensor](), list[int]()
    for tensor, own in zip((source, target), paged, strict=True):
        if own:
            assert (tensor.start, tensor.stride) == (0, width), "pages are copied whole"
            ends.append(tensor._replace(columns=width // devices, stride=width // devices))
        else:
            first, columns = index * words, width - (devices - 1) * words
            ends.append(tensor._replace(start=tensor.start + first, columns=columns))
        steps.append(words if own else step)
    operands = ends[0], pairs, ends[1]
    made = replace(
        op, device=COPY_HEADS, operands=operands, sizes=(stretches, words, *steps), private=False
    )
    if paged[1]:
        return HeadCopy(made)
    single = op.count.maximum == 1
    assert single or stretches == 1, "such pages are copied one by one"
    whole = target._replace(columns=step, stride=step) if single else target
    return HeadCopy(made, _columns(whole, index, devices), whole, stretches)


def joined(copies: Sequence[HeadCopy]) -> list[HeadCopy]:
    """The copies, those whose stretches follow each other in one row joined, so that devices meet
    less often."""
    found: list[HeadCopy] = []
    for copy in copies:
        last = found[-1] if found else None
        if last is not None and copy.follows(last):
            found[-1] = replace(last, rows=last.rows + copy.rows)
        else:
            found.append(copy)
    return found


@dataclass(slots=True)
class _Finding:
    """Finds ops of heads. ``own`` are the buffers with own heads at the op reached; ``made`` has
    the op that wrote each tensor last, ``source`` the op that wrote what a maker reads."""

    ops: Sequence[Op]
    own: set[str]
    devices: int
    made: dict[Tensor, int] = field(default_factory=dict)
    source: dict[int, int | None] = field(default_factory=dict)

    def found(self) -> frozenset[int]:
        found: set[int] = set()
        for number, op in enumerate(self.ops):
            pages = self._pages_of(op)
            if pages is not None and pages.buffer in self.own:
                found.add(number)
                for tensor in operands_of_heads(op):
                    found |= self._makers(tensor)
                self.own |= op.results() if op.name in PASSED_ON else set()
            elif op.name in PASSED_ON:
                self.own -= op.results()
            elif op.name in MAKERS:
                read = op.operand("x")
                self.source[number] = None if read is None else self.made.get(read)
            written = (op.operands[index] for index in op.written)
            self.made |= {tensor: number for tensor in written if tensor is not None}
        return frozenset(found)

    @staticmethod
    def _pages_of(op: Op) -> Tensor | None:
        """The pages that an op writes or reads, or what was made of them."""
        if op.name not in OF_HEADS or op.name in MAKERS:
            return None
        return op.operand("parts" if op.name == "flash_attn" else "kv")

    def _makers(self, tensor: Tensor) -> set[int]:
        """The ops that make ``tensor``, from the last one on, as far as they divide."""
        found: set[int] = set()
        at = self.made.get(tensor)
        while at is not None and at not in found and self._divides(self.ops[at]):
            found.add(at)
            at = self.source.get(at)
        return found

    def _divides(self, op: Op) -> bool:
        if op.name not in MAKERS:
            return False
        x, y, sizes = op.operand("x"), op.operand("y"), op.max_sizes()
        assert x is not None
        assert y is not None
        heads = sizes["groups" if op.name == "rms_norm" else "heads"]
        even = not heads % self.devices and not y.columns % (self.devices * GRANULE)
        return even and x.columns == y.columns and not sizes.get("back", 0)
