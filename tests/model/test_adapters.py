"""LoRA adapters: the function that they make of a model, and files that are refused."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.dtypes import BF16, F16, Q8_0
from contract.errors import ModelFileError, RequestError
from contract.ir.codec import encode
from harness.digest import file_digest
from harness.named_adapters import NamedAdapter, named_adapters
from reference.limits import Limits
from reference.model import adapters
from reference.model import open as open_module
from reference.model.adapters import Adapters, open_adapter
from reference.model.gguf.file import GgufFile, open_gguf
from reference.model.open import open_model
from tests.adapters import merge, write_adapter
from tests.families_table import FAMILIES
from tests.peer.binary64_attention import binary64_attention
from tests.peer.float64_model import float64_model
from tests.peer.our_engine import our_logits

TOKENS = np.random.default_rng(7).integers(0, 256, 24).tolist()
TOLERANCE = 1e-4
LINEAR = (
    *("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "attn_gate"),
    *("ffn_gate", "ffn_up", "ffn_down", "ssm_in", "ssm_out", "ssm_ba", "ssm_alpha", "ssm_beta"),
    *("in_proj", "out_proj", "inp_gate", "proj", "per_layer_model_proj"),
)
"""All matrices of products that are no experts, routers, embeddings or outputs."""
NAMES = (
    *("llama-biases", "phi3", "cohere2", "olmo2-windows", "gemma4-per-layer-embeddings"),
    *("qwen35-fused-qkv", "qwen3next-fused-ssm-in", "lfm2", "granitehybrid-experts"),
)


def is_linear(name: str) -> bool:
    return name.split(".")[-2] in LINEAR and name.endswith(".weight")


LIMITS = Limits(slots=1, context=16, pages=1)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_merged_weights(synthetic_model, tmp_path, name):
    """In binary64, with an adapter of every product of the family; and they are others than the
    model's own."""
    path = synthetic_model(quant="f32", seed=11, **FAMILIES[name])
    adapter = write_adapter(tmp_path / "a.gguf", path, changed=is_linear, size=0.05)
    truth = float64_model(merge(tmp_path / "merged.gguf", path, adapter, 0.7)).logits(TOKENS)
    with binary64_attention():
        found = our_logits(path, TOKENS, chunk=17, lora=(NamedAdapter("a", adapter, 0.7),))
        alone = our_logits(path, TOKENS, chunk=17)
    assert np.abs(found - truth).max() <= TOLERANCE
    assert np.abs(found - alone).max() > 100 * TOLERANCE


@pytest.mark.parametrize("dtype", [F16, BF16, Q8_0], ids=str)
def test_matrices_are_read_as_their_values(tiny_model_path, tmp_path, dtype):
    """Rank 32 in every storage type; behind it zeros, since another adapter has a larger rank."""
    stored = write_adapter(tmp_path / "a.gguf", tiny_model_path, rank=32, dtype=dtype)
    larger = write_adapter(tmp_path / "b.gguf", tiny_model_path, rank=40)
    with open_gguf(tiny_model_path) as model:
        one, other = (open_adapter(path, model) for path in (stored, larger))
        (tensor, *_) = one.shapes
        stacked = Adapters((one, other)).tensor_bytes(f"lora:{tensor}.lora_a").view(np.float32)
        entries = stacked.reshape(4, 40, -1)
        assert not entries[:2].any()
        assert (entries[2, :32] == one.values(tensor, ".lora_a")).all()
        assert not entries[2, 32:].any()
        assert (entries[3] == other.values(tensor, ".lora_a")).all()
        one.file.close()
        other.file.close()


