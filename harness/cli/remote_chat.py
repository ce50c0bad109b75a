"""The conversation of ``zinc-rt chat --server URL`` with a server."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from contract.errors import ConfigError
from harness.cli.answer import show_text
from harness.cli.answer_format import answer_format
from harness.cli.chat import first_turn, take_turns
from harness.cli.prompt import Messages, thinking_fields
from harness.client import ServerClient, ServerError
from harness.console import note
from harness.setting_kinds import KEY_ENV
from harness.settings import Settings

WIRE_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "repeat_last_n",
    "seed": "seed",
    "max_tokens": "max_tokens",
}
"""The server's names for the settings of a generation."""


def converse_with_server(args: argparse.Namespace, settings: Settings) -> int:
    """Hold a conversation until the input ends. Raises ServerError when the server does not
    answer."""
    if args.trace is not None or args.timeline is not None:
        raise ConfigError("--trace and --timeline record a model of this process; not --server")
    held = answer_format(args)
    form = {} if held is None else held.fields
    client = ServerClient(args.server.rstrip("/"), args.key or os.environ.get(KEY_ENV))
    models = client.get("/v1/models")["data"]
    if not models:
        raise ServerError(f"{args.server} serves no model")
    named = settings["model"] if settings.sources["model"].startswith("flag") else None
    model = next((one for one in models if one["id"] == named), models[0])
    partner = RemotePartner(client, named or model["id"], tuple(args.stop), form)
    return take_turns(partner, settings, first_turn(args))


@dataclass(slots=True)
class _ReceivedAnswer:
    """The received part of an answer: all text ``shown``, and the ``text`` without thinking."""

    shown: str = ""
    text: str = ""
    end: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)

    def take(self, event: Mapping[str, Any]) -> None:
        """Show the text of an event and record it."""
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            delta = choice.get("delta", {})
            text = delta.get("content") or ""
            shown = (delta.get("reasoning_content") or "") + text
            if shown:
                show_text(shown)
            self.shown += shown
            self.text += text
            if choice.get("finish_reason") not in (None, "stop"):
                self.end = choice["finish_reason"]


@dataclass(frozen=True)
class RemotePartner:
    """A model on a server. The settings of this side are sent, so the answers equal those of a
    local chat."""

    client: ServerClient
    model: str
    stop: tuple[str, ...]
    form: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The model and the server's address."""
        return f"{self.model} at {self.client.url}"

    def facts(self, messages: Messages, settings: Settings) -> list[tuple[str, str]]:
        """The model, the server, and what the server says about the model."""
        models = self.client.get("/v1/models")["data"]
        told = next((one.get("x_zinc") for one in models if one["id"] == self.model), None)
        facts = [("model", self.model), ("server", self.client.url)]
        if told:
            facts.append(("tier", f"{told['tier']} on {told['device']}"))
            facts.append(("context", f"{told['context']:,} tokens"))
        return facts

    def answer(self, messages: Messages, settings: Settings) -> tuple[str, bool]:
        """Request an answer and show it. Ctrl-C closes the connection, which stops the server's
        generation."""
        answer = _ReceivedAnswer()
        began = time.perf_counter()
        interrupted = False
        stream = self.client.stream("/v1/chat/completions", self._body(messages, settings))
        try:
            with closing(stream) as events:
                for event in events:
                    answer.take(event)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            if not answer.shown.endswith("\n"):
                show_text("\n")
        end = "interrupted" if interrupted else answer.end
        note(self._closing_line(answer.usage, time.perf_counter() - began, end))
        return answer.text, interrupted

    def _body(self, messages: Messages, settings: Settings) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "stream_options": {"include_usage": True},
        }
        body |= {wire: settings[name] for name, wire in WIRE_NAMES.items()}
        if self.stop:
            body["stop"] = list(self.stop)
        fields = thinking_fields(settings["thinking"])
        if "enable_thinking" in fields:
            fields = {"chat_template_kwargs": fields}
        return {**body, **fields, **self.form}

    def _closing_line(self, usage: Mapping[str, Any], seconds: float, end: str) -> str:
        parts = []
        if usage:
            reused = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            cached = f" ({reused} cached)" if reused else ""
            parts.append(f"{usage['prompt_tokens']} prompt tokens{cached}")
            tokens = usage["completion_tokens"]
            parts.append(f"{tokens} tokens, {tokens / max(seconds, 1e-9):.1f} a second in all")
        cut = {"length": "cut at --max-tokens or the end of the context"}.get(end, end)
        return f"[{' · '.join([*parts, self.name, *filter(None, [cut])])}]"
