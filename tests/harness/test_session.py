"""What a session prepares, and when."""

import gc
import weakref
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import harness.host.open
from accel.native.tier import NativeTier
from contract.errors import DoesNotFit
from contract.tier import Tier
from contract.types import LOCAL_TENANT, FinishReason, SamplingParams
from harness.host.driver import EngineDriver
from harness.host.event_queue import EventQueue, Offer, TimedEvent
from harness.host.open import prepare_session
from harness.host.options import SessionOptions
from harness.host.session import Session
from harness.memory import pages_in
from harness.progress import NullProgress
from harness.synth.sizes import sized_spec
from harness.synth.spec import SynthSpec
from harness.synth.write import write_synthetic
from harness.tiers import TIERS, open_tier
from reference.cpu.tier import CpuTier
from reference.engine import Engine, EngineOptions
from reference.limits import Limits
from reference.memory.disk.cache import DiskCache
from reference.model.chat_template import ChatTemplate
from reference.model.open import open_model
from reference.runner import ModelRunner
from tests.late_tier import LateTier
from tests.needs import need_device

pytestmark = pytest.mark.usefixtures("native_is_quick")


@pytest.mark.parametrize("tier", ["cpu", "opencl"])
def test_closing_frees_the_memory_at_once(tmp_path, tier):
    """A server that changes its model has no room for both until Python collects cycles."""
    path = tmp_path / "hybrid.gguf"
    write_synthetic(path, sized_spec("tiny", architecture="qwen35", quant="q8_0", context=64))
    options = SessionOptions(tier=tier, slots=2)
    gc_was_on = gc.isenabled()
    gc.disable()
    try:
        arrays = arrays_of_a_session(path, options)
        assert len(arrays) > 5
        assert [array() for array in arrays if array() is not None] == []
    finally:
        if gc_was_on:
            gc.enable()


class Interrupting(NullProgress):
    """Presses Ctrl-C when so many tokens of a prompt are read."""

    def __init__(self, stop: int) -> None:
        self._left = stop

    def advance(self, n: int) -> None:
        self._left -= n
        if self._left <= 0:
            raise KeyboardInterrupt


def test_steps_are_abandoned_behind_what_goes_to_the_disk(tmp_path, monkeypatch):
    """A session that is closed within a long prompt waits for the pages to be written, and not for
    the rest of the step; a later one finds these pages and gives the bits of one without."""
    path, prompt = tmp_path / "model.gguf", [number % 300 for number in range(700)]
    write_synthetic(path, sized_spec("tiny", quant="q8_0", context=1024, layers=3))
    options = SessionOptions(tier="native", slots=1, chunk=64)
    with need_device(lambda: Session.open(path, options)) as session:
        expected = [piece.token for piece in session.generate(prompt, SamplingParams(), 4)]
    # A busy machine may take long to write.
    monkeypatch.setattr(DiskCache, "_seconds_left", lambda self: None)
    order: list[str] = []
    for owner, call in ((DiskCache, "close"), (NativeTier, "abandon"), (ModelRunner, "close")):
        method, name = getattr(owner, call), f"{owner.__name__}.{call}"

        def noted(self: Any, *, method: Any = method, name: str = name) -> Any:
            order.append(name)
            return method(self)

        monkeypatch.setattr(owner, call, noted)
    options = replace(options, disk_cache=tmp_path / "pages")
    for stop in (64, 320, 640):
        session = Session.open(path, options)
        with pytest.raises(KeyboardInterrupt):
            list(session.generate(prompt, SamplingParams(), 4, progress=Interrupting(stop)))
        session.close()
        assert order == ["DiskCache.close", "NativeTier.abandon", "ModelRunner.close"]
        order.clear()
    with Session.open(path, options) as session:
        assert [piece.token for piece in session.generate(prompt, SamplingParams(), 4)] == expected
        assert session.engine.disk is not None
        assert session.engine.disk.statistics.tokens >= 320


