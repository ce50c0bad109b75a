"""The persistent step kernel: small models of every family on emulated blocks that take turns as a
drawn order says, compared with the definitions bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from accel.cuda import phases
from accel.cuda.row_end import is_drawn, is_plain
from accel.cuda.step_table import (
    ATTENTION_KIND,
    ATTENTION_RECORD,
    HEAD_BYTES,
    PRODUCT_KIND,
    PRODUCT_RECORD,
)
from accel.packets.ops import TABLE
from contract.dtypes import I3R, I4R, I12, ROTATED_KV, DType
from contract.ir.inputs import pack_inputs
from contract.ir.nodes import BufferKind
from contract.records import SAMPLING, SLOT
from contract.shape_key import ShapeKey
from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from reference.cpu.tier import CpuTier
from reference.exact.kv_storage import page_view, store
from reference.limits import Limits
from reference.model.open import open_model
from tests.cuda.emulated_step import DEVICE, aligned_memory
from tests.cuda.recorded_step import PersistentSteps, RecordedModel, outside, table_of
from tests.cuda.test_attention import EVEN, filled_pages

SMALL = {"hidden": 128, "heads": 6, "kv_heads": 1, "head_dim": 64, "feed_forward": 320}
"""Two groups of heads share one KV head, so that two blocks write its rows."""
EXPERTS = {"count": 4, "used": 2, "width": 96}
RECURRENT = {"interval": 2, "state": 32, "key_heads": 2, "value_heads": 6}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {"architecture": "qwen3", **SMALL, "layers": 2},
    "llama": {
        "architecture": "llama", **SMALL, "layers": 2, "qkv_bias": True,
        "attention_output_bias": True, "tied": False,
    },
    "gemma3": {"architecture": "gemma3", **SMALL, "layers": 2, "gemma": {"window": 3, "period": 2}},
    "qwen3moe": {"architecture": "qwen3moe", **SMALL, "layers": 2, "experts": EXPERTS},
    "qwen35": {"architecture": "qwen35", **SMALL, "layers": 2, "recurrent": RECURRENT},
    "wide": {"architecture": "qwen3", **SMALL, "hidden": 2304, "layers": 2},
    "mixed": {"architecture": "qwen3", **SMALL, "hidden": 256, "feed_forward": 768, "layers": 2},
    "super": {
        "architecture": "qwen3", **SMALL, "heads": 4, "hidden": 1280, "feed_forward": 2816,
        "layers": 1,
    },
    "heads128": {"architecture": "qwen3", **SMALL, "head_dim": 128, "layers": 1},
    "heads256": {"architecture": "llama", **SMALL, "heads": 3, "head_dim": 256, "layers": 1},
}  # fmt: skip
FOUR_WARPS = ((4, 1),)
ONE = ShapeKey(1, 1)


def recorded(
    name: str,
    folder: Path,
    key: ShapeKey,
    quant: str = "q8_0",
    context: int = 96,
    dtype: DType = I12,
) -> RecordedModel:
    path = folder / f"{name}-{quant}.gguf"
    if not path.exists():
        write_synthetic(path, sized_spec("tiny", quant=quant, **MODELS[name]))
    pages = 2 * -(-context // 16)
    limits = Limits(2, context, pages, dtype, step_tokens=4, step_rows=4)
    return RecordedModel(open_model(path), limits, key)


def fill_pages(model: RecordedModel) -> None:
    """Sequences have a past, whatever position they are at."""
    rng = np.random.default_rng(3)
    for decl in model.graph.of_kind(BufferKind.STATE):
        if decl.dtype in (I12, *ROTATED_KV):
            filled_pages(model.raw[decl.name], tuple(map(int, decl.shape)), rng, decl.dtype)


def fill_evenly(model: RecordedModel) -> None:
    """A past whose positions weigh about the same, so that the order of their sums matters."""
    rng = np.random.default_rng(4)
    for decl in model.graph.of_kind(BufferKind.STATE):
        if decl.dtype in (I12, *ROTATED_KV):
            pool = page_view(model.raw[decl.name], decl.dtype, tuple(map(int, decl.shape)))
            count, _, offsets, *shape = map(int, decl.shape)
            for offset in range(offsets):
                keys, values = rng.standard_normal((2, count, *shape)).astype(np.float32)
                store(pool, np.arange(count), np.full(count, offset), keys * EVEN, values)


def run(
    steps: PersistentSteps, tokens: list[int], positions: list[int], slots: list[int], seed: int
) -> None:
    """One step by the definitions and by the persistent launches."""
    model = steps.recorded
    before = {name: model.raw[name].copy() for name in steps.states}
    given = model.inputs(tokens, positions, slots)
    model.step(given)
    steps.run(given, before, seed)


def launched(steps: PersistentSteps, scratch: NDArray[np.uint8]) -> None:
    """The one launch of a step of a token, on memory as it is."""
    steps.inputs[:] = pack_inputs(steps.layout, ONE, steps.recorded.inputs([5], [0], [0]))
    (launch,) = steps.launches
    assert steps.launch(launch, scratch, 1)


@pytest.mark.parametrize(
    ("name", "phases"),
    [
        ("qwen3", [11]),
        ("llama", [11]),
        ("gemma3", [3, 3]),
        ("qwen3moe", [3, 3]),
        ("qwen35", [3, 4]),
    ],
)
def test_steps_of_every_family(name: str, phases: list[int], folder: Path) -> None:
    """Three steps, so that both banks of exchanged floats are used again; a dense model is one
    launch from its first norm to its logits."""
    steps = PersistentSteps(recorded(name, folder, ONE), ONE, DEVICE, FOUR_WARPS, folder)
    assert [len(table_of(launch).phases) for launch in steps.launches] == phases
    for position in range(3):
        run(steps, [5 + position], [position], [1], position)


@pytest.mark.parametrize(("name", "seed"), [("mixed", 0), ("mixed", 1), ("super", 0)])
def test_formats_of_one_step(name: str, seed: int, folder: Path) -> None:
    """Q4_K, Q5_0 and Q6_K matrices, two of them in one phase; Q4_K and Q6_K alone, of rows of which
    a warp has several units."""
    model = recorded(name, folder, ONE, "q4_k_m")
    steps = PersistentSteps(model, ONE, DEVICE, FOUR_WARPS, folder)
    (launch,) = steps.launches
    assert len(table_of(launch).formats) > 1
    for position in range(2):
        run(steps, [9 + position], [position], [0], 10 * seed + position)


@pytest.mark.parametrize(
    ("key", "positions", "slots"),
    [
        (ShapeKey(4, 4), [0, 1, 2, 0], [0, 0, 0, 1]),
        (ShapeKey(3, 1), [15, 16, 17], [1, 1, 1]),
        (ShapeKey(2, 0), [0, 0], [1, 0]),
    ],
    ids=str,
)
def test_several_tokens(
    key: ShapeKey, positions: list[int], slots: list[int], folder: Path
) -> None:
    """Tokens that see each other in one step, across pages; fewer tokens than the form has, and
    steps without a row: what was asked for of the last matrix is taken all the same."""
    model = recorded("qwen3", folder, key)
    fill_pages(model)
    steps = PersistentSteps(model, ShapeKey(4, 4), DEVICE, FOUR_WARPS, folder)
    for step in range(2):
        later = [
            position + step * slots.count(slot)
            for position, slot in zip(positions, slots, strict=True)
        ]
        run(steps, list(range(7, 7 + len(slots))), later, slots, step)


@pytest.mark.parametrize(
    ("name", "dtype", "context", "position", "multiprocessors"),
    [
        ("qwen3", I4R, 96, 0, 3),
        ("heads128", I3R, 96, 62, 3),
        ("heads256", I4R, 96, 15, 3),
        ("heads128", I4R, 1216, 1150, 7),
        ("qwen3", I3R, 4224, 4130, 5),
    ],
    ids=str,
)
def test_rotated_pages(
    name: str, dtype: DType, context: int, position: int, multiprocessors: int, folder: Path
) -> None:
    """A dense model is one launch; a row is rotated where it is made, and back where it is read."""
    model = recorded(name, folder, ONE, context=context, dtype=dtype)
    fill_evenly(model)
    device = replace(DEVICE, multiprocessors=multiprocessors)
    steps = PersistentSteps(model, ONE, device, FOUR_WARPS, folder)
    assert len(steps.launches) == 1
    for step in range(2):
        run(steps, [11 + step], [position + step], [1], position + step)


def test_launches_that_begin_within_a_layer(folder: Path) -> None:
    """Behind attention of several tokens over rotated pages; the longest row is in their first
    phases, whose tables lie behind its squares."""
    key = ShapeKey(4, 4)
    model = recorded("wide", folder, key, dtype=I4R)
    fill_pages(model)
    steps = PersistentSteps(model, key, DEVICE, ((8, 2),), folder)
    assert [len(table_of(launch).phases) for launch in steps.launches] == [4, 4]
    for step in range(2):
        run(steps, [7, 8, 9, 10], [3 * step, 3 * step + 1, 3 * step + 2, step], [0, 0, 0, 1], step)


@pytest.mark.parametrize(
    ("context", "position", "blocks", "multiprocessors", "max_parts"),
    [
        (1216, 1150, (4, 1), 3, 256),
        (1216, 1150, (4, 1), 7, 256),
        (1088, 1022, (8, 1), 9, 256),
        (4224, 4130, (8, 1), 5, 64),
        (4224, 4130, (4, 1), 5, 64),
        (96, 62, (6, 1), 3, 256),
        (192, 190, (4, 1), 8, 256),
    ],
    ids=str,
)
def test_contexts_of_several_items(
    context: int,
    position: int,
    blocks: tuple[int, int],
    multiprocessors: int,
    max_parts: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One block passes over all tiles, or blocks merge those of several, of two spans or, of more
    tiles than there is room for, spans, of which there may be more than warps; both steps count
    from 0."""
    monkeypatch.setattr(phases, "MAX_TILE_PARTS", max_parts)
    model = recorded("qwen3", folder, ONE, context=context)
    fill_evenly(model)
    device = replace(DEVICE, multiprocessors=multiprocessors)
    steps = PersistentSteps(model, ONE, device, (blocks,), folder)
    for step in range(2):
        run(steps, [11], [position + step], [0], position + step)


