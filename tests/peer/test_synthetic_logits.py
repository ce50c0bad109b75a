"""On binary32 weights only attention is rounded on purpose: without that engines agree closely.

``tests/model/test_family_logits.py`` has the third side: ours against float64, for all variants of
an architecture in every run."""

import numpy as np
import pytest

from harness.named_adapters import NamedAdapter
from reference.model.gguf.file import open_gguf
from tests.adapters import write_adapter
from tests.families_table import DEEP, EACH_KIND, FAMILIES
from tests.long_cases import long_except
from tests.model.older_latent import older_and_newer
from tests.model.test_adapters import is_linear
from tests.model.test_families import rewrite
from tests.model.test_family_logits import CHUNK, NOT_IN_FLOAT64, TOKENS, TOLERANCE
from tests.peer.binary64_attention import binary64_attention
from tests.peer.float64_gemma import Float64Gemma
from tests.peer.float64_model import float64_model
from tests.peer.our_engine import exact_logits, our_logits

pytestmark = pytest.mark.peer

GELU_TABLE_TOLERANCE = 8e-3
"""llama.cpp's GELU goes through a table of binary16 values, in and out: up to 2.8e-3 here."""
DEEP_GELU_TABLE_TOLERANCE = 5e-2
"""The same through 62 layers: up to 1.8e-2."""

NOT_IN_PEER = (
    *("llama-per-layer-widths", "phi3-window", "exaone4-windows", "llama4-experts-chunks"),
    *("baichuan", "gemma3n-shared-kv"),
)
"""llama.cpp takes the first layer's width for all layers of a llama, leaves out Phi's window, and
EXAONE's but for 64 layers, and has chunks of 8,192 positions for all of Llama 4. It ends for a
Baichuan of other layers than published sizes have, and shares keys of Gemma 3n from layer 20 on."""
GELUS = ("gemma", "starcoder", "phi2", "gptneox", "falcon", "gpt2", "codeshell")
"""Beginnings of the names of models with GELU."""
ENTRIES = {**FAMILIES, **DEEP}
EPSILON_UNREAD = ("qwen2vl",)
"""Architectures whose epsilon llama.cpp does not read and takes for 0."""


def for_peer(path, architecture):
    """The file with the numbers that llama.cpp has, whatever the file says: no epsilon, a window of
    4,096, and for gates kept above their mean a deviation that is divided by one gate less."""
    target = path.with_name(f"{path.stem}-for-peer.gguf")
    if architecture in EPSILON_UNREAD:
        return rewrite(path, target, {f"{architecture}.attention.layer_norm_rms_epsilon": 0.0})
    if architecture == "smallthinker":
        with open_gguf(path) as file:
            windowed = "smallthinker.attention.sliding_window" in file.metadata
        changed = {"smallthinker.attention.sliding_window": 4096} if windowed else {}
        return rewrite(path, target, changed)
    if architecture == "gemma3n":
        with open_gguf(path) as file:
            width = file.metadata["gemma3n.feed_forward_length"]
            kept = file.metadata["gemma3n.activation_sparsity_scale"]
        kept = [float(one) * (width / (width - 1)) ** 0.5 for one in kept]
        return rewrite(path, target, {"gemma3n.activation_sparsity_scale": kept})
    return path


def peer_tolerance(name: str) -> float:
    if not name.startswith(GELUS):
        return TOLERANCE
    return DEEP_GELU_TABLE_TOLERANCE if name in DEEP else GELU_TABLE_TOLERANCE


@pytest.fixture
def model(synthetic_model):
    """``model(name)``: the file of a table entry."""

    def written(name):
        path = synthetic_model(quant="f32", seed=11, **ENTRIES[name])
        return for_peer(path, ENTRIES[name]["architecture"])

    return written


@pytest.mark.parametrize("name", NOT_IN_FLOAT64)
def test_logits_agree_with_llama_cpp(model, peer, name):
    """Of all other models both agree with float64."""
    path = model(name)
    ours = exact_logits(path, TOKENS, CHUNK)
    theirs = peer.logits(path, TOKENS, chunk=CHUNK)
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= peer_tolerance(name)
    assert ours.std() > 0.1


@pytest.mark.parametrize(
    "name",
    long_except((name for name in ENTRIES if name not in NOT_IN_PEER + NOT_IN_FLOAT64), *EACH_KIND),
)
def test_llama_cpp_agrees_with_float64(model, peer, name):
    """The files and the oracle are right whatever our engine computes."""
    path = model(name)
    truth = float64_model(path).logits(TOKENS)
    assert np.abs(peer.logits(path, TOKENS, chunk=CHUNK) - truth).max() <= peer_tolerance(name)


def test_an_older_deepseek_agrees_with_llama_cpp(model, peer, tmp_path):
    """Which computes keys and values of heads from its joined matrix."""
    older, _ = older_and_newer(model("deepseek2-experts"), tmp_path, "f32")
    theirs = peer.logits(older, TOKENS, chunk=CHUNK)
    assert np.abs(exact_logits(older, TOKENS, CHUNK) - theirs).max() <= TOLERANCE


@pytest.mark.parametrize("name", ["qwen3-wide-heads", "phi3", "qwen35"])
def test_adapters_agree_with_llama_cpp(model, peer, tmp_path, name):
    """Both read the same file of an adapter, whose scale is not 1."""
    path = model(name)
    lora = write_adapter(tmp_path / "a.gguf", path, changed=is_linear, size=0.05)
    with binary64_attention():
        ours = our_logits(path, TOKENS, chunk=CHUNK, lora=(NamedAdapter("a", lora, 0.7),))
    theirs = peer.logits(path, TOKENS, chunk=CHUNK, lora=(lora, 0.7))
    assert np.abs(ours - theirs).max() <= TOLERANCE
    assert np.abs(theirs - peer.logits(path, TOKENS, chunk=CHUNK)).max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["gemma3", "gemma4-experts"])
def test_the_gelu_table_is_what_sets_llama_cpp_apart(model, peer, monkeypatch, name):
    """With GELU rounded to binary16 on both sides the oracle comes closer to llama.cpp."""
    path = model(name)
    theirs = peer.logits(path, TOKENS, chunk=CHUNK)
    exact = np.abs(float64_model(path).logits(TOKENS) - theirs).mean()
    gelu = Float64Gemma.activation

    def table(x):
        rounded = x.astype(np.float16).astype(np.float64)
        return gelu(rounded).astype(np.float16).astype(np.float64)

    monkeypatch.setattr(Float64Gemma, "activation", staticmethod(table))
    rounded = np.abs(float64_model(path).logits(TOKENS) - theirs).mean()
    assert rounded < exact / 3