def arrays_of_a_session(path: Path, options: SessionOptions) -> list[weakref.ref[np.ndarray]]:
    """The host memory of weights, keys and values, states and scratch of a session that has
    ended."""
    with need_device(lambda: Session.open(path, options)) as session:
        list(session.generate(range(1, 20), SamplingParams(), 2))
        tokens = np.arange(1, 17, dtype=np.int32)
        assert session.engine.save_pages(LOCAL_TENANT.id, tokens, 0, 1)
        tier, named = session.tier, session.runner._buffers
        buffers = [buffer for name, buffer in named.items() if not name.startswith("output.")]
        if isinstance(tier, CpuTier):
            weights = [
                tile.plane for one in tier._matrices._prepared.values() for tile in one.tiles
            ]
            owned = [*(buffer.data for buffer in buffers), tier._arena, *weights]
        else:
            ranges = [one for buffer in buffers for one in buffer.allocations]
            owned = [one.host for one in (*ranges, tier._scratch) if one.host is not None]
        return [weakref.ref(array) for array in owned]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_synthetic(path, SynthSpec(quant="q8_0", seed=3))
    return path


@pytest.mark.parametrize("chat", [True, False])
def test_the_template_starts_before_the_model_is_loaded(chat, model_path, monkeypatch):
    """Only where a template is going to be rendered; the session then has that one."""
    happened: list[str] = []
    started: list[ChatTemplate] = []
    start, load = ChatTemplate.start, harness.host.open.load_runner

    def noted_start(template: ChatTemplate) -> None:
        happened.append("template")
        started.append(template)
        start(template)

    def noted_load(*arguments: Any) -> Any:
        happened.append("load")
        return load(*arguments)

    monkeypatch.setattr(ChatTemplate, "start", noted_start)
    monkeypatch.setattr(harness.host.open, "load_runner", noted_load)
    options = SessionOptions(tier="native", context=64, chat=chat)
    with Session.open(model_path, options) as session:
        assert happened == (["template", "load"] if chat else ["load"])
        assert session.template is not None
        assert started == ([session.template] if chat else [])


def test_what_was_planned_is_not_built_again(model_path):
    model = open_model(model_path)
    with model.file:
        limits = Limits(slots=1, context=64, pages=4)
        graph = model.graph(limits)
        assert model.graph(Limits(slots=1, context=64, pages=4)) is graph
        other = model.graph(Limits(slots=1, context=128, pages=8))
        assert other != graph
        again = model.graph(limits)
        assert again == graph


PROMPTS = (tuple(range(40, 75)), tuple(range(90, 99)))
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.9, repeat_penalty=1.2, seed=5)


def open_session(model_path: Path, tier: Tier, steps_ahead: int) -> Session:
    model = open_model(model_path)
    options = SessionOptions(context=64, chunk=8)
    runner = ModelRunner(model, tier, options.limits(64))
    engine_options = EngineOptions(chunk_tokens=8, steps_ahead=steps_ahead)
    driver = EngineDriver(lambda observer: Engine(runner, engine_options, observer=observer))
    return Session(model, tier, runner, driver)


def tier_of(name: str) -> Tier:
    hosts = {"cpu": CpuTier, "late": LateTier}
    return hosts[name]() if name in hosts else need_device(partial(open_tier, name))


SLOW = ("cpu", "vulkan")
DEPTHS = [
    *((name, depth) for name in (*TIERS, "late") if name not in SLOW for depth in (0, 1, 3)),
    ("cpu", 1),
    pytest.param("vulkan", 1, marks=pytest.mark.long),
]
"""Steps ahead; one depth where a step takes its time."""


