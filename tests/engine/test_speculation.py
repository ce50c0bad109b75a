"""Guessed tokens change nothing but the number of steps, whoever guesses and however wrong."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from contract.arithmetic import PAGE_TOKENS
from contract.errors import RequestError
from contract.types import Request, SamplingParams
from reference.engine import Engine, EngineOptions, MaskProvider
from reference.engine.draft_model import DraftModel, draft_limits
from reference.engine.drafter import Drafter, DraftRequest, PromptLookup, Tokens
from reference.limits import Limits
from reference.model.open import open_model
from reference.runner import ModelRunner
from reference.sched.constraints import Mask, is_allowed
from tests.engine.small_engine import ALL_TIERS as TIERS
from tests.engine.small_engine import tokens_of
from tests.engine.test_constrained_requests import few, two_residues
from tests.families_table import HYBRIDS
from tests.named_tiers import runner_on

pytestmark = pytest.mark.usefixtures("unmeasured_steps")
LIMITS = Limits(
    slots=3, context=96, pages=12, step_tokens=48, step_rows=32, saved_states=8, slot_states=4,
    draft_tokens=11, masks=12,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"architecture": "qwen3", "quant": "q4_k_m"}, "qwen35": dict(HYBRIDS["qwen35"]),
    "lfm2": dict(HYBRIDS["lfm2"]), "granitehybrid": dict(HYBRIDS["granitehybrid"]),
    "kimi-linear": dict(HYBRIDS["kimi-linear-experts"]),
}  # fmt: skip


class Told(Drafter):
    """Guesses from the answers themselves, ``wrong`` out of 8 guesses spoilt."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], wrong: int) -> None:
        self._answers = answers
        self._wrong = wrong

    def draft(self, sequences: Sequence[DraftRequest]) -> list[Tokens]:
        return [self._guess(one.tokens, one.limit) for one in sequences]

    def _guess(self, tokens: Tokens, most: int) -> Tokens:
        known = tokens.tolist()
        for prompt, answer in self._answers.items():
            if tuple(known[: len(prompt)]) == prompt:
                rest = np.array(answer[len(known) - len(prompt) :][:most], np.int32)
                spoilt = (np.arange(len(rest)) + len(known)) % 8 < self._wrong
                return np.where(spoilt, (rest + 1) % 256, rest).astype(np.int32)
        raise AssertionError("a sequence nobody asked for")

    def ready(self, key: int, tokens: Tokens) -> bool:
        return True

    def forget(self, key: int) -> None:
        pass


@pytest.fixture(
    scope="module",
    params=[
        *(("qwen3", tier) for tier in TIERS if tier != "vulkan"),
        ("qwen35", "quick"),
        *((name, "native") for name in ("qwen35", "lfm2", "granitehybrid", "kimi-linear")),
        ("qwen35", "opencl"),
    ],
    ids=" on ".join,
)
def runner(request, synthetic_model) -> Iterator[ModelRunner]:
    name, tier_name = request.param
    with runner_on(synthetic_model(**MODELS[name]), TIERS[tier_name], LIMITS) as runner:
        yield runner


on_native = pytest.mark.parametrize(
    "runner", [("qwen3", "native")], indirect=True, ids=" on ".join, scope="module"
)


def requests_of(draw: Callable[..., Any]) -> list[Request]:
    """Prompts that repeat themselves, greedy and seeded, with and without penalties."""
    period = draw(st.integers(1, 9))
    return [
        Request(
            number,
            tuple((number + i % period) * 7 % 256 for i in range(draw(st.integers(1, 40)))),
            draw(st.integers(1, 40)),
            SamplingParams(
                temperature=draw(st.sampled_from((0.0, 0.7))),
                repeat_penalty=draw(st.sampled_from((1.0, 1.0, 1.3))),
                repeat_last_n=draw(st.sampled_from((0, 20, 60))),
                seed=number,
            ),
        )
        for number in range(draw(st.integers(1, 4)))
    ]


