"""NVRTC takes every tuned kernel for the oldest architecture and for the tuned one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from accel.cuda.device import Device
from accel.cuda.expert_groups import FOUR_ROWS_TOKENS
from accel.cuda.expert_prompts import SINGLE_WARP_TOKENS
from accel.cuda.packed_tiles import UNITS
from accel.cuda.plan import PlannedLaunch, plan_launches
from accel.cuda.planning import divided_buffers, planned_bucket
from accel.cuda.program import OPTIONS, Compiler, Source, tuned_source
from accel.cuda.step_choice import BLOCKS, StepChoice
from accel.cuda.unpacked_pages import unpack_rotated
from accel.packets.rules import lower_graph
from accel.packets.shares import Share
from contract import dtypes
from contract.errors import TierUnavailable
from contract.ir.graph import BufferKind
from contract.ir.scratch import buffer_bytes
from contract.shape_key import ShapeKey
from reference.memory.row_copies import ONE_ROW, End, copying
from tests.cuda import test_delta_net, test_experts, test_selective_scan, test_sending
from tests.cuda.emulated_step import DEVICE, OLDER
from tests.cuda.product_cases import layer, one_product, spans
from tests.cuda.test_attention import PARTS, Heads, attention
from tests.cuda.test_attention_clusters import heads_and_attention
from tests.cuda.test_head_rows import heads_graph
from tests.cuda.test_persistent import recorded
from tests.cuda.test_rows import scaled
from tests.cuda.test_sampling import sampling_graph
from tests.needs import missing

MULTIPROCESSORS = 132
"""So many that blocks share rows."""
OPERANDS = ("M", "SCALE", "SUMS", "RESIDUAL", "PRODUCT", "PACKET_COUNT")
OF_MATRICES = (f"{name}{matrix}" for name in "WYB" for matrix in ("", *range(4)))
OPERAND_AT = frozenset((*OPERANDS, *OF_MATRICES))
"""Macros of the number of an operand in the packets of a launch, negative where it is absent."""
QUICK = ("--Ofast-compile=max",)
"""Hardly optimized, which takes a third of the time off; what has to be a constant, as operands of
instructions, then has to be one as it is written."""


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    try:
        return Compiler()
    except TierUnavailable as error:
        missing(str(error), "pip install zinc-rt[cuda]")


def sources(device: Device, folder: Path) -> list[Source]:
    """Of products with norms, biases, gates and residuals, of attention and what stands before, and
    of all of them as phases."""
    graphs = [
        (layer(1, dtypes.Q6_K).graph, (1, 9, 80)),
        (layer(1, dtypes.Q6_K, biases=True).graph, (9, 24)),
        (spans(dtypes.Q4_K, True, 1).graph, (9, 64)),
        (one_product(dtypes.Q5_K, 4096, 256, 1).graph, (512,)),
        (attention(Heads(4, 1, 128)), (1, 9, 80)),
        (attention(Heads(4, 1, 256)), (80,)),
        (heads_graph(128, 1, True, 1), (1,)),
        (scaled(("scale", "add")), (1,)),
        (heads_and_attention(4, 1, 128), (1,)),
        (heads_and_attention(4, 1, 256), (4,)),
        (heads_and_attention(4, 1, 128, dtype=dtypes.I4R), (1, 9)),
        (heads_and_attention(4, 1, 64, dtype=dtypes.I3R), (1, 9)),
    ]
    found = [tuned_source(UNITS.file, {"DTYPE": dtypes.Q4_K.ggml_id})]
    found += [tuned_source(name, {}) for name in ("find_broken.cu", "shift_inputs.cu")]
    for graph, counts in graphs:
        for tokens in counts:
            key = ShapeKey(tokens, 0)
            step = unpack_rotated(lower_graph(graph, key, PARTS, "cuda"), graph, key)
            plan = plan_launches(step.ops, replace(device, multiprocessors=MULTIPROCESSORS))
            found += [launch.source for launch in plan.launches]
    step = lower_graph(sampling_graph(40), ShapeKey(0, 3), PARTS, "cuda")
    found += [launch.source for launch in plan_launches(step.ops, device).launches]
    found += [launch.source for launch in persistent_launches(device, folder)]
    found += [launch.source for launch in gathers(device, folder)]
    found += [launch.source for launch in experts_and_delta_nets(device, folder)]
    tuned = (source for source in found if source.name.endswith(".cu"))
    return list({unnumbered(source): source for source in tuned}.values())


def unnumbered(source: Source) -> Source:
    """The same wherever the operands lie in the packets, as long as the same ones are there."""
    macros = [(name, value >= 0 if name in OPERAND_AT else value) for name, value in source.macros]
    return replace(source, macros=tuple(macros))


def gathers(device: Device, folder: Path) -> list[PlannedLaunch]:
    """Of a layer divided among three devices; of attention of a device's own heads, of some tokens
    and of few, and of copies of its pages."""
    step = lower_graph(layer(1, dtypes.Q6_K).graph, ShapeKey(1, 0), PARTS, "cuda")
    plans = [planned_bucket(step, device, share=Share(1, 3)).plan]
    graph = test_sending.model_of("heads", folder).graph(test_sending.limits_of(20))
    for tokens in (4, 20):
        step = lower_graph(graph, ShapeKey(tokens, 1), PARTS, "cuda")
        divided = divided_buffers(graph, [step], Share(1, 2))
        plans.append(planned_bucket(step, device, share=Share(1, 2), divided=divided).plan)
    pool = next(decl for decl in divided.values() if decl.kind is BufferKind.STATE)
    width = buffer_bytes(pool, ONE_ROW) // int(pool.shape[0]) // dtypes.F32.block_bytes
    ends: tuple[End, End] = (str, int(pool.shape[0])), (lambda name: "saved", 1)
    step = lower_graph(copying("save", {pool.name: width}, *ends), ONE_ROW, PARTS, "cuda")
    plans.append(planned_bucket(step, device, share=Share(1, 2), divided={pool.name: pool}).plan)
    return [
        launch
        for plan in plans
        for launch in plan.launches
        if launch.gathers or launch.entry == "copy_heads"
    ]


def experts_and_delta_nets(device: Device, folder: Path) -> list[PlannedLaunch]:
    """Of one token, of few and of many, experts with a rule for all that stands around them and
    without; of few tokens also where their blocks must not wait for each other."""
    one = ShapeKey(1, 1)
    graphs = [
        test_experts.recorded("shared", folder, one, "q4_k_m").graph,
        test_experts.recorded("gemma4", folder, one, "q5_k").graph,
        test_delta_net.recorded("qwen35", folder, one).graph,
        test_selective_scan.recorded("one group", folder, one, 4, 1).graph,
    ]
    found: list[PlannedLaunch] = []
    for graph in graphs:
        # Only rows that are read pass the last layer.
        many = SINGLE_WARP_TOKENS + 1
        more = FOUR_ROWS_TOKENS + 1
        for tokens, rows in ((1, 1), (4, 1), (9, 3), (80, 70), (more, 1), (many, many - 1)):
            step = lower_graph(graph, ShapeKey(tokens, rows), PARTS, "cuda")
            for shared in (False, True) if tokens == 4 else (False,):
                found += plan_launches(step.ops, replace(device, mps_enabled=shared)).launches
    return found


def persistent_launches(device: Device, folder: Path) -> list[PlannedLaunch]:
    """Of a dense model's step of one token, in the block the tier chooses, alone and as one of two
    devices and with rotated pages, and what draws behind it."""
    one = ShapeKey(1, 1)
    plans = []
    for dtype, count in ((dtypes.I12, 1), (dtypes.I12, 2), (dtypes.I4R, 1), (dtypes.I3R, 1)):
        graph = recorded("mixed", folder, one, "q4_k_m", dtype=dtype).graph
        step = unpack_rotated(lower_graph(graph, one, PARTS, "cuda"), graph, one)
        plans.append(planned_bucket(step, device, StepChoice(BLOCKS), Share(0, count)).plan)
    assert plans[0].short is not None
    drawing = [launch for launch in plans[0].short.drawn if launch.workspace is not None]
    launches = [launch for plan in plans for launch in plan.launches]
    return [*(launch for launch in launches if launch.table is not None), *drawing]


def values_of(source: Source) -> frozenset[tuple[object, ...]]:
    """The source, and what each of its macros is."""
    macros = unnumbered(source).macros
    return frozenset({(source.name,), *((source.name, *macro) for macro in macros)})


def with_every_value(sources: list[Source]) -> Iterator[Source]:
    """Some of them, in which each macro of each kernel has every value that it has in all: first
    those with the most that none before has."""
    left = frozenset[tuple[object, ...]]().union(*map(values_of, sources))
    while left:
        source = max(sources, key=lambda one: len(values_of(one) & left))
        left -= values_of(source)
        yield source


def test_some_sources_have_every_value(folder: Path) -> None:
    """Of every macro, of every kernel; and they are fewer."""
    every = sources(DEVICE, folder)
    some = list(with_every_value(every))
    values = [
        {(source.name, *macro) for source in found for macro in unnumbered(source).macros}
        for found in (every, some)
    ]
    assert values[0] == values[1]
    assert {source.name for source in every} == {source.name for source in some}
    assert len(some) < len(every)


def of_each_kernel(sources: list[Source]) -> Iterable[Source]:
    return {source.name: source for source in with_every_value(sources)}.values()


@pytest.mark.parametrize(
    ("device", "chosen"),
    [
        pytest.param(DEVICE, of_each_kernel, id="each"),
        pytest.param(OLDER, of_each_kernel, marks=pytest.mark.long, id="each, older"),
        pytest.param(DEVICE, with_every_value, marks=pytest.mark.long, id="each value"),
        pytest.param(DEVICE, list, marks=pytest.mark.soak, id="all"),
        pytest.param(OLDER, list, marks=pytest.mark.soak, id="all, older"),
    ],
)
def test_tuned_kernels_compile(
    device: Device,
    compiler: Compiler,
    folder: Path,
    chosen: Callable[[list[Source]], Iterable[Source]],
) -> None:
    """With the options of the tier, hardly optimized: what is no C++, and no instruction of the
    architecture, is told apart."""
    every = sources(device, folder)
    names = {source.name for source in every}
    attention = {f"attention_{kind}.cu" for kind in ("spans", "tokens")}
    assert names >= {"step.cu", "all_gather.cu"} | attention
    assert names >= {f"delta_{kind}.cu" for kind in test_delta_net.KINDS} | {
        "scan_rows.cu",
        "scaled_rows.cu",
    }
    assert names >= {
        f"expert_{kind}.cu" for kind in ("router", "gates", "down", "product", "order")
    }
    assert names >= {"sample_bins.cu", "sample_draw.cu"}
    of_prompts = {f"expert_{kind}.cu" for kind in ("logits", "choice", "gather")}
    assert (names & of_prompts == of_prompts) == (device is DEVICE)
    newer = {"unit_groups.cu", "unit_spans.cu", "half_groups.cu"}
    newer |= {"attention_clusters.cu", "attention_groups.cu"}
    older = {"unit_matrix.cu", "attention_blocks.cu"}
    of_device = (older | newer) & names
    parted = any(dict(source.macros).get("FOLDED", -1) >= 0 for source in every)
    assert parted == (device is DEVICE)
    assert of_device == (newer if device is DEVICE else older)
    for source in chosen(every):
        macros = (f"-D{name}={value}" for name, value in source.macros)
        options = (*OPTIONS, *macros, *QUICK)
        assert compiler.compile(source.name, source.text, device.architecture, options)
