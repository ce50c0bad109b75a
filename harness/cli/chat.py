"""The conversation of ``zinc-rt chat``: each turn is read from the terminal and sends the whole
history; Ctrl-C stops only the answer."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from contract.errors import ConfigError, RequestError, TemplateError
from harness.cli.answer import closing_line, show_answer
from harness.cli.answer_format import AnswerFormat, answer_format, constraint_of, errors_of
from harness.cli.conversation_file import read_conversation, save_conversation
from harness.cli.prompt import (
    MAX_PROMPT_BYTES,
    Messages,
    decoded,
    encode_messages,
    opening,
    read_prompt,
    user,
)
from harness.cli.sessions import model_name, open_session, sampling_of
from harness.client import ServerError
from harness.console import note, table
from harness.host.options import Recording
from harness.host.session import Session
from harness.host.structured.grammars import GrammarsBusy
from harness.interrupts import INTERRUPTED
from harness.progress import progress_on
from harness.setting_kinds import UINT64_MAX
from harness.settings import SETTINGS, Settings

HELP = """\
/retry           answer the last message again, drawn with the next seed
/undo            take back the last message and its answer
/forget          leave out the older half of the conversation, where the context is full
/set NAME VALUE  change how answers are made: /set temperature 0.8; /set shows all
/show            the model, what computes, and how much of the context is used
/save FILE       write the conversation to a file
/load FILE       go on with a conversation that was saved
/system TEXT     start a new conversation with this system prompt; without TEXT with
                 that of the model
/reset           start a new conversation
/help            show this list
/exit            leave, like Ctrl-D
Ctrl-C stops an answer. A message of several lines stands between \"\"\" and \"\"\".
Write // for a message that begins with a slash."""
HOW_TO_GO_ON = "/forget leaves out older messages, /reset starts a new conversation"
SAME_COMMANDS: Mapping[str, str] = {
    **dict.fromkeys(("/regenerate", "/regen"), "/retry"),
    **dict.fromkeys(("/clear", "/new"), "/reset"),
    **dict.fromkeys(("/bye", "/quit"), "/exit"),
    **dict.fromkeys(("/info", "/model", "/context", "/stats", "/tier"), "/show"),
    "/?": "/help",
}
"""Commands of other programs that mean the same as ours, and ours."""
LEAVING = ("exit", "quit")
"""What leaves, typed at a terminal without a slash."""
CHANGEABLE = (
    *("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed"),
    *("max_tokens", "thinking"),
)
"""The settings that may change from one answer to the next."""


class Partner(Protocol):
    """The other side of a conversation: a model in this process or a server."""

    @property
    def name(self) -> str:
        """The name to show."""

    def facts(self, messages: Messages, settings: Settings) -> list[tuple[str, str]]:
        """Names and values that describe the partner and the conversation."""

    def answer(self, messages: Messages, settings: Settings) -> tuple[str, bool]:
        """Show the answer to a conversation as it comes; returns its text and whether Ctrl-C cut
        it."""


@dataclass(frozen=True)
class LocalPartner:
    """A model in this process."""

    session: Session
    model: str
    stop: tuple[str, ...]
    held: AnswerFormat | None

    @property
    def name(self) -> str:
        """The model and its context length."""
        return f"{self.model}, {self.session.context:,} tokens of context"

    def facts(self, messages: Messages, settings: Settings) -> list[tuple[str, str]]:
        """The model's file, the device, and the tokens of the conversation."""
        session, info = self.session, self.session.tier.info
        spoken = any(one["role"] == "user" for one in messages)
        used = len(encode_messages(session, messages, settings["thinking"])) if spoken else 0
        return [
            ("model", f"{self.model}: {session.model.file.path}"),
            ("tier", f"{info.name} on {info.device}, {info.arithmetic}"),
            ("context", f"{used:,} of {session.context:,} tokens are used"),
        ]

    def answer(self, messages: Messages, settings: Settings) -> tuple[str, bool]:
        """Generate the answer and show it."""
        session = self.session
        generation = session.generate(
            encode_messages(session, messages, settings["thinking"]),
            sampling_of(settings, session),
            settings["max_tokens"],
            self.stop,
            progress_on(transient=True),
            chat=True,
            constraint=constraint_of(self.held, session, messages, settings["thinking"]),
        )
        with errors_of(self.held):
            interrupted = show_answer(generation)
        note(closing_line(generation, session))
        return generation.text, interrupted


