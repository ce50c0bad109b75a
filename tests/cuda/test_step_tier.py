"""Persistent launches in the tier, on the double of the driver: what a kernel is given, and how one
that does not end is stopped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from accel.cuda.plan import plan_launches
from accel.cuda.step_table import ATTENTION_RECORD, HEAD, PRODUCT_KIND, PRODUCT_RECORD
from accel.cuda.tier import CudaTier
from accel.packets.packet import PACKET
from accel.packets.rules import ROW_PARTS, lower_graph
from contract import dtypes
from contract.dtypes import I12
from contract.errors import ConfigError, DeviceLost
from contract.ir.inputs import input_layout, pack_inputs
from contract.ir.nodes import BufferKind
from contract.records import QUERY_TOKEN, SAMPLING
from contract.shape_key import ShapeKey
from contract.tier import Fence
from reference.limits import Limits
from reference.model.open import Model
from reference.runner import ModelRunner, StepInput
from tests.cuda.conftest import OpenTier
from tests.cuda.emulated_step import DEVICE
from tests.cuda.fake_context import words
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.fake_kernels import PLAIN
from tests.cuda.product_cases import Case, layer
from tests.cuda.test_persistent import recorded

ARGUMENTS = (8, 8, 8, 8)
ONE = ShapeKey(1, 0)
ONE_ROW = ShapeKey(1, 1)
KEPT_BYTES = 256 + 2 * 768 * 4 + 1024
"""The state, two banks of a row of 768 floats, and the table of three phases."""


@dataclass
class Seen:
    """What the kernel found where its table is."""

    head: np.void
    records: np.ndarray
    stop: int


def submitted(tier: CudaTier, case: Case) -> Fence:
    """A step of one token, all of whose ops are phases."""
    graph, layout = case.graph, input_layout(case.graph, ONE)
    buffers = {}
    for decl in graph.buffers.values():
        if decl.kind is BufferKind.WEIGHT:
            stored = case.matrices.get(decl.name)
            values = stored[1] if stored else case.vectors[decl.name].reshape(1, -1).view(np.uint8)
            buffers[decl.name] = tier.upload(decl, values)
        elif decl.kind is BufferKind.OUTPUT:
            buffers[decl.name] = tier.alloc(decl, 4 * int(decl.shape[-1]))
    tier.reserve(graph, ONE)
    batch = tier.lower(graph, buffers, ONE, layout)
    assert batch.packets == 1
    return tier.submit(batch, pack_inputs(layout, ONE, {"x": case.x}))


def test_a_kernel_is_given_its_phases(driver: FakeDriver, open_cuda: OpenTier) -> None:
    """Three of them in a cooperative launch: operands, strides and what they hand each other."""
    seen: list[Seen] = []

    def look(_: FakeDriver, scratch: int, inputs: int, table: int, workspace: int) -> None:
        head = words(table, HEAD.itemsize // 4).view(HEAD)[0].copy()
        count = int(head["phases"])
        first = table + HEAD.itemsize
        records = words(first, count * PRODUCT_RECORD.itemsize // 4).view(PRODUCT_RECORD)
        seen.append(Seen(head, records.copy(), int(words(int(head["stop"]), 1)[0])))
        assert not words(workspace, 2).any()

    driver.kernels["step_phases"] = (ARGUMENTS, look)
    tier = open_cuda(step="4x1")
    case = layer(1, dtypes.Q6_K)
    tier.wait(submitted(tier, case))
    assert ("step_phases", ["cooperative"]) in driver.launched
    (found,) = seen
    assert found.stop == 0
    q, gate, down = found.records
    assert [int(record["kind"]) for record in found.records] == [PRODUCT_KIND] * 3
    assert list(q["rows"]) == [64, 32, 48]
    assert (int(q["formats"]), int(gate["formats"]), int(down["formats"])) == (0x100, 0, 1)
    assert int(gate["paired"]) == 1
    assert (int(gate["y"][0]), int(down["x"])) == (1 << 60, 1 << 60)
    assert int(down["residual"]) == int(gate["x"]) == int(q["x"]) != 0
    assert ATTENTION_RECORD.itemsize == PRODUCT_RECORD.itemsize


def test_a_kernel_that_waits_forever_is_told_to_stop(
    driver: FakeDriver, open_cuda: OpenTier
) -> None:
    """Past its deadline a step is lost as ever, and its blocks come to an end."""
    stops: list[int] = []

    def hang(fake: FakeDriver, scratch: int, inputs: int, table: int, workspace: int) -> None:
        stops.append(int(words(table, HEAD.itemsize // 4).view(HEAD)["stop"][0]))
        fake.current.hangs = True

    driver.kernels["step_phases"] = (ARGUMENTS, hang)
    tier = open_cuda(step="8x3")
    fence = submitted(tier, layer(1, dtypes.Q6_K))
    with pytest.raises(DeviceLost, match="did not end"):
        tier.wait(fence, timeout=0.05)
    assert words(stops[0], 1)[0] == 1


def know_kernels(driver: FakeDriver, model: Model, limits: Limits) -> None:
    """Those of a step of one token, which do nothing."""
    step = lower_graph(model.graph(limits), ONE_ROW, ROW_PARTS, "cuda")
    for launch in plan_launches(step.ops, DEVICE, step.scratch).launches:
        sizes = (8, 8, launch.count * PACKET.itemsize, 8)
        sizes = PLAIN if launch.workspace is None else sizes
        driver.kernels[launch.entry] = (sizes, lambda *arguments: None)
    driver.kernels["step_phases"] = (ARGUMENTS, lambda *arguments: None)


def test_long_contexts_of_short_rows_take_all_launches(
    driver: FakeDriver, open_cuda: OpenTier, folder: Path
) -> None:
    """From the third tile of a context on, and again not once it is short."""
    model = recorded("qwen3", folder, ONE_ROW)
    limits = Limits(1, 160, 10, I12, step_tokens=1, step_rows=1)
    know_kernels(driver, model.model, limits)
    tier = open_cuda(step="auto", graphs=False)
    with ModelRunner(model.model, tier, limits) as runner:
        for position in (128, 129, 5):
            given, query = np.zeros(1, SAMPLING), np.zeros(1, QUERY_TOKEN)
            given["position"], query["position"] = position, position - 1
            pages = np.arange(10, dtype=np.int32).reshape(1, 10)
            driver.launched.clear()
            runner.step(StepInput(query, np.zeros(1, np.int32), given, pages))
            names = [name for name, _ in driver.launched]
            assert names.count("step_phases") == int(position < 129)
            assert ("sample_part" in names) == (position == 129)
            assert names.count("unit_product") == (0 if position < 129 else 9)


def test_steps_have_the_launches_their_row_needs(
    driver: FakeDriver, open_cuda: OpenTier, folder: Path
) -> None:
    """A row that takes its largest logit has its token with the launch that makes the logits; one
    that is drawn needs the second half of SAMPLE behind it, one with penalties all."""
    model = recorded("qwen3", folder, ONE_ROW)
    limits = Limits(1, 96, 6, I12, step_tokens=1, step_rows=1)
    know_kernels(driver, model.model, limits)
    tier = open_cuda(step="4x1", graphs=False)
    # The second half of SAMPLE has packets of both where the first has no launch, and who draws
    # those of what ends the row.
    one = driver.kernels["sample_draw"][0]
    more = {"sample_bins": 2, "sample_draw": 4}
    with ModelRunner(model.model, tier, limits) as runner:
        for temperature, recent in ((0, 0), (0.8, 0), (0, 0), (0.8, 4), (0, 4), (0.5, 0)):
            given, query = np.zeros(1, SAMPLING), np.zeros(1, QUERY_TOKEN)
            given["temperature"], given["repeat_last_n"], given["position"] = temperature, recent, 5
            for name, packets in more.items():
                sizes = one if recent else (8, 8, packets * PACKET.itemsize, 8)
                driver.kernels[name] = (sizes, lambda *arguments: None)
            pages = np.arange(6, dtype=np.int32).reshape(1, 6)
            driver.launched.clear()
            runner.step(StepInput(query, np.zeros(1, np.int32), given, pages))
            names = [name for name, _ in driver.launched]
            assert names.count("step_phases") == 1
            assert ("sample_part" in names) == (recent > 0)
            assert ("sample_draw" in names) == (recent > 0 or temperature > 0)
            for name in ("launch_stream_out", "launch_store_request_state"):
                assert (name in names) == (recent > 0)


def test_what_it_keeps_is_planned(open_cuda: OpenTier) -> None:
    """As part of the footprint."""
    graph = layer(1, dtypes.Q6_K).graph
    plain, persistent = (
        open_cuda(step=step).footprint(graph, ONE).variants for step in ("", "8x3")
    )
    assert persistent - plain == KEPT_BYTES


def test_a_wrong_choice_is_refused(open_cuda: OpenTier) -> None:
    """By the name of its variable, before a device is looked for."""
    with pytest.raises(ConfigError, match="ZINC_RT_CUDA_STEP: 'fast'"):
        open_cuda(step="fast")
