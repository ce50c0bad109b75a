"""Turns the bytes of generated tokens into text to show, and removes stop strings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from encodings.utf_8 import IncrementalDecoder as Utf8Decoder

from contract.errors import RequestError

MAX_STOP_STRINGS = 16
"""Most stop strings of one request."""
MAX_STOP_CHARACTERS = 1024
"""Longest stop string, in characters."""


class TextStream:
    """Turns the token byte strings of one generation into text, as soon as it is certain.

    The texts returned by ``feed`` and ``finish`` concatenate to the UTF-8 decoding of all bytes
    (invalid UTF-8 becomes U+FFFD, as with Python's "replace"), cut where the earliest stop string
    starts. The result does not depend on how the bytes are split into tokens. The stream holds back
    an incomplete UTF-8 sequence at the end and text that may begin a stop string. Control tokens
    are not text, but a stop string may be or contain one: the stream searches their ``hidden``
    texts and never returns them. It finds a stop string in the shown text, too, whatever control
    tokens lie between its characters.

    Of several stop strings found, the one that starts first counts; of those that start there, the
    shortest."""

    def __init__(self, stop_strings: Sequence[str] = ()) -> None:
        """Raises RequestError for an empty or too long stop string, and for too many of them."""
        if len(stop_strings) > MAX_STOP_STRINGS:
            problem = f"has {len(stop_strings)} strings, at most {MAX_STOP_STRINGS} are served"
            raise RequestError("stop", problem)
        for stop in stop_strings:
            if not 0 < len(stop) <= MAX_STOP_CHARACTERS:
                problem = f"has a string of {len(stop)} characters"
                raise RequestError("stop", f"{problem}, expected 1 to {MAX_STOP_CHARACTERS}")
        self._stop_strings = tuple(stop_strings)
        self._longest = max(map(len, stop_strings), default=0)
        self._decoder = Utf8Decoder(errors="replace")
        self._held = ""
        self._hidden = bytearray()
        self.stop_string: str | None = None
        """The stop string that ended the text, None until then."""
        self.stopped = False
        """Whether a stop string ended the text; nothing more is returned then."""
        self.stops = bool(stop_strings)
        """Whether there are stop strings to search for."""

    def feed(self, token_bytes: bytes, hidden: str = "", *, search: bool = True) -> str:
        """Add the bytes of one more token, or a control token whose text is ``hidden``, and return
        the text that has become certain. Without ``search`` no stop string begins in it."""
        if not self._stop_strings:
            if token_bytes.isascii() and not self._decoder.buffer:
                return token_bytes.decode("ascii")
            return self._decoder.decode(token_bytes)
        if self.stopped:
            return ""
        self._hold(self._decoder.decode(token_bytes), hidden=False)
        if not search:
            return self._release(len(self._held))
        if hidden:
            self._hold(hidden, hidden=True)
        open_start = self._first_open_start()
        found = self._first_stop()
        # A complete stop string must wait for one that started before it and may still complete.
        if found is not None and found[0] <= open_start:
            return self._stop_at(*found)
        return self._release(open_start)

    def finish(self) -> str:
        """The rest of the text, after the last token."""
        if self.stopped:
            return ""
        self._hold(self._decoder.decode(b"", final=True), hidden=False)
        found = self._first_stop()
        if found is not None:
            return self._stop_at(*found)
        return self._release(len(self._held))

    def _first_stop(self) -> tuple[int, str] | None:
        """The start and text of the stop string that counts among the complete ones."""
        found = [
            (shown[start], len(stop), stop)
            for shown, text in self._views()
            for stop in self._stop_strings
            if (start := text.find(stop)) >= 0
        ]
        if not found:
            return None
        start, _, stop = min(found)
        return start, stop

    def _first_open_start(self) -> int:
        """The index where the held text may begin an incomplete stop string; else its length."""
        return min(self._open_starts(), default=len(self._held))

    def _open_starts(self) -> Iterator[int]:
        """The first such index of each view of the held text."""
        for shown, text in self._views():
            for start in range(max(0, len(text) - self._longest + 1), len(text)):
                tail = text[start:]
                if any(
                    len(tail) < len(stop) and stop.startswith(tail) for stop in self._stop_strings
                ):
                    yield shown[start]
                    break

    def _views(self) -> list[tuple[Sequence[int], str]]:
        """The held text, and where control tokens are in it what is shown of it: each with the
        index in the held text of each of its characters."""
        held = self._held
        views: list[tuple[Sequence[int], str]] = [(range(len(held)), held)]
        if self._hidden:
            shown = [index for index, hide in enumerate(self._hidden) if not hide]
            views.append((shown, "".join([held[index] for index in shown])))
        return views

    def _stop_at(self, start: int, stop: str) -> str:
        self.stop_string, self.stopped = stop, True
        return self._release(start)

    def _hold(self, text: str, hidden: bool) -> None:
        self._held += text
        if hidden or self._hidden:
            # One byte a character of what is held, from the first hidden one on.
            self._hidden.extend(bytes(len(self._held) - len(self._hidden) - len(text)))
            self._hidden.extend([hidden] * len(text))

    def _release(self, end: int) -> str:
        text, self._held = self._held[:end], self._held[end:]
        if not self._hidden:
            return text
        hidden, self._hidden = self._hidden[:end], self._hidden[end:]
        if not any(self._hidden):
            self._hidden.clear()
        return "".join(letter for letter, hide in zip(text, hidden, strict=True) if not hide)
