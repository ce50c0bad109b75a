"""Shapes of published models, as sparse files: planned, verified, exported without their data."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contract.dtypes import F16
from contract.ir.codec import decode, encode, graph_digest
from contract.ir.verify import verify
from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from reference.cpu.tier import CpuTier
from reference.limits import whole_contexts
from reference.memory.planner import plan_memory
from reference.model.gguf.file import GgufFile
from reference.model.open import open_model

MIB, GIB = 1 << 20, 1 << 30
SHAPES = {"35b-a3b": "qwen35moe", "26b-a4b": "gemma4", "31b": "gemma4"}
"""Qwen 3.6 35B-A3B and two of Gemma 4, by size; all are in F32 on disk."""
PARAMETERS = {"35b-a3b": (34.7, 3.45), "26b-a4b": (25.2, 3.8), "31b": (30.7, 30.7)}
"""Billions, of all and of those a token uses, as published."""
KV_PER_TOKEN = {"35b-a3b": 20 << 10, "26b-a4b": 220 << 10, "31b": 880 << 10}
"""Bytes in F16. Gemma 4: 25 or 50 windowed layers of 8 or 16 heads of 256 channels, the others of
2 or 4 heads of 512."""
RECURRENT = {"35b-a3b": 30 * (3 * 8192 + 32 * 128 * 128) * 4, "26b-a4b": 0, "31b": 0}
CONTEXT = 4096


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("shapes")
    found = {}
    for size, architecture in SHAPES.items():
        found[size] = folder / f"{size}.gguf"
        write_synthetic(found[size], sized_spec(size, architecture=architecture), sparse=True)
    return found


@pytest.fixture(autouse=True)
def no_tensor_data(monkeypatch) -> None:
    """Whoever asks for the bytes of more than a norm's weights fails."""
    for name in ("tensor_bytes", "tensor_array"):
        read = getattr(GgufFile, name)

        def limited(file: GgufFile, tensor: str, read: Callable[..., Any] = read) -> Any:
            assert file.tensors[tensor].nbytes <= 4 * 512, f"{tensor} was read"
            return read(file, tensor)

        monkeypatch.setattr(GgufFile, name, limited)


@pytest.mark.parametrize("size", SHAPES)
def test_a_sparse_file_takes_no_disk(files, size):
    status = files[size].stat()
    assert status.st_size > 90 * GIB
    assert status.st_blocks * 512 < 32 * MIB


@pytest.mark.parametrize("size", SHAPES)
def test_the_graph_verifies_and_survives_the_codec(files, size):
    model = open_model(files[size])
    with model.file:
        limits = whole_contexts(1, CONTEXT, F16, step_tokens=257, step_rows=1)
        graph = model.graph(limits)
        verify(graph)
        again = decode(encode(graph))
        assert again == graph
        assert graph_digest(again) == graph_digest(graph)
        other = model.graph(whole_contexts(1, CONTEXT + 16, F16, step_tokens=257, step_rows=1))
        assert graph_digest(other) != graph_digest(graph)


@pytest.mark.parametrize("size", SHAPES)
def test_the_memory_plan_is_the_published_one(files, size):
    model = open_model(files[size])
    with model.file, CpuTier() as tier:
        limits = whole_contexts(2, CONTEXT, F16, step_tokens=257, step_rows=1)
        graph = model.graph(limits)
        plan = plan_memory(graph, limits, tier.footprint(graph, limits.largest))
    assert plan.kv_per_token == KV_PER_TOKEN[size]
    assert plan.kv == 2 * CONTEXT * KV_PER_TOKEN[size]
    assert plan.recurrent_per_slot == RECURRENT[size]
    if plan.recurrent:
        assert round(plan.recurrent_per_slot / MIB, 1) == 62.8
    assert plan.total > plan.kv + plan.recurrent + PARAMETERS[size][0] * 1e9


