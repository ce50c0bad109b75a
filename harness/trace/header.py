"""What a trace says of itself: the model, the arithmetic, the sizes, and where it was recorded."""

from __future__ import annotations

from typing import Any

from contract.arithmetic import ARITHMETIC_VERSION
from contract.tier import Tier
from harness.digest import file_digest
from harness.trace.framing import TraceError, TraceReader
from reference.limits import Limits
from reference.model.open import Model


def trace_header(model: Model, tier: Tier, limits: Limits) -> dict[str, Any]:
    """The header of a trace of ``model`` on ``tier``. Reads the whole model file."""
    sizes = {name: getattr(limits, name) for name in limits.__slots__}
    return {
        "arithmetic": ARITHMETIC_VERSION,
        "device": tier.info.device,
        "limits": sizes | {"kv_dtype": limits.kv_dtype.name},
        "model": str(model.file.path.absolute()),
        "model_sha256": model_digests(model),
        "tier": tier.info.name,
    }


def model_digests(model: Model) -> list[str]:
    """SHA-256 of every file of a model, hex."""
    return [file_digest(shard.path) for shard in model.file.shards]


def check_header(reader: TraceReader, model: Model) -> None:
    """Raise TraceError for a trace of another arithmetic or another model."""
    version = reader.header.get("arithmetic")
    if version != ARITHMETIC_VERSION:
        raise TraceError(
            f"{reader.path}: was recorded with arithmetic version {version}, this build has "
            f"{ARITHMETIC_VERSION}; record the run again"
        )
    if reader.header.get("model_sha256") != model_digests(model):
        raise TraceError(
            f"{reader.path}: was recorded with another model than {model.file.path}; "
            "give the right one with --model"
        )