@pytest.mark.parametrize("broken", [False, True])
def test_broken_queries(broken: bool, folder: Path) -> None:
    """The norm's weight of one channel of queries is not finite, those of keys are."""
    model = recorded("qwen3", folder, ONE)
    if broken:
        model.raw["model.attn_q_norm.weight[1]"].view(np.float32)[3] = np.inf
    steps = PersistentSteps(model, ONE, DEVICE, FOUR_WARPS, folder)
    scratch = aligned_memory(steps.schedule.shared_bytes)
    scratch[:] = np.resize(np.float32([0.5, -1.0]).view(np.uint8), scratch.size)
    launched(steps, scratch)
    logits = steps.states["output.logits"].view(np.float32)
    found = np.isnan(logits[: model.arrays["output.logits"].size])
    assert found.all() if broken else not found.any()


def test_integers_of_a_row_are_limited(folder: Path) -> None:
    """All of a normalized row is so close to 2 that it is rounded to 2048, one too much."""
    model = recorded("qwen3", folder, ONE)
    embeddings, weights = "model.token_embd.weight", "model.attn_norm.weight[0]"
    blocks = model.raw[embeddings].reshape(320, -1, 34)[5]
    blocks[:, :2] = np.float16([1.0]).view(np.uint8)
    blocks[:, 2:] = np.where(np.arange(32) % 3 == 0, 0x81, 0x7F)
    model.raw[weights].view(np.float32)[:] = np.nextafter(np.float32(2), np.float32(0))
    for name in (embeddings, weights):
        decl = model.graph.buffers[name]
        stored = model.raw[name].reshape(int(decl.shape[0]) if len(decl.shape) > 1 else 1, -1)
        model.arrays[name] = CpuTier().upload(decl, stored).matrix
    steps = PersistentSteps(model, ONE, DEVICE, FOUR_WARPS, folder)
    run(steps, [5], [0], [0], 0)


