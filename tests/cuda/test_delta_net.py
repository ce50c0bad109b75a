"""Delta-net layers on emulated blocks, compared with the definitions bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from accel.cuda.delta_net import FEW_TOKENS, PARTS, SLOTS
from contract.dtypes import I12
from contract.ir.nodes import BufferKind
from contract.shape_key import ShapeKey
from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from reference.limits import Limits
from reference.model.open import open_model
from tests.cuda.emulated_step import DEVICE, OLDER
from tests.cuda.recorded_step import RecordedModel
from tests.cuda.tuned_steps import TunedSteps

KINDS = ("step", "slots", "conv", "inputs", "rows", "norm")
FILES = frozenset(f"delta_{kind}.cu" for kind in KINDS)
SHAPE = {"hidden": 64, "heads": 1, "kv_heads": 1, "head_dim": 64, "feed_forward": 64, "layers": 1}
MODELS = {
    "qwen35": {"state": 128, "key_heads": 1, "value_heads": 2},
    "small": {"state": 32, "key_heads": 2, "value_heads": 4},
    "short": {"state": 64, "key_heads": 2, "value_heads": 2, "kernel": 2},
    "qwen3next": {"state": 64, "key_heads": 2, "value_heads": 6},
}
"""Value heads of qwen3next share key heads in another order."""
MANY_HEADS = {"many heads": {"state": 32, "key_heads": 5, "value_heads": 10}}
"""More heads than a block of the launches around the recurrence has warps."""


def recorded(
    name: str, folder: Path, key: ShapeKey, states: int = 1, tokens: int = FEW_TOKENS + 16
) -> RecordedModel:
    """A model of one recurrent layer, whose slots have a past of so many states; steps have up to
    so many tokens."""
    path = folder / f"delta-{name}.gguf"
    if not path.exists():
        architecture = "qwen3next" if name == "qwen3next" else "qwen35"
        experts = {"experts": {"count": 2, "used": 1, "width": 32, "shared_width": 32}}
        more = experts if name == "qwen3next" else {}
        recurrent = {"interval": 2, **(MODELS | MANY_HEADS)[name]}
        spec = sized_spec(
            "tiny", architecture=architecture, quant="q8_0", recurrent=recurrent, **SHAPE, **more
        )
        write_synthetic(path, spec)
    rows = max(4, key.rows)
    limits = Limits(20, 96, 120, I12, step_tokens=tokens, step_rows=rows, slot_states=states)
    model = RecordedModel(open_model(path), limits, key)
    rng = np.random.default_rng(11)
    for decl in model.graph.of_kind(BufferKind.STATE):
        if decl.name.startswith(("state.conv", "state.delta")):
            state = model.raw[decl.name].view(np.float32)
            state[:] = rng.standard_normal(len(state)).astype(np.float32)
    return model


def run(steps: TunedSteps, positions: list[int], slots: list[int]) -> None:
    """One step by the definitions and by the tuned launches."""
    model = steps.recorded
    before = {name: model.raw[name].copy() for name in steps.states}
    tokens = [(7 * i + position) % 100 for i, position in enumerate(positions)]
    given = model.inputs(tokens, positions, slots)
    model.step(given)
    steps.run(given, before)


@pytest.mark.parametrize("states", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_one_token(name: str, states: int, folder: Path) -> None:
    """A sequence's first token, which forgets what the slot held, and one that goes on."""
    one = ShapeKey(1, 1)
    steps = TunedSteps(recorded(name, folder, one, states), one, DEVICE, FILES, folder)
    assert [[launch.source.name for launch in run] for run in steps.runs] == [["delta_step.cu"]]
    assert steps.runs[0][0].grid[0] == MODELS[name]["value_heads"]
    for position in range(2):
        run(steps, [position], [2])
    run(steps, [9], [0])


FEW = {
    "one slot": ([3, 4, 5, 6], [1, 1, 1, 1]),
    "slots in turns": ([8, 2, 9, 3], [1, 0, 1, 0]),
    "one begins anew": ([10, 0, 1, 4], [1, 2, 2, 0]),
    "fewer than the form has": ([5, 6, 0], [1, 1, 2]),
}


@pytest.mark.parametrize("states", [1, 4])
@pytest.mark.parametrize(("positions", "slots"), FEW.values(), ids=FEW)
@pytest.mark.parametrize("name", MODELS)
def test_few_tokens(
    name: str, positions: list[int], slots: list[int], states: int, folder: Path
) -> None:
    """A block of each head for every slot; the next step computes all but one of them again."""
    key = ShapeKey(len(slots), 1)
    steps = TunedSteps(recorded(name, folder, key, states), ShapeKey(4, 2), DEVICE, FILES, folder)
    assert [[launch.source.name for launch in run] for run in steps.runs] == [["delta_step.cu"]]
    for after in (0, 1):
        run(steps, [position + after for position in positions], slots)
        assert not steps.workspace.any()


