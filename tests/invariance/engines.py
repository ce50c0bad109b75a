"""Running the same requests under different schedules, and what must not change.

A proof is a function that takes a bench and raises AssertionError when some bit depends on the
schedule. It compares a bench only with itself, so a deliberately broken bench must fail it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from hypothesis import strategies as st

from contract.dtypes import F32, DType
from contract.tier import Tier
from contract.types import LOCAL_TENANT, QosClass, Request, SamplingParams
from harness.digest import logits_digest
from reference.engine import Engine, EngineOptions
from reference.limits import RING_STEPS, Limits
from reference.model.open import open_model
from reference.runner import ModelRunner, StepInput, Submission
from reference.sched.tenants import Tenants
from tests.named_tiers import is_emulated, named, quick_tier

SLOTS = 4
CONTEXT = 176
INTERACTIVE = replace(LOCAL_TENANT, id=1, name="interactive", qos=QosClass.INTERACTIVE)
BATCH = replace(LOCAL_TENANT, id=2, name="batch", qos=QosClass.BATCH, isolation_group=None)
PAGES = 26
"""Fewer than four full slots need, so that requests also wait for pages."""
STEP_TOKENS = 72


TIERS = named("native", "opencl", "vulkan", "cuda")
"""What every proof runs on."""


@contextmanager
def bench_on(tier: str, path: Path, **sizes: Any) -> Iterator[Bench]:
    """A bench on a tier by its name. Its oracle is on another tier, and what that gave requests of
    the same model for an earlier bench is not computed again."""
    same = path, tuple(sorted(sizes.items()))
    with Bench(path, **sizes) as oracle:
        oracle.traces_alone = TRACES_ALONE.setdefault(same, oracle.traces_alone)
        with Bench(path, tier=TIERS[tier](), oracle=oracle, **sizes) as bench:
            yield bench


@dataclass(slots=True)
class ObservedRunner:
    """A runner that keeps what every step was: (query tokens, sequences)."""

    inner: Any
    steps: list[tuple[int, int]] = field(default_factory=list)

    def submit(self, inputs: StepInput) -> Submission:
        """Record and forward."""
        self.steps.append((len(inputs.query), len(np.unique(inputs.query["slot"]))))
        return self.inner.submit(inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def batch_sizes(self) -> set[int]:
        """Every number of query tokens a step had."""
        return {tokens for tokens, _ in self.steps}

    @property
    def sequence_counts(self) -> set[int]:
        """Every number of sequences a step had."""
        return {sequences for _, sequences in self.steps}


@dataclass(slots=True)
class Trace:
    """What one request produced: tokens, and the digest of the logits of each position."""

    tokens: list[int] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    logits: dict[int, np.ndarray] = field(default_factory=dict)
    cancelled: bool = False

    def sink(self, first: int, logits: np.ndarray) -> None:
        """Receives the logits of consecutive positions from the engine."""
        for position, row in enumerate(logits, first):
            assert position not in self.logits, f"position {position} was computed twice"
            self.logits[position] = row
            self.digests[position] = logits_digest(row)


@dataclass(frozen=True, slots=True)
class Schedule:
    """How requests are run. ``joins`` and ``cancels``: request id -> step before which it happens.

    ``slot_order`` is the order in which free slots are handed out, ``page_order`` that of pages;
    ``steps_ahead`` steps are submitted before the oldest one is read. ``stalls``: request id ->
    steps between which its consumer takes nothing. ``batch`` requests are of a batch tenant, the
    others of an interactive one; ``withheld`` pages are reserved for a tenant that never comes.
    Of requests in ``unscored`` only the logits behind the prompt are wanted, so that what others
    computed may stand in for it; ``host_pages`` of it are kept in host memory."""

    chunk_tokens: int = 64
    steps_ahead: int = 0
    slot_order: tuple[int, ...] | None = None
    page_order: tuple[int, ...] | None = None
    joins: Mapping[int, int] = field(default_factory=dict)
    cancels: Mapping[int, int] = field(default_factory=dict)
    stalls: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    batch: frozenset[int] = frozenset()
    withheld: int = 0
    unscored: frozenset[int] = frozenset()
    host_pages: int = 0


TRACES_ALONE: dict[tuple[Any, ...], dict[Request, Trace]] = {}
"""By model and sizes, what the oracle gave each request alone."""


class Bench:
    """A model on a tier, None for a quick one, with its runner observed. ``wrap`` may put something
    broken in between.

    What a request gives alone is what it gives on ``oracle``, None for this bench itself."""

    def __init__(
        self, path: Path, *, tier: Tier | None = None, kv_dtype: DType = F32, slots: int = SLOTS,
        context: int = CONTEXT, pages: int = PAGES, step_tokens: int = STEP_TOKENS,
        wrap: Callable[[ModelRunner], Any] = lambda runner: runner, oracle: Bench | None = None,
        adapters: tuple[Path, ...] = (),
    ) -> None:  # fmt: skip
        self._stack = ExitStack()
        self.tier = self._stack.enter_context(tier or quick_tier())
        self.model = open_model(path, adapters)
        self._stack.callback(self.model.close)
        limits = Limits(
            slots, context, pages, kv_dtype, step_tokens=step_tokens, step_rows=step_tokens,
            adapters=self.model.adapters.combined,
        )  # fmt: skip
        runner = ModelRunner(self.model, self.tier, limits)
        self._stack.enter_context(runner)
        self.runner = ObservedRunner(wrap(runner))
        self.preempted = self.reused = 0
        self._oracle = oracle or self
        self.traces_alone: dict[Request, Trace] = {}

    def __enter__(self) -> Self:
        return self

    @property
    def late(self) -> bool:
        """Whether steps under way are not computed yet, and by a processor quickly enough to try
        any number of them."""
        return self.tier.info.asynchronous and not self.emulated

    @property
    def emulated(self) -> bool:
        """See ``is_emulated``."""
        return is_emulated(self.tier)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.runner.inner = None
        self._stack.close()

    def alone(self, request: Request) -> Trace:
        """The request with the oracle's engine to itself, one step at a time; computed once."""
        oracle = self._oracle
        if request not in oracle.traces_alone:
            oracle.traces_alone[request] = oracle.execute([request], Schedule())[request.id]
        return oracle.traces_alone[request]

    def execute(self, requests: Sequence[Request], schedule: Schedule) -> dict[int, Trace]:
        """Run the requests as ``schedule`` says, to the end of all that are not cancelled."""
        engine = Engine(
            self.runner,  # type: ignore[arg-type]
            EngineOptions(
                chunk_tokens=schedule.chunk_tokens,
                page_order=schedule.page_order,
                steps_ahead=schedule.steps_ahead,
                copy_pages=schedule.host_pages > 0,
                host_pages=schedule.host_pages,
                stall_steps=1 << 30,
            ),
            tenants=tenants_of(schedule),
        )
        if schedule.slot_order is not None:
            permute_slots(engine, schedule.slot_order)
        traces = {request.id: Trace() for request in requests}
        unfinished = set(traces)
        last_join = max((schedule.joins.get(id_, 0) for id_ in traces), default=0)
        step = 0
        while step <= last_join or not engine.idle:
            for request in requests:
                if schedule.joins.get(request.id, 0) == step:
                    first = len(request.prompt) - 1 if request.id in schedule.unscored else 0
                    tenant = BATCH if request.id in schedule.batch else INTERACTIVE
                    sink = traces[request.id].sink
                    engine.submit(replace(request, tenant=tenant.id), sink, first)
            for id_, (begin, end) in schedule.stalls.items():
                if begin == step:
                    engine.stall(id_)
                elif end == step:
                    engine.unstall(id_)
            for id_, at in schedule.cancels.items():
                if at == step and id_ in unfinished:
                    engine.cancel(id_)
                    traces[id_].cancelled = True
            if not engine.idle:
                for event in engine.step():
                    if event.token >= 0:
                        traces[event.request_id].tokens.append(event.token)
                    if event.finish_reason is not None:
                        unfinished.discard(event.request_id)
            step += 1
        engine.memory.check([])
        self.preempted += engine.statistics.preempted
        self.reused += engine.statistics.prefix.tokens_hit
        return traces


