"""Synthetic model files: exact bytes, every variant loads and computes, recipes as documented."""

import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from contract.dtypes import F32
from contract.errors import ConfigError
from contract.types import Request
from harness.digest import logits_digest
from harness.synth.__main__ import main
from harness.synth.architectures import ARCHITECTURES, DENSE
from harness.synth.draw import draw_matrix
from harness.synth.plan import plan_tensors
from harness.synth.sizes import sized_spec
from harness.synth.spec import QUANTS, SynthSpec
from harness.synth.tensors import more_bits
from harness.synth.write import write_synthetic
from reference.cpu.tier import CpuTier
from reference.engine import Engine
from reference.limits import Limits
from reference.model.gguf.file import open_gguf
from reference.model.open import open_model
from reference.model.tokenizer import load_tokenizer
from reference.quant import FORMATS, LAYOUTS
from reference.runner import ModelRunner
from tests.families_table import DENSE as DENSE_MODELS
from tests.families_table import FAMILIES
from tests.needs import need_file
from tests.paths import ROOT, VOCAB
from tests.patience import PROCESS_SECONDS
from tests.tables import table

NARROW = {"hidden": 64, "head_dim": 16, "feed_forward": 96, "vocab": 300}
VARIANTS = {
    "untied": {"tied": False}, "fused": {"fused_qkv": True},
    "fused with bias": {"fused_qkv": True, "qkv_bias": True},
    "biases": {"qkv_bias": True, "attention_output_bias": True},
    "linear rope scaling": {"rope_scaling": "linear"}, "yarn": {"rope_scaling": "yarn"},
    "wide heads": {"head_dim": 128}, "narrow heads": {"head_dim": 32, "kv_heads": 4},
    "feed-forward per layer": {"feed_forward": (256, 512)},
}  # fmt: skip


def written(path: Path, spec: SynthSpec) -> bytes:
    write_synthetic(path, spec)
    return path.read_bytes()


def logits_of(path: Path, tokens: tuple[int, ...] = (72, 101, 108, 108, 111)) -> np.ndarray:
    """float32[positions, vocab] of a prompt."""
    model = open_model(path)
    parts: list[np.ndarray] = []
    limits = Limits(slots=1, context=64, pages=8, step_tokens=17, step_rows=16)
    with CpuTier() as tier, ModelRunner(model, tier, limits) as runner:
        engine = Engine(runner)
        engine.submit(Request(1, tokens, 0), lambda first, logits: parts.append(logits))
        list(engine.run())
    return np.concatenate(parts)


LATER_QUANTS = ("q2_k", "q3_k", "iq4_nl", "iq4_xs", "mxfp4")
LAST_QUANTS = ("mxfp4_moe",)
DIGESTS = {
    "7d6278d3b5dfbf9c2516c060b1ed4b1526d8e9f8c0a9aad8df704e580f28dd5a": tuple(
        quant for quant in QUANTS if quant not in (*LATER_QUANTS, *LAST_QUANTS)
    ),
    "fa49147ad1df325f716c1486359d98dae9df78b359550274c8817e8ce64cdb44": LATER_QUANTS,
    "87efd3bc03cbac5592a6d04bf326ade47ed1f956f111bba38d328cd55f54f3ba": LAST_QUANTS,
}
"""Of the files of these types, one after the other."""


@pytest.mark.parametrize("digest", DIGESTS)
def test_bytes_of_a_specification_never_change(tmp_path, digest):
    """Every format's file has the digest it had when the format was added to the generator."""
    found = hashlib.sha256()
    for quant in DIGESTS[digest]:
        found.update(written(tmp_path / "m.gguf", sized_spec("tiny", quant=quant, seed=5)))
    assert found.hexdigest() == digest


def test_seed_and_tensor_name_decide_the_weights(tmp_path):
    spec = sized_spec("tiny")
    same = written(tmp_path / "a.gguf", spec)
    assert same == written(tmp_path / "b.gguf", spec)
    assert same != written(tmp_path / "b.gguf", replace(spec, seed=1))
    write_synthetic(tmp_path / "c.gguf", replace(spec, layers=3, tied=False))
    with open_gguf(tmp_path / "a.gguf") as two, open_gguf(tmp_path / "c.gguf") as three:
        for name in set(two.tensors) - {"output.weight"}:
            assert two.tensor_bytes(name).tobytes() == three.tensor_bytes(name).tobytes(), name


@pytest.mark.parametrize("dtype", LAYOUTS, ids=str)
def test_drawn_blocks_have_the_spread_that_was_asked_for(dtype):
    """Blocks are drawn, not quantized: their values still have mean 0 and the given deviation."""
    parts = list(draw_matrix(1, "w", dtype, 512, 1024, 0.05))
    values = FORMATS[dtype].dequantize(np.concatenate(parts)).astype(np.float64)
    assert np.isfinite(values).all()
    assert 0.045 < values.std() < 0.058
    assert abs(values.mean()) < 0.002


