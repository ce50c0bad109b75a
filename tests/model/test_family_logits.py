"""Every architecture and variant against its formulas in float64."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.golden_specs import SYNTHETIC_SPECS
from tests.families_table import DEEP, FAMILIES
from tests.long_cases import long_except
from tests.peer.float64_latent import Float64Latent
from tests.peer.float64_llama import Float64Llama, mean_kl, silu
from tests.peer.float64_model import float64_model
from tests.peer.our_engine import exact_logits, our_logits

POSITIONS = 72
CHUNK = 48
"""Chunks of 48 do not line up with the attention tiles of 64; pages are 16."""
TOLERANCE = 1e-4
"""Of logits with attention in binary64: no formula hides behind the rounding of rule R6."""
DIVERGENCE = 1e-5
"""Nats, with attention as it is."""
ROUTED_DIVERGENCE = 1e-4
"""The same where a rounding may choose another expert."""

LATENT_DIVERGENCE = 2e-5
"""Queries of 576 channels have 9 bits."""
NOT_IN_FLOAT64 = ("llama-linear", "llama-yarn")
"""The float64 forward pass of these has no rotary scaling."""
NAMES = [name for name in (*FAMILIES, *DEEP) if name not in NOT_IN_FLOAT64]
TOKENS = np.random.default_rng(7).integers(0, 256, POSITIONS).tolist()


@pytest.fixture
def path_of(synthetic_model) -> Callable[[str], Path]:
    """The binary32 file of a table entry."""
    entries = {**FAMILIES, **DEEP}
    return lambda name: synthetic_model(quant="f32", seed=11, **entries[name])


@cache
def truth_of(path: Path) -> Any:
    """The binary64 logits of TOKENS, computed once for a file."""
    return float64_model(path).logits(TOKENS)


PLAIN = (
    *("arcee", "baichuan", "chatglm", "command-r", "exaone", "exaone4", "gemma", "glm4", "granite"),
    *("ernie4_5", "hunyuan-dense", "internlm2", "minicpm", "nemotron", "olmo2", "qwen2", "qwen2vl"),
    *("qwen3vl", "seed_oss", "smollm3", "starcoder", "starcoder2", "stablelm"),
    *("bailingmoe-experts", "bailingmoe2-experts", "deepseek-experts", "dots1-experts"),
    *("ernie4_5-moe-experts", "exaone-moe-experts", "granitemoe-experts", "hunyuan-moe-experts"),
    *("hy_v3-experts", "mellum-experts", "olmoe-experts", "qwen2moe-experts"),
    *("qwen3vlmoe-experts", "qwen", "xverse", "pangu-embedded", "orion", "codeshell", "jais2"),
    *("maincoder",),
)
"""Layers made of what layers of others are made of. Every run compares their bits with goldens."""


def test_goldens_have_the_plain_families():
    """Of each the architecture, and experts where it has some."""
    known = {(spec.architecture, spec.experts is not None) for spec in SYNTHETIC_SPECS}
    assert {(FAMILIES[name]["architecture"], "experts" in name) for name in PLAIN} <= known


@pytest.mark.parametrize("name", long_except(NAMES, *(FAMILIES.keys() - {*PLAIN})))
def test_logits_agree_with_float64(path_of, name):
    """To the last of the formulas without the rounding of attention, and closely with it."""
    path = path_of(name)
    truth = truth_of(path)
    assert np.abs(exact_logits(path, TOKENS, CHUNK) - truth).max() <= TOLERANCE
    limit = ROUTED_DIVERGENCE if "experts" in name else DIVERGENCE
    limit = LATENT_DIVERGENCE if name == "deepseek2" else limit
    assert mean_kl(truth, our_logits(path, TOKENS, chunk=CHUNK, tier="native")) <= limit
    assert truth.std() > 0.1


@pytest.mark.parametrize("name", ["qwen3-wide-heads", "gemma4-shared-kv", "qwen35"])
def test_i12_keeps_every_bit_of_f32(path_of, name):
    """A cache three eighths as large, the same logits; binary16 is not lossless."""
    f32, i12, f16 = (our_logits(path_of(name), TOKENS, kv) for kv in ("f32", "i12", "f16"))
    assert (f32 == i12).all()
    assert (f32 != f16).any()


@pytest.mark.parametrize(("name", "most"), [("llama", 2e-2), ("gemma3", 2e-2), ("qwen35", 1e-3)])
def test_rotated_types_are_as_exact_as_their_bits_allow(path_of, name, most):
    """KL from binary64 is far above that of Q8_0, whose codes have 8 bits, and bounded."""
    truth = truth_of(path_of(name))
    q8_0, i4r, i3r = (
        mean_kl(truth, our_logits(path_of(name), TOKENS, kv)) for kv in ("q8_0", "i4r", "i3r")
    )
    assert 10 * q8_0 < i4r <= most
    assert 2 * i4r < i3r <= 6 * most


def spoil_pairs(oracle: Any) -> None:
    oracle.architecture = "qwen2"


def spoil_heads(oracle: Any) -> None:
    oracle.grouped = not oracle.grouped


def spoil_window(oracle: Any) -> None:
    oracle.windows = [None if window is None else window + 1 for window in oracle.windows]


def spoil_donor(oracle: Any) -> None:
    donor = oracle._donor
    oracle._donor = lambda layer: 0 if layer > 1 == donor(layer) else donor(layer)


def spoil_rotation(oracle: Any) -> None:
    oracle.rope_dims = oracle.head_dim


def spoil_key(name: str, spoilt: Callable[[Any], Any]) -> Callable[[Any], None]:
    """The oracle takes a wrong value of key ``name``."""

    def spoil(oracle: Any) -> None:
        key = oracle._key

        def read(requested: str, *default: Any) -> Any:
            value = key(requested, *default)
            return spoilt(value) if requested == name else value

        oracle._key = read

    return spoil


def without(name: str) -> Callable[[Any], None]:
    """The oracle does not see tensor ``name``."""
    return lambda oracle: oracle._tensors.pop(name)


def without_choice(oracle: Any) -> None:
    bias = oracle._choice_bias
    oracle._choice_bias = lambda name: 0.0 * bias(name)


def without_latent_norm(oracle: Any) -> None:
    norm = oracle._norm
    oracle._norm = lambda x, name: x if name.endswith("kv_a_norm") else norm(x, name)


def spoil_head_order(oracle: Any) -> None:
    by_head = oracle._by_head

    def other(prefix: str) -> tuple[Any, Any]:
        k, v = by_head(prefix)
        return k, v[::-1]

    oracle._by_head = other


def rotated(oracle: Any) -> Callable[..., Any]:
    """What DeepSeek's rows do."""
    return lambda x, positions: Float64Latent._turn(oracle, x, positions)


