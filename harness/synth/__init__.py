"""Synthetic models: GGUF files of named sizes with random weights, the same bytes everywhere."""

from harness.synth.spec import (
    ARCHITECTURES,
    GENERATOR_VERSION,
    QUANTS,
    SIZES,
    SynthSpec,
    sized_spec,
)
from harness.synth.write import write_synthetic

__all__ = [
    "ARCHITECTURES",
    "GENERATOR_VERSION",
    "QUANTS",
    "SIZES",
    "SynthSpec",
    "sized_spec",
    "write_synthetic",
]