OF_EACH_SIZE = ("f16", "q5_0", "q3_k", "q4_k_m", "mxfp4_moe")
"""A type of each size of blocks, and the mixtures: types of one size have the same tensors in an
architecture, and one has them all."""


@pytest.mark.parametrize(
    ("architecture", "quant"),
    [(one, quant) for one in ARCHITECTURES for quant in QUANTS
     if quant in OF_EACH_SIZE or one == DENSE[0]],
)  # fmt: skip
def test_every_architecture_and_type_computes(tmp_path, architecture, quant):
    """Logits are finite and differ from position to position and from token to token."""
    spec = sized_spec("tiny", architecture=architecture, quant=quant)
    write_synthetic(tmp_path / "m.gguf", spec)
    logits = logits_of(tmp_path / "m.gguf")
    assert logits.shape == (5, spec.vocab)
    assert 0.3 < logits.std() < 6
    assert len({logits_digest(row) for row in logits}) == 5


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("architecture", DENSE)
def test_every_dense_variant_computes(tmp_path, architecture, name):
    fields = VARIANTS[name]
    if architecture == "olmo2" and fields.get("fused_qkv"):
        with pytest.raises(ConfigError, match=r"fused_qkv is True, must be False for olmo2"):
            sized_spec("tiny", architecture=architecture, **fields)
        return
    spec = sized_spec("tiny", architecture=architecture, quant="q8_0", **fields)
    if architecture in ("gpt2", "starcoder") and "rope_scaling" in fields:
        with pytest.raises(ConfigError, match="no layer of this family rotates"):
            write_synthetic(tmp_path / "m.gguf", spec)
        return
    write_synthetic(tmp_path / "m.gguf", spec)
    assert 0.3 < logits_of(tmp_path / "m.gguf").std() < 5


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in DENSE_MODELS])
def test_every_family_variant_computes(tmp_path, name):
    write_synthetic(tmp_path / "m.gguf", sized_spec("tiny", quant="q8_0", **FAMILIES[name]))
    assert 0.3 < logits_of(tmp_path / "m.gguf").std() < 5


def test_fused_projection_holds_the_separate_ones(tmp_path):
    """Fusing q, k and v changes the file, not a bit of the logits."""
    spec = sized_spec("tiny", architecture="qwen2", quant="q5_k")
    write_synthetic(tmp_path / "a.gguf", spec)
    write_synthetic(tmp_path / "b.gguf", replace(spec, fused_qkv=True))
    assert (logits_of(tmp_path / "a.gguf") == logits_of(tmp_path / "b.gguf")).all()


@pytest.mark.parametrize("quant", QUANTS)
def test_expanded_twin_holds_the_same_weights(tmp_path, quant):
    spec = sized_spec("tiny", architecture="qwen3", quant=quant, tied=False)
    write_synthetic(tmp_path / "a.gguf", spec)
    write_synthetic(tmp_path / "b.gguf", replace(spec, expand_to_f32=True))
    with open_gguf(tmp_path / "a.gguf") as stored, open_gguf(tmp_path / "b.gguf") as twin:
        assert set(stored.tensors) == set(twin.tensors)
        for name, info in stored.tensors.items():
            assert twin.tensors[name].dtype is F32
            values = FORMATS[info.dtype].dequantize(stored.tensor_bytes(name))
            assert (twin.tensor_array(name).reshape(values.shape) == values).all(), name


def test_mixture_of_q4_k_m():
    """Types per tensor as llama.cpp's quantizer chooses them for a dense model."""
    spec = sized_spec("0.6b", architecture="qwen3", quant="q4_k_m")
    types = {tensor.name: tensor.dtype.name for tensor in plan_tensors(spec)}
    assert types["token_embd.weight"] == "q6_k"
    sensitive = {i for i in range(28) if types[f"blk.{i}.ffn_down.weight"] == "q6_k"}
    assert sensitive == {0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27}
    for layer in range(28):
        assert (types[f"blk.{layer}.attn_v.weight"] == "q6_k") == (layer in sensitive)
        assert more_bits(layer, 28) == (layer in sensitive)
        for name in ("attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up"):
            assert types[f"blk.{layer}.{name}.weight"] == "q4_k"
        assert types[f"blk.{layer}.attn_q_norm.weight"] == "f32"
    untied = plan_tensors(replace(spec, tied=False))
    types = {tensor.name: tensor.dtype.name for tensor in untied}
    assert types["token_embd.weight"] == "q4_k"
    assert types["output.weight"] == "q6_k"


