"""Offline batches: each result is that of its prompt alone, whatever else is asked for."""

import gc
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from contract.types import FinishReason, TokenEvent
from contract.types import SamplingParams as EngineSampling
from harness.host.event_queue import Offer, TimedEvent
from harness.host.options import SessionOptions
from harness.host.session import Session
from harness.host.stream_driver import EventStream
from reference.ops.log_probabilities import log_probabilities
from tests.python.conftest import CONTEXT
from zinc_rt import LLM, RequestError, SamplingParams
from zinc_rt.batches import BUFFERED_EVENTS
from zinc_rt.outputs import Output
from zinc_rt.pending import Pending

PROMPTS = ["one", "two and more", "three", "", "a" * 40, "six", "seven", "eight"]
SAMPLED = SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_end=True)


@pytest.fixture(scope="module")
def session(tiny_model_path) -> Iterator[Session]:
    """What ``zinc-rt run`` and ``zinc-rt logits`` answer with."""
    options = SessionOptions(tier="native", context=CONTEXT, all_logits=True)
    with Session.open(tiny_model_path, options) as opened:
        yield opened


def of_run(session: Session, prompt: str, seed: int, max_tokens: int) -> tuple[list[int], str]:
    """Tokens and text as the command line computes them."""
    sampling = EngineSampling(temperature=0.9, top_k=40, top_p=0.95, min_p=0.05, seed=seed)
    tokens = session.model.tokenizer.encode(prompt)
    generation = session.generate(tokens, sampling, max_tokens)
    list(generation)
    return generation.tokens, generation.text


def test_each_prompt_gives_what_run_gives_in_the_order_of_the_prompts(llm, session):
    """More prompts than slots, several completions each, one that cannot be served."""
    parameters = SamplingParams(temperature=0.9, seed=5, max_tokens=12, n=2)
    outputs = llm.generate(PROMPTS, parameters)
    assert [output.index for output in outputs] == list(range(len(PROMPTS)))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        if not prompt:
            assert isinstance(output.error, RequestError)
            with pytest.raises(RequestError, match="prompt"):
                _ = output.text
            continue
        for choice, completion in enumerate(output.completions):
            tokens, text = of_run(session, prompt, 5 + choice, 12)
            assert (list(completion.tokens), completion.text) == (tokens, text)


@pytest.mark.parametrize(
    ("prompt", "parameters", "problem"),
    [
        ("x" * 500, SAMPLED, "prompt"),
        ([1, 999_999], SAMPLED, "prompt"),
        (None, SAMPLED, "prompt"),
        ("", SAMPLED, "prompt"),
        ("x", SamplingParams(logit_bias={999_999: 1.0}), "logit_bias"),
        ("x", SamplingParams(stop_token_ids=[999_999]), "stop_token_ids"),
        ("x", SamplingParams(log_probabilities=21), "log_probabilities"),
    ],
)
def test_a_bad_prompt_takes_nothing_from_the_others(llm, prompt, parameters, problem):
    alone = [llm.generate(text, SAMPLED)[0].tokens for text in ("one", "two")]
    outputs = llm.generate(["one", prompt, "two"], [SAMPLED, parameters, SAMPLED])  # type: ignore[list-item]
    assert [outputs[0].tokens, outputs[2].tokens] == alone
    assert isinstance(outputs[1].error, RequestError)
    assert outputs[1].error.field == problem


def test_one_prompt_may_be_given_as_it_is(llm):
    tokens = llm.tokenizer.encode("one")
    texts = [llm.generate(given, SAMPLED)[0].text for given in ("one", tokens, [tokens])]
    assert len(set(texts)) == 1
    assert llm.generate(np.array([tokens]), SAMPLED)[0].text == texts[0]  # type: ignore[arg-type]
    assert llm.generate([]) == []


def test_parameters_for_other_prompts(llm):
    with pytest.raises(RequestError, match="one for each"):
        llm.generate(["one", "two"], [SAMPLED])


