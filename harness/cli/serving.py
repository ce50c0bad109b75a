"""Opens a session from settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from harness.settings import Settings
from harness.settings_table import names_in

if TYPE_CHECKING:
    from contract.types import SamplingParams
    from harness.host.options import Recording, SessionOptions
    from harness.host.session import Session
    from harness.tiers import TierOptions

MODEL_SETTINGS = names_in("model")
TIER_SETTINGS = names_in("device")
ENGINE_SETTINGS = names_in("device", "memory", "speed")
RUN_SETTINGS = names_in("model", "device", "sampling", "memory", "speed", "output")
"""What one user of one model can set."""


def model_file(settings: Settings, model: str | None = None, *, pull_missing: bool = True) -> Path:
    """The file of a model (None: the one in the settings), pulled if needed. Raises
    CatalogError."""
    from harness import catalog
    from harness.progress import progress_on

    return catalog.resolve_model(
        settings["model"] if model is None else model,
        settings["cache_dir"],
        progress_on(),
        pull_missing=pull_missing,
    )


def draft_model_file(settings: Settings) -> Path | None:
    """The file of the draft model in the settings, pulled if needed. Raises CatalogError."""
    named = settings.get("draft_model")
    return None if named is None or not settings["draft"] else model_file(settings, named)


def tier_options(settings: Settings) -> TierOptions:
    """The tier options in the settings; its notes go to standard error."""
    from harness.console import note
    from harness.tiers import TierOptions

    return TierOptions(
        threads=settings["threads"],
        device=settings["device"],
        opencl_mode=settings["opencl_mode"],
        opencl_device=settings["opencl_device"],
        note=note,
    )


def open_session(
    settings: Settings,
    *,
    all_logits: bool = False,
    scores: int = 0,
    chat: bool = False,
    digests: bool = False,
    recording: Recording | None = None,
) -> Session:
    """Open the session the settings describe, with progress on standard error.

    A setting the command does not have keeps its default. With ``scores`` texts can be scored, with
    so many likely tokens listed; with ``digests`` rows of logits are digested.
    """
    from harness.host.session import Session
    from harness.progress import progress_on

    options = session_options(settings, all_logits=all_logits, chat=chat)
    if scores:
        options = replace(options, scores=True, top_log_probabilities=scores)
    options = replace(options, digests=digests)
    if recording is not None:
        options = replace(options, recording=recording)
    return Session.open(model_file(settings), options, progress_on(transient=True))


def session_options(
    settings: Settings, *, all_logits: bool = False, chat: bool = False
) -> SessionOptions:
    """The session options in the settings."""
    from harness.host.options import SessionOptions

    return SessionOptions(
        tier=settings["tier"],
        tier_options=tier_options(settings),
        context=settings["context"],
        kv_dtype=settings["kv_dtype"],
        chunk=settings["chunk"],
        draft=settings.get("draft", 0),
        draft_model=draft_model_file(settings),
        repeat_last_n=settings.get("repeat_last_n", 1),
        all_logits=all_logits,
        memory_budget=settings["memory_budget"],
        prefix_cache=settings["prefix_cache"],
        host_cache=settings["host_cache"],
        state_cache=settings["state_cache"],
        chat=chat,
    )


def sampling_of(settings: Settings, session: Session) -> SamplingParams:
    """The sampling parameters in the settings; penalties look back at most the context."""
    from contract.types import SamplingParams

    return SamplingParams(
        temperature=settings["temperature"],
        top_k=settings["top_k"],
        top_p=settings["top_p"],
        min_p=settings["min_p"],
        repeat_penalty=settings["repeat_penalty"],
        repeat_last_n=min(settings["repeat_last_n"], session.context),
        seed=settings["seed"],
    )
