"""One small model of every architecture and structural variant, for the tests of whole models.

A new family or variant goes in ``families.toml``: the tests against llama.cpp and float64 and the
digest of the generated files take it from here."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TABLE = tomllib.loads(Path(__file__).with_name("families.toml").read_text("utf-8"))
_PARTS = {part: _TABLE[part] for part in ("experts", "latent", "recurrent")}
SMALL, DELTA_NET = _TABLE["small"], _PARTS["recurrent"]
HYBRID = {**SMALL, "layers": 4, "recurrent": DELTA_NET}


def _models(group: str, base: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Fields of ``harness.synth.sized_spec("tiny", ...)`` for every row of a group, by name."""
    return {
        name: {"architecture": architecture, **base, **{k: _field(k, v) for k, v in row.items()}}
        for architecture, rows in _TABLE[group].items()
        for name, row in rows.items()
    }


def _field(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {**_PARTS.get(name, {}), **value}
    return None if value == "none" else tuple(value) if isinstance(value, list) else value


DENSE, MIXTURES, HYBRIDS, GEMMAS = (
    _models(group, SMALL) for group in ("dense", "mixtures", "hybrids", "gemmas")
)
FAMILIES: Mapping[str, Mapping[str, Any]] = {**DENSE, **MIXTURES, **HYBRIDS, **GEMMAS}
"""All of them; a name starts with the architecture."""
DEEP = _models("deep", {})
"""Models whose depth changes a formula (but for Gemma and DeepSeek in llama.cpp alone), like
FAMILIES; for tests of logits only."""
EACH_KIND = (
    *("llama", "phi3", "gemma4", "mistral3", "qwen3moe", "gpt-oss-experts", "glm4moe-experts"),
    *("deepseek2", "qwen35", "qwen3next", "lfm2", "granitehybrid", "nemotron_h_moe"),
)
"""A model of each kind of layer. What tells others apart are formulas and names of keys, for which
``tests/model`` has every entry."""


def without_variants() -> tuple[str, ...]:
    """The first name of each architecture, with experts and without."""
    first: dict[tuple[object, bool], str] = {}
    for name, fields in FAMILIES.items():
        first.setdefault((fields["architecture"], bool(fields.get("experts"))), name)
    return tuple(first.values())