@pytest.mark.parametrize(("name", "steps_ahead"), DEPTHS)
def test_a_cancelled_generation_leaves_nothing_behind(model_path, name, steps_ahead):
    """Cancelled after every number of pieces, or two of them where a processor plays a graphics
    card, in the middle of the prompt too: the next generation is what it would have been alone."""
    with tier_of(name) as tier:
        session = open_session(model_path, tier, steps_ahead)
        alone = [piece.token for piece in session.generate(PROMPTS[1], SAMPLED, 9)]
        for pieces in (0, 3) if name == "vulkan" else range(9):
            first = session.generate(PROMPTS[0], SAMPLED, 20)
            for _ in range(pieces):
                next(first)
            if pieces == 0:
                session.engine.step()
            first.cancel()
            assert first.finish_reason is FinishReason.CANCELLED
            second = session.generate(PROMPTS[1], SAMPLED, 9)
            assert [piece.token for piece in second] == alone, f"cancelled after {pieces}"
        session.runner.close()


def test_what_the_cache_has_no_room_for_lies_in_host_memory(model_path):
    """Turns that do not fit the context together: the first one is found again, the same bits."""
    options = SessionOptions(tier="native", context=64, chunk=16)
    pages = 8
    with Session.open(model_path, options) as session:
        copies = session.runner.page_copies()
        assert copies is not None
        alone = [piece.token for piece in session.generate(PROMPTS[0], SAMPLED, 9)]
        nbytes = pages * copies.page_bytes + 1
    for host_cache, restored in ((0, False), (nbytes, True)):
        with Session.open(model_path, replace(options, host_cache=host_cache)) as session:
            for prompt in (PROMPTS[0], tuple(range(60)), PROMPTS[0]):
                tokens = [piece.token for piece in session.generate(prompt, GREEDY, 4)]
            found = session.engine.statistics.prefix
            assert (found.restored > 0) is restored
            assert [piece.token for piece in session.generate(PROMPTS[0], SAMPLED, 9)] == alone
            assert len(tokens) == 4


def test_the_prefix_cache_keeps_so_many_bytes(model_path):
    """Of a prompt of 30 tokens one page is whole; two prompts have one each."""
    options = SessionOptions(tier="native", context=64, chunk=16)
    with Session.open(model_path, options) as session:
        copies = session.runner.page_copies()
        assert copies is not None
        assert pages_in(session.runner, copies.page_bytes) == 1
        assert pages_in(session.runner, copies.page_bytes - 1) == 0
        nbytes = copies.page_bytes
    for kept, pages in ((None, 2), (nbytes, 1), (nbytes - 1, 0), (0, 0)):
        with Session.open(model_path, replace(options, prefix_cache=kept)) as session:
            for start in (0, 100):
                list(session.generate(tuple(range(start, start + 30)), GREEDY, 1))
            assert session.engine.memory.cached == pages


def test_a_new_generation_cancels_the_one_before(model_path):
    with CpuTier() as tier:
        session = open_session(model_path, tier, 1)
        first = session.generate(PROMPTS[0], SAMPLED, 20)
        next(first)
        second = session.generate(PROMPTS[1], SAMPLED, 3)
        assert first.finish_reason is FinishReason.CANCELLED
        assert len(list(second)) == 3
        assert session.engine.idle
        session.runner.close()


def test_logits_after_a_cancelled_generation(model_path):
    """Scoring shares the engine with generations."""
    with LateTier() as tier:
        model = open_model(model_path)
        limits = SessionOptions(context=64, chunk=8, all_logits=True).limits(64)
        with ModelRunner(model, tier, limits) as runner:
            driver = EngineDriver(
                lambda observer: Engine(runner, EngineOptions(chunk_tokens=8), observer=observer)
            )
            session = Session(model, tier, runner, driver)
            expected, got = (np.empty((9, model.config.vocab), np.float32) for _ in range(2))
            session.logits(PROMPTS[1], expected)
            generation = session.generate(PROMPTS[0], SAMPLED, 20)
            next(generation)
            generation.cancel()
            session.logits(PROMPTS[1], got)
            assert (got == expected).all()


