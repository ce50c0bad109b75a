"""The cases of ``harness.vectors``: inputs of every rule and what the reference makes of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from contract.arithmetic import DIGEST_WORDS
from contract.arrays import Bytes, Floats
from contract.dtypes import BY_NAME, I3R, I4R, Q8_0, ROTATED_KV, WEIGHT_DTYPES, DType, StorageClass
from contract.records import LOGIT_BIAS, SAMPLING
from harness.host.pooling import Pool, Pooling
from harness.vector_sequences import (
    attend,
    codes,
    convolved,
    delta_rule,
    heads_product,
    mixture,
    rotate,
    routed,
    scanned,
    shared,
)
from reference.exact import elementary
from reference.exact.activation import quantize_activation
from reference.exact.attention_rows import exp2, row_integers
from reference.exact.kv_storage import stored
from reference.exact.philox import draw, philox
from reference.exact.rotary import RotaryScaling, rotary_table
from reference.exact.sums import sum_axis
from reference.ops.log_probabilities import log_probabilities
from reference.ops.rms_norm import rms_norm
from reference.ops.rope import rope
from reference.ops.row_digest import row_digest
from reference.ops.sample import sample
from reference.ops.soft_cap import soft_cap
from reference.ops.ssm_gated_norm import ssm_gated_norm
from reference.ops.swiglu import CLAMPED, RELU, swiglu
from reference.ops.xielu import xielu
from reference.quant import FORMATS, moderate_scales
from reference.quant.dot import matmul


@dataclass(frozen=True, slots=True)
class VectorCase:
    """One example: ``op`` of ``rule`` gives ``outputs`` for ``inputs``, arrays or numbers by
    name."""

    rule: str
    op: str
    inputs: dict[str, Any]
    outputs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Numbers:
    """An input that its parameters describe: see ``numbers``."""

    seed: int
    shape: tuple[int, ...]
    exponent: int

    @property
    def values(self) -> Floats:
        """The numbers in their shape."""
        return numbers(self.seed, int(np.prod(self.shape)), self.exponent).reshape(self.shape)

    @property
    def described(self) -> dict[str, Any]:
        """The parameters, as the file has them."""
        return {"shape": list(self.shape), "seed": self.seed, "exponent": self.exponent}


def numbers(seed: int, size: int, exponent: int) -> Floats:
    """Number i is (w / 2^8 rounded down - 2^23) 2^(exponent - 23), exactly, where w is Philox's
    first word for the key ``seed`` and the counter i: from -2^exponent up to 2^exponent."""
    words = draw(seed, np.arange(size, dtype=np.uint64)).astype(np.int64) >> 8
    return np.ldexp((words - (1 << 23)).astype(np.float32), exponent - 23)


def cases() -> Iterator[VectorCase]:
    """All cases. Seeds follow the order, so a new part comes last."""
    seeds = count(1)

    def make(shape: tuple[int, ...], exponent: int = 0) -> Numbers:
        return Numbers(next(seeds), shape, exponent)

    parts = (_primitives, _sums, _products, _attention, _experts, _recurrent, _sampling)
    later = (_biased, _later_recurrent, _rotated_storage, _chosen, _three_bits, _later_experts)
    for part in (*parts, *later, _groups, _decays_by_key):
        yield from part(make)


Make = Callable[..., Numbers]


def _case(rule: str, op: str, function: Callable[..., Any], **inputs: Any) -> VectorCase:
    """A case whose results are those of ``function``, one array or several by name."""
    values = {n: v.values if isinstance(v, Numbers) else v for n, v in inputs.items()}
    given = {n: v.described if isinstance(v, Numbers) else v for n, v in inputs.items()}
    result = function(**values)
    outputs = result if isinstance(result, dict) else {"y": np.atleast_1d(result)}
    return VectorCase(rule, op, given, outputs)


def _float(*words: int) -> Floats:
    return np.array(words, np.uint32).view(np.float32)


def _primitives(make: Make) -> Iterator[VectorCase]:
    edges = _float(0, 0xBF800000, 0x3F800000, 0x477FE000, 0x477FF000, 0x38801000, 0x33000001)
    half = _case("R1", "binary16", lambda x: stored(x, np.dtype("<f2")).view(np.uint16), x=edges)
    yield VectorCase("R1", "binary16", half.inputs, {"y": half.outputs["y"].astype(np.int32)})
    for name in ("exp", "sigmoid", "silu", "tanh", "softplus", "gelu"):
        yield _case("R2", name, getattr(elementary, name), x=make((64,), 4))
    extreme = np.array([-100, -87, -86.9, 0, 87, 88, 1e-6, -1e-6], np.float32)
    yield _case("R2", "exp", elementary.exp, x=extreme)
    yield _case("R2", "log", lambda x: elementary.log(np.abs(x)), x=make((24,), 3))
    yield _case("R2", "log", elementary.log, x=_float(0x3F3504F3, 0x3F3504F2, 0x3F800000, 1 << 23))
    yield _case("R2", "soft_cap", soft_cap, x=make((8,), 6), cap=20.0)
    four = np.array([0.75, 1.25, 0.5, -1e-6], np.float32)
    yield _case("R2", "xielu", xielu, x=make((16,), 3), parameters=four)
    for activation in range(3):
        gated = {"gate": make((8,), 3), "up": make((8,), 1), "activation": activation}
        yield _case("R2", "swiglu", swiglu, **gated)
    for context, scaling in (
        (9, {}),
        (1500, {}),
        (9, {"factor": 4.0}),
        (9, {"factor": 4.0, "yarn": 1, "original_context": 256, "attention_factor": 1.25}),
    ):
        yield _case("R2", "rotary_table", _table, context=context, base=1e4, dims=8, **scaling)
    divided = {"context": 9, "base": 1e4, "dims": 8, "factors": [1.0, 1.5, 2.0, 8.0]}
    yield _case("R2", "rotary_table", _table, **divided)
    for neox in (0, 1):
        yield _case("R2", "rope", _rope, x=make((2, 12)), positions=[3, 8], dims=8, neox=neox)


def _table(context: int, base: float, dims: int, factors: Any = None, **scaling: Any) -> Floats:
    scaling["yarn"] = bool(scaling.get("yarn"))
    return rotary_table(context, base, dims, RotaryScaling(**scaling), factors)


def _rope(x: Floats, positions: list[int], dims: int, neox: int) -> Floats:
    """Rotate one head per token."""
    query = np.array([(0, 0, position, 0) for position in positions], np.int32)
    table = rotary_table(16, 1e4, dims)
    return rope(x=x, rope_table=table, query=query, heads=1, head_dim=x.shape[-1], neox=neox)


def _sums(make: Make) -> Iterator[VectorCase]:
    for rows, length in ((1, 1), (1, 255), (1, 256), (2, 257), (4, 1300), (8, 3000)):
        yield _case("R3 R4", "sum", lambda x: sum_axis(x), x=make((rows, length)))
    for width, groups in ((300, 1), (64, 2)):
        inputs = {"x": make((2, width * groups), 2), "weight": make((width,), 1)}
        yield _case("R4", "rms_norm", _rms_norm, **inputs, eps=1e-6, groups=groups)


def _rms_norm(x: Floats, weight: Floats, eps: float, groups: int) -> Floats:
    return rms_norm(x=x, weight=weight, eps=eps, groups=groups)


def _products(make: Make) -> Iterator[VectorCase]:
    def quantized(x: Floats) -> dict[str, Any]:
        activation = quantize_activation(x)
        return {"m": activation.m, "scale": activation.scale}

    yield _case("R5", "quantize", quantized, x=make((1, 300), 3))
    yield _case("R5", "quantize", quantized, x=make((1, 256), -70))
    for dtype in WEIGHT_DTYPES:
        columns = 512 if dtype.storage is StorageClass.SUPERBLOCK else 288
        yield _product(make, dtype, columns)
    yield _product(make, Q8_0, 1312)


def _product(make: Make, dtype: DType, columns: int) -> VectorCase:
    """A row of a matrix: its values, and its product with activations."""

    def both(x: Floats, blocks: Bytes, dtype: str) -> dict[str, Any]:
        stored_as = BY_NAME[dtype]
        values = FORMATS[stored_as].dequantize(blocks)
        return {"values": values, "y": matmul(blocks, stored_as, x)}

    blocks = _blocks(dtype, columns, dtype.ggml_id)
    return _case("R5", "product", both, x=make((1, columns), 2), blocks=blocks, dtype=dtype.name)


def _blocks(dtype: DType, columns: int, seed: int) -> Bytes:
    """One row of random blocks whose numbers are finite."""
    values = numbers(1000 + seed, columns, 0)[None]
    form = FORMATS[dtype]
    if dtype.storage is StorageClass.FLOAT:
        return form.quantize(values)
    words = draw(2000 + seed, np.arange(dtype.row_bytes(columns), dtype=np.uint64)) & 255
    blocks = words.astype(np.uint8)[None]
    moderate_scales(dtype, blocks)
    return blocks


def _attention(make: Make) -> Iterator[VectorCase]:
    def rows(x: Floats, bits: int) -> dict[str, Any]:
        made = row_integers(x, bits)
        return {"m": made.m, "exponent": made.exponent}

    for exponent in (0, 13, -41):
        yield _case("R6", "rows", rows, x=make((1, 64), exponent), bits=10)
    yield _case("R6", "rows", rows, x=make((1, 64), 41), bits=13)
    yield _case("R6", "exp2", lambda x: exp2(x), x=make((24,), 5))
    for length, storage, more in (
        (1, "f32", {}),
        (70, "i12", {}),
        (130, "f16", {"window": 67}),
        (130, "q8_0", {"soft_cap": 30.0}),
        (130, "f32", {"sinks": _float(0x3F800000, 0xC0000000)}),
        (1100, "i12", {}),
        (1100, "i12", {"window": 1050}),
    ):
        inputs = {"q": make((2, 64), 3), "k": make((length, 64), 2), "v": make((length, 64))}
        yield _case("R6", "attention", attend, **inputs, storage=storage, scale=0.125, **more)


def _rotated_storage(make: Make) -> Iterator[VectorCase]:
    for channels in (32, 96, 128):
        yield _case("R13", "rotate", rotate, x=make((2, channels), 2))
    for bits in ROTATED_KV[I4R]:
        yield _case("R13", "codes", codes, x=make((3, 64), 1), bits=bits)
    yield from _rotated_attention(make, "i4r")


def _rotated_attention(make: Make, storage: str) -> Iterator[VectorCase]:
    for length, more in ((70, {}), (1100, {"window": 1050})):
        inputs = {"q": make((2, 64), 3), "k": make((length, 64), 2), "v": make((length, 64))}
        yield _case("R13", "attention", attend, **inputs, storage=storage, scale=0.125, **more)


def _three_bits(make: Make) -> Iterator[VectorCase]:
    yield _case("R13", "codes", codes, x=make((3, 64), 1), bits=ROTATED_KV[I3R][1])
    yield from _rotated_attention(make, "i3r")


def _experts(make: Make) -> Iterator[VectorCase]:
    yield _case("R7", "route", routed, logits=make((3, 24), 2), used=4)
    ties = np.array([[1, 2, 2, 0, 2, 1]], np.float32)
    yield _case("R7", "route", routed, logits=ties, used=3)
    for scaled in (False, True):
        inputs = {"products": make((1, 3, 8)), "weights": make((1, 3)), "residual": make((1, 8))}
        scale = {"expert_scale": make((6,), 1)} if scaled else {}
        yield _case("R7", "mixture", mixture, **inputs, **scale, ids=[4, 0, 2])
    inputs = {"x": make((1, 300)), "router": make((300,)), "down": make((1, 8))}
    yield _case("R7", "shared_expert", shared, residual=make((1, 8)), **inputs)


def _chosen(make: Make) -> Iterator[VectorCase]:
    yield _case("R7", "choice", routed, logits=make((3, 24), 2), used=4, choice_bias=make((24,)))
    ties = {"logits": np.zeros((1, 6), np.float32), "choice_bias": _float(*[0x3F800000] * 6)}
    yield _case("R7", "choice", routed, **ties, used=3)


def _later_experts(make: Make) -> Iterator[VectorCase]:
    for name, bias in (("route", {}), ("choice", {"choice_bias": make((24,))})):
        given = {"logits": make((3, 24), 2), "used": 4, "renormalize": False, **bias}
        yield _case("R7", name, routed, **given)
    gated = {"gate": make((24,), 4), "up": make((24,), 4), "activation": RELU}
    yield _case("R2", "swiglu", swiglu, **gated)


def _groups(make: Make) -> Iterator[VectorCase]:
    """Experts of the best groups, and heads that are multiplied by matrices of their own."""
    grouped = {"logits": make((5, 24), 2), "choice_bias": make((24,))}
    yield _case("R7", "choice", routed, **grouped, used=5, groups=6, groups_used=2)
    ties = {"logits": np.zeros((1, 8), np.float32), "choice_bias": _float(*[0x3F800000] * 8)}
    yield _case("R7", "choice", routed, **ties, used=3, groups=4, groups_used=2)
    given = {"x": make((2, 3 * 67), 2), "rest": make((2, 3 * 2)), "matrix_of": [1, 0, 1]}
    blocks = np.concatenate([_blocks(Q8_0, 64, 100 + row) for row in range(4)])
    yield _case("R5", "heads", heads_product, **given, blocks=blocks, dtype=Q8_0.name, columns=64)


def _biased(make: Make) -> Iterator[VectorCase]:
    gated = {"gate": make((24,), 4), "up": make((24,), 4), "activation": CLAMPED}
    yield _case("R2", "swiglu", swiglu, **gated)
    inputs = {"products": make((1, 3, 8)), "weights": make((1, 3)), "residual": make((1, 8))}
    yield _case("R7", "mixture", mixture, **inputs, ids=[4, 0, 2], bias=make((6, 8)))


def _later_recurrent(make: Make) -> Iterator[VectorCase]:
    gates = {"input_gate": make((6, 5), 1), "output_gate": make((6, 5), 1)}
    taps = {"x": make((6, 5), 1), "weight": make((5, 4)), "bias": make((5,), 1)}
    yield _case("R8", "gated_convolution", convolved, **taps, **gates)
    inputs = {"x": make((4, 4 * 3 + 2 * 2 * 8)), "dt": make((4, 4), 1)}
    fixed = {"decay": make((4,), 1), "dt_bias": make((4,)), "skip": make((4,), 1)}
    yield _case("R8", "scan", scanned, **inputs, **fixed)


def _decays_by_key(make: Make) -> Iterator[VectorCase]:
    inputs = {"x": make((4, 8 * 8)), "alpha": make((4, 32), 1), "beta": make((4, 4), 1)}
    fixed = {"decay": make((4,), 1), "dt_bias": make((32,))}
    yield _case("R8", "delta_rule", delta_rule, **inputs, **fixed, grouped=0)


def _recurrent(make: Make) -> Iterator[VectorCase]:
    yield _case("R8", "convolution", convolved, x=make((6, 5), 1), weight=make((5, 4)))
    for grouped in (0, 1):
        inputs = {"x": make((4, 8 * 8)), "alpha": make((4, 4), 1), "beta": make((4, 4), 1)}
        fixed = {"decay": make((4,), 1), "dt_bias": make((4,))}
        yield _case("R8", "delta_rule", delta_rule, **inputs, **fixed, grouped=grouped)
    inputs = {"x": make((1, 64)), "gate": make((1, 64), 1), "weight": make((32,), 1)}
    yield _case("R8", "gated_norm", ssm_gated_norm, **inputs, eps=1e-6, heads=2)


def _sampling(make: Make) -> Iterator[VectorCase]:
    def words(key: list[int], counter: list[int]) -> dict[str, Any]:
        k, c = (key[0], key[1]), (counter[0], counter[1], counter[2], counter[3])
        return {"words": np.array(philox(k, c), np.int64)}

    yield _case("R9", "philox", words, key=[0xA4093822, 0x299F31D0], counter=[1, 2, 3, 4])
    plain: dict[str, Any] = {"temperature": 0.0, "recent": [], "seed": 5}
    drawn = {**plain, "temperature": 0.75}
    penalized = {**plain, "recent": [3, 7, 3, 20], "repeat_penalty": 1.25}
    for more in (
        plain,
        drawn,
        {**drawn, "top_k": 5},
        {**drawn, "top_p": 0.5},
        {**drawn, "min_p": 0.2},
        {**drawn, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
        {**penalized, "frequency_penalty": 0.5, "presence_penalty": 0.25},
        {**drawn, **penalized, "temperature": 1.5},
        {**drawn, "bias": [[3, 2.5], [9, -100.0]]},
        {**drawn, "allowed": [2, 3, 5, 7, 11, 13, 40]},
        {**plain, "allowed": []},
    ):
        yield _case("R9", "sample", _sample, logits=make((50,), 2), **more)
    for pooling in Pooling:
        inputs = {"rows": make((3, 40)), "dimensions": 24, "pooling": pooling.value}
        yield _case("R11", "embedding", _embedding, **inputs)
    edges = np.linspace(-3, 3, 17, dtype=np.float32)
    edges.view(np.uint32)[:6] = 0x80000000, 1, 0x807FFFFF, 0x00800000, 0x7FC00001, 0xFF800000
    for logits in (make((300,), 3), make((2100,)), edges):
        yield _case("R12", "row_digest", _row_digest, logits=logits)
    yield _case("R10", "log_probabilities", _logs, logits=make((1, 300), 3), token=17, top=5)


def _sample(logits: Floats, recent: list[int], **more: Any) -> dict[str, Any]:
    """The tokens of the same logits at eight positions from 100 on."""
    positions, slot_ring = range(100, 108), 256
    records = np.zeros((len(positions), 1), SAMPLING)
    ring = np.zeros((1, slot_ring), np.int32)
    tokens = []
    for row, position in enumerate(positions):
        record = records[row : row + 1]
        for name, value in {"top_p": 1.0, "repeat_penalty": 1.0, "seed": 0, **more}.items():
            if name == "seed":
                record["seed_low"], record["seed_high"] = value & 0xFFFFFFFF, value >> 32
            elif name not in ("bias", "allowed"):
                record[name] = value
        record["position"], record["repeat_last_n"] = position, len(recent)
        for back, token in enumerate(reversed(recent), 1):
            ring[0, (position - back) % slot_ring] = token
        bias = allowed = None
        if "bias" in more:
            record["bias_count"] = len(more["bias"])
            pairs = np.array([tuple(pair) for pair in more["bias"]], LOGIT_BIAS)
            bias = pairs.view(np.int32).reshape(-1, 2)
        if "allowed" in more:
            record["mask"] = 1
            mask = np.zeros(64, np.uint8)
            mask[more["allowed"]] = 1
            allowed = np.packbits(mask, bitorder="little").view("<i4")[None]
        chosen = sample(
            logits=logits[None], sampling=record.view(np.int32).reshape(1, 16), recent=ring,
            allowed=allowed, bias=bias,
        )  # fmt: skip
        tokens.append(int(chosen[0]))
    return {"tokens": np.array(tokens, np.int32)}


def _logs(logits: Floats, token: int, top: int) -> dict[str, Any]:
    chosen, ids, logs = log_probabilities(logits=logits, token=np.array([token], np.int32), top=top)
    return {"chosen": chosen, "ids": ids, "logs": logs}


def _row_digest(logits: Floats) -> Any:
    found = row_digest(logits=logits[None], digested=np.ones(1, np.int32))
    return found.view(np.uint32).reshape(-1, DIGEST_WORDS).astype(np.int64)


def _embedding(rows: Floats, dimensions: int, pooling: str) -> Floats:
    pool = Pool(Pooling(pooling), len(rows))
    pool(0, rows)
    return pool.vector(dimensions)
