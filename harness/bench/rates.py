"""Rates of tiers: prompts of several lengths, decoding behind each, many sequences at once."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any

from contract.types import Request
from harness.bench.engines import GREEDY, fixed_workers
from harness.bench.machine import machine_facts
from harness.bench.measure import BenchmarkPlan, Samples
from harness.bench.report import digits
from harness.bench.serving.plan import Tokens, random_prompts
from harness.host.options import SessionOptions
from harness.host.session import Session
from harness.tiers import TierOptions

TOGETHER_PROMPT = 16
"""Prompt tokens of each of many sequences."""
_Work = tuple[Callable[[], AbstractContextManager[Session]], Callable[[Session], None]]
"""Opens a session, and measures with it."""


@dataclass(frozen=True, slots=True)
class RatesPlan(BenchmarkPlan):
    """A measurement: prompts of these ``lengths``, and these numbers of ``sequences``."""

    lengths: tuple[int, ...] = ()
    sequences: tuple[int, ...] = ()


@dataclass(slots=True)
class _Rates:
    """Results of one engine; ``tokens`` are all that one sequence decoded."""

    plan: RatesPlan
    name: str
    say: Callable[[str], None]
    samples: Samples = field(default_factory=Samples)
    device: str = ""
    tokens: Any = field(default_factory=sha256)

    @contextmanager
    def opened(self, slots: int, prompt: int) -> Iterator[Session]:
        """A session. How long its first opening took is among the results."""
        plan, workers = self.plan, fixed_workers(self.name)
        options = SessionOptions(
            tier=self.name.partition(":")[0],
            tier_options=TierOptions(plan.threads, plan.device, workers),
            context=prompt + plan.decode_tokens + 1,
            kv_dtype=plan.kv_dtype,
            prefix_cache=0,
            slots=slots,
        )
        self.say(f"{self.name}: opening the model")
        started = time.perf_counter()
        with Session.open(plan.model, options) as session:
            taken = [time.perf_counter() - started]
            self.samples.values.setdefault(f"seconds to open {slots} slots", taken)
            self.device = session.tier.info.device
            yield session

    def measure_single(self, session: Session) -> None:
        """Prefill and decode rates of one sequence, without the first turn of each length."""
        for length in self.plan.lengths:
            (prompt,) = random_prompts(0, session.model.config.vocab, 1, length)
            for turn in range(self.plan.repeat + 1):
                self._say(f"a prompt of {length}", turn)
                times, chosen = self._answered(session, prompt)
                if turn == 0:
                    self.tokens.update(repr(chosen).encode())
                    continue
                self.samples.add(f"prompt of {length}, tok/s", length / (times[1] - times[0]))
                decoded = (len(chosen) - 1) / (times[-1] - times[1])
                self.samples.add(f"decode at {length}, tok/s", decoded)

    def _say(self, what: str, turn: int) -> None:
        self.say(f"{self.name}: {what}, {turn + 1} of {self.plan.repeat + 1}")

    def _answered(self, session: Session, prompt: Tokens) -> tuple[list[float], list[int]]:
        """Time of submission, times of the tokens, and the tokens."""
        engine, tokens = session.engine, self.plan.decode_tokens + 1
        times, chosen = [time.perf_counter()], list[int]()
        engine.submit(Request(0, prompt, tokens, GREEDY, ignore_end=True))
        while not engine.idle:
            if events := engine.step():
                times.append(time.perf_counter())
                chosen += [event.token for event in events]
        return times, chosen

    def measure_batches(self, session: Session) -> None:
        """Tokens per second of many sequences, prompts included; without the first turn."""
        engine, decoded = session.engine, self.plan.decode_tokens
        for count in self.plan.sequences:
            for turn in range(self.plan.repeat + 1):
                self._say(f"{count} sequences", turn)
                prompts = random_prompts(turn, session.model.config.vocab, count, TOGETHER_PROMPT)
                started = time.perf_counter()
                for number, prompt in enumerate(prompts):
                    engine.submit(Request(number, prompt, decoded, GREEDY, ignore_end=True))
                for _ in engine.run():
                    pass
                if turn:
                    rate = count * decoded / (time.perf_counter() - started)
                    self.samples.add(f"{count} sequences, tok/s", rate)


def run_rates(plan: RatesPlan, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything the command reports, as plain JSON types. ``say`` receives lines about progress.
    Raises what opening a session raises, before anything is measured."""
    engines = [_Rates(plan, name, say) for name in plan.engines]
    work: list[_Work] = []
    for engine in engines:
        if plan.lengths:
            opening = partial(engine.opened, 1, max(plan.lengths))
            work.append((opening, engine.measure_single))
        if plan.sequences:
            opening = partial(engine.opened, max(plan.sequences), TOGETHER_PROMPT)
            work.append((opening, engine.measure_batches))
    # What cannot be opened shall be said before minutes of measuring.
    for opened, _ in work if len(work) > 1 else ():
        with opened():
            pass
    for opened, measure in work:
        with opened() as session:
            measure(session)
    found = {
        engine.name: {
            "device": engine.device,
            "tokens": engine.tokens.hexdigest()[:16],
            "rates": engine.samples.summaries(),
        }
        for engine in engines
    }
    return {"machine": machine_facts(), "model": {"file": plan.model.name}, "engines": found}


def render_rates(report: dict[str, Any]) -> str:
    """The report in lines."""
    lines = []
    for name, found in report["engines"].items():
        lines.append(f"{report['model']['file']}, {name}, {found['device']}")
        lines += [
            f"{metric}: {digits(one['median'])} ({digits(one['minimum'])}-{digits(one['maximum'])})"
            for metric, one in found["rates"].items()
        ]
        lines.append(f"tokens: {found['tokens']}")
    return "\n".join(lines)
