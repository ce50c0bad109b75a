"""Measures the TFLOP/s of attention within a prompt on CUDA; needs PyTorch, for its profiler.

    PYTHONPATH=.:harness/python python ci/attention_rate.py --model 8b.gguf

A kernel may be launched before the one in front of it has ended; its time includes that wait."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from contract.types import Request
from harness.bench.engines import GREEDY
from harness.bench.serving.plan import random_prompts
from harness.host.options import SessionOptions
from harness.host.session import Session
from harness.tiers import TierOptions
from reference.model.config import ModelConfig


def operations(config: ModelConfig, length: int) -> float:
    """Multiplications and additions of all layers for a causal prompt of ``length`` tokens."""
    widths = sum(config.heads[layer] * config.head_dims[layer] for layer in config.attention_layers)
    return 2.0 * length**2 * widths


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", default="0")
    parser.add_argument("--length", type=int, default=32768)
    args = parser.parse_args(argv)
    try:
        profiler = import_module("torch.profiler")
    except ModuleNotFoundError:
        sys.exit("PyTorch is not installed")
    options = SessionOptions(
        tier="cuda",
        tier_options=TierOptions(device=args.device),
        context=args.length + 2,
        prefix_cache=0,
        slots=1,
    )
    with Session.open(args.model, options) as session:
        engine, config = session.engine, session.model.config

        def answer(turn: int) -> None:
            (prompt,) = random_prompts(turn, config.vocab, 1, args.length)
            engine.submit(Request(turn, prompt, 1, GREEDY, ignore_end=True))
            for _ in engine.run():
                pass

        answer(0)
        with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as found:
            answer(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(f"{path}")
        events = json.loads(path.read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    seconds = 1e-6 * sum(e["dur"] for e in kernels if e["name"].startswith("attention_"))
    rate = operations(config, args.length) / seconds / 1e12
    print(f"{1e3 * seconds:.0f} ms of attention at {args.length}, {rate:.0f} TFLOP/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
