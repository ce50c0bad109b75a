"""Draws the contents of a case's operands from its seed."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from contract.arithmetic import BROKEN_ROW, PAGE_TOKENS
from contract.arrays import Array, Floats, Ints
from contract.dtypes import F32, I32, DType, StorageClass
from contract.opcodes import Opcode
from contract.ops import TABLE
from contract.records import LAST_TOKEN, LOGIT_BIAS, RECENT_TOKEN, SAMPLING, SLOT, STEP
from contract.spec import Access, Operand, shape_of
from harness.parity.cases import Case
from harness.parity.shape import Run
from harness.parity.values import KINDS, NONFINITE
from reference.exact.kv_storage import page_view, store
from reference.exact.rotary import rotary_table
from reference.matrix import Matrix
from reference.ops.sample import NO_TOKEN
from reference.quant import FORMATS, LAYOUTS, moderate_scales

Generator = np.random.Generator
ROPE_BASE = 10000.0


def operand_dtype(case: Case, operand: Operand) -> DType:
    """The storage type of one operand; the last of several weights gets another format."""
    if len(operand.dtypes) == 1:
        return operand.dtypes[0]
    assert case.dtype is not None
    many = [o.name for o in TABLE[case.opcode].operands if len(o.dtypes) > 1]
    if len(many) < 2 or operand.name != many[-1]:
        return case.dtype
    alike = [d for d in operand.dtypes if d.block_elements == case.dtype.block_elements]
    return alike[(alike.index(case.dtype) + 1) % len(alike)]


def fill(case: Case) -> dict[str, Any]:
    """Every operand the node reads or updates: arrays, and Matrix for stored weights."""
    rng = np.random.default_rng(case.seed)
    sizes = case.sizes
    page_table = make_page_table(rng, sizes) if "slot_pages" in sizes else None
    filled: dict[str, Any] = {}
    for operand in TABLE[case.opcode].operands:
        if operand.access is Access.WRITE or operand.name in case.shape.absent:
            continue
        shape = tuple(int(dim) for dim in shape_of(operand, sizes))
        dtype = operand_dtype(case, operand)
        if operand.name == "kv":
            filled["kv"] = make_kv(rng, case, shape, dtype, page_table)
        elif operand.name == "page_table":
            filled["page_table"] = page_table
        elif operand.name == "rope_table":
            filled["rope_table"] = rotary_table(shape[0], ROPE_BASE, 2 * shape[2])
        elif dtype is I32:
            filled[operand.name] = INDEX_FILLS[operand.name](rng, case, shape)
        elif operand.name in FLOAT_FILLS:
            filled[operand.name] = FLOAT_FILLS[operand.name](rng, case, shape)
        elif dtype is F32 and operand.dtypes == (F32,):
            of_step = operand.dims[0] in ("tokens", "rows")
            values = KINDS[case.kind if of_step else "normal"](rng, shape)
            filled[operand.name] = values if of_step else _of_one_sign(case, values)
        else:
            filled[operand.name] = make_matrix(rng, dtype, shape, partial(_of_one_sign, case))
    return filled


def _of_one_sign(case: Case, values: Floats) -> Floats:
    """``values``, all positive where activations are zeros: then all products of -0 are -0."""
    return np.abs(values) if case.kind == "zeros" else values


def make_matrix(
    rng: Generator,
    dtype: DType,
    shape: tuple[int, ...],
    signs: Callable[[Floats], Floats] = lambda values: values,
) -> Matrix:
    """Random stored bits with moderate scales; every integer a format can hold occurs."""
    rows, columns = int(np.prod(shape[:-1])), shape[-1]
    if dtype.storage is StorageClass.FLOAT:
        values = signs(rng.standard_normal((rows, columns), dtype=np.float32))
        return Matrix(dtype, shape, FORMATS[dtype].quantize(values))
    blocks = rng.integers(0, 256, (rows, dtype.row_bytes(columns)), dtype=np.uint8)
    layout = LAYOUTS[dtype]
    parts = layout.parts(blocks)
    for name in layout.floats:
        parts[name] = rng.standard_normal(parts.shape)
    if not layout.floats:
        moderate_scales(dtype, blocks)
    return Matrix(dtype, shape, blocks)


def make_page_table(rng: Generator, sizes: Mapping[str, int]) -> Ints:
    """A page table whose pages are in random order, with spare pages between them."""
    slots, slot_pages = sizes["slots"], sizes["slot_pages"]
    pages = rng.permutation(sizes["pages"])[: slots * slot_pages]
    return pages.reshape(slots, slot_pages).astype(np.int32)


def make_kv(
    rng: Generator, case: Case, shape: tuple[int, ...], dtype: DType, page_table: Ints | None
) -> Array:
    """KV pages with NaN at every position except those the step may read, up to each slot's last
    query."""
    kv = broken_pages(dtype, shape)
    assert page_table is not None
    assert case.shape.runs is not None
    lengths: dict[int, int] = {}
    for slot, first, count in case.shape.runs:
        lengths[slot] = max(lengths.get(slot, 0), first + count)
    for slot, length in lengths.items():
        position = np.arange(length, dtype=np.int32)
        keys, values = KINDS[case.kind](rng, (2, length, *shape[3:]))
        page = page_table[slot, position // PAGE_TOKENS]
        store(kv, page, position % PAGE_TOKENS, keys, values)
    return kv


def broken_pages(dtype: DType, shape: tuple[int, ...]) -> Array:
    """KV pages in which every row reads as NaN; ``shape`` is [pages, 2, 16, kv_heads, head_dim]."""
    # Bytes of ones are NaN in every type except those where an exponent marks a broken row.
    nbytes = math.prod(shape[:-1]) * dtype.row_bytes(shape[-1])
    kv = page_view(np.full(nbytes, 0xFF, np.uint8), dtype, shape)
    if dtype.storage is StorageClass.PAGES:
        kv["k_exponent"] = kv["v_exponent"] = BROKEN_ROW
    return kv


def _query(rng: Generator, case: Case, shape: tuple[int, ...]) -> Ints:
    runs: tuple[Run, ...] = case.shape.runs or ()
    vocabulary = case.sizes.get("vocab", 1)
    records = [
        (int(rng.integers(vocabulary)), slot, first + index, 0)
        for slot, first, count in runs
        for index in range(count)
    ]
    query = np.array(records, np.int32).reshape(shape)
    if case.opcode is Opcode.LOAD_REQUEST_STATE:
        query[rng.random(len(query)) < 0.5, 0] = LAST_TOKEN
        largest_count = max((count for _, _, count in runs), default=0)
        if largest_count <= case.sizes["recent_tokens"]:
            query[1::3, 0] = RECENT_TOKEN
    if case.opcode is Opcode.VERIFY_K:
        query[:, 0] = _two_values(rng, query.shape[:1])
    return query


def _output_rows(rng: Generator, case: Case, shape: tuple[int, ...]) -> Ints:
    rows = rng.choice(case.sizes["tokens"], shape, replace=False).astype(np.int32)
    # Drafts are verified in rows that follow each other.
    return np.sort(rows) if case.opcode is Opcode.VERIFY_K else rows


def _slot_table(rng: Generator, case: Case, shape: tuple[int, ...]) -> Ints:
    """Random slot records; every third slot has no last token."""
    table = _words(rng, case, shape)
    table.view(SLOT)["last_token"] = rng.integers(-1, 2, (shape[0], 1)) * 31
    return table


def _pairs(rng: Generator, case: Case, shape: tuple[int, ...]) -> Ints:
    """Random pairs in which each target row occurs at most once."""
    pairs = np.empty(shape, np.int32)
    pairs[:, 0] = rng.integers(case.sizes["sources"], size=shape[0])
    pairs[:, 1] = rng.choice(case.sizes["targets"], shape[0], replace=False)
    return pairs


def _expert_ids(rng: Generator, case: Case, shape: tuple[int, ...]) -> Ints:
    """Distinct experts for each token; every second case prefers some experts."""
    tokens, used = shape
    liking = rng.random((tokens, case.sizes["experts"]))
    if rng.random() < 0.5:
        liking *= rng.random(case.sizes["experts"]) ** 4
    return np.argsort(-liking, axis=1)[:, :used].astype(np.int32)


def _matrix_of(rng: Generator, case: Case, shape: tuple[int, ...]) -> Ints:
    """A matrix for each head, of which several may have the same."""
    return rng.integers(0, case.sizes["matrices"], shape).astype(np.int32)


def _words(rng: Generator, case: Case, shape: tuple[int, ...]) -> Ints:
    return rng.integers(-(2**31), 2**31, shape).astype(np.int32)


def _two_values(rng: Generator, shape: tuple[int, ...]) -> Ints:
    """Random choices of two values, so that drafts agree for a few tokens."""
    return (rng.random(shape) < 0.2).astype(np.int32)


def _recent(rng: Generator, case: Case, shape: tuple[int, ...]) -> Ints:
    """Random token ids; entries before a sequence's first token are arbitrary and not read."""
    return rng.integers(0, case.sizes.get("vocab", 1000), shape).astype(np.int32)


