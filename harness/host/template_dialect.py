"""The dialect of a chat template, tried out on what the template itself writes for a call."""

from __future__ import annotations

from dataclasses import replace

from contract.errors import TemplateError, TemplateUnavailable
from harness.host.dialect import Dialect, dialect_of
from harness.host.dialect.calls import Function
from harness.host.reply import ReplyForm, ReplyParser
from harness.host.reply_parts import CallBegin
from reference.model.chat_template import ChatTemplate
from reference.model.template_forms import NAME
from reference.model.tokenizer import Tokenizer


def tried_dialect(template: ChatTemplate, tokenizer: Tokenizer) -> Dialect:
    """The dialect of ``template``. It has no calls if the template writes a call that the dialect
    found by its text cannot read: then the syntax is another one. Raises
    TemplateUnavailable."""
    found = dialect_of(template.text, tokenizer, template.tool_text)
    if found.calls is None or found.framed:
        return found
    try:
        written = template.written_call()
    except TemplateUnavailable:
        raise
    except TemplateError:
        return found  # The template fails; each request with it will say so.
    if written is None or _reads(found, written):
        return found
    return replace(found, calls=None)


def _reads(dialect: Dialect, written: str) -> bool:
    """Whether the call of NAME in a turn is read as one."""
    syntax = dialect.calls
    assert syntax is not None
    marks = (syntax.begin, *syntax.other_marks(tolerant=True))
    start = max(written.rfind(mark, 0, written.index(NAME)) for mark in marks)
    if start < 0:
        return False
    parser = ReplyParser(ReplyForm(replace(dialect, reasoning=None), {NAME: Function(NAME)}))
    parts = [*parser.feed(written[start:]), *parser.finish()]
    return bool(parts) and isinstance(parts[0], CallBegin)
