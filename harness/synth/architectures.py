"""The architectures of synthetic models, by what they have."""

from __future__ import annotations

BIASED = ("starcoder2", "phi2", "gptneox", "gpt2", "starcoder", "codeshell", "jais2")
"""Architectures in which every matrix of a layer has a bias."""
POSITIONED = ("gpt2", "starcoder")
"""Architectures with embeddings of positions."""
HALF_ROTATES = ("glm4", "glm4moe", "minimax-m2", "bailingmoe2", "chatglm", "nemotron")
QUARTER_ROTATES = ("stablelm", "phi2", "gptneox")
LAYER_NORMED = (*BIASED, "stablelm", "falcon", "nemotron", "orion")
"""Architectures whose norms subtract the mean and have biases."""
DENSE = (
    "llama", "mistral3", "smollm3", "granite", "glm4", "phi3", "olmo2", "qwen2", "qwen3",
    "command-r", "cohere2", "seed_oss", "exaone4", "ernie4_5",
    "hunyuan-dense", "internlm2", "minicpm", "qwen2vl", "qwen3vl", "apertus",
    "arcee", "baichuan", "chatglm", "exaone", "olmo", *LAYER_NORMED, "qwen", "xverse",
    "pangu-embedded", "maincoder",
)  # fmt: skip
WITH_EXPERTS = (
    "qwen3moe", "qwen35moe", "qwen3next", "gpt-oss", "lfm2moe", "glm4moe", "granitemoe",
    "minimax-m2", "qwen2moe", "olmoe", "nemotron_h_moe",
    "hunyuan-moe", "dots1", "qwen3vlmoe", "bailingmoe2", "exaone-moe", "afmoe",
    "llama4", "ernie4_5-moe", "deepseek", "bailingmoe",
    "hy_v3", "mellum", "smallthinker", "kimi-linear",
)  # fmt: skip
LLAMA4 = "llama4"
KIMI_LINEAR = "kimi-linear"
LATENTS = ("deepseek2", "mistral4", KIMI_LINEAR)
"""Architectures whose positions have one row for all heads."""
MAYBE_EXPERTS = ("llama", "granitehybrid", "gemma4", *LATENTS)
ROUTED = ("bailingmoe2", "exaone-moe", "afmoe")
SOFT_ROUTED = ("deepseek", "bailingmoe")
"""Architectures whose experts a softmax weights, beside shared ones."""
LEADING = (
    *("lfm2moe", "glm4moe", "dots1", *LATENTS, "ernie4_5-moe", *ROUTED, "deepseek", "hy_v3"),
)
"""Architectures whose first layers may have no experts."""
COUNTED = ("glm4moe", "dots1", *LATENTS, *ROUTED, *SOFT_ROUTED)
"""Architectures whose files count shared experts, each as wide as the others."""
WITH_DRAFT_BLOCKS = ("qwen35", "qwen35moe", "qwen3next", "glm4moe", "deepseek2")
CONVOLVING = ("lfm2", "lfm2moe")
HYBRIDS = ("qwen35", "qwen35moe", "qwen3next")
"""Qwen's architectures of delta-net layers with full attention in every few layers."""
COHERES = ("command-r", "cohere2")
HEAD_NORMED = ("glm4moe", "stablelm", "command-r")
"""Architectures of which some models have norms of heads."""
NEMOTRONS = ("nemotron_h", "nemotron_h_moe")
FALCON_H1, MAMBA2 = "falcon-h1", "mamba2"
MAMBAS = ("granitehybrid", *NEMOTRONS, FALCON_H1, MAMBA2)
DIVIDED = ("llama", "llama4", "apertus", "exaone", "exaone4", "exaone-moe", "hy_v3")
"""Architectures whose frequencies may have divisors."""
GRANITES = ("granite", "granitemoe", "granitehybrid", "minicpm")
GEMMAS = ("gemma", "gemma2", "gemma3", "gemma3n", "gemma4")
GEMMA3N = "gemma3n"
ARCHITECTURES = (
    *DENSE, "qwen3moe", "gpt-oss", "deepseek2", "glm4moe", "granitemoe", "minimax-m2", "qwen2moe",
    "olmoe", "hunyuan-moe", "dots1", "qwen3vlmoe", "llama4", *ROUTED, "ernie4_5-moe", *SOFT_ROUTED,
    "mistral4", "hy_v3", "mellum", "smallthinker", KIMI_LINEAR,
    *HYBRIDS, *CONVOLVING, *MAMBAS, *GEMMAS,
)  # fmt: skip
