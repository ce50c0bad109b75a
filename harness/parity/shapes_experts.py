"""Sizes and parameters of the opcodes that multiply by stacks of matrices."""

from collections.abc import Mapping

from contract.dtypes import F32, DType, StorageClass
from contract.opcodes import Opcode
from contract.spec import Scalar
from harness.parity.shape import OpShape, Strategy, activations, inner_lengths

MANY_EXPERTS = (1 << 14) + 7
"""So many experts that the sum of the chosen equal probabilities is below the minimum 2^-14."""


def _gate_topk(dtype: DType | None) -> tuple[OpShape, ...]:
    short, middle, long = inner_lengths(dtype)
    sizes = (
        (1, 61, middle, 8),
        (5, 300, short, 5),
        (33, 7, long, 7),
        (3, 1, short, 1),
        (17, 130, short, 2),
        (0, 5, short, 3),
    )
    biased = [(size, () if index % 2 else ("bias",)) for index, size in enumerate(sizes)]
    plain = [_routing(size, (*absent, "choice_bias")) for size, absent in biased]
    if dtype is not F32:  # How experts are chosen does not depend on how the router is stored.
        return tuple(plain)
    return (
        *(_routing(size, absent) for size, absent in biased),
        *plain,
        _routing((2, MANY_EXPERTS, 1, 1), ("bias", "choice_bias")),
        *(_routing(size, (), renormalize=0) for size in sizes[:3]),
        *(_routing(size, ("choice_bias",), renormalize=0) for size in sizes[:3]),
        *(
            _routing(size, ("bias",), groups=groups, groups_used=used)
            for size, groups, used in (
                ((1, 256, middle, 8), 8, 4),
                ((5, 12, short, 5), 6, 3),
                ((33, 128, short, 4), 64, 2),
                ((3, 10, short, 10), 2, 2),
            )
        ),
        *(_routing(size, absent, softmax=1) for size, absent in biased),
        _routing((3, 12, short, 4), ("bias",), softmax=1, groups=3, groups_used=2),
    )


def _routing(size: tuple[int, int, int, int], absent: tuple[str, ...], **params: Scalar) -> OpShape:
    """One shape of MOE_GATE_TOPK: tokens, experts, width, and experts used."""
    tokens, experts, hidden, used = size
    label = f"{tokens}x{experts}x{hidden}" + ("" if "choice_bias" in absent else "-chosen")
    given = {"tokens": tokens, "experts": experts, "hidden": hidden, "used": used, **params}
    label += "-whole" if "renormalize" in params else ""
    label += f"-{params['groups']}" if "groups" in params else ""
    label += "-softmax" if "softmax" in params else ""
    return OpShape(label, given, absent=frozenset(absent))


def _products(inner: str, outputs: str) -> Strategy:
    """Shapes of one token and many, with more experts than (token, expert) pairs and fewer, and
    with rows that fill no group of 16."""

    def strategy(dtype: DType | None) -> tuple[OpShape, ...]:
        short, middle, long = inner_lengths(dtype)
        # tokens, experts, used, inner, outputs
        sizes = (
            (1, 13, 8, middle, 35),
            (1, 1, 1, long, 16),
            (2, 5, 3, short, 7),
            (3, 70, 2, short, 33),
            (29, 3, 2, middle, 19),
            (110, 2, 1, short, 3),
            (7, 6, 6, long, 2),
            (0, 4, 2, short, 5),
        )
        return tuple(
            OpShape(
                f"{tokens}x{used}of{experts}-{columns}x{rows}",
                {"tokens": tokens, "experts": experts, "used": used, inner: columns, outputs: rows},
                absent=absent,
            )
            for (tokens, experts, used, columns, rows), absent in zip(
                sizes, _absences(len(sizes), inner), strict=True
            )
        )

    return strategy


def _absences(count: int, inner: str) -> list[frozenset[str]]:
    """Every combination of the optional operands of MOE_GATE_UP or MOE_DOWN_ACC in turn."""
    optional: tuple[str, ...] = ("bias", "expert_scale", "residual")
    if inner == "hidden":
        optional = ("gate_bias", "up_bias")
    choices = [
        frozenset(name for bit, name in enumerate(optional) if index >> bit & 1)
        for index in range(1 << len(optional))
    ]
    return [choices[index % len(choices)] for index in range(count)]


def _shared_expert(dtype: DType | None) -> tuple[OpShape, ...]:
    short, middle, long = inner_lengths(dtype)
    sizes = [(1, middle, short), (9, long, middle), (19, short, middle), (0, short, short)]
    if dtype is not None and dtype.storage is StorageClass.FLOAT:
        sizes.append((2, 5, 3))
    return tuple(
        OpShape(
            f"{tokens}x{hidden}x{width}",
            {"tokens": tokens, "hidden": hidden, "width": width},
            absent=frozenset(("router_weight",)) if index == 2 else frozenset(),
        )
        for index, (tokens, hidden, width) in enumerate(sizes)
    )


def _head_product(dtype: DType | None) -> tuple[OpShape, ...]:
    short, middle, long = inner_lengths(dtype)
    # tokens, heads, matrices, channels before those that are multiplied, inner, outputs, rest
    sizes = (
        (1, 5, 5, 0, middle, 35, 8),
        (1, 2, 2, 64, long, 16, 0),
        (3, 7, 4, 0, short, 33, 16),
        (29, 3, 3, 8, middle, 19, 0),
        (110, 2, 1, 3, short, 3, 5),
        (0, 4, 4, 0, short, 5, 4),
    )
    return tuple(
        OpShape(
            f"{tokens}x{heads}of{matrices}-{inner}x{outputs}+{rest}",
            {
                "tokens": tokens,
                "heads": heads,
                "matrices": matrices,
                "inner": inner,
                "outputs": outputs,
                "x_width": before + inner,
                "y_width": rest + outputs,
                **({"rest_width": rest} if rest else {}),
            },
            absent=frozenset() if rest else frozenset(("rest",)),
        )
        for tokens, heads, matrices, before, inner, outputs, rest in sizes
    )


EXPERT_STRATEGIES: Mapping[Opcode, Strategy] = {
    Opcode.MOE_GATE_TOPK: _gate_topk,
    Opcode.MOE_GATE_UP: _products("hidden", "width"),
    Opcode.MOE_SWIGLU: activations(
        "tokens used width", (1, 8, 40), (3, 1, 257), (17, 2, 16), (65, 3, 5), (0, 2, 8)
    ),
    Opcode.MOE_DOWN_ACC: _products("width", "hidden"),
    Opcode.SHARED_EXPERT: _shared_expert,
    Opcode.HEAD_PRODUCT: _head_product,
}
