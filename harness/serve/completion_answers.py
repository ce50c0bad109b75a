"""The objects that ``/v1/completions`` answers with."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from contract.types import TokenEvent
from harness.host.answer_text import Piece
from harness.serve.answers import Json, OpenAiStream, text_events
from harness.serve.data_lines import LineTemplates, data_line, encode
from reference.model.tokenizer import Tokenizer

TEXT = "text_completion"


@dataclass(frozen=True)
class CompletionShape(OpenAiStream):
    """``text_completion`` and its chunks, after the ``echoed`` prompts, one for each choice. Listed
    tokens include one that only ends the text. ``text_offset`` counts characters of the text, with
    its prompt if echoed; it continues past a cut at a stop string."""

    kind = TEXT
    echoed: Sequence[str] = ()
    _opened: set[int] = field(default_factory=set)
    _offsets: dict[int, TextOffsets] = field(default_factory=dict)
    _templates: LineTemplates = field(default_factory=LineTemplates)

    def lines(self, piece: Piece) -> Iterable[bytes]:
        if piece.finish is None and not self._tokenwise and piece.choice in self._opened:
            return (self._more(piece.choice, piece.text),) if piece.text else ()
        return list(map(data_line, map(encode, self._chunks(piece))))

    def _more(self, index: int, text: str) -> bytes:
        """More text, and nothing else."""

        def chunk(text: str) -> Json:
            return self.answer.chunk(TEXT, self._choice(index, [Piece(index, text)]), first=False)

        return self._templates.line(index, chunk, text)

    def _chunks(self, piece: Piece) -> Iterable[Json]:
        self.answer.count(piece)
        pieces = [piece]
        if self.echoed and piece.choice not in self._opened:
            pieces = [self._prompt(piece.choice), piece]
        if all(_silent(one, self._tokenwise) for one in pieces):
            return
        first, opens = not self._opened, piece.choice not in self._opened
        self._opened.add(piece.choice)
        choice = self._choice(piece.choice, pieces)
        if self.answer.token_ids:
            choice |= self._ids(piece.choice, [piece], with_prompt=opens)
        yield self.answer.chunk(TEXT, choice, first)

    def _ids(self, index: int, pieces: Sequence[Piece], with_prompt: bool) -> Json:
        prompt = {"prompt_token_ids": self.answer.prompt_ids(index)} if with_prompt else {}
        return {"token_ids": self.answer.ids_of(pieces)} | prompt

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> Json:
        choices = [
            self._choice(index, [self._prompt(index), *parts] if self.echoed else parts)
            for index, parts in enumerate(pieces)
        ]
        for index, choice in enumerate(choices):
            choice |= self.answer.prompt_part(index)
        if self.answer.token_ids:
            for index, parts in enumerate(pieces):
                choices[index] |= self._ids(index, parts, with_prompt=True)
        return self.answer.with_usage(self.answer.head(TEXT, choices))

    def _prompt(self, choice: int) -> Piece:
        """The piece that echoes the prompt."""
        events = tuple(self.answer.generation.prompt_events(choice))
        return Piece(choice, self.echoed[choice], events=events)

    def _choice(self, index: int, parts: Sequence[Piece]) -> Json:
        return {
            "index": index,
            "text": "".join(part.text for part in parts),
            "logprobs": self._logprobs(index, parts) if self.listed else None,
            "finish_reason": parts[-1].finish,
        }

    def _logprobs(self, index: int, parts: Sequence[Piece]) -> Json:
        tokenizer = self.answer.generation.model.tokenizer
        events = [event for part in parts for event in part.events]
        return {
            "tokens": [tokenizer.token_text(event.token) for event in events],
            "token_logprobs": [event.log_probability for event in events],
            "top_logprobs": [_listed(tokenizer, event) for event in events],
            "text_offset": [at for part in parts for at in self._offsets_of(index, part)],
        }

    def _offsets_of(self, index: int, part: Piece) -> list[int]:
        """Where the tokens of a part of a choice begin: of its prompt, or of what follows it."""
        tokenizer = self.answer.generation.model.tokenizer
        offsets = self._offsets.get(index)
        if offsets is None:
            text = self.echoed[index] if self.echoed else ""
            offsets = self._offsets[index] = TextOffsets(len(text))
            if self.echoed:
                tokens = (tokenizer.token_bytes(one.token, special=True) for one in part.events)
                return prompt_offsets(text, tokens)
        events = text_events(part.events)
        found = [offsets.of(tokenizer.token_bytes(event.token)) for event in events]
        return found + [offsets.of(b"")] * (len(part.events) - len(events))


def _silent(piece: Piece, listed: bool) -> bool:
    """Whether a piece has nothing to send yet: a token whose text is still incomplete."""
    return not piece.text and piece.finish is None and not (listed and piece.events)


def _listed(tokenizer: Tokenizer, event: TokenEvent) -> dict[str, float] | None:
    """The likeliest tokens by their text, and the token itself. Of tokens with the same text, such
    as parts of characters, the likeliest one counts. None for the first token of a prompt."""
    if event.log_probability is None:
        return None
    listed: dict[str, float] = {}
    for token, value in event.top:
        listed.setdefault(tokenizer.token_text(token), value)
    listed.setdefault(tokenizer.token_text(event.token), event.log_probability)
    return listed


_DECODER = codecs.getincrementaldecoder("utf-8")


class TextOffsets:
    """OpenAI's ``text_offset`` of consecutive tokens, from ``start`` characters on. A token that
    begins within a character has the offset of that character."""

    def __init__(self, start: int = 0) -> None:
        self._decoder = _DECODER(errors="replace")
        self._characters = start

    def of(self, token_bytes: bytes) -> int:
        """The offset of the next token, which has these bytes."""
        begins = self._characters + self._ends_character(token_bytes)
        self._characters += len(self._decoder.decode(token_bytes))
        return begins

    def _ends_character(self, token_bytes: bytes) -> bool:
        """Whether the pending incomplete character cannot continue with these bytes."""
        begun = self._decoder.getstate()[0]
        if not begun or not token_bytes:
            return False
        try:
            _DECODER(errors="strict").decode(begun + token_bytes[:1])
        except UnicodeDecodeError:
            return True
        return False


def prompt_offsets(text: str, tokens: Iterable[bytes]) -> list[int]:
    """The offsets of the tokens of a prompt in its ``text``. A BOS token, or the space that some
    vocabularies add, is at 0."""
    tokens = list(tokens)
    whole = b"".join(tokens).decode(errors="replace")
    before = len(whole) - len(text) if whole.endswith(text) else 0
    offsets = TextOffsets()
    return [min(max(0, offsets.of(token) - before), len(text)) for token in tokens]
