"""A key that changes the formulas changes them here as in llama.cpp, or the file is refused."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.errors import ModelFileError
from reference.limits import Limits
from reference.model.config.read import READERS
from reference.model.gguf.writer import HOLE
from reference.model.open import open_model
from tests.families_table import EACH_KIND, FAMILIES
from tests.long_cases import long_except
from tests.model.metadata_keys import UNUSUAL
from tests.model.test_families import rewrite
from tests.peer.binary64_attention import binary64_attention
from tests.peer.our_engine import our_logits
from tests.peer.test_synthetic_logits import for_peer, peer_tolerance

pytestmark = pytest.mark.peer

FIRST = {fields["architecture"]: name for name, fields in reversed(FAMILIES.items())}
TOKENS = [(11 + 17 * n) % 256 for n in range(28)]
"""More than a window of 20 positions, and than the shortest original context of 16."""
LIMITS = Limits(slots=1, context=64, pages=4)
BETAS = ("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow")
OURS_ALONE = {(name, "attention.sliding_window") for name in ("phi3", "exaone4", "smallthinker")}
OURS_ALONE |= {
    ("llama4", f"attention.{key}")
    for key in ("sliding_window", "temperature_length", "temperature_scale")
}
OURS_ALONE |= {(name, beta) for name in READERS if name != "mistral3" for beta in BETAS}
OURS_ALONE |= {("bailingmoe2", "expert_group_used_count")}
OURS_ALONE |= {
    ("gemma3n", key) for key in ("attention.shared_kv_layers", "final_logit_softcapping")
}
"""llama.cpp leaves out Phi's window and that of small EXAONEs, and YaRN's betas of all but
Ministral. It ends where a token chooses every group, has one chunk and growth for all of Llama 4,
and shares keys of Gemma 3n from layer 20 on and bounds its logits by 30; windows
of SmallThinker are 4,096 positions there."""
BY_DEPTH = ("baichuan",)
"""Architectures whose models llama.cpp ends for unless they are as deep as published ones."""


def accepted(source: Path, changed: Mapping[str, Any], bare: Path) -> bool:
    """Whether this runtime opens ``source`` with these keys and finds its tensors. What is opened,
    ``bare``, has none of their values."""
    rewrite(source, bare, changed, data=HOLE)
    try:
        with closing(open_model(bare)) as model:
            model.graph(LIMITS)
    except ModelFileError:
        return False
    return True


@pytest.mark.parametrize(
    "architecture",
    long_except(
        [name for name in READERS if name not in BY_DEPTH],
        *(FAMILIES[name]["architecture"] for name in EACH_KIND),
    ),
)
def test_what_is_read_is_read_as_llama_cpp_does(synthetic_model, peer, tmp_path, architecture):
    model = synthetic_model(quant="f32", seed=11, **FAMILIES[FIRST[architecture]])
    source = for_peer(model, architecture)
    tolerance = peer_tolerance(FIRST[architecture])
    far = {}
    for name, keys in UNUSUAL.items():
        written = {f"{architecture}.{key}": value for key, value in keys.items()}
        if (architecture, name) in OURS_ALONE:
            continue
        if not accepted(source, written, tmp_path / "bare.gguf"):
            continue
        path = rewrite(source, tmp_path / "changed.gguf", written)
        with binary64_attention():
            ours = our_logits(path, TOKENS, chunk=16)
        distance = float(np.abs(ours - peer.logits(path, TOKENS, chunk=16)).max())
        if not distance <= tolerance:
            far[name] = distance
    assert not far
