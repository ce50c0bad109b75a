"""What storing keys and values costs: ``python -m tests.peer.kv_accuracy [FILE ...]``.

Prints the mean KL of each storage type from a forward pass in binary64, ours and llama.cpp's, at
two lengths: of the files named, or of nine architectures with random binary32 weights and heads as
published models have them. One JSON line a model and length goes to standard error."""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from reference.model.open import open_model
from tests.peer.float64_llama import mean_kl
from tests.peer.float64_model import float64_model
from tests.peer.llama_cpp_peer import GGML_TYPE_Q4_0, GGML_TYPE_Q8_0, Peer
from tests.peer.our_engine import our_logits
from tests.peer.texts import PASSAGE

OURS = ("i12", "f16", "q8_0", "i4r", "i3r")
THEIRS = {"q8_0": GGML_TYPE_Q8_0, "q4_0": GGML_TYPE_Q4_0}
LENGTHS = (128, 8192)
DOCS = Path(__file__).parents[2] / "docs"
MAX_ROWS = 1024
"""Positions of a model with a large vocabulary that are compared, evenly spread."""
LARGE_VOCABULARY = 4096


def _heads(heads: int, kv_heads: int, head_dim: int, **more: Any) -> dict[str, Any]:
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    more = {"layers": 2, "feed_forward": 512, "context": LENGTHS[-1], **more}
    return {"hidden": heads * head_dim, **sizes, **more}


EXPERTS = {"count": 32, "used": 4, "width": 128}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama": _heads(2, 1, 128, rope_base=5e5),
    "qwen2": _heads(2, 1, 128, rope_base=1e6),
    "qwen3": _heads(2, 1, 128, rope_base=1e6),
    "phi3": _heads(2, 2, 96, tied=False),
    "glm4": _heads(2, 1, 128, tied=False),
    "gemma3": _heads(2, 1, 256, layers=6, rope_base=1e6, gemma={"window": 512, "period": 6}),
    "qwen3moe": _heads(2, 1, 128, rope_base=1e6, experts=EXPERTS),
    "gpt-oss": _heads(4, 1, 64, tied=False, rope_base=1.5e5, window=128, experts=EXPERTS),
    "qwen35": _heads(
        2, 1, 256, layers=4, rope_base=1e7,
        recurrent={"interval": 4, "state": 128, "key_heads": 2, "value_heads": 4},
    ),
}  # fmt: skip
"""Head sizes, windows and rotary bases of published models; fewer heads and layers."""


@dataclass(frozen=True)
class Accuracy:
    """Mean KL in nats over ``rows`` of the first ``length`` positions, by storage type."""

    model: str
    length: int
    rows: int
    ours: dict[str, float]
    theirs: dict[str, float]


def measured(
    path: Path, tokens: Sequence[int], vocabulary: int, peer: Peer | None, tier: str = "native"
) -> Accuracy:
    """The figures of a file with these tokens; without a peer from our logits with I12."""
    every = max(1, len(tokens) // MAX_ROWS) if vocabulary > LARGE_VOCABULARY else 1
    if peer is None:
        truth = our_logits(path, tokens, "i12", tier=tier)[::every].astype(np.float64)
    elif vocabulary > LARGE_VOCABULARY:
        oracle = float64_model(path)
        truth = oracle.head(oracle.states(tokens)[::every])
    else:
        truth = float64_model(path).logits(tokens)
    ours = {}
    for kv in OURS:
        ours[kv] = _kl(truth, our_logits(path, tokens, kv, tier=tier)[::every])
    theirs = {}
    for kv, number in THEIRS.items() if peer is not None else ():
        logits = peer.logits(path, tokens, number, flash=True, every=every)
        theirs[kv] = _kl(truth, logits)
    return Accuracy(path.stem, len(tokens), len(truth), ours, theirs)


def _kl(truth: np.ndarray, other: np.ndarray) -> float:
    """``mean_kl`` of few rows at a time."""
    starts = range(0, len(truth), 64)
    found = [mean_kl(truth[i : i + 64], other[i : i + 64]) for i in starts]
    sizes = [len(truth[i : i + 64]) for i in starts]
    return float(np.average(found, weights=sizes))


def synthetic(folder: Path, name: str) -> Path:
    """The file of an entry of SHAPES, written to ``folder``."""
    path = folder / f"{name}.gguf"
    write_synthetic(
        path, sized_spec("tiny", architecture=name, quant="f32", seed=11, **SHAPES[name])
    )
    return path


def _tokens(path: Path) -> tuple[list[int], int]:
    """A passage and the pages of the documentation, or random tokens of a small vocabulary; and the
    size of the vocabulary."""
    model = open_model(path)
    with model.file:
        vocabulary = model.config.vocab
        if vocabulary > LARGE_VOCABULARY:
            pages = [page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md"))]
            return model.tokenizer.encode(PASSAGE + "".join(pages)), vocabulary
    return np.random.default_rng(7).integers(0, 256, LENGTHS[-1]).tolist(), vocabulary


def accuracies(
    files: Sequence[Path], lengths: Sequence[int], beside: bool = True
) -> Iterator[Accuracy]:
    """The figures of the files, or without any of SHAPES; with ``beside`` those of llama.cpp."""
    peer = Peer() if beside else None
    with tempfile.TemporaryDirectory() as folder:
        for name in files or SHAPES:
            path = name if isinstance(name, Path) else synthetic(Path(folder), name)
            tokens, vocabulary = _tokens(path)
            for length in lengths:
                yield measured(path, tokens[:length], vocabulary, peer)
    if peer is not None:
        peer.close()


def _row(found: Accuracy) -> str:
    figures = (*found.ours.values(), *found.theirs.values())
    cells = (f"{found.model}, {found.length:,}", *(f"{kl:.1e}" for kl in figures))
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument(
        "--ours",
        action="store_true",
        help="from our logits with I12, which is fast: no llama.cpp, no binary64",
    )
    chosen = parser.parse_args(arguments)
    names = (*(kv.upper() for kv in OURS), *(f"llama.cpp's {kv}" for kv in THEIRS))
    print(f"| model, positions | {' | '.join(names)} |")
    print(f"| --- |{' --: |' * len(names)}")
    for found in accuracies(chosen.files, chosen.lengths, not chosen.ours):
        print(_row(found), flush=True)
        print(json.dumps(asdict(found)), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
