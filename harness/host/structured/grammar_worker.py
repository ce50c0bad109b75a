"""Compiles grammars in a separate process, so that a grammar that explodes does no harm.

``grammars`` runs this file as a script, which imports only the standard library and llguidance.
Standard input has one JSON object in each line: first tokens and limits, then one grammar each,
behind its number and a space. The answer to a grammar is the line of the number, a space and
``{"error", "forced_bytes"}``: null if it compiled and has a first mask, and the length of the text
that every answer begins with."""

from __future__ import annotations

import base64
import json
import signal
import sys
from typing import Any

FORCED_BYTES = 64
"""Most bytes of a forced text that are tokenized: only the first token counts."""


class GrammarVocabulary:
    """A vocabulary as llguidance expects it."""

    is_tokenizer_wrapper = True

    def __init__(self, setup: dict[str, Any]) -> None:
        self.tokens = list(map(base64.b64decode, setup["tokens"]))
        self.special_token_ids = setup["special"]
        self.eos_token_id = setup["ends"][0]
        self.bos_token_id = None
        special = set(self.special_token_ids)
        self._ids = {text: token for token, text in enumerate(self.tokens) if token not in special}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens for the beginning of a text that must come, by longest match."""
        rest = text.encode() if isinstance(text, str) else text
        rest, ids = rest[:FORCED_BYTES], []
        while rest:
            sizes = range(min(self._longest, len(rest)), 0, -1)
            size = next((size for size in sizes if rest[:size] in self._ids), 0)
            if not size:
                break
            ids.append(self._ids[rest[:size]])
            rest = rest[size:]
        return ids


def main() -> None:
    """Serve until standard input ends."""
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    setup = json.loads(requests.readline())
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    tokens: Any = GrammarVocabulary(setup)
    tokenizer = LLTokenizer(tokens, n_vocab=setup["vocab"], eos_token=setup["ends"])
    limits = LLParserLimits(**setup["parser"])
    _limit_memory(setup["memory_bytes"])
    for line in requests:
        _arm(setup["cpu_seconds"])
        number, _, asked = line.partition(b" ")
        matcher = LLMatcher(tokenizer, json.loads(asked)["grammar"], log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        error = matcher.get_error() if matcher.is_error() else None
        forced = 0 if matcher.is_error() else len(matcher.compute_ff_bytes())
        del matcher
        _arm(0)
        answer = {"error": error, "forced_bytes": forced}
        replies.write(b"%b %b\n" % (number, json.dumps(answer).encode()))
        replies.flush()


def _limit_memory(more: int) -> None:
    """Limit the address space to ``more`` bytes above what the vocabulary takes."""
    try:
        import resource

        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    except (ImportError, ValueError, OSError):
        # Not every system can limit memory; time stays limited.
        return


def _arm(seconds: float) -> None:
    """End the process after ``seconds`` of processor time; 0 disarms."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    main()
