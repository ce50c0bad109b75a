"""Experts chosen on the device: blocks of experts of small models on emulated blocks, and products
with stacks by themselves, compared with the definitions bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from accel.cuda import expert_groups, expert_prompts
from accel.cuda.device import Device
from accel.packets.shares import Share
from contract.dtypes import I12
from contract.ir.nodes import BufferDecl
from contract.shape_key import ShapeKey
from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from reference.limits import Limits
from reference.model.open import open_model
from tests.cuda.emulated_step import DEVICE, OLDER
from tests.cuda.emulator import emulate
from tests.cuda.recorded_step import RecordedModel
from tests.cuda.tuned_steps import TunedSteps, run_together

TOKEN = ["expert_token.cu"]
THREE = ["expert_router.cu", "expert_gates.cu", "expert_down.cu"]
FIVE = ["expert_router.cu", "expert_order.cu"] + [
    f"expert_{kind}.cu" for kind in ("few_gates", "group_downs", "total")
]
MANY = [file.replace("few", "group") for file in FIVE]
ROUTED = frozenset(TOKEN + THREE + FIVE + MANY)
PAIR = ["unit_pack_fours.cu", "unit_groups.cu"]
MADE = (
    PAIR[:1] + [f"expert_{kind}.cu" for kind in ("logits", "choice", "order", "gather")] + PAIR[1:]
)
PROMPTS = frozenset({"expert_logits.cu"})
SHAPE = {"hidden": 512, "heads": 2, "kv_heads": 1, "head_dim": 64, "feed_forward": 256, "layers": 1}
RECURRENT = {"interval": 2, "state": 64, "key_heads": 1, "value_heads": 2}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "qwen3moe": {
        "architecture": "qwen3moe", **SHAPE,
        "experts": {"count": 40, "used": 3, "width": 256},
    },
    "wide": {
        "architecture": "qwen3moe", **SHAPE, "hidden": 1280,
        "experts": {"count": 5, "used": 2, "width": 1280},
    },
    "shared": {
        "architecture": "qwen35moe", **SHAPE, "recurrent": RECURRENT,
        "experts": {"count": 7, "used": 2, "width": 256, "shared_width": 256},
    },
    "qwen2moe": {
        "architecture": "qwen2moe", **SHAPE,
        "experts": {"count": 7, "used": 2, "width": 256, "shared_width": 256},
    },
    "other-shared": {
        "architecture": "qwen3next", **SHAPE, "recurrent": RECURRENT,
        "experts": {"count": 3, "used": 2, "width": 256, "shared_width": 512},
    },
    "gpt-oss": {
        "architecture": "gpt-oss", **SHAPE, "window": 8,
        "experts": {"count": 6, "used": 2, "width": 256},
    },
    "lfm2moe": {
        "architecture": "lfm2moe", **SHAPE, "layers": 2, "leading_dense": 1,
        "experts": {"count": 6, "used": 2, "width": 256},
    },
    "glm4moe": {
        "architecture": "glm4moe", **SHAPE, "layers": 2, "leading_dense": 1,
        "experts": {"count": 6, "used": 2, "width": 256, "shared_width": 256},
    },
    "deepseek2": {
        "architecture": "deepseek2", **SHAPE, "leading_dense": 0,
        "latent": {"rank": 512, "unrotated": 256, "rotated": 64, "value": 64, "query_rank": 256},
        "experts": {"count": 6, "used": 2, "width": 256, "shared_width": 256},
    },
    "gemma4": {
        "architecture": "gemma4", **SHAPE, "gemma": {"period": 1, "head_dim": 64, "kv_heads": 1},
        "experts": {"count": 4, "used": 2, "width": 256, "fused": True},
    },
}  # fmt: skip


def recorded(name: str, folder: Path, key: ShapeKey, quant: str) -> RecordedModel:
    """A model of one layer."""
    path = folder / f"experts-{name}-{quant}.gguf"
    if not path.exists():
        write_synthetic(path, sized_spec("tiny", quant=quant, **MODELS[name]))
    limits = Limits(2, 96, 12, I12, step_tokens=72, step_rows=24)
    return RecordedModel(open_model(path), limits, key)


def run(steps: TunedSteps, tokens: list[int], positions: list[int], slots: list[int]) -> None:
    """One step by the definitions and by the tuned launches."""
    model = steps.recorded
    before = {name: model.raw[name].copy() for name in steps.states}
    given = model.inputs(tokens, positions, slots)
    model.step(given)
    steps.run(given, before)


@pytest.mark.parametrize("quant", ["q4_k", "q5_k", "q6_k", "q4_k_m"])
@pytest.mark.parametrize("name", ["qwen3moe", "shared"])
def test_experts_of_a_token_are_one_launch(name: str, quant: str, folder: Path) -> None:
    """Norm, router, choice, experts and weighted sum, whose blocks exchange floats; three steps, so
    that both banks are used again."""
    one = ShapeKey(1, 1)
    steps = TunedSteps(recorded(name, folder, one, quant), one, DEVICE, ROUTED, folder)
    assert [[launch.source.name for launch in run] for run in steps.runs] == [TOKEN]
    for position in range(3):
        run(steps, [40 + position], [position], [1])


def test_blocks_that_wait_in_vain_end_once_told(folder: Path) -> None:
    """What a block that does not run would publish never comes; the host's word ends the others."""
    one = ShapeKey(1, 1)
    steps = TunedSteps(recorded("qwen3moe", folder, one, "q4_k"), one, DEVICE, ROUTED, folder)
    ((launch,),) = steps.runs
    assert launch.cooperative
    model = steps.recorded
    given = model.inputs([3], [0], [0])
    model.step(given)
    steps.begin(given, {})
    text = launch.source.text.replace("gridDim.x", "(gridDim.x + 1)")
    kernel = emulate(replace(launch.source, text=text), folder)
    ops = range(launch.first, launch.first + launch.count)
    for told in (0, 1):
        scratch = steps.scratch_before(ops)
        arguments = steps.arguments(launch, scratch)
        steps.workspace[:], steps.stop[:] = 0, told
        blocks, threads = launch.grid[0], launch.threads
        done = kernel.run_together(launch.entry, blocks, threads, 1, *arguments, turns=6000)
        assert done == bool(told)


