"""Which launches of a step are put together, and how large their blocks are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel.cuda.persistent import compose
from accel.cuda.plan import plan_launches
from accel.cuda.step_choice import BLOCKS, FASTEST, NEVER, VARIABLE, StepChoice, chosen_step
from accel.packets.rules import lower_graph
from contract.dtypes import I12
from contract.errors import ConfigError
from contract.shape_key import ShapeKey
from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from reference.limits import Limits
from reference.model.open import open_model
from tests.cuda.emulated_step import DEVICE
from tests.cuda.test_persistent import recorded


def test_the_variable_says_where_launches_are_put_together(folder: Path) -> None:
    """It names shapes of a block; anything else is refused by its name."""
    assert (chosen_step(""), chosen_step("auto")) == (NEVER, FASTEST)
    assert chosen_step("8x2") == StepChoice(((8, 2), *BLOCKS))
    for wrong in ("yes", "3x1", "17x1", "4x"):
        with pytest.raises(ConfigError, match=VARIABLE):
            chosen_step(wrong)


@pytest.mark.parametrize(
    ("name", "key", "capability", "together"),
    [
        ("wide", ShapeKey(1, 1), (9, 0), True),
        ("wide", ShapeKey(1, 1), (8, 0), False),
        ("wide", ShapeKey(4, 4), (9, 0), False),
        ("qwen3", ShapeKey(1, 1), (9, 0), True),
        ("qwen3", ShapeKey(4, 4), (9, 0), False),
        ("qwen3moe", ShapeKey(1, 1), (9, 0), False),
    ],
    ids=str,
)
def test_launches_are_put_together_where_that_is_faster(
    name: str, key: ShapeKey, capability: tuple[int, int], together: bool, folder: Path
) -> None:
    """All of a step of one token, where rows are short not of a long context; never where
    nothing is to be."""
    model = recorded(name, folder, key)
    step = lower_graph(model.graph, key, 64, "cuda")
    device = replace(DEVICE, capability=capability)
    plan = plan_launches(step.ops, device, step.scratch)
    assert compose(plan, step.ops, device, NEVER, step.scratch) is plan
    composed = compose(plan, step.ops, device, FASTEST, step.scratch)
    assert any(launch.table for launch in composed.launches) == together
    longer = plan.launches if together and name == "qwen3" else None
    assert (composed.long and composed.long.launches) == longer


@pytest.mark.parametrize(
    ("more", "last"),
    [
        ({}, []),
        ({"digests": True}, ["launch_row_digest"]),
        ({"draft_tokens": 3}, ["launch_verify_k"]),
    ],
    ids=lambda value: "".join(value) or "nothing",
)
def test_a_digested_or_verified_row_ends_in_the_same_launch(
    more: dict[str, Any], last: list[str], folder: Path
) -> None:
    """What digests or verifies it is launched in every step, behind what draws it."""
    key = ShapeKey(1, 1)
    path = folder / "digested.gguf"
    write_synthetic(path, sized_spec("tiny", architecture="qwen3", quant="q8_0"))
    model = open_model(path)
    with model.file:
        limits = Limits(1, 96, 6, I12, step_tokens=1, step_rows=1, **more)
        step = lower_graph(model.graph(limits), key, 64, "cuda")
    plan = plan_launches(step.ops, DEVICE, step.scratch)
    composed = compose(plan, step.ops, DEVICE, FASTEST, step.scratch)
    assert composed.short is not None
    behind = composed.launches[len(composed.launches) - len(last) :]
    assert (composed.short.last, [launch.entry for launch in behind]) == (len(last), last)
    assert [launch.entry for launch in composed.short.drawn] == ["sample_bins", "sample_draw"]


def test_with_mps_launches_are_put_together_only_if_a_caller_says_so(folder: Path) -> None:
    """Kernels of other processes would wait for all of it."""
    model = recorded("wide", folder, ShapeKey(1, 1))
    step = lower_graph(model.graph, ShapeKey(1, 1), 64, "cuda")
    device = replace(DEVICE, mps_enabled=True)
    plan = plan_launches(step.ops, device, step.scratch)
    assert compose(plan, step.ops, device, FASTEST, step.scratch) is plan
    composed = compose(plan, step.ops, device, chosen_step("8x3"), step.scratch)
    assert any(launch.table for launch in composed.launches)


def test_blocks_are_as_large_as_a_device_takes(folder: Path) -> None:
    """A shape that is too much gives way to the next, and where none fits the plan stays."""
    model = recorded("qwen3", folder, ShapeKey(1, 1))
    step = lower_graph(model.graph, ShapeKey(1, 1), 64, "cuda")
    plan = plan_launches(step.ops, DEVICE, step.scratch)
    for shared_bytes, warps, slots in ((227 << 10, 8, 3), (120 << 10, 8, 1), (16 << 10, 0, 0)):
        device = replace(DEVICE, shared_bytes=shared_bytes)
        composed = compose(plan, step.ops, device, chosen_step("16x8"), step.scratch)
        found = [one for one in composed.launches if one.table is not None]
        shapes = [(one.threads, dict(one.source.macros)["SLOTS"]) for one in found]
        assert shapes == ([(32 * warps, slots)] if warps else [])
        assert all(one.shared_bytes <= shared_bytes for one in found)
        assert found or composed.launches == plan.launches