@pytest.mark.parametrize("name", ["small", "short", "qwen35"])
def test_tokens_of_several_slots(name: str, folder: Path) -> None:
    """Those of a slot apart from each other, one that begins anew, fewer than the form has."""
    key, bucket = ShapeKey(7, 1), ShapeKey(9, 3)
    steps = TunedSteps(recorded(name, folder, key), bucket, DEVICE, FILES, folder)
    run(steps, [5, 0, 6, 3, 1, 7, 2], [1, 0, 1, 3, 0, 1, 0])
    assert not steps.workspace.any()


@pytest.mark.parametrize("name", MODELS)
def test_slots_pass_through_the_blocks_there_are(name: str, folder: Path) -> None:
    """More slots than blocks of a key head, beside them one with more tokens than are computed in a
    pass, and one whose tokens begin anew in a pass."""
    slots = [0] * 7 + [7] + [0] * 7 + list(range(20)) + [0, 7, 0, 7]
    once = [17, *range(4, 10), 6, *range(11, 23)]
    positions = [*range(3, 10), 5, *range(10, 17), *once, 18, 0, 19, 1]
    key, bucket = ShapeKey(len(slots), 1), ShapeKey(len(slots) + 2, len(slots))
    steps = TunedSteps(recorded(name, folder, key), bucket, DEVICE, FILES, folder)
    ((launch,),) = steps.runs
    assert launch.source.name == "delta_slots.cu"
    assert launch.grid[1] < len(set(slots))
    run(steps, positions, slots)


