"""Metadata that cannot be, or that no formula here computes, is refused by the name of its key."""

import re
from collections.abc import Mapping
from typing import Any

import pytest

from contract.errors import ModelFileError, UnsupportedModel
from reference.model.config.vision import SEEING
from reference.model.gguf.types import GgufType
from reference.model.gguf.writer import Typed
from tests.model.family_file import (
    EXPERTS,
    HEAD_DIM,
    LAYER_NORM,
    LAYER_NORMED,
    LAYERS,
    RANK,
    ROTATED,
    config_of,
    with_keys,
)
from tests.model.metadata_keys import YARN
from tests.model.test_config_values import OLDER
from tests.model.test_family_graphs import graph_of

SECTIONS, PATTERN = "rope.dimension_sections", "attention.sliding_window_pattern"
WINDOW, SHARED = "attention.sliding_window", "attention.shared_kv_layers"
GROUPS, GROUPS_USED = "expert_group_count", "expert_group_used_count"
SPARSITY, MULTIPLIER = "activation_sparsity_scale", "rope.scaling.yarn_log_multiplier"
EPSILON = "attention.layer_norm_rms_epsilon"
MISSING = "is missing"
PAIRS = HEAD_DIM // 2
ROUTED = ("bailingmoe2", "exaone-moe", "afmoe")
BROKEN: list[tuple[str, str, Any, str]] = [
    ("llama", "block_count", 0, "is 0, must be 1 to"),
    ("llama", "block_count", 2**31, "must be 1 to"),
    ("llama", "block_count", None, "llama.block_count"),
    ("llama", "embedding_length", 0, "is 0, must be"),
    ("llama", "attention.head_count", 0, "is 0, must be"),
    ("llama", "attention.head_count", "four", "llama.attention.head_count"),
    ("llama", "attention.head_count_kv", 3, "3 does not divide 4 heads"),
    ("llama", "attention.head_count_kv", [2], "has 1 uint32 entries for 4 layers"),
    ("llama", "attention.head_count_kv", [2, 0, 2, 2], "has entries outside"),
    ("llama", "attention.value_length", 32, "is 32, the key's is 16"),
    ("llama", EPSILON, None, "layer_norm_rms_epsilon"),
    ("llama", EPSILON, float("nan"), "is nan, must be a positive number"),
    ("llama", EPSILON, -1.0, "is -1.0, must be a positive number"),
    ("llama", "rope.freq_base", 0.0, "is 0.0, must be a positive number"),
    ("llama", "rope.freq_base", float("inf"), "is inf, must be a positive number"),
    ("llama", "rope.dimension_count", 7, "is 7, must be even"),
    ("llama", "rope.dimension_count", 4096, "must be even and at most"),
    ("llama", "rope.dimension_count", 8, "is 8, must be the head size 16"),
    ("llama", "attention.causal", False, "is false; only causal models are supported"),
    ("llama", "nextn_predict_layers", 4, "is 4, must be below the 4 blocks"),
    ("qwen", "feed_forward_length", 111, "is 111, must be even (layer 0)"),
    ("llama", "feed_forward_length", 0, "is 0 or missing (layer 0), must be 1 to"),
    ("llama", "rope.scaling.type", "su", "supported are none, linear, yarn, longrope"),
    ("llama", "context_length", 0, "is 0, must be"),
    ("qwen3moe", "expert_count", None, "is 2 (layer 0), must be 0"),
    ("qwen3moe", "expert_count", 1 << 20, "is 1048576, must be 0 to 65536"),
    ("qwen3moe", "expert_used_count", None, "is 0 (layer 0), must be 1 to the 6 of"),
    ("qwen3moe", "expert_used_count", 7, "is 7 (layer 0), must be 1 to the 6 of"),
    ("qwen3moe", "expert_used_count", [2, 2, 0, 2], "is 0 (layer 2), must be 1 to the 6 of"),
    ("qwen3moe", "expert_used_count", [2, 2], "has 2 uint32 entries for 4 layers"),
    ("qwen3moe", "expert_feed_forward_length", [1, 2], "has 2 uint32 entries for 4 layers"),
    ("qwen35", "ssm.conv_kernel", None, MISSING),
    ("qwen35", "ssm.conv_kernel", 1, "is 1, must be 2 to"),
    ("qwen35", "ssm.state_size", 0, "is 0, must be 1 to"),
    ("qwen35", "ssm.time_step_rank", None, MISSING),
    ("qwen35", "ssm.group_count", 3, "is 3, must divide qwen35.ssm.time_step_rank (4)"),
    ("qwen35", "ssm.group_count", 0, "is 0, must be 1 to"),
    ("qwen35", "ssm.inner_size", 63, "is 63, must be 64: qwen35.ssm.state_size (16) times"),
    ("qwen35", "full_attention_interval", 0, "is 0, must be 1 to"),
    ("qwen35", "attention.recurrent_layers", [True] * 3, "has 3 bool entries, must be 4 times"),
    ("qwen35", "attention.recurrent_layers", [0, 1, 2, 0], "must be 4 times yes or no"),
    ("qwen35", SECTIONS, None, MISSING),
    ("qwen35", SECTIONS, [11, 11, 10], "has 3 uint32 entries, must be 4 integers"),
    ("qwen35", SECTIONS, [0.5, 1.0, 1.0, 1.0], "has 4 float32 entries, must be 4 integers"),
    ("qwen35", SECTIONS, [0, 0, 0, 0], "is [0, 0, 0, 0], must be counts of pairs"),
    ("qwen35", SECTIONS, [-1, 11, 11, 0], "is [-1, 11, 11, 0], must be counts of pairs"),
    ("qwen35", SECTIONS, [1, 1, 1, 8], "leaves pair 3 of 4 to the fourth stream"),
    ("qwen35", "feed_forward_length", None, "is 0 or missing (layer 0)"),
    ("qwen3next", "ssm.inner_size", None, MISSING),
    ("qwen3next", "expert_count", None, "must be 0"),
    ("gemma3", WINDOW, Typed(GgufType.INT32, -1), "is -1, must be 0 to"),
    ("gemma3", PATTERN, 0, "is 0, must be 1 to"),
    ("gemma3", PATTERN, [True, False], "has 2 bool entries, must be 4 times yes or no"),
    ("gemma3", "rope.freq_base_swa", 0.0, "is 0.0, must be a positive number"),
    ("gemma3", "final_logit_softcapping", -1.0, "is -1.0, must be a positive number"),
    ("gemma4", WINDOW, None, MISSING),
    ("gemma4", WINDOW, 0, "is 0, must be 1 to"),
    ("gemma4", PATTERN, None, MISSING),
    ("gemma4", PATTERN, [True] * 5, "has 5 bool entries, must be 4 times yes or no"),
    ("gemma4", "attention.key_length_swa", None, MISSING),
    ("gemma4", "attention.value_length_swa", 8, "is 8, the key's is 16"),
    ("gemma4", "rope.dimension_count_swa", 32, "is 32, must be even and at most 16"),
    ("gemma4", "attention.head_count_kv", [2, 1, 3, 1], "3 does not divide 4 heads (layer 2)"),
    ("gemma4", "embedding_length_per_layer_input", None, MISSING),
    ("gemma4", SHARED, 4, "is 4, must be 0 to 3"),
    ("gemma4", SHARED, 3, "is 3: layer 1 would read layer 0, which is not a full-attention"),
    ("gemma4", SHARED, 1, "is 1: layer 3 would read layer 2, which is not a full-attention"),
    ("gemma3n", SPARSITY, None, MISSING),
    ("gemma3n", SPARSITY, [0.5, 0.5], "has 2 float32 entries, must be 4 numbers"),
    *(("gemma3n", SPARSITY, [0.5, bad, 0.5, 0.5], "must be -inf or -64 to 64")
      for bad in (float("nan"), float("inf"), 65.0)),
    ("gemma3n", SHARED, 1, "is 1: layer 3 would read layer 2, which is not a full-attention"),
    ("gemma4 experts", "expert_feed_forward_length", None, "is 0 or missing, must be 1 to"),
    ("cohere2", WINDOW, 0, "is "),
    ("cohere2", LAYER_NORM, -1.0, "is "),
    *((name, key, None, MISSING) for name in ("command-r", "cohere2")
      for key in (LAYER_NORM, "logit_scale")),
    *((name, LAYER_NORM, None, MISSING) for name in LAYER_NORMED),
    ("gpt-oss", WINDOW, 0, "is "),
    ("granite", "logit_scale", 0.0, "is "),
    *((name, "expert_gating_func", None, MISSING)
      for name in ("lfm2moe", "minimax-m2", "bailingmoe2")),
    ("lfm2moe", "leading_dense_block_count", LAYERS + 1, "is "),
    ("ernie4_5-moe", "interleave_moe_layer_step", None, MISSING),
    ("bailingmoe2", GROUPS, EXPERTS - 2, "is "),
    ("bailingmoe2", GROUPS, EXPERTS, "is "),
    ("bailingmoe2", GROUPS_USED, 3, "is "),
    *((name, WINDOW, None, MISSING) for name in ("exaone-moe", "afmoe")),
    ("exaone-moe", PATTERN, [True] * (LAYERS - 1), "has 3 bool entries"),
    *((name, SECTIONS, [PAIRS + 1, 0, -1, 0], "must be counts of pairs") for name in SEEING),
    *((name, SECTIONS, None, MISSING) for name in SEEING),
    *((name, "n_deepstack_layers", -1, "is -1") for name in SEEING),
    ("deepseek2", "attention.kv_lora_rank", RANK + 1, "is "),
    ("deepseek2", "attention.key_length_mla", ROTATED, "is "),
    ("deepseek2", GROUPS_USED, 7, "is "),
    ("kimi-linear", "attention.head_count", [4, 4, 4, 2], "differs between layers"),
    ("kimi-linear", "attention.kv_lora_rank", RANK + 1, "is "),
    *(("kimi-linear", key, None, MISSING) for key in ("kda.head_dim", "ssm.conv_kernel")),
    ("kimi-linear", "kda.head_dim", 257, "is 257, must be 1 to 256"),
]  # fmt: skip
"""Families or variants, a key and its value, None if it is removed, and what is said."""


