"""Answers as they come: in a thread, and many at a time in a loop."""

import asyncio

import pytest

from tests.held_steps import hold_steps
from tests.python.test_batches import SAMPLED, idle
from zinc_rt import RequestError, SamplingParams, Stream


async def text_of(stream: Stream) -> str:
    return "".join([piece.text async for piece in stream])


def test_the_pieces_are_the_answer(llm):
    (whole,) = llm.generate("one", SAMPLED)
    stream = llm.stream("one", SAMPLED)
    pieces = list(stream)
    assert "".join(piece.text for piece in pieces) == whole.text == stream.output.text
    assert [piece.token for piece in pieces if piece.token is not None] == list(whole.tokens)
    assert len(pieces) > 3


def test_many_streams_in_one_loop(llm):
    """More of them than slots; each gets what it would get alone."""
    prompts = [f"prompt {number}" for number in range(7)]
    alone = [output.text for output in llm.generate(prompts, SAMPLED)]

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(text_of(llm.stream(prompt, SAMPLED)) for prompt in prompts))

    assert asyncio.run(all_of_them()) == alone


def test_leaving_early_frees_the_slot(llm):
    endless = SamplingParams(max_tokens=120, ignore_end=True)
    for piece in llm.stream("one", endless):
        assert piece.text is not None
        break
    assert idle(llm)

    async def left() -> None:
        async for _ in llm.stream("one", endless):
            break

    asyncio.run(left())
    assert idle(llm)


def test_a_cancelled_task_leaves_nothing_behind(llm, monkeypatch):
    """At any moment: before the engine has heard of the request too."""
    hold_steps(monkeypatch, 5)

    async def cancelled(seconds: float) -> None:
        task = asyncio.create_task(text_of(llm.stream("one", SAMPLED)))
        await asyncio.sleep(seconds)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for seconds in (0.0, 0.001, 0.005):
        asyncio.run(cancelled(seconds))
        assert idle(llm)


def test_a_slow_reader_is_waited_for(llm):
    """The engine rests when 256 events lie there, and goes on when they are taken: the rest of the
    answer is what it would have been."""
    asked = SamplingParams(max_tokens=100, ignore_end=True)
    (whole,) = llm.generate("one", asked)
    stream = llm.stream("one", asked)
    llm._driver._buffered, kept = 4, llm._driver._buffered
    try:
        pieces = iter(stream)
        first = next(pieces)
        llm.generate("two", SamplingParams(max_tokens=50, ignore_end=True))
        assert first.text + "".join(piece.text for piece in pieces) == whole.text
    finally:
        llm._driver._buffered = kept


def test_a_bad_request_is_told_when_it_begins(llm):
    with pytest.raises(RequestError, match="prompt"):
        list(llm.stream(""))
    with pytest.raises(RequestError, match="prompt"):
        asyncio.run(text_of(llm.stream("")))
    with pytest.raises(RequestError, match="n: is 1"):
        llm.stream("one", SamplingParams(n=2))
    with pytest.raises(RequestError, match="output"):
        _ = llm.stream("one").output