@pytest.mark.parametrize(
    ("quant", "columns", "expected"),
    table(__file__, "test_synth")["rows_that_are_not_whole_blocks_fall_back"],
)
def test_rows_that_are_not_whole_blocks_fall_back(quant, columns, expected):
    spec = sized_spec("tiny", quant=quant, feed_forward=columns)
    types = {tensor.name: tensor.dtype.name for tensor in plan_tensors(spec)}
    assert types["blk.1.ffn_down.weight"] == expected


def test_narrow_model_of_a_few_kilobytes_computes(tmp_path):
    write_synthetic(tmp_path / "m.gguf", sized_spec("tiny", quant="q4_k_m", **NARROW))
    assert np.isfinite(logits_of(tmp_path / "m.gguf")).all()


def test_own_tokenizer_encodes_every_byte(tmp_path):
    write_synthetic(tmp_path / "m.gguf", sized_spec("tiny"))
    tokenizer = open_model(tmp_path / "m.gguf").tokenizer
    text = "the cat is on it\t\n" + "".join(map(chr, range(0x20, 0x500))) + "\U0001f600"
    ids = tokenizer.encode(text)
    assert tokenizer.decode_bytes(ids).decode() == text
    assert len(ids) < len(text.encode())
    prompt = tokenizer.encode("<|im_start|>a<|im_end|>", parse_special=True)
    assert prompt == [257, ord("a"), 258]
    assert tokenizer.eog_ids >= {258}


@pytest.mark.parametrize("extra", [0, 5])
def test_tokenizer_of_another_file(tmp_path, extra):
    """Keys are copied as they are; a longer vocabulary is padded with unused tokens."""
    source = need_file(VOCAB / "ggml-vocab-llama-spm.gguf")
    with open_gguf(source) as file:
        count = len(file.metadata["tokenizer.ggml.tokens"])
    spec = sized_spec("tiny", **NARROW | {"vocab": count + extra})
    out = write_synthetic(tmp_path / "m.gguf", spec, tokenizer_from=source)
    assert out.vocab == count + extra
    text = "Some words, 123 numbers; naïve."
    with open_gguf(source) as file:
        expected = load_tokenizer(file.metadata, str(source)).encode(text)
    model = open_model(tmp_path / "m.gguf")
    assert model.tokenizer.vocab_size == count + extra
    assert model.tokenizer.encode(text) == expected
    assert np.isfinite(logits_of(tmp_path / "m.gguf", tuple(expected))).all()


@pytest.mark.parametrize(
    "fields",
    [
        {"architecture": "gpt5"},
        {"quant": "q1_k"},
        {"heads": 3},
        {"kv_heads": 3},
        {"kv_heads": 0},
        {"head_dim": 15},
        {"vocab": 256},
        {"feed_forward": (256,)},
        {"feed_forward": (256, 0)},
        {"seed": -1},
        {"layers": 0},
        {"rope_scaling": "longrope"},
        {"rope_freqs": True, "architecture": "qwen3"},
        {"colour": "red"},
    ],
)
def test_bad_specifications_are_refused_by_name(fields):
    with pytest.raises(ConfigError, match=next(iter(fields))) as caught:
        sized_spec("tiny", **fields)
    assert "\n" not in str(caught.value)


def test_command_writes_what_the_function_writes(tmp_path):
    out = tmp_path / "cli.gguf"
    flags = "--arch qwen2 --quant q5_1 --seed 9 --layers 3 --feed-forward 256,288,320 --no-tied"
    command = [sys.executable, "-m", "harness.synth", *flags.split(), "--out", str(out)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=PROCESS_SECONDS)
    spec = sized_spec(
        "tiny", architecture="qwen2", quant="q5_1", seed=9, layers=3, feed_forward=(256, 288, 320),
        tied=False,
    )  # fmt: skip
    assert out.read_bytes() == written(tmp_path / "api.gguf", spec)


def test_command_reports_errors_in_one_line(tmp_path, capsys):
    out = tmp_path / "m.gguf"
    assert main(["--arch", "llama", "--out", str(out), "--vocab", "3"]) == 2
    assert capsys.readouterr().err == ("error: synthetic model: vocab is 3, must be at least 300\n")
    assert main(["--arch", "llama", "--out", str(tmp_path / "no" / "m.gguf")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_digest_ignores_the_sign_of_zero_only():
    values = np.array([0.0, -1.5, 2.5], np.float32)
    negative_zero = np.array([-0.0, -1.5, 2.5], np.float32)
    one_bit_off = np.nextafter(values, np.float32(9))
    assert logits_digest(values) == logits_digest(negative_zero)
    assert logits_digest(values) != logits_digest(one_bit_off)
    assert logits_digest(values) == hashlib.sha256(values.tobytes()).hexdigest()
    with pytest.raises(ValueError, match="NaN"):
        logits_digest(np.array([np.nan], np.float32))
    with pytest.raises(ValueError, match="float64"):
        logits_digest(np.zeros(1))