def test_a_reader_that_computes_its_own_steps_does_not_wait(model_path, monkeypatch):
    """No other thread could bring it an event, also where a prompt takes steps without any."""
    waits: list[float] = []
    take = EventQueue.take

    def noted(queue: EventQueue, timeout: float, offer: Offer | None = None) -> list[TimedEvent]:
        waits.append(timeout)
        return take(queue, timeout, offer)

    monkeypatch.setattr(EventQueue, "take", noted)
    options = SessionOptions(tier="native", context=64, chunk=8, all_logits=True)
    with Session.open(model_path, options) as session:
        out = np.empty((len(PROMPTS[0]), session.model.config.vocab), np.float32)
        session.logits(PROMPTS[0], out)
        assert len(list(session.generate(PROMPTS[0], SAMPLED, 3))) == 3
    assert len(waits) > len(PROMPTS[0]) // 8
    assert not any(waits)


def test_a_step_of_as_many_prompt_tokens_as_the_tier_reads_best(model_path, monkeypatch):
    """Less of them where that costs context, where sequences decode beside, and where the slots
    together have no room for so many; what is asked for is taken as it is."""
    info = CpuTier.info.fget(CpuTier())
    monkeypatch.setattr(CpuTier, "info", replace(info, prompt_tokens=1024))

    def chunks(options: SessionOptions) -> tuple[int, int]:
        with Session.open(model_path, options) as session:
            return session.engine.chunk_tokens, session.engine.chunk_while_decoding

    options = SessionOptions(tier="cpu", context=1024)
    assert chunks(options) == (1024, 256)
    assert chunks(replace(options, context=200)) == (200, 200)
    assert chunks(replace(options, context=200, slots=4)) == (800, 256)
    assert chunks(replace(options, context=300, slots=4)) == (1024, 256)
    assert chunks(replace(options, chunk=700)) == (700, 700)
    assert chunks(replace(options, all_logits=True)) == (256, 256)
    planned = {}
    for chunk in (256, 512, 1024):
        with ExitStack() as owned:
            plan = prepare_session(model_path, replace(options, chunk=chunk), owned).plan
            planned[chunk] = plan.budgeted
    assert planned[256] < planned[512] < planned[1024]
    for chunk, budget in planned.items():
        assert chunks(replace(options, memory_budget=budget)) == (chunk, 256)
    with pytest.raises(DoesNotFit):
        chunks(replace(options, memory_budget=planned[256] - 1))
    with Session.open(
        model_path, replace(options, context=None, memory_budget=planned[256] - 1)
    ) as session:
        assert session.context < 1024
        assert session.engine.chunk_tokens == 256


def test_the_state_cache_has_room_for_so_many_states(tmp_path, model_path):
    """Counted in the plan; a prompt asked again goes on from one, which changes nothing."""
    path = tmp_path / "recurrent.gguf"
    write_synthetic(path, sized_spec("tiny", architecture="qwen35moe", quant="q8_0", seed=3))
    options = SessionOptions(tier="native", context=96, chunk=16)
    prompt = tuple(range(40))
    with Session.open(path, options) as session:
        each = session.runner.recurrent.slot_bytes
        assert each > 0
        assert session.runner.limits.saved_states == 0
        alone = [piece.token for piece in session.generate(prompt, GREEDY, 9)]
    for nbytes, states in ((3 * each - 1, 2), (each - 1, 0)):
        with ExitStack() as owned:
            plan = prepare_session(path, replace(options, state_cache=nbytes), owned).plan
        assert plan.saved_states == states
        assert plan.recurrent == (1 + states) * each
        with Session.open(path, replace(options, state_cache=nbytes)) as session:
            assert session.runner.limits.saved_states == states
            for _ in range(2):
                assert [piece.token for piece in session.generate(prompt, GREEDY, 9)] == alone
            assert (session.engine.statistics.prefix.tokens_hit > 0) is (states > 0)
    with Session.open(model_path, replace(options, state_cache=1 << 20)) as session:
        assert session.runner.limits.saved_states == 0
