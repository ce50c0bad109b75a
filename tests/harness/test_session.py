"""What a session prepares, and when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import harness.generate
from harness.generate import Session, SessionOptions
from harness.synth import SynthSpec, write_synthetic
from reference.limits import Limits
from reference.model.chat_template import ChatTemplate
from reference.model.open import open_model


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_synthetic(path, SynthSpec(quant="q8_0", seed=3))
    return path


@pytest.mark.parametrize("chat", [True, False])
def test_the_template_starts_before_the_model_is_loaded(
    chat: bool, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where a template is going to be rendered; the session then has that one."""
    happened: list[str] = []
    started: list[ChatTemplate] = []
    start, load = ChatTemplate.start, harness.generate._load

    def noted_start(template: ChatTemplate) -> None:
        happened.append("template")
        started.append(template)
        start(template)

    def noted_load(*arguments: Any) -> Any:
        happened.append("load")
        return load(*arguments)

    monkeypatch.setattr(ChatTemplate, "start", noted_start)
    monkeypatch.setattr(harness.generate, "_load", noted_load)
    options = SessionOptions(tier="cpu", context=64, chat=chat)
    with Session.open(model_path, options) as session:
        assert happened == (["template", "load"] if chat else ["load"])
        assert session.template is not None
        assert started == ([session.template] if chat else [])


def test_what_was_planned_is_not_built_again(model_path: Path) -> None:
    model = open_model(model_path)
    with model.file:
        limits = Limits(slots=1, context=64, pages=4)
        graph = model.graph(limits)
        assert model.graph(Limits(slots=1, context=64, pages=4)) is graph
        other = model.graph(Limits(slots=1, context=128, pages=8))
        assert other != graph
        again = model.graph(limits)
        assert again == graph
