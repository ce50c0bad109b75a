"""Rows picked in the last layer: the bits of real kernels, and what stays with tuned ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.cuda.device import Device
from accel.cuda.plan import plain_ops, plan_launches
from accel.cuda.registered import cuda_buckets
from accel.packets import rules
from accel.packets.rules import ROW_PARTS, lower_graph
from contract.dtypes import I12
from contract.ir.nodes import Graph
from contract.shape_key import ShapeKey
from reference.limits import Limits
from tests.cuda.emulated_step import DEVICE, OLDER
from tests.cuda.fake_devices import EmulatedDevices
from tests.cuda.recorded_step import PersistentSteps, RecordedModel, table_of
from tests.cuda.test_multi_device import model_of, opened
from tests.cuda.test_persistent import FOUR_WARPS, run
from tests.few_rows import assert_definitions

SLOTS = 16
LARGEST = ShapeKey(512 + SLOTS, SLOTS)


@pytest.mark.parametrize(
    ("name", "quant"),
    [
        pytest.param("super", "q4_k_m", marks=pytest.mark.long),
        *(
            pytest.param(name, "q8_0", marks=pytest.mark.soak)
            for name in ("llama", "gemma3", "qwen3moe", "qwen35moe")
        ),
    ],
)
def test_steps_of_few_rows_are_the_definitions(name: str, quant: str, folder: Path) -> None:
    """Some rows, none, and those of the middle of a chunk."""
    with opened(EmulatedDevices(folder, 1), "0") as tier:
        assert_definitions(model_of(name, folder, quant), tier, I12)


@pytest.mark.soak
def test_two_devices_pick_alike(folder: Path) -> None:
    with opened(EmulatedDevices(folder), "0,1") as tier:
        assert_definitions(model_of("qwen35moe", folder), tier, I12)


@pytest.mark.parametrize("device", [DEVICE, OLDER], ids=["groups", "single warps"])
@pytest.mark.parametrize("name", ["super", "qwen3moe", "qwen35"])
def test_no_form_loses_a_tuned_kernel(
    name: str, device: Device, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows are picked a plain kernel more does that; forms of decoding are what they were."""
    graph = model_of(name, folder, "q4_k_m").graph(
        Limits(SLOTS, 64, 64, I12, step_tokens=LARGEST.tokens, step_rows=SLOTS)
    )
    early = {bucket: _plain(graph, bucket, device) for bucket in cuda_buckets(LARGEST)}
    monkeypatch.setattr(rules, "prune_rows", lambda graph, bucket: graph)
    for bucket, found in early.items():
        late = _plain(graph, bucket, device)
        picked = found.count("select_rows") - late.count("select_rows")
        assert picked == (bucket.tokens >= 64)
        assert set(found) <= set(late)
        assert len(found) - picked <= len(late)
        if not picked:
            assert found == late


@pytest.mark.parametrize("tokens", [16, 64])
def test_prompts_have_forms_of_few_rows(tokens: int, folder: Path) -> None:
    """A delta net's state is read for each slot once, not for every few tokens."""
    assert {"delta_rows.cu"} <= kernels_of("qwen35", tokens, tokens // 4, folder)
    assert {"delta_slots.cu"} <= kernels_of("qwen35", tokens, tokens, folder)


def test_tokens_of_many_sequences_attend_by_themselves(folder: Path) -> None:
    """Beside prompts of the same number of tokens, which share what they read."""
    assert {"attention_tokens.cu"} <= kernels_of("qwen3", 256, 128, folder)
    assert {"attention_groups.cu"} <= kernels_of("qwen3", 256, 64, folder)
    assert {"attention_groups.cu"} <= kernels_of("qwen3", 512, 128, folder)


def kernels_of(name: str, tokens: int, rows: int, folder: Path) -> set[str]:
    """The kernels of a bucket of a session with 128 slots."""
    bucket = ShapeKey(tokens, rows)
    assert bucket in cuda_buckets(ShapeKey(1024, 128))
    limits = Limits(128, 64, 128, I12, step_tokens=1024, step_rows=128)
    graph = model_of(name, folder, "q4_k_m").graph(limits)
    ops = lower_graph(graph, bucket, ROW_PARTS, "cuda").ops
    return {launch.source.name for launch in plan_launches(ops, DEVICE).launches}


@pytest.mark.parametrize("rows", [0, 1])
def test_a_prompts_last_products_as_one_launch(rows: int, folder: Path) -> None:
    """Where a persistent step is asked for they are one in a form of a single row, and none may
    wait for what a step without rows does not make."""
    bucket, tokens = ShapeKey(24, 1), 18
    limits = Limits(2, 96, 12, I12, step_tokens=24, step_rows=1)
    recorded = RecordedModel(model_of("qwen3", folder), limits, ShapeKey(tokens, rows))
    steps = PersistentSteps(recorded, bucket, DEVICE, FOUR_WARPS, folder)
    assert [len(table_of(launch).phases) for launch in steps.launches] == [4]
    for step in range(2):
        positions = list(range(step * tokens, (step + 1) * tokens))
        run(steps, list(range(7, 7 + tokens)), positions, [0] * tokens, step)


def _plain(graph: Graph, bucket: ShapeKey, device: Device) -> list[str]:
    step = lower_graph(graph, bucket, ROW_PARTS, "cuda")
    return [step.ops[n].name for n in plain_ops(plan_launches(step.ops, device, step.scratch))]
