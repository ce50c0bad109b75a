"""The conversation of ``zinc-rt chat``: each turn sends the whole history; Ctrl-C stops only the
answer."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from contract.errors import RequestError, TemplateError
from harness.cli.answer import closing_line, show_answer
from harness.cli.prompt import (
    MAX_PROMPT_BYTES,
    Messages,
    decoded,
    encode_messages,
    opening,
    read_prompt,
    user,
)
from harness.cli.sessions import open_session, sampling_of
from harness.client import ServerError
from harness.console import note
from harness.host.options import Recording
from harness.host.session import Session
from harness.interrupts import INTERRUPTED
from harness.progress import progress_on
from harness.settings import Settings

ASK = ">>> "
HELP = """\
/system TEXT  start a new conversation with this system prompt; without TEXT with
              that of the model
/reset        start a new conversation
/help         show this list
/exit         leave, like Ctrl-D
Ctrl-C stops an answer. Write // for a message that begins with a slash."""


class Partner(Protocol):
    """The other side of a conversation: a model in this process or a server."""

    @property
    def name(self) -> str:
        """The name to show."""

    def answer(self, messages: Messages) -> tuple[str, bool]:
        """Show the answer to a conversation as it comes; returns its text and whether Ctrl-C cut
        it."""


@dataclass(frozen=True)
class LocalPartner:
    """A model in this process."""

    session: Session
    settings: Settings
    stop: tuple[str, ...]

    @property
    def name(self) -> str:
        """The model and its context length."""
        return f"{self.session.model.config.name}, {self.session.context} tokens of context"

    def answer(self, messages: Messages) -> tuple[str, bool]:
        """Generate the answer and show it."""
        session, settings = self.session, self.settings
        generation = session.generate(
            encode_messages(session, messages, settings["thinking"]),
            sampling_of(settings, session),
            settings["max_tokens"],
            self.stop,
            progress_on(transient=True),
            chat=True,
        )
        interrupted = show_answer(generation)
        note(closing_line(generation, session))
        return generation.text, interrupted


def converse(args: argparse.Namespace, settings: Settings) -> int:
    """Hold a conversation with a model in this process until the input ends."""
    first = first_turn(args)
    recording = Recording(args.trace, args.timeline)
    with open_session(settings, chat=True, recording=recording) as session:
        if session.template is None:
            raise TemplateError(
                f"{session.model.file.path}: has no chat template; use zinc-rt run --raw"
            )
        return take_turns(LocalPartner(session, settings, tuple(args.stop)), settings, first)


def first_turn(args: argparse.Namespace) -> str | None:
    """The first message, from the command line, or None. Piped text is the turns after it."""
    given = args.prompt is not None or args.file is not None
    return read_prompt(args.prompt, args.file, append=False) if given else None


def take_turns(partner: Partner, settings: Settings, first: str | None) -> int:
    """Hold a conversation until the input ends; ``first`` is its first message if not None."""
    interactive = sys.stdin.isatty()
    chat = Chat(partner, settings["system"])
    if interactive:
        note(f"{partner.name}; /help lists the commands")
    if first is not None and chat.take_turn(first) and not interactive:
        return INTERRUPTED
    for line in _typed_lines() if interactive else _piped_lines():
        if line.startswith("/") and not line.startswith("//"):
            if not chat.command(line):
                break
            continue
        turn = line.removeprefix("/") if line.startswith("//") else line
        try:
            interrupted = chat.take_turn(turn)
        except (RequestError, ServerError) as error:
            if not interactive:
                raise
            note(f"error: {error}; /reset starts a new conversation")
            continue
        except KeyboardInterrupt:
            if not interactive:
                raise
            note("interrupted: the model will not see this message")
            continue
        if interrupted and not interactive:
            return INTERRUPTED
    return 0


class Chat:
    """A conversation: its history, and the methods that extend it."""

    def __init__(self, partner: Partner, system: str | None) -> None:
        self._partner = partner
        self.messages = opening(system)

    def take_turn(self, text: str) -> bool:
        """Answer ``text`` on standard output and add both to the history; True when Ctrl-C cut the
        answer.

        A turn that fails is not added."""
        messages = [*self.messages, user(text)]
        answer, interrupted = self._partner.answer(messages)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return interrupted

    def command(self, line: str) -> bool:
        """Execute a line that starts with a slash; returns False when it ends the conversation."""
        name, _, argument = line.partition(" ")
        match name:
            case "/exit":
                return False
            case "/help":
                print(HELP, file=sys.stderr)
            case "/reset":
                self.messages = [one for one in self.messages if one["role"] == "system"]
                note("a new conversation")
            case "/system":
                self.messages = opening(argument.strip() or None)
                note("a new conversation with this system prompt")
            case _:
                note(f"no command {name}; /help lists them, // begins a message with a slash")
        return True


def _typed_lines() -> Iterator[str]:
    """Yield lines typed at a terminal, with editing and history if readline exists."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    while True:
        try:
            line = _ask()
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /exit leaves)", file=sys.stderr)
            continue
        if line.strip():
            yield line


def _ask() -> str:
    """Read one line; the prompt is not written to a standard output that is no terminal."""
    if sys.stdout.isatty():
        return input(ASK)
    print(ASK, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _piped_lines() -> Iterator[str]:
    """Yield the lines of a standard input that is no terminal, without empty ones."""
    start = 0
    while raw := sys.stdin.buffer.readline(MAX_PROMPT_BYTES + 1):
        if len(raw) > MAX_PROMPT_BYTES:
            raise RequestError("prompt", f"a line is longer than {MAX_PROMPT_BYTES:,} bytes")
        line = decoded(raw, f"standard input, line at byte {start}").rstrip("\r\n")
        start += len(raw)
        if line.strip():
            yield line
