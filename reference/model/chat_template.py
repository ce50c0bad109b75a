"""Renders conversations to prompts with the Jinja template of a model file.

A template is code from a stranger. It runs in Jinja's immutable sandbox inside a child process with
limits on processor time, memory and output (``template_worker``). The child is started on first
use, reused, and replaced when it dies.

A conversation is text from another stranger. The child reports which characters of the prompt the
template itself wrote, and ``encode_chat`` finds control tokens only there. So no message can end
its turn or open another one, even where a template trims, splits or joins contents.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from contract.context_manager import ContextManager
from contract.errors import RequestError, TemplateError
from contract.lazy_dataclass import dataclass
from reference.model.tokenizer import Tokenizer
from reference.worker_process import WorkerEnded, WorkerProcess

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles a message may have. Templates print roles next to control tokens, so no others pass."""

MAX_TEMPLATE_CHARACTERS = 1 << 20
"""Longest template accepted, in characters."""
BYTES_PER_CHARACTER = 16
"""Most bytes per output character in a reply of the worker, its span included."""

Message = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Limits on one rendering."""

    cpu_seconds: float = 2.0
    wall_seconds: float = 30.0
    memory_bytes: int = 512 << 20
    output_characters: int = 4 << 20


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A prompt, and the character spans [start, end) of it that the template itself wrote."""

    text: str
    template_spans: tuple[tuple[int, int], ...]


class ChatTemplate(ContextManager):
    """A chat template ready to render. Threads may share it; it renders one conversation at a time.

    ``source`` names the template's origin in errors; ``bos_token`` and ``eos_token`` are the texts
    the template may print under these names. ``close`` ends the worker.
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
        limits = limits or TemplateLimits()
        self.text = text
        self._source = source
        self._lock = threading.Lock()
        setup = {
            "template": text,
            "variables": {"bos_token": bos_token, "eos_token": eos_token},
            "memory_bytes": limits.memory_bytes,
            "cpu_seconds": limits.cpu_seconds,
            "output_characters": limits.output_characters,
        }
        self._worker = WorkerProcess(
            Path(__file__).with_name("template_worker.py"),
            lambda: _json_line(setup),
            wall_seconds=limits.wall_seconds,
            cpu_seconds=limits.cpu_seconds,
            longest_reply=BYTES_PER_CHARACTER * limits.output_characters + (1 << 16),
        )
        if len(text) > MAX_TEMPLATE_CHARACTERS:
            problem = f"{len(text):,} characters, at most {MAX_TEMPLATE_CHARACTERS:,} are read"
            raise TemplateError(f"{source}: chat template: {problem}")

    @property
    def has_thinking_toggle(self) -> bool:
        """Whether the template reads ``enable_thinking``."""
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
        """Render a conversation to a prompt.

        ``enable_thinking`` None leaves the template's default; ``now`` is the time a template may
        print, None for the present. Raises RequestError for messages that are not JSON objects with
        a known role, TemplateError when the template fails, refuses, exceeds a limit or tries to
        leave its sandbox.
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
            try:
                self._worker.start()
            except WorkerEnded as ended:
                raise self._error(str(ended)) from None

    def close(self) -> None:
        """End the worker. A later rendering would start another."""
        with self._lock:
            self._worker.close()

    def _ask(self, request: bytes) -> dict[str, Any]:
        try:
            reply: dict[str, Any] = json.loads(self._worker.ask(request))
        except WorkerEnded as ended:
            raise self._error(str(ended)) from None
        return reply

    def _error(self, problem: str, line: int | None = None) -> TemplateError:
        location = "chat template" if line is None else f"chat template line {line}"
        return TemplateError(f"{self._source}: {location}: {problem}")


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
    """Token ids of a rendered prompt; control tokens are recognized only in the template's own
    text.

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
