"""Model families by ``general.architecture``: each module turns a file into an IR graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module

from contract.ir.graph import Graph
from reference.limits import Limits
from reference.model.config import ModelConfig
from reference.model.families.decoder import Decoder
from reference.model.families.emitter import CLAMPED, GELU, RELU
from reference.model.families.tensors import ModelTensors

Family = Callable[[ModelConfig, ModelTensors, Limits], Graph]


def _later(module: str, name: str = "build") -> Family:
    """The family ``name`` of a module of this package that is loaded for its first model."""

    def build(config: ModelConfig, tensors: ModelTensors, limits: Limits) -> Graph:
        family: Family = getattr(import_module(f"{__name__}.{module}"), name)
        return family(config, tensors, limits)

    return build


FAMILIES: Mapping[str, Family] = {
    "llama": Decoder().build,
    "llama4": Decoder().build,
    "apertus": Decoder(query_key_norm=True).build,
    "mistral3": Decoder().build,
    **dict.fromkeys(("baichuan", "bailingmoe", "deepseek", "exaone", "xverse"), Decoder().build),
    "arcee": Decoder(activation=RELU, gates=False).build,
    "smollm3": Decoder().build,
    "granite": Decoder().build,
    "granitemoe": Decoder().build,
    "internlm2": Decoder().build,
    "minicpm": Decoder().build,
    "ernie4_5": Decoder().build,
    "ernie4_5-moe": Decoder().build,
    "exaone4": Decoder(query_key_norm=True, pre_norms=False, post_norms=True).build,
    "glm4": Decoder(post_norms=True, fused_gates=True).build,
    **dict.fromkeys(("phi3", "chatglm"), Decoder(fused_gates=True).build),
    **dict.fromkeys(("deepseek2", "mistral4"), Decoder().build),
    "glm4moe": Decoder(query_key_norm=None, feed_forward_norm="post_attention_norm").build,
    "dots1": Decoder(query_key_norm=True).build,
    "bailingmoe2": Decoder(query_key_norm=True).build,
    **dict.fromkeys(("exaone-moe", "hy_v3", "mellum"), Decoder(query_key_norm=True).build),
    "smallthinker": _later("smallthinker"),
    "afmoe": Decoder(query_key_norm=True, gated=True, post_norms=True).build,
    "minimax-m2": Decoder(whole_norms=True).build,
    "olmo2": Decoder(whole_norms=True, pre_norms=False, post_norms=True).build,
    "seed_oss": Decoder(feed_forward_norm="post_attention_norm").build,
    **dict.fromkeys(("qwen", "qwen2", "pangu-embedded"), Decoder().build),
    "qwen3": Decoder(query_key_norm=True).build,
    "qwen3moe": Decoder(query_key_norm=True).build,
    "qwen2vl": Decoder().build,
    "qwen3vl": Decoder(query_key_norm=True).build,
    "qwen3vlmoe": Decoder(query_key_norm=True).build,
    "qwen2moe": Decoder().build,
    "olmoe": Decoder(whole_norms=True).build,
    "qwen35": _later("hybrid", "QWEN35"),
    "qwen35moe": _later("hybrid", "QWEN35"),
    "qwen3next": _later("hybrid", "QWEN3NEXT"),
    "kimi-linear": _later("hybrid", "KIMI_LINEAR"),
    "lfm2": _later("hybrid", "LFM2"),
    "lfm2moe": _later("hybrid", "LFM2"),
    "granitehybrid": _later("hybrid", "GRANITE_HYBRID"),
    "mamba2": _later("mamba"),
    "falcon-h1": _later("hybrid", "FALCON_H1"),
    "nemotron_h": _later("hybrid", "NEMOTRON"),
    "nemotron_h_moe": _later("hybrid", "NEMOTRON"),
    **dict.fromkeys(("hunyuan-dense", "hunyuan-moe", "maincoder"), Decoder(late_norms=True).build),
    "gemma": Decoder(activation=GELU).build,
    "gemma2": Decoder(post_norms=True, activation=GELU).build,
    "gemma3": Decoder(query_key_norm=True, post_norms=True, activation=GELU).build,
    "gemma3n": _later("gemma3n"),
    "gemma4": _later("gemma4"),
    "gpt-oss": Decoder(feed_forward_norm="post_attention_norm", activation=CLAMPED).build,
    "command-r": _later("layer_norms", "COHERE"),
    "cohere2": _later("layer_norms", "COHERE"),
    **dict.fromkeys(("starcoder2", "phi2", "gptneox", "falcon"), _later("layer_norms", "UNGATED")),
    **dict.fromkeys(("gpt2", "starcoder", "codeshell"), _later("layer_norms", "UNGATED")),
    **dict.fromkeys(("nemotron", "jais2"), _later("layer_norms", "SQUARED")),
    **dict.fromkeys(("stablelm", "olmo", "orion"), _later("layer_norms", "GATED")),
}


def build_graph(config: ModelConfig, tensors: ModelTensors, limits: Limits) -> Graph:
    """The graph of the model's forward pass.

    Tensors of the draft blocks after the last layer are ignored: ``build_draft_block`` reads them.
    Raises ModelFileError for a missing tensor or a wrong shape, UnsupportedModel for a tensor that
    no formula reads."""
    graph = FAMILIES[config.architecture](config, tensors, limits)
    drafting = tuple(f"blk.{block}." for block in range(config.layers, config.blocks))
    tensors.reject_unused(config.architecture, drafting)
    return graph