def tenants_of(schedule: Schedule) -> Tenants:
    """Those that requests belong to, and one that only keeps pages from them."""
    absent = replace(BATCH, id=3, name="absent", reserved_pages=schedule.withheld)
    return Tenants((LOCAL_TENANT, INTERACTIVE, BATCH, absent), clock=lambda: 0.0)


def permute_slots(engine: Engine, order: Sequence[int]) -> None:
    """Occupy every slot and give them back in ``order``, which is how they are reused."""
    blocker = 1 << 40
    for slot in range(len(order)):
        engine.submit(Request(blocker + slot, (0, 1), 1))
    engine.step()
    for slot in order:
        engine.cancel(blocker + slot)
    assert engine.idle


def assert_schedule_invariant(
    bench: Bench, requests: Sequence[Request], schedule: Schedule
) -> None:
    """Proof: every request gives the logits and tokens it gives alone."""
    for request, trace in zip(requests, bench.execute(requests, schedule).values(), strict=True):
        alone = bench.alone(request)
        assert trace.digests.keys() <= alone.digests.keys()
        for position, digest in trace.digests.items():
            assert digest == alone.digests[position], f"request {request.id} position {position}"
        assert trace.tokens == alone.tokens[: len(trace.tokens)], f"request {request.id}"
        if not trace.cancelled:
            first = len(request.prompt) - 1 if request.id in schedule.unscored else 0
            requested = {position for position in alone.digests if position >= first}
            assert requested <= trace.digests.keys()
            assert len(trace.tokens) == len(alone.tokens)


