"""Renders conversations to prompts with the Jinja template of a model file.

A template is code from a stranger. It runs in Jinja's immutable sandbox inside a child process with
limits on processor time, memory and output (``template_worker``). The child is started on first
use, reused, and replaced when it dies.

A conversation is text from another stranger. The child reports which characters of the prompt the
template itself wrote, and ``encode_chat`` finds control tokens only there. So no message can end
its turn or open another one, even where a template trims, splits or joins contents."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from contract.context_manager import ContextManager
from contract.errors import (
    PromptTooLong,
    RequestError,
    TemplateError,
    TemplateRefused,
    TemplateUnavailable,
)
from contract.lazy_dataclass import dataclass
from reference.model.template_forms import TemplateForms
from reference.model.tokenizer import Tokenizer
from reference.worker_process import WorkerEnded, WorkerProcess, WorkerRefused

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles a message may have. Templates print roles next to control tokens, so no others pass."""

MAX_TEMPLATE_CHARACTERS = 1 << 20
"""Longest template accepted, in characters."""
BYTES_PER_CHARACTER = 16
"""Most bytes per output character in a reply of the worker, its span included."""

KEY = "tokenizer.chat_template"
"""The metadata key of a model file's template."""
DEFAULT = "default"
TOOL_USE = "tool_use"
"""The names of a file's two templates, as ``transformers`` knows them."""
TEMPLATE_TOKENS = ("pad", "unk", "sep", "cls", "mask")
"""Tokens other than BOS and EOS whose text a template may print, where the vocabulary has them."""
NO_TOKENS: Mapping[str, str] = {}
PROBE_TIME = datetime(2025, 1, 1)
PROBE_PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "string", "description": "A text."}},
    "required": ["a"],
}
PROBE_FUNCTION = {"name": "probe", "description": "A tool.", "parameters": PROBE_PARAMETERS}
PROBE_TOOLS = ({"type": "function", "function": PROBE_FUNCTION},)
"""The tools that a template is tried with."""

HARMONY_HEADER = ("<|start|>", "<|channel|>", "<|message|>")
"""The control tokens in headers of OpenAI's harmony format."""

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
    """A prompt, and the character spans [start, end) of it that the template itself wrote.

    ``opening`` is how the template begins a turn of the model: the end of a prompt that asks for
    one. It is empty if that is not known."""

    text: str
    template_spans: tuple[tuple[int, int], ...]
    opening: str = ""


class _Ended(TemplateError):
    """The worker ended during a rendering: at a limit, or because it was killed."""


