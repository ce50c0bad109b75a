"""What ``zinc-rt inspect`` says of layers that differ, share or are left out."""

import json
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from tests.families_table import FAMILIES


@pytest.fixture
def run_of(zinc, tmp_path) -> Callable[[str], dict[str, Any]]:
    """What inspect tells of running a model of the table."""

    def inspect(name: str) -> dict[str, Any]:
        path = tmp_path / f"{name}.gguf"
        write_synthetic(path, sized_spec("tiny", **FAMILIES[name]))
        result = zinc("inspect", path, "--json", "--context", 64, "--kv-dtype", "f16")
        assert result.code == 0, result.err
        facts: dict[str, Any] = json.loads(result.out)
        return {**facts["run"], "parameters": facts["parameters"]}

    return inspect


def test_draft_blocks_take_no_part_in_a_token(run_of):
    """What one adds: its weights, and keys and values of one more layer."""
    plain, drafting = run_of("qwen35moe"), run_of("qwen35moe-nextn")
    assert plain["drafts"] == {"blocks": 0, "problem": None}
    drafts = drafting["drafts"]
    assert (drafts["blocks"], drafts["problem"]) == (1, None)
    (attention,) = drafting["attention"]
    assert drafts["kv_per_token"] == attention["kv_per_token"]
    assert 0 < drafts["weights"] < drafts["total"]
    assert drafting["active_parameters"] == plain["active_parameters"] < plain["parameters"]
    assert drafting["parameters"] > plain["parameters"]


@pytest.mark.parametrize(
    ("name", "told"),
    [("qwen3", "by repeated text or a smaller model"), ("qwen35moe-nextn", "by its draft block: ")],
)
def test_it_tells_what_drafts_a_file_can_make(zinc, tmp_path, name, told):
    path = tmp_path / f"{name}.gguf"
    write_synthetic(path, sized_spec("tiny", **FAMILIES[name]))
    line = next(
        line for line in zinc("inspect", path).out.splitlines() if line.startswith("drafts")
    )
    assert told in line


@pytest.mark.parametrize(("name", "images"), [("qwen3", None), ("qwen3vl", "not read")])
def test_it_tells_that_images_are_not_read(zinc, tmp_path, name, images):
    path = tmp_path / f"{name}.gguf"
    write_synthetic(path, sized_spec("tiny", **FAMILIES[name]))
    assert json.loads(zinc("inspect", path, "--json").out)["run"]["images"] == images
    lines = zinc("inspect", path).out.splitlines()
    assert any(line.startswith("images ") for line in lines) == (images is not None)


def test_it_tells_why_a_draft_block_cannot_be_used(zinc, tmp_path):
    """A tensor of the block has another name."""
    path = tmp_path / "m.gguf"
    write_synthetic(path, sized_spec("tiny", **FAMILIES["qwen35moe-nextn"]))
    content = path.read_bytes()
    assert content.count(b"nextn.hnorm") == 1
    path.write_bytes(content.replace(b"nextn.hnorm", b"nextn.xnorm"))
    line = next(
        line for line in zinc("inspect", path).out.splitlines() if line.startswith("drafts")
    )
    assert "its draft block cannot be used: " in line
    assert "nextn.hnorm" in line


def test_experts_count_as_far_as_they_are_used(run_of):
    """Three matrices of each expert, of which a token leaves 9 of 12."""
    run = run_of("qwen3moe")
    idle = (12 - 3) * 3 * 128 * 96 * run["layers"]
    assert run["active_parameters"] == run["parameters"] - idle
    dense = run_of("qwen3")
    assert dense["active_parameters"] == dense["parameters"]
    assert "experts" not in dense["feed_forward"][0]


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("qwen35", {"kind": "delta net", "value_heads": 6, "key_heads": 2, "head_dim": 32}),
        ("lfm2", {"kind": "short convolution", "taps": 3}),
        ("granitehybrid", {"kind": "mamba", "heads": 8, "head_dim": 32, "state_size": 32}),
    ],
)
def test_recurrent_layers_name_their_kind(run_of, name, facts):
    run = run_of(name)
    (entry,) = run["recurrent"]
    assert entry | facts == entry
    (attention,) = run["attention"]
    assert len(entry["layers"]) + len(attention["layers"]) == run["layers"]


def test_layers_that_share_keys_and_values_take_none(run_of):
    run = run_of("gemma4-shared-kv")
    owners = [n for entry in run["attention"] if entry["owns_kv"] for n in entry["layers"]]
    assert sorted(owners) == [0, 1, 2]
    total = sum(entry["kv_per_token"] * len(entry["layers"]) for entry in run["attention"])
    assert total == run["memory"]["kv_per_token"] == 3 * 256
    widths = {entry["width"]: entry["layers"] for entry in run["feed_forward"]}
    assert widths == {256: [0, 1, 2], 320: [3, 4, 5, 6]}


@pytest.mark.parametrize(
    ("name", "scaling", "divisors"),
    [
        ("llama", None, []),
        ("llama-linear", "linear", []),
        ("llama-yarn", "yarn", []),
        ("llama-rope-freqs", None, ["rope_freqs.weight"]),
        ("mistral3", "yarn", []),
    ],
)
def test_rotations(run_of, name, scaling, divisors):
    (entry,) = run_of(name)["attention"]
    rope = entry["rope"]
    assert (rope["scaling"], rope["divisors"], rope["pairs"]) == (scaling, divisors, "neighbours")
    assert (rope["factor"] != 1.0) == (scaling is not None)


def test_storage_the_heads_do_not_allow_is_refused_with_the_remedy(zinc, tmp_path):
    path = tmp_path / "model.gguf"
    write_synthetic(path, sized_spec("tiny", **FAMILIES["gemma4-shared-kv"]))
    commands = (("inspect", path), ("run", "hi", "--model", path))
    for command, kv_dtype in product(commands, ("q8_0", "i3r")):
        refused = zinc(*command, "--kv-dtype", kv_dtype)
        assert (refused.code, refused.out) == (2, "")
        assert "stores 32 channels of a head at a time; head_dim is 16 in layer 0" in refused.err
        assert "take f32 or f16 or i12" in refused.err
