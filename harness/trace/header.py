"""What a trace says of where it was recorded, and of the models in it."""

from __future__ import annotations

from typing import Any

from contract.arithmetic import ARITHMETIC_VERSION
from contract.tier import Tier
from harness.digest import file_digest
from harness.trace.framing import TraceError, TraceReader
from harness.trace.records import ModelRecord
from reference.limits import Limits
from reference.model.open import Model


def trace_header(tier: Tier) -> dict[str, Any]:
    """The header of a trace on ``tier``."""
    info = tier.info
    return {"arithmetic": ARITHMETIC_VERSION, "device": info.device, "tier": info.name}


def check_header(reader: TraceReader) -> None:
    """Raise TraceError for a trace of another arithmetic."""
    version = reader.header.get("arithmetic")
    if version != ARITHMETIC_VERSION:
        raise TraceError(
            f"{reader.path}: was recorded with arithmetic version {version}, this build has "
            f"{ARITHMETIC_VERSION}; record the run again"
        )


def traced_model(model: Model, limits: Limits) -> ModelRecord:
    """What a trace says of ``model``, whose runner has ``limits``. Reads the whole file."""
    sizes = {name: getattr(limits, name) for name in limits.__slots__}
    sizes["kv_dtype"] = limits.kv_dtype.name
    return ModelRecord(str(model.file.path.absolute()), _digests(model), sizes)


def check_model(traced: ModelRecord, model: Model) -> None:
    """Raise TraceError unless ``model`` is the traced one. Reads the whole file."""
    if traced.sha256 != _digests(model):
        raise TraceError(
            f"the trace was recorded with another model than {model.file.path}; "
            "give the right one with --model"
        )


def _digests(model: Model) -> tuple[str, ...]:
    return tuple(file_digest(shard.path) for shard in model.file.shards)