class ChatTemplate(ContextManager):
    """A chat template ready to render. Threads may share it.

    ``source`` names the template's origin in errors; ``bos_token``, ``eos_token`` and the names of
    ``tokens`` are the texts the template may print under these names. ``tool_text`` is the template
    of conversations with tools, if that is another one. A template receives messages in the forms
    that it accepts (``TemplateForms``). ``close`` ends the worker."""

    def __init__(
        self,
        text: str,
        *,
        source: str,
        bos_token: str = "",
        eos_token: str = "",
        tokens: Mapping[str, str] = NO_TOKENS,
        tool_text: str | None = None,
        limits: TemplateLimits | None = None,
    ) -> None:
        limits = limits or TemplateLimits()
        self.text = text
        self.tool_text = text if tool_text is None else tool_text
        """The template of conversations with tools."""
        texts = self.text + self.tool_text
        self.has_thinking_toggle = "enable_thinking" in texts
        """Whether the template reads ``enable_thinking``."""
        self.has_reasoning_effort = "reasoning_effort" in texts
        """Whether the template reads ``reasoning_effort``."""
        self.frames_messages = all(mark in texts for mark in HARMONY_HEADER)
        """Whether the model writes messages with headers, in OpenAI's harmony format."""
        self._source = source
        self._forms: dict[bool, TemplateForms] = {}
        self._openings: dict[tuple[bool, bool | None], str] = {}
        setup = {
            "templates": {DEFAULT: text, TOOL_USE: self.tool_text},
            "variables": {**tokens, "bos_token": bos_token, "eos_token": eos_token},
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
        longest = max(len(text), len(self.tool_text))
        if longest > MAX_TEMPLATE_CHARACTERS:
            problem = f"{longest:,} characters, at most {MAX_TEMPLATE_CHARACTERS:,} are read"
            raise TemplateError(f"{source}: chat template: {problem}")

    @property
    def takes_system(self) -> bool:
        """Whether the text of a system message reaches the model."""
        return self._forms_of(tools=False).takes_system

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        reasoning_effort: str | None = None,
        now: datetime | None = None,
    ) -> RenderedChat:
        """Render a conversation to a prompt.

        ``enable_thinking`` and ``reasoning_effort`` None leave the template's default; ``now`` is
        the time a template may print, None for the present. Raises RequestError for messages that
        are not JSON objects with a known role, TemplateError when the template fails, exceeds a
        limit or tries to leave its sandbox, PromptTooLong when that limit is less than the
        messages, TemplateRefused when it refuses them, and TemplateUnavailable."""
        conversation = _conversation(
            self._forms_of(bool(tools)).adapted(_checked_messages(messages)),
            tools or (),
            now or datetime.now(),
            enable_thinking=enable_thinking,
            reasoning_effort=reasoning_effort,
        )
        rendered = self._rendered(conversation, add_generation_prompt)
        if not add_generation_prompt:
            return rendered
        opening = self._opening(bool(tools), enable_thinking)
        text = rendered.text
        return RenderedChat(
            text, rendered.template_spans, opening if text.endswith(opening) else ""
        )

    def _opening(self, tools: bool, enable_thinking: bool | None) -> str:
        """The end of a prompt that asks for a turn of the model."""
        known = self._openings.get((tools, enable_thinking))
        if known is not None:
            return known
        messages = self._forms_of(tools).adapted([{"role": "user", "content": "hi"}])
        given = PROBE_TOOLS if tools else ()
        probe = _conversation(messages, given, PROBE_TIME, enable_thinking=enable_thinking)
        try:
            without, asking = (self._rendered(probe, asks).text for asks in (False, True))
        except TemplateUnavailable:
            raise  # It says nothing about the template.
        except TemplateError:
            without = asking = ""
        opening = asking.removeprefix(without) if asking.startswith(without) else ""
        self._openings[tools, enable_thinking] = opening
        return opening

    def _rendered(self, conversation: dict[str, object], asks: bool) -> RenderedChat:
        """``conversation`` as a prompt, which with ``asks`` opens a turn of the model."""
        request = _json_line({**conversation, "add_generation_prompt": asks})
        reply = self._ask(request)
        if "error" in reply:
            longest = reply.get("longer", len(request))
            if len(request) > longest:
                raise PromptTooLong("messages", f"{len(request):,} bytes", longest)
            raise self._failure(reply)
        return RenderedChat(reply["text"], tuple(map(tuple, reply["template_spans"])))

    def _forms_of(self, tools: bool) -> TemplateForms:
        """The forms of messages that the template accepts, with tools or without."""

        def try_out(messages: Sequence[Message]) -> str | None:
            probe = _conversation(messages, PROBE_TOOLS if tools else (), PROBE_TIME)
            try:
                return self._rendered(probe, asks=False).text
            except (_Ended, TemplateUnavailable):
                raise  # Another form would cost the whole limit again.
            except TemplateError:
                return None

        if tools not in self._forms:
            self._forms[tools] = TemplateForms(try_out)
        return self._forms[tools]

    def written_call(self) -> str | None:
        """A conversation up to a call of an earlier turn (``TemplateForms.written_call``). Raises
        TemplateError at a limit of the rendering."""
        return self._forms_of(tools=True).written_call

    def start(self) -> None:
        """Start the worker now, without waiting for it, so that the first rendering is fast."""
        try:
            self._worker.start()
        except WorkerEnded as ended:
            raise self._without_answer(ended) from None

    def close(self) -> None:
        """End the worker. A later rendering would start another."""
        self._worker.close()

    def _ask(self, request: bytes) -> dict[str, Any]:
        try:
            reply: dict[str, Any] = json.loads(self._worker.ask(request).decode())
        except WorkerEnded as ended:
            raise self._without_answer(ended) from None
        return reply

    def _without_answer(self, ended: WorkerEnded) -> TemplateError:
        kind = TemplateUnavailable if isinstance(ended, WorkerRefused) else _Ended
        return kind(str(self._error(str(ended))))

    def _failure(self, reply: Mapping[str, Any]) -> TemplateError:
        error = self._error(reply["error"], reply["line"], reply["summary"])
        if reply["refused"] is None:
            return error
        return TemplateRefused(str(error), reply["refused"])

    def _error(
        self, problem: str, line: int | None = None, summary: str | None = None
    ) -> TemplateError:
        location = "chat template" if line is None else f"chat template line {line}"
        head = f"{self._source}: {location}:"
        return TemplateError(f"{head} {problem}", None if summary is None else f"{head} {summary}")


