'''Reads the turns of a conversation: lines, and texts of several lines between two """.'''

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from contract.errors import RequestError
from harness.cli.prompt import MAX_PROMPT_BYTES, decoded

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
            turn = _turn(_ask(ASK), lambda: _ask(ASK_MORE))
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
