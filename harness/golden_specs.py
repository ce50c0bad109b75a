"""The random-weight models of ``goldens/synthetic.json``, from the table ``golden_specs.toml``."""

import tomllib
from pathlib import Path
from typing import Any

from harness.synth.sizes import sized_spec


def _field(value: Any) -> Any:
    """A field's value as specifications have it."""
    if value == "none":
        return None
    return tuple(value) if isinstance(value, list) else value


SYNTHETIC_SPECS = tuple(
    sized_spec(
        "tiny",
        architecture=architecture,
        seed=seed,
        **{name: _field(value) for name, value in fields.items()},
    )
    for architecture, variants in tomllib.loads(
        Path(__file__).with_suffix(".toml").read_text("utf-8")
    ).items()
    for seed, fields in enumerate(variants)
)
