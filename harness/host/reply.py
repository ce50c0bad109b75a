"""Parses an answer while it streams: into reasoning, text, and tool calls.

The parts do not depend on how the text is split into pieces. Nothing is lost: text that looks like
a call but is none is text. Only blanks between parts are dropped."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from harness.host.dialect import Dialect
from harness.host.dialect.calls import Call, Function, ValueScanner
from harness.host.reply_parts import CallArguments, CallBegin, Content, Part, ReasoningText, joined

BLANKS = " \t\r\n"
MAX_STARTS = 100
"""Most marks in unclosed reasoning that are tried as the beginning of a call."""


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """What an answer may contain. ``functions``: those it may call; ``many``: more than one call.
    ``enforced``: a grammar makes calls well-formed, so their arguments can be streamed.
    ``thinking``: the prompt opened the reasoning. ``exact``: a grammar writes the whole answer, so
    no mark is missing. ``forced``: the answer is only calls, so other text is a call that the token
    limit cut off."""

    dialect: Dialect
    functions: Mapping[str, Function] = field(default_factory=dict)
    many: bool = True
    enforced: bool = False
    thinking: bool = False
    exact: bool = False
    forced: bool = False


class ReplyParser:
    """Divides the text of one answer into parts. ``identity`` seeds the ids of its calls."""

    def __init__(self, form: ReplyForm, identity: bytes = b"") -> None:
        self.calls = 0
        self.thinking = form.thinking
        """Whether the next text is reasoning."""
        self._form = form
        self._identity = identity
        self._syntax = form.dialect.calls if form.functions else None
        self._reasoning = form.dialect.reasoning
        self._held = ""
        self._after_mark = form.thinking
        self._said = False
        self._had_reasoning = form.thinking
        self._call: _OpenCall | None = None
        self._stray: str | None = None
        self._in_answer = False
        self._tolerant = not (form.exact or form.enforced)

    @property
    def expects_calls(self) -> bool:
        """Whether the answer may have tool calls."""
        return self._syntax is not None

    @property
    def complete(self) -> bool:
        """Whether the last permitted call was made; later text is dropped."""
        last = not self._form.many or (self._syntax is not None and self._syntax.ends_answer)
        return last and self.calls > 0 and self._call is None

    def feed(self, text: str) -> list[Part]:
        """The parts that become certain with more text."""
        unfinished = self._held or self._in_answer or self._form.forced
        if self._said and self._syntax is None and not unfinished:
            return [Content(text)] if text else []  # Nothing else can follow.
        self._held += text
        return self._joined(self._parts(final=False))

    def finish(self) -> list[Part]:
        """The remaining parts after the end of the text."""
        return self._joined(self._parts(final=True))

    def _joined(self, parts: Iterator[Part]) -> list[Part]:
        return joined(p for p in parts if not (self._form.forced and isinstance(p, Content)))

    def _parts(self, final: bool) -> Iterator[Part]:
        """The next parts, as long as they are certain."""
        while not self.complete:
            if self._call is not None:
                yield from self._in_call(self._call, final)
                if self._call is not None:
                    return
            elif self.thinking:
                yield from self._reasoning_parts(final)
                if self.thinking:
                    return
            else:
                if not (yield from self._text(final)):
                    return

    def _reasoning_parts(self, final: bool) -> Iterator[Part]:
        assert self._reasoning is not None
        self._skip_blanks()
        before, mark, after = self._held.partition(self._reasoning.close)
        if mark:
            self.thinking, self._after_mark = False, True
            self._held = after
            before = before.rstrip(BLANKS)
        else:
            before = self._unclosed_reasoning(final)
        if before:
            yield ReasoningText(before)

    def _unclosed_reasoning(self, final: bool) -> str:
        """The certain text of reasoning that has not ended. Text that may be a call is not certain:
        if the reasoning never ends, it is a call."""
        assert self._reasoning is not None
        close = self._reasoning.close
        marks = [] if self._syntax is None or not self._tolerant else self._call_marks()
        starts = self._starts(marks) if marks else []
        if final:
            starts = [at for at in starts if self._is_call(at)][:1]
        if not starts:
            return self._take_certain([close, *marks], final)
        reasoning, self._held = self._held[: starts[0]], self._held[starts[0] :]
        if not final:
            return self._certain_before(reasoning)
        self.thinking, self._after_mark = False, True
        return reasoning.rstrip(BLANKS)

    def _certain_before(self, reasoning: str) -> str:
        """Reasoning before a possible call, without its last blanks, which stay held."""
        text = reasoning.rstrip(BLANKS)
        self._held = reasoning[len(text) :] + self._held
        return text

    def _starts(self, marks: Sequence[str]) -> list[int]:
        """Positions in the held text at which a call may begin."""
        pattern = "|".join(map(re.escape, marks))
        starts = [found.start() for found in re.finditer(pattern, self._held)][:MAX_STARTS]
        syntax, functions = self._syntax, self._form.functions
        assert syntax is not None
        return [at for at in starts if syntax.may_begin(self._held[at:], functions)]

    def _is_call(self, start: int) -> bool:
        """Whether the rest of the answer from ``start`` on begins with a call."""
        dialect = replace(self._form.dialect, reasoning=None)
        alone = ReplyParser(replace(self._form, thinking=False, dialect=dialect))
        parts = [*alone.feed(self._held[start:]), *alone.finish()]
        return bool(parts) and isinstance(parts[0], CallBegin)

    def _text(self, final: bool) -> Generator[Part, None, bool]:
        """Text up to the next mark, or all certain text. Returns whether there was a mark."""
        self._skip_blanks()
        if self._awaits_stray(final):
            return False
        marks = self._marks()
        found = [(at, mark) for mark in marks if (at := self._index_of(mark)) >= 0]
        if not found:
            text = self._take_certain(marks, final)
            if text:
                self._said = True
                yield Content(text)
            return False
        at, mark = min(found)
        before, self._held = self._held[:at], self._held[at + len(mark) :]
        text = before.rstrip(BLANKS)
        if text:
            self._said = True
            yield Content(text)
        blanks = before[len(text) :]
        if self._form.dialect.answer is not None and mark in self._form.dialect.answer:
            return self._answer_mark(blanks, mark, final)
        others = {} if self._syntax is None else self._syntax.other_marks(self._tolerant)
        if self._syntax is not None and mark == self._syntax.begin:
            self._call = _OpenCall(blanks + mark, end=self._syntax.end)
        elif mark in others:
            self._call = _OpenCall(blanks, mark, len(mark), mark, others[mark])
        else:
            self.thinking = self._had_reasoning = self._after_mark = True
        return True

    def _answer_mark(self, blanks: str, mark: str, final: bool) -> bool:
        """Drop a mark around the answer: the last one once nothing follows it."""
        if not self._in_answer:
            self._in_answer = self._after_mark = True
            return True
        self._held = "" if final else blanks + mark + self._held
        return False

    def _marks(self) -> list[str]:
        """The marks that may come next."""
        marks = []
        if self._reasoning is not None and not (self._said or self._had_reasoning):
            marks.append(self._reasoning.open)
        if (around := self._form.dialect.answer) is not None and not (
            self._said and not self._in_answer
        ):
            marks.append(around[self._in_answer])
        if self._syntax is not None and not (self._syntax.only_first and self._said):
            marks.extend(self._call_marks())
        return marks

    def _call_marks(self) -> list[str]:
        """The marks that begin a call."""
        assert self._syntax is not None
        return [self._syntax.begin, *self._syntax.other_marks(self._tolerant)]

    def _index_of(self, mark: str) -> int:
        """The position of a mark; -1 for none. Some marks count only at the beginning of an
        answer, and the one that ends it only at its end."""
        if self._in_answer and mark == self._form.dialect.answer[1]:  # type: ignore[index]
            at = self._held.rfind(mark)
            return -1 if self._held[at + len(mark) :].strip(BLANKS) else at
        at = self._held.find(mark)
        anywhere = self._syntax is not None and mark in self._call_marks()
        if anywhere and not self._syntax.only_first:  # type: ignore[union-attr]
            return at
        return at if not self._held[: max(0, at)].strip(BLANKS) else -1

    def _in_call(self, call: _OpenCall, final: bool) -> Iterator[Part]:
        call.body += self._held
        self._held = ""
        if self._form.enforced and call.arguments is None and not call.bare:
            yield from self._begin(call)
        if call.arguments is not None:
            yield from self._stream(call, call.arguments, final)
        else:
            yield from self._complete_call(call, final)

    def _begin(self, call: _OpenCall) -> Iterator[Part]:
        """Begin a call once its name and the start of its arguments are known."""
        assert self._syntax is not None
        found = self._syntax.arguments_start(call.body)
        if found is not None and found[0] in self._form.functions:
            name, start = found
            call.arguments, call.body = ValueScanner(), call.body[start:]
            yield CallBegin(self.calls, self._call_id(), name)

    def _stream(self, call: _OpenCall, scanner: ValueScanner, final: bool) -> Iterator[Part]:
        """New text of the arguments. Other text of the call is dropped."""
        assert self._syntax is not None
        if not scanner.ended:
            count = scanner.feed(call.body)
            text, call.body = call.body[:count], call.body[count:]
            if text:
                yield CallArguments(self.calls, text)
        end = self._syntax.end
        closed = scanner.ended and end is not None and end in call.body
        if closed or final:
            self.calls += 1
            self._end_call(call.body.partition(end)[2] if end is not None and closed else "")

    def _complete_call(self, call: _OpenCall, final: bool) -> Iterator[Part]:
        """The calls of a complete body, or its text if it is not a call."""
        assert self._syntax is not None
        end, functions = call.end, self._form.functions
        if call.bare and self._syntax.cannot_become_call(call.body, functions):
            yield self._as_text(call.opening + call.bare, call.body.removeprefix(call.bare))
            return
        while end is not None and (at := call.body.find(end, call.searched)) >= 0:
            after = at + len(end)
            body, rest = call.body[: after if call.bare else at], call.body[after:]
            call.searched = after
            if self._syntax.is_open(body):
                continue
            calls = self._parsed(body)
            if calls is not None:
                yield from self._call_parts(calls)
                self._end_call(rest, bool(call.bare))
                return
            if not self._syntax.inside_value(body, functions, not self._tolerant):
                yield self._as_text(call.opening + call.body[:after], rest)
                return
        if end is not None:
            call.searched = max(call.searched, len(call.body) - len(end) + 1)
        if final:
            yield from self._unfinished(call)

    def _unfinished(self, call: _OpenCall) -> Iterator[Part]:
        """The calls of a body without its end mark, or its text if it is not a call."""
        assert self._syntax is not None
        calls, rest = None if call.bare else self._parsed(call.body), ""
        if calls is None and self._tolerant and not call.bare:
            calls, rest = self._syntax.repair(call.body, self._form.functions) or (None, "")
        if calls is not None:
            yield from self._call_parts(calls)
            self._end_call(rest)
        elif self._form.enforced and not call.bare:
            # With the grammar it can only be a call that the token limit cut off.
            self._end_call("")
        else:
            yield self._as_text(call.opening + call.body, "")

    def _parsed(self, body: str) -> list[Call] | None:
        syntax, functions = self._syntax, self._form.functions
        assert syntax is not None
        if not self._tolerant:
            return syntax.parse_exactly(body, functions)
        calls = syntax.parse(body, functions)
        return syntax.parse_without_marks(body, functions) if calls is None else calls

    def _as_text(self, text: str, rest: str) -> Content:
        """The text of something that looked like a call."""
        self._call, self._held = None, rest
        self._said, self._after_mark = True, False
        return Content(text)

    def _call_parts(self, calls: Sequence[Call]) -> Iterator[Part]:
        for call in calls if self._form.many else calls[:1]:
            yield CallBegin(self.calls, self._call_id(), call.name)
            yield CallArguments(self.calls, call.arguments)
            self.calls += 1

    def _end_call(self, rest: str, bare: bool = False) -> None:
        self._call, self._held = None, rest
        if bare and self._syntax is not None:
            self._stray = self._syntax.end
        self._said = self._after_mark = True

    def _call_id(self) -> str:
        assert self._syntax is not None
        digest = hashlib.sha256(self._identity + self.calls.to_bytes(4, "little")).hexdigest()
        return digest[:9] if self._syntax.short_ids else f"call_{digest[:24]}"

    def _skip_blanks(self) -> None:
        """Drop the blanks after a mark."""
        if self._after_mark:
            self._held = self._held.lstrip(BLANKS)
            self._after_mark = not self._held

    def _awaits_stray(self, final: bool) -> bool:
        """Whether the held text may become the end mark of a call without a begin mark. A complete
        one is dropped."""
        stray = self._stray
        if stray is None or not self._held:
            return False
        if self._held.startswith(stray):
            self._held = self._held.removeprefix(stray)
            self._after_mark = True
            self._skip_blanks()
        elif stray.startswith(self._held) and not final:
            return True
        self._stray = None
        return False

    def _take_certain(self, marks: Sequence[str], final: bool) -> str:
        """The held text up to a possible beginning of a mark and the blanks before it."""
        held = self._held
        end = len(held)
        if marks and not final:
            longest = max(map(len, marks))
            starts = range(max(0, end - longest + 1), end)
            end = next((at for at in starts if any(m.startswith(held[at:]) for m in marks)), end)
            end = len(held[:end].rstrip(BLANKS))
        self._held = held[end:]
        return held[:end]


@dataclass(slots=True)
class _OpenCall:
    """An open call. ``opening`` is its mark with the blanks before it. A mark ``bare`` and its
    ``end`` belong to the body. ``arguments`` are set once they are streamed. The end is searched
    from ``searched`` on."""

    opening: str
    body: str = ""
    searched: int = 0
    bare: str = ""
    end: str | None = None
    arguments: ValueScanner | None = None
