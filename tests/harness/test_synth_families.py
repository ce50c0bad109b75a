"""Synthetic files of mixtures of experts, delta-net hybrids and Gemmas: layouts, types, sizes."""

import hashlib
import json
import math
import os
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from contract.errors import ConfigError
from harness.synth.__main__ import main
from harness.synth.architectures import ARCHITECTURES
from harness.synth.plan import plan_tensors
from harness.synth.sizes import size_names, sized_spec
from harness.synth.spec import SynthSpec, fields_of, spec_of
from harness.synth.write import write_synthetic
from reference.model.gguf.file import open_gguf
from reference.model.tokenizer import load_tokenizer
from tests.families_table import DENSE, FAMILIES, GEMMAS
from tests.tables import table

TABLES = table(__file__, "synth_families")

BILLION = 1e9
PUBLISHED = {
    ("qwen3", "0.6b"): 0.596, ("qwen3", "8b"): 8.191, ("qwen3moe", "1b"): 1.046,
    ("qwen35moe", "1b"): 0.966, ("qwen35moe", "35b-a3b"): 34.661, ("lfm2", "1.2b"): 1.177,
    ("deepseek2", "16b-a2.4b"): 15.706, ("deepseek2", "30b-a3b"): 29.943,
    ("deepseek2", "671b-a37b"): 671.026, ("deepseek2", "1t-a32b"): 1026.408,
    ("glm4moe", "106b-a12b"): 109.227, ("lfm2moe", "8b-a1b"): 8.340,
    ("exaone4", "1.2b"): 1.279, ("exaone4", "32b"): 32.003, ("ernie4_5", "0.3b"): 0.361,
    ("seed_oss", "36b"): 36.151, ("granitemoe", "3b-a800m"): 3.299,
    ("minimax-m2", "229b-a10b"): 228.690, ("olmoe", "7b-a1b"): 6.919,
    ("qwen2moe", "14b-a2.7b"): 14.316, ("qwen2vl", "7b"): 7.616,
    ("qwen3vlmoe", "30b-a3b"): 30.532, ("bailingmoe2", "16b-a1b"): 16.256,
    ("ernie4_5-moe", "21b-a3b"): 21.825, ("exaone-moe", "236b-a23b"): 236.571,
    ("afmoe", "26b-a3b"): 26.124,
    ("hunyuan-dense", "7b"): 7.505, ("gemma2", "2b"): 2.614,
    ("gemma3n", "e2b"): 4.458, ("gemma3n", "e4b"): 6.869, ("exaone", "7.8b"): 7.818,
    ("mamba2", "7b"): 7.285, ("kimi-linear", "48b-a3b"): 49.123,
    ("gemma4", "26b-a4b"): 25.233, ("gemma4", "31b"): 30.697,
}  # fmt: skip
"""Billions of weights by architecture and size; 34.66, 25.2 and 30.7 are those of the models."""


def written(path: Path, spec: SynthSpec) -> Path:
    write_synthetic(path, spec)
    return path


def arrays(path: Path) -> dict[str, np.ndarray]:
    """The stored rows of every tensor, uint8[rows, row_bytes]."""
    with open_gguf(path) as file:
        return {name: file.tensor_bytes(name).copy() for name in file.tensors}


def types(spec: SynthSpec) -> dict[str, str]:
    """Storage types by kind of tensor; one string of all layers where they differ."""
    found: dict[str, dict[str, None]] = {}
    for tensor in plan_tensors(spec):
        found.setdefault(tensor.kind, {})[tensor.dtype.name] = None
    return {kind: " ".join(sorted(names)) for kind, names in found.items()}


LATER = TABLES["later"]
"""Digests of the files of architectures that came later."""


def digest_of(folder: Path, names: list[str]) -> str:
    """The digest of the files of these variants, one after the other."""
    digest = hashlib.sha256()
    for name in names:
        for quant in ("f32", "q4_k_m"):
            spec = sized_spec("tiny", quant=quant, seed=5, **FAMILIES[name])
            digest.update(written(folder / "m.gguf", spec).read_bytes())
    return digest.hexdigest()


