"""The experts that each token of a mixture uses: those of the definition, the same in any mix."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from contract.errors import RequestError
from contract.ir.unread_outputs import kinds_of_steps, without_outputs
from contract.opcodes import Opcode
from contract.types import Request, SamplingParams
from harness.validate.trace import TracedModel
from reference.engine import Engine, EngineOptions
from reference.engine.drafter import PromptLookup
from reference.expert_outputs import expert_buffers, expert_ids, expert_output, expert_outputs
from reference.limits import Limits
from reference.model.open import open_model
from reference.runner import ModelRunner, StepInput
from tests.bench.steps import step_of
from tests.conftest import SyntheticModel
from tests.engine.scored_prompts import PROMPT, run
from tests.families_table import FAMILIES
from tests.long_cases import long_except
from tests.named_tiers import named, quick_tier, runner_on

LIMITS = Limits(
    slots=3, context=96, pages=9, step_tokens=40, step_rows=8, draft_tokens=5,
    top_log_probabilities=3, scores=True, experts=True,
)  # fmt: skip
MIXTURES = ("qwen35moe", "gemma4-experts", "gpt-oss-experts")
ALL_MIXTURES = [name for name, fields in FAMILIES.items() if fields.get("experts")]
TIERS = named("native", "opencl", "vulkan")
RUNS = [
    *((name, tier) for name in MIXTURES for tier in TIERS if tier != "vulkan"),
    ("gpt-oss-experts", "vulkan"),
]
"""A processor that plays a graphics card takes long for each."""
WHOLE = EngineOptions(prefix_cache=False)
SAMPLED = SamplingParams(temperature=0.9, seed=8)


class Experts:
    """Takes the experts of one request, those of each position once and in order."""

    def __init__(self) -> None:
        self.parts: list[NDArray[np.int32]] = []

    def __call__(self, first: int, ids: NDArray[np.int32]) -> None:
        assert first == sum(map(len, self.parts))
        assert len(ids) > 0
        self.parts.append(ids)

    @property
    def ids(self) -> list[Any]:
        return np.concatenate(self.parts).tolist()  # type: ignore[no-any-return]


@cache
def model_file(make: SyntheticModel, name: str) -> Path:
    return make(**FAMILIES[name], quant="q4_k_m")


@cache
def by_definition(path: Path, tokens: tuple[int, ...]) -> list[Any]:
    """What the CPU tier reads without company, one token a step."""
    with runner_on(path, quick_tier, LIMITS) as runner:
        found = Experts()
        engine = Engine(runner, EngineOptions(prefix_cache=False, chunk_tokens=1))
        engine.submit(Request(1, tokens, 0), on_experts=found)
        run(engine)
    return found.ids


@pytest.fixture(scope="module", params=RUNS, ids=" on ".join)
def runner(request, synthetic_model) -> Iterator[ModelRunner]:
    name, tier = request.param
    with runner_on(model_file(synthetic_model, name), TIERS[tier], LIMITS) as opened:
        yield opened


@pytest.fixture(scope="module")
def cpu(synthetic_model) -> Iterator[ModelRunner]:
    with runner_on(model_file(synthetic_model, "qwen3moe"), quick_tier, LIMITS) as opened:
        yield opened


EACH_CHOICE = (
    *("qwen3moe", "qwen35moe", "qwen35moe-nextn", "gemma4-experts", "gpt-oss-experts"),
    *("glm4moe-experts", "deepseek2-experts-groups", "granitehybrid-experts", "lfm2moe"),
    *("llama4-experts-two", "nemotron_h_moe", "smallthinker-experts", "kimi-linear-experts"),
    *("mistral4-experts", "minimax-m2-experts", "bailingmoe2-experts", "afmoe-experts"),
)
"""A mixture of each way to choose experts and of each sort of layers beside them."""


@pytest.mark.parametrize("name", long_except(ALL_MIXTURES, *EACH_CHOICE))
def test_they_are_those_that_the_layers_use(synthetic_model, name):
    """In one step the ids that the products of each layer read, and those that were asked for."""
    opened = open_model(model_file(synthetic_model, name))
    graph = opened.graph(LIMITS)
    products = [node for node in graph.nodes if node.opcode is Opcode.MOE_GATE_UP]
    used = tuple(node.operands["ids"].buffer for node in products)
    model = TracedModel(opened.file, opened.config, frozenset(used))
    with opened.file, quick_tier() as tier, ModelRunner(model, tier, LIMITS) as runner:
        inputs = step_of(runner, 30)
        output = runner.step(replace(inputs, requested=(*used, *runner.expert_outputs)))
    assert len(used) == len(runner.expert_outputs) > 1
    for name, read in zip(used, runner.expert_outputs, strict=True):
        assert output.outputs[name].tobytes() == output.outputs[read].tobytes()


def test_company_and_chunks_change_nothing(runner):
    """Of prompts and of answers, beside others that sample, draft, are scored or forced."""
    for chunk, ahead, drafter in ((3, 0, PromptLookup()), (32, 3, None)):
        options = EngineOptions(chunk_tokens=chunk, steps_ahead=ahead)
        engine = Engine(runner, options, drafter=drafter)
        found = {number: Experts() for number in (1, 2, 4)}
        own = Request(1, PROMPT[:20], 7, SAMPLED, ignore_end=True)
        engine.submit(own, on_experts=found[1])
        engine.submit(Request(3, PROMPT[:9] * 2, 9, ignore_end=True))
        scored = Request(2, PROMPT[:33], 0, score_from=5)
        engine.submit(scored, on_scores=[].append, on_experts=found[2])
        forced = Request(4, PROMPT[:7], 9, force_tokens=PROMPT[7:16])
        engine.submit(forced, on_experts=found[4])
        events = run(engine)
        said = tuple(event.token for event in events[1])
        assert len(said) == 7
        for number, tokens in ((1, PROMPT[:20] + said), (2, PROMPT[:33]), (4, PROMPT[:16])):
            # Of the last token nothing is computed.
            whole = by_definition(runner.model.file.path, tokens)
            assert found[number].ids == whole[: len(tokens) - 1]


def test_preempted_and_shared_ones_are_the_same(cpu):
    """More requests than pages hold, which begin alike: cached, evicted, preempted, recomputed."""
    engine = Engine(cpu, EngineOptions(chunk_tokens=7))
    found = [Experts() for _ in range(5)]
    for number, each in enumerate(found):
        engine.submit(Request(100 + number, PROMPT[: 3 + number], 60, ignore_end=True))
        engine.submit(Request(number, PROMPT[: number + 30], 0), on_experts=each)
    run(engine)
    assert engine.statistics.preempted > 0
    for number, each in enumerate(found):
        assert each.ids == by_definition(cpu.model.file.path, PROMPT[: number + 30])


def test_asking_for_them_changes_no_bit(runner):
    """Tokens and their log-probabilities with experts, and without."""
    own = Request(1, PROMPT[:20], 10, SAMPLED, ignore_end=True, log_probabilities=3)
    found: list[Any] = []
    for sink in (None, Experts()):
        engine = Engine(runner, WHOLE)
        engine.submit(own, on_experts=sink)
        found.append(run(engine)[1])
    assert found[0] == found[1]


def test_others_are_computed_without_them(cpu):
    """A step that nobody asks is that of a graph without them, and of two kinds more there are."""
    with open_model(cpu.model.file.path).file:
        plain = cpu.model.graph(replace(LIMITS, experts=False))
    assert without_outputs(cpu.graph, expert_buffers(cpu.graph)).nodes == plain.nodes
    assert kinds_of_steps(cpu.graph) == 2 * kinds_of_steps(plain)
    assert expert_outputs(plain) == ()
    requested: list[tuple[str, ...]] = []
    submitted = cpu.submit

    def watched(inputs: StepInput) -> Any:
        requested.append(inputs.requested)
        return submitted(inputs)

    cpu.submit = watched  # type: ignore[method-assign]
    try:
        engine = Engine(cpu, EngineOptions(prefix_cache=False, chunk_tokens=16, steps_ahead=0))
        engine.submit(Request(1, PROMPT[:16], 0), on_experts=Experts())
        engine.submit(Request(2, PROMPT[:32], 3, ignore_end=True))
        run(engine)
    finally:
        del cpu.submit  # type: ignore[method-assign]
    asked = [bool(set(names) & set(cpu.expert_outputs)) for names in requested]
    assert asked[0]
    assert not asked[-1]


def test_ids_of_layers_that_use_fewer_are_padded():
    outputs = {
        expert_output(layer): np.arange(2 * used, dtype=np.int32).view(np.uint8)
        for layer, used in ((11, 1), (2, 3))
    }
    assert expert_ids(outputs, 2, 1, 2).tolist() == [[[3, 4, 5], [1, -1, -1]]]


@pytest.mark.parametrize("name", MIXTURES)
def test_another_token_uses_others(synthetic_model, name):
    """Negative control: behind another token some experts are others; before it none."""
    path = model_file(synthetic_model, name)
    other = (*PROMPT[:10], (PROMPT[10] + 1) % 250, *PROMPT[11:30])
    first, second = by_definition(path, PROMPT[:30]), by_definition(path, other)
    assert first[:10] == second[:10]
    assert first[10:] != second[10:]


def test_a_receiver_that_cancels_is_told_nothing_more(cpu):
    engine = Engine(cpu, EngineOptions(chunk_tokens=8, prefix_cache=False))
    taken: list[int] = []

    def take(first: int, ids: NDArray[np.int32]) -> None:
        taken.append(first)
        engine.cancel(1)

    engine.submit(Request(1, PROMPT, 5), on_experts=take)
    assert run(engine) == {}
    assert taken == [0]


def test_refusals(synthetic_model):
    dense, mixture = (model_file(synthetic_model, name) for name in ("qwen3", "qwen3moe"))
    for path, limits, problem in (
        (dense, LIMITS, "the model has none"),
        (mixture, replace(LIMITS, experts=False), "built without them"),
    ):
        with (
            runner_on(path, quick_tier, limits) as runner,
            pytest.raises(RequestError, match=f"experts: cannot be read: .*{problem}"),
        ):
            Engine(runner).submit(Request(1, PROMPT, 0), on_experts=Experts())
