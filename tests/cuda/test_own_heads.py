"""Several devices with pages of their own KV heads, on the double of the driver: the bits of the
CPU tier, the bytes of its pages, and the memory that is planned."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel.cuda.multi_device import ShardedBuffer
from accel.cuda.planning import divided_buffers, planned_bucket
from accel.cuda.unpacked_pages import UNPACKED, unpack_rotated
from accel.packets import shares
from accel.packets.head_shares import has_own_heads, of_own_heads, pages_of_heads
from accel.packets.rules import ROW_PARTS, lower_graph
from accel.packets.shares import ALL_GATHER, Share, share_step
from accel.packets.step import Op
from contract.arithmetic import PAGE_TOKENS
from contract.dtypes import F16, F32, I3R, I4R, I12, Q8_0, DType
from contract.ir.graph import BufferDecl, BufferKind
from contract.records import QUERY_TOKEN, SAMPLING
from contract.shape_key import ShapeKey
from contract.tier import Tier
from harness.cli import inspect_command
from harness.memory import device_pages_in, plans_of, whole_pages
from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from reference.cpu.tier import CpuTier
from reference.limits import Limits, whole_contexts
from reference.memory.planner import MemoryPlan, longest_plan, state_buffers
from reference.memory.row_copies import HostBytes
from reference.model.open import Model, open_model
from reference.runner import LOGITS, ModelRunner, StepInput
from tests.cuda.emulated_step import DEVICE
from tests.cuda.fake_devices import EmulatedDevices, FakeDevices
from tests.cuda.test_multi_device import opened, submitted
from tests.cuda.test_persistent import MODELS, ONE
from tests.families_table import FAMILIES

PAIR = {**MODELS["llama"], "heads": 4, "kv_heads": 2}
QUAD = {**MODELS["qwen3"], "heads": 4, "kv_heads": 4}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "pair": PAIR,
    "three": {**PAIR, "heads": 6, "kv_heads": 3},
    "quad": QUAD,
    "windows": {**MODELS["gemma3"], "heads": 4, "kv_heads": 2},
    "sinks": {**FAMILIES["gpt-oss-experts"], "heads": 4, "kv_heads": 2},
    "gates": {**FAMILIES["qwen35"], "heads": 4, "kv_heads": 2},
    "whole-norms": {**FAMILIES["olmo2"], "heads": 4, "kv_heads": 2},
    "fused": {**FAMILIES["phi3"], "heads": 4, "kv_heads": 2},
    "shared-pages": {**FAMILIES["gemma4-shared-kv"], "heads": 4, "kv_heads": 2},
    "latent": FAMILIES["deepseek2"],
}


def model_of(name: str, folder: Path, **changed: Any) -> Model:
    path = folder / f"own-heads-{name}-{'-'.join(map(str, changed.values()))}.gguf"
    if not path.exists():
        write_synthetic(path, sized_spec("tiny", quant="q8_0", **{**SHAPES[name], **changed}))
    return open_model(path)


def limits_of(dtype: DType) -> Limits:
    return Limits(2, 32, 4, dtype, step_tokens=4, step_rows=2)


def pools(runner: ModelRunner) -> list[Any]:
    """The buffers of pages."""
    paged, _ = state_buffers(runner.graph)
    return [runner._buffers[name] for name in sorted(paged)]


def outcomes(model: Model, tier: Tier, dtype: DType) -> dict[str, list[bytes]]:
    """Logits of steps that are all in flight at once, the bytes of all pages, and what copies of
    pages save, after one page was copied and one was loaded."""
    limits = limits_of(dtype)
    with ModelRunner(model, tier, limits) as runner:
        in_flight = list(submitted(runner))
        logits = [runner.collect(one).logits.tobytes() for one in in_flight]
        copies = runner.page_copies()
        assert copies is not None
        used = limits.pages // 2 - 1
        copies.copy(used, 0)
        copies.load_all([copies.save(used), HostBytes(copies.save(used).bytes()[::-1])], [3, 2])
        saved = [copies.save(page).bytes().tobytes() for page in range(limits.pages)]
        pages = [tier.read(one, 0, one.nbytes).tobytes() for one in pools(runner)]
    return {"logits": logits, "saved": saved, "pages": pages}


def divided_among(tier: Any, model: Model, dtype: DType) -> set[int]:
    """Among how many devices pages are divided."""
    with ModelRunner(model, tier, limits_of(dtype)) as runner:
        return {one.nbytes // part.nbytes for one in pools(runner) for part in one.parts}


@pytest.mark.parametrize(
    ("name", "count", "dtype", "parts"),
    [
        ("pair", 2, F16, 2),
        ("pair", 2, I12, 2),
        ("pair", 2, I3R, 2),
        ("three", 2, I12, 1),
        ("quad", 4, I4R, 4),
        ("quad", 2, F32, 2),
        ("windows", 2, I12, 2),
        ("sinks", 2, I12, 2),
        ("gates", 2, I12, 2),
        ("whole-norms", 2, I12, 2),
        ("fused", 2, I12, 2),
        ("shared-pages", 2, I12, 2),
        ("latent", 2, I12, 1),
    ],
    ids=str,
)
def test_graphs_have_the_bits_of_the_cpu(
    name: str, count: int, dtype: DType, parts: int, folder: Path
) -> None:
    """Whether KV heads divide or not; pages and copies of them have the bytes of one device."""
    compare(name, count, dtype, "", parts, folder)


@pytest.mark.parametrize(
    ("name", "count", "dtype", "parts"),
    [
        ("pair", 2, I12, 2),
        ("pair", 2, I4R, 2),
        ("pair", 3, I12, 1),
        ("three", 3, I12, 3),
        ("quad", 4, I12, 4),
    ],
    ids=str,
)
def test_one_launch_has_the_bits_of_the_cpu(
    name: str, count: int, dtype: DType, parts: int, folder: Path
) -> None:
    """Beside steps of more tokens by graphs."""
    compare(name, count, dtype, "4x1", parts, folder)


def compare(name: str, count: int, dtype: DType, step: str, parts: int, folder: Path) -> None:
    model, driver = model_of(name, folder), EmulatedDevices(folder, count, MULTIPROCESSOR_COUNT=3)
    expected = outcomes(model, CpuTier(), dtype)
    with opened(driver, ",".join(str((n + 1) % count) for n in range(count)), step=step) as tier:
        assert outcomes(model, tier, dtype) == expected
        assert divided_among(tier, model, dtype) == {parts}
    assert bool(driver.shared) == bool(step)


def test_copies_of_odd_words_have_the_bytes_of_the_cpu(folder: Path) -> None:
    """A head of a position has 17 words."""
    compare("pair", 2, Q8_0, "", 2, folder)


def test_pages_of_one_device_load_on_two(folder: Path) -> None:
    """And the other way round: a sequence goes on where another tier saved it."""
    model, limits = model_of("pair", folder), limits_of(I12)
    query, row = np.zeros(1, QUERY_TOKEN), np.zeros(1, np.int32)
    query["token"], query["slot"], query["position"] = 9, 1, 7
    table = np.arange(limits.pages, dtype=np.int32)[::-1].reshape(limits.slots, -1).copy()
    step = StepInput(query, row, np.zeros(1, SAMPLING), table, (LOGITS,))
    with (
        CpuTier() as one,
        opened(EmulatedDevices(folder)) as two,
        ModelRunner(model, one, limits) as first,
        ModelRunner(model, two, limits) as second,
    ):
        for here, there in ((first, second), (second, first)):
            for submission in list(submitted(here)):
                here.collect(submission)
            expected = here.step(step).logits.tobytes()
            sources, targets = here.page_copies(), there.page_copies()
            assert sources is not None
            assert targets is not None
            targets.load_all([sources.save(table[1, 0])], [table[1, 0]])
            assert there.step(step).logits.tobytes() == expected
            targets.load(HostBytes(np.zeros(sources.page_bytes, np.uint8)), table[1, 0])
            sources.load(HostBytes(np.zeros(sources.page_bytes, np.uint8)), table[1, 0])


@pytest.mark.parametrize("dtype", [I12, F16], ids=str)
def test_the_host_reads_and_writes_pages_as_those_of_one_device(dtype: DType) -> None:
    """Any bytes of them, across pages and heads."""
    decl = BufferDecl("kv", BufferKind.STATE, dtype, (3, 2, 16, 4, 16))
    nbytes = 3 * 2 * 16 * 4 * dtype.row_bytes(16)
    with opened(FakeDevices()) as tier:
        own = pages_of_heads(decl, 2)
        parts = tier._on_each(lambda one: one.alloc(own, nbytes // 2))
        buffer = tier._keep(ShardedBuffer(decl, nbytes, parts))
        want = np.zeros(nbytes, np.uint8)
        rng = np.random.default_rng(1)
        for offset, count in ((0, nbytes), (1, 5), (nbytes - 9, 9), (777, 2000), (64, 0)):
            want[offset : offset + count] = data = rng.integers(0, 256, count, np.uint8)
            tier.write(buffer, offset, data)
            assert np.array_equal(tier.read(buffer, offset, count), data)
            assert np.array_equal(mapped := tier.map(buffer), want)
            assert not mapped.flags.writeable
        halves = [one.read(p, 0, p.nbytes) for one, p in zip(tier._members, parts, strict=True)]
        stretches = want.reshape(3 if dtype is I12 else 3 * 32, 2, -1)
        for number, half in enumerate(halves):
            assert np.array_equal(half, stretches[:, number].reshape(-1))


@pytest.mark.parametrize(
    ("shape", "dtype", "devices", "divides"),
    [
        ((2, 2, 16, 8, 128), I12, 2, True),
        ((2, 2, 16, 8, 128), I12, 8, True),
        ((2, 2, 16, 8, 128), I12, 3, False),
        ((2, 2, 16, 8, 128), I12, 16, False),
        ((2, 2, 16, 8, 128), I12, 1, False),
        ((2, 2, 16, 1, 576), I12, 2, False),
        ((2, 2, 16, 2, 8), I12, 2, False),
        ((2, 2, 16, 2, 32), Q8_0, 2, False),
        ((2, 2, 16, 2, 32), I4R, 2, True),
        ((2, 64), F32, 2, False),
    ],
    ids=str,
)
def test_pages_whose_heads_divide(
    shape: tuple[int, ...], dtype: DType, devices: int, divides: bool
) -> None:
    """Evenly, in rows that divide and in words."""
    assert has_own_heads(BufferDecl("kv", BufferKind.STATE, dtype, shape), devices) == divides


def test_nothing_is_gathered_before_attention(folder: Path) -> None:
    """Queries, keys and values stay on their device; devices meet for what attention makes, and
    where they met before."""
    graph = model_of("quad", folder).graph(limits_of(I12))
    step = lower_graph(graph, ShapeKey(4, 1), ROW_PARTS, "cuda")
    pages = {decl.name: 1 for decl in graph.of_kind(BufferKind.STATE) if len(decl.shape) == 5}
    gathered = []
    for kept in ({}, pages):
        ops = share_step(step, Share(1, 2), (), kept).step.ops
        gathers = [op for op in ops if op.device is ALL_GATHER]
        gathered.append(sum(op.operands[1] is not None for op in gathers))
    writes = [number for number, op in enumerate(ops) if op.name == "kv_write_batched"]
    for number in writes:
        before = [op.name for op in ops[number - 4 : number]]
        assert before == ["rms_norm", "rope", "rms_norm", "rope"]
    assert gathered[1] == gathered[0] - 2 * len(writes)


@pytest.mark.parametrize(("name", "gathered"), [("fused", 1), ("whole-norms", 2)])
def test_what_holds_more_than_own_heads_is_gathered(name: str, gathered: int, folder: Path) -> None:
    """Before the first op of heads: a product of queries, keys and values in one, and what is
    normed over all heads."""
    graph = model_of(name, folder).graph(limits_of(I12))
    step = lower_graph(graph, ShapeKey(4, 1), ROW_PARTS, "cuda")
    divided = divided_buffers(graph, [step], Share(0, 2))
    ops = planned_bucket(step, DEVICE, share=Share(0, 2), divided=divided).step.ops
    first = [op.name for op in ops].index("rope")
    wholes = [op.operands[1] for op in ops[:first] if op.device is ALL_GATHER]
    assert sum(whole is not None for whole in wholes) == gathered
    assert ops[first].max_sizes()["heads"] == 2


def test_unpacked_pages_take_the_room_of_own_heads(folder: Path) -> None:
    """Where the heads divide."""
    graph, rooms = model_of("quad", folder).graph(limits_of(I4R)), []
    step = unpack_rotated(lower_graph(graph, ONE, ROW_PARTS, "cuda"), graph, ONE)
    for share in (Share(0, 1), Share(0, 2), Share(0, 3), Share(3, 4)):
        divided = divided_buffers(graph, [step], share)
        bucket = planned_bucket(step, DEVICE, share=share, divided=divided)
        rooms.append(bucket.step.scratch[UNPACKED])
    assert [rooms[0] // room for room in rooms] == [1, 2, 1, 4]


def test_a_wrong_head_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: both devices take the first half of the queries."""

    def first_half(op: Op, index: int, devices: int) -> Op:
        return of_own_heads(op, 0 if op.name == "flash_attn_part" else index, devices)

    monkeypatch.setattr(shares, "of_own_heads", first_half)
    model = model_of("pair", folder)
    with opened(EmulatedDevices(folder)) as tier:
        got = outcomes(model, tier, I12)
    assert got["logits"] != outcomes(model, CpuTier(), I12)["logits"]


