"""The form that ``--json-schema``, ``--grammar`` or ``--regex`` holds an answer to, by the server's
own code."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from contract.errors import ConfigError, RequestError, system_words
from contract.lazy_dataclass import dataclass
from harness.cli.prompt import MAX_PROMPT_BYTES, Messages, thinking_fields

if TYPE_CHECKING:
    from contract.types import Request
    from harness.host.harmony_reply import FramedAnswer
    from harness.host.session import Session
    from harness.host.structured.grammars import Grammars, TokenMasks
    from harness.serve.answer_grammar import TextPlan
    from harness.serve.chat import ChatPlan

ANY_JSON = "json"
"""The value of --json-schema for any JSON object."""


def add_format_flags(output: argparse._ArgumentGroup) -> None:
    """Add the flags; one of them may be given."""
    flags = output.add_mutually_exclusive_group()
    flags.add_argument(
        *("-j", "--json-schema", "-jf", "--json-schema-file", "--format"),
        dest="json_schema",
        metavar="SCHEMA",
        help="hold the answer to a JSON schema: a file, its text '{\"type\": ...}', or json for "
        "any object. Thinking is not shown; the model does not see the schema, so say in the "
        "prompt what to write",
    )
    flags.add_argument(
        "--grammar",
        "--grammar-file",
        metavar="GRAMMAR",
        help="hold the answer to a grammar in llama.cpp's GBNF: a file, or its text "
        '\'root ::= "yes" | "no"\'',
    )
    flags.add_argument(
        "--regex", metavar="REGEX", help="hold the whole answer to a regular expression: 'yes|no'"
    )


@dataclass(frozen=True)
class AnswerFormat:
    """A format: the flag, with its file if there is one, as the ``source`` that errors name, and
    the ``fields`` of a request to the server that mean the same."""

    source: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class HeldAnswer:
    """An answer under a format's grammar. ``chat`` has the parser of an answer in a conversation,
    whose reasoning is no part of the text."""

    plan: TextPlan | ChatPlan
    chat: ChatPlan | None
    grammars: Grammars
    held: AnswerFormat

    def masks(self, request: Request) -> Mapping[int, TokenMasks]:
        """The token masks of a request. Raises ConfigError."""
        from harness.conversations import token_masks

        with errors_of(self.held):
            return token_masks(self.plan, self.grammars, [request])

    def framed(self, request: Request) -> FramedAnswer | None:
        """What finds the text of an answer in a conversation."""
        if self.chat is None:
            return None
        from harness.host.harmony_reply import FramedAnswer

        shown = self.chat.form.dialect.shown
        return FramedAnswer(self.chat.parser(request), shown, shows_reasoning=False)


def answer_format(args: argparse.Namespace) -> AnswerFormat | None:
    """The format that the flags ask for, None without one. Raises ConfigError, before a model is
    opened, for one that is no JSON or GBNF or that cannot be enforced."""
    for name, field in (
        ("json_schema", "json_schema"),
        ("grammar", "grammar"),
        ("regex", "guided_regex"),
    ):
        value = getattr(args, name)
        if value is not None:
            return _checked(f"--{name.replace('_', '-')}", field, value)
    return None


def constraint_of(
    held: AnswerFormat | None, session: Session, messages: Messages | None, thinking: str
) -> HeldAnswer | None:
    """What the answer to ``messages`` must be like, or with None the continuation of a text; None
    without a format. Raises ConfigError."""
    if held is None:
        return None
    from harness.conversations import Conversations, text_plan

    template, model, grammars = session.template, session.model, session.grammars
    with errors_of(held):
        if messages is None or template is None:
            return HeldAnswer(text_plan(held.fields), None, grammars, held)
        conversations = Conversations(template, model.tokenizer, grammars, model.config.name)
        plan = conversations.plan(messages, {**thinking_fields(thinking), **held.fields})
        return HeldAnswer(plan, plan, grammars, held)


@contextmanager
def errors_of(held: AnswerFormat | None) -> Iterator[None]:
    """Errors about the format name its source."""
    if held is None:
        yield
        return
    from harness.host.structured.grammars import GrammarBroke

    try:
        yield
    except GrammarBroke as broke:
        raise ConfigError(f"{held.source}: {broke}") from None
    except RequestError as error:
        if error.field.partition(".")[0] not in ("response_format", "grammar"):
            raise
        raise ConfigError(f"{held.source}: {error.problem}") from None


def _checked(flag: str, field: str, value: str) -> AnswerFormat:
    from harness.conversations import own_fields, text_plan

    source, text = (flag, value) if _is_text(field, value) else _read(flag, value)
    if not text.strip():
        raise ConfigError(f"{source}: is empty")
    if (field, value) == ("json_schema", ANY_JSON):
        return AnswerFormat(source, {"response_format": {"type": "json_object"}})
    try:
        made = AnswerFormat(source, own_fields({field: text}))
    except RequestError as error:
        raise ConfigError(f"{source}: {error.problem}") from None
    with errors_of(made):
        text_plan(made.fields)
    return made


def _is_text(field: str, value: str) -> bool:
    """Whether the value is the format itself and no file."""
    if field == "grammar":
        return "::=" in value or not value
    return field != "json_schema" or not value or value == ANY_JSON or value.lstrip()[:1] in "{["


def _read(flag: str, path: str) -> tuple[str, str]:
    """The flag with its file, and the text of the file. Raises ConfigError."""
    source = f"{flag} {path}"
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_PROMPT_BYTES + 1)
        if len(raw) > MAX_PROMPT_BYTES:
            raise ConfigError(f"{source}: is longer than {MAX_PROMPT_BYTES:,} bytes")
        return source, raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: byte {error.start} is not UTF-8") from None
    except OSError as error:
        raise ConfigError(
            f"{source}: cannot be read: {system_words(error)}; give a file or the text itself, "
            f"see zinc-rt help {flag}"
        ) from None
    except ValueError:
        raise ConfigError(f"{flag}: {path!r} is not a path") from None
