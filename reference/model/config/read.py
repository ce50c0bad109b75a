"""Reads a ModelConfig from a file's metadata, with one reader per architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from contract.errors import UnsupportedModel
from reference.model.config import dense, gemma, hybrid, layer_norms, mixtures
from reference.model.config.common import read_common, require_feed_forward
from reference.model.config.experts import (
    read_chosen_by_bias,
    read_experts,
    read_glm_experts,
    read_mixtral_experts,
    read_plain_weights,
)
from reference.model.config.keys import Keys
from reference.model.config.latent import read_deepseek2, read_kimi_linear, read_mistral4
from reference.model.config.llama4 import read_llama4
from reference.model.config.records import Experts, ModelConfig
from reference.model.config.rope import check_text_sections, read_llama_rope
from reference.model.config.unread import refuse_unread
from reference.model.config.vision import read_qwen_vl, read_qwen_vl_experts
from reference.model.gguf.file import GgufFile

Reader = Callable[[Keys], ModelConfig]
EAGLE, DFLASH = "eagle3", "dflash"
"""The architectures of heads, which ``reference.model.heads`` reads."""
NO_MODELS: Mapping[str, tuple[str, str]] = {
    "mmproj": (
        "this is a projector of images or sound (mmproj)",
        "give the GGUF file of its language model; only text is understood",
    ),
    "imatrix": (
        "this is an importance matrix, which programs that quantize read",
        "give the GGUF file of the model",
    ),
    "adapter": ("this is an adapter", "give the GGUF file of its model, and this file with --lora"),
    "head": (
        "this is a head, which drafts for a model",
        "give the GGUF file of its model, and this file with --draft-model",
    ),
}
"""Kinds of GGUF files that are no language models, and what to do instead."""
KINDS: Mapping[str, str] = {"clip": "mmproj", EAGLE: "head", DFLASH: "head"}
"""Architectures of such files."""


def read_config(file: GgufFile) -> ModelConfig:
    """The hyperparameters of ``file``; errors name the key, its value and what it must be. Raises
    UnsupportedModel for an unknown architecture, ModelFileError for everything else."""
    architecture = file.require("general.architecture", str)
    kind = KINDS.get(architecture, file.get("general.type", str, ""))
    if kind in NO_MODELS:
        raise UnsupportedModel(file.path, "key general.type", *NO_MODELS[kind])
    reader = READERS.get(architecture)
    if reader is None:
        raise UnsupportedModel(
            file.path,
            "key general.architecture",
            f"is {architecture!r}",
            f"supported are {', '.join(READERS)}",
        )
    keys = Keys(file, architecture)
    config = reader(keys)
    refuse_unread(keys)
    return config


def _llama(keys: Keys) -> ModelConfig:
    config = require_feed_forward(keys, read_common(keys, read_llama_rope))
    return replace(config, experts=read_mixtral_experts(keys, config))


def _mixture(experts: Callable[[Keys, ModelConfig], Experts]) -> Reader:
    """The reader of a mixture that differs from others in its ``experts`` alone."""

    def read(keys: Keys) -> ModelConfig:
        config = read_common(keys)
        return replace(config, experts=experts(keys, config))

    return read


def _olmoe(keys: Keys) -> ModelConfig:
    config = require_feed_forward(keys, read_common(keys))
    return replace(config, experts=read_plain_weights(keys, read_mixtral_experts(keys, config)))


def _qwen2_experts(keys: Keys, config: ModelConfig) -> Experts:
    return read_plain_weights(keys, read_experts(keys, config, shared=True))


def _hunyuan_experts(keys: Keys, config: ModelConfig) -> Experts:
    return replace(read_experts(keys, config, shared=True), shared_gate=False)


def _qwen35(keys: Keys) -> ModelConfig:
    config = require_feed_forward(keys, read_common(keys))
    check_text_sections(keys, config.ropes[0].dims)
    return replace(config, delta_net=hybrid.read_delta_net(keys, config))


def _qwen35moe(keys: Keys) -> ModelConfig:
    config = _qwen3next(keys)
    check_text_sections(keys, config.ropes[0].dims)
    return config


def _qwen3next(keys: Keys) -> ModelConfig:
    config = read_common(keys)
    return replace(
        config,
        experts=read_experts(keys, config, shared=True),
        delta_net=hybrid.read_delta_net(keys, config),
    )


READERS: Mapping[str, Reader] = {
    "llama": _llama,
    "llama4": read_llama4,
    "apertus": dense.read_apertus,
    "mistral3": dense.read_mistral3,
    "smollm3": dense.read_smollm3,
    "granite": dense.read_granite,
    "granitemoe": dense.read_granite,
    "internlm2": _llama,
    **dict.fromkeys(("arcee", "xverse", "maincoder"), dense.read_llama_dense),
    "baichuan": dense.read_baichuan,
    "exaone": dense.read_exaone,
    "chatglm": dense.read_glm4,
    **dict.fromkeys(("deepseek", "bailingmoe"), mixtures.read_soft_routed),
    "minicpm": dense.read_minicpm,
    "ernie4_5": _llama,
    "exaone4": dense.read_exaone4,
    "glm4": dense.read_glm4,
    "deepseek2": read_deepseek2,
    "mistral4": read_mistral4,
    "glm4moe": _mixture(read_glm_experts),
    "dots1": _mixture(read_glm_experts),
    "ernie4_5-moe": mixtures.read_ernie_moe,
    "bailingmoe2": mixtures.read_bailingmoe2,
    "exaone-moe": mixtures.read_exaone_moe,
    "hy_v3": mixtures.read_hy_v3,
    "mellum": mixtures.read_mellum,
    "smallthinker": mixtures.read_smallthinker,
    "afmoe": mixtures.read_afmoe,
    "minimax-m2": _mixture(read_chosen_by_bias),
    "phi3": dense.read_phi3,
    "olmo2": dense.read_olmo2,
    "seed_oss": dense.read_dense,
    "qwen": dense.read_qwen,
    **dict.fromkeys(("qwen2", "pangu-embedded"), dense.read_dense),
    "qwen3": dense.read_dense,
    "qwen3moe": _mixture(read_experts),
    "qwen2vl": read_qwen_vl,
    "qwen3vl": read_qwen_vl,
    "qwen3vlmoe": read_qwen_vl_experts,
    "qwen2moe": _mixture(_qwen2_experts),
    "olmoe": _olmoe,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35moe,
    "qwen3next": _qwen3next,
    "kimi-linear": read_kimi_linear,
    "lfm2": hybrid.read_lfm2,
    "lfm2moe": hybrid.read_lfm2moe,
    "granitehybrid": hybrid.read_granite_hybrid,
    "falcon-h1": hybrid.read_falcon_h1,
    "mamba2": hybrid.read_mamba2,
    "nemotron_h": hybrid.read_nemotron_h,
    "nemotron_h_moe": hybrid.read_nemotron_h_moe,
    "hunyuan-dense": dense.read_dense,
    "hunyuan-moe": _mixture(_hunyuan_experts),
    "gemma": gemma.read_gemma,
    "gemma2": gemma.read_gemma2,
    "gemma3": gemma.read_gemma3,
    "gemma3n": gemma.read_gemma3n,
    "gemma4": gemma.read_gemma4,
    "gpt-oss": mixtures.read_gpt_oss,
    "command-r": layer_norms.read_command_r,
    "cohere2": layer_norms.read_cohere2,
    **dict.fromkeys(("starcoder2", "phi2", "falcon", "nemotron"), layer_norms.read_layer_normed),
    **dict.fromkeys(("orion", "codeshell", "jais2"), layer_norms.read_layer_normed),
    **dict.fromkeys(("gpt2", "starcoder"), layer_norms.read_gpt2),
    "olmo": layer_norms.read_olmo,
    "stablelm": layer_norms.read_stablelm,
    "gptneox": layer_norms.read_gptneox,
}
