"""Shapes of the families' published models, as sparse files: their weights and keys and values."""

import json

import pytest

from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic

PUBLISHED = {
    ("exaone4", "32b"): (32.0, 32.0, 256 << 10),
    ("ernie4_5", "0.3b"): (0.361, 0.361, 18 << 10),
    ("bailingmoe2", "16b-a1b"): (16.26, 1.43, 40 << 10),
    ("seed_oss", "36b"): (36.15, 36.15, 256 << 10),
    ("granitemoe", "3b-a800m"): (3.30, 0.88, 64 << 10),
    ("minimax-m2", "229b-a10b"): (228.7, 11.0, 248 << 10),
    ("olmoe", "7b-a1b"): (6.92, 1.28, 128 << 10),
    ("qwen2moe", "14b-a2.7b"): (14.3, 2.69, 192 << 10),
    ("hunyuan-dense", "7b"): (7.50, 7.50, 128 << 10),
    ("gemma2", "2b"): (2.61, 2.61, 104 << 10),
}
"""Billions of weights, of all and of those a token uses, and bytes a token in F16."""
MAX_BILLIONS = 20.0
"""Files of more weights have too many places to look at for every run."""


CASES = [
    pytest.param(*key, marks=pytest.mark.long if billions[0] > MAX_BILLIONS else ())
    for key, billions in PUBLISHED.items()
]


@pytest.mark.parametrize(("architecture", "size"), CASES)
def test_shapes_are_planned(zinc, tmp_path, architecture, size):
    path = tmp_path / f"{size}.gguf"
    write_synthetic(path, sized_spec(size, architecture=architecture, quant="q4_k_m"), sparse=True)
    result = zinc("inspect", path, "--json", "--context", 4096, "--kv-dtype", "f16")
    assert result.code == 0, result.err
    facts = json.loads(result.out)
    run = facts["run"]
    total, active, kv_per_token = PUBLISHED[architecture, size]
    billions = facts["parameters"] / 1e9, run["active_parameters"] / 1e9
    assert billions == pytest.approx((total, active), rel=0.01)
    assert run["memory"]["kv_per_token"] == kv_per_token
