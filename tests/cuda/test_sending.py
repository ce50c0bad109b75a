"""Several devices as one tier: kernels of prompts and of many sequences that store their results on
all of them, block by block on the double of the driver."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from accel.cuda import planning
from accel.cuda.gathers import RESULTS
from accel.cuda.runs import OPERANDS_OF_A_PACKET
from accel.packets.rules import ROW_PARTS, lower_graph
from accel.packets.shares import ALL_GATHER, Share, divided_weights, share_step
from contract.dtypes import I12
from contract.records import QUERY_TOKEN, SAMPLING
from contract.shape_key import ShapeKey
from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from reference.cpu.tier import CpuTier
from reference.limits import Limits
from reference.model.open import Model, open_model
from reference.runner import LOGITS, ModelRunner, StepInput
from tests.cuda import test_experts
from tests.cuda.emulated_step import DEVICE
from tests.cuda.fake_devices import EmulatedDevices
from tests.cuda.test_multi_device import opened
from tests.cuda.test_persistent import MODELS

FAMILIES = {
    "mixed": MODELS["mixed"],
    "mixture": test_experts.MODELS["shared"],
    "shared": {**MODELS["mixed"], "layers": 1, "heads": 4, "kv_heads": 2, "head_dim": 64},
    "broad": {**MODELS["mixed"], "hidden": 1280, "feed_forward": 1536},
    "heads": {**MODELS["mixed"], "layers": 2, "heads": 8, "kv_heads": 2, "head_dim": 64},
    "deep": {**MODELS["mixed"], "feed_forward": 4096},
    "normed": {**MODELS["gemma3"], "hidden": 1280, "feed_forward": 1536},
}


OF_ATTENTION = {"attention_groups"}


def model_of(name: str, folder: Path) -> Model:
    path = folder / f"sending-{name}.gguf"
    if not path.exists():
        write_synthetic(path, sized_spec("tiny", quant="q4_k_m", **FAMILIES[name]))
    return open_model(path)


@pytest.mark.parametrize(
    ("name", "tokens", "device", "kernels"),
    [
        ("mixture", 2, "0,1", {"unit_product", "expert_gates", "expert_down"}),
        pytest.param(
            "mixed",
            70,
            "1,2,0",
            {"unit_groups", "unit_product", "attention_groups"},
            marks=pytest.mark.long,
        ),
        ("shared", 70, "1,0", {"unit_groups", "unit_product", "attention_groups"}),
        ("heads", 20, "0,1", {"unit_groups", "unit_product", "attention_tokens"}),
        ("shared", 20, "1,0", {"unit_groups", "unit_product", "attention_tokens"}),
        ("heads", 3, "1,0", {"unit_product", "attention_clusters"}),
        ("deep", 20, "0,1", {"unit_groups", "unit_fold", "unit_product", "attention_tokens"}),
        ("broad", 20, "0,1", {"unit_groups", "unit_product", "gated_pack", "attention_tokens"}),
        pytest.param(
            "broad",
            50,
            "2,0,1",
            {"unit_groups", "unit_product", "gated_pack", "attention_tokens"},
            marks=pytest.mark.long,
        ),
    ],
)
def test_products_of_many_tokens_send(
    name: str, tokens: int, device: str, kernels: set[str], folder: Path
) -> None:
    """By warp groups, whose blocks share rows where there are multiprocessors for it."""
    model = model_of(name, folder)
    driver = EmulatedDevices(folder, 3, MULTIPROCESSOR_COUNT=132)
    limits = limits_of(tokens)
    query = np.zeros(tokens, QUERY_TOKEN)
    query["token"] = query["position"] = np.arange(tokens)
    row, pages = np.array([tokens - 1], np.int32), np.arange(6, dtype=np.int32)[None]
    step = StepInput(query, row, np.zeros(1, SAMPLING), pages, (LOGITS,))
    found = []
    for tier in (CpuTier(), opened(driver, device)):
        with tier, ModelRunner(model, tier, limits) as runner:
            found.append(runner.step(step).logits.tobytes())
    assert found[0] == found[1]
    launched = {name for name, _ in driver.launched}
    assert launched & {*RESULTS, *OF_ATTENTION, "gated_pack"} == kernels
    assert driver.sent


@pytest.mark.parametrize(("count", "heads", "kv_heads"), [(2, 2, 1), (3, 4, 2)])
def test_heads_are_divided_where_they_divide_evenly(
    count: int, heads: int, kv_heads: int, folder: Path
) -> None:
    """Of prompts, too: queries, keys, their norms and rotations, and the pages."""
    limits = limits_of(70)
    graph, share = model_of("shared", folder).graph(limits), Share(count - 1, count)
    step = lower_graph(graph, ShapeKey(70, 1), ROW_PARTS, "cuda")
    divided = planning.divided_buffers(graph, [step], share)
    ops = planning.planned_bucket(step, DEVICE, share=share, divided=divided).step.ops
    found = [op.max_sizes() for op in ops if op.name == "flash_attn_batched"]
    assert {(sizes["heads"], sizes["kv_heads"]) for sizes in found} == {(heads, kv_heads)}
    assert {op.max_sizes()["heads"] for op in ops if op.name == "rope"} == {heads, kv_heads}


def limits_of(tokens: int) -> Limits:
    return Limits(1, 96, 6, I12, step_tokens=tokens, step_rows=1)


def overlaps_of_sends(model: Model, tokens: int) -> list[tuple[str, str]]:
    """Pairs of a buffer that other devices may write already and of one that shares its memory and
    is in use on this device."""
    graph = model.graph(limits_of(tokens))
    step, share = lower_graph(graph, ShapeKey(tokens, 1), ROW_PARTS, "cuda"), Share(0, 2)
    device = replace(DEVICE, multiprocessors=132)
    divided = planning.divided_buffers(graph, [step], share)
    bucket = planning.planned_bucket(step, device, share=share, divided=divided)
    lives: dict[str, tuple[int, int]] = {}
    for op, level in zip(bucket.step.ops, bucket.plan.levels, strict=True):
        for tensor in op.operands:
            if tensor is not None and tensor.buffer in bucket.step.scratch:
                lives[tensor.buffer] = lives.get(tensor.buffer, (level, level))[0], level

    def memory(name: str) -> range:
        start = bucket.schedule.shared[name]
        return range(start, start + bucket.step.scratch[name])

    found, met = [], -1
    for launch in bucket.plan.launches:
        # Of launches that run beside each other devices meet in the last.
        assert not launch.sends or dict(launch.source.macros).get("MEETS", 1) == launch.gathers
        if not launch.gathers:
            continue
        level = bucket.plan.levels[launch.first]
        ops = [divmod(send, OPERANDS_OF_A_PACKET) for send in launch.sends]
        sent = [bucket.step.ops[launch.first + op].operands[operand] for op, operand in ops]
        for mine, (other, (first, last)) in product(sent, lives.items()):
            assert mine is not None
            if mine.buffer not in lives:
                continue
            a, b = memory(mine.buffer), memory(other)
            apart = a.stop <= b.start or b.stop <= a.start or mine.buffer == other
            if not apart and met < last and first <= level:
                found.append((mine.buffer, other))
        met = level
    return found


@pytest.mark.parametrize(
    ("name", "tokens"), [("normed", 20), ("broad", 50), ("mixed", 70), ("mixture", 2)]
)
def test_what_others_send_arrives_in_memory_of_nothing_else(
    name: str, tokens: int, folder: Path
) -> None:
    """Behind one meeting another device may store what it makes until the next."""
    assert overlaps_of_sends(model_of(name, folder), tokens) == []


def test_memory_that_is_taken_too_late_is_noticed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: what a packing launch sends counts as used from that launch on."""
    monkeypatch.setattr(planning, "sent_since", lambda *_: {})
    assert overlaps_of_sends(model_of("normed", folder), 20)


def test_few_tokens_of_a_mixture_divide_experts_alone(folder: Path) -> None:
    """Devices meet twice a layer: for what gates and ups make, and for the sum. A prompt divides
    all products."""
    path = folder / "sending-mixture.gguf"
    write_synthetic(path, sized_spec("tiny", quant="q4_k_m", **MODELS["qwen3moe"]))
    graph = open_model(path).graph(limits_of(32))
    found = []
    for tokens in (1, 32):
        step = lower_graph(graph, ShapeKey(tokens, 1), ROW_PARTS, "cuda")
        shared = share_step(step, Share(0, 2), divided_weights([step], Share(0, 2)))
        wholes = [op.operands[1] for op in shared.step.ops if op.device is ALL_GATHER]
        found.append(sum(whole is not None for whole in wholes))
    assert found[0] == 2 * 2
    assert found[1] > 2 * found[0]
