"""Parses an answer in OpenAI's harmony format while it streams.

The parts do not depend on how the text is split into pieces. Headers and marks are dropped; text
outside of messages is text for the user."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from harness.host.dialect import harmony
from harness.host.dialect.base import Dialect
from harness.host.dialect.calls import StringScanner, ValueScanner
from harness.host.reply import ReplyForm, ReplyParser
from harness.host.reply_parts import CallArguments, CallBegin, Content, Part, ReasoningText

if TYPE_CHECKING:
    import regex

CLOSING, OPENING = (harmony.END, harmony.CALL, harmony.RETURN), (harmony.START, harmony.CHANNEL)
LONGEST_MARK = max(map(len, (*CLOSING, *OPENING)))
ENDS = re.compile("|".join(map(re.escape, (*CLOSING, *OPENING))))
HEADER = (
    r"\s*(?:<\|start\|>[\w.-]*)?(?:\s*to=[^\s<]+)?(?:\s*<\|channel\|>\s*\w+)?"
    r"(?:\s+to=[^\s<]+)?(?:\s*<\|constrain\|>)?(?:\s*[\w.-]+)?\s*"
)
BEGINNINGS = (harmony.START, harmony.CHANNEL, harmony.CONSTRAIN, harmony.MESSAGE, "to=")
"""Marks that begin a header, or follow an empty one."""
FRAMED = (harmony.START, harmony.CHANNEL, harmony.CONSTRAIN, "to=")
"""Beginnings of headers that cannot begin a text."""
LONGEST_HEADER = 256
"""Most characters of a header; anything longer is text."""


def reply_parser(form: ReplyForm, identity: bytes = b"") -> ReplyParser:
    """The parser for an answer of this form."""
    made = HarmonyParser if form.dialect.framed else ReplyParser
    return made(form, identity)


def content_of(parts: Iterable[Part]) -> str:
    """The text for the user."""
    return "".join(part.text for part in parts if isinstance(part, Content))


@dataclass(slots=True)
class FramedAnswer:
    """The text of a parsed answer in a terminal: reasoning if it is shown, a blank line, then the
    ``content``. ``shown_tokens`` are the control tokens that ``parser`` needs."""

    parser: ReplyParser
    shown_tokens: frozenset[int]
    content: str = ""
    reasoning: bool = False
    shows_reasoning: bool = True

    @classmethod
    def of(cls, dialect: Dialect) -> FramedAnswer:
        """A new answer without tools."""
        return cls(reply_parser(ReplyForm(dialect)), dialect.shown)

    def take(self, parts: Iterable[Part]) -> str:
        """The text to show for these parts."""
        shown = ""
        for part in parts:
            if isinstance(part, ReasoningText):
                self.reasoning = self.shows_reasoning
                shown += part.text if self.shows_reasoning else ""
            elif isinstance(part, Content):
                gap = self.reasoning and not self.content
                self.content += part.text
                shown += f"\n\n{part.text}" if gap else part.text
        return shown


class HarmonyParser(ReplyParser):
    """Parses one answer, message by message."""

    def __init__(self, form: ReplyForm, identity: bytes = b"") -> None:
        super().__init__(form, identity)
        self._message = _Message(ReasoningText) if form.thinking else None
        self._begun_kinds: set[type[Part]] = set()

    def _parts(self, final: bool) -> Iterator[Part]:
        while not self.complete:
            if self._message is None:
                self._message = self._opened(final)
                if self._message is None:
                    return
                self.thinking = self._message.kind is ReasoningText
            message = self._message
            if message.function is None:
                yield from self._text_of(message, final)
            else:
                yield from self._call_of(message, final)
            if self._message is not None:
                return

    def _opened(self, final: bool) -> _Message | None:
        """The message that begins in the held text. None if its header is incomplete; a message
        without a header if none can follow."""
        header, mark, rest = self._held.partition(harmony.MESSAGE)
        if mark and _is_header(header):
            self._held = rest
            return self._message_of(header)
        if not mark and _may_become_header(header):
            if not final:
                return None
            if not header.strip() or header.lstrip().startswith(FRAMED):
                # The token limit cut off this header.
                self._held = ""
                return None
        # The first mark is text too, or the message would end at once.
        first = next((one for one in OPENING if header.lstrip().startswith(one)), "")
        before = header[: header.index(first) + len(first)] if first else ""
        self._held = self._held[len(before) :]
        return _Message(Content, before, begun=True)

    def _message_of(self, header: str) -> _Message:
        function = harmony.called(header, self._form.functions)
        if function is not None:
            return _Message(Content, header + harmony.MESSAGE, function)
        if harmony.RECIPIENT.search(header):
            return _Message(Content, header + harmony.MESSAGE)
        channel = harmony.NAMED_CHANNEL.search(header)
        thinks = channel is not None and channel[1] == "analysis"
        return _Message(ReasoningText if thinks else Content)

    def _text_of(self, message: _Message, final: bool) -> Iterator[Part]:
        """The parts of a message's text that are certain."""
        found = ENDS.search(self._held)
        text, self._held = self._certain(found, final)
        text = message.take_header() + text
        if text:
            joint = "" if message.begun or message.kind not in self._begun_kinds else "\n"
            message.begun = True
            self._begun_kinds.add(message.kind)
            yield message.kind(joint + text)
        if found is not None or final:
            self._close(found)

    def _certain(self, found: re.Match[str] | None, final: bool) -> tuple[str, str]:
        """The held text up to a mark or a possible beginning of one, and the rest."""
        held = self._held
        if found is not None:
            return held[: found.start()], held[found.start() :]
        at = len(held) if final else _start_of_mark(held)
        return held[:at], held[at:]

    def _call_of(self, message: _Message, final: bool) -> Iterator[Part]:
        """The parts of a call: once its arguments are complete, or as they come if a grammar
        enforces them."""
        body, strings = message.body + self._held, message.strings
        marks = ENDS.finditer(body, message.searched)
        found = next((one for one in marks if not strings.is_inside(body, one.start())), None)
        message.searched = max(message.searched, len(body) - LONGEST_MARK + 1)
        end = len(body) if found is None else found.start()
        if self._form.enforced:
            ended = final or found is not None
            certain = end if ended else _start_of_mark(body)
            yield from self._streamed(message, body[:certain], ended)
        elif found is not None or final:
            yield from self._whole_call(message, body[:end])
        message.body, self._held = body, ""
        if found is not None or final:
            self._held = body[end:]
            self._close(found)

    def _whole_call(self, message: _Message, body: str) -> Iterator[Part]:
        assert message.function is not None
        arguments = harmony.arguments_of(body)
        if arguments is None:
            self._begun_kinds.add(Content)
            yield Content(message.take_header() + body)
            return
        yield CallBegin(self.calls, self._call_id(), message.function)
        yield CallArguments(self.calls, arguments)
        self.calls += 1

    def _streamed(self, message: _Message, body: str, ended: bool) -> Iterator[Part]:
        """The new text of the arguments, up to the end of their JSON value."""
        assert message.function is not None
        if message.arguments is None:
            message.arguments = ValueScanner()
            yield CallBegin(self.calls, self._call_id(), message.function)
        more = body[message.scanned :]
        message.scanned = len(body)
        if not message.arguments.ended:
            text = more[: message.arguments.feed(more)]
            if text:
                yield CallArguments(self.calls, text)
        if ended:
            self.calls += 1

    def _close(self, found: re.Match[str] | None) -> None:
        """End the message at a mark. A mark that begins the next message stays held."""
        if found is not None and found[0] in CLOSING:
            self._held = self._held.removeprefix(found[0])
        self._message = None
        self.thinking = False