def assert_prefill_equals_decode(bench: Bench, request: Request, chunk_tokens: int) -> None:
    """Proof: scoring a finished sequence gives the logits it was generated from, every one."""
    generated = bench.alone(request)
    tokens = (*request.prompt, *generated.tokens[:-1])
    scored = bench.execute([Request(1, tokens, 0)], Schedule(chunk_tokens=chunk_tokens))[1]
    assert scored.logits.keys() == generated.logits.keys() == set(range(len(tokens)))
    for position, logits in generated.logits.items():
        same = scored.logits[position] == logits
        assert same.all(), f"position {position}: {np.count_nonzero(~same)} logits differ"


def request_pool(vocab: int, count: int = 10, longest: int = 96) -> tuple[Request, ...]:
    """Requests of many lengths, greedy and seeded, with and without penalties."""
    random = np.random.Generator(np.random.Philox(key=vocab))
    samplings = (
        SamplingParams(),
        SamplingParams(temperature=0.9, seed=2**63 + 11),
        SamplingParams(temperature=1.4, top_k=40, top_p=0.9, min_p=0.01, seed=3),
        SamplingParams(repeat_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1),
    )
    lengths = np.unique(np.geomspace(1, longest, count).astype(int))
    lengths = np.concatenate([lengths, random.integers(2, longest, count - len(lengths))])
    common = random.integers(0, vocab, longest)
    return tuple(
        Request(
            id=number,
            prompt=_prompt(random, vocab, int(length), common if number % 3 else common[:0]),
            max_tokens=int(random.integers(2, 9)),
            sampling=samplings[number % len(samplings)],
        )
        for number, length in enumerate(lengths, 1)
    )


def _prompt(
    random: np.random.Generator, vocab: int, length: int, common: np.ndarray
) -> tuple[int, ...]:
    """Two thirds of it begin as ``common`` does."""
    shared = common[: length * 2 // 3]
    own = random.integers(0, vocab, length - len(shared))
    return tuple(int(token) for token in (*shared, *own))


@st.composite
def loads(
    draw: st.DrawFn, pool: Sequence[Request], most: int = 6
) -> tuple[list[Request], Schedule]:
    """Some requests of the pool and a schedule for them."""
    requests = draw(
        st.lists(st.sampled_from(pool), min_size=1, max_size=most, unique_by=lambda r: r.id)
    )
    ids = [request.id for request in requests]
    steps = st.integers(0, 12)
    page_seed = draw(st.integers(0, 2**32 - 1))
    pages = np.random.Generator(np.random.Philox(key=page_seed)).permutation(PAGES)
    return requests, Schedule(
        chunk_tokens=draw(st.integers(1, 64)),
        steps_ahead=draw(st.integers(0, RING_STEPS - 1)),
        slot_order=tuple(draw(st.permutations(range(SLOTS)))),
        page_order=tuple(int(page) for page in pages),
        joins=draw(st.fixed_dictionaries(dict.fromkeys(ids, steps))),
        cancels=draw(st.dictionaries(st.sampled_from(ids), st.integers(1, 16), max_size=2)),
        stalls=draw(
            st.dictionaries(
                st.sampled_from(ids), st.tuples(st.integers(1, 8), st.integers(9, 16)), max_size=2
            )
        ),
        batch=draw(st.frozensets(st.sampled_from(ids))),
        withheld=draw(st.sampled_from((0, 8, PAGES - 7))),
        unscored=draw(st.frozensets(st.sampled_from(ids))),
        host_pages=draw(st.sampled_from((0, 0, 6))),
    )