def test_bytes_of_a_specification_never_change(tmp_path):
    """Every variant's file has the digest it had when it was defined."""
    later = [name for name, fields in FAMILIES.items() if fields["architecture"] in LATER]
    names = [name for name in FAMILIES if name not in DENSE and name not in later]
    assert digest_of(tmp_path, names) == (
        "d277b3f23e2cb6edeb0ea6c158ebf382ede71683e9358fadecdc10b2df9cdef4"
    )


@pytest.mark.parametrize("family", LATER)
def test_bytes_of_later_families_never_change(tmp_path, family):
    names = [name for name, fields in FAMILIES.items() if fields["architecture"] == family]
    assert digest_of(tmp_path, names) == LATER[family]


def test_every_architecture_has_every_general_size():
    for architecture in ARCHITECTURES:
        for size in ("tiny", "small"):
            assert size in size_names(architecture)
            assert plan_tensors(sized_spec(size, architecture=architecture))


@pytest.mark.parametrize(("architecture", "size"), PUBLISHED, ids="-".join)
def test_named_sizes_have_the_weights_of_their_name(architecture, size):
    tensors = plan_tensors(sized_spec(size, architecture=architecture))
    count = sum(math.prod(tensor.shape) for tensor in tensors)
    assert count / BILLION == pytest.approx(PUBLISHED[architecture, size], abs=6e-4)


@pytest.mark.parametrize("quant", ["f32", "q4_k", "q5_1"])
@pytest.mark.parametrize("architecture", ["qwen35moe", "gemma4"])
def test_fused_experts_hold_the_separate_ones(tmp_path, architecture, quant):
    """Expert by expert, gate rows and then up rows; everything else is the same."""
    fields = {"architecture": architecture, "quant": quant}
    experts = {"count": 5, "width": 96, "shared_width": 64 if architecture == "qwen35moe" else 0}
    apart, fused = (
        arrays(written(tmp_path / "m.gguf", sized_spec("tiny", **fields, experts=both)))
        for both in (experts, {**experts, "fused": True})
    )
    for name in [name for name in fused if name.endswith("ffn_gate_up_exps.weight")]:
        halves = np.split(fused.pop(name).reshape(5, 2 * 96, -1), 2, axis=1)
        for kind, half in zip(("gate", "up"), halves, strict=True):
            own = apart.pop(name.replace("gate_up", kind))
            assert half.tobytes() == own.tobytes()
    assert fused.keys() == apart.keys()
    assert all((fused[name] == apart[name]).all() for name in fused)


def test_ssm_in_holds_the_separate_projections(tmp_path):
    """For each key head its query, its key, its values and their gates."""
    fields = FAMILIES["qwen3next"]
    apart = arrays(written(tmp_path / "a.gguf", sized_spec("tiny", **fields)))
    packed = {**fields["recurrent"], "packing": "ssm_in"}
    spec = sized_spec("tiny", **{**fields, "recurrent": packed})
    whole = arrays(written(tmp_path / "b.gguf", spec))
    heads, size = 2, 32
    q, k, v = np.split(apart["blk.0.attn_qkv.weight"], [heads * size, 2 * heads * size])
    z = apart["blk.0.attn_gate.weight"]
    parts = [part.reshape(heads, -1, part.shape[-1]) for part in (q, k, v, z)]
    expected = np.concatenate(parts, axis=1)
    assert whole["blk.0.ssm_in.weight"].tobytes() == expected.tobytes()
    assert (whole["blk.0.ssm_ba.weight"] == apart["blk.0.ssm_ba.weight"]).all()