@dataclass(slots=True)
class _Message:
    """An open message: text of a ``kind``, or a call of ``function``. ``header`` is text too,
    unless it was recognised. ``begun``: some of its text was returned. The end of a call is
    searched in ``body`` from ``searched`` on, outside of its ``strings``; its ``arguments`` are
    scanned from ``scanned`` on."""

    kind: type[Content] | type[ReasoningText]
    header: str = ""
    function: str | None = None
    begun: bool = False
    body: str = ""
    searched: int = 0
    scanned: int = 0
    arguments: ValueScanner | None = field(default=None)
    strings: StringScanner = field(default_factory=StringScanner)

    def take_header(self) -> str:
        """The header at the first call, then ""."""
        header, self.header = self.header, ""
        return header


@cache
def _header_pattern() -> regex.Pattern[str]:
    import regex

    return regex.compile(HEADER + re.escape(harmony.MESSAGE))


def _is_header(text: str) -> bool:
    """Whether a text in front of ``<|message|>`` is a header."""
    found = _header_pattern().fullmatch(text + harmony.MESSAGE)
    return found is not None and len(text) <= LONGEST_HEADER and _begins_header(text)


def _may_become_header(text: str) -> bool:
    """Whether this text can be the beginning of a header."""
    if len(text) > LONGEST_HEADER + len(harmony.MESSAGE) or not _begins_header(text):
        return False
    return _header_pattern().fullmatch(text, partial=True) is not None


def _begins_header(text: str) -> bool:
    begun = text.lstrip()
    return any(begun.startswith(one) or one.startswith(begun) for one in BEGINNINGS)


def _start_of_mark(text: str) -> int:
    """The index at which a possible beginning of a mark starts at the end of the text."""
    marks = (*CLOSING, *OPENING)
    starts = range(max(0, len(text) - LONGEST_MARK + 1), len(text))
    return next(
        (at for at in starts if any(mark.startswith(text[at:]) for mark in marks)), len(text)
    )