def _step(rng: Generator, case: Case, shape: tuple[int, ...]) -> Ints:
    """A STEP record whose event numbers may wrap around 2^32."""
    record = np.zeros(1, STEP)
    record["first_event"] = rng.choice([0, 3, 1000, 2**32 - 1, 2**32 - 3])
    record["tokens"], record["rows"] = case.sizes["tokens"], case.sizes["rows"]
    return record.view(np.int32).reshape(shape)


def _sampling(rng: Generator, case: Case, shape: tuple[int, ...]) -> Ints:
    records = np.zeros(shape[0], SAMPLING)
    choices = {
        "temperature": (0.0, 0.3, 0.8, 1.0, 2.5),
        "top_p": (1.0, 0.95, 0.5, 0.01, 0.0),
        "min_p": (0.0, 0.05, 1.0),
        "repeat_penalty": (1.0, 1.3, 0.8),
        "top_k": (0, 1, 5, 40, 5000),
        "presence_penalty": (0.0, 0.7, -0.2),
        "frequency_penalty": (0.0, 0.4),
    }
    for name, values in choices.items():
        records[name] = rng.choice(values, shape[0])
    records["seed_low"] = rng.integers(0, 2**32, shape[0], dtype=np.uint32)
    records["seed_high"] = rng.integers(0, 2**32, shape[0], dtype=np.uint32)
    longest = rng.choice([8, 100, 2**20], shape[0])
    records["position"] = rng.integers(0, longest)
    records["slot"] = rng.integers(0, case.sizes["slots"], shape[0])
    records["repeat_last_n"] = rng.integers(0, case.sizes["recent_tokens"] + 1, shape[0])
    records["mask"] = rng.integers(0, case.sizes.get("masks", 2) + 1, shape[0])
    biases = case.sizes.get("biases", 2)
    records["bias_first"] = rng.integers(0, biases + 1, shape[0])
    records["bias_count"] = rng.integers(0, biases - records["bias_first"] + 1)
    return records.view(np.int32).reshape(shape)


