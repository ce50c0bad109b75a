"""What the keys of each family mean: the configuration that is read from its files."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from reference.exact.rotary import RotaryScaling, growth_table, rotary_table, unrotated_table
from reference.model.config.read import READERS
from reference.model.config.records import QueryGrowth
from reference.model.config.unread import CHANGING
from reference.model.config.vision import SEEING
from reference.model.families import FAMILIES
from tests.families_table import FAMILIES as TABLE
from tests.model.family_file import (
    EXPERT_WIDTH,
    EXPERTS,
    FEED_FORWARD,
    FULL_HEAD_DIM,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    LAYER_NORMED,
    LAYERS,
    QUERY_RANK,
    RANK,
    ROTATED,
    SHARED_WIDTH,
    STATE,
    TAPS,
    UNROTATED,
    USED,
    VALUE,
    WINDOW,
    config_of,
    family_file,
    with_keys,
)
from tests.model.metadata_keys import YARN
from tests.model.test_family_graphs import graph_of

LISTED = {"attention.sliding_window_pattern": [False, True, True, False]}
FULL_LAST = (WINDOW, WINDOW, WINDOW, 0)
ROTATES_FIRST = (True, True, True, False)
ROUTED_KEYS = {"expert_weights_scale": 2.5, "expert_weights_norm": False}
GROUPED = {"expert_group_count": 3, "expert_group_used_count": 2}
SOFTMAX = {"expert_gating_func": 1, "expert_weights_norm": False, "expert_shared_count": 2}
YARN_40 = {**YARN, "rope.scaling.factor": 40.0}
GROWN = 1 + 0.1 * math.log(40)
STORED = float(np.float32(0.1))
"""A tenth as a file has it."""
GROWN_BY_KEY = 1 + STORED * math.log(40)
SIZE = UNROTATED + ROTATED
SECTIONS = "rope.dimension_sections"
PAIRS = HEAD_DIM // 2
ROTATED_PART = {"nemotron": 2}
ROTATED_PART |= dict.fromkeys(("starcoder2", "falcon", "olmo", "gpt2", "starcoder", "orion"), 1)
ROTATED_PART |= dict.fromkeys(("codeshell", "jais2"), 1)
DRAFT_BLOCK = {"block_count": LAYERS + 1, "nextn_predict_layers": 1}
NO_WINDOW = {"attention.sliding_window": 0}
TEXT_OF_IMAGES = {"neox": True, "dims": HEAD_DIM, "rotates": True, "factors": ""}


def ropes(**fields: Any) -> dict[str, Any]:
    """The same fields of the rotation of every layer."""
    return {f"ropes.{name}": (value,) * LAYERS for name, value in fields.items()}


READ: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
    ("qwen", {"feed_forward_length": 160}, {"feed_forward": (80,) * LAYERS}),
    # Layers, and which of them attend.
    ("qwen35", {**DRAFT_BLOCK, "feed_forward_length": [FEED_FORWARD] * LAYERS + [8]},
     {"layers": LAYERS, "blocks": LAYERS + 1, "feed_forward": (FEED_FORWARD,) * LAYERS}),
    ("qwen35", {}, {"delta_net.layers": (True, False, True, False)}),
    ("qwen35", {"full_attention_interval": None}, {"attention_layers": (3,)}),
    ("qwen35", {"attention.recurrent_layers": [False, True, True, False]},
     {"attention_layers": (0, 3)}),
    # Windows, and layers that do not rotate.
    ("cohere2", {}, {"windows": FULL_LAST, "ropes.rotates": ROTATES_FIRST, **ropes(neox=False)}),
    ("cohere2", LISTED, {"windows": (0, WINDOW, WINDOW, 0)}),
    ("command-r", {"logit_scale": 0.0625},
     {"windows": (0,) * LAYERS, "logit_scale": 0.0625, **ropes(rotates=True)}),
    ("cohere2", {"logit_scale": 0.0}, {"logit_scale": 1.0}),
    ("gpt-oss", {}, {"windows": (WINDOW, 0) * 2, "experts.count": EXPERTS,
                     "experts.used": (USED,) * LAYERS, "experts.widths": (EXPERT_WIDTH,) * LAYERS}),
    ("gpt-oss", LISTED, {"windows": (0, WINDOW, WINDOW, 0)}),
    ("gpt-oss", {"expert_gating_func": 3}, {"experts.count": EXPERTS}),
    ("phi3", {}, {"windows": (0,) * LAYERS}),
    ("phi3", {"attention.sliding_window": 7}, {"windows": (7,) * LAYERS}),
    ("olmo2", {"attention.sliding_window": 9, **YARN},
     {"windows": (9, 9, 9, 0), "ropes.scaling.yarn": (False, False, False, True)}),
    ("olmo2", {"attention.sliding_window": 9, **LISTED}, {"windows": (0, 9, 9, 0)}),
    ("gemma3", {}, {"windows": (WINDOW, 0) * 2, "ropes.base": (1e4, 1e6) * 2,
                    "ropes.scaling.factor": (1.0, 8.0) * 2, "logit_cap": 0.0,
                    "attention_scales": (1 / math.sqrt(HEAD_DIM),) * LAYERS}),
    ("gemma3", {"attention.sliding_window_pattern": None}, {"windows": (WINDOW,) * LAYERS}),
    ("gemma3", LISTED, {"windows": (0, WINDOW, WINDOW, 0)}),
    ("gemma3", NO_WINDOW, {"windows": (0,) * LAYERS, **ropes(base=1e6)}),
    ("gemma3", {"block_count": 62}, {"attention_scales": (1 / math.sqrt(HIDDEN / HEADS),) * 62}),
    ("gemma4", {}, {"head_dims": (HEAD_DIM, FULL_HEAD_DIM) * 2, "kv_heads": (2, 1) * 2,
                    "windows": (WINDOW, 0) * 2, "ropes.factors": ("", "rope_freqs.weight") * 2,
                    "attention_scales": (1.0,) * LAYERS, "embedding_scale": math.sqrt(HIDDEN),
                    "logit_cap": 30.0}),
    ("gemma4", {"final_logit_softcapping": 0.0}, {"logit_cap": 0.0}),
    *((name, {}, {"kv_layers": (0, 1, 0, 1)}) for name in ("gemma4 per layer", "gemma3n")),
    ("gemma3n", {"activation_sparsity_scale": [0.5, -math.inf, 0.0, -1.0]},
     {"sparsity": (0.5, -math.inf, 0.0, -1.0), "per_layer_width": 40}),
    ("smallthinker", {}, {"windows": (0,) * LAYERS, **ropes(rotates=True)}),
    ("smallthinker", {"attention.sliding_window": 9},
     {"windows": (0, 9, 9, 9), "ropes.rotates": (False, True, True, True),
      "experts.sigmoid": True}),
    ("mellum", {"attention.sliding_window": 9, **YARN},
     {"windows": (9, 9, 9, 0), "ropes.scaling.yarn": (False, False, False, True)}),
    *((name, {}, {"positions": True, **ropes(rotates=False)}) for name in ("gpt2", "starcoder")),
    *(("mistral4", {**YARN, "rope.scaling.yarn_log_multiplier": factor}, {"latent.rank": RANK})
      for factor in (0.1, 0.0)),
    *((name, {}, {"windows": FULL_LAST, "ropes.rotates": ROTATES_FIRST,
                  "embedding_scale": math.sqrt(HIDDEN) if name == "afmoe" else 1.0})
      for name in ("exaone-moe", "afmoe")),
    *(("exaone-moe",
       {**DRAFT_BLOCK, "attention.sliding_window_pattern": [n % 2 == 0 for n in range(entries)]},
       {"windows": (WINDOW, 0) * 2}) for entries in (LAYERS, LAYERS + 1)),
    ("smollm3", {}, {"ropes.rotates": ROTATES_FIRST, **ropes(dims=HEAD_DIM)}),
    ("granite", {"rope.scaling.finetuned": False}, ropes(rotates=False)),
    ("granite", {"attention.scale": 0.25},
     {"embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 0.25,
      "attention_scales": (0.25,) * LAYERS}),
    # Rotation.
    *((name, {}, ropes(neox=name != "olmo", dims=HEAD_DIM // ROTATED_PART.get(name, 4)))
      for name in LAYER_NORMED),
    *((name, {"use_parallel_residual": parallel}, {"parallel": parallel and name == "gptneox"})
      for name in ("gptneox", "stablelm") for parallel in (True, False)),
    ("gpt-oss", {**YARN, "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0},
     {f"ropes.scaling.{name}": (value,) * LAYERS
      for name, value in {"beta_fast": 16.0, "beta_slow": 2.0}.items()} | ropes(neox=True)),
    *((name, {SECTIONS: sections}, ropes(**TEXT_OF_IMAGES)) for name in SEEING
      for sections in ([PAIRS, 0, 0, 0], [PAIRS - 2, 1, 1, 0], [16, 24, 24, 0])),
    ("mistral3", {**YARN, "attention.temperature_scale": 0.25},
     {"query_growth": QueryGrowth(64, 0.25)}),
    ("mistral3", {}, {"query_growth": None}),
    # Latent rows.
    ("deepseek2", {},
     {"latent.rank": RANK, "latent.query_rank": QUERY_RANK, "latent.unrotated": UNROTATED,
      "latent.value": VALUE, "head_dims": (RANK + ROTATED,) * LAYERS, "kv_heads": (1,) * LAYERS,
      "attention_scales": (1 / math.sqrt(SIZE),) * LAYERS, **ropes(dims=ROTATED, neox=False)}),
    ("deepseek2", {**YARN_40, "rope.scaling.yarn_log_multiplier": 0.1},
     {"attention_scales": (GROWN_BY_KEY * GROWN_BY_KEY / math.sqrt(SIZE),) * LAYERS,
      "ropes.scaling.log_multiplier": (1.0,) * LAYERS}),
    ("deepseek2", YARN_40,
     {"attention_scales": (GROWN * GROWN / math.sqrt(SIZE),) * LAYERS,
      "ropes.scaling.log_multiplier": (0.0,) * LAYERS}),
    ("deepseek2", {**GROUPED, "expert_weights_scale": 2.5},
     {"experts.choice_bias": True, "experts.renormalize": True, "experts.weight_scale": 2.5,
      "experts.groups": 3, "experts.groups_used": 2, "experts.leading_dense": 1,
      "experts.shared_width": EXPERT_WIDTH, "experts.shared_gate": False}),
    ("deepseek2", SOFTMAX, {"experts.choice_bias": False, "experts.renormalize": False,
                            "experts.shared_width": 2 * EXPERT_WIDTH}),
    ("deepseek2", {"expert_gating_func": None}, {"experts.choice_bias": True}),
    ("kimi-linear", {},
     {"kv_heads": (0, 1) * 2, "attention_layers": (1, 3), "delta_net.layers": (True, False) * 2,
      "delta_net.value_heads": HEADS, "delta_net.key_heads": HEADS, "delta_net.taps": TAPS,
      "delta_net.state_size": STATE, "latent.query_rank": 0, "latent.unrotated": UNROTATED,
      "head_dims": (RANK + ROTATED,) * LAYERS, "experts.renormalize": True,
      "experts.choice_bias": True, "experts.weight_scale": 2.5,
      "attention_scales": (1 / math.sqrt(SIZE),) * LAYERS, **ropes(rotates=False)}),
    ("kimi-linear", {"expert_gating_func": None}, {"experts.choice_bias": True}),
    # Experts.
    ("qwen3moe", {}, {"experts.widths": (EXPERT_WIDTH,) * LAYERS}),
    *(("qwen3moe", {"expert_feed_forward_length": width},
       {"experts.widths": (FEED_FORWARD // 2,) * LAYERS}) for width in (0, None)),
    ("qwen3moe", {"expert_feed_forward_length": [EXPERT_WIDTH] * LAYERS},
     {"experts.widths": (EXPERT_WIDTH,) * LAYERS}),
    ("mixtral", {}, {"experts.widths": (FEED_FORWARD,) * LAYERS}),
    *(("qwen3next", {"expert_shared_feed_forward_length": width} if width else {},
       {"experts.shared_width": width or SHARED_WIDTH}) for width in (0, 64)),
    ("qwen3next", {"expert_shared_feed_forward_length": None},
     {"experts.shared_width": SHARED_WIDTH}),
    ("lfm2moe", {}, {"experts.leading_dense": 1, "experts.choice_bias": True,
                     "experts.widths": (EXPERT_WIDTH,) * LAYERS}),
    ("glm4moe", {"expert_shared_count": 2, "expert_weights_scale": 1.5},
     {"experts.shared_width": 2 * EXPERT_WIDTH, "experts.shared_gate": False,
      "experts.leading_dense": 1, "experts.choice_bias": True, "experts.weight_scale": 1.5}),
    *((name, {"expert_weights_norm": True} if normed else {}, {"experts.renormalize": normed})
      for name in ("qwen2moe", "olmoe") for normed in (False, True)),
    *((name, ROUTED_KEYS, {"experts.choice_bias": True, "experts.shared_gate": False,
                           "experts.leading_dense": 1, "experts.weight_scale": 2.5,
                           "experts.renormalize": False})
      for name in ("bailingmoe2", "exaone-moe", "afmoe")),
    ("ernie4_5-moe", {}, {"experts.choice_bias": True, "experts.softmax": True,
                          "experts.leading_dense": 1, "experts.shared_width": SHARED_WIDTH,
                          "experts.shared_gate": False}),
    ("bailingmoe2", {}, {"experts.groups": 2, "experts.groups_used": 1,
                         **ropes(dims=HEAD_DIM // 2)}),
    *((name, {**({"expert_shared_count": count} if count else {}),
              **({"expert_shared_feed_forward_length": width} if width else {})},
       {"experts.shared_width": expected})
      for name, count, width, expected in (
          ("bailingmoe2", 2, 0, 2 * EXPERT_WIDTH), ("bailingmoe2", 2, 24, 48),
          ("exaone-moe", 0, 24, 24), ("exaone-moe", 0, 0, EXPERT_WIDTH),
          ("afmoe", 2, 0, 2 * EXPERT_WIDTH))),
]  # fmt: skip
"""Families or variants, keys that are set or removed, and what is read."""


def found(config: Any, name: str) -> Any:
    """A field of a configuration by its path; of a tuple, those of all entries."""
    first, _, rest = name.partition(".")
    value = getattr(config, first)
    if not rest:
        return value
    return (
        tuple(found(one, rest) for one in value) if isinstance(value, tuple) else found(value, rest)
    )


@pytest.mark.parametrize(("name", "keys", "expected"), READ)
def test_keys_are_read(name, keys, expected, tmp_path):
    config = config_of(with_keys(name, keys), tmp_path)
    assert {field: found(config, field) for field in expected} == expected


def test_every_reader_has_a_family():
    """And the table by which ``tests/peer`` compares files with llama.cpp has every family."""
    assert set(READERS) == set(FAMILIES)
    assert {fields["architecture"] for fields in TABLE.values()} == set(FAMILIES)


@pytest.mark.parametrize(
    "architecture", sorted(set(FAMILIES) - {"deepseek2", "mistral4", "kimi-linear", "mamba2"})
)
def test_the_least_metadata(architecture, tmp_path):
    """Keys that are not required may all be missing; sizes then follow from each other, but for
    those of latent rows. Mamba-2 has no heads."""
    file = family_file(architecture)
    optional = ("context", "rope", "attention.key_length", "attention.value_length")
    needed = ("context_length", SECTIONS, "attention.key_length_swa")
    for key in list(file.keys):
        if key.startswith(optional) and not key.startswith(needed):
            del file.keys[key]
    if architecture == "gemma4":
        file.keys["rope.dimension_count_swa"] = HEAD_DIM
    file.keys.pop("attention.shared_kv_layers", None)
    config = config_of(file, tmp_path)
    assert config.layers == config.blocks == LAYERS
    full = config.attention_layers[-1]
    assert config.head_dims[full] == config.ropes[full].dims == HIDDEN // HEADS
    assert {rope.base for rope in config.ropes} == {10000.0}
    assert config.kv_layers == tuple(range(LAYERS))


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_longrope_divisors_depend_on_the_reach(architecture, tmp_path):
    keys = {"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.25}
    file = with_keys(architecture, keys)
    if architecture == "llama":
        file.keys["rope.scaling.type"] = "longrope"
    for reach in ("short", "long"):
        file.add(f"rope_factors_{reach}.weight", HEAD_DIM // 2)
    rope = config_of(file, tmp_path).ropes[0]
    assert rope.factors_for(32) == "rope_factors_short.weight"
    assert rope.factors_for(33) == "rope_factors_long.weight"
    assert rope.scaling.attention_factor == 1.25


def test_an_unrotated_table_keeps_every_value():
    """x cos 0 - y sin 0 is x for every finite x and y."""
    table = unrotated_table(3, 8)
    assert table.shape == rotary_table(3, 1e4, 8).shape
    x, y = np.float32([1.5, -2e30]), np.float32([-3e38, 1e-40])
    assert (x * table[2, 0, 0] - y * table[2, 1, 0] == x).all()


def test_queries_of_ministral_grow_with_every_original_context():
    table = growth_table(200, 64, 0.25)
    assert table.shape == (200, 2, 1)
    expected = 1 + 0.25 * np.log(1 + np.arange(200) // 64)
    assert (table[:, 0, 0] == expected.astype(np.float32)).all()
    assert not table[:, 1].any()


def test_yarn_of_ministral_leaves_sizes_alone(tmp_path):
    """The files' multiplier is 1; without it, sine and cosine grow as in other families."""
    scalings = [
        config_of(with_keys("mistral3", {**YARN, **more}), tmp_path).ropes[0].scaling
        for more in ({"rope.scaling.yarn_log_multiplier": 1.0}, {})
    ]
    alone, grown = (rotary_table(1, 1e4, HEAD_DIM, scaling)[0, 0, 0] for scaling in scalings)
    assert alone == 1.0
    assert grown == np.float32(1 + 0.1 * np.log(4.0))


