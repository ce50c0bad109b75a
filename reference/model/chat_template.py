"""Conversations to prompts, through the Jinja template a model file carries.

A template is code from a stranger. It runs in Jinja's immutable sandbox inside a child process
with limits on processor time, memory and output (``template_worker``), which is started on
first use, kept, and replaced when it dies.

A conversation is text from another stranger. The child reports which characters of the prompt
the template itself wrote, and ``encode_chat`` finds control tokens only there: no message can
end its turn or open another one, even where a template trims, splits or glues contents.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from contract.errors import RequestError, TemplateError
from reference.model.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles a message may have. Templates print them beside control tokens, so no others pass."""

MAX_TEMPLATE_CHARACTERS = 1 << 20
"""Longest template accepted, in characters."""
BYTES_PER_CHARACTER = 16
"""Most bytes a character of output takes in a reply of the worker, its span included."""
KEPT_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "TZ", "SYSTEMROOT")
"""Environment variables the worker is given; it has no business with the others."""

Message = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """What one rendering may use."""

    cpu_seconds: float = 2.0
    wall_seconds: float = 30.0
    memory_bytes: int = 512 << 20
    output_characters: int = 4 << 20


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A prompt, and the character spans [start, end) of it that the template wrote."""

    text: str
    template_spans: tuple[tuple[int, int], ...]


class ChatTemplate:
    """A chat template ready to render. Safe to share between threads; renders one at a time.

    ``source`` names where the text comes from in errors; ``bos_token`` and ``eos_token`` are
    the texts the template may print under these names. ``close`` ends the worker.
    """

    def __init__(
        self,
        text: str,
        *,
        source: str,
        bos_token: str = "",
        eos_token: str = "",
        limits: TemplateLimits | None = None,
    ) -> None:
        self.text = text
        self._source = source
        self._limits = limits or TemplateLimits()
        self._variables = {"bos_token": bos_token, "eos_token": eos_token}
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None
        self._end_worker: Callable[[], object] | None = None
        if len(text) > MAX_TEMPLATE_CHARACTERS:
            problem = f"{len(text):,} characters, at most {MAX_TEMPLATE_CHARACTERS:,} are read"
            raise TemplateError(f"{source}: chat template: {problem}")

    @property
    def has_thinking_toggle(self) -> bool:
        """Whether the template looks at ``enable_thinking``."""
        return "enable_thinking" in self.text

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        now: datetime | None = None,
    ) -> RenderedChat:
        """The prompt of a conversation.

        ``enable_thinking`` None leaves the template's own default; ``now`` is the time a
        template may print, the present when None. Raises RequestError for messages that are
        not JSON objects with a known role, TemplateError when the template fails, refuses,
        breaks a limit or tries to leave its sandbox.
        """
        conversation = {
            "messages": _checked_messages(messages),
            "add_generation_prompt": add_generation_prompt,
            "now": (now or datetime.now()).isoformat(),
        }
        if tools:
            conversation["tools"] = list(tools)
        if enable_thinking is not None:
            conversation["enable_thinking"] = enable_thinking
        request = _json_line(conversation)
        with self._lock:
            reply = self._ask(request)
        if "error" in reply:
            raise self._error(reply["error"], reply["line"])
        spans = tuple((start, end) for start, end in reply["template_spans"])
        return RenderedChat(reply["text"], spans)

    def start(self) -> None:
        """Start the worker now, without waiting for it, so that the first rendering is fast."""
        with self._lock:
            self._running_worker()

    def close(self) -> None:
        """End the worker. A later rendering would start another."""
        with self._lock:
            self._drop_worker()

    def __enter__(self) -> ChatTemplate:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _running_worker(self) -> subprocess.Popen[bytes]:
        if self._worker is not None:
            return self._worker
        script = Path(__file__).with_name("template_worker.py")
        environment = {name: os.environ[name] for name in KEPT_ENVIRONMENT if name in os.environ}
        try:
            worker = subprocess.Popen(
                [sys.executable, "-P", str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise self._error(f"its process cannot be started ({error})") from None
        self._worker = worker
        self._end_worker = weakref.finalize(self, _end, worker)
        setup = {
            "template": self.text,
            "variables": self._variables,
            "memory_bytes": self._limits.memory_bytes,
            "cpu_seconds": self._limits.cpu_seconds,
            "output_characters": self._limits.output_characters,
        }
        self._send(worker, _json_line(setup))
        return worker

    def _ask(self, request: bytes) -> dict[str, Any]:
        worker = self._running_worker()
        assert worker.stdout is not None
        timer = threading.Timer(self._limits.wall_seconds, worker.kill)
        timer.daemon = True
        timer.start()
        longest = BYTES_PER_CHARACTER * self._limits.output_characters + (1 << 16)
        try:
            self._send(worker, request)
            line = worker.stdout.readline(longest)
        finally:
            timer.cancel()
        if not line.endswith(b"\n"):
            raise self._error(self._why_it_ended(worker, line))
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _send(self, worker: subprocess.Popen[bytes], line: bytes) -> None:
        assert worker.stdin is not None
        try:
            worker.stdin.write(line)
            worker.stdin.flush()
        except OSError:
            # A worker that is gone shows in what it answers: nothing.
            return

    def _why_it_ended(self, worker: subprocess.Popen[bytes], answered: bytes) -> str:
        self._drop_worker()
        if answered:
            return "its reply is too long"
        if worker.returncode == -getattr(signal, "SIGPROF", 0):
            return f"it ran longer than {self._limits.cpu_seconds:g} s"
        if worker.returncode == -getattr(signal, "SIGKILL", 0):
            return f"it did not answer in {self._limits.wall_seconds:g} s or was killed"
        return f"its process ended with status {worker.returncode}"

    def _drop_worker(self) -> None:
        if self._end_worker is not None:
            self._end_worker()
        self._worker = self._end_worker = None

    def _error(self, problem: str, line: int | None = None) -> TemplateError:
        place = "chat template" if line is None else f"chat template line {line}"
        return TemplateError(f"{self._source}: {place}: {problem}")


def load_chat_template(
    metadata: Mapping[str, object],
    tokenizer: Tokenizer,
    source: str,
    *,
    name: str | None = None,
    limits: TemplateLimits | None = None,
) -> ChatTemplate:
    """The template of a model file, or its variant called ``name``.

    Raises TemplateError when the file has none.
    """
    key = "tokenizer.chat_template" if name is None else f"tokenizer.chat_template.{name}"
    text = metadata.get(key)
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    if not isinstance(text, str):
        raise TemplateError(
            f"{source}: {key}: the file has no chat template; use --raw to send a plain prompt"
        )
    return ChatTemplate(
        text,
        source=source,
        bos_token=_token_text(tokenizer, tokenizer.bos_id),
        eos_token=_token_text(tokenizer, tokenizer.eos_id),
        limits=limits,
    )


def encode_rendered(tokenizer: Tokenizer, rendered: RenderedChat) -> list[int]:
    """Token ids of a rendered prompt: control tokens come from the template's own text only.

    BOS comes first if the model wants one, whether or not the template printed it.
    """
    return tokenizer.encode_spans(rendered.text, rendered.template_spans)


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, object]] | None = None,
    add_generation_prompt: bool = True,
    enable_thinking: bool | None = None,
    now: datetime | None = None,
) -> list[int]:
    """Token ids of a conversation; arguments and errors as for ``ChatTemplate.render``."""
    rendered = template.render(
        messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        enable_thinking=enable_thinking,
        now=now,
    )
    return encode_rendered(tokenizer, rendered)


def _checked_messages(messages: Sequence[Message]) -> list[dict[str, object]]:
    if not messages:
        raise RequestError("messages", "expected at least one message")
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{index}]", "expected an object")
        role = message.get("role")
        if role not in ROLES:
            raise RequestError(f"messages[{index}].role", f"expected one of {', '.join(ROLES)}")
        checked.append(dict(message))
    return checked


def _json_line(value: object) -> bytes:
    try:
        return json.dumps(value).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError("messages", f"cannot be written as JSON ({error})") from None


def _token_text(tokenizer: Tokenizer, token: int | None) -> str:
    return "" if token is None else tokenizer.token_text(token)


def _end(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    assert worker.stdin is not None
    assert worker.stdout is not None
    for pipe in (worker.stdin, worker.stdout):
        try:
            pipe.close()
        except OSError:
            continue
    worker.wait()