def converse(args: argparse.Namespace, settings: Settings) -> int:
    """Hold a conversation with a model in this process until the input ends."""
    held = answer_format(args)
    first = first_turn(args)
    recording = Recording(args.trace, args.timeline)
    with open_session(settings, chat=True, masks=held is not None, recording=recording) as session:
        if session.template is None:
            raise TemplateError(
                f"{session.model.file.path}: has no chat template; use zinc-rt run --raw"
            )
        name = model_name(settings["model"], session.model.file.path)
        return take_turns(LocalPartner(session, name, tuple(args.stop), held), settings, first)


def first_turn(args: argparse.Namespace) -> str | None:
    """The first message, from the command line, or None. Piped text is the turns after it."""
    given = args.prompt is not None or args.file is not None
    return read_prompt(args.prompt, args.file, append=False) if given else None


def take_turns(partner: Partner, settings: Settings, first: str | None) -> int:
    """Hold a conversation until the input ends; ``first`` is its first message if not None."""
    interactive = sys.stdin.isatty()
    chat = Chat(partner, settings)
    if interactive:
        note(f"{partner.name}; /help lists the commands")
    if first is not None:
        chat.take_message(first)
        if chat.interrupted and not interactive:
            return INTERRUPTED
    for turn in typed_turns() if interactive else piped_turns():
        try:
            chat.take(turn)
        except (GrammarsBusy, RequestError, ServerError, TemplateError) as error:
            if not interactive:
                raise
            note(f"error: {error}; {HOW_TO_GO_ON}")
        except ConfigError as error:
            if not interactive:
                raise
            note(f"error: {error}")
        except KeyboardInterrupt:
            if not interactive:
                raise
            note("interrupted: the model will not see this message")
        if chat.ended:
            break
        if chat.interrupted and not interactive:
            return INTERRUPTED
    return 0


