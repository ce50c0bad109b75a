"""Descriptions of models as Ollama's clients read them."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from harness.serve.answers import Json
from harness.serve.model import ServedModel

FOREVER = "2318-01-01T00:00:00Z"
"""The reported unload time of a model that stays loaded."""


def details_of(model: ServedModel) -> Json:
    """A model's file format, family, size and quantization."""
    family = str(model.model.file.metadata.get("general.architecture", ""))
    count = sum(math.prod(tensor.shape) for tensor in model.model.file.tensors.values())
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M",
        "quantization_level": _max_used(model),
    }


def _max_used(model: ServedModel) -> str:
    """The storage type with the most bytes in a file."""
    sizes: dict[str, int] = {}
    for tensor in model.model.file.tensors.values():
        name = tensor.ggml_type.name
        sizes[name] = sizes.get(name, 0) + tensor.nbytes
    return max(sizes, key=lambda name: sizes[name]).upper()


def listed(model: ServedModel) -> Json:
    """A model in the list of ``/api/tags``."""
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": _time(model.created),
        "size": model.model.file.size,
        "digest": model.fingerprint,
        "details": details_of(model),
    }


def running(model: ServedModel) -> Json:
    """A model in the list of ``/api/ps``."""
    here = listed(model)
    del here["modified_at"]
    memory = model.plan.total
    on_device = 0 if model.tier == "cpu" else memory
    more = {"size": memory, "size_vram": on_device, "expires_at": FOREVER}
    return here | more | {"context_length": model.context}


def shown(model: ServedModel) -> Json:
    """A model as ``/api/show`` describes it."""
    metadata = model.model.file.metadata
    architecture = str(metadata.get("general.architecture", ""))
    info = {
        name: value
        for name, value in metadata.items()
        if isinstance(value, bool | int | float | str) and len(str(value)) < 1000
    }
    info[f"{architecture}.context_length"] = model.model.config.context
    sampling = model.sampling.values
    return {
        "modelfile": f"FROM {model.name}",
        "parameters": "\n".join(f"{name} {value:g}" for name, value in sampling.items()),
        "template": "" if model.template is None else model.template.text,
        "details": details_of(model),
        "model_info": info,
        "capabilities": capabilities(model),
        "modified_at": _time(model.created),
    }


def capabilities(model: ServedModel) -> list[str]:
    """Ollama's names of a model's capabilities."""
    found = ["completion"]
    if model.dialect.calls is not None:
        found.append("tools")
    if model.dialect.reasoning is not None:
        found.append("thinking")
    return found


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
