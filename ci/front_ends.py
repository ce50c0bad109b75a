"""Measures what front ends take from an engine: the same requests given to the engine itself, to
``LLM.generate`` and to a server over HTTP, in turn.

    PYTHONPATH=.:harness/python python ci/front_ends.py --tier cuda --model 8b.gguf

With ``--engine-process`` also to a server whose engine is in a child process.

For each number of sequences there are as many requests at once as slots, of prompts that no cache
holds. The engine decodes greedily; the front ends get no parameters but the number of tokens. The
heap is frozen, as ``zinc-rt serve`` freezes its own."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from contract.processors import processors
from contract.types import Request
from harness.bench.engines import GREEDY
from harness.bench.load.overhead import Readers, server_here
from harness.bench.load.servers import ServerSetup
from harness.bench.machine import machine_facts
from harness.bench.measure import in_turn
from harness.bench.report import digits
from harness.bench.serving.plan import Tokens, random_prompts
from harness.host.heap import freeze_heap
from harness.host.options import SessionOptions
from harness.host.session import Session
from harness.tiers import TierOptions
from zinc_rt import LLM, SamplingParams

ENGINE = "engine"
Measure = Callable[[Sequence[Tokens]], None]
"""Answers all prompts at once and returns when the last answer is complete."""


def opened(
    args: argparse.Namespace, sequences: int, owned: ExitStack
) -> tuple[int, Mapping[str, Measure]]:
    """The vocabulary, and the engine and its front ends, each with the model loaded once more."""
    context = args.prompt_tokens + args.decode_tokens + 1
    options = SessionOptions(
        tier=args.tier,
        tier_options=TierOptions(device=args.device),
        context=context,
        slots=sequences,
        prefix_cache=0,
    )
    session = owned.enter_context(Session.open(args.model, options))
    llm = owned.enter_context(
        LLM(
            args.model,
            tier=args.tier,
            device=args.device,
            context=context,
            slots=sequences,
            progress=False,
        )
    )
    setup = ServerSetup(
        args.model, args.tier, processors(), sequences, context=context, device=args.device
    )
    parameters = SamplingParams(max_tokens=args.decode_tokens, ignore_end=True)

    def engine(prompts: Sequence[Tokens]) -> None:
        for number, prompt in enumerate(prompts):
            request = Request(number, prompt, args.decode_tokens, GREEDY, ignore_end=True)
            session.engine.submit(request)
        for _ in session.engine.run():
            pass

    def generate(prompts: Sequence[Tokens]) -> None:
        llm.generate(prompts, parameters)

    def server(engine_process: bool) -> Measure:
        running = owned.enter_context(server_here(setup, engine_process))
        readers = owned.enter_context(Readers(running.url))

        def answer(prompts: Sequence[Tokens]) -> None:
            body = {"max_tokens": args.decode_tokens, "ignore_eos": True, "stream": True}
            readers.seconds([{"prompt": prompt, **body} for prompt in prompts])

        return answer

    measures = {ENGINE: engine, "LLM.generate": generate, "server": server(engine_process=False)}
    if args.engine_process:
        measures["server, engine process"] = server(engine_process=True)
    return session.model.config.vocab, measures


def measured(args: argparse.Namespace, sequences: int) -> Mapping[str, list[float]]:
    """Tokens a second in each turn. The first turn of each front end is not counted."""
    with ExitStack() as owned:
        vocab, measures = opened(args, sequences, owned)
        freeze_heap()
        rates: dict[str, list[float]] = {name: [] for name in measures}
        for turn in range(args.repeat + 1):
            prompts = random_prompts(turn, vocab, sequences, args.prompt_tokens)
            for name in in_turn(list(measures), turn):
                started = time.perf_counter()
                measures[name](prompts)
                seconds = time.perf_counter() - started
                if turn:
                    rates[name].append(sequences * args.decode_tokens / seconds)
        return rates


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tier", default="auto")
    parser.add_argument("--device", default="", help="as of zinc-rt run")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--decode-tokens", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--engine-process", action="store_true")
    args = parser.parse_args(argv)
    machine = machine_facts()
    print(f"{machine['cpu']}, {machine['cores']} cores; {args.model.name}, {args.tier}")
    for sequences in args.sequences:
        rates = measured(args, sequences)
        for name, values in rates.items():
            share = median(rate / of for rate, of in zip(values, rates[ENGINE], strict=True))
            spread = f"{digits(min(values))}-{digits(max(values))}"
            print(
                f"{sequences:4} at once, {name + ':':23} {digits(median(values))} ({spread}) "
                f"tokens a second, {share:.3f} of the engine's",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
