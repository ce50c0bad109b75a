"""A receipt that one tier made is checked by another, which computes a few of its steps again."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import tiers
from harness.serve.receipts.document import signed_document
from harness.serve.receipts.keys import open_key
from harness.serve.receipts.tree import tree_root
from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from tests.cli.conftest import Result
from tests.forked import in_a_fork
from tests.paths import ROOT
from tests.patience import PROCESS_SECONDS

RECEIPT = ROOT / "goldens" / "receipt-h200.json"
"""256 tokens of a model of 0.6 billion weights, made on an NVIDIA H200. Its model is written by
``python -m harness.synth --arch qwen3 --size 0.6b --quant q4_k_m --out 0.6b.gguf``, the receipt by
``zinc-rt run --tier cuda --model 0.6b.gguf --raw --receipt receipt-h200.json -n 256 --context 512
--temperature 0.8 --seed 5 "Why is the sky blue?"``."""
STEPS = 4


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Iterator[Path]:
    """A user's folder with the model. It is removed at once: its files take 800 MB."""
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "user"))
    monkeypatch.setattr(tiers, "arranged_folder", lambda: tmp_path / "arranged")
    monkeypatch.setattr(tiers, "lowered_folder", lambda: tmp_path / "lowered")
    write_synthetic(
        tmp_path / "0.6b.gguf", sized_spec("0.6b", architecture="qwen3", quant="q4_k_m")
    )
    yield tmp_path
    shutil.rmtree(tmp_path)


def test_a_graphics_card_is_checked_by_a_processor(zinc, folder):
    """The control is signed and whole, but each step has the digest of the step before it. The
    model, which is mapped twice, is not in the memory of the tests."""

    def verify(receipt: Path) -> Result:
        model = ("--model", folder / "0.6b.gguf", "--tier", "native")
        words = ("verify", receipt, "--sample", str(STEPS), "--chunk", "32", *model)
        done = in_a_fork(lambda: zinc(*words), PROCESS_SECONDS)
        assert isinstance(done, Result), done
        return done

    document = json.loads(RECEIPT.read_text())
    assert [len(leaves) for leaves in document["leaves"]] == [256]
    checked = verify(RECEIPT)
    assert checked.code == 0, checked.out + checked.err
    assert f"{STEPS} of 256 steps" in checked.out
    ((*leaves, last),) = document["leaves"]
    moved = [last, *leaves]
    root = tree_root([bytes.fromhex(leaf) for leaf in moved])
    document["payload"]["choices"][0]["root"] = root.hex()
    key = open_key(folder / "key")
    lie = folder / "lie.json"
    lie.write_text(json.dumps(signed_document(document["payload"], [moved], key)))
    refused = verify(lie)
    assert (refused.code, "bits: " in refused.out) == (1, True), refused.out + refused.err
