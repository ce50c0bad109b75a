"""From the arguments of a call to settings, by the rules of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from contract.errors import ConfigError
from harness.cli.serve_command import NAMES as SERVER_NAMES
from harness.cli.serve_command import SLOTS
from harness.cli.serving import ENGINE_SETTINGS, MODEL_SETTINGS, model_file, session_options
from harness.generate import SessionOptions
from harness.settings import Settings, resolve
from harness.toml_file import unknown_key

__all__ = ["NAMES", "SERVER_NAMES", "opening", "settings_of"]

NAMES = (*MODEL_SETTINGS, *ENGINE_SETTINGS, "slots", "repeat_last_n")


def settings_of(
    model: str | Path | None, given: Mapping[str, Any], names: Sequence[str]
) -> Settings:
    """The settings ``names``; raises ConfigError for arguments that are none of them, and for
    values that are not accepted."""
    for name in given:
        if name not in (*names, "config"):
            raise ConfigError(unknown_key(name, names))
    said = {name: str(value) for name, value in given.items() if value is not None}
    if model is not None:
        said["model"] = str(model)
    return resolve(argparse.Namespace(**said), names, flags=False)


def opening(model: str | Path | None, given: Mapping[str, Any]) -> tuple[Path, SessionOptions]:
    """The model's file, fetched if need be, and how an engine for it is opened."""
    settings = settings_of(model, given, NAMES)
    slots = settings["slots"] or SLOTS
    options = replace(session_options(settings, chat=True), slots=slots)
    if options.draft_model is None:
        options = replace(options, draft=0)
    return model_file(settings), options