@pytest.mark.parametrize("size", SHAPES)
def test_inspect_says_what_the_layers_are(zinc, files, size):
    result = zinc("inspect", files[size], "--json", "--context", CONTEXT, "--kv-dtype", "f16")
    assert result.code == 0, result.err
    facts = json.loads(result.out)
    run = facts["run"]
    billions = facts["parameters"] / 1e9, run["active_parameters"] / 1e9
    assert billions == pytest.approx(PARAMETERS[size], rel=0.01)
    assert facts["types"]["f32"]["bytes"] == 4 * facts["parameters"]
    assert run["memory"]["kv_per_token"] == KV_PER_TOKEN[size]
    assert run["memory"]["recurrent_per_slot"] == RECURRENT[size]
    each = [entry["kv_per_token"] * len(entry["layers"]) for entry in run["attention"]]
    assert sum(each) == KV_PER_TOKEN[size]
    described = run["attention"] + run["recurrent"]
    assert sorted(n for entry in described for n in entry["layers"]) == list(range(run["layers"]))
    check_layers(size, run)


def check_layers(size: str, run: dict[str, Any]) -> None:
    if SHAPES[size] == "qwen35moe":
        (attention,), (net,) = run["attention"], run["recurrent"]
        assert attention["layers"] == list(range(3, 40, 4))
        assert (attention["heads"], attention["kv_heads"], attention["head_dim"]) == (16, 2, 256)
        assert (attention["window"], attention["rope"]["channels"]) == (0, 64)
        assert (net["value_heads"], net["key_heads"], net["head_dim"], net["taps"]) == (
            32, 16, 128, 4,
        )  # fmt: skip
    else:
        windowed, full = run["attention"]
        assert (windowed["window"], full["window"]) == (1024, 0)
        assert (windowed["head_dim"], full["head_dim"]) == (256, 512)
        assert full["layers"] == list(range(5, run["layers"], 6))
        assert full["rope"]["divisors"] == ["rope_freqs.weight"]
        assert (windowed["rope"]["base"], full["rope"]["base"]) == (1e4, 1e6)
        assert run["recurrent"] == []
    (block,) = run["feed_forward"]
    expected = {
        "35b-a3b": {"width": 0, "experts": 256, "experts_used": 8, "expert_width": 512,
                    "shared_expert_width": 512},
        "26b-a4b": {"width": 2112, "experts": 128, "experts_used": 8, "expert_width": 704,
                    "shared_expert_width": 0},
        "31b": {"width": 21504},
    }[size]  # fmt: skip
    assert block == {"layers": list(range(run["layers"])), **expected}


def test_inspect_shows_them_in_a_line_each(zinc, files, tiny_model):
    text = zinc("inspect", files["35b-a3b"], "--context", CONTEXT, "--kv-dtype", "f16").out
    assert "3,454,988,928 of them for a token" in text
    assert "10 of 40 layers (3, 7, 11, ...): 16 heads (2 for keys, values) of 256" in text
    assert "30 of 40 layers (0, 1, 2, ...): 32 value heads and 16 key heads of 128" in text
    assert "8 of 256 experts of width 512 and a shared one of 512" in text
    assert "1 slot of 65,863,680 bytes" in text
    assert f"attending to {CONTEXT:,} tokens" in text
    windows = zinc("inspect", files["26b-a4b"], "--context", CONTEXT, "--kv-dtype", "f16").out
    assert "window 1,024, 8,192 bytes a token in each" in windows
    assert "width 2,112 and 8 of 128 experts of width 704" in windows
    assert "of them for a token" not in zinc("inspect", tiny_model).out


def test_all_three_side_by_side(zinc, files, tmp_path):
    paths = list(files.values())
    documents = json.loads(zinc("graph", *paths).out)
    assert [document["architecture"] for document in documents] == list(SHAPES.values())
    dot = zinc("graph", *paths, "--format", "dot").out
    page = tmp_path / "compare.html"
    assert zinc("graph", *paths, "--format", "html", "-o", page).code == 0
    text = page.read_text()
    for path in paths:
        assert path.name in dot
        assert path.name in text
