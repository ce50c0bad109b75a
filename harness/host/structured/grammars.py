"""Compiles grammars to token masks: first in a process with limits, then here. Requests share them.

llguidance releases Python's interpreter lock while it computes. The cost of a grammar here is
limited by the limits of that process, since the compilation is the same; each mask has its own
limits."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from contract.errors import ZincError
from harness.host.structured.regex_runs import MOST_FORCED, longest_run
from reference.limits import mask_words
from reference.model.tokenizer import Tokenizer, TokenKind
from reference.sched.constraints import Mask
from reference.worker_process import WorkerEnded, WorkerProcess, WorkerRefused

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

CACHED_GRAMMARS = 64
"""Most compiled grammars in the cache."""
LONGEST_GRAMMAR = 1 << 20
"""Most characters of a grammar."""
PARSER_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
"""Limits of a grammar and of each mask: about 15 ms for a mask, 100 MB for the states of the lexer.
Errors must not contain a user's text."""
BECAME_COMPLEX = "the grammar became too complex"
TOO_COMPLEX = f"cannot be held to any longer: {BECAME_COMPLEX}"
LONGEST_ERROR = 300
FORCED_CHARACTERS = 2048
"""Most characters of a forced text that are tokenized."""
NOT_FORCED = '%llguidance {"no_forcing": true}\n'


class GrammarRefused(Exception):
    """A grammar that does not compile within its limits. The message is for its author."""


class GrammarsBusy(ZincError):
    """A grammar that may be compiled later; the message says why."""


class GrammarsUnavailable(GrammarsBusy):
    """A grammar for which the system starts no process."""


