"""Measures the aims of docs/cuda.md on this machine and prints their table with what was measured.

    PYTHONPATH=.:harness/python python ci/aims.py --folder /tmp/models --devices 0,1

Models are written to the folder where they are missing. Every session has a process of its own, one
behind the other; ``--only`` selects some. What needs more devices than there are is left out, and
attention where PyTorch is missing, whose profiler it needs."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.bench.machine import machine_facts
from harness.bench.report import digits

SYNTH = {
    "8b": "--arch qwen3 --size 8b",
    "35b-a3b": "--arch qwen35moe --size 35b-a3b --mtp-agreement 0.8",
    "0.6b": "--arch qwen3 --size 0.6b",
    "70b": "--arch llama --size custom --layers 80 --hidden 8192 --heads 64 --kv-heads 8 "
    "--head-dim 128 --feed-forward 28672 --vocab 128256 --no-tied",
}
"""Arguments of ``harness.synth``; matrices are Q4_K_M."""
DECODE, PROMPT, TOGETHER, OPEN = (
    "decode at {}, tok/s",
    "prompt of {}, tok/s",
    "{} sequences, tok/s",
    "seconds to open {} slots",
)
"""Metrics of ``harness.bench``."""
SESSIONS: tuple[tuple[str, str, int, dict[str, dict[int, float]]], ...] = (
    ("cuda", "8b", 1, {DECODE: {512: 680, 4090: 580, 5: 720}, PROMPT: {512: 25e3, 2048: 25e3}}),
    ("cuda", "8b", 1, {PROMPT: {8192: 22e3, 32768: 14e3}}),
    ("cuda", "8b", 1, {TOGETHER: {64: 14e3, 256: 20e3}}),
    (
        "cuda",
        "8b",
        2,
        {DECODE: {512: 1000, 4090: 900, 5: 1050}, PROMPT: {2048: 42e3}, OPEN: {1: 3}},
    ),
    ("cuda", "8b", 2, {TOGETHER: {64: 22.4e3, 256: 0}}),
    ("cuda", "8b", 4, {DECODE: {512: 1330, 4090: 1200, 5: 1400}, PROMPT: {2048: 75e3}}),
    ("cuda", "35b-a3b", 1, {DECODE: {512: 0, 5: 780}, PROMPT: {512: 0, 2048: 30e3}}),
    ("cuda", "35b-a3b", 1, {TOGETHER: {64: 10e3}}),
    ("cuda", "35b-a3b", 2, {DECODE: {512: 0, 5: 1000}, PROMPT: {2048: 0}}),
    ("cuda", "0.6b", 1, {DECODE: {512: 0, 5: 2400}}),
    ("cuda", "70b", 1, {DECODE: {512: 0, 5: 85}}),
    ("cuda", "70b", 2, {DECODE: {512: 0, 5: 160}}),
    ("cuda", "70b", 4, {DECODE: {512: 0, 5: 290}}),
    ("vulkan", "8b", 1, {DECODE: {512: 0, 5: 370}, PROMPT: {512: 11e3}}),
)
"""Tier, model, devices, and aims by metric and number; 0 is no aim. Lengths are measured in order:
512 comes first, since kernels of other shapes are compiled until then."""
FRONT_ENDS, ATTENTION = "front ends", "attention"
MIN_SHARE, MIN_RUNS, MIN_TFLOPS = 0.97, 20, 260
"""Of the engine's rate, of the runs of ``ci/interactive_client.py``, of attention in a prompt."""


def printed(*words: str) -> str:
    """What a Python program prints; some report by their code what they missed."""
    done = subprocess.run([sys.executable, *words], stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout


def written(model: str, folder: Path) -> str:
    """The path of a model's file."""
    path = folder / f"{model}.gguf"
    if not path.exists():
        printed(
            "-m", "harness.synth", "--quant", "q4_k_m", *SYNTH[model].split(), "--out", f"{path}"
        )
    return f"{path}"


def measured(
    tier: str, path: str, devices: str, aims: dict[str, dict[int, float]], repeat: int
) -> Iterator[tuple[str, float, float]]:
    """Metric, aim and median of one process."""
    lengths = dict.fromkeys(n for metric in (DECODE, PROMPT) for n in aims.get(metric, ()))
    words = ["--tiers", tier, "--model", path, "--device", devices, "--repeat", f"{repeat}"]
    for flag, numbers in (("--rates", lengths), ("--sequences", aims.get(TOGETHER, ()))):
        words += [flag, ",".join(map(str, numbers))] if numbers else []
    report = printed("-m", "harness.bench", "--json", "--decode-tokens", "128", *words)
    if not report:
        yield "failed", 0, 0
        return
    (engine,) = json.loads(report)["engines"].values()
    for metric, numbers in aims.items():
        for number, aim in numbers.items():
            name = metric.format(number)
            yield name, aim, engine["rates"][name]["median"]


def front_ends(path: str, repeat: int) -> Iterator[tuple[str, float, float]]:
    """Of both front ends at 1, 64 and 256 sequences, and of a client beside batch work."""
    here = Path(__file__).parent
    program = ("--tier", "cuda", "--model", path)
    for line in printed(
        f"{here / 'front_ends.py'}", *program, "--repeat", f"{repeat}"
    ).splitlines():
        if found := re.match(r" *(.+(?:generate|server)): .* ([0-9.]+) of the engine's", line):
            yield f"{found[1]}, of the engine's rate", MIN_SHARE, float(found[2])
    client = printed(f"{here / 'interactive_client.py'}", *program, "--draft", "0")
    for last in client.splitlines()[-1:]:
        yield last.partition(" of ")[2], MIN_RUNS, float(last.split()[0])


def attention(path: str, device: str) -> Iterator[tuple[str, float, float]]:
    """Of attention in a long prompt; nothing where there is no profiler."""
    program = f"{Path(__file__).parent / 'attention_rate.py'}"
    text = printed(program, "--model", path, "--device", device)
    if found := re.search(r" at (\d+), (\d+) TFLOP/s", text):
        yield f"prompt of {found[1]}, TFLOP/s", MIN_TFLOPS, float(found[2])


def lines(args: argparse.Namespace) -> Iterator[tuple[str, str, float, float]]:
    """Session, metric, aim and what was measured, of the sessions that ``args.only`` selects."""
    devices = args.devices.split(",")
    if re.search(args.only, FRONT_ENDS):
        for line in front_ends(written("8b", args.folder), args.repeat):
            yield FRONT_ENDS, *line
    for tier, model, count, aims in SESSIONS:
        name = f"{tier} {model} on {count}"
        if count <= len(devices) and re.search(args.only, name):
            own = ",".join(devices[:count])
            for line in measured(tier, written(model, args.folder), own, aims, args.repeat):
                yield name, *line
    if re.search(args.only, ATTENTION):
        for line in attention(written("8b", args.folder), devices[0]):
            yield ATTENTION, *line


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--devices", default="0", help="numbers of devices, with commas between")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="", help=f"a pattern, as '8b on 1' or '{FRONT_ENDS}'")
    args = parser.parse_args(argv)
    machine = machine_facts()
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    print(f"commit {commit.stdout[:8]}, {machine['cores']} cores of {machine['cpu']}\n")
    print("| what | aim | measured |\n| --- | --- | --- |", flush=True)
    for name, what, aim, got in lines(args):
        met = got <= aim if what.startswith("seconds") else got >= aim > 0
        text = f"**{digits(got)}**" if met else digits(got)
        print(f"| {name}, {what} | {digits(aim) if aim else '-'} | {text} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