def test_yarn_reads_its_betas(tmp_path):
    keys = {"yarn_beta_fast": 24.0, "yarn_beta_slow": 2.0, "attn_factor": 1.5}
    written = {f"rope.scaling.{name}": value for name, value in keys.items()}
    scaling = config_of(with_keys("qwen3", {**YARN, **written}), tmp_path).ropes[0].scaling
    assert scaling == RotaryScaling(4.0, True, 64, 1.5, beta_fast=24.0, beta_slow=2.0)
    plain = config_of(with_keys("qwen3", YARN), tmp_path).ropes[0].scaling
    tables = [rotary_table(64, 1e4, HEAD_DIM, each) for each in (scaling, plain)]
    assert (tables[0] != tables[1]).any()


@pytest.mark.parametrize("name", ["logit_scale", "attention.scale", "expert_weights_scale"])
def test_a_value_without_effect_is_accepted(name, tmp_path):
    config = config_of(with_keys("qwen2", {name: CHANGING[name][-1]}), tmp_path)
    assert config == config_of(family_file("qwen2"), tmp_path)


def test_layers_that_images_enter_mean_nothing_for_text(tmp_path):
    files = (with_keys("qwen3vl", {"n_deepstack_layers": count}) for count in (0, 3, 4))
    configs = [config_of(file, tmp_path) for file in files]
    assert configs[0] == configs[1] == configs[2]


def test_a_bias_tells_how_experts_are_chosen_where_the_file_does_not(tmp_path):
    """Those of deepseek2, and of ERNIE, whose softmax weights them either way."""
    for name in ("deepseek2", "ernie4_5-moe"):
        file = with_keys(name, {"expert_gating_func": None})
        for layer in range(1, LAYERS):
            del file.values[f"blk.{layer}.exp_probs_b.bias"]
        mixture = config_of(file, tmp_path).experts
        assert mixture is not None
        assert (mixture.choice_bias, mixture.softmax) == (False, False)
    graph_of(file, tmp_path)


OLDER: Mapping[str, Any] = {
    "attention.head_count_kv": HEADS, "attention.key_length": SIZE,
    "attention.value_length": VALUE, "attention.key_length_mla": None,
    "attention.value_length_mla": None,
}  # fmt: skip
"""What files have that were converted before latent rows."""


def test_an_older_file_is_read_as_a_new_one(tmp_path):
    older = config_of(with_keys("deepseek2", OLDER), tmp_path)
    assert older == config_of(family_file("deepseek2"), tmp_path)