def load_chat_template(
    metadata: Mapping[str, object], tokenizer: Tokenizer, source: str
) -> ChatTemplate:
    """The template of a model file; conversations with tools have its variant called ``tool_use``
    where there is one. Raises TemplateError when the file has none."""
    text = _template_text(metadata, KEY)
    if text is None:
        raise TemplateError(
            f"{source}: {KEY}: the file has no chat template; use --raw to send a plain prompt"
        )
    return ChatTemplate(
        text,
        source=source,
        bos_token=_token_text(tokenizer, tokenizer.bos_id),
        eos_token=_token_text(tokenizer, tokenizer.eos_id),
        tokens={
            f"{name}_token": tokenizer.token_text(token)
            for name, token in tokenizer.named_ids.items()
            if name in TEMPLATE_TOKENS
        },
        tool_text=_template_text(metadata, f"{KEY}.{TOOL_USE}"),
    )


def _template_text(metadata: Mapping[str, object], key: str) -> str | None:
    text = metadata.get(key)
    if isinstance(text, bytes):
        return text.decode(errors="replace")
    return text if isinstance(text, str) else None


def encode_rendered(tokenizer: Tokenizer, rendered: RenderedChat) -> list[int]:
    """Token ids of a rendered prompt; control tokens are recognized only in the template's own
    text.

    BOS comes first if the model wants one, whether or not the template printed it."""
    return tokenizer.encode_spans(rendered.text, rendered.template_spans)


def encode_chat(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Message], **options: Any
) -> list[int]:
    """Token ids of a conversation; options and errors are those of ``ChatTemplate.render``."""
    return encode_rendered(tokenizer, template.render(messages, **options))


def _conversation(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, object]],
    now: datetime,
    **options: object,
) -> dict[str, object]:
    """The variables of a template; ``options`` that are None leave its own default."""
    return {
        "template": TOOL_USE if tools else DEFAULT,
        "messages": list(messages),
        "now": now.isoformat(),
        **({"tools": list(tools)} if tools else {}),
        **{name: value for name, value in options.items() if value is not None},
    }


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
        content = message.get("content")
        may_lack = role == "assistant" and ("content" in message or bool(message.get("tool_calls")))
        if not (_is_content(content) or (content is None and may_lack)):
            problem = 'expected a text or a list of {"type": "text", "text": ...}'
            raise RequestError(f"messages[{index}].content", problem)
        checked.append(dict(message))
    return checked


def _is_content(content: object) -> bool:
    """Whether a template may find this in a message: a text or parts."""
    if isinstance(content, list | tuple):
        return all(isinstance(part, Mapping) for part in content)
    return isinstance(content, str)


def _json_line(value: object) -> bytes:
    try:
        return json.dumps(value).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError("messages", f"cannot be written as JSON ({error})") from None


def _token_text(tokenizer: Tokenizer, token: int | None) -> str:
    return "" if token is None else tokenizer.token_text(token)
