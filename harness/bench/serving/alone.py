"""Measures what one user gains from the prefix cache and from speculative decoding."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from contract.errors import ExecutionError
from contract.types import Request, TokenEvent
from harness.bench.engines import GREEDY
from harness.bench.serving.plan import DRAFT_TOKENS, Tokens, random_prompts
from reference.engine import Engine, EngineOptions
from reference.engine.drafter import PromptLookup
from reference.model.chat_template import encode_chat, load_chat_template
from reference.model.open import Model
from reference.runner import ModelRunner

TURNS = 10
SAID_TOKENS = 32
"""Tokens a user adds to the conversation per turn."""
ANSWER_TOKENS = 48
FIRST_TOKEN_PROMPT = 512
EDIT_TOKENS = 128
TEXT = """The old lighthouse stood at the end of the stone pier, and its colour had faded from red \
to a pale pink. Every evening the keeper climbed the hundred and twelve steps, trimmed the wick, \
and polished the brass until it shone. The colour of the light was white in clear weather and \
amber in fog. Ships that came from the north saw it first, and their captains wrote the time and \
its colour into their books."""
EDIT = "Repeat the following text exactly, but write 'color' instead of 'colour':\n\n" + TEXT


@dataclass(frozen=True, slots=True)
class PromptCacheHits:
    """Tokens of all prompts of a conversation, and how many of them were cached."""

    prompted: int
    hit: int


@dataclass(frozen=True, slots=True)
class Edited:
    """An edited text: its tokens, and the steps and seconds after the first token."""

    tokens: tuple[int, ...]
    steps: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second after the first token."""
        return (len(self.tokens) - 1) / self.seconds


def replay_chat(runner: ModelRunner, turns: int = TURNS) -> PromptCacheHits:
    """Run a conversation in which each prompt is everything said before and something new."""
    engine = Engine(runner, clock=time.perf_counter)
    additions = random_prompts(0, runner.model.config.vocab, turns, SAID_TOKENS)
    history: Tokens = ()
    prompted = 0
    for number, new in enumerate(additions):
        history += new
        prompted += len(history)
        engine.submit(Request(number, history, ANSWER_TOKENS, GREEDY, ignore_end=True))
        history += tuple(event.token for event in engine.run())
    return PromptCacheHits(prompted, engine.statistics.prefix.tokens_hit)


def first_token_seconds(runner: ModelRunner, seed: int) -> tuple[float, float]:
    """Seconds until the first token of a new prompt, and of the same prompt again."""
    (prompt,) = random_prompts(seed, runner.model.config.vocab, 1, FIRST_TOKEN_PROMPT)
    engine = Engine(runner, clock=time.perf_counter)

    def seconds(number: int) -> float:
        started = time.perf_counter()
        engine.submit(Request(number, prompt, 1, GREEDY, ignore_end=True))
        while not engine.step():
            pass
        return time.perf_counter() - started

    return seconds(1), seconds(2)


def editing_prompt(model: Model) -> Tokens:
    """A prompt with a text and a change to make in it, as a conversation if the model has a
    template."""
    if model.chat_template is None:
        return tuple(model.tokenizer.encode(EDIT))
    source = str(model.file.path)
    with load_chat_template(model.file.metadata, model.tokenizer, source) as template:
        return tuple(encode_chat(model.tokenizer, template, [{"role": "user", "content": EDIT}]))


def edit_text(runner: ModelRunner, prompt: Tokens, *, lookup: bool) -> Edited:
    """The answer to an editing prompt, with or without tokens drafted from the prompt."""
    engine = Engine(
        runner,
        EngineOptions(prefix_cache=False, draft_tokens=DRAFT_TOKENS),
        clock=time.perf_counter,
        drafter=PromptLookup() if lookup else None,
    )
    engine.submit(Request(1, prompt, EDIT_TOKENS, GREEDY, ignore_end=True))
    events: list[TokenEvent] = []
    while not events:
        events += engine.step()
    started, before = time.perf_counter(), engine.statistics.steps
    while not engine.idle:
        events += engine.step()
    steps = engine.statistics.steps - before
    tokens = tuple(event.token for event in events)
    return Edited(tokens, steps, time.perf_counter() - started)


def edited_twice(edit: Callable[[bool], Edited]) -> tuple[Edited, Edited]:
    """The answers without and with drafted tokens. Raises ExecutionError when drafting changed the
    answer."""
    plain, guessed = edit(False), edit(True)
    if plain.tokens != guessed.tokens:
        raise ExecutionError("guessing changed the answer, which it must not: please report it")
    return plain, guessed
