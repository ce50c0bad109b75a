"""A key that changes the formulas changes them here as in llama.cpp, or the file is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from contract.errors import ModelFileError
from reference.limits import Limits
from reference.model.config.read import READERS
from reference.model.open import open_model
from tests.families_table import FAMILIES, GEMMAS
from tests.model.metadata_keys import UNUSUAL
from tests.model.test_families import rewrite
from tests.peer.binary64_attention import binary64_attention
from tests.peer.our_engine import our_logits
from tests.peer.test_synthetic_logits import GELU_TABLE_TOLERANCE, TOLERANCE

pytestmark = pytest.mark.peer

FIRST = {fields["architecture"]: name for name, fields in reversed(FAMILIES.items())}
TOKENS = [(11 + 17 * n) % 256 for n in range(28)]
"""More than a window of 20 positions, and than the shortest original context of 16."""
LIMITS = Limits(slots=1, context=64, pages=4)
BETAS = ("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow")
OURS_ALONE = {(name, "attention.sliding_window") for name in ("phi3", "exaone4")}
OURS_ALONE |= {(name, beta) for name in READERS if name != "mistral3" for beta in BETAS}
"""llama.cpp leaves out Phi's window and that of small EXAONEs, and YaRN's betas of all but
Ministral."""


def accepted(path: Path) -> bool:
    """Whether this runtime opens the file and finds its tensors."""
    try:
        open_model(path).graph(LIMITS)
    except ModelFileError:
        return False
    return True


@pytest.mark.parametrize("architecture", READERS)
def test_what_is_read_is_read_as_llama_cpp_does(
    synthetic_model, peer, tmp_path, architecture
) -> None:
    source = synthetic_model(quant="f32", seed=11, **FAMILIES[FIRST[architecture]])
    tolerance = GELU_TABLE_TOLERANCE if FIRST[architecture] in GEMMAS else TOLERANCE
    far = {}
    for name, keys in UNUSUAL.items():
        written = {f"{architecture}.{key}": value for key, value in keys.items()}
        path = rewrite(source, tmp_path / "changed.gguf", written)
        if (architecture, name) in OURS_ALONE or not accepted(path):
            continue
        with binary64_attention():
            ours = our_logits(path, TOKENS, chunk=16)
        distance = float(np.abs(ours - peer.logits(path, TOKENS, chunk=16)).max())
        if not distance <= tolerance:
            far[name] = distance
    assert not far