class GrammarBroke(ZincError):
    """A mask could not be computed within its limits."""


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits of the compilation of one grammar."""

    cpu_seconds: float = 2.0
    wall_seconds: float = 20.0
    memory_bytes: int = 512 << 20


class TokenMasks:
    """The masks of one sequence under a grammar: an engine's ``allowed``. Thread-safe. It may be
    called for drafted tokens that the sequence then does not get.

    ``before``: the first tokens of an answer that began on another replica. ``matcher`` shares its
    automaton, and the automaton's limits, with other sequences. If a limit is exceeded, ``fresh``
    makes an unshared matcher, so that no sequence fails because of another."""

    def __init__(
        self, matcher: LLMatcher, words: int, grammar: str, fresh: Callable[[], LLMatcher]
    ) -> None:
        self.grammar = grammar
        self.before: tuple[int, ...] = ()
        self.failure: str | None = None
        """Why the sequence cannot continue; None while it can."""
        self._matcher = matcher
        self._words = words
        self._fresh = fresh
        self._shared = True
        self._consumed: list[int] = []
        self._mask: Mask | None = None
        self._lock = threading.Lock()

    def __call__(self, tokens: list[int]) -> Mask:
        """The mask of the token after ``tokens``. Raises GrammarBroke."""
        if self.before:
            tokens = [*self.before, *tokens]
        with self._lock:
            return self._mask_after(tokens)

    def follow(self, tokens: list[int]) -> None:
        """Compute the mask after ``tokens`` ahead of the engine."""
        self(tokens)

    def problem_after(self, tokens: list[int]) -> str | None:
        """Why no token can follow ``tokens``; None if one can."""
        if self.failure is None:
            with suppress(GrammarBroke):
                self(tokens)
        return self.failure

    def _mask_after(self, tokens: list[int]) -> Mask:
        try:
            return self._shared_mask_after(tokens)
        except GrammarBroke:
            if not self._shared:
                raise
            self._reset_matcher()
            return self._shared_mask_after(tokens)

    def _reset_matcher(self) -> None:
        """Replace the matcher by an unshared one at its beginning."""
        self._matcher, self._shared = self._fresh(), False
        self._consumed, self._mask, self.failure = [], None, None

    def _shared_mask_after(self, tokens: list[int]) -> Mask:
        if tokens != self._consumed:
            self._go_to(tokens)
        return self._current()

    def _go_to(self, tokens: list[int]) -> None:
        before = len(self._consumed)
        if tokens[:before] != self._consumed:
            before = self._return_to(tokens)
        self._consume(tokens[before:])

    def _return_to(self, tokens: list[int]) -> int:
        """Roll back to the first difference from ``tokens``; returns the number of tokens before
        it."""
        pairs = enumerate(zip(self._consumed, tokens, strict=False))
        least = min(len(self._consumed), len(tokens))
        same = next((n for n, (one, other) in pairs if one != other), least)
        if self._matcher.is_error() or not self._matcher.rollback(len(self._consumed) - same):
            self._reset_matcher()
            return 0
        self._consumed, self._mask, self.failure = self._consumed[:same], None, None
        return same

    def _consume(self, tokens: list[int]) -> None:
        self._mask = None
        self._consumed = [*self._consumed, *tokens]
        if tokens and not self._matcher.consume_tokens(tokens):
            raise self._broken("a token does not follow the grammar, or it became too complex")

    def _current(self) -> Mask:
        if self._mask is None:
            packed = self._matcher.compute_bitmask()
            if self._matcher.is_error():
                raise self._broken(BECAME_COMPLEX)
            # llguidance's mask may have bits for more tokens than there are.
            self._mask = np.frombuffer(packed, "<u4")[: self._words]
            if not self._mask.any():
                self.failure = "no token of this model obeys the grammar here"
        return self._mask

    def _broken(self, problem: str) -> GrammarBroke:
        self.failure = problem
        return GrammarBroke(problem)


def check_run(regex: str) -> None:
    """Raise GrammarRefused for a regular expression that repeats literals too often."""
    if longest_run(regex) > MOST_FORCED:
        raise GrammarRefused(TOO_COMPLEX)


def regex_rule(regex: str) -> str:
    """A regular expression in Lark. Raises GrammarRefused."""
    check_run(regex)
    written, escaped = [], False
    for character in regex:
        bare = not escaped and character == "/"
        written.append("\\/" if bare else "n" if escaped and character == "\n" else character)
        escaped = not escaped and character == "\\"
    if escaped:
        raise GrammarRefused("cannot be enforced: its last character is a backslash")
    return "/" + "".join(written).replace("\n", r"\n") + "/"


class Grammars:
    """Compiles grammars for one vocabulary. Thread-safe. ``vocab`` is the width of the model's
    logits. ``close`` ends the compiling process."""

    def __init__(
        self, tokenizer: Tokenizer, vocab: int, limits: GrammarLimits | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._limits = limits or GrammarLimits()
        self._lock = threading.Lock()
        self._compiling = threading.RLock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._worker = WorkerProcess(
            Path(__file__).with_name("grammar_worker.py"),
            self._setup,
            wall_seconds=self._limits.wall_seconds,
            cpu_seconds=self._limits.cpu_seconds,
            longest_reply=1 << 16,
        )

    def masks(self, grammar: str, count: int, checked: bool = False) -> list[TokenMasks]:
        """Masks for ``count`` sequences under a grammar in llguidance's Lark dialect. One that was
        ``checked`` by another object is compiled here at once. Raises GrammarRefused, and
        GrammarsBusy if other grammars take too long or the system starts no process."""
        whole = self._head + grammar
        words = mask_words(self._vocab)
        with self._lock:
            matcher = self._compiled.get(whole)
        if matcher is None:
            if not self._compiling.acquire(timeout=self._limits.wall_seconds):
                raise GrammarsBusy("other grammars are being compiled")
            try:
                matcher = self._matcher_of(whole) if checked else self._compile(whole)
            finally:
                # Also what Ctrl-C left of an earlier call, just before its block.
                while self._compiling._is_owned():  # type: ignore[attr-defined]
                    self._compiling.release()
        with self._lock:
            self._compiled[whole] = matcher
            self._compiled.move_to_end(whole)
            while len(self._compiled) > CACHED_GRAMMARS:
                self._compiled.popitem(last=False)

            def fresh() -> LLMatcher:
                with self._lock:
                    if self._compiled.get(whole) is matcher:
                        del self._compiled[whole]
                return self._matcher_of(whole)

            return [TokenMasks(matcher.deep_copy(), words, grammar, fresh) for _ in range(count)]

    def close(self) -> None:
        """End the compiling process. A new grammar would start another."""
        with self._compiling:
            self._worker.close()

    def _compile(self, grammar: str) -> LLMatcher:
        if len(grammar) > LONGEST_GRAMMAR:
            raise GrammarRefused(f"has more than {LONGEST_GRAMMAR} characters as a grammar")
        try:
            answer = json.loads(self._worker.ask(_line({"grammar": grammar})))
        except WorkerRefused as refused:
            raise GrammarsUnavailable(f"grammars: {refused}") from None
        except WorkerEnded:
            raise GrammarRefused("takes too much time or memory to compile") from None
        error = answer["error"]
        if answer["forced_bytes"] > MOST_FORCED:
            raise GrammarRefused(TOO_COMPLEX)
        if error is None:
            matcher = self._matcher_of(grammar)
            error = matcher.get_error() if matcher.is_error() else _dead_end(matcher)
        if error is not None:
            raise GrammarRefused(f"cannot be enforced: {_problem_of(error)}")
        return matcher

    def _matcher_of(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        return LLMatcher(self._in_process, grammar, log_level=0, limits=_parser_limits())

    @cached_property
    def _head(self) -> str:
        """Turns off forced tokens for vocabularies that put a space before a text, since they
        cannot write a text without it."""
        exact = b"".join(
            map(self._tokenizer.token_bytes, self._tokenizer.encode("a", add_bos=False))
        )
        return "" if exact == b"a" else NOT_FORCED

    @cached_property
    def _in_process(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        return LLTokenizer(
            _Tokens(self._tokenizer, self._texts, self._special, self._ends),  # type: ignore[arg-type]
            n_vocab=self._vocab,
            eos_token=self._ends,
        )

    @cached_property
    def _texts(self) -> list[bytes]:
        return [
            self._tokenizer.token_bytes(token, special=True)
            for token in range(self._tokenizer.vocab_size)
        ]

    @cached_property
    def _special(self) -> list[int]:
        """Tokens that no text of a grammar matches; a grammar can only name them."""
        hidden = (TokenKind.CONTROL, TokenKind.UNKNOWN)
        return [
            token
            for token, text in enumerate(self._texts)
            if text and self._tokenizer.kind(token) in hidden
        ]

    @cached_property
    def _ends(self) -> list[int]:
        ends = sorted(self._tokenizer.eog_ids)
        if not ends:
            raise GrammarRefused("cannot be enforced: this model has no token that ends a text")
        return ends

    def _setup(self) -> bytes:
        return _line(
            {
                "tokens": [base64.b64encode(text).decode() for text in self._texts],
                "special": self._special,
                "ends": self._ends,
                "vocab": self._vocab,
                "parser": PARSER_LIMITS,
                "memory_bytes": self._limits.memory_bytes,
                "cpu_seconds": self._limits.cpu_seconds,
            }
        )


class _Tokens:
    """A vocabulary as llguidance expects it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self,
        tokenizer: Tokenizer,
        tokens: Sequence[bytes],
        special: Sequence[int],
        ends: Sequence[int],
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = ends[0]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        """The model's own tokens for a text that must come. Of a long text, which is requested
        again after every token, only the beginning."""
        if isinstance(text, bytes):
            text = text[: 4 * FORCED_CHARACTERS].decode(errors="replace")
        return self._tokenizer.encode_exactly(text[:FORCED_CHARACTERS])


def _dead_end(matcher: LLMatcher) -> str | None:
    """The error of a grammar that no text matches; None for any other."""
    begun = matcher.deep_copy()
    packed = begun.compute_bitmask()
    if begun.is_error():
        return "it is too complex"
    return None if any(packed) else "nothing obeys it"


def _problem_of(error: str) -> str:
    """llguidance's error message without positions in generated rules."""
    text = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", error)
    text = re.sub(r"\n\s*\d+ \|.*", "", text, flags=re.DOTALL)
    if text.startswith("NoExtensionBias"):
        return "a part of it is nothing but a reference to itself"
    return " ".join(text.split())[:LONGEST_ERROR]


def _parser_limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(**PARSER_LIMITS)


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"
