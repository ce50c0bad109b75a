"""Models of which not all weights fit: what is planned, said, and answered."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import harness.host.open
from accel.native.tier import Choices as NativeChoices
from accel.native.tier import NativeTier
from accel.opencl.runtime import Choices
from accel.opencl.tier import OpenClTier
from contract.errors import DoesNotFit, OutOfMemory
from contract.footprint import Footprint
from contract.tier import Tier
from contract.types import SamplingParams
from harness.host.open import prepare_session
from harness.host.options import SessionOptions, limits_at
from harness.host.session import Session
from harness.residency import by_importance, disk_rate, plan_residency
from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from harness.tiers import TierOptions
from reference.limits import Limits
from reference.memory.planner import MemoryPlan
from reference.model.open import open_model
from tests.needs import need_device
from tests.opencl_parts import SOME, holding

PROMPT = tuple(range(40))
GREEDY = SamplingParams()
SIZES = {"architecture": "qwen3", "layers": 4, "feed_forward": 768, "hidden": 256}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_synthetic(path, sized_spec("tiny", quant="q8_0", seed=3, **SIZES))
    return path


@pytest.fixture
def notes(kernel_cache, monkeypatch) -> Iterator[list[str]]:
    """What is noted while sessions run on a device with memory of its own."""
    said: list[str] = []

    def open_it(name: str, options: TierOptions) -> Tier:
        choices = Choices(shared_addresses=False, cache=kernel_cache)
        return need_device(lambda: OpenClTier(choices=choices))

    monkeypatch.setattr(harness.host.open, "open_tier", open_it)
    with holding(SOME):
        yield said


def options_of(notes: list[str], **fields: int | None) -> SessionOptions:
    """A session of chunks of 16 tokens."""
    return replace(SessionOptions(chunk=16, tier_options=TierOptions(note=notes.append)), **fields)


def plan_of(path: Path, options: SessionOptions) -> MemoryPlan:
    with ExitStack() as owned:
        return prepare_session(path, options, owned).plan


def answer(path: Path, options: SessionOptions) -> list[int]:
    with Session.open(path, options) as session:
        return [piece.token for piece in session.generate(PROMPT, GREEDY, 9)]


def test_a_budget_below_the_model_is_answered(model_path, notes):
    """With fewer and fewer weights on the device, down to the least that works, which the error
    for one byte less names; the tokens stay the same, and one line is said."""
    options = options_of(notes, context=96)
    whole = plan_of(model_path, options)
    expected = answer(model_path, options)
    assert (whole.streamed, notes) == (0, [])
    with pytest.raises(DoesNotFit, match="weights of all layers in host memory") as refused:
        plan_of(model_path, replace(options, memory_budget=1 << 16))
    least = refused.value.need
    assert least < whole.budgeted * 3 // 4
    streamed = []
    for budget in (whole.budgeted - 1, (whole.budgeted + least) // 2, least):
        notes.clear()
        small = replace(options, memory_budget=budget)
        with Session.open(model_path, small) as session:
            assert [piece.token for piece in session.generate(PROMPT, GREEDY, 9)] == expected
            assert session.tier._memory.used <= budget
        plan = plan_of(model_path, replace(small, tier_options=TierOptions()))
        assert plan.budgeted <= budget
        streamed.append(plan.streamed)
        (line,) = notes
        assert "stay in host memory; every step copies them" in line
        assert "a second" in line
    assert 0 < streamed[0] < streamed[1] < streamed[2]
    with pytest.raises(DoesNotFit) as refused:
        plan_of(model_path, replace(options, memory_budget=least - 1))
    assert (refused.value.need, refused.value.have) == (least, least - 1)


def test_an_estimate_that_is_too_low_is_corrected(model_path, notes, monkeypatch):
    """Further weights are streamed until what the steps need is within the budget."""
    monkeypatch.setattr(OpenClTier, "_streaming_scratch", lambda _, nbytes: nbytes)
    options = options_of(notes, context=96)
    whole = plan_of(model_path, options)
    budget = replace(options, memory_budget=whole.budgeted * 4 // 5)
    right = plan_of(model_path, budget)
    estimate = OpenClTier.streaming_footprint

    def low(tier: OpenClTier, *sizes: Any) -> Footprint:
        found = estimate(tier, *sizes)
        return replace(found, scratch=found.scratch - (1 << 18))

    monkeypatch.setattr(OpenClTier, "streaming_footprint", low)
    corrected = plan_of(model_path, budget)
    assert corrected.budgeted <= whole.budgeted * 4 // 5
    assert corrected.streamed >= right.streamed


def test_prompts_are_read_in_long_steps_where_they_cost_little(model_path, notes):
    """A step copies the weights whatever its length; steps of which fewer weights fit are not
    taken."""
    model, options = open_model(model_path), options_of(notes, context=256)
    whole = plan_of(model_path, options)
    with harness.host.open.open_tier("", TierOptions()) as tier:

        def steps_with(longest: int, budget: int) -> tuple[int, int]:
            by_steps = [limits_at(model, replace(options, chunk=n)) for n in (longest, 16)]
            plan = plan_residency(model, tier, by_steps, 256, budget).plan
            return plan.step_tokens, plan.streamed

        budget = whole.budgeted * 9 // 10
        _, streamed = steps_with(16, budget)
        tokens, more = steps_with(24, budget)
        assert (tokens, more <= streamed + streamed // 16) == (25, True)
        assert steps_with(256, budget) == (17, streamed)


def test_a_context_that_was_not_asked_for(model_path, notes):
    """It is what fits; one that was asked for and is too long says what fits."""
    options = options_of(notes)
    with pytest.raises(DoesNotFit) as refused:
        plan_of(model_path, replace(options, memory_budget=1 << 16))
    room = replace(options, memory_budget=refused.value.need + (1 << 16))
    plan = plan_of(model_path, room)
    assert 16 < plan.context < 1024
    assert plan.streamed > 0
    with pytest.raises(DoesNotFit, match=f"--context {plan.context} fits"):
        plan_of(model_path, replace(room, context=1024))


def test_memory_that_was_taken_meanwhile(model_path, notes, monkeypatch):
    """Between the plan and the allocation: an error that names what it was for."""
    options = options_of(notes, context=96)
    budget = plan_of(model_path, options).budgeted - 1

    def taken(self: object, what: str, nbytes: int) -> None:
        raise OutOfMemory(what, nbytes, 0, 0)

    monkeypatch.setattr("accel.opencl.memory.BankedMemory.allocate_on_host", taken)
    with pytest.raises(OutOfMemory, match="in host memory"):
        answer(model_path, replace(options, memory_budget=budget))


def test_a_host_without_memory_for_the_rest(model_path, notes, monkeypatch):
    """Is refused before anything is allocated."""
    options = options_of(notes, context=96)
    budget = plan_of(model_path, options).budgeted - 1
    monkeypatch.setattr("harness.residency.available_memory", lambda: 1 << 16)
    with pytest.raises(DoesNotFit, match="that stay in host memory"):
        plan_of(model_path, replace(options, memory_budget=budget))


def test_stacks_of_experts_are_the_first_to_stay_in_host_memory(tmp_path):
    """Attention, recurrence and shared experts are on the device before dense feed forward."""
    path = tmp_path / "mixture.gguf"
    write_synthetic(path, sized_spec("tiny", architecture="qwen35moe", quant="q8_0"))
    graph = open_model(path).graph(Limits(1, 96, 6))
    names = [name for name, decl in graph.buffers.items() if decl.name.endswith("]")]
    ranked = by_importance(graph, names)
    stacks = [name for name in ranked if len(graph.buffers[name].shape) == 3]
    assert ranked[-len(stacks) :] == stacks
    assert any("shexp" in name for name in ranked[: -len(stacks)])


def test_a_processor_reads_what_does_not_fit_from_disk(
    model_path, tmp_path, kernel_cache, monkeypatch
):
    """Arranged weights are mapped from a file: they are no reason to refuse, and one line says
    so. Without that file they are memory of the process, and what does not fit is refused."""
    monkeypatch.setattr("accel.native.weight_cache.MIN_BYTES", 0)
    folder: list[Path | None] = [tmp_path]

    def open_it(name: str, options: TierOptions) -> Tier:
        choices = NativeChoices(cache=kernel_cache, weights=folder[0])
        return need_device(partial(NativeTier, choices=choices))

    monkeypatch.setattr(harness.host.open, "open_tier", open_it)
    notes: list[str] = []
    options = options_of(notes, context=96)
    whole = plan_of(model_path, options)
    expected = answer(model_path, options)
    small = replace(options, memory_budget=whole.budgeted - whole.evictable // 2)
    least = replace(options, memory_budget=whole.budgeted - whole.evictable)
    assert notes == []
    for budget in (small, least):
        notes.clear()
        assert answer(model_path, budget) == expected
        (line,) = notes
        assert "is read from disk" in line
    assert least.memory_budget is not None
    with pytest.raises(DoesNotFit):
        plan_of(model_path, replace(least, memory_budget=least.memory_budget - 1))
    folder[0] = None
    with pytest.raises(DoesNotFit):
        plan_of(model_path, least)


def test_the_rate_of_a_disk(model_path, tmp_path):
    """A file of any length is measured; what is no file, or on no disk, has no rate."""
    (tmp_path / "empty").touch()
    rate = disk_rate(model_path)
    assert rate is None or rate > 0
    for path in (tmp_path / "empty", tmp_path / "missing", tmp_path, Path("/dev/full")):
        assert disk_rate(path) is None, path
