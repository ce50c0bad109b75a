"""``python -m harness.amd_performance``: what AMD cards should reach, on paper.

Counts the shipped code of gfx1201 on the graphs of published models and sets it beside the targets.
``--write`` stores the result as ``goldens/amd-on-paper.md``, which docs/simulated.md links."""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from accel.amd.kernel_files import FOLDER
from accel.amd.tools.performance import Card, PacketCost, Paper
from accel.kernels.stored import read_digests
from contract.dtypes import DEFAULT_KV
from contract.ir.nodes import Graph
from harness.cli.parser import add_switch, real_number
from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from reference.limits import Limits
from reference.model.open import open_model

DOCUMENT = Path(__file__).parents[1] / "goldens" / "amd-on-paper.md"
CONTEXT = 4096
CHUNK = 512
MAX_ROWS = 64
NOTED = 6
"""Kernels a table names; the rest is one line."""


@dataclass(frozen=True, slots=True)
class Published:
    """A model by its sizes, and what it should reach: tokens a second by phase."""

    title: str
    architecture: str
    size: str
    decode: tuple[tuple[int, str], ...] = ()
    prefill: str = ""


MODELS = (
    Published(
        "Qwen 3.6 35B-A3B, Q4_K_M",
        "qwen35moe",
        "35b-a3b",
        (
            (1, "M1 140, M2 165, M3 195, M5 240"),
            (4, "M3 760, M5 960"),
            (16, "M3 2,100, M5 2,800"),
            (64, "M3 5,800, M5 7,800"),
        ),
        "M2 280",
    ),
    Published("Qwen 3 8B, Q4_K_M", "qwen3", "8b", ((1, ""),), "M2 180"),
)


@dataclass(frozen=True, slots=True)
class Phase:
    """A step of one kind: tokens it makes or reads, its launches."""

    title: str
    tokens: int
    target: str
    costs: tuple[PacketCost, ...]

    def seconds(self, card: Card) -> float:
        """Of the whole step."""
        return sum(cost.seconds(card) for cost in self.costs)


def phases(model: Published) -> Iterator[Phase]:
    """Decoding with each number of slots, then a chunk of a prompt."""
    graph = _graph(model)
    for slots, target in model.decode:
        title = f"decode, {slots} slot{'s' if slots > 1 else ''}"
        yield Phase(title, slots, target, tuple(Paper(graph, slots, CONTEXT).costs()))
    costs = tuple(Paper(graph, 1, CONTEXT, CHUNK).costs())
    yield Phase(f"prefill, {CHUNK} tokens", CHUNK, model.prefill, costs)


def report(models: Sequence[Published], card: Card) -> Iterator[str]:
    """Lines of Markdown."""
    yield from _head(card)
    for model in models:
        found = list(phases(model))
        yield f"\n## {model.title}\n"
        yield (
            "| step | launches | waits | instructions | memory | caches | ms | tokens/s "
            "| target |\n"
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
        )
        for phase in found:
            yield _row(phase, card)
        for phase in found:
            yield f"\n{model.title}, {phase.title}: where the time goes\n"
            yield from _kernels(phase, card)


def _head(card: Card) -> Iterator[str]:
    yield f"""\
# AMD cards on paper

Made by `python -m harness.amd_performance --write` from the shipped code of gfx1201: one work-group
of every launch is executed and counted, with the sizes of published models, then multiplied. **No
card was measured**; seconds follow from a data sheet and from guesses.

| {card.name} | |
| --- | --- |
| SIMDs of 32 lanes, clock | {card.simds}, {card.hertz / 1e9:g} GHz |
| memory | {card.bytes_per_second / 1e9:g} GB/s |
| share of it that reads get | {card.reached:g} (guess) |
| cycles an instruction takes a wave alone on its SIMD | {card.cycles_alone:g} (guess) |
| cycles a product of 16 x 16 x 16 bytes takes a SIMD | {card.matrix_cycles:g} |
| a launch, a wait for launches | {card.launch_seconds * 1e6:g}, {card.level_seconds * 1e6:g} us \
(guesses) |
| positions of a slot | {CONTEXT:,} |
| compiler | {read_digests(FOLDER).compiler} |

A launch takes the longest of three: its bytes; its instructions, one a cycle and SIMD; those of
one wave, one after the other (latency). All tokens choose the same experts, all groups do as much
as the first: with many tokens this is more than there is. On a card the guesses would be measured
first, each with one launch."""