@pytest.mark.parametrize(("name", "key", "value", "says"), BROKEN)
def test_bad_metadata_names_its_key(name, key, value, says, tmp_path):
    with pytest.raises(ModelFileError, match=re.escape(says)) as raised:
        config_of(with_keys(name, {key: value}), tmp_path)
    shown = "expert_used_count" if key == "expert_count" and value is None else key
    assert f"{name.split()[0]}.{shown}" in str(raised.value)
    assert str(tmp_path) in str(raised.value)


NO_EXPERTS = {"expert_count": 0, "expert_used_count": 0}
TOGETHER: list[tuple[str, Mapping[str, Any], str, str]] = [
    ("qwen3moe", {"expert_feed_forward_length": None, "feed_forward_length": 111},
     "expert_feed_forward_length",
     "qwen3moe.feed_forward_length (111) is no multiple of the 2 experts used (layer 0)"),
    ("qwen3moe", {"expert_count": None, "expert_used_count": None}, "expert_count",
     "is 0 or missing, must be 1 to"),
    ("gemma4", {SHARED: 2, "attention.head_count_kv": [2, 1, 2, 2]}, "attention.head_count_kv",
     "is 2 in layer 3, which reads the keys of layer 1 with 1"),
    *((name, NO_EXPERTS, "expert_count", "is ")
      for name in ("gpt-oss", "lfm2moe", "minimax-m2", *ROUTED)),
    *(("bailingmoe2", {GROUPS: 3, GROUPS_USED: 1, "expert_used_count": used}, GROUPS_USED,
       "is 1, groups of 2 for 3 experts") for used in (3, [2, 2, 2, 3])),
    *(("deepseek2", {**OLDER, key: value}, key, "is ")
      for key, value in (("attention.head_count_kv", 2), ("attention.key_length", ROTATED),
                         ("attention.kv_lora_rank", 0))),
    *(("granitehybrid", {key: value}, key, says) for key, value, says in (
        ("ssm.time_step_rank", 7, "is 7, must divide 160"),
        ("ssm.group_count", 3, "is 3, must divide 8"), ("ssm.conv_kernel", 1, "is 1, must be 2"))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "keys", "key", "says"), TOGETHER)
