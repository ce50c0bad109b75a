"""SAMPLE by several blocks a row on emulated blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from accel.cuda.plan import Plan, PlannedLaunch, plan_launches
from accel.cuda.row_end import EndPhase, short_step
from accel.cuda.sampling import LISTED_NEAR, MAX_VOCABULARY
from accel.packets.rules import lower_graph
from accel.packets.step import Op
from contract.dtypes import F32, I32
from contract.ir.graph import BufferKind, Graph, GraphBuilder
from contract.ir.inputs import STEP_BUFFER
from contract.ir.nodes import View
from contract.opcodes import Opcode
from contract.records import LOGIT_BIAS, OUTPUT_EVENT, QUERY_TOKEN, SAMPLING, SLOT
from contract.shape_key import ShapeKey
from reference.ops.sample import NO_TOKEN, sample
from reference.sched.constraints import pack_mask
from tests.cuda.emulated_step import DEVICE, Bytes, aligned_memory, rows_of, run_step

VOCAB = 9001
"""Parts of different sizes, the last threads of each without a token."""
ROW_PARTS = 3
Float32 = NDArray[np.float32]
DTYPES = {np.dtype(np.float32): F32, np.dtype(np.int32): I32}
EVENTS, SLOTS = 5, 4
RECENT = np.zeros((1, 4), np.int32)


def sampling_graph(vocab: int) -> Graph:
    builder = GraphBuilder("sampling")
    emit_sample(builder, vocab)
    return builder.build()


def emit_sample(builder: GraphBuilder, vocab: int) -> View:
    """SAMPLE of every row: the name of its tokens."""
    logits = builder.buffer("logits", BufferKind.REQUEST, F32, ("rows", vocab))
    sampling = builder.buffer("sampling", BufferKind.REQUEST, I32, ("rows", 16))
    recent = builder.buffer("recent", BufferKind.STATE, I32, RECENT.shape)
    token = builder.buffer("token", BufferKind.OUTPUT, I32, ("rows",))
    builder.emit(Opcode.SAMPLE, logits=logits, sampling=sampling, recent=recent, token=token)
    return token


def drawn(
    logits: Float32, records: NDArray[np.void], folder: Path, most: int = 0, parts: int = ROW_PARTS
) -> list[int]:
    """Tokens of a step, and those of the definition, which must be the same."""
    rows, vocab = logits.shape
    sampling = np.ascontiguousarray(records).view(np.int32).reshape(rows, 16)
    token = aligned_memory(4 * max(rows, most)).view(np.int32)
    token[:] = -7
    kept = {"token": token, "recent": RECENT.copy()}
    run_step(
        sampling_graph(vocab),
        (ShapeKey(0, rows), ShapeKey(0, max(rows, most))),
        {"logits": logits, "sampling": sampling},
        kept,
        {},
        folder,
        parts=parts,
    )
    with np.errstate(over="ignore", invalid="ignore"):
        want = sample(logits=logits, sampling=sampling, recent=RECENT)
    assert token[:rows].tolist() == want.tolist()
    assert (token[rows:] == -7).all()
    for row in range(min(rows, 2)):
        how = records[row : row + 1].copy()
        if how["temperature"][0] > 0:
            how["temperature"] = how["temperature"] * np.float32(0.7)
            assert drawn_at_once(logits[row : row + 1], how, folder)
    return want.tolist()


def find_largest(packet: np.void, key: ShapeKey, scratch: Bytes, inputs: Bytes) -> None:
    """The one record that a persistent launch leaves: of the logits as they are."""
    vocab = int(packet["size"][1])
    logits = rows_of(packet, 0, (1, vocab), np.float32, (scratch, inputs), vocab)[0]
    best = rows_of(packet, 6, (1, 3), np.int32, (scratch, inputs), 3)[0]
    finite = bool(np.isfinite(logits).all())
    largest = int(np.argmax(logits)) if finite else 0
    best[:1].view(np.float32)[:] = logits[largest] if finite else 0
    best[1:] = largest if finite else NO_TOKEN, finite


def ended_graph(vocab: int) -> Graph:
    """SAMPLE of one row, its event and its slot."""
    builder = GraphBuilder("ended")
    written = {
        "token": emit_sample(builder, vocab),
        "output_rows": builder.buffer("output_rows", BufferKind.REQUEST, I32, ("rows",)),
        "query": builder.buffer("query", BufferKind.REQUEST, I32, ("tokens", 4)),
    }
    step = builder.buffer(STEP_BUFFER, BufferKind.REQUEST, I32, (1, 4))
    ring = builder.buffer("ring", BufferKind.OUTPUT, I32, (EVENTS, 8))
    builder.emit(Opcode.STREAM_OUT, **written, step=step, ring=ring)
    slots = builder.buffer("slots", BufferKind.STATE, I32, (SLOTS, 8))
    builder.emit(Opcode.STORE_REQUEST_STATE, **written, slot_table=slots)
    return builder.build()


def behind(ops: Sequence[Op], plan: Plan) -> list[PlannedLaunch]:
    """What draws a row of which a persistent launch has left the largest logit."""
    part = replace(plan.launches[0], workspace=None)
    return [part, *short_step(EndPhase(ops, 0), 0, plan.launches).drawn]


def nothing(packet: np.void, key: ShapeKey, scratch: Bytes, inputs: Bytes) -> None:
    """What another launch has done."""


def drawn_at_once(logits: Float32, how: NDArray[np.void], folder: Path) -> bool:
    """Whether one row has the definition's token without the first half of SAMPLE, too."""
    sampling = how.view(np.int32).reshape(1, 16)
    token = aligned_memory(4).view(np.int32)

    run_step(
        sampling_graph(logits.shape[1]),
        (ShapeKey(0, 1), ShapeKey(0, 1)),
        {"logits": logits, "sampling": sampling},
        {"token": token, "recent": RECENT.copy()},
        {},
        folder,
        parts=ROW_PARTS,
        stand_ins={"sample_part": find_largest},
        launches_of=behind,
    )
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(token[0] == sample(logits=logits, sampling=sampling, recent=RECENT)[0])


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("first_event", [2, 12])
def test_who_draws_a_row_ends_it(broken: bool, first_event: int, folder: Path) -> None:
    """A row's event and its slot are written where its token is, as the definitions have them; what
    is of others stays as it is."""
    logits = np.random.default_rng(8).standard_normal((1, VOCAB)).astype(np.float32)
    logits[0, 7] = np.inf if broken else logits[0, 7]
    sampling = np.array([record()], SAMPLING).view(np.int32).reshape(1, 16)
    query = np.zeros(3, QUERY_TOKEN)
    query["slot"], query["position"] = [0, 1, 2], [4, 5, 6]
    given = {
        "logits": logits,
        "sampling": sampling,
        "output_rows": np.array([1], np.int32),
        "query": query.view(np.int32).reshape(3, 4),
    }
    kept = {
        name: aligned_memory(4 * rows * 8).view(np.int32).reshape(rows, 8)
        for name, rows in (("ring", EVENTS), ("slots", SLOTS))
    }
    token = aligned_memory(4).view(np.int32)
    want = {name: values.copy() for name, values in kept.items()}
    with np.errstate(over="ignore", invalid="ignore"):
        of_row = sample(logits=logits, sampling=sampling, recent=RECENT)[0]
    assert (of_row == NO_TOKEN) == broken
    entry = want["ring"].view(OUTPUT_EVENT)[first_event % EVENTS]
    entry["sequence"], entry["slot"] = first_event, 1
    entry["token"], entry["position"] = of_row, 6
    slot = want["slots"].view(SLOT)[1]
    slot["position"], slot["last_token"] = 6, of_row
    run_step(
        ended_graph(VOCAB),
        (ShapeKey(3, 1), ShapeKey(3, 1)),
        given,
        {"token": token, "recent": RECENT.copy(), **kept},
        {},
        folder,
        parts=ROW_PARTS,
        stand_ins={
            "sample_part": find_largest,
            "stream_out": nothing,
            "store_request_state": nothing,
        },
        launches_of=behind,
        first_event=first_event,
    )
    assert token[0] == of_row
    for name, values in kept.items():
        assert np.array_equal(values, want[name]), name


