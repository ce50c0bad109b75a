"""Turns arguments of a call into settings, by the rules of the command line."""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypedDict, get_type_hints

from harness.cli.serve_command import NAMES as SERVER_NAMES
from harness.cli.serve_command import SLOTS
from harness.cli.sessions import ENGINE_SETTINGS, MODEL_SETTINGS, model_file, session_options
from harness.file_digests import DIGESTS_FILE
from harness.host.options import SessionOptions
from harness.other_programs import advice
from harness.settings import Settings, resolve
from harness.settings_table import SETTINGS
from harness.toml_file import nearest_of

__all__ = [
    "NAMES",
    "SERVER_NAMES",
    "ModelSettings",
    "ServerSettings",
    "opening",
    "settings_of",
    "signature_of",
]

NAMES = (*MODEL_SETTINGS, "lora", *ENGINE_SETTINGS, "slots", "repeat_last_n")
TierName = Literal[
    "auto", "cpu", "native", "opencl", "vulkan", "cuda", "metal", "t1", "t2", "intel"
]
Size = int | str
"""A number, or one with a binary suffix: ``"32K"`` is 32,768."""


class ModelSettings(TypedDict, total=False):
    """The settings of a model and its engine. None means the environment, the configuration file or
    the default."""

    config: str | Path | None
    cache_dir: str | Path | None
    lora: str | Path | Sequence[str | Path] | None
    tier: TierName | None
    threads: int | None
    device: str | int | None
    opencl_mode: Literal["auto", "persistent", "launch"] | None
    opencl_device: str | None
    context: Size | None
    kv_dtype: Literal["f32", "f16", "q8_0", "i12", "i4r", "i3r"] | None
    chunk: Size | None
    draft: int | None
    draft_model: str | Path | None
    memory_budget: Size | None
    prefix_cache: Size | None
    host_cache: Size | None
    state_cache: Size | None
    disk_cache: str | Path | None
    disk_cache_size: Size | None
    slots: int | None
    repeat_last_n: int | None


class ServerSettings(ModelSettings, total=False):
    """The settings of a server: of its model, its address, its users, and defaults of sampling
    parameters."""

    host: str | None
    port: int | None
    queue_depth: int | None
    tenants: str | Path | None
    ledger: str | Path | None
    beside: str | None
    alias: str | None
    allowed_hosts: str | None
    drain_seconds: float | None
    ray: int | None
    record: str | Path | None
    slot_save_path: str | Path | None
    state: str | Path | None
    receipts: str | Path | None
    read_experts: Literal["off", "on"] | None
    engine_process: Literal["off", "on"] | None
    unknown_fields: Literal["ignore", "reject"] | None
    cors: str | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repeat_penalty: float | None
    max_tokens: int | None


def settings_of(
    model: str | Path | None, given: Mapping[str, Any], names: Sequence[str], call: str
) -> Settings:
    """The settings ``names`` from the arguments of ``call``. Raises TypeError for an unknown
    argument, and ConfigError for a value that is not accepted."""
    for name in given:
        if name not in (*names, "config"):
            raise TypeError(f"{call} has no argument {name!r}{hint_for(name, names)}")
    if model is not None and not isinstance(model, str | os.PathLike):
        kind = type(model).__name__
        raise TypeError(f"model: {model!r} is of type {kind}; give a file, a name or None")
    texts = {name: _text(value) for name, value in given.items() if value is not None}
    if model is not None:
        texts["model"] = str(model)
    return resolve(argparse.Namespace(**texts), names, flags=False)


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def hint_for(name: str, names: Sequence[str]) -> str:
    """A hint for an unknown argument: its name here if another program has it, or the most similar
    setting."""
    from difflib import SequenceMatcher

    if name in advice("arguments"):
        return f"; {advice('arguments')[name]}"
    flag = f"--{name.replace('_', '-')}"
    for known in names:
        if known in SETTINGS and flag in SETTINGS[known].flags:
            return f"; here it is {known!r}"
    near = nearest_of(name, names)
    return f"; did you mean {near!r}?" if SequenceMatcher(None, name, near).ratio() > 0.6 else ""


def opening(
    model: str | Path | None, given: Mapping[str, Any]
) -> tuple[Path, SessionOptions, Path]:
    """The model's file, downloaded if needed, the options for opening it, and the file that caches
    digests. Tokens are guessed ahead only where ``draft`` or ``draft_model`` is given."""
    settings = settings_of(model, given, NAMES, "LLM")
    slots = settings["slots"] or SLOTS
    options = replace(session_options(settings, chat=True), slots=slots)
    if options.draft_model is None and settings.sources["draft"] == "default":
        options = replace(options, draft=0)
    return model_file(settings), options, settings["cache_dir"] / DIGESTS_FILE


def signature_of(call: Any, settings: Any) -> inspect.Signature:
    """The signature of ``call`` for ``help`` and editors, with the ``settings`` as keyword
    arguments."""
    own = inspect.signature(call)
    parameters = [one for one in own.parameters.values() if one.kind is not one.VAR_KEYWORD]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
        for name, hint in get_type_hints(settings).items()
    ]
    return own.replace(parameters=parameters)