@pytest.mark.parametrize("device", [OLDER, replace(DEVICE, mps_enabled=True)], ids=["old", "mps"])
@pytest.mark.parametrize("name", ["qwen3moe", "shared"])
def test_of_other_devices_they_are_three(name: str, device: Device, folder: Path) -> None:
    """Of older ones copies must be awaited in the order of requests; with MPS, blocks that wait for
    each other might never run at once."""
    one = ShapeKey(1, 1)
    steps = TunedSteps(recorded(name, folder, one, "q4_k_m"), one, device, ROUTED, folder)
    assert [[launch.source.name for launch in run] for run in steps.runs] == [THREE]
    for position in range(2):
        run(steps, [40 + position], [position], [1])


class UndecidedRouter(RecordedModel):
    """Its router gives every expert the same logit."""

    def _stored(self, decl: BufferDecl) -> NDArray[np.uint8]:
        stored = super()._stored(decl)
        return np.zeros_like(stored) if "ffn_gate_inp.weight" in decl.name else stored


def test_equal_probabilities_go_to_the_first_experts(folder: Path) -> None:
    """Of forty, so that some lanes have one and some have two."""
    one = ShapeKey(1, 1)
    known = recorded("qwen3moe", folder, one, "q4_k")
    steps = TunedSteps(UndecidedRouter(known.model, known.limits, one), one, DEVICE, ROUTED, folder)
    run(steps, [7], [0], [0])
    assert any("ffn_gate_inp.weight" in name for name in known.raw)


@pytest.mark.parametrize(
    ("name", "quant", "most"),
    [
        ("qwen3moe", "q4_k_m", 2),
        ("shared", "q5_k", 3),
        ("wide", "q4_k", 4),
        ("qwen2moe", "q4_k", 4),
    ],
)
def test_experts_of_few_tokens_are_one_launch(
    name: str, quant: str, most: int, folder: Path
) -> None:
    """As many tokens as the form has, then two; some share experts, some do not."""
    bucket = ShapeKey(most, 1)
    for tokens in (most, 2):
        key = ShapeKey(tokens, 1)
        steps = TunedSteps(recorded(name, folder, key, quant), bucket, DEVICE, ROUTED, folder)
        assert [[launch.source.name for launch in run] for run in steps.runs] == [TOKEN]
        for turn in range(2):
            run(steps, [40 + turn, 7, 61, 8][:tokens], [*range(tokens)], [0] * tokens)


