"""``python -m harness.vectors check|update``: examples of every rule of exact arithmetic, in bits.

``goldens/vectors.json`` holds inputs and results of every rule of docs/arithmetic.md, computed by
the reference, so that an implementation in another language can be checked without running this
one. Numbers are bits in hexadecimal. Long inputs are ``numbers(seed, count, exponent)``."""

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from contract.arithmetic import ARITHMETIC_VERSION
from contract.arrays import Floats
from contract.errors import ZincError
from contract.types import Request, SamplingParams
from harness.digest import file_digest, logits_digest
from harness.goldens import FOLDER
from harness.synth.sizes import sized_spec
from harness.synth.spec import GENERATOR_VERSION, SynthSpec, fields_of
from harness.synth.write import write_synthetic
from harness.vector_cases import VectorCase, cases
from reference.cpu.tier import CpuTier
from reference.engine import Engine
from reference.limits import Limits
from reference.model.open import open_model
from reference.runner import ModelRunner

VECTORS = FOLDER / "vectors.json"
MODELS = (
    sized_spec("tiny", architecture="qwen3", seed=11, quant="q8_0"),
    sized_spec("tiny", architecture="qwen3", seed=12, quant="q4_k_m", key_outliers=100.0),
    sized_spec("tiny", architecture="llama", seed=13, quant="q6_k", tied=False),
    sized_spec("tiny", architecture="llama", seed=14, quant="mxfp4", rope_freqs=True),
    sized_spec("tiny", architecture="qwen3", seed=15, quant="bf16", rope_scaling="yarn"),
)
"""The models whose logits are compared."""
TOKENS = 70
"""Tokens of a prompt: more than one tile of attention."""
GENERATED = 8
MAX_WORDS = 128
"""Numbers of a result that is written out; of a longer one the SHA-256 is."""
SAMPLING = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.01, seed=7)


def model_vector(spec: SynthSpec, folder: Path) -> dict[str, Any]:
    """The digest of the logits of a synthetic model's prompt, and the tokens sampled after it."""
    path = folder / "model.gguf"
    write_synthetic(path, spec)
    model = open_model(path)
    prompt = tuple((7 * index * index + spec.seed) % spec.vocab for index in range(TOKENS))
    rows: list[Floats] = []
    limits = Limits(slots=1, context=128, pages=8, step_tokens=96, step_rows=96)
    with CpuTier() as tier, ModelRunner(model, tier, limits) as runner:
        engine = Engine(runner)
        engine.submit(Request(1, prompt, 0), lambda _, logits: rows.append(logits))
        list(engine.run())
        engine.submit(Request(2, prompt, GENERATED, SAMPLING, ignore_end=True))
        generated = [event.token for event in engine.run()]
    model.close()
    return {
        "spec": fields_of(spec),
        "file_sha256": file_digest(path),
        "tokens": prompt,
        "context": limits.context,
        "logits_sha256": logits_digest(np.concatenate(rows)),
        "sampling": asdict(SAMPLING),
        "generated": generated,
    }


def document() -> dict[str, Any]:
    """All vectors as a JSON value."""
    with tempfile.TemporaryDirectory() as folder:
        models = [model_vector(spec, Path(folder)) for spec in MODELS]
    return {
        "arithmetic": ARITHMETIC_VERSION,
        "generator": GENERATOR_VERSION,
        "cases": [encoded(case) for case in cases()],
        "models": models,
    }


def encoded(case: VectorCase) -> dict[str, Any]:
    """A case as a JSON value."""
    inputs = {name: _encoded(value) for name, value in case.inputs.items()}
    outputs = {name: _encoded(value) for name, value in case.outputs.items()}
    return {"rule": case.rule, "op": case.op, "in": inputs, "out": outputs}


def _encoded(value: Any) -> Any:
    """An array with its shape: binary32 and bytes in hexadecimal, integers in decimal."""
    if isinstance(value, np.ndarray):
        shape = list(value.shape)
        if value.dtype == np.float32:
            words = (value + np.float32(0.0)).reshape(-1).view(np.uint32).tolist()
            if len(words) > MAX_WORDS:
                data = np.array(words, "<u4").tobytes()
                return {"shape": shape, "f32_sha256": hashlib.sha256(data).hexdigest()}
            return {"shape": shape, "f32": " ".join(f"{word:08x}" for word in words)}
        if value.dtype == np.uint8:
            return {"shape": shape, "bytes": value.tobytes().hex()}
        return {"shape": shape, "int": value.reshape(-1).tolist()}
    return value


def text_of(value: dict[str, Any]) -> str:
    """The document as it is stored: one line for each case."""
    lines = [json.dumps(case) for case in value["cases"]]
    models = [json.dumps(model) for model in value["models"]]
    head = json.dumps({name: value[name] for name in ("arithmetic", "generator")})[:-1]
    cases_text, models_text = ",\n".join(lines), ",\n".join(models)
    return f'{head},\n"cases": [\n{cases_text}\n],\n"models": [\n{models_text}\n]}}\n'


def main(argv: Sequence[str] | None = None) -> int:
    """Check or rewrite the stored vectors."""
    parser = argparse.ArgumentParser(prog="python -m harness.vectors", description=__doc__)
    parser.add_argument("action", choices=("check", "update"))
    args = parser.parse_args(argv)
    text = text_of(document())
    if args.action == "update":
        VECTORS.write_text(text)
        return 0
    same = VECTORS.read_text() == text
    print(f"{VECTORS.name}: {'identical' if same else 'different'}")
    return 0 if same else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ZincError as error:
        sys.exit(f"error: {error}")
