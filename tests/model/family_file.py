"""A small file of each family, as dictionaries that a test can change before writing.

Names and shapes of tensors are those of ``harness.synth``, whose files ``tests/peer`` compares with
llama.cpp."""

import re
from ast import literal_eval
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from contract.dtypes import BF16, F16, F32
from harness.synth.metadata import architecture_keys, shared_keys
from harness.synth.plan import plan_tensors
from harness.synth.sizes import sized_spec
from harness.synth.tensors import tensor_data
from reference.model.config import ModelConfig
from reference.model.gguf.writer import HOLE, write_gguf
from reference.model.open import open_model

LAYERS, HIDDEN, VOCAB, FEED_FORWARD = 4, 80, 320, 112
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
EXPERTS, USED, EXPERT_WIDTH, SHARED_WIDTH = 6, 2, 48, 32
STATE, KEY_HEADS, VALUE_HEADS, TAPS = 16, 2, 4, 4
CHANNELS = STATE * (2 * KEY_HEADS + VALUE_HEADS)
MAMBA_HEADS = 8
RANK, QUERY_RANK, ROTATED, UNROTATED, VALUE = 28, 40, 8, 12, 20
WINDOW, FULL_HEAD_DIM, FULL_KV_HEADS, PER_LAYER = 5, 32, 1, 24
LATER = re.compile(r"blk\.[2-9]\.")
LAYER_NORM = "attention.layer_norm_epsilon"
LAYER_NORMED = (
    *("starcoder2", "stablelm", "phi2", "gptneox", "falcon", "nemotron", "olmo", "gpt2"),
    *("starcoder", "orion", "codeshell", "jais2"),
)

SIZES: dict[str, Any] = {
    "layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM,
    "feed_forward": FEED_FORWARD, "vocab": VOCAB, "context": 256,
}  # fmt: skip
MIXTURE: dict[str, Any] = {"experts": {"count": EXPERTS, "used": USED, "width": EXPERT_WIDTH}}
SHARED: dict[str, Any] = {"experts": {**MIXTURE["experts"], "shared_width": SHARED_WIDTH}}
ROUTED: dict[str, Any] = {
    "leading_dense": 1, "experts": {**MIXTURE["experts"], "shared_width": EXPERT_WIDTH},
}  # fmt: skip
LATENT: dict[str, Any] = {
    **ROUTED,
    "latent": {
        "rank": RANK, "query_rank": QUERY_RANK, "unrotated": UNROTATED, "rotated": ROTATED,
        "value": VALUE,
    },
}  # fmt: skip
WIDE: dict[str, Any] = {"experts": {**MIXTURE["experts"], "width": FEED_FORWARD}}
DELTA_NET: dict[str, Any] = {
    "rope_base": 1e5,
    "recurrent": {
        "interval": 2, "state": STATE, "key_heads": KEY_HEADS, "value_heads": VALUE_HEADS,
        "kernel": TAPS,
    },
}  # fmt: skip
KIMI: dict[str, Any] = {
    **LATENT, "tied": True, "latent": {**LATENT["latent"], "query_rank": 0},
    "recurrent": {"interval": 2, "state": STATE, "kernel": TAPS},
}  # fmt: skip
MAMBA: dict[str, Any] = {"mamba": {"interval": 2, "state": STATE, "heads": MAMBA_HEADS}}
BLOCKS: dict[str, Any] = {"mamba": {**MAMBA["mamba"], "interval": 3}}
"""A Mamba-2, a feed forward, one that attends, a feed forward."""
SCALES: dict[str, Any] = {
    "scales": {"embedding": 3.0, "residual": 0.5, "attention": 0.25, "logits": 4.0}
}
CONVOLVING: dict[str, Any] = {"short_conv": {"interval": 2, "kernel": TAPS}}
GEMMA4: dict[str, Any] = {
    "head_dim": FULL_HEAD_DIM, "kv_heads": FULL_KV_HEADS, "rope_base": 1e6,
    "gemma": {
        "window": WINDOW, "period": 2, "head_dim": HEAD_DIM, "kv_heads": KV_HEADS,
        "values_from_keys": True, "output_scale": True,
    },
}  # fmt: skip
PARTS: Mapping[str, dict[str, Any]] = {
    **dict.fromkeys(("granite", "minicpm"), SCALES), "granitemoe": {**SCALES, **SHARED},
    **dict.fromkeys(("minimax-m2", "qwen3moe", "qwen3vlmoe"), MIXTURE),
    **dict.fromkeys(("qwen2moe", "hunyuan-moe"), SHARED), "olmoe": WIDE,
    "qwen35": DELTA_NET, "qwen35moe": {**DELTA_NET, **SHARED}, "qwen3next": {**DELTA_NET, **SHARED},
    "command-r": {"logit_scale": 0.5}, "cohere2": {"logit_scale": 0.5, "window": WINDOW},
    "deepseek2": LATENT, "mistral4": LATENT, "kimi-linear": KIMI, "hy_v3": ROUTED,
    "mellum": MIXTURE, "smallthinker": MIXTURE,
    **dict.fromkeys(("dots1", "glm4moe"), ROUTED), "bailingmoe2": {**ROUTED, "expert_groups": 2},
    "exaone-moe": {**ROUTED, "window": WINDOW}, "afmoe": {**ROUTED, "window": WINDOW},
    "gpt-oss": {**MIXTURE, "window": WINDOW},
    "phi3": {"fused_qkv": False}, "granitehybrid": {**SCALES, **MAMBA},
    "falcon-h1": MAMBA, "nemotron_h": BLOCKS,
    "nemotron_h_moe": {**BLOCKS, **SHARED}, "gptneox": {"parallel": True},
    "lfm2": CONVOLVING, "lfm2moe": {**CONVOLVING, **MIXTURE, "leading_dense": 1},
    "ernie4_5-moe": {**SHARED, "leading_dense": 1},
    "llama4": {"experts": {**ROUTED["experts"], "used": 1, "every": 2}},
    "deepseek": ROUTED, "bailingmoe": {**ROUTED, "leading_dense": 0}, "mamba2": MAMBA,
    "gemma": {"gemma": {"window": 0}}, "gemma2": {"gemma": {"window": WINDOW, "period": 2}},
    "gemma3": {
        "gemma": {"window": WINDOW, "period": 2}, "rope_base": 1e6, "rope_scaling": "linear",
        "rope_factor": 8.0,
    },
    "gemma3n": {
        "gemma": {
            "window": WINDOW, "period": 2, "per_layer_width": 40, "shared_kv_layers": 2,
        },
        "rope_base": 1e6,
    },
    "gemma4": GEMMA4,
}  # fmt: skip
"""Fields of ``harness.synth`` that an architecture has besides SIZES."""
HALF_ROTATES = {"rope.dimension_count": HEAD_DIM // 2}
KEYS = dict.fromkeys(("qwen35", "qwen35moe", "qwen3next"), HALF_ROTATES)
"""Keys that differ from those of ``harness.synth``."""
VARIANTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("llama", WIDE),
    "gemma4 experts": ("gemma4", {"experts": {**MIXTURE["experts"], "fused": True}}),
    "gemma4 per layer": (
        "gemma4",
        {
            "gemma": {"shared_kv_layers": 2, "per_layer_width": PER_LAYER},
            "feed_forward": (FEED_FORWARD,) * 2 + (2 * FEED_FORWARD,) * 2,
        },
    ),
    "qwen3next ssm_in": ("qwen3next", {"recurrent": {"packing": "ssm_in"}}),
    "qwen35 drafts": ("qwen35", {"nextn_layers": 1}),
    **{
        f"{name} qkv": (name, {"fused_qkv": True})
        for name in ("llama", "qwen2", "qwen35", "gemma4")
    },
    "qwen35moe gates and ups": ("qwen35moe", {"experts": {"fused": True}}),
}
"""Structural variants: an architecture, and the fields that make them."""


