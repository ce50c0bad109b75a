"""Digests of rows through the engine: in any mix of requests they are those of the rows."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from contract.errors import RequestError
from contract.types import Request, SamplingParams
from reference.engine import Engine, EngineOptions
from reference.limits import Limits
from reference.model.open import open_model
from reference.ops.row_digest import row_digest
from reference.runner import LOG_PROBABILITIES, LOGITS, ROW_DIGEST, ModelRunner, StepInput
from tests.named_tiers import named, on_each, quick_tier, runner_on

LIMITS = Limits(
    slots=3, context=96, pages=18, step_tokens=40, step_rows=8, top_log_probabilities=2,
    digests=True,
)  # fmt: skip
TIERS = named("native", "opencl", "vulkan", "cuda")
PROMPTS = (tuple((i * 37) % 250 for i in range(50)), (7, 8, 9), (3, 1, 4, 1, 5, 9, 2, 6))
TOKENS = 9


class Rows:
    """Collects the rows of an output, each position once."""

    def __init__(self) -> None:
        self.rows: list[NDArray[np.float32]] = []

    def __call__(self, first: int, rows: NDArray[np.float32]) -> None:
        self.rows.extend(rows)

    @property
    def bits(self) -> list[bytes]:
        return [row.tobytes() for row in self.rows]


class Recorded(ModelRunner):
    """Notes the outputs and the flags of each step."""

    steps: list[tuple[tuple[str, ...], list[int] | None]]

    def submit(self, inputs: StepInput):  # type: ignore[no-untyped-def]
        flags = None if inputs.digested is None else inputs.digested.tolist()
        self.steps.append((inputs.requested, flags))
        return super().submit(inputs)


@pytest.fixture(scope="module", params=TIERS)
def runner(request, tiny_model_path) -> Iterator[Recorded]:
    model = open_model(tiny_model_path)
    with model.file, TIERS[request.param]() as tier, Recorded(model, tier, LIMITS) as runner:
        runner.steps = []
        yield runner


def run(runner: Recorded, *outputs: str | None) -> list[Rows]:
    """Requests that run together: what each gets of its output, None for one without."""
    runner.steps.clear()
    engine = Engine(runner)
    received = [Rows() for _ in outputs]
    for number, (output, rows) in enumerate(zip(outputs, received, strict=True)):
        prompt = PROMPTS[number]
        listed = 2 if number == 1 else None
        request = Request(
            number, prompt, TOKENS, SamplingParams(temperature=0.8, seed=number), ignore_end=True,
            log_probabilities=listed,
        )  # fmt: skip
        if output is None:
            engine.submit(request)
        else:
            engine.submit(request, rows, len(prompt) - 1, output=output)
    for _ in engine.run():
        pass
    return received


def of_rows(rows: Rows) -> list[bytes]:
    logits = np.array(rows.rows)
    return [d.tobytes() for d in row_digest(logits=logits, digested=np.ones(len(logits), np.int32))]


def test_digests_are_those_of_the_rows_in_any_mix(runner):
    logits = run(runner, LOGITS, LOGITS, LOGITS)
    expected = [of_rows(rows) for rows in logits]
    assert [len(digests) for digests in expected] == [TOKENS] * 3
    assert len({digest for digests in expected for digest in digests}) == 3 * TOKENS
    for outputs in (
        (ROW_DIGEST, ROW_DIGEST, ROW_DIGEST),
        (ROW_DIGEST, None, ROW_DIGEST),
        (LOGITS, ROW_DIGEST, None),
    ):
        found = run(runner, *outputs)
        for output, rows, whole, digests in zip(outputs, found, logits, expected, strict=True):
            assert rows.bits == {LOGITS: whole.bits, ROW_DIGEST: digests, None: []}[output]


@pytest.mark.parametrize(
    ("runner", "temperature"), on_each(TIERS, (0.0, 0.8), 0.0), indirect=["runner"]
)
def test_a_request_alone_has_the_same_digests(runner, temperature):
    """Steps of one row end in other launches on some tiers, greedy ones and drawn ones."""
    found = []
    for output in (LOGITS, ROW_DIGEST):
        engine, rows = Engine(runner, EngineOptions(prefix_cache=False)), Rows()
        sampling = SamplingParams(temperature=temperature, repeat_last_n=0, seed=7)
        request = Request(0, PROMPTS[0], TOKENS, sampling, ignore_end=True)
        engine.submit(request, rows, len(PROMPTS[0]) - 1, output=output)
        found.append((rows, [event.token for event in engine.run()]))
    (logits, tokens), (digests, again) = found
    assert again == tokens
    assert digests.bits == of_rows(logits)


def test_only_rows_that_are_asked_for_are_digested(runner):
    """A step without such a request has no digest in it, and its rows have no flags."""
    run(runner, None, None, LOGITS)
    assert all(ROW_DIGEST not in requested for requested, _ in runner.steps)
    assert {flags is None for _, flags in runner.steps} == {True}
    run(runner, None, ROW_DIGEST, None)
    together = [flags for _, flags in runner.steps if flags and len(flags) == 3]
    assert together
    assert {sum(flags) for flags in together} == {1}
    listed = [requested for requested, _ in runner.steps if LOG_PROBABILITIES[0] in requested]
    assert listed


def test_limits_without_digests_refuse_them(tiny_model_path):
    with runner_on(tiny_model_path, quick_tier, replace(LIMITS, digests=False)) as plain:
        engine = Engine(plain)
        with pytest.raises(RequestError, match="cannot be digests"):
            engine.submit(Request(1, (1, 2), 2), Rows(), 1, output=ROW_DIGEST)