def record(**fields: Any) -> np.void:
    """A SAMPLING record at a temperature of 1, all tokens kept."""
    value = np.zeros((), SAMPLING)
    for name, content in ({"temperature": 1.0, "top_p": 1.0, "position": 9} | fields).items():
        value[name] = content
    return value[()]


RULES = [
    {},
    {"top_p": 0.9},
    {"top_k": 40},
    {"top_k": 40, "top_p": 0.95},
    {"top_k": 3000, "top_p": 0.8, "min_p": 0.05},
    {"min_p": 0.2},
    {"min_p": 0.01, "top_p": 0.99},
    {"top_k": 1},
    {"top_p": 0.0},
    {"min_p": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 2.5, "top_k": 40, "top_p": 0.95},
    {"top_k": 20000},
    {"top_k": 5, "min_p": 0.0001},
    {"top_k": 2, "min_p": 0.0001},
]


@pytest.mark.parametrize(
    "spread", [0.3, *(pytest.param(spread, marks=pytest.mark.long) for spread in (1.0, 4.0)), 30.0]
)
def test_every_rule_draws_what_the_definition_draws(spread: float, folder: Path) -> None:
    """Logits that are nearly even, and such as one of them outweighs; some are equal."""
    rng = np.random.default_rng(int(10 * spread))
    records = [
        record(**{**fields, "seed_low": seed, "seed_high": 3})
        for seed in range(3)
        for fields in RULES
    ]
    logits = rng.standard_normal((len(records), VOCAB)).astype(np.float32) * np.float32(spread)
    logits[:, 100:300] = logits[:, :1]
    drawn(logits, np.array(records, SAMPLING), folder, most=len(records) + 2)