@dataclass
class FamilyFile:
    """``keys`` are without the architecture's prefix; ``values`` are row-major."""

    architecture: str
    keys: dict[str, Any]
    values: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, name: str, *shape: int) -> None:
        """A tensor of ones."""
        self.values[name] = np.ones(shape, np.float32)

    def stack(self, name: str, *parts: str, axis: int = 0) -> None:
        """Tensor ``name`` from ``parts``, which go, joined along ``axis``."""
        self.values[name] = np.concatenate([self.values.pop(part) for part in parts], axis)

    @property
    def metadata(self) -> dict[str, Any]:
        """All keys, as the file has them."""
        return {
            "general.architecture": self.architecture,
            "tokenizer.ggml.tokens": [f"token {n}" for n in range(VOCAB)],
            **{self._whole(key): value for key, value in self.keys.items()},
        }

    def _whole(self, key: str) -> str:
        return key if key.startswith("xielu.") else f"{self.architecture}.{key}"

    def write(
        self, path: Path, changed: Mapping[str, Any] = MappingProxyType({}), *, bare: bool = False
    ) -> Path:
        """The file with ``changed`` metadata, F32 but for values of another type; uint16 are BF16.
        A ``bare`` one has holes for values."""
        stored = {np.dtype("f4"): F32, np.dtype("f2"): F16, np.dtype("u2"): BF16}
        tensors = {
            name: (stored[value.dtype], value.shape, HOLE if bare else np.ascontiguousarray(value))
            for name, value in self.values.items()
        }
        write_gguf(path, {**self.metadata, **changed}, tensors)
        return path


def family_file(name: str, **keys: Any) -> FamilyFile:
    """The file of an architecture with its usual parts, or of a variant; ``keys`` change or add
    metadata, with ``__`` for a point."""
    return with_keys(name, {key.replace("__", "."): value for key, value in keys.items()})


def with_keys(name: str, keys: Mapping[str, Any]) -> FamilyFile:
    """The same with keys set, or removed where the value is None."""
    architecture, more = VARIANTS.get(name, (name, {}))
    made, values = _made(architecture, repr(sorted(more.items())))
    file = FamilyFile(architecture, dict(made), dict(values))
    for key, value in keys.items():
        file.keys.pop(key, None)
        if value is not None:
            file.keys[key] = value
    return file


@lru_cache(maxsize=256)
def _made(architecture: str, more: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Keys and tensors, which a test copies before it changes them."""
    fields = {**SIZES, **PARTS.get(architecture, {})}
    for name, value in literal_eval(more):
        group = fields.get(name)
        fields[name] = {**group, **value} if isinstance(group, dict) else value
    spec = sized_spec("tiny", architecture=architecture, **fields)
    values = {
        tensor.name: np.concatenate([part.ravel() for part in tensor_data(spec, tensor)])
        .view("<f4").reshape(tensor.shape)
        for tensor in plan_tensors(spec)
    }  # fmt: skip
    return {**architecture_keys(spec), **shared_keys(spec), **KEYS.get(architecture, {})}, values


def config_of(file: FamilyFile, folder: Path) -> ModelConfig:
    """The configuration that is read from ``file``, written to ``folder``: no value decides it, and
    no tensor behind the second layer."""
    kept = {name: value for name, value in file.values.items() if not LATER.match(name)}
    path = replace(file, values=kept).write(folder / "model.gguf", bare=True)
    with closing(open_model(path)) as model:
        return model.config
