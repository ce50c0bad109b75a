"""Mamba-2's recurrence on emulated blocks, compared with the definition bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from contract.dtypes import I12
from contract.ir.nodes import BufferKind
from contract.shape_key import ShapeKey
from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from reference.limits import Limits
from reference.model.open import open_model
from tests.cuda.emulated_step import DEVICE
from tests.cuda.recorded_step import RecordedModel
from tests.cuda.test_delta_net import SHAPE, run
from tests.cuda.tuned_steps import TunedSteps

FILES = frozenset({"scan_rows.cu"})
SLOTS = 20
MODELS = {
    "one group": {"state": 128, "heads": 2, "inner": 128},
    "groups": {"state": 32, "heads": 4, "groups": 2, "inner": 128},
    "wide": {"state": 256, "heads": 1, "inner": 32},
}


def recorded(name: str, folder: Path, key: ShapeKey, tokens: int, states: int) -> RecordedModel:
    """A model of one recurrent layer, whose slots have a past of so many states; steps have up to
    so many tokens."""
    path = folder / f"scan-{name}.gguf"
    if not path.exists():
        write_synthetic(
            path,
            sized_spec("tiny", architecture="mamba2", quant="q8_0", mamba=MODELS[name], **SHAPE),
        )
    limits = Limits(SLOTS, 96, 120, I12, step_tokens=tokens, step_rows=4, slot_states=states)
    model = RecordedModel(open_model(path), limits, key)
    rng = np.random.default_rng(13)
    for decl in model.graph.of_kind(BufferKind.STATE):
        if decl.name.startswith(("state.conv", "state.scan")):
            state = model.raw[decl.name].view(np.float32)
            state[:] = rng.standard_normal(len(state)).astype(np.float32)
    return model


@pytest.mark.parametrize("states", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_sequences_that_decode(name: str, states: int, folder: Path) -> None:
    """One token of each slot, one of which begins; in the next step one begins anew."""
    key, bucket = ShapeKey(SLOTS, 1), ShapeKey(SLOTS + 1, SLOTS)
    steps = TunedSteps(
        recorded(name, folder, key, SLOTS + 1, states), bucket, DEVICE, FILES, folder
    )
    assert [[launch.source.name for launch in run] for run in steps.runs] == [["scan_rows.cu"]]
    slots = [7 * i % SLOTS for i in range(SLOTS)]
    run(steps, [0, *range(3, SLOTS + 2)], slots)
    run(steps, [1, *range(4, SLOTS + 2), 0], slots)


@pytest.mark.parametrize("states", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_prompts(name: str, states: int, folder: Path) -> None:
    """More tokens than a block looks at together, slots in turns that blocks share, one that begins
    anew, beside some that decode."""
    slots = [*range(12), *[3] * 150, *(number for _ in range(50) for number in (1, 9)), *[17] * 30]
    positions, after = [], [5] * SLOTS
    for place, slot in enumerate(slots):
        after[slot] = 0 if place in (40, 200) else after[slot]
        positions.append(after[slot])
        after[slot] += 1
    key, bucket = ShapeKey(len(slots), 1), ShapeKey(len(slots) + 3, SLOTS)
    model = recorded(name, folder, key, len(slots) + 3, states)
    steps = TunedSteps(model, bucket, DEVICE, FILES, folder)
    ((launch,),) = steps.runs
    assert launch.grid[1] < SLOTS
    run(steps, positions, slots)


def test_a_small_state_keeps_the_plain_kernel(folder: Path) -> None:
    """Rows that eight lanes do not hold."""
    path, one = folder / "scan-small.gguf", ShapeKey(1, 1)
    mamba = {"state": 16, "heads": 2, "inner": 128}
    write_synthetic(
        path, sized_spec("tiny", architecture="mamba2", quant="q8_0", mamba=mamba, **SHAPE)
    )
    model = RecordedModel(open_model(path), Limits(1, 32, 2, I12), one)
    assert "ssm_scan" in TunedSteps(model, one, DEVICE, FILES, folder).files_used()
