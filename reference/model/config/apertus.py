"""Reads the metadata keys of Apertus: xIELU, whose sizes are those of a layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from reference.exact.elementary import softplus
from reference.model.config.common import read_common, require_feed_forward
from reference.model.config.keys import Keys
from reference.model.config.records import ModelConfig
from reference.model.config.rope import read_divided_rope

MAX_SIZE = 1e4
"""Most of any of them, in size; those of published models are near 1."""


def read_apertus(keys: Keys) -> ModelConfig:
    """Apertus: halves rotate; a feed forward without gates."""
    config = require_feed_forward(keys, read_common(keys, read_divided_rope))
    p, n, b, e = (
        _per_layer(keys, f"xielu.{name}", config.layers)
        for name in ("alpha_p", "alpha_n", "beta", "eps")
    )
    # The file has the first two before the function that keeps them positive.
    rows = np.stack([softplus(p), b + softplus(n), b, e], axis=1)
    return replace(config, xielu=tuple(tuple(row) for row in rows.tolist()))


def _per_layer(keys: Keys, name: str, layers: int) -> np.ndarray:
    """f32[layers] of a number or an array; these keys are without an architecture's name. Raises
    ModelFileError."""
    value = keys.file.metadata.get(name)
    if not isinstance(value, np.ndarray):
        value = np.array([keys.file.require(name, float)] * layers)
    fits = value.shape == (layers,) and np.issubdtype(value.dtype, np.floating)
    if not fits or not (np.abs(value) <= MAX_SIZE).all():
        raise keys.file_error(name, f"must be {layers} numbers up to {MAX_SIZE:g}")
    return value.astype(np.float32)