def test_stop_strings_and_reasons(llm):
    text = llm.generate("one", SAMPLED)[0].text
    middle = text[len(text) // 2 :][:2]
    ended = llm.generate("one", SamplingParams(temperature=0.9, seed=5, max_tokens=12, stop=middle))
    assert ended[0].text == text[: text.index(middle)]
    assert ended[0].completion.stop_string == middle
    assert ended[0].completion.finish_reason == "stop"
    assert llm.generate("one", SAMPLED)[0].completion.finish_reason == "length"


def test_log_probabilities_and_logits_are_arrays(llm, session):
    """The logits are those of ``zinc-rt logits`` at the same positions, every bit; a token's
    log-probability is rule R10's of its row."""
    asked = SamplingParams(max_tokens=5, ignore_end=True, log_probabilities=3, logits=True)
    (output,) = llm.generate("some text", asked)
    found = output.completion
    vocab = llm.model.config.vocab
    whole = [*output.prompt_tokens, *found.tokens]
    expected = np.empty((len(whole), vocab), np.float32)
    session.logits(whole, expected)
    assert found.logits is not None
    assert (found.logits == expected[len(output.prompt_tokens) - 1 : -1]).all()
    assert (llm.logits(whole) == expected).all()
    assert found.log_probabilities is not None
    assert found.top_tokens is not None
    assert found.top_log_probabilities is not None
    assert found.log_probabilities.shape == (5,)
    assert found.top_tokens.shape == found.top_log_probabilities.shape == (5, 3)
    assert (found.top_tokens[:, 0] == found.tokens).all()
    chosen = np.asarray(found.tokens, np.int32)
    likely, ids, top = log_probabilities(logits=found.logits, token=chosen, top=3)
    assert (found.log_probabilities == likely).all()
    assert (found.top_tokens == ids).all()
    assert (found.top_log_probabilities == top).all()
    plain = llm.generate("some text", SamplingParams(max_tokens=5, ignore_end=True))[0].completion
    assert plain.tokens == found.tokens
    assert plain.logits is plain.log_probabilities is plain.top_tokens is None


def test_prompts_without_end_are_read_as_there_is_room(llm):
    read = 0

    def endless() -> Iterator[str]:
        nonlocal read
        while True:
            read += 1
            yield f"prompt {read}"

    outputs = llm.completed(endless(), SamplingParams(max_tokens=2))
    indices = {next(outputs).index for _ in range(10)}
    outputs.close()  # type: ignore[attr-defined]
    assert len(indices) == 10
    assert read < 60
    assert idle(llm)


def test_ctrl_c_ends_the_batch_and_not_the_model(llm):
    before = llm.generate("one", SAMPLED)[0].tokens

    def interrupted() -> Iterator[str]:
        yield from ("long", "longer")
        signal.raise_signal(signal.SIGINT)
        yield "never"

    with pytest.raises(KeyboardInterrupt):
        llm.generate(interrupted(), SamplingParams(max_tokens=100, ignore_end=True))
    assert idle(llm)
    assert llm.generate("one", SAMPLED)[0].tokens == before


def test_a_bar_counts_the_prompts(tiny_model_path, capsys, monkeypatch):
    monkeypatch.setattr("harness.progress.LINE_SECONDS", 0.0)
    with LLM(tiny_model_path, tier="native", context=64, slots=2) as llm:
        llm.generate(["one", "two"], SamplingParams(max_tokens=2))
    assert "generating: 100% (2 prompts of 2 prompts)" in capsys.readouterr().err


def idle(llm: LLM) -> bool:
    """Whether the engine has nothing to do any more."""
    return llm._driver.call(lambda engine: engine.idle)


def test_parameters_of_the_package(llm):
    end = min(llm.tokenizer.eog_ids)
    eager = {"logit_bias": {end: 100.0}, "max_tokens": 9, "temperature": 0.0}
    (one,) = llm.generate(["hello"], SamplingParams(**eager, min_tokens=5))
    assert len([token for token in one.completions[0].tokens if token != end]) == 5
    both = [SamplingParams(**eager, **{name: True}) for name in ("ignore_eos", "ignore_end")]
    same = [llm.generate(["hello"], each)[0].completions[0].tokens for each in both]
    assert list(same[0]) == list(same[1]) == [end] * 9
    wrong: tuple[dict[str, Any], ...] = ({"min_tokens": 10}, {"min_tokens": -1}, {"ignore_eos": 1})
    for each in wrong:
        with pytest.raises(RequestError, match=next(iter(each))):
            SamplingParams(**eager, **each)


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_the_reader_is_woken_where_its_events_may_end_something(llm, monkeypatch, stop):
    """Events come one by one while it waits; those that it takes end its waiting."""
    tokens, taken = 4 * BUFFERED_EVENTS, list[int]()
    reason = [None] * (tokens - 1) + [FinishReason.LENGTH]
    left = [TokenEvent(0, 65, at, end) for at, end in enumerate(reason)]

    def take(stream: EventStream, timeout: float, offer: Offer) -> list[TimedEvent]:
        request_id = max(stream.facts)
        while left:
            given = [TimedEvent(0.0, left.pop(0)._replace(request_id=request_id))]
            if not offer(given):
                taken.append(len(given))
                return given
        return []

    monkeypatch.setattr(EventStream, "take", take)
    asked = SamplingParams(max_tokens=tokens, ignore_end=True, stop=stop)
    (output,) = llm.generate("one", asked)
    assert len(output.tokens) == tokens
    assert len(taken) == (tokens if stop else 4)


@pytest.mark.parametrize("listed", [None, 1])
def test_no_object_is_kept_for_each_token(llm, monkeypatch, listed):
    """Objects that live make Python's collector look at the whole heap of the caller's process.
    Log-probabilities need them."""
    count, kept = 3 * BUFFERED_EVENTS, []
    output = Pending.output

    def counted(pending: Pending, stream: EventStream) -> Output:
        kept.append(sum(type(one) is TokenEvent for one in gc.get_objects()))
        return output(pending, stream)

    monkeypatch.setattr(Pending, "output", counted)
    asked = SamplingParams(max_tokens=count, ignore_end=True, log_probabilities=listed)
    # The engine's thread may have some of an earlier answer still: those are kept here.
    before = [one for one in gc.get_objects() if type(one) is TokenEvent]
    assert len(llm.generate("one", asked)[0].tokens) == count
    assert (kept[0] - len(before) >= count) is (listed is not None)
