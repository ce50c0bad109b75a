"""Configuration and tensors of a dense family: what is refused, and in which words."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.dtypes import F32, Q4_0, Q8_0
from contract.errors import ModelFileError, UnsupportedModel, VerifyError
from reference.limits import Limits
from reference.model.gguf.file import open_gguf
from reference.model.gguf.writer import write_gguf
from reference.model.open import open_model

LIMITS = Limits(slots=2, context=64, pages=8)


def rewrite(
    source: Path, target: Path, metadata: Mapping[str, Any] | None = None, drop: str = "",
    tensors: Mapping[str, Any] | None = None, data: Any = None,
) -> Path:  # fmt: skip
    """A copy of a model with keys changed (None removes), one tensor dropped, some replaced (None
    drops), or ``data`` in place of all."""
    with open_gguf(source) as file:
        values = {
            key: value.to_list() if hasattr(value, "to_list") else value
            for key, value in file.metadata.items()
        }
        for key, value in (metadata or {}).items():
            values.pop(key, None)
            if value is not None:
                values[key] = value
        contents = {
            name: (info.ggml_type, info.shape, file.tensor_bytes(name) if data is None else data)
            for name, info in file.tensors.items()
            if name != drop
        }
        contents.update(tensors or {})
        written = {name: one for name, one in contents.items() if one is not None}
        write_gguf(target, values, written)
    return target


@pytest.mark.parametrize("name", ["mamba", "deepseek32", "mpt"])
def test_an_unknown_architecture_lists_the_known_ones(synthetic_model, tmp_path, name):
    source = synthetic_model(architecture="llama")
    with open_gguf(source) as file:
        renamed = {
            key.replace("llama.", f"{name}.", 1): value
            for key, value in file.metadata.items()
            if key.startswith("llama.")
        }
    path = rewrite(source, tmp_path / "m.gguf", {"general.architecture": name, **renamed})
    with pytest.raises(UnsupportedModel, match=f"'{name}'.*llama, .*mistral3, smollm3, granite"):
        open_model(path).graph(LIMITS)


def test_a_missing_tensor_is_named_with_its_shape(synthetic_model, tmp_path):
    path = rewrite(
        synthetic_model(architecture="llama"), tmp_path / "m.gguf", drop="blk.1.ffn_up.weight"
    )
    with pytest.raises(
        ModelFileError, match=r"tensor blk\.1\.ffn_up\.weight: is missing; expected"
    ):
        open_model(path).graph(LIMITS)


def test_a_wrong_shape_says_what_the_metadata_asks_for(synthetic_model, tmp_path):
    replaced = {"output_norm.weight": (F32, (32,), np.ones(32, np.float32))}
    path = rewrite(synthetic_model(architecture="llama"), tmp_path / "m.gguf", tensors=replaced)
    with pytest.raises(ModelFileError, match=r"has shape \[32\]; the metadata asks for"):
        open_model(path).graph(LIMITS)


def test_a_tensor_nobody_reads_is_refused(synthetic_model, tmp_path):
    """A query norm in a llama file would silently be left out of the forward pass."""
    surplus = {"blk.0.attn_q_norm.weight": (F32, (64,), np.ones(64, np.float32))}
    path = rewrite(synthetic_model(architecture="llama"), tmp_path / "m.gguf", tensors=surplus)
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.attn_q_norm\.weight.*not part of a llama"):
        open_model(path).graph(LIMITS)


def test_kv_pages_have_types_of_their_own():
    with pytest.raises(ValueError, match="one of f32, f16, q8_0, i12, i4r, i3r, not q4_0"):
        Limits(slots=1, context=16, pages=1, kv_dtype=Q4_0)


def test_q8_0_pages_need_heads_of_whole_blocks(synthetic_model):
    limits = Limits(slots=1, context=16, pages=1, kv_dtype=Q8_0)
    model = open_model(synthetic_model(architecture="qwen3", head_dim=48))
    with pytest.raises(VerifyError, match=r"rows of 48 elements are not a multiple of 32 \(q8_0\)"):
        model.graph(limits)
    whole = open_model(synthetic_model(architecture="qwen3", head_dim=64)).graph(limits)
    assert whole.buffers["state.kv[0]"].dtype is Q8_0