def _row(phase: Phase, card: Card) -> str:
    seconds = phase.seconds(card)
    cells = (
        phase.title,
        f"{len(phase.costs)}",
        f"{sum(cost.wait for cost in phase.costs)}",
        f"{sum(cost.instructions for cost in phase.costs) / 1e6:,.1f} M",
        f"{sum(cost.far for cost in phase.costs) / 1e6:,.0f} MB",
        f"{sum(cost.near for cost in phase.costs) / 1e6:,.0f} MB",
        f"{seconds * 1e3:.2f}",
        f"{phase.tokens / seconds:,.0f}",
        phase.target,
    )
    return f"| {' | '.join(cells)} |"


def _kernels(phase: Phase, card: Card) -> Iterator[str]:
    yield "| kernel | launches | waves | instructions | memory | ms | kept by |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    names = {cost.kernel for cost in phase.costs}
    groups = [[cost for cost in phase.costs if cost.kernel == name] for name in sorted(names)]
    groups.sort(key=lambda costs: -sum(cost.seconds(card) for cost in costs))
    for costs in groups[:NOTED]:
        yield _kernel_row(costs[0].kernel, costs, card)
    rest = [cost for costs in groups[NOTED:] for cost in costs]
    if rest:
        yield _kernel_row(f"{len(groups) - NOTED} others", rest, card)


def _kernel_row(name: str, costs: Sequence[PacketCost], card: Card) -> str:
    seconds_by_limit: dict[str, float] = {}
    for cost in costs:
        limits = cost.limits(card)
        limit = max(limits, key=lambda key: limits[key])
        fixed = cost.seconds(card) - limits[limit]
        reason = "launching and waiting" if fixed > limits[limit] else limit
        seconds_by_limit[reason] = seconds_by_limit.get(reason, 0) + cost.seconds(card)
    cells = (
        name,
        f"{len(costs)}",
        f"{sum(cost.waves for cost in costs):,}",
        f"{sum(cost.instructions for cost in costs) / 1e6:,.2f} M",
        f"{sum(cost.far for cost in costs) / 1e6:,.1f} MB",
        f"{sum(cost.seconds(card) for cost in costs) * 1e3:.3f}",
        max(seconds_by_limit, key=lambda key: seconds_by_limit[key]),
    )
    return f"| {' | '.join(cells)} |"


def _graph(model: Published) -> Graph:
    """Of a file whose tensors are a hole."""
    spec = sized_spec(model.size, architecture=model.architecture, quant="q4_k_m")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.gguf")
        write_synthetic(path, spec, sparse=True)
        opened = open_model(path)
        pages = -(-CONTEXT // 16)
        limits = Limits(
            MAX_ROWS, CONTEXT, MAX_ROWS * pages, DEFAULT_KV, step_tokens=CHUNK, step_rows=MAX_ROWS
        )
        graph = opened.graph(limits)
        opened.close()
    return graph


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report, or write it."""
    parser = argparse.ArgumentParser(prog="python -m harness.amd_performance", description=__doc__)
    add_switch(parser, "--write", help=f"write {DOCUMENT.name}")
    parser.add_argument("--memory", type=real_number, default=640, help="GB/s of the card [640]")
    args = parser.parse_args(argv)
    card = Card(bytes_per_second=args.memory * 1e9)
    text = "\n".join(report(MODELS, card)) + "\n"
    if args.write:
        DOCUMENT.write_text(text)
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
