"""The float64 oracle of a file, by its architecture."""

from pathlib import Path

from tests.peer.float64_apertus import Float64Apertus
from tests.peer.float64_cohere import Float64Cohere
from tests.peer.float64_dense import Float64Dense
from tests.peer.float64_falcon_h1 import Float64FalconH1
from tests.peer.float64_gemma import Float64Gemma
from tests.peer.float64_gemma3n import Float64Gemma3n
from tests.peer.float64_gpt_oss import Float64GptOss
from tests.peer.float64_granite_hybrid import Float64GraniteHybrid, Float64Mamba2
from tests.peer.float64_hybrid import Float64Hybrid
from tests.peer.float64_kimi import Float64Kimi
from tests.peer.float64_latent import Float64Latent
from tests.peer.float64_layer_norms import Float64LayerNorms
from tests.peer.float64_lfm2 import Float64Lfm2, Float64Lfm2Moe
from tests.peer.float64_llama import Float64Llama, Reader
from tests.peer.float64_llama4 import Float64Llama4
from tests.peer.float64_mistral import Float64Mistral
from tests.peer.float64_mixture import (
    Float64Ernie,
    Float64Grouped,
    Float64Mixture,
    Float64Routed,
    Float64Windowed,
)
from tests.peer.float64_nemotron import Float64Nemotron

ORACLES = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "qwen3moe", "seed_oss", "ernie4_5"), Float64Llama),
    **dict.fromkeys(("qwen2vl", "qwen3vl", "qwen3vlmoe"), Float64Llama),
    **dict.fromkeys(("qwen2moe", "olmoe", "hunyuan-dense", "hunyuan-moe"), Float64Llama),
    **dict.fromkeys(("smollm3", "granite", "glm4", "phi3", "olmo2"), Float64Dense),
    **dict.fromkeys(("exaone4", "granitemoe", "internlm2", "minicpm"), Float64Dense),
    **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next"), Float64Hybrid),
    **dict.fromkeys(("arcee", "baichuan", "chatglm", "exaone", "xverse"), Float64Dense),
    **dict.fromkeys(("deepseek", "bailingmoe"), Float64Dense),
    **dict.fromkeys(("qwen", "pangu-embedded"), Float64Llama), "maincoder": Float64Dense,
    "llama4": Float64Llama4,
    "kimi-linear": Float64Kimi,
    "apertus": Float64Apertus,
    "mistral3": Float64Mistral, **dict.fromkeys(("command-r", "cohere2"), Float64Cohere),
    **dict.fromkeys(("glm4moe", "dots1", "minimax-m2"), Float64Mixture),
    **dict.fromkeys(("deepseek2", "mistral4"), Float64Latent),
    **dict.fromkeys(("gpt2", "starcoder", "codeshell", "jais2"), Float64LayerNorms),
    "hy_v3": Float64Grouped,
    **dict.fromkeys(("mellum", "smallthinker"), Float64Windowed),
    **dict.fromkeys(("starcoder2", "stablelm", "phi2", "gptneox"), Float64LayerNorms),
    **dict.fromkeys(("falcon", "nemotron", "olmo", "orion"), Float64LayerNorms),
    "mamba2": Float64Mamba2,
    "ernie4_5-moe": Float64Ernie,
    **dict.fromkeys(("bailingmoe2", "exaone-moe", "afmoe"), Float64Routed),
    "lfm2": Float64Lfm2, "lfm2moe": Float64Lfm2Moe, "granitehybrid": Float64GraniteHybrid,
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), Float64Nemotron),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma4"), Float64Gemma),
    "gemma3n": Float64Gemma3n, "gpt-oss": Float64GptOss, "falcon-h1": Float64FalconH1,
}  # fmt: skip


def float64_model(path: Path) -> Float64Llama:
    """The oracle that computes this file."""
    architecture = Reader(path).fields["general.architecture"].contents()
    return ORACLES[architecture](path)