class Chat:
    """A conversation: its ``messages``, and the methods that extend it.

    ``interrupted`` says whether Ctrl-C cut the last answer, ``ended`` that the user left."""

    def __init__(self, partner: Partner, settings: Settings) -> None:
        self._partner = partner
        self.settings = settings
        self.messages = opening(settings["system"])
        self.interrupted = False
        self.ended = False
        self._answered_with: Settings | None = None

    def take(self, turn: str) -> None:
        """Execute a command, or answer a message."""
        if is_command(turn):
            self._command(turn)
        else:
            self.take_message(message_of(turn))

    def take_message(self, text: str) -> None:
        """Answer ``text`` on standard output and add both to the conversation.

        A turn that fails is not added."""
        self._answer([*self.messages, user(text)])

    def _answer(self, messages: list[dict[str, object]]) -> None:
        answer, self.interrupted = self._partner.answer(messages, self.settings)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        self._answered_with = self.settings

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        match SAME_COMMANDS.get(name, name):
            case "/exit":
                self.ended = True
            case "/help":
                print(HELP, file=sys.stderr)
            case "/retry":
                self._retry()
            case "/undo":
                self._undo()
            case "/forget":
                self._forget()
            case "/set":
                self._set(argument)
            case "/show":
                print(table(self._partner.facts(self.messages, self.settings)), file=sys.stderr)
            case "/save":
                note(f"saved: {save_conversation(argument, self.messages)}")
            case "/load":
                self._begin(read_conversation(argument))
                note(f"loaded; messages of yours: {len(self._turns())}")
            case "/reset":
                self._begin([one for one in self.messages if one["role"] == "system"])
                note("a new conversation")
            case "/system":
                self._begin(opening(argument or None))
                whose = "this" if argument else "the model's own"
                note(f"a new conversation with {whose} system prompt")
            case _:
                note(f"no command {name}; /help lists them, // begins a message with a slash")

    def _begin(self, messages: list[dict[str, object]]) -> None:
        self.messages = messages
        self._answered_with = None

    def _turns(self) -> list[int]:
        """The places of the user's messages."""
        return [place for place, one in enumerate(self.messages) if one["role"] == "user"]

    def _retry(self) -> None:
        """Answer the last message again, unless the answer would be the same."""
        if not (turns := self._turns()):
            note("there is no message to answer again")
            return
        if self._answered_with is self.settings and not self.interrupted:
            if self.settings["temperature"] == 0:
                note("at temperature 0 the answer is the same; /set temperature 0.8 draws others")
                return
            seed = (self.settings["seed"] + 1) & UINT64_MAX
            self.settings = self.settings.changed("seed", str(seed), "/retry")
        self._answer(self.messages[: turns[-1] + 1])

    def _undo(self) -> None:
        """Take back the last message and its answer."""
        if not (turns := self._turns()):
            note("there is no message to take back")
            return
        taken = str(self.messages[turns[-1]]["content"])
        self._begin(self.messages[: turns[-1]])
        note(f"taken back: {taken if len(taken) <= 60 else f'{taken[:57]}...'}")

    def _forget(self) -> None:
        """Leave out the older half of the user's messages, with their answers."""
        turns = self._turns()
        left = turns[len(turns) // 2 :]
        if left == turns:
            note("there is no older message; /reset starts a new conversation")
            return
        self._begin([*self.messages[: turns[0]], *self.messages[left[0] :]])
        note(f"left out; messages of yours: {len(left)}")

    def _set(self, argument: str) -> None:
        """Change a setting, or show it, or all."""
        name, _, value = argument.removeprefix("parameter ").strip().partition(" ")
        flag = f"--{name.lstrip('-').replace('_', '-')}"
        names = [one for one in CHANGEABLE if not name or flag in SETTINGS[one].flags]
        if not names:
            raise ConfigError(f"/set: {name!r} is not one of {', '.join(CHANGEABLE)}")
        if value.strip():
            self.settings = self.settings.changed(names[0], value.strip(), f"/set {names[0]}")
        print(table([(one, str(self.settings[one])) for one in names]), file=sys.stderr)


ASK = ">>> "
ASK_MORE = "... "
"""What a terminal shows within a text of several lines."""
FENCE = '"""'


def typed_turns() -> Iterator[str]:
    """Yield what is typed at a terminal, with editing and history if readline exists."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    while True:
        try:
            line = _ask(ASK)
            if line.strip() in LEAVING:
                return
            turn = _turn(line, lambda: _ask(ASK_MORE))
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /exit leaves)", file=sys.stderr)
            continue
        if turn.strip():
            yield turn


def piped_turns() -> Iterator[str]:
    """Yield the turns of a standard input that is no terminal, without empty ones."""
    lines = _piped_lines()

    def more() -> str:
        for line in lines:
            return line
        raise RequestError("prompt", f"standard input ends in a text that begins with {FENCE}")

    for line in lines:
        turn = _turn(line, more)
        if turn.strip():
            yield turn


def is_command(turn: str) -> bool:
    """Whether a turn is a command to this program, not a message."""
    return turn.startswith("/") and not turn.startswith("//")


def message_of(turn: str) -> str:
    """The message that a turn is, of whose two slashes at the start one is removed."""
    return turn.removeprefix("/") if turn.startswith("//") else turn


def _turn(line: str, more: Callable[[], str]) -> str:
    """The line, or the text up to the closing fence, never a command, if it begins with one."""
    if not line.startswith(FENCE):
        return line
    lines = [line.removeprefix(FENCE)]
    while not lines[-1].rstrip().endswith(FENCE):
        lines.append(more())
    lines[-1] = lines[-1].rstrip().removesuffix(FENCE)
    text = "\n".join(lines).strip("\n")
    return f"/{text}" if text.startswith("/") else text


def _ask(prompt: str) -> str:
    """Read one line; the prompt is not written to a standard output that is no terminal."""
    if sys.stdout.isatty():
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _piped_lines() -> Iterator[str]:
    start = 0
    while raw := sys.stdin.buffer.readline(MAX_PROMPT_BYTES + 1):
        if len(raw) > MAX_PROMPT_BYTES:
            raise RequestError("prompt", f"a line is longer than {MAX_PROMPT_BYTES:,} bytes")
        line = decoded(raw, f"standard input, line at byte {start}").rstrip("\r\n")
        start += len(raw)
        yield line