def test_a_graph_without_adapters_is_the_models(tiny_model_path, tmp_path):
    """Opening an adapter changes no graph whose limits have none."""
    adapter = write_adapter(tmp_path / "a.gguf", tiny_model_path)
    plain, adapted = open_model(tiny_model_path), open_model(tiny_model_path, [adapter])
    assert encode(plain.graph(LIMITS)) == encode(adapted.graph(LIMITS))
    plain.close()
    adapted.close()


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no adapter": ({"keys": {"general.type": None}}, "key general.type: is missing"),
    "another kind": ({"keys": {"adapter.type": "control_vector"}}, "key adapter.type: is 'contr"),
    "another architecture": (
        {"keys": {"general.architecture": "llama"}},
        "key general.architecture: is 'llama'; an adapter of this model has 'qwen3'",
    ),
    "invoked": (
        {"keys": {"adapter.alora.invocation_tokens": [1, 2]}},
        "key adapter.alora.invocation_tokens: begins to",
    ),
    "alpha": ({"keys": {"adapter.lora.alpha": float("inf")}}, "key adapter.lora.alpha: is inf"),
    "empty": ({"changed": lambda name: False}, "the file: has no tensors"),
    "unknown": (
        {"more": {"blk.9.attn_q.weight.lora_a": (4, 64)}},
        "tensor blk.9.attn_q.weight.lora_a: belongs to blk.9.attn_q.weight, which the model lacks",
    ),
    "half": (
        {"changed": lambda name: False, "more": {"blk.0.attn_q.weight.lora_a": (4, 64)}},
        "tensor blk.0.attn_q.weight.lora_a: has no blk.0.attn_q.weight.lora_b with it",
    ),
    "no part": (
        {"more": {"blk.0.attn_q.weight": (4, 64)}},
        "tensor blk.0.attn_q.weight: is neither lora_a nor lora_b",
    ),
    "norm": (
        {"changed": lambda name: name == "blk.0.attn_norm.weight"},
        "tensor blk.0.attn_norm.weight.lora_a: changes experts or a vector",
    ),
    "transposed": (
        {
            "changed": lambda name: False,
            "more": {"blk.0.attn_q.weight.lora_a": (64, 4), "blk.0.attn_q.weight.lora_b": (4, 64)},
        },
        "tensor blk.0.attn_q.weight.lora_a: has shape [64, 4]",
    ),
    "embedding": (
        {"changed": lambda name: name == "token_embd.weight"},
        "tensor token_embd.weight.lora_a: changes an embedding",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_the_error_names_file_and_part(tiny_model_path, tmp_path, what):
    fields, message = BROKEN[what]
    path = write_adapter(tmp_path / "a.gguf", tiny_model_path, **fields)
    with pytest.raises(ModelFileError) as error:
        open_model(tiny_model_path, [path]).graph(Limits(1, 16, 1, adapters=1))
    assert str(error.value).startswith(f"{path}: {message}")


def test_tensors_of_experts_are_refused(synthetic_model, tmp_path):
    model = synthetic_model(**FAMILIES["qwen3moe"])
    changes: list[Callable[[str], bool]] = [
        lambda name: name.endswith("ffn_up_exps.weight"),
        lambda name: name.endswith("ffn_gate_inp.weight"),
    ]
    for changed in changes:
        path = write_adapter(tmp_path / "a.gguf", model, changed=changed)
        with pytest.raises(ModelFileError, match=r"a.gguf: tensor blk\.0\.ffn_.*lora_a: changes"):
            open_model(model, [path]).graph(Limits(1, 16, 1, adapters=1))


def test_tensors_of_a_draft_block_are_refused(synthetic_model, tmp_path):
    model = synthetic_model(**FAMILIES["qwen35-nextn"])
    with open_gguf(model) as file:
        drafting = f"blk.{file.require('qwen35.block_count', int) - 1}.ffn_up.weight"
    path = write_adapter(tmp_path / "a.gguf", model, changed=lambda name: name == drafting)
    with pytest.raises(ModelFileError, match=r"lora_a: changes a block that drafts tokens; use an"):
        open_model(model, [path]).graph(Limits(1, 16, 1, adapters=1))


def test_a_number_that_is_not_finite_is_an_error(tiny_model_path, tmp_path):
    path = write_adapter(tmp_path / "a.gguf", tiny_model_path, broken="blk.1.ffn_up.weight.lora_b")
    with pytest.raises(ModelFileError, match=r"blk\.1\.ffn_up\.weight\.lora_b: holds a number"):
        our_logits(tiny_model_path, TOKENS[:2], lora=(NamedAdapter("a", path),))


def test_the_digest_is_of_the_file_that_is_open(tiny_model_path, tmp_path, monkeypatch):
    """Where another file takes its name while it is opened, and where it is written to."""
    path = write_adapter(tmp_path / "a.gguf", tiny_model_path)
    other, digest = write_adapter(tmp_path / "b.gguf", tiny_model_path, seed=2), file_digest(path)
    opened, changes = adapters.open_gguf, iter((lambda: other.replace(path), path.touch))

    def open_changing(name: Path) -> GgufFile:
        file = opened(name)
        next(changes)()
        return file

    monkeypatch.setattr(adapters, "open_gguf", open_changing)
    with open_gguf(tiny_model_path) as model:
        found = open_adapter(path, model)
        found.file.close()
        assert found.digest == digest != file_digest(path)
        os.utime(path, (0, 0))
        with pytest.raises(ModelFileError, match="was written to since it was opened"):
            open_adapter(path, model)


def test_an_adapter_that_is_refused_leaves_no_file_open(tiny_model_path, tmp_path, monkeypatch):
    files = []

    def opened(path: Path) -> GgufFile:
        files.append(open_gguf(path))
        return files[-1]

    for module in (adapters, open_module):
        monkeypatch.setattr(module, "open_gguf", opened)
    paths = [write_adapter(tmp_path / f"{n}.gguf", tiny_model_path, seed=n) for n in range(2)]
    paths.append(write_adapter(tmp_path / "bad.gguf", tiny_model_path, keys={"general.type": None}))
    with pytest.raises(ModelFileError, match=r"bad.gguf: key general.type"):
        open_model(tiny_model_path, paths)
    assert len(files) == 4
    for file in files:
        with pytest.raises(ValueError, match="is closed"):
            file.check_unchanged()


def test_scales_are_checked(tiny_model_path, tmp_path):
    paths = [write_adapter(tmp_path / f"{n}.gguf", tiny_model_path, seed=n) for n in range(5)]
    model = open_model(tiny_model_path, paths)
    opened = model.adapters
    for scales, problem in (
        (((5, 1.0),), "names adapter 5"),
        (((0, float("nan")),), "has the scale nan"),
        (((0, 1.0), (0, 2.0)), "twice"),
        (tuple((n, 1.0) for n in range(5)), "combines 5 adapters, at most 4"),
    ):
        with pytest.raises(RequestError, match=problem):
            opened.check(scales)
    opened.check(tuple((n, float(n)) for n in range(5)))
    assert opened.identity(((1, 0.5), (0, 0.0))) == opened.identity(((1, 0.5),))
    assert len({opened.identity(((n, s),)) for n in (0, 1) for s in (0.5, 1.0)}) == 4
    model.close()


def test_arguments():
    """``[NAME=]FILE[:SCALE]``; a colon that no number follows is part of the file's name."""
    found = named_adapters("style=a.gguf:0.5,b.gguf,c:x.gguf")
    assert [(one.name, str(one.path), one.scale) for one in found] == [
        ("style", "a.gguf", 0.5),
        ("b", "b.gguf", 1.0),
        ("c:x", "c:x.gguf", 1.0),
    ]
    for wrong in ("=a.gguf", "a=", "a.gguf,a.gguf"):
        with pytest.raises(ValueError, match="a"):
            named_adapters(wrong)