BUDGET = 6 << 20


def longest(model: Model, count: int) -> tuple[MemoryPlan, str]:
    """The plan of the longest context that fits the memory of each device, and what ``inspect``
    says of its pages."""

    def limits_at(context: int) -> Limits:
        return whole_contexts(1, context, I12, 4, 1, 16)

    with opened(FakeDevices(count), ",".join(map(str, range(count)))) as tier:
        plan = longest_plan(plans_of(model, limits_at, tier.footprint, False), 1 << 20, BUDGET)
        facts = {"devices": count, "whole_pages": whole_pages(model, limits_of(I12), tier)}
    assert plan is not None
    return plan, inspect_command.divided_pages(facts)


def test_contexts_grow_with_devices(folder: Path) -> None:
    """A token takes half as much of two devices, a quarter of four; where heads do not divide as
    much as of one, and that is said."""
    model = model_of("quad", folder, layers=4)
    (one, alone), (two, own), (three, whole), (four, _) = (
        longest(model, count) for count in (1, 2, 3, 4)
    )
    per_token = [plan.kv_per_token for plan in (two, three, four)]
    assert per_token == [one.kv_per_token // 2, one.kv_per_token, one.kv_per_token // 4]
    cached = 64 * one.kv_per_token * PAGE_TOKENS
    held = [device_pages_in(plan, cached) for plan in (one, two, four)]
    assert [pages // 63 for pages in held] == [1, 2, 4]  # plans align their buffers
    assert 1.7 * one.context < two.context
    assert 2.4 * one.context < four.context
    assert three.context < two.context
    assert (alone, own) == ("", ", of a device's own KV heads")
    assert whole == ", whole on each device: KV heads do not divide among 3"
