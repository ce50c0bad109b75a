"""Leaves and scores that replicas make: those of one engine, also where a request moves."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from contract.types import Request, SamplingParams
from harness.digest import RowDigests, RunningDigest
from harness.host.collectors import PromptScores
from harness.host.engine_thread import EngineThread
from harness.host.options import SessionOptions
from harness.host.remote.receivers import Receivers
from harness.host.remote.work import Job, submission_of
from harness.host.submissions import BothSinks, Submission
from harness.leaves import leaves_of_rows
from harness.serve.generation import Generation
from harness.serve.model import ModelOptions, ServedModel, open_model
from harness.serve.receipts.document import VERSION

TOKENS = 12
REQUEST = Request(7, (3, 4, 5, 6, 7), TOKENS, SamplingParams(temperature=0.9, seed=4))


@pytest.fixture(scope="module")
def model(tiny_model_path, tmp_path_factory) -> Iterator[ServedModel]:
    with ExitStack() as owned:
        session = SessionOptions(
            tier="cpu", context=256, slots=2, digests=True, top_log_probabilities=2
        )
        digests = tmp_path_factory.mktemp("digests") / "digests.json"
        options = ModelOptions(session, "m", digests)
        yield open_model(tiny_model_path, options, owned.enter_context(EngineThread()), owned)


@pytest.fixture(scope="module")
def expected(model) -> tuple[list[int], list[str]]:
    """The tokens and leaves of one engine's answer."""
    generation = Generation(model, [REQUEST], leaves=VERSION)
    for events in generation.taken(1.0):
        generation.received(events)
    return generation.tokens[0], generation.step_digests[0]


def follow(model: ServedModel, receivers: Receivers, tokens: tuple[int, ...]) -> None:
    """A replica's part of a request that has come to ``tokens``, batch by batch."""
    job = Job(replace(receivers.work, tokens=tokens), model.grammars)
    stream = model.driver.open_stream()
    (refused,) = model.driver.submit_to(stream, [submission_of([job])])
    assert refused is None
    # The first update only says that the request is accepted.
    receivers.receive(job.results(False))
    ended = False
    while not ended:
        events = tuple(one.event for one in stream.take(1.0))
        ended = any(event.finish_reason is not None for event in events)
        receivers.receive(job.results(ended))


@pytest.mark.parametrize("moved", [0, 5])
@pytest.mark.parametrize("hashed", [False, True])
def test_leaves_are_those_of_one_engine(model, expected, moved, hashed):
    """From the beginning, after tokens of another replica, and beside a hash of whole rows."""
    tokens, leaves = expected
    sink: RowDigests | BothSinks
    receiver, output = leaves_of_rows(VERSION, digests=not hashed)
    running = RunningDigest()
    sink = BothSinks(running, receiver) if hashed else receiver
    submission = Submission([REQUEST], {REQUEST.id: sink}, output=output)
    follow(model, Receivers.of(REQUEST, submission), tuple(tokens[:moved]))
    assert receiver.first(TOKENS) == leaves
    assert len(running.digests) == (TOKENS if hashed else 0)


def test_scores_of_a_prompt_are_those_of_one_engine(model):
    asked = replace(REQUEST, score_from=1, score_top=2)
    alone, there = PromptScores(asked), PromptScores(asked)
    model.driver.read(Submission([asked], scores={asked.id: alone}))
    follow(model, Receivers.of(asked, Submission([asked], scores={asked.id: there})), ())
    assert there.complete
    assert there.tokens == alone.tokens