def test_ssm_ba_holds_beta_and_alpha_by_key_head(tmp_path):
    hybrid = dict(FAMILIES["qwen35"])
    hybrid = {**hybrid, "experts": FAMILIES["qwen3next"]["experts"]}
    apart, joined = (
        arrays(written(tmp_path / "m.gguf", sized_spec("tiny", **hybrid | {"architecture": name})))
        for name in ("qwen35moe", "qwen3next")
    )
    halves = [apart[f"blk.0.ssm_{name}.weight"].reshape(2, 3, -1) for name in ("beta", "alpha")]
    expected = np.concatenate(halves, axis=1)
    assert joined["blk.0.ssm_ba.weight"].tobytes() == expected.tobytes()


def test_delta_net_states_decay_slowly(tmp_path):
    """ssm_a is negative; with the time steps drawn a state keeps most of itself every token."""
    spec = sized_spec("tiny", architecture="qwen35", recurrent={"value_heads": 64})
    with open_gguf(written(tmp_path / "m.gguf", spec)) as file:
        rate = file.tensor_array("blk.0.ssm_a")
        step = np.logaddexp(0, file.tensor_array("blk.0.ssm_dt.bias"))
        assert (rate < 0).all()
        assert 0.5 < np.exp(rate * step).mean() < 0.95
        assert not any(".ssm_" in name for name in file.tensors if name.startswith("blk.3."))


def test_mixture_for_experts_and_hybrids():
    """Types as llama.cpp's quantizer chooses them; see also tests/peer/test_mixture.py."""
    eight = sized_spec("small", architecture="llama", quant="q4_k_m", experts={"width": 256})
    found = types(eight)
    assert [found[name] for name in ("attn_q", "attn_k", "attn_v", "attn_output")] == [
        "q4_k", "q8_0", "q8_0", "q5_k",
    ]  # fmt: skip
    assert found["ffn_gate_inp"] == "f32"
    hybrid = types(sized_spec("35b-a3b", architecture="qwen35moe", quant="q4_k_m"))
    assert [kind for kind, name in hybrid.items() if name == "q4_k q6_k"] == [
        "attn_qkv", "ffn_down_exps", "ffn_down_shexp", "attn_v",
    ]  # fmt: skip
    assert hybrid["ssm_conv1d"] == hybrid["ffn_gate_inp_shexp"] == hybrid["ssm_a"] == "f32"
    gemma = types(sized_spec("26b-a4b", architecture="gemma4", quant="q4_k_m"))
    assert gemma["ffn_down_exps"] == gemma["ffn_down"] == "q5_0 q8_0"
    assert gemma["ffn_gate_up_exps"] == "q4_k"
    small = sized_spec("tiny", quant="q4_k_m", **FAMILIES["gemma4-per-layer-embeddings"])
    assert types(small)["per_layer_model_proj"] == "bf16"
    assert types(small)["per_layer_token_embd"] == "q8_0"


def test_sparse_file_has_the_same_header(tmp_path):
    spec = sized_spec("tiny", quant="q4_k_m", **FAMILIES["gemma4-experts"])
    whole, sparse = tmp_path / "whole.gguf", tmp_path / "sparse.gguf"
    write_synthetic(whole, spec)
    write_synthetic(sparse, spec, sparse=True)
    assert whole.stat().st_size == sparse.stat().st_size
    with open_gguf(whole) as full, open_gguf(sparse) as empty:
        assert full.tensors == empty.tensors
        assert full.metadata.keys() == empty.metadata.keys()
        assert not any(empty.tensor_bytes(name).any() for name in empty.tensors)
        start = min(tensor.offset for tensor in full.tensors.values())
    assert whole.read_bytes()[:start] == sparse.read_bytes()[:start]


def test_the_largest_models_need_no_disk(tmp_path):
    out = tmp_path / "m.gguf"
    flags = "--arch gemma4 --size 31b --quant q4_k_m --vocab 300 --sparse"
    assert main([*flags.split(), "--out", str(out)]) == 0
    assert out.stat().st_size > 15e9
    if hasattr(os.stat_result, "st_blocks"):
        assert out.stat().st_blocks * 512 < 10e6