def _allowed(rng: Generator, case: Case, shape: tuple[int, ...]) -> Ints:
    """Masks of no token, about one, half, and all of them; bits beyond the vocabulary likewise."""
    share = rng.choice([0.0, 1.0 / case.sizes["vocab"], 0.5, 0.9, 1.0], (shape[0], 1))
    bits = rng.random((shape[0], 32 * shape[1])) < share
    return np.packbits(bits, axis=1, bitorder="little").view("<i4").reshape(shape)


def _bias(rng: Generator, case: Case, shape: tuple[int, ...]) -> Ints:
    """Biases of distinct tokens; a temperature turns the largest into infinities."""
    records = np.zeros(shape[0], LOGIT_BIAS)
    records["token"] = rng.choice(case.sizes["vocab"], shape[0], replace=False)
    often = rng.choice([-100.0, -1.0, 0.1, 3.0, 100.0], shape[0])
    records["bias"] = np.where(rng.random(shape[0]) < 0.2, -3e38, often)
    records["bias"][rng.random(shape[0]) < 0.01] = 3e38
    return records.view(np.int32).reshape(shape)


def _token(rng: Generator, case: Case, shape: tuple[int, ...]) -> Ints:
    """Token ids; rows without a token where some are mapped and where logits are broken."""
    if case.opcode is Opcode.VERIFY_K:
        return _two_values(rng, shape)
    if "vocab" not in case.sizes:
        return _words(rng, case, shape)
    lacking = case.kind in NONFINITE or case.opcode is Opcode.MAP_TOKENS
    least = NO_TOKEN if lacking else 0
    return rng.integers(least, case.sizes["vocab"], shape).astype(np.int32)


def _digested(rng: Generator, case: Case, shape: tuple[int, ...]) -> Ints:
    """Flags of rows; the first row has one, so that not all results are zeros."""
    flags = rng.choice([0, 1, -1], shape).astype(np.int32)
    flags[:1] = 1
    return flags


IndexFill = Callable[[Generator, Case, tuple[int, ...]], Ints]
INDEX_FILLS: Mapping[str, IndexFill] = {
    "query": _query,
    "output_rows": _output_rows,
    "ids": _expert_ids,
    "matrix_of": _matrix_of,
    "slot_table": _slot_table,
    "pairs": _pairs,
    "token": _token,
    "digested": _digested,
    "recent": _recent,
    "step": _step,
    "ring": _words,
    "table": _words,
    "sampling": _sampling,
    "allowed": _allowed,
    "bias": _bias,
}


def _decay(rng: Generator, case: Case, shape: tuple[int, ...]) -> Floats:
    """Decays as models store them: -exp(A)."""
    return -np.exp(rng.standard_normal(shape)).astype(np.float32)


def _state(rng: Generator, case: Case, shape: tuple[int, ...]) -> Floats:
    """Random states; NaN in a slot whose first token of the step is at position 0."""
    state = _of_one_sign(case, rng.standard_normal(shape, dtype=np.float32))
    first_positions: dict[int, int] = {}
    for slot, first, _ in case.shape.runs or ():
        first_positions.setdefault(slot, first)
    for slot, first in first_positions.items():
        if first == 0:
            state[slot] = np.nan
    return state


def _sinks(rng: Generator, case: Case, shape: tuple[int, ...]) -> Floats:
    """Sinks above every score in some heads and far below in others."""
    return 8 * rng.standard_normal(shape, dtype=np.float32)


FloatFill = Callable[[Generator, Case, tuple[int, ...]], Floats]
FLOAT_FILLS: Mapping[str, FloatFill] = {"decay": _decay, "state": _state, "sinks": _sinks}