@pytest.mark.parametrize("prompts", [False, True])
@pytest.mark.parametrize(("name", "tokens"), [("qwen35", 70), ("small", 390), ("short", 390)])
def test_many_sequences_decode(name: str, tokens: int, prompts: bool, folder: Path) -> None:
    """More tokens than others have such blocks for, and more than a block has threads, in a step
    that has a row for each, and in one whose prompts have few."""
    key, bucket = ShapeKey(tokens, 60 if prompts else tokens - 4), ShapeKey(tokens + 2, tokens)
    steps = TunedSteps(
        recorded(name, folder, key, tokens=tokens + 2), bucket, DEVICE, FILES, folder
    )
    ((first, *others),) = steps.runs
    assert (first.entry, len(others)) == ("delta_slots", 5)
    run(steps, [5 + i // 20 for i in range(tokens)], [7 * i % 20 for i in range(tokens)])


def test_each_step_has_launches_of_its_own(folder: Path) -> None:
    """Those for steps with prompts leave out one without, and the other way round."""
    for rows, used in ((70, range(1)), (60, range(1, 6))):
        key, bucket = ShapeKey(70, rows), ShapeKey(72, 72)
        model = recorded("qwen35", folder, key, tokens=72)
        steps = TunedSteps(model, bucket, DEVICE, FILES, folder)
        given = model.inputs([1] * 70, [3] * 70, [n % 20 for n in range(70)])
        steps.begin(given, {name: model.raw[name].copy() for name in steps.states})
        (launches,) = steps.runs
        for number, launch in enumerate(launches):
            before = [steps.states[name].copy() for name in steps.states]
            scratch = steps.scratch_before(range(0))
            scratch.view(np.float32)[:] = 0.5
            wrote = scratch.copy()
            steps.launch(launch, scratch)
            after = [steps.states[name] for name in steps.states]
            changed = any((a != b).any() for a, b in zip(before, after, strict=True))
            assert (changed or bool((wrote != scratch).any())) == (number in used)


@pytest.mark.parametrize(("kilobytes", "at_once"), [(48, 1), (99, 2)])
def test_devices_with_less_shared_memory(kilobytes: int, at_once: int, folder: Path) -> None:
    """Fewer chunks, or one block: the same bits."""
    key, bucket = ShapeKey(9, 1), ShapeKey(9, 3)
    device = replace(OLDER, shared_bytes=kilobytes << 10)
    steps = TunedSteps(recorded("qwen35", folder, key), bucket, device, FILES, folder)
    ((launch,),) = steps.runs
    macros = dict(launch.source.macros)
    assert (macros["BLOCKS_AT_ONCE"], macros["SLOTS"] < SLOTS[0]) == (at_once, True)
    run(steps, [2, 3, 0, 4, 5, 6, 7, 8, 1], [1, 2, 3, 1, 1, 1, 1, 1, 3])


@pytest.mark.parametrize("name", ["small", "short", "qwen35", "qwen3next"])
def test_many_tokens(name: str, folder: Path) -> None:
    """The convolution and the recurrence: tokens of a slot behind each other and far apart, one
    alone in its slot."""
    tokens = FEW_TOKENS + 5
    key, bucket = ShapeKey(tokens, 1), ShapeKey(FEW_TOKENS + 8, 2)
    steps = TunedSteps(recorded(name, folder, key), bucket, DEVICE, FILES, folder)
    assert [len(run) for run in steps.runs] == [2, 1, 1, 1]
    slots = [3] + [0] * 40 + [1, 2] * 12 + [0] * 4
    positions = [4, *range(40), *(p for n in range(12) for p in (n, n + 8)), 40, 41, 42, 43]
    run(steps, positions, slots)


@pytest.mark.parametrize("states", [1, 4, 8])
@pytest.mark.parametrize(("many", "prompts"), [(False, False), (False, True), (True, True)])
def test_several_states_of_a_slot(states: int, many: bool, prompts: bool, folder: Path) -> None:
    """Runs shorter and longer than a ring of states, one that another slot interrupts, one that
    begins anew, and one that two blocks of the convolution compute. Few tokens have the kernels of
    many if the bucket has far fewer rows, as for short prompts."""
    slots = [0] * 4 + [1, 2] * 3 + [3] * 11 + [1]
    positions = [5, 6, 7, 8, 3, 0, 4, 1, 0, 2, *range(2, 13), 1]
    if many:
        slots, positions = slots + [4] * 40 + [5] * 6, [*positions, *range(7, 47), *range(9, 15)]
    tokens = len(slots) + (8 if many else 2)
    key, bucket = ShapeKey(len(slots), 1), ShapeKey(tokens, 2 if prompts else tokens // 2)
    steps = TunedSteps(recorded("qwen35", folder, key, states), bucket, DEVICE, FILES, folder)
    assert [len(run) for run in steps.runs] == ([2, 1, 1, 1] if prompts else [1])
    run(steps, positions, slots)


def test_blocks_share_the_heads_of_few_tokens(folder: Path) -> None:
    """A prompt alone, so few tokens that multiprocessors would be idle."""
    key, bucket = ShapeKey(7, 1), ShapeKey(8, 2)
    device = replace(DEVICE, multiprocessors=132)
    steps = TunedSteps(recorded("many heads", folder, key), bucket, device, FILES, folder)
    assert [run[-1].grid[1] for run in steps.runs] == [1, 2, PARTS, 2]
    run(steps, [0, 3, 1, 2, 3, 4, 5], [0, 1, 0, 0, 0, 0, 0])


def gated(folder: Path, key: ShapeKey) -> RecordedModel:
    """A model of one gated short convolution, whose slots have a past."""
    path = folder / "short-conv.gguf"
    shape = {**SHAPE, "layers": 1, "short_conv": {"interval": 2, "kernel": 4}}
    write_synthetic(path, sized_spec("tiny", architecture="lfm2", quant="q8_0", **shape))
    limits = Limits(20, 96, 120, I12, step_tokens=FEW_TOKENS + 16, step_rows=4)
    model = RecordedModel(open_model(path), limits, key)
    state = model.raw["state.conv[0]"].view(np.float32)
    state[:] = np.random.default_rng(12).standard_normal(len(state)).astype(np.float32)
    return model


def test_gated_convolution(folder: Path) -> None:
    """Slots whose tokens lie behind each other and far apart, one that begins anew."""
    key, bucket = ShapeKey(45, 1), ShapeKey(48, 2)
    steps = TunedSteps(gated(folder, key), bucket, DEVICE, FILES, folder)
    assert [[launch.source.name for launch in run] for run in steps.runs] == [["delta_conv.cu"] * 2]
    slots = [3] + [0] * 34 + [1, 2] * 4 + [0, 1]
    positions = [4, *range(34), *(p for n in range(4) for p in (n + 5, n + 8)), 34, 0]
    run(steps, positions, slots)


@pytest.mark.parametrize("tokens", [1, 8, 80])
def test_a_decay_for_each_key_keeps_the_plain_kernels(folder: Path, tokens: int) -> None:
    """Convolutions have tuned ones all the same."""
    path = folder / "kimi.gguf"
    if not path.exists():
        spec = sized_spec("tiny", architecture="kimi-linear", quant="q8_0", layers=2)
        write_synthetic(path, spec)
    key = ShapeKey(tokens, 1)
    limits = Limits(1, 96, 20, I12, step_tokens=tokens, step_rows=1)
    model = RecordedModel(open_model(path), limits, key)
    steps = TunedSteps(model, key, DEVICE, FILES, folder)
    used = steps.files_used()
    assert {"ssm_delta_net", "ssm_delta_inputs"} <= used
    assert used & FILES == ({"delta_conv.cu"} if tokens > 1 else set())


def test_another_size_keeps_the_plain_kernels(folder: Path) -> None:
    """State that eight lanes do not hold."""
    path = folder / "delta-other.gguf"
    recurrent = {"interval": 2, "state": 16, "key_heads": 1, "value_heads": 1}
    spec = sized_spec("tiny", architecture="qwen35", quant="q8_0", recurrent=recurrent, **SHAPE)
    write_synthetic(path, spec)
    one = ShapeKey(1, 1)
    model = RecordedModel(open_model(path), Limits(1, 32, 2, I12), one)
    steps = TunedSteps(model, one, DEVICE, FILES, folder)
    assert "ssm_delta_net" in steps.files_used()
    assert not steps.files_used() & {"delta_step.cu", "delta_rows.cu"}
