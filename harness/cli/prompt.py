"""Reads a prompt and encodes it as tokens."""

from __future__ import annotations

import os
import stat
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from contract.errors import RequestError
from harness.console import note

if TYPE_CHECKING:
    from harness.host.open import Prepared
    from harness.host.session import Session

MAX_PROMPT_BYTES = 8 << 20
"""Most bytes of a prompt; a longer one would only be refused after a long wait."""
STANDARD_INPUT = "-"
WAITING_SECONDS = 3.0
WAITING = "reading standard input until it ends; with `< /dev/null` nothing is read"
THINKING = {"on": True, "off": False}
"""Values of the option that switch thinking; auto and levels of thinking do not."""

Messages = Sequence[Mapping[str, object]]


def read_prompt(argument: str | None, file: str | None, *, append: bool = True) -> str:
    """The prompt: ``argument``, with ``append`` followed by the text that is piped in; or the text
    of ``file``; or, where neither is given, the text that is piped in.

    Argument and file may be ``-``, which is standard input. One line feed at the end of a file is
    not part of the prompt. Raises RequestError when there is no prompt, more than one, or one that
    is not UTF-8."""
    if argument is not None and file is not None:
        raise RequestError("prompt", "is given as an argument and with -f; give one of them")
    if STANDARD_INPUT in (argument, file) or (argument is file is None and not is_terminal()):
        prompt = _piped_text()
    elif argument is not None:
        prompt = decoded(os.fsencode(argument), "argument")
        piped = _piped_text() if append and _is_piped() else ""
        prompt = f"{prompt}\n{piped}" if prompt and piped else prompt or piped
    elif file is not None:
        prompt = _from_file(file)
    else:
        raise RequestError("prompt", "is missing; give PROMPT or -f FILE, or use zinc-rt chat")
    if not prompt:
        raise RequestError("prompt", "is empty; give PROMPT or -f FILE, or use zinc-rt chat")
    return prompt


def is_terminal() -> bool:
    """Whether standard input is a terminal."""
    return sys.stdin is not None and sys.stdin.isatty()


def _is_piped() -> bool:
    """Whether standard input is a pipe or a file: a device or a socket may never end."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _piped_text() -> str:
    """All of standard input. Where it does not end soon a note says what is waited for: the pipe
    may have been left open by mistake."""
    waiting = threading.Timer(WAITING_SECONDS, note, [WAITING])
    waiting.daemon = True
    waiting.start()
    try:
        return _without_line_end(decoded(_bounded(sys.stdin.buffer), "standard input"))
    finally:
        waiting.cancel()


def decoded(raw: bytes, source: str) -> str:
    """``raw`` as text; RequestError naming the byte that is not UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            "prompt", f"{source}: byte {error.start} is not UTF-8 ({error.reason})"
        ) from None


def encode_prompt(session: Session, prompt: str) -> list[int]:
    """Token ids of a text to continue. Text that looks like a control token is ordinary text."""
    return session.model.tokenizer.encode(prompt)


def encode_messages(session: Session | Prepared, messages: Messages, thinking: str) -> list[int]:
    """Token ids of a conversation and of the start of the answer.

    ``thinking`` is auto, on, off or a level. The model must have a chat template. Raises
    RequestError for a template that cannot switch thinking on, or has no levels, and TemplateError.
    """
    from harness.host.thinking import LEVELS, thinking_arguments
    from reference.model.chat_template import encode_chat

    template, model = session.template, session.model
    assert template is not None
    level = thinking if thinking in LEVELS else None
    arguments = thinking_arguments(template, model.config.name, THINKING.get(thinking), level)
    return encode_chat(model.tokenizer, template, messages, **arguments)


def thinking_fields(thinking: str) -> dict[str, object]:
    """The fields of a request that say what the option ``thinking`` says."""
    if thinking in THINKING:
        return {"enable_thinking": THINKING[thinking]}
    return {} if thinking == "auto" else {"reasoning_effort": thinking}


def encode_turn(
    session: Session, prompt: str, messages: Messages | None, thinking: str
) -> list[int]:
    """Token ids of ``messages``, or of the ``prompt`` as plain text where they are None or there is
    no template."""
    if messages is not None and session.template is None:
        note(f"{session.model.config.name} has no chat template: continuing the text as it is")
    if messages is None or session.template is None:
        return encode_prompt(session, prompt)
    return encode_messages(session, messages, thinking)


def opening(system: str | None) -> list[dict[str, object]]:
    """The messages before the first turn."""
    return [] if system is None else [{"role": "system", "content": system}]


def user(text: str) -> dict[str, object]:
    """A message of the user."""
    return {"role": "user", "content": text}


def _from_file(path: str) -> str:
    try:
        with open(path, "rb") as stream:
            raw = _bounded(stream)
    except OSError as error:
        raise RequestError("prompt", f"{path}: cannot read: {error.strerror}") from None
    except ValueError:
        raise RequestError("prompt", f"{path!r} is not a path") from None
    return _without_line_end(decoded(raw, path))


def _bounded(stream) -> bytes:  # type: ignore[no-untyped-def]
    raw: bytes = stream.read(MAX_PROMPT_BYTES + 1)
    if len(raw) > MAX_PROMPT_BYTES:
        raise RequestError("prompt", f"is longer than {MAX_PROMPT_BYTES:,} bytes")
    return raw


def _without_line_end(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")
