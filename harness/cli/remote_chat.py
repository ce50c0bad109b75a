"""The conversation of ``zinc-rt chat`` with a server: ``--server URL``."""

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
from harness.cli.chat import first_turn, take_turns
from harness.cli.prompt import THINKING, Messages
from harness.cli.run_command import KEY_ENV
from harness.client import ServerClient, ServerError
from harness.console import note
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
"""What the server calls the settings of a generation."""


def converse_with_server(args: argparse.Namespace, settings: Settings) -> int:
    """Take turns until the input ends. Raises ServerError when nobody answers there."""
    if args.trace is not None or args.timeline is not None:
        raise ConfigError("--trace and --timeline record a model of this process; not --server")
    client = ServerClient(args.server.rstrip("/"), args.key or os.environ.get(KEY_ENV))
    models = client.get("/v1/models")["data"]
    if not models:
        raise ServerError(f"{args.server} serves no model")
    named = settings["model"] if settings.sources["model"].startswith("flag") else None
    model = next((one for one in models if one["id"] == named), models[0])
    partner = RemotePartner(client, named or model["id"], settings, tuple(args.stop))
    return take_turns(partner, settings, first_turn(args))


@dataclass(slots=True)
class _ReceivedAnswer:
    """What came of an answer: all that was ``shown``, and the ``text``, to which thinking does not
    belong."""

    shown: str = ""
    text: str = ""
    end: str = ""
    usage: Mapping[str, int] = field(default_factory=dict)

    def take(self, event: Mapping[str, Any]) -> None:
        """Show what an event brings."""
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
    """A model behind a server. The settings of this side are sent: with those of a local chat the
    answers are the same."""

    client: ServerClient
    model: str
    settings: Settings
    stop: tuple[str, ...]

    @property
    def name(self) -> str:
        """The model and where it is."""
        return f"{self.model} at {self.client.url}"

    def answer(self, messages: Messages) -> tuple[str, bool]:
        """Ask, and show what comes. Ctrl-C closes the connection, and the server stops."""
        said = _ReceivedAnswer()
        began = time.perf_counter()
        interrupted = False
        asked = self.client.stream("/v1/chat/completions", self._body(messages))
        try:
            with closing(asked) as events:
                for event in events:
                    said.take(event)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            if not said.shown.endswith("\n"):
                show_text("\n")
        end = "interrupted" if interrupted else said.end
        note(self._closing_line(said.usage, time.perf_counter() - began, end))
        return said.text, interrupted

    def _body(self, messages: Messages) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "stream_options": {"include_usage": True},
        }
        body |= {wire: self.settings[name] for name, wire in WIRE_NAMES.items()}
        if self.stop:
            body["stop"] = list(self.stop)
        thinking = THINKING[self.settings["thinking"]]
        if thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": thinking}
        return body

    def _closing_line(self, usage: Mapping[str, int], seconds: float, end: str) -> str:
        told = []
        if usage:
            told.append(f"{usage['prompt_tokens']} prompt tokens")
            tokens = usage["completion_tokens"]
            told.append(f"{tokens} tokens, {tokens / max(seconds, 1e-9):.1f} a second in all")
        cut = {"length": "cut at --max-tokens or the end of the context"}.get(end, end)
        return f"[{' · '.join([*told, self.name, *filter(None, [cut])])}]"
