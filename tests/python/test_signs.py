"""Zeros have no sign in what leaves the engine: tiers are free to give them one (rule R0)."""

import numpy as np
import pytest

from reference.model.gguf.writer import TensorSource
from tests.changed_models import write_changed
from zinc_rt import LLM


@pytest.mark.parametrize("tier", ["cpu", "native"])
def test_arrays_have_no_negative_zeros(tiny_model_path, tmp_path, tier):
    """Those of a model whose final norm multiplies by zeros of both signs."""

    def change(metadata: dict[str, object], tensors: dict[str, TensorSource]) -> None:
        kind, shape, _ = tensors["output_norm.weight"]
        zeros = np.zeros(shape, np.float32)
        zeros[::3] = -0.0
        tensors["output_norm.weight"] = kind, shape, zeros.view(np.uint8)

    path = write_changed(tiny_model_path, tmp_path / "zeros.gguf", change)
    with LLM(path, tier=tier, context=32, slots=1, progress=False) as llm:
        for found in (llm.logits("one"), llm.hidden_states(["one"])[0], llm.embed("one")):
            assert not found.any()
            assert not np.signbit(found).any()