def test_keys_that_contradict_each_other(name, keys, key, says, tmp_path):
    with pytest.raises(ModelFileError, match=re.escape(says)) as raised:
        config_of(with_keys(name, keys), tmp_path)
    assert f".{key}" in str(raised.value)


NOT_COMPUTED: list[tuple[str, Mapping[str, Any], str]] = [
    ("mistral3", {**YARN, "attention.temperature_length": 32}, "is 32; supported is 64"),
    ("glm4", {SECTIONS: [8, 12, 12, 0]}, "only GLM-4 for text"),
    ("qwen2", {"rope.scaling.type": "longrope"}, "is 'longrope'; supported are none, linear, yarn"),
    ("deepseek2", {GROUPS: 3, GROUPS_USED: 2, "expert_gating_func": 1},
     "expert_group_count: is 3, with a soft"),
    ("mistral4", {MULTIPLIER: 0.0707}, "supported is 0.1"),
    ("kimi-linear", {"expert_weights_norm": False}, "expert_weights_norm: is false"),
    ("kimi-linear", {"attention.q_lora_rank": 8}, "attention.q_lora_rank"),
    ("gemma3n", {"altup.num_inputs": 2}, "is 2; supported is 4"),
    ("gemma3n", {"altup.active_idx": 1}, "is 1; supported is 0"),
    ("smallthinker", {"expert_gating_func": 3}, "supported are 1, a softmax, 2"),
    ("olmo", {"attention.clamp_kqv": 8.0}, "attention.clamp_kqv"),
    ("baichuan", {"block_count": 40, "attention.head_count": 4}, "block_count: is 40"),
    *((name, {SECTIONS: [PAIRS - 3, 1, 1, 1]}, "a fourth stream") for name in SEEING),
    *((name, {key: value}, f"{name}.{key}") for name, key, value in (
        ("lfm2moe", "expert_gating_func", 1), ("glm4moe", "expert_gating_func", 1),
        ("gpt-oss", "expert_gating_func", 2), ("ernie4_5-moe", "expert_gating_func", 2),
        ("ernie4_5-moe", "interleave_moe_layer_step", 2))),
]  # fmt: skip
"""What ``test_metadata_keys`` does not try: there, keys of all families have other values."""


@pytest.mark.parametrize(("name", "keys", "says"), NOT_COMPUTED)
def test_what_a_family_does_not_compute_is_refused_by_name(name, keys, says, tmp_path):
    with pytest.raises(UnsupportedModel, match=re.escape(says)):
        config_of(with_keys(name, keys), tmp_path)


def test_an_error_shows_the_beginning_of_a_long_value(tmp_path):
    with pytest.raises(UnsupportedModel) as refused:
        config_of(with_keys("llama", {"logit_scale": "x" * 100_000}), tmp_path)
    assert 100 < len(str(refused.value)) < 1000


def test_a_norm_of_all_heads_alike_is_refused(tmp_path):
    """Heads of StableLM 2 12B have weights of their own."""
    file = with_keys("stablelm", {})
    file.add("blk.0.attn_q_norm.weight", HEAD_DIM)
    with pytest.raises(ModelFileError, match=r"attn_q_norm.*has shape \[16\]"):
        graph_of(file, tmp_path)