@settings(max_examples=6, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(data=st.data())
def test_no_guess_changes_a_token(runner, data):
    requests = requests_of(data.draw)
    end = frozenset(data.draw(st.sets(st.integers(0, 255), max_size=8)))
    plain = Engine(runner, EngineOptions(steps_ahead=0, prefix_cache=False, end_of_generation=end))
    expected = tokens_of(plain, *requests)
    answers = {r.prompt: expected[r.id] for r in requests}
    drafter = data.draw(
        st.sampled_from([PromptLookup(2), Told(answers, 0), Told(answers, 1), Told(answers, 8)])
    )
    engine = Engine(
        runner,
        EngineOptions(
            steps_ahead=data.draw(st.sampled_from((0, 1, 3))),
            end_of_generation=end,
            draft_tokens=data.draw(st.integers(1, 9)),
        ),
        drafter=drafter,
    )
    assert tokens_of(engine, *requests) == expected


@pytest.mark.parametrize(("name", "wrong"), [*zip(MODELS, (8, 4, 1, 4, 2), strict=True)])
def test_a_scored_prompt_and_guesses(synthetic_model, name, wrong):
    """Tokens that a recurrent model computes again after wrong guesses are told once."""
    limits = replace(LIMITS, top_log_probabilities=1, scores=True)
    prompt = tuple(range(9, 30))
    scored = Request(1, prompt, 40, ignore_end=True, score_from=1, score_top=1)
    with runner_on(synthetic_model(**MODELS[name]), TIERS["quick"], limits) as scoring:

        def run(drafter: Drafter | None) -> tuple[list[tuple[int, int]], list[float]]:
            engine = Engine(scoring, EngineOptions(steps_ahead=0), drafter=drafter)
            scores: list[float] = []
            engine.submit(scored, on_scores=lambda part: scores.extend(part.log_probability))
            return [(event.position, event.token) for event in engine.run()], scores

        plain = run(None)
        assert [position for position, _ in plain[0]] == list(range(len(prompt), len(prompt) + 40))
        answer = [token for _, token in plain[0]]
        assert run(Told({prompt: answer}, wrong)) == plain


def test_right_guesses_save_steps(runner):
    """Every guess right: a step gives several tokens, where a state must be kept too."""
    request = Request(1, tuple(range(20)), 60, SamplingParams(temperature=0.9, seed=5))
    plain = Engine(runner, EngineOptions(steps_ahead=0))
    tokens = tokens_of(plain, request)
    drafter = Told({request.prompt: tokens[1]}, 0)
    engine = Engine(runner, EngineOptions(steps_ahead=0, prefix_cache=True), drafter=drafter)
    assert tokens_of(engine, request) == tokens
    done = engine.statistics
    assert done.speculation.accepted == done.speculation.drafted > 30
    assert done.steps < plain.statistics.steps / 2


@pytest.mark.parametrize("wrong", [0, 3])
def test_masked_requests_are_drafted_for(runner, wrong):
    """The same tokens as without drafts. Masks are asked for only behind drafts that they allow,
    and all other drafts are cut before they are verified."""
    masks = {1: two_residues, 2: few, 3: None}
    requests = [
        Request(n, tuple(range(n, n + 20)), 30, SamplingParams(0.8 * (n == 2), seed=n))
        for n in masks
    ]
    requests[2] = replace(requests[2], min_tokens=20, stop_tokens=tuple(range(0, 256, 2)))
    asked: list[tuple[MaskProvider, list[int]]] = []

    def noting(mask: MaskProvider) -> MaskProvider:
        def provider(tokens: list[int]) -> Mask | None:
            asked.append((mask, tokens))
            return mask(tokens)

        return provider

    def run(drafter: Drafter | None) -> tuple[dict[int, list[int]], Engine]:
        options = EngineOptions(steps_ahead=0, draft_tokens=4)
        engine = Engine(runner, options, drafter=drafter)
        for request in requests:
            mask = masks[request.id]
            engine.submit(request, allowed=None if mask is None else noting(mask))
        return tokens_of(engine), engine

    expected, plain = run(None)
    asked.clear()
    answers = {request.prompt: expected[request.id] for request in requests}
    tokens, engine = run(Told(answers, wrong))
    assert tokens == expected
    for mask, generated in asked:
        assert all(is_allowed(mask(generated[:n]), token) for n, token in enumerate(generated))
    done = engine.statistics
    assert done.speculation.accepted > (50 if not wrong else 15)
    assert done.steps < plain.statistics.steps * (0.6 if not wrong else 0.9)


def test_states_are_saved_within_right_guesses(runner):
    """No step ends at a position whose recurrent state is saved only for that: three guesses are
    in each, and the state of the last whole page is found by who continues the answer."""
    request = Request(1, tuple(range(20)), 70)
    plain = Engine(runner, EngineOptions(steps_ahead=0))
    answer = tokens_of(plain, request)
    drafter = Told({request.prompt: answer[1]}, 0)
    engine = Engine(runner, EngineOptions(steps_ahead=0, draft_tokens=9), drafter=drafter)
    assert tokens_of(engine, request) == answer
    if runner.recurrent.slot_bytes:
        assert engine.statistics.steps == 20
    else:
        assert engine.statistics.steps <= 13
    more = replace(request, prompt=(*request.prompt, *answer[1][:65]), max_tokens=5)
    assert tokens_of(engine, more)[1] == answer[1][65:]
    assert engine.statistics.prefix.tokens_hit == 80


@pytest.mark.parametrize("length", [17, 18, 19])
def test_no_published_page_is_computed_again(synthetic_model, length):
    """Wrong guesses behind the last position of a page: others may read the page once it is
    published, and the right tokens are computed again."""
    request = Request(1, tuple(range(length)), 60)
    path = synthetic_model(**MODELS["qwen35"])
    with runner_on(path, TIERS["quick"], LIMITS) as runner:
        plain = tokens_of(Engine(runner, EngineOptions(steps_ahead=0)), request)
        drafter = Told({request.prompt: plain[1]}, 3)
        engine = Engine(runner, EngineOptions(steps_ahead=0, draft_tokens=3), drafter=drafter)
        engine.submit(request)
        while not engine.idle:
            engine.step()
            for sequence in engine._slot_manager.running.values():
                pages = 0 if sequence.published is None else sequence.published.pages
                computed = engine._slot_manager.table.computed[sequence.slot]
                assert pages * PAGE_TOKENS <= computed
    assert engine.statistics.speculation.accepted > 9


@on_native
def test_wrong_guesses_are_given_up(runner):
    """Where nothing is right, guessing pauses: less than half of the steps carry guesses."""
    request = Request(1, tuple(range(20)), 60)
    plain = tokens_of(Engine(runner, EngineOptions(steps_ahead=0)), request)
    engine = Engine(
        runner, EngineOptions(steps_ahead=0), drafter=Told({request.prompt: plain[1]}, 8)
    )
    assert tokens_of(engine, request) == plain
    done = engine.statistics.speculation
    assert done.accepted == 0
    assert done.pauses >= 1
    assert done.steps < 30


def test_a_draft_model_guesses(runner, synthetic_model):
    """One that is the target itself is always right where the target is greedy; one with other
    weights changes nothing but the number of steps."""
    requests = [
        Request(n, tuple((n + i) * 5 % 256 for i in range(9 + 20 * n)), 24) for n in range(3)
    ]
    plain = Engine(runner, EngineOptions(steps_ahead=0))
    expected = tokens_of(plain, *requests)
    for spec in ({"quant": "q4_k_m"}, {"quant": "f32", "seed": 5}):
        model = open_model(synthetic_model(architecture="qwen3", **spec))
        with model.file, ModelRunner(model, runner.tier, draft_limits(runner.limits)) as small:
            drafter = DraftModel(small, runner.model)
            engine = Engine(runner, EngineOptions(draft_tokens=9), drafter=drafter)
            assert tokens_of(engine, *requests) == expected
            if spec["quant"] == "q4_k_m" and not runner.recurrent.slot_bytes:
                done = engine.statistics.speculation
                assert done.accepted == done.drafted > 0
                assert engine.statistics.steps < plain.statistics.steps


@on_native
def test_a_draft_model_must_fit(runner, synthetic_model):
    hybrid = synthetic_model(**MODELS["qwen35"])
    other = synthetic_model(architecture="gemma3", quant="f32")
    larger = synthetic_model(architecture="llama", quant="f32", vocab=1400)
    problems = ((hybrid, "recurrent"), (other, "token 0 is '<pad>'"), (larger, "1400 tokens"))
    for path, problem in problems:
        model = open_model(path)
        with (
            model.file,
            ModelRunner(model, runner.tier, draft_limits(runner.limits)) as small,
            pytest.raises(RequestError, match=problem),
        ):
            DraftModel(small, runner.model)


@on_native
@pytest.mark.parametrize("change", [{"vocab": 333}, {"vocab": 310}, {"context": 64}])
def test_a_draft_model_of_other_sizes_changes_nothing(runner, synthetic_model, change):
    """More or fewer padding tokens, and a shorter context than the target's: beyond it no guess is
    made."""
    requests = [Request(1, tuple(n * 5 % 256 for n in range(40)), 60, ignore_end=True)]
    expected = tokens_of(Engine(runner, EngineOptions(steps_ahead=0)), *requests)
    model = open_model(synthetic_model(architecture="qwen3", quant="q4_k_m", **change))
    sizes = draft_limits(runner.limits)
    sizes = replace(sizes, context=min(sizes.context, model.config.context))
    with model.file, ModelRunner(model, runner.tier, sizes) as small:
        drafter = DraftModel(small, runner.model)
        engine = Engine(runner, EngineOptions(draft_tokens=9), drafter=drafter)
        assert tokens_of(engine, *requests) == expected
        assert engine.statistics.speculation.drafted > 0


def test_prompt_lookup_finds_the_latest_occurrence():
    lookup = PromptLookup(2)
    tokens = np.array([1, 2, 3, 1, 2, 4, 9, 1, 2], np.int32)
    assert not lookup.ready(1, tokens[:3])
    assert lookup.draft([DraftRequest(1, 0, tokens[:5], 2)])[0].tolist() == [3, 1]
    assert lookup.draft([DraftRequest(1, 0, tokens, 9)])[0].tolist() == [4, 9, 1, 2]
    assert lookup.draft([DraftRequest(1, 0, tokens, 1)])[0].tolist() == [4]
    lookup.forget(1)
    assert lookup.draft([DraftRequest(1, 0, tokens[6:], 3)])[0].tolist() == []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 4), st.data())
def test_prompt_lookup_is_its_definition(ids, match, data):
    """Read at once or token by token: what followed the last occurrence of the last tokens."""
    tokens = np.array(ids, np.int32)
    lookup = PromptLookup(match)
    reads = [*sorted(data.draw(st.sets(st.integers(1, len(ids))))), len(ids)]
    for length in reads:
        known = ids[:length]
        ends = [e for e in range(match, length) if known[e - match : e] == known[-match:]]
        expected = known[ends[-1] :] if ends and length >= match else []
        assert lookup.draft([DraftRequest(7, 0, tokens[:length], 99)])[0].tolist() == expected
