"""How many calls of functions a token takes in the engine, whoever asks for it. Time is not
measured."""

import gc
import sys
from types import FrameType

from contract.types import Request
from reference.engine import Engine
from reference.limits import Limits
from reference.model.open import open_model
from reference.runner import ModelRunner
from tests.null_tier import NullTier

SEQUENCES = 32
TOKENS = 33
LIMITS = Limits(
    slots=SEQUENCES, context=96, pages=6 * SEQUENCES, step_tokens=256, step_rows=SEQUENCES
)
MOST = 28


def calls(engine: Engine, first: int, tokens: int) -> int:
    """The calls of ``SEQUENCES`` answers of so many tokens."""
    made = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    for number in range(first, first + SEQUENCES):
        engine.submit(Request(number, (5, 6, 7, number % 256), tokens, ignore_end=True))
    # Hypothesis has functions that a collection calls.
    gc.disable()
    sys.setprofile(note)
    try:
        events = list(engine.run())
    finally:
        sys.setprofile(None)
        gc.enable()
    assert len(events) == SEQUENCES * tokens
    return made


def test_a_token_takes_few_calls(tiny_model_path):
    """Of answers that run together, their share of the steps included."""
    model = open_model(tiny_model_path)
    with model.file, NullTier(65) as tier, ModelRunner(model, tier, LIMITS) as runner:
        engine = Engine(runner)
        calls(engine, 0, TOKENS)
        short, long = (calls(engine, 100 * tokens, tokens) for tokens in (1, TOKENS))
    assert (long - short) / (SEQUENCES * (TOKENS - 1)) <= MOST