@pytest.mark.parametrize("name", ["wide", "shared", "qwen2moe"])
def test_several_tokens(name: str, folder: Path) -> None:
    """On a device without the one launch; fewer than the form has; rows of several spans."""
    key, bucket = ShapeKey(3, 1), ShapeKey(4, 2)
    steps = TunedSteps(recorded(name, folder, key, "q4_k"), bucket, OLDER, ROUTED, folder)
    assert [[launch.source.name for launch in run] for run in steps.runs] == [THREE]
    run(steps, [7, 8, 9], [0, 0, 1], [0, 1, 0])


@pytest.mark.parametrize(
    ("name", "quant", "tokens", "most", "multiprocessors", "launches"),
    [
        ("qwen3moe", "q4_k", 7, 9, 3, FIVE),
        ("qwen3moe", "q4_k", 7, 9, 132, FIVE),
        ("shared", "q5_k", 19, 20, 9, FIVE),
        pytest.param("shared", "q4_k_m", 40, 66, 3, MANY, marks=pytest.mark.long),
        ("wide", "q6_k", 21, 21, 3, FIVE),
        ("qwen3moe", "q4_k", 37, 66, 4, MANY),
        ("qwen3moe", "q4_k", 69, 70, 4, FIVE),
    ],
)
def test_tokens_that_share_experts(
    name: str,
    quant: str,
    tokens: int,
    most: int,
    multiprocessors: int,
    launches: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One to several chunks of an expert, full ones and others, which one or several columns of
    blocks pass over; more tokens than one block of the router takes, and with most tokens several
    groups of rows a block. So many rows are read that none are picked in front of it."""
    key, bucket = ShapeKey(tokens, tokens // 3), ShapeKey(most, most // 3)
    device = replace(DEVICE, multiprocessors=multiprocessors)
    if launches is MANY:
        monkeypatch.setattr(expert_groups, "FOUR_ROWS_TOKENS", most - 1)
    steps = TunedSteps(recorded(name, folder, key, quant), bucket, device, ROUTED, folder)
    assert [[launch.source.name for launch in run] for run in steps.runs] == [launches]
    positions = [i // 2 for i in range(tokens)]
    run(steps, [i * 5 % 90 for i in range(tokens)], positions, [i % 2 for i in range(tokens)])


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than four tokens are as many as a prompt has."""
    monkeypatch.setattr(expert_prompts, "SINGLE_WARP_TOKENS", 4)


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize(
    ("name", "quant", "tokens", "most"),
    [
        ("qwen3moe", "q4_k", 7, 9),
        pytest.param("shared", "q5_k", 50, 52, marks=pytest.mark.long),
        ("shared", "q4_k_m", 71, 72),
        ("wide", "q6_k", 21, 21),
        ("qwen2moe", "q4_k", 7, 9),
    ],
)
def test_tokens_of_a_prompt(name: str, quant: str, tokens: int, most: int, folder: Path) -> None:
    """Chunks of all sizes that groups of warps multiply, and those that single warps do."""
    key, bucket = ShapeKey(tokens, tokens // 3), ShapeKey(most, most // 3)
    steps = TunedSteps(recorded(name, folder, key, quant), bucket, DEVICE, PROMPTS, folder)
    files = [[launch.source.name for launch in run] for run in steps.runs]
    shared = name in ("shared", "qwen2moe")
    made, used = (MADE + PAIR[1:], PAIR * 2) if shared else (MADE, PAIR)
    assert files == [[*made, *used, "expert_total.cu"]]
    positions = [i // 2 for i in range(tokens)]
    run(steps, [i * 5 % 90 for i in range(tokens)], positions, [i % 2 for i in range(tokens)])


@pytest.mark.usefixtures("many")
def test_experts_of_more_pairs_than_a_chunk(folder: Path) -> None:
    """Every token chooses the same ones: a full chunk and another."""
    key = ShapeKey(72, 24)
    known = recorded("qwen3moe", folder, key, "q4_k")
    model = UndecidedRouter(known.model, known.limits, key)
    steps = TunedSteps(model, key, DEVICE, PROMPTS, folder)
    assert len(steps.runs) == 1
    run(steps, [i % 90 for i in range(72)], [i // 2 for i in range(72)], [i % 2 for i in range(72)])


@pytest.mark.parametrize(
    ("name", "quant", "count", "tokens", "most"),
    [
        ("shared", "q4_k_m", 2, 1, 1),
        pytest.param("qwen3moe", "q5_k", 3, 3, 4, marks=pytest.mark.long),
        ("shared", "q4_k", 3, 7, 9),
        pytest.param("qwen3moe", "q4_k_m", 2, 19, 20, marks=pytest.mark.long),
    ],
)
def test_devices_that_have_rows_of_every_expert(
    name: str, quant: str, count: int, tokens: int, most: int, folder: Path
) -> None:
    """One launch more, which gathers what gates and ups make; shares of 256 rows that differ."""
    key, bucket = ShapeKey(tokens, max(1, tokens // 3)), ShapeKey(most, max(1, most // 3))
    model = recorded(name, folder, key, quant)
    members = [
        TunedSteps(model, bucket, DEVICE, ROUTED, folder, share=Share(n, count))
        for n in range(count)
    ]
    made, used = (THREE[:2], THREE[2:]) if most <= 4 else (FIVE[:3], FIVE[3:])
    names = [[launch.source.name for launch in run] for run in members[0].runs]
    assert names == [[*made, "all_gather.cu", *used]]
    _together(members, tokens)


def _together(members: list[TunedSteps], tokens: int) -> None:
    model = members[0].recorded
    before = {state: model.raw[state].copy() for state in members[0].states}
    given = model.inputs(
        [i * 5 % 90 for i in range(tokens)],
        [i // 2 for i in range(tokens)],
        [i % 2 for i in range(tokens)],
    )
    model.step(given)
    run_together(members, given, before)


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize(
    ("name", "tokens"), [("shared", 27), pytest.param("qwen3moe", 19, marks=pytest.mark.long)]
)
def test_prompts_of_devices_that_have_rows_of_every_expert(
    name: str, tokens: int, folder: Path
) -> None:
    """The words by which devices meet last from step to step."""
    key = ShapeKey(tokens, tokens // 3)
    model = recorded(name, folder, key, "q4_k_m")
    members = [TunedSteps(model, key, DEVICE, PROMPTS, folder, share=Share(n, 2)) for n in range(2)]
    (launches,) = members[0].runs
    places = {one.workspace for one in launches if not one.gathers}
    assert places == {0}
    plan = members[0].plan
    assert [one.barrier >= plan.lasting_start for one in launches if one.gathers] == [True]
    _together(members, tokens)


@pytest.mark.parametrize(
    "name", ["other-shared", "gemma4", "gpt-oss", "lfm2moe", "glm4moe", "deepseek2"]
)
@pytest.mark.parametrize("tokens", [1, 3])
def test_products_by_themselves(name: str, tokens: int, folder: Path) -> None:
    """Where what stands around them has no rule, such as biases; deepseek2 has two of heads."""
    key = ShapeKey(tokens, 1)
    files = frozenset({"expert_product.cu"})
    model = recorded(name, folder, key, "q5_k")
    steps = TunedSteps(model, key, DEVICE, files, folder)
    assert len(steps.runs) == (5 if name == "deepseek2" else 3)
    assert not steps.files_used() & ROUTED
    run(steps, [3, 30, 60][:tokens], list(range(tokens)), [1] * tokens)


def test_other_formats_keep_the_plain_kernels(folder: Path) -> None:
    """Stacks that no tuned kernel reads."""
    one = ShapeKey(1, 1)
    steps = TunedSteps(recorded("shared", folder, one, "q8_0"), one, DEVICE, ROUTED, folder)
    assert not any(
        file.startswith("expert_") and file.endswith(".cu") for file in steps.files_used()
    )
