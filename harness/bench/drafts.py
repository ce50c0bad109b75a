"""Measures drafted tokens: how many are right, the speed against plain decoding, and whether every
answer is the same."""

import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from contract.types import Request, SamplingParams
from harness.bench.engines import GREEDY, PEER, fixed_workers
from harness.bench.machine import machine_facts
from harness.bench.measure import BenchmarkPlan
from harness.bench.report import digits, machine_line
from harness.bench.serving.plan import DRAFT_TOKENS, random_prompts
from harness.host.options import SessionOptions
from harness.host.session import Session
from harness.progress import SILENT, Progress
from harness.tiers import TierOptions
from reference.engine.drafter import FREQUENT_TOKENS, SpeculationStatistics

SEQUENCES = (1, 4)
"""Numbers of sequences that decode together."""
SAMPLED = SamplingParams(temperature=0.8, top_k=40, repeat_last_n=0, seed=3)
Answers = dict[int, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class DraftsPlan(BenchmarkPlan):
    """A measurement of drafted tokens. ``draft_model`` is the model that drafts. If it is None, the
    model's own draft block does, or tokens are looked up in the prompt if there is no such block. A
    step has at most ``draft`` drafted tokens per sequence."""

    prompt_tokens: int = 32
    decode_tokens: int = 64
    repeat: int = 3
    draft_model: Path | None = None
    draft: int = DRAFT_TOKENS

    def options(self, engine: str, sequences: int, draft: int) -> SessionOptions:
        """The options of a session; ``engine`` is one of ``engines``."""
        workers = fixed_workers(engine)
        return SessionOptions(
            tier=engine.partition(":")[0],
            tier_options=TierOptions(self.threads, self.device, workers),
            context=self.prompt_tokens + self.decode_tokens + 1,
            kv_dtype=self.kv_dtype,
            slots=sequences,
            prefix_cache=0,
            draft=draft,
            draft_model=self.draft_model if draft else None,
            top_log_probabilities=1,
        )

    def begin(self, engine: str, sequences: int, progress: Progress) -> None:
        """Show the tokens of all answers of an engine, plain and with drafts."""
        answers = 2 * sequences * (self.repeat + 1)
        progress.start(f"{engine}, {sequences} at once", answers * self.decode_tokens, "token")


@dataclass(frozen=True, slots=True)
class TimedAnswers:
    """Answers with their log-probabilities, and the seconds that they took."""

    answers: Answers
    seconds: float


def run_drafts(plan: DraftsPlan, progress: Progress = SILENT) -> dict[str, Any]:
    """Measure every engine of the plan; the report as JSON values."""
    results = []
    # What cannot be opened shall be said before minutes of measuring.
    for engine in plan.engines:
        if engine != PEER:
            with ExitStack() as owned:
                _open_pair(plan, engine, max(SEQUENCES), owned, progress)
    for engine in plan.engines:
        if engine == PEER:
            results.append(_measure_peer(plan, progress))
        for sequences in SEQUENCES if engine != PEER else ():
            results.append(_measure(plan, engine, sequences, progress))
    return {
        "machine": machine_facts(),
        "model": {"file": plan.model.name, "bytes": plan.model.stat().st_size},
        "settings": {**plan.settings, "draft": plan.draft},
        "draft_model": None if plan.draft_model is None else plan.draft_model.name,
        "results": results,
    }


def _open_pair(
    plan: DraftsPlan, engine: str, sequences: int, owned: ExitStack, progress: Progress
) -> list[Session]:
    """Sessions without and with drafts, whose answers take turns; ``owned`` closes them."""
    return [
        owned.enter_context(
            Session.open(plan.model, plan.options(engine, sequences, draft), progress)
        )
        for draft in (0, plan.draft)
    ]


def _measure(plan: DraftsPlan, engine: str, sequences: int, progress: Progress) -> dict[str, Any]:
    """Answer the same prompts without and with drafts, ``repeat`` + 1 times. The first round is not
    timed."""
    with ExitStack() as owned:
        plain, drafted = _open_pair(plan, engine, sequences, owned, progress)
        plan.begin(engine, sequences, progress)
        owned.callback(progress.close)
        ratios, rates, equal, answers = [], [], 0, 0
        for turn in range(plan.repeat + 1):
            before, after = (
                _answer(session, plan, sequences, turn, progress) for session in (plain, drafted)
            )
            answers += len(before.answers)
            equal += sum(after.answers[n] == answer for n, answer in before.answers.items())
            if turn:
                ratios.append(before.seconds / after.seconds)
                rates.append(sequences * plan.decode_tokens / after.seconds)
        counts = drafted.engine.statistics.speculation
        drafter = drafter_name(drafted, plan)
    return {
        "engine": engine,
        "sequences": sequences,
        "drafter": drafter,
        "speculation": asdict(counts),
        "tokens_a_step": tokens_a_step(counts),
        "tokens_a_second": median(rates),
        "speedup": median(ratios),
        "answers": answers,
        "equal": equal,
    }


def _measure_peer(plan: DraftsPlan, progress: Progress) -> dict[str, Any]:
    """The same with llama.cpp, greedy only, with drafts from the prompt."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    plain, drafted = (
        Llama(
            str(plan.model),
            n_ctx=plan.prompt_tokens + plan.decode_tokens + plan.draft + 1,
            n_threads=plan.threads,
            n_threads_batch=plan.threads,
            n_gpu_layers=-1 if plan.peer_gpu else 0,
            draft_model=draft,
            verbose=False,
        )
        for draft in (None, LlamaPromptLookupDecoding(num_pred_tokens=plan.draft))
    )
    ratios, equal = [], 0
    plan.begin(PEER, 1, progress)
    for turn in range(plan.repeat + 1):
        (prompt,) = random_prompts(turn, plain.n_vocab(), 1, plan.prompt_tokens)
        before, after = (_answer_of_peer(each, prompt, plan, progress) for each in (plain, drafted))
        equal += before.answers == after.answers
        ratios += [before.seconds / after.seconds] * (turn > 0)
    return {
        "engine": PEER,
        "sequences": 1,
        "drafter": "prompt",
        "tokens_a_second": plan.decode_tokens / after.seconds,
        "speedup": median(ratios),
        "answers": plan.repeat + 1,
        "equal": equal,
    }


def _answer_of_peer(
    llama: Any, prompt: Sequence[int], plan: DraftsPlan, progress: Progress
) -> TimedAnswers:
    llama.reset()
    started = time.perf_counter()
    tokens = llama.generate(list(prompt), top_k=1, temp=0.0, repeat_penalty=1.0)
    answer = tuple(islice(tokens, plan.decode_tokens))
    seconds = time.perf_counter() - started
    progress.advance(len(answer))
    return TimedAnswers({0: answer}, seconds)


def drafter_name(session: Session, plan: DraftsPlan) -> str:
    """The source of drafts of a session."""
    if plan.draft_model is not None:
        return plan.draft_model.name
    return "draft block" if session.runner.limits.hidden_rows else "prompt"


def tokens_a_step(counts: SpeculationStatistics) -> float:
    """Mean number of tokens that a sequence gains in a step with drafts: the accepted ones and one
    more."""
    return 1 + counts.accepted / counts.steps if counts.steps else 1.0


def _answer(
    session: Session, plan: DraftsPlan, sequences: int, turn: int, progress: Progress
) -> TimedAnswers:
    """The answers to ``sequences`` prompts of frequent tokens: greedy in even turns, sampled in odd
    ones."""
    engine, vocab = session.engine, min(session.model.config.vocab, FREQUENT_TOKENS)
    sampling = SAMPLED if turn % 2 else GREEDY
    for number, prompt in enumerate(random_prompts(turn, vocab, sequences, plan.prompt_tokens)):
        request = Request(
            number, prompt, plan.decode_tokens, sampling, ignore_end=True, log_probabilities=1
        )
        engine.submit(request)
    answers: defaultdict[int, list[Any]] = defaultdict(list)
    started = time.perf_counter()
    for event in engine.run():
        answers[event.request_id].append((event.token, event.log_probability, event.top))
        progress.advance(1)
    seconds = time.perf_counter() - started
    return TimedAnswers({number: tuple(answer) for number, answer in answers.items()}, seconds)


def render_drafts(report: dict[str, Any]) -> str:
    """The report as lines of text."""
    model = report["model"]
    lines = [machine_line(report), f"{model['file']}, {model['bytes'] / 1e6:.1f} MB"]
    for one in report["results"]:
        drafter, together = one["drafter"], one["sequences"]
        lines.append(f"{one['engine']}, {together} at once, drafts from the {drafter}:")
        if "speculation" in one:
            counts = one["speculation"]
            lines.append(
                f"  {digits(one['tokens_a_step'])} tokens a step with drafts, "
                f"{counts['accepted']} of {counts['drafted']} accepted"
            )
        lines += [
            f"  {digits(one['speedup'])} times the speed of plain decoding, "
            f"{digits(one['tokens_a_second'])} tokens a second",
            f"  {one['equal']} of {one['answers']} answers equal",
        ]
    return "\n".join(lines)
