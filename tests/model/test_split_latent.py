"""Older files of deepseek2 have the bits of new ones with the same numbers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from contract.errors import ModelFileError
from reference.limits import Limits
from reference.model.open import open_model
from reference.model.split_latent import SplitFile
from tests.families_table import FAMILIES
from tests.model.older_latent import older_and_newer
from tests.model.test_families import rewrite
from tests.peer.our_engine import our_logits

SyntheticModel = Callable[..., Path]
TOKENS = [(11 + 17 * n) % 256 for n in range(20)]


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0"])
def test_an_older_file_has_the_bits_of_a_new_one(synthetic_model, dtype, tmp_path):
    source = synthetic_model(quant="f32", seed=11, **FAMILIES["deepseek2-experts"])
    older, newer = older_and_newer(source, tmp_path, dtype)
    found, expected = (our_logits(path, TOKENS, chunk=16) for path in (older, newer))
    assert np.array_equal(found, expected)
    assert np.array_equal(our_logits(older, TOKENS, chunk=16, tier="native"), expected)
    if dtype == "f32":
        assert np.array_equal(expected, our_logits(source, TOKENS, chunk=16))


def test_the_joined_matrix_has_the_shape_of_the_metadata(synthetic_model, tmp_path):
    source = synthetic_model(quant="f32", seed=11, **FAMILIES["deepseek2-experts"])
    older, _ = older_and_newer(source, tmp_path, "f32")
    wrong = {"deepseek2.attention.value_length": 16}
    path = rewrite(older, tmp_path / "wrong.gguf", wrong)
    model = open_model(path)
    with model.file:
        assert isinstance(model.tensors, SplitFile)
        with pytest.raises(ModelFileError, match="attn_kv_b"):
            model.graph(Limits(slots=1, context=16, pages=1))
