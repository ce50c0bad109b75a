"""Synthetic models: GGUF files of named sizes with random weights, the same bytes on every
machine."""

from harness.synth.groups import ExpertSpec, Gemma, Recurrent
from harness.synth.sizes import SIZES, size_names, sized_spec
from harness.synth.spec import (
    ARCHITECTURES,
    GENERATOR_VERSION,
    QUANTS,
    SynthSpec,
    fields_of,
    spec_of,
)
from harness.synth.write import write_synthetic

__all__ = [
    "ARCHITECTURES",
    "GENERATOR_VERSION",
    "QUANTS",
    "SIZES",
    "ExpertSpec",
    "Gemma",
    "Recurrent",
    "SynthSpec",
    "fields_of",
    "size_names",
    "sized_spec",
    "spec_of",
    "write_synthetic",
]
