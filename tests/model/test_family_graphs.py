"""What the graphs of the families are made of."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from contract.errors import ModelFileError, UnsupportedModel
from contract.ir.graph import BufferKind, Graph
from contract.opcodes import Opcode
from contract.types import Request
from reference.cpu.tier import CpuTier
from reference.engine import Engine, EngineOptions
from reference.limits import Limits
from reference.model.families import FAMILIES
from reference.model.families.emitter import CLAMPED
from reference.model.open import open_model
from reference.runner import ModelRunner
from tests.families_table import EACH_KIND
from tests.families_table import FAMILIES as NAMED
from tests.long_cases import long_except
from tests.model.family_file import (
    CHANNELS,
    FULL_HEAD_DIM,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MAMBA_HEADS,
    STATE,
    TAPS,
    VALUE_HEADS,
    VOCAB,
    WINDOW,
    FamilyFile,
    family_file,
)
from tests.model.family_file import EXPERTS as EXPERT_COUNT
from tests.model.family_opcodes import composition

LIMITS = Limits(slots=2, context=64, pages=8, step_tokens=32, step_rows=32)
TOKENS = tuple((5 + 37 * n) % VOCAB for n in range(21))
"""More than a page, more than a window, and no multiple of anything."""


def graph_of(file: FamilyFile, folder: Path, limits: Limits = LIMITS) -> Graph:
    """The verified graph of a file."""
    model = open_model(file.write(folder / "model.gguf"))
    graph = model.graph(limits)
    model.close()
    return graph


EACH_KIND_ONCE = long_except(
    sorted(FAMILIES), *(NAMED[name]["architecture"] for name in (*EACH_KIND, "gemma3n", "gpt2"))
)
"""One emitter says for all families what drafts and constraints add."""


@pytest.mark.parametrize("architecture", EACH_KIND_ONCE)
def test_a_graph_without_drafts_is_that_with_less(tmp_path, architecture):
    """What a runner takes for steps without drafts is what would be built."""
    model = open_model(family_file(architecture).write(tmp_path / "model.gguf"))
    for more in ({}, {"digests": True, "top_log_probabilities": 3, "scores": True, "biases": 2}):
        limits = replace(LIMITS, **more)
        built = model.graph(limits)
        assert model.graph(replace(limits, slot_states=4, draft_tokens=5)) != built
        expected = graph_of(family_file(architecture), tmp_path, replace(limits, slot_states=4))
        derived = model.graph(replace(limits, slot_states=4))
        assert (derived, list(derived.buffers)) == (expected, list(expected.buffers))
    model.close()


def logits(path: Path, chunk: int) -> np.ndarray:
    """All logits of TOKENS on the CPU tier, ``chunk`` tokens a step."""
    parts: list[np.ndarray] = []
    model = open_model(path)
    with CpuTier() as tier, ModelRunner(model, tier, LIMITS) as runner:
        engine = Engine(runner, EngineOptions(chunk_tokens=chunk))
        engine.submit(Request(1, TOKENS, 0), lambda _, rows: parts.append(rows))
        list(engine.run())
    model.close()
    return np.concatenate(parts)


def counts(graph: Graph) -> dict[str, int]:
    """Nodes by lower-case opcode."""
    names = [node.opcode.name.lower() for node in graph.nodes]
    return {name: names.count(name) for name in set(names)}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_builds_the_graph_of_its_formulas(architecture, tmp_path):
    """Opcode by opcode, fused wherever nothing else reads what is fused away."""
    graph = graph_of(family_file(architecture), tmp_path)
    assert counts(graph) == composition()[architecture]


@pytest.mark.parametrize("architecture", EACH_KIND_ONCE)
def test_every_family_takes_constraints_where_its_limits_do(architecture, tmp_path):
    """Masks and biases are operands of the sampling, log-probabilities one node more."""
    plain = graph_of(family_file(architecture), tmp_path)
    limits = replace(LIMITS, masks=3, biases=5, top_log_probabilities=7)
    graph = graph_of(family_file(architecture), tmp_path, limits)
    added = {name: decl.shape for name, decl in graph.buffers.items() if name not in plain.buffers}
    assert added == {
        "request.allowed": (3, VOCAB // 32),
        "request.bias": (LIMITS.slots * 5, 2),
        "output.log_probability": ("rows",),
        "output.top_ids": ("rows", 7),
        "output.top_log_probabilities": ("rows", 7),
    }
    assert counts(graph) == {**counts(plain), "log_probabilities": 1}
    sample = next(node for node in graph.nodes if node.opcode is Opcode.SAMPLE)
    assert sample.operands["allowed"].buffer == "request.allowed"
    assert sample.operands["bias"].buffer == "request.bias"


def test_delta_net_states(tmp_path):
    """One state of each kind in recurrent layers, keys and values in the others."""
    graph = graph_of(family_file("qwen35"), tmp_path)
    states = {decl.name: decl.shape for decl in graph.of_kind(BufferKind.STATE)}
    assert states.pop("state.slots") == (LIMITS.slots, 8)
    assert states.pop("state.recent") == (LIMITS.slots, LIMITS.recent_tokens)
    kv = (LIMITS.pages, 2, 16, KV_HEADS, HEAD_DIM)
    assert states == {
        "state.conv[0]": (LIMITS.slots, TAPS - 1, CHANNELS),
        "state.delta[0]": (LIMITS.slots, VALUE_HEADS, STATE, STATE),
        "state.kv[1]": kv,
        "state.conv[2]": (LIMITS.slots, TAPS - 1, CHANNELS),
        "state.delta[2]": (LIMITS.slots, VALUE_HEADS, STATE, STATE),
        "state.kv[3]": kv,
    }


def test_short_convolution_states(tmp_path):
    """A state in layers that convolve; their gates are parts of one projection."""
    graph = graph_of(family_file("lfm2"), tmp_path)
    states = {decl.name: decl.shape for decl in graph.of_kind(BufferKind.STATE)}
    kv, past = (LIMITS.pages, 2, 16, KV_HEADS, HEAD_DIM), (LIMITS.slots, TAPS - 1, HIDDEN)
    assert {name: shape for name, shape in states.items() if "[" in name} == {
        "state.conv[0]": past, "state.kv[1]": kv, "state.conv[2]": past, "state.kv[3]": kv,
    }  # fmt: skip
    node = next(node for node in graph.nodes if node.opcode is Opcode.SSM_CONV1D)
    parts = {name: node.operands[name].columns for name in ("input_gate", "output_gate", "x")}
    assert list(parts.values()) == [(n * HIDDEN, (n + 1) * HIDDEN) for n in range(3)]
    assert len({node.operands[name].buffer for name in parts}) == 1


def test_mamba_states(tmp_path):
    """The past of the convolution, and the state of every head."""
    graph = graph_of(family_file("granitehybrid"), tmp_path)
    states = {decl.name: decl.shape for decl in graph.of_kind(BufferKind.STATE)}
    assert states["state.conv[0]"] == (LIMITS.slots, TAPS - 1, 2 * HIDDEN + 2 * STATE)
    width = 2 * HIDDEN // MAMBA_HEADS
    assert states["state.scan[2]"] == (LIMITS.slots, MAMBA_HEADS, width, STATE)
    assert "state.kv[0]" not in states
    tables = {decl.name for decl in graph.of_kind(BufferKind.CONSTANT)}
    assert tables == {"constant.rope_table_unrotated"}


def test_queries_grow_where_a_context_is_longer_than_the_original(tmp_path):
    """A rotation of pairs by the angle 0, of queries alone; a short context has none."""
    file = family_file("mistral3", attention__temperature_scale=0.1)
    file.keys["rope.scaling.original_context_length"] = LIMITS.context // 2
    graph = graph_of(file, tmp_path)
    grown = {
        node.operands["x"].buffer: node.operands["rope_table"].buffer
        for node in graph.nodes
        if node.opcode is Opcode.ROPE
    }
    assert len(grown) == LAYERS
    assert set(grown.values()) == {"constant.query_growth"}
    assert graph.buffers["constant.query_growth"].shape == (LIMITS.context, 2, 1)
    short = graph_of(file, tmp_path, replace(LIMITS, context=LIMITS.context // 2))
    assert counts(short) == counts(graph_of(family_file("mistral3"), tmp_path))


def test_shared_layers_have_no_cache_and_no_write(tmp_path):
    graph = graph_of(family_file("gemma4 per layer"), tmp_path)
    states = {decl.name for decl in graph.of_kind(BufferKind.STATE)}
    assert states == {"state.slots", "state.recent", "state.kv[0]", "state.kv[1]"}
    read = {
        node.name: node.operands["kv"].buffer
        for node in graph.nodes
        if node.opcode is Opcode.FLASH_ATTN_BATCHED
    }
    assert read == {f"attention[{n}]": f"state.kv[{n % 2}]" for n in range(LAYERS)}
    assert counts(graph)["rms_norm_fused_rope_kv_write"] == 2
    assert counts(graph)["rope"] == 2


def test_every_bias_and_sink_of_gpt_oss_is_an_operand(tmp_path):
    graph = graph_of(family_file("gpt-oss"), tmp_path)
    nodes = {node.name: node for node in graph.nodes}
    for layer in range(LAYERS):
        assert "sinks" in nodes[f"attention[{layer}]"].operands
        assert nodes[f"attention[{layer}]"].params["window"] == (0 if layer % 2 else WINDOW)
        assert "bias" in nodes[f"moe_route[{layer}]"].operands
        assert {"gate_bias", "up_bias"} <= set(nodes[f"moe_gate_up[{layer}]"].operands)
        assert "bias" in nodes[f"moe_down[{layer}]"].operands
        assert nodes[f"moe_swiglu[{layer}]"].params["activation"] == CLAMPED


def test_the_bias_of_a_choice_is_an_operand_behind_the_dense_layers(tmp_path):
    nodes = {node.name: node for node in graph_of(family_file("lfm2moe"), tmp_path).nodes}
    routers = [nodes.get(f"moe_route[{layer}]") for layer in range(LAYERS)]
    assert routers[0] is None
    assert all(router and "choice_bias" in router.operands for router in routers[1:])
    file = family_file("lfm2moe")
    del file.values["blk.2.exp_probs_b.bias"]
    with pytest.raises(ModelFileError, match=r"blk\.2\.exp_probs_b\.bias: is missing"):
        graph_of(file, tmp_path)


def test_a_bias_beside_a_scale_of_experts_is_refused(tmp_path):
    """Which of them comes first would be a guess."""
    file = family_file("gpt-oss")
    file.add("blk.0.ffn_down_exps.scale", EXPERT_COUNT)
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.ffn_down_exps\.bias"):
        graph_of(file, tmp_path)


def test_a_rotary_table_for_every_kind_of_layer(tmp_path):
    graph = graph_of(family_file("gemma4"), tmp_path)
    tables = {decl.name: decl.shape for decl in graph.of_kind(BufferKind.CONSTANT)}
    assert tables == {
        "constant.rope_table": (LIMITS.context, 2, FULL_HEAD_DIM // 2),
        "constant.rope_table_sliding": (LIMITS.context, 2, HEAD_DIM // 2),
    }
    used = {
        node.name: node.operands["rope_table"].buffer
        for node in graph.nodes
        if "rope_table" in node.operands
    }
    assert used["kv_write[0]"] == "constant.rope_table_sliding"
    assert used["kv_write[1]"] == "constant.rope_table"


def test_slices_name_the_rows_they_hold(tmp_path):
    """Query and gate rows of a head, beta and alpha of a key head."""
    graph = graph_of(family_file("qwen3next"), tmp_path)
    sources = {decl.name: decl.source for decl in graph.of_kind(BufferKind.WEIGHT)}
    assert sources["model.attn_q.weight[1]"] == f"blk.1.attn_q.weight[0:{HEAD_DIM}/{2 * HEAD_DIM}]"
    gate = f"blk.1.attn_q.weight[{HEAD_DIM}:{2 * HEAD_DIM}/{2 * HEAD_DIM}]"
    assert sources["model.attn_q_gate.weight[1]"] == gate
    fused = graph_of(family_file("qwen35 qkv"), tmp_path).buffers
    rows, end = 2 * HEADS * HEAD_DIM, 2 * (HEADS + KV_HEADS) * HEAD_DIM
    gate = f"blk.1.attn_qkv.weight[0:{rows}/{end}][{HEAD_DIM}:{2 * HEAD_DIM}/{2 * HEAD_DIM}]"
    assert fused["model.attn_q_gate.weight[1]"].source == gate
    assert sources["model.ssm_beta.weight[0]"] == "blk.0.ssm_ba.weight[0:2/4]"
    assert sources["model.ssm_alpha.weight[0]"] == "blk.0.ssm_ba.weight[2:4/4]"


PACKINGS = {
    **{f"{name} qkv": name for name in ("llama", "qwen2", "gemma4", "qwen35")},
    "qwen35moe gates and ups": "qwen35moe", "qwen3next ssm_in": "qwen3next",
}  # fmt: skip


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_packing_changes_no_bit(packing, tmp_path):
    separate, packed = family_file(PACKINGS[packing]), family_file(packing)
    assert set(packed.values) != set(separate.values)
    first = logits(separate.write(tmp_path / "separate.gguf"), 8)
    second = logits(packed.write(tmp_path / "packed.gguf"), 8)
    assert np.array_equal(first, second)


def test_a_scale_multiplies_its_product(tmp_path):
    """A one-element scale of a matrix is the same as the matrix times a power of two."""
    scaled, plain = family_file("qwen3"), family_file("qwen3")
    for name in ("attn_v", "ffn_up"):
        scaled.values[f"blk.0.{name}.scale"] = np.array([0.5], np.float32)
        plain.values[f"blk.0.{name}.weight"] = plain.values[f"blk.0.{name}.weight"] / 2
    assert counts(graph_of(scaled, tmp_path))["scale_columns"] == 2
    first, second = (
        logits(file.write(tmp_path / f"{n}.gguf"), 8) for n, file in enumerate((scaled, plain))
    )
    assert np.array_equal(first, second)


def test_drafting_blocks_are_ignored_knowingly(tmp_path):
    """Tensors of the block behind the last layer; not those of blocks nobody declared."""
    file = family_file("qwen35 drafts")
    plain = graph_of(family_file("qwen35"), tmp_path)
    assert [node.name for node in graph_of(file, tmp_path).nodes] == [n.name for n in plain.nodes]
    file.add(f"blk.{LAYERS + 1}.attn_norm.weight", HIDDEN)
    with pytest.raises(UnsupportedModel, match=r"tensor blk\.5\.attn_norm\.weight: is not part"):
        graph_of(file, tmp_path)


@pytest.mark.parametrize(
    ("seeing", "plain"), [("qwen2vl", "qwen2"), ("qwen3vl", "qwen3"), ("qwen3vlmoe", "qwen3moe")]
)
def test_a_graph_for_text_is_that_of_the_plain_family(seeing, plain, tmp_path):
    graphs = [graph_of(family_file(name), tmp_path) for name in (seeing, plain)]
    assert graphs[0].nodes == graphs[1].nodes
    assert graphs[0].buffers == graphs[1].buffers