@pytest.mark.parametrize(
    "fields", [{"top_p": 0.5}, {"top_k": 4100}, {"min_p": 0.5, "top_k": 77}, {}]
)
def test_more_equal_logits_than_are_kept_near(fields: dict[str, float], folder: Path) -> None:
    """All tokens are inside of one bin: among equals ids decide, and the list is long."""
    assert VOCAB > LISTED_NEAR
    records = [record(**fields, seed_low=seed) for seed in range(3)]
    tokens = drawn(np.zeros((3, VOCAB), np.float32), np.array(records, SAMPLING), folder)
    most = fields.get("top_k", VOCAB) * fields.get("top_p", 1.0)
    assert max(tokens) < most


ROWS: dict[str, Callable[[np.random.Generator], Float32]] = {
    "even": lambda rng: rng.standard_normal(VOCAB) / 4,
    "tied": lambda rng: rng.integers(0, 9, VOCAB) / 4,
    "in one part": lambda _: np.where(np.arange(VOCAB) < 100, 5 - np.arange(VOCAB) / 99, -40),
    "peaked": lambda rng: 8 * rng.standard_normal(VOCAB),
    "rising": lambda _: np.linspace(-3, 3, VOCAB),
    "falling": lambda _: np.linspace(3, -3, VOCAB),
    "equal": lambda _: np.full(VOCAB, 0.25),
    "subnormal": lambda rng: rng.integers(-60, 61, VOCAB) * 1e-45,
    "ties behind": lambda rng: np.where(rng.permutation(VOCAB) < 39, 2, 1),
}
KINDS = [pytest.param(kind, marks=[pytest.mark.long] * (n > 2)) for n, kind in enumerate(ROWS)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_top_k_does_not_keep_is_not_weighed(kind: str, folder: Path) -> None:
    """Top-k of fewer tokens than there are parts, of as many, of more than a block has threads."""
    rng = np.random.default_rng(len(kind))
    records = [
        record(top_k=top_k, seed_low=seed, **fields)
        for top_k in (40, 1, 2, 64, 65, 512, 513)
        for seed, fields in enumerate(
            [{}, {"top_p": 0.95, "min_p": 0.05, "temperature": 0.7}, {"top_p": 0.3}, {"min_p": 0.9}]
        )
    ]
    logits = np.array([ROWS[kind](rng) for _ in records], np.float32)
    drawn(logits, np.array(records, SAMPLING), folder, parts=64)


def test_rows_without_a_token(folder: Path) -> None:
    """Beside one that has: a NaN, infinities, and a largest value that overflows."""
    logits = np.random.default_rng(2).standard_normal((5, VOCAB)).astype(np.float32)
    logits[0, 7], logits[1, 8999], logits[2, 0] = np.nan, np.inf, -np.inf
    logits[3, 5] = 3e38
    records = [record(top_p=0.9), record(), record(temperature=0.0), record(temperature=0.5)]
    tokens = drawn(logits, np.array([*records, record(top_p=0.7)], SAMPLING), folder)
    assert tokens[:4] == [NO_TOKEN] * 4
    assert tokens[4] != NO_TOKEN


@pytest.mark.parametrize(("vocab", "rows"), [(1, 1), (3, 2), (40, 7)])
def test_small_vocabularies(vocab: int, rows: int, folder: Path) -> None:
    """Parts without a token."""
    logits = np.random.default_rng(vocab).standard_normal((rows, vocab)).astype(np.float32)
    records = [record(top_p=0.8, min_p=0.1, top_k=2 + row, seed_low=row) for row in range(rows)]
    drawn(logits, np.array(records, SAMPLING), folder)


def drawn_changed(
    logits: Float32,
    records: NDArray[np.void],
    changes: dict[str, NDArray[np.int32]],
    recent: NDArray[np.int32],
    folder: Path,
    parts: int = ROW_PARTS,
) -> NDArray[np.int32]:
    """Tokens of a step whose SAMPLE has ``allowed`` and ``bias``, and those of the definition."""
    builder = GraphBuilder("changed")
    inputs = {"logits": logits, "sampling": records.view(np.int32).reshape(-1, 16)} | changes
    operands = {
        name: builder.buffer(name, BufferKind.REQUEST, DTYPES[values.dtype], shape)
        for name, values in inputs.items()
        for shape in [("rows" if name in ("logits", "sampling") else len(values), values.shape[1])]
    }
    operands["recent"] = builder.buffer("recent", BufferKind.STATE, I32, recent.shape)
    operands["token"] = builder.buffer("token", BufferKind.OUTPUT, I32, ("rows",))
    builder.emit(Opcode.SAMPLE, **operands)
    token, sizes = aligned_memory(4 * len(records)).view(np.int32), ShapeKey(0, len(records))
    kept = {"token": token, "recent": recent.copy()}
    run_step(builder.build(), (sizes, sizes), inputs, kept, {}, folder, parts=parts)
    with np.errstate(over="ignore"):
        assert token.tolist() == sample(recent=recent, **inputs).tolist()
    return token


def test_rows_whose_logits_are_changed_beside_others(folder: Path) -> None:
    """Penalties, biases and a mask, each of a row between rows that have none, greedy and drawn."""
    rng = np.random.default_rng(5)
    vocab, masks, biases = 3001, 1, 3
    changes: list[dict[str, float]] = [
        {},
        {"repeat_penalty": 3.0, "repeat_last_n": 6, "slot": 1},
        {"presence_penalty": 5.0, "frequency_penalty": 0.5, "repeat_last_n": 8},
        {"bias_first": 1, "bias_count": 2},
        {"mask": 1},
        {},
    ]
    records = np.array(
        [
            record(**{"repeat_penalty": 1.0, "temperature": temperature, **fields})
            for temperature in (0.0, 0.7)
            for fields in changes
        ],
        SAMPLING,
    )
    logits = rng.standard_normal((len(records), vocab)).astype(np.float32)
    best = int(logits[1].argmax())
    logits[:, best] = 9.0
    bias = np.array([(best, 50.0), (best, -20.0), (7, 12.0)], LOGIT_BIAS)
    allowed = rng.integers(0, 1 << 31, (masks, -(-vocab // 32))).astype(np.int32)
    allowed[0, best // 32] = 0
    recent = np.full((2, 8), best, np.int32)
    operands = {"allowed": allowed, "bias": bias.view(np.int32).reshape(biases, 2)}
    token = drawn_changed(logits, records, operands, recent, folder)
    greedy = token[: len(changes)].tolist()
    assert greedy[0] == greedy[5] == best
    assert best not in greedy[1:5]


@pytest.mark.parametrize("together", [False, True])
def test_forbidden_tokens_are_not_kept_by_top_k(together: bool, folder: Path) -> None:
    """Masks allow none to more tokens than top-k keeps, spread or in the last part."""
    rng = np.random.default_rng(11)
    vocab, allowances = 3001, (0, 1, 5, 39, 40, 41, 64, 65, 600)
    order = np.arange(vocab)[::-1] if together else rng.permutation(vocab)
    allowed = np.stack([pack_mask(order[:count], vocab) for count in allowances]).view(np.int32)
    overflow = np.delete(np.arange(vocab, dtype=np.int32), [7, 1500, 2999])
    bias = np.zeros(len(overflow), LOGIT_BIAS)
    bias["token"], bias["bias"] = overflow, -3e38
    changes: list[dict[str, float]] = [{"mask": 1 + mask} for mask in range(len(allowances))]
    changes += [{"bias_count": len(bias)}, {"bias_count": len(bias), "mask": 6}, {}]
    rules = [{"top_k": 40}, {"top_k": 40, "top_p": 0.95, "min_p": 0.05}, {"top_k": 2}]
    records = [
        record(**{"repeat_penalty": 1.0, "seed_low": seed, **fields, **rules[seed]})
        for fields in changes
        for seed in range(3)
    ]
    logits = rng.standard_normal((len(records), vocab)).astype(np.float32)
    logits[3 * len(allowances) : -3] -= np.float32(1e38)
    operands = {"allowed": allowed, "bias": bias.view(np.int32).reshape(-1, 2)}
    token = drawn_changed(logits, np.array(records, SAMPLING), operands, RECENT, folder, 64)
    assert (token[:3] == NO_TOKEN).all()
    assert (token[3:6] == order[0]).all()
    assert (token[6:] != NO_TOKEN).sum() >= len(token) - 9


@pytest.mark.parametrize("vocab", [3, 41])
def test_a_row_ends_where_the_next_begins(vocab: int, folder: Path) -> None:
    """Parts do not divide a vocabulary, all tokens are kept: one of another row would weigh."""
    logits = np.random.default_rng(vocab).standard_normal((24, vocab)).astype(np.float32)
    drawn(logits, np.array([record(seed_low=row) for row in range(24)], SAMPLING), folder)


def test_sums_that_would_overflow_are_left_to_the_plain_kernel() -> None:
    """Of a vocabulary that nobody has."""

    def entries(vocab: int) -> list[str]:
        step = lower_graph(sampling_graph(vocab), ShapeKey(0, 1), ROW_PARTS, "cuda")
        return [launch.entry for launch in plan_launches(step.ops, DEVICE, step.scratch).launches]

    assert entries(MAX_VOCABULARY) == ["sample_part", "sample_bins", "sample_draw"]
    assert entries(MAX_VOCABULARY + 1) == ["sample_part", "launch_sample"]
