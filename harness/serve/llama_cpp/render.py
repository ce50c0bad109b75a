"""Completions in the format of llama.cpp's server: one object, or a stream of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from contract.types import FinishReason, TokenEvent
from harness.host.answer_text import Piece
from harness.serve.answers import Answer, Json, text_events, token_facts
from harness.serve.data_lines import PING, data_line, encode
from harness.serve.errors import ApiError
from harness.serve.llama_cpp.wire import InfillRequest, LlamaCompletionRequest
from reference.model.tokenizer import Tokenizer

MILLISECONDS = 1e3


@dataclass(frozen=True)
class LlamaShape:
    """The objects of one completion. With ``listed`` its tokens have log-probabilities."""

    body: LlamaCompletionRequest | InfillRequest
    answer: Answer
    listed: bool

    ping = PING

    def lines(self, piece: Piece) -> Iterable[bytes]:
        """The event for a new piece."""
        tokens = text_events(piece.events)
        if not piece.text and not (tokens and (self.listed or self.body.return_tokens)):
            return
        generation = self.answer.generation
        chunk = self._text(piece.text, tokens) | {
            "stop": False,
            "tokens_predicted": generation.completion_tokens,
            "tokens_evaluated": generation.prompt_tokens,
        }
        yield data_line(encode(chunk))

    def end(self, usage: bool) -> bytes:
        """The last event, with the counts."""
        return data_line(encode(self._requested_fields(self._text("", ()) | self._end())))

    def failed(self, error: ApiError) -> bytes:
        """The last event of an answer that failed."""
        return data_line(error.encoded())

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> Json:
        """The answer in one object."""
        (choice,) = pieces
        tokens = text_events([event for piece in choice for event in piece.events])
        return self._requested_fields(
            self._text("".join(x.text for x in choice), tokens) | self._end()
        )

    def _requested_fields(self, answer: Json) -> Json:
        """The fields of an answer that the request names, or all."""
        found = {path: _at(answer, path) for path in self.body.response_fields or ()} or answer
        return {path: value for path, value in found.items() if value is not None}

    def _text(self, text: str, events: Sequence[TokenEvent]) -> Json:
        ids = [event.token for event in events] if self.body.return_tokens else []
        body: Json = {"index": 0, "content": text, "tokens": ids}
        body["id_slot"] = self.answer.generation.slot
        if self.listed and events:
            tokenizer = self.answer.generation.model.tokenizer
            body["completion_probabilities"] = [
                _token(tokenizer, event.token, event.log_probability)
                | {"top_logprobs": [_token(tokenizer, *one) for one in event.top]}
                for event in events
            ]
        return body

    def _end(self) -> Json:
        """The reason of the end, token counts and durations."""
        generation = self.answer.generation
        (choice,) = generation.choices
        word = choice.stop_string
        cut = choice.finish == FinishReason.LENGTH.value
        prompt = choice.request.prompt
        text = generation.model.tokenizer.decode_bytes(prompt, special=True)
        return {
            "stop": True,
            "stop_type": "word" if word is not None else "limit" if cut else "eos",
            "stopping_word": word or "",
            "model": generation.model.name,
            "prompt": text.decode(errors="replace"),
            "has_new_line": "\n" in choice.text,
            "truncated": False,
            "tokens_predicted": generation.completion_tokens,
            "tokens_evaluated": generation.prompt_tokens,
            "tokens_cached": generation.cached_tokens,
            "generation_settings": self._settings(),
            "timings": self._timings(),
            "system_fingerprint": generation.model.fingerprint,
            "x_zinc": self.answer.extra,
        }

    def _settings(self) -> Json:
        request = self.answer.generation.choices[0].request
        return {
            **asdict(request.sampling),
            "n_predict": request.max_tokens,
            "stop": request.stop,
            "n_probs": self.body.n_probs,
            "stream": bool(self.body.stream),
        }

    def _timings(self) -> Json:
        generation = self.answer.generation
        (choice,) = generation.choices
        prompt_seconds, answer_seconds = generation.seconds_of(choice)
        computed = generation.prompt_tokens - generation.cached_tokens
        return {
            "cache_n": generation.cached_tokens,
            **_rate("prompt", computed, prompt_seconds),
            **_rate("predicted", generation.completion_tokens, answer_seconds),
        }


def _rate(phase: str, count: int, seconds: float) -> Json:
    """A count, the milliseconds it took, and both quotients."""
    return {
        f"{phase}_n": count,
        f"{phase}_ms": seconds * MILLISECONDS,
        f"{phase}_per_token_ms": seconds * MILLISECONDS / count if count else 0.0,
        f"{phase}_per_second": count / seconds if seconds else 0.0,
    }


def _at(value: Any, path: str) -> Any:
    """The value at a path in an object; None if there is none."""
    for name in path.split("/"):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _token(tokenizer: Tokenizer, token: int, log_probability: float | None) -> Json:
    return {"id": token, **token_facts(tokenizer, token, log_probability)}