def test_attention_is_told_of_another_window(folder: Path) -> None:
    """It settles then what the one before left, also where it has nothing to merge itself."""
    steps = PersistentSteps(recorded("qwen3", folder, ONE), ONE, DEVICE, FOUR_WARPS, folder)
    (launch,) = steps.launches
    table = table_of(launch)

    def told(packets: NDArray[np.void]) -> list[int]:
        records = table.bound(packets, 0)[HEAD_BYTES:].view(ATTENTION_RECORD)
        return [int(one["other_window"]) for one in records if one["kind"] == ATTENTION_KIND]

    assert told(steps.packets) == [0, 0]
    changed = steps.packets.copy()
    last = [phase for phase in table.phases if isinstance(phase, phases.AttentionPhase)][-1]
    changed["size"][last.part][TABLE["flash_attn_part"].sizes.index("window")] = 3
    assert told(changed) == [0, 1]


def without_rows(table: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The first product writes nothing, so that who waits for it waits forever."""
    changed = table.copy()
    first = changed[HEAD_BYTES : HEAD_BYTES + PRODUCT_RECORD.itemsize].view(PRODUCT_RECORD)
    assert first["kind"] == PRODUCT_KIND
    first["y"] = 0
    return changed


def test_the_stop_word_ends_a_step_that_waits(folder: Path) -> None:
    """Whatever is missing then is not waited for."""
    model = recorded("qwen3", folder, ONE)
    steps = PersistentSteps(model, ONE, DEVICE, FOUR_WARPS, folder, changed=without_rows)
    steps.stop[0] = 1
    launched(steps, aligned_memory(steps.schedule.shared_bytes))


def test_a_nan_is_never_taken_for_what_has_yet_to_come(folder: Path) -> None:
    """Inputs are the one whose inverted bits are zeros, and so is what blocks make of it."""
    model = recorded("qwen3", folder, ONE)
    steps = PersistentSteps(model, ONE, DEVICE, FOUR_WARPS, folder)
    launched(steps, aligned_memory(steps.schedule.shared_bytes))
    logits = steps.states["output.logits"].view(np.float32)
    assert np.isnan(logits[: model.arrays["output.logits"].size]).all()
    assert steps.states["state.slots"].view(SLOT)[0]["last_token"] == -1


@pytest.mark.parametrize("rows", [None, slice(3, 320, 7)], ids=["all", "some"])
def test_of_equal_logits_the_first_is_taken(rows: slice | None, folder: Path) -> None:
    """Whichever blocks made them: rows of the table are one row."""
    model = recorded("qwen3", folder, ONE)
    name = "model.token_embd.weight"
    table = model.raw[name].reshape(320, -1)
    table[slice(None) if rows is None else rows] = table[3]
    model.arrays[name] = CpuTier().upload(model.graph.buffers[name], table).matrix
    steps = PersistentSteps(model, ONE, DEVICE, FOUR_WARPS, folder)
    for position in range(6):
        run(steps, [3 + position], [position], [0], position)
        token = int(steps.states["state.slots"].view(SLOT)[0]["last_token"])
        assert token == 0 if rows is None else token % 7 != 3 or token == 3


@pytest.mark.parametrize(
    ("changed", "plain"),
    [
        ({}, True),
        ({"position": 5, "repeat_last_n": 64}, False),
        ({"position": 0, "repeat_last_n": 64}, True),
        ({"mask": 1}, False),
        ({"bias_count": 2}, False),
        ({"temperature": 0.8}, True),
        ({"temperature": 0.8, "mask": 1}, False),
        ({"position": 5, "seed_low": 7, "top_k": 40, "top_p": 0.9}, True),
    ],
    ids=str,
)
def test_what_changes_the_logits_of_a_row(changed: dict[str, float], plain: bool) -> None:
    """A temperature does not count."""
    record = np.zeros(1, SAMPLING)[0]
    for name, value in changed.items():
        record[name] = value
    assert is_plain(record) == plain
    assert is_drawn(record) == ("temperature" in changed)


def test_what_others_touch_shares_no_memory_with_a_launch(folder: Path) -> None:
    """A block may be phases ahead of another that reads the launch's inputs still."""
    steps = PersistentSteps(recorded("qwen3", folder, ONE), ONE, DEVICE, FOUR_WARPS, folder)
    (launch,) = steps.launches
    inside = range(launch.first, launch.first + launch.count)
    touched = {
        tensor.buffer
        for op in (steps.step.ops[number] for number in inside)
        for tensor in op.operands
        if tensor is not None and tensor.buffer in steps.step.scratch
    }

    def place(name: str) -> range:
        start = steps.schedule.shared[name]
        return range(start, start + steps.step.scratch[name])

    scratch = steps.step.scratch
    shared = {
        name
        for written in (False, True)
        for name in outside(steps.step.ops, scratch, inside, written=written)
    }
    assert shared
    for name in shared:
        for other in touched - {name}:
            first, second = place(name), place(other)
            assert first.stop <= second.start or second.stop <= first.start, (name, other)
