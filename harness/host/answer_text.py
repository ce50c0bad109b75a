"""What the events of one request add up to: its tokens, its text, and why it ended."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from contract.errors import NonFiniteLogits
from contract.types import FinishReason, TokenEvent
from reference.model.text_stream import TextStream
from reference.model.tokenizer import Tokenizer


class AnswerText:
    """The answer to one request as its events come. ``tokens`` are those of the text: one that
    ended the generation is not among them. ``finish_reason`` is None until there is one."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        shown: Collection[int] = frozenset(),
    ) -> None:
        """``shown`` are control tokens whose text is part of the answer's. Raises RequestError for
        stop strings that are not served."""
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._tokenizer = tokenizer
        self._shown = shown
        self._stream = TextStream(stop)
        self._text: list[str] = []

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._text)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did: the engine has to be told."""
        return self._stream.stop_string

    def take(self, event: TokenEvent) -> str:
        """The text that became certain with the next event; ``rest`` follows the last one.

        Raises NonFiniteLogits for a model that failed.
        """
        self.finish_reason = event.finish_reason
        if event.finish_reason is FinishReason.ERROR:
            raise NonFiniteLogits(
                f"the logits at position {event.position} hold NaN or infinity; "
                "the model file is damaged or overflows binary32"
            )
        if event.finish_reason is FinishReason.STOP or event.token < 0:
            return ""
        self.tokens.append(event.token)
        special = event.token in self._shown
        hidden = "" if special else self._tokenizer.hidden_text(event.token)
        text = self._stream.feed(self._tokenizer.token_bytes(event.token, special=special), hidden)
        if self._stream.stopped:
            self.finish_reason = FinishReason.STOP
        self._text.append(text)
        return text

    def rest(self) -> str:
        """The text that was held back, once the answer has ended."""
        text = self._stream.finish()
        if self._stream.stopped and self.finish_reason is FinishReason.LENGTH:
            self.finish_reason = FinishReason.STOP
        self._text.append(text)
        return text
