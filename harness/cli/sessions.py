"""Opens a session from settings."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from harness.console import text_of_name
from harness.settings import Settings, values_for
from harness.settings_table import names_in

if TYPE_CHECKING:
    from contract.types import SamplingParams
    from harness.host.options import Recording, SessionOptions
    from harness.host.session import Session
    from harness.tiers import TierOptions

MODEL_SETTINGS = names_in("model")
TIER_SETTINGS = names_in("device")
ENGINE_SETTINGS = names_in("device", "memory", "speed")
RUN_SETTINGS = names_in("model", "adapters", "device", "sampling", "memory", "speed", "output")
"""The settings of ``run`` and ``chat``."""


def model_file(settings: Settings, model: str | None = None, *, pull_missing: bool = True) -> Path:
    """The file of a model (None: the one in the settings), pulled if needed. Raises CatalogError,
    and ConfigError and TierUnavailable for other settings with which it would be pulled in vain."""
    from harness import catalog
    from harness.progress import progress_on
    from harness.setting_paths import check_paths

    if pull_missing:
        check_paths(settings)
    return catalog.resolve_model(
        settings["model"] if model is None else model,
        settings["cache_dir"],
        progress_on(),
        pull_missing=pull_missing,
        before_pull=partial(_check_tier, settings),
    )


def model_name(name: str | None, path: Path) -> str:
    """The name to call a model by: as the user wrote it, but for a path the file's name."""
    if name is not None:
        with suppress(OSError):
            return text_of_name(path.stem if Path(name).exists() else str(name))
    return text_of_name(path.stem)


def _check_tier(settings: Settings) -> None:
    """Raises TierUnavailable for a tier or device that is not there."""
    from harness.tiers import AUTO, open_tier

    options = replace(tier_options(settings), note=None)
    tier = settings.get("tier", AUTO)
    if tier != AUTO or options.device or options.opencl_device:
        open_tier(tier, options).close()


def draft_model_file(settings: Settings) -> Path | None:
    """The file of the draft model in the settings, pulled if needed. Raises CatalogError."""
    named = settings.get("draft_model")
    return None if named is None or not settings["draft"] else model_file(settings, named)


def tier_options(settings: Settings) -> TierOptions:
    """The tier options in the settings; its notes go to standard error."""
    from harness.console import note
    from harness.tiers import TierOptions

    return TierOptions(note=note, **values_for(TierOptions, settings))


def open_session(
    settings: Settings,
    *,
    all_logits: bool = False,
    scores: int = 0,
    chat: bool = False,
    digests: bool = False,
    experts: bool = False,
    masks: bool = False,
    recording: Recording | None = None,
) -> Session:
    """Open the session the settings describe, with progress on standard error.

    A setting the command does not have keeps its default. With ``scores`` texts can be scored, with
    that many likely tokens listed. With ``digests`` rows of logits are digested, with ``experts``
    those of a mixture can be read, and with ``masks`` answers can be held to a form."""
    from harness.host.session import Session
    from harness.progress import progress_on

    options = session_options(settings, all_logits=all_logits, chat=chat)
    if scores:
        options = replace(options, scores=True, top_log_probabilities=scores)
    options = replace(options, digests=digests, experts=experts, masks=masks)
    if recording is not None:
        options = replace(options, recording=recording)
    return Session.open(model_file(settings), options, progress_on(transient=True))


def session_options(
    settings: Settings, *, all_logits: bool = False, chat: bool = False
) -> SessionOptions:
    """The session options in the settings; penalties look back at one token where the command has
    no such setting."""
    from harness.host.options import SessionOptions

    given = {"repeat_last_n": 1} | values_for(SessionOptions, settings)
    given |= {"tier_options": tier_options(settings), "draft_model": draft_model_file(settings)}
    return SessionOptions(**given, all_logits=all_logits, chat=chat)


def sampling_of(settings: Settings, session: Session) -> SamplingParams:
    """The sampling parameters in the settings; penalties look back at most the context, and a top-p
    of 0 is the least there is."""
    from contract.types import MIN_TOP_P, SamplingParams

    given = values_for(SamplingParams, settings)
    given["repeat_last_n"] = min(given["repeat_last_n"], session.context)
    return SamplingParams(**given | {"top_p": max(MIN_TOP_P, given["top_p"])})