def spoil_pairs_of_latent(oracle: Any) -> None:
    oracle.interleaved = False


def norms_apart(oracle: Any) -> None:
    oracle._norm_heads = lambda x, name: (
        oracle._normed(x) * oracle._matrix(f"{name}.weight").reshape(x.shape[1:])
    )


def softmax_weights(oracle: Any) -> None:
    weights = oracle._weights
    oracle._weights = lambda logits, prefix: (np.exp(logits), weights(logits, prefix)[1])


def without_biases(oracle: Any) -> None:
    bias = oracle._bias
    oracle._bias = lambda prefix, name: 0.0 * bias(prefix, name)


def spoil_windowed(oracle: Any) -> None:
    oracle.windowed = [not windowed for windowed in oracle.windowed]


def without_sinks(oracle: Any) -> None:
    oracle._sinks = lambda prefix: np.full(oracle.heads, -np.inf)


def first_head(oracle: Any) -> None:
    matrix = oracle._matrix
    oracle._matrix = lambda name: (
        matrix(name)[:1].repeat(len(matrix(name)), 0) if "q_norm" in name else matrix(name)
    )


def first_size(oracle: Any) -> Callable[[str, int], float]:
    size = oracle.size
    return lambda name, layer: size(name, 0)


FAULTS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "interleaved pairs taken for halves": ("llama", spoil_pairs),
    "queries that do not grow": ("mistral3",
                                 spoil_key("attention.temperature_scale", lambda factor: 0.0)),
    "queries and keys that YaRN enlarges": ("mistral3",
                                            spoil_key("rope.scaling.yarn_log_multiplier",
                                                      lambda multiplier: 0.0)),
    "divisors of frequencies left out": ("llama-rope-freqs", without("rope_freqs.weight")),
    "key heads tiled for grouped": ("qwen35", spoil_heads),
    "key heads grouped for tiled": ("qwen3next", spoil_heads),
    "every channel rotated": ("qwen35moe", spoil_rotation),
    "one expert too few": ("qwen3moe", spoil_key("expert_used_count", lambda n: n - 1)),
    "a window one position too wide": ("gemma3", spoil_window),
    "one rotary base": ("gemma3", spoil_key("rope.freq_base_swa", lambda base: 1e6)),
    "scale of a shallow model": ("gemma3-27b", lambda oracle: setattr(oracle, "deep", False)),
    "the keys of an earlier windowed layer": ("gemma4-shared-kv", spoil_donor),
    "divisors in sliding layers only": ("gemma4", without("rope_freqs.weight")),
    "no output scale": ("gemma4", without("blk.1.layer_output_scale.weight")),
    "norms that keep the mean": ("cohere2",
                                 lambda oracle: setattr(oracle, "_mean", lambda x: 0.0 * x)),
    "rotation in every layer": ("cohere2", lambda oracle: setattr(oracle, "unrotated_step", 0)),
    "experts chosen by their weights": ("lfm2moe", without_choice),
    "no factor of experts": (
        "glm4moe-experts", spoil_key("expert_weights_scale", lambda factor: 1.0),
    ),
    "no shared expert": ("glm4moe-experts", without("blk.1.ffn_gate_shexp.weight")),
    "whole heads rotate": ("glm4moe-experts", spoil_rotation),
    "latent rows that are not normed": ("deepseek2", without_latent_norm),
    "values of another head": ("deepseek2", spoil_head_order),
    "scores that YaRN leaves alone": (
        "deepseek2-experts-yarn", lambda oracle: setattr(oracle, "_scale", lambda: 48**-0.5),
    ),
    "pairs of DeepSeek taken for halves": ("deepseek2", spoil_pairs_of_latent),
    "experts of any group": (
        "deepseek2-experts-groups", spoil_key("expert_group_used_count", lambda used: 3),
    ),
    "weights of the chosen add to 1": (
        "deepseek2-lite-experts", lambda oracle: setattr(oracle, "normalized", True),
    ),
    "one decay a head": (
        "kimi-linear-experts", lambda oracle: setattr(oracle, "one_decay", True),
    ),
    "silu in place of Kimi's sigmoid": (
        "kimi-linear-experts", lambda oracle: setattr(oracle, "output_gate", silu),
    ),
    "rows of Kimi that rotate": (
        "kimi-linear-experts", lambda oracle: setattr(oracle, "_turn", rotated(oracle)),
    ),
    "norms before the blocks of EXAONE": (
        "exaone4", lambda oracle: setattr(oracle, "_before", lambda x, _: oracle._normed(x)),
    ),
    "full layers that rotate": (
        "exaone4-windows", lambda oracle: setattr(oracle, "unrotated_step", 0),
    ),
    "no divisors of EXAONE": ("exaone4", without("rope_freqs.weight")),
    "pairs of ERNIE taken for halves": ("ernie4_5", spoil_pairs),
    "no shared expert of Granite": (
        "granitemoe-experts-shared", without("blk.1.ffn_gate_shexp.weight"),
    ),
    "experts of MiniMax chosen by their weights": ("minimax-m2-experts", without_choice),
    "heads of MiniMax normed apart": ("minimax-m2-experts", norms_apart),
    "weights of OLMoE divided by their sum": (
        "olmoe-experts", lambda oracle: setattr(oracle, "normalized", True),
    ),
    "no gate of the shared expert": (
        "qwen2moe-experts", without("blk.1.ffn_gate_inp_shexp.weight"),
    ),
    "values that are not squared": (
        "nemotron_h", lambda oracle: setattr(oracle, "positive", lambda x: np.maximum(x, 0) ** 0.5),
    ),
    "negative values squared, too": (
        "nemotron_h_moe", lambda oracle: setattr(oracle, "positive", lambda x: x),
    ),
    "experts of Nemotron chosen by their weights": ("nemotron_h_moe", without_choice),
    "no scan beside attention": (
        "falcon-h1", lambda oracle: setattr(oracle, "_mamba", lambda h, prefix: 0.0 * h),
    ),
    "the numbers of the first layer in all": (
        "apertus", lambda oracle: setattr(oracle, "size", first_size(oracle)),
    ),
    "windows for chunks": (
        "llama4-experts-chunks", lambda oracle: setattr(oracle, "_chunk", lambda: 72),
    ),
    "queries of Llama 4 that do not grow": (
        "llama4-experts-chunks", spoil_key("attention.temperature_scale", lambda factor: 0.0),
    ),
    "heads that are not normed": (
        "llama4-experts", lambda oracle: setattr(oracle, "normed", False),
    ),
    "inputs that are not weighted": (
        "llama4-experts", lambda oracle: setattr(oracle, "weights", np.ones_like),
    ),
    "no biases of Seed": ("seed_oss", without("blk.1.attn_q.bias")),
    "a softmax of the chosen": ("lfm2moe", softmax_weights),
    "no sinks": ("gpt-oss-experts", without_sinks),
    "no biases of experts": ("gpt-oss-experts", without_biases),
    "up alone, without its one": ("gpt-oss-experts", lambda oracle: setattr(oracle, "one", 0.0)),
    "gates without a limit": ("gpt-oss-experts", lambda oracle: setattr(oracle, "limit", np.inf)),
    "windows in the other layers": ("gpt-oss-experts", spoil_windowed),
    "heads normed before they are rotated": (
        "hunyuan-dense", lambda oracle: setattr(oracle, "late_norms", False),
    ),
    "no shared expert of Hunyuan": (
        "hunyuan-moe-experts", without("blk.1.ffn_gate_shexp.weight"),
    ),
    "pairs of InternLM taken for halves": (
        "internlm2", lambda oracle: setattr(oracle, "interleaved", False),
    ),
    "residuals of MiniCPM whole": ("minicpm", lambda oracle: setattr(oracle, "residual", 1.0)),
    "heads of dots that are not normed": ("dots1-experts", without("blk.1.attn_q_norm.weight")),
    "experts of ERNIE chosen by their weights": ("ernie4_5-moe-experts", without_choice),
    "no shared expert of ERNIE": (
        "ernie4_5-moe-experts", without("blk.1.ffn_gate_shexp.weight"),
    ),
    "Ling's experts of any group": (
        "bailingmoe2-experts", spoil_key("expert_group_used_count", lambda used: 4),
    ),
    "whole heads of Ling rotate": ("bailingmoe2-experts", spoil_rotation),
    "full layers of K-EXAONE that rotate": (
        "exaone-moe-experts", lambda oracle: setattr(oracle, "unrotated_step", 0),
    ),
    "no shared expert of K-EXAONE": (
        "exaone-moe-experts", without("blk.1.ffn_gate_shexp.weight"),
    ),
    "no gates of Trinity's heads": ("afmoe-experts", without("blk.1.attn_gate.weight")),
    "Trinity's embeddings as they are": (
        "afmoe-experts", lambda oracle: setattr(oracle, "embedding_scale", 1.0),
    ),
    "no biases of Qwen 2 VL": ("qwen2vl", without("blk.1.attn_q.bias")),
    "heads of Qwen 3 VL that are not normed": ("qwen3vl", without("blk.1.attn_q_norm.weight")),
    "one expert of Qwen 3 VL too few": (
        "qwen3vlmoe-experts", spoil_key("expert_used_count", lambda n: n - 1),
    ),
    "no biases of Qwen 1": ("qwen", without("blk.1.attn_qkv.bias")),
    "pairs of XVERSE taken for halves": ("xverse", spoil_pairs_of_latent),
    "no bias behind the heads of Pangu": ("pangu-embedded", without("blk.1.attn_output.bias")),
    "norms of Orion that keep the mean": ("orion", lambda o: setattr(o, "_mean", lambda x: 0 * x)),
    "no biases of CodeShell": ("codeshell", without("blk.1.attn_qkv.bias")),
    "negative values of Jais 2 squared, too": ("jais2", lambda o: setattr(o, "positive", abs)),
    "heads of Maincoder normed first": ("maincoder", lambda o: setattr(o, "late_norms", False)),
    "no divisors of EXAONE 3": ("exaone", without("rope_freqs.weight")),
    "whole heads of ChatGLM rotate": ("chatglm", spoil_rotation),
    "pairs of Baichuan taken for halves": (
        "baichuan", lambda oracle: setattr(oracle, "interleaved", False),
    ),
    "negative values of AFM squared, too": (
        "arcee", lambda oracle: setattr(oracle, "positive", lambda x: x),
    ),
    "negative values of Nemotron 4 squared, too": (
        "nemotron", lambda oracle: setattr(oracle, "positive", lambda x: x),
    ),
    "attention of Falcon reads the other norm": (
        "falcon-parallel", without("blk.1.attn_norm_2.weight"),
    ),
    "norms of OLMo that keep the mean": (
        "olmo", lambda oracle: setattr(oracle, "_mean", lambda x: 0.0 * x),
    ),
    "weights of the first head for all": ("stablelm-head-norms", first_head),
    "weights of DeepSeek divided by their sum": (
        "deepseek-experts", lambda oracle: setattr(oracle, "normalized", True),
    ),
    "no shared expert of Ling": ("bailingmoe-experts", without("blk.1.ffn_gate_shexp.weight")),
    "no Mamba-2": ("mamba2", lambda oracle: setattr(oracle, "_mamba", lambda h, prefix: 0.0 * h)),
    "gates of Gemma 3n all kept": (
        "gemma3n", spoil_key("activation_sparsity_scale", lambda kept: [-np.inf] * len(kept)),
    ),
    "streams that are not predicted": (
        "gemma3n", lambda oracle: setattr(oracle, "_predict", lambda prefix: np.zeros((16, 4))),
    ),
    "streams of another size": (
        "gemma3n", lambda oracle: setattr(oracle, "_as_large", lambda x, like: x),
    ),
    "the keys of another layer of Gemma 3n": ("gemma3n-shared-kv", spoil_donor),
    "no positions": ("gpt2", without("position_embd.weight")),
    "latent rows of Mistral 4 that are not normed": ("mistral4-experts", without_latent_norm),
    "experts of Hunyuan 3 chosen by their weights": ("hy_v3-experts", without_choice),
    "windows of Mellum left out": ("mellum-experts", lambda oracle: setattr(oracle, "window", 0)),
    "experts chosen by what they read": (
        "smallthinker-experts",
        lambda oracle: setattr(oracle, "first", False),
    ),
    "scores without a bound": ("gemma2", lambda oracle: setattr(oracle, "score_cap", 0.0)),
    "a window of Gemma 2 one position too wide": ("gemma2", spoil_window),
    "embeddings of another width": ("gemma", lambda oracle: setattr(oracle, "hidden", 64)),
    "no soft-cap": ("gemma4-softcap", spoil_key("final_logit_softcapping", lambda cap: 0.0)),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_formula_is_far_off(path_of, fault):
    """Negative control: the tolerance separates right from wrong."""
    name, spoil = FAULTS[fault]
    oracle: Float64Llama = float64_model(path_of(name))
    spoil(oracle)
    assert np.abs(oracle.logits(TOKENS) - truth_of(path_of(name))).max() > 100 * TOLERANCE