@pytest.mark.parametrize("name", GEMMAS)
def test_gemma_metadata_says_what_each_layer_is(tmp_path, name):
    """Heads and widths by layer fit the shapes of the tensors."""
    spec = sized_spec("tiny", **GEMMAS[name])
    with open_gguf(written(tmp_path / "m.gguf", spec)) as file:
        keys = {key.partition(".")[2]: value for key, value in file.metadata.items()}
        for layer in range(spec.layers):
            size, kv_heads = keys["attention.key_length"], keys["attention.head_count_kv"]
            if spec.architecture == "gemma4":
                windowed = keys["attention.sliding_window_pattern"][layer]
                assert windowed == (layer % 3 < 2)
                size = keys["attention.key_length_swa"] if windowed else size
                kv_heads = kv_heads[layer]
            assert file.tensors[f"blk.{layer}.attn_q.weight"].shape == (4 * size, spec.hidden)
            key = file.tensors.get(f"blk.{layer}.attn_k.weight")
            own = spec.layers - keys.get("attention.shared_kv_layers", 0)
            assert (key is not None) == (layer < own or spec.architecture == "gemma3n")
            assert key is None or key.shape == (kv_heads * size, spec.hidden)


@pytest.mark.parametrize("architecture", ["qwen35", "qwen3next", "gemma3", "gemma4"])
def test_own_tokenizer_encodes_every_byte(tmp_path, architecture):
    path = written(tmp_path / "m.gguf", sized_spec("tiny", architecture=architecture))
    with open_gguf(path) as file:
        tokenizer = load_tokenizer(file.metadata, str(path))
    text = "the cat is on it\t\n" + "".join(map(chr, range(0x20, 0x500))) + "\U0001f600"
    ids = tokenizer.encode(text, add_bos=False)
    expected = unicodedata.normalize("NFC", text) if architecture.startswith("qwen") else text
    assert tokenizer.decode_bytes(ids).decode() == expected
    assert len(ids) < len(text.encode())
    bos = tokenizer.encode("a")[0] == 2
    assert bos == architecture.startswith("gemma")


@pytest.mark.parametrize("name", FAMILIES)
def test_fields_come_back_from_json(name):
    spec = sized_spec("tiny", **FAMILIES[name])
    assert spec_of(json.loads(json.dumps(fields_of(spec)))) == spec


def test_fields_without_groups_are_those_of_the_dense_models():
    """What goldens store of a dense model does not grow with the families."""
    assert not {"experts", "recurrent", "gemma", "nextn_layers"} & fields_of(SynthSpec()).keys()


@pytest.mark.parametrize(("named", "fields"), TABLES["bad_groups_are_refused_by_name"])
def test_bad_groups_are_refused_by_name(named, fields):
    with pytest.raises(ConfigError, match=rf"\b{named}\b") as caught:
        sized_spec("tiny", **fields)
    assert "\n" not in str(caught.value)


def test_size_of_another_architecture_is_refused():
    with pytest.raises(ConfigError, match=r"size is '31b', must be one of tiny, small, 0\.6b"):
        sized_spec("31b", architecture="qwen3")


def test_command_takes_the_fields_of_groups(tmp_path):
    flags = (
        "--arch qwen35moe --layers 3 --experts-count 6 --experts-fused --recurrent-interval 3"
        " --recurrent-value-heads 2 --recurrent-listed"
    )
    assert main([*flags.split(), "--out", str(tmp_path / "cli.gguf")]) == 0
    spec = sized_spec(
        "tiny", architecture="qwen35moe", layers=3, experts={"count": 6, "fused": True},
        recurrent={"interval": 3, "value_heads": 2, "listed": True},
    )  # fmt: skip
    written(tmp_path / "api.gguf", spec)
    assert (tmp_path / "cli.gguf").read_bytes() == (tmp_path / "api.gguf").read_bytes()
