"""Sampling parameters of a model where a request names none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from operator import attrgetter
from typing import Any

from contract.errors import RequestError
from contract.lazy_dataclass import dataclass
from contract.types import MIN_TOP_P, SamplingParams

GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repeat_penalty": "general.sampling.penalty_repeat",
}
"""Metadata keys of a file that hold sampling parameters of its model."""
NAMES = (*GGUF_KEYS, "max_tokens")
VALUES = attrgetter(*NAMES)
SERVER, MODEL, CATALOG, DEFAULT = "server setting", "model file", "catalog", "default"
NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values for what requests leave out; ``max_tokens`` limits the answer of a conversation.
    ``sources`` say where the values come from that are not everybody's."""

    temperature: float = 0.7
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    max_tokens: int = 4096
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, float]:
        """The values by name."""
        return dict(zip(NAMES, VALUES(self), strict=True))

    @property
    def facts(self) -> dict[str, Any]:
        """The values, and where each comes from."""
        sources = {name: self.sources.get(name, DEFAULT) for name in NAMES}
        return {**self.values, "sources": sources}


def sampling_defaults(
    metadata: Mapping[str, Any],
    catalogued: Mapping[str, float] = NOTHING,
    given: Mapping[str, float] = NOTHING,
) -> SamplingDefaults:
    """The defaults of a model: ``given`` values first, then those of the file's
    ``metadata``, then the ``catalogued`` ones. What no request may say is left out."""
    own = {name: metadata[key] for name, key in GGUF_KEYS.items() if key in metadata}
    defaults = SamplingDefaults()
    for values, origin in ((catalogued, CATALOG), (own, MODEL), (given, SERVER)):
        for name in NAMES:
            if name in values:
                defaults = _with(defaults, name, values[name], origin)
    return defaults


def _with(defaults: SamplingDefaults, name: str, value: Any, source: str) -> SamplingDefaults:
    kind = type(getattr(defaults, name))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return defaults
    try:
        sources = {**defaults.sources, name: source}
        changed = replace(defaults, **{name: kind(value), "sources": sources})
        if name != "max_tokens":
            _validate(changed)
    except (RequestError, OverflowError, ValueError):
        return defaults
    return changed


def _validate(defaults: SamplingDefaults) -> None:
    if not 0 <= defaults.top_p <= 1:
        raise ValueError(defaults.top_p)
    SamplingParams(
        temperature=defaults.temperature,
        top_k=defaults.top_k,
        top_p=max(MIN_TOP_P, defaults.top_p),
        min_p=defaults.min_p,
        repeat_penalty=defaults.repeat_penalty,
    ).validate()
