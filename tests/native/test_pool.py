"""Threads that execute steps: how many, in which order, interrupted, forked, and at their end."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from accel.native.pool import FORKED, RING_STEPS
from accel.native.tier import NativeTier
from accel.native.variants import machine
from accel.packets.worker_tuner import FixedWorkers
from contract.cancel_token import CancelToken
from contract.dtypes import F32
from contract.errors import DeviceLost, StepAbandoned
from contract.ir.graph import BufferKind, Graph, GraphBuilder
from contract.ir.inputs import input_layout, pack_inputs
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from reference.model.open import open_model
from tests.forked import in_a_fork
from tests.model_runs import REQUESTS, SHORT, generate
from tests.needs import machine_lacks
from tests.paths import ROOT
from tests.patience import PROCESS_SECONDS

WIDTH = 64
STEP = ShapeKey(4, 4)


def _counting() -> Graph:
    """Squares, summed up in memory that stays from step to step."""
    b = GraphBuilder("counting")
    x = b.buffer("x", BufferKind.REQUEST, F32, ("tokens", WIDTH))
    query = b.request("query", "tokens", 4)
    weight = b.buffer("weight", BufferKind.WEIGHT, F32, (WIDTH, 2), source="weight")
    state = b.buffer("state", BufferKind.STATE, F32, (1, 1, WIDTH))
    y = b.output("y", "tokens", WIDTH)
    b.emit(Opcode.SSM_CONV1D, x=x, y=y, weight=weight, query=query, state=state, history=1)
    return b.build()


GRAPH = _counting()
LAYOUT = input_layout(GRAPH, STEP)


class Counter:
    """Steps of a graph in which each depends on the one before."""

    def __init__(self, tier: NativeTier) -> None:
        self.tier = tier
        weight = np.random.default_rng(1).standard_normal((WIDTH, 2), np.float32)
        buffers = {
            decl.name: tier.upload(decl, weight.view(np.uint8))
            for decl in GRAPH.of_kind(BufferKind.WEIGHT)
        }
        for decl in GRAPH.of_kind(BufferKind.STATE, BufferKind.OUTPUT):
            nbytes = STEP.tokens * WIDTH * 4
            buffers[decl.name] = tier.alloc(decl, nbytes)
        self.batch = tier.lower(GRAPH, buffers, STEP, LAYOUT)

    def submit(self, number: int) -> object:
        """The step of this number, whose outputs are wanted."""
        query = np.zeros((STEP.tokens, 4), np.int32)
        query[:, 2] = STEP.tokens * number + np.arange(STEP.tokens)
        values = np.random.default_rng(number).standard_normal((STEP.tokens, WIDTH), np.float32)
        block = pack_inputs(LAYOUT, STEP, {"x": values, "query": query})
        return self.tier.submit(self.batch, block, ["y"])

    def outputs(self, fences: list[object]) -> list[bytes]:
        """Of steps, as each left them."""
        for fence in fences:
            self.tier.wait(fence)  # type: ignore[arg-type]
        return [fence.outputs["y"].tobytes() for fence in fences]  # type: ignore[attr-defined]


def test_more_steps_than_the_ring_holds(open_native):
    """Each has the outputs it has when it is waited for before the next."""
    count = 3 * RING_STEPS
    ahead, one_by_one = Counter(open_native(threads=2)), Counter(open_native(threads=2))
    together = ahead.outputs([ahead.submit(number) for number in range(count)])
    alone = [one_by_one.outputs([one_by_one.submit(number)])[0] for number in range(count)]
    assert together == alone
    assert len(set(together)) == count


class Alternating(FixedWorkers):
    """Another number of workers for every step."""

    def choose(self, tokens: int, ops: int) -> int:
        """1, then all, then 1 again."""
        chosen = getattr(self, "_next", 1)
        object.__setattr__(self, "_next", self.workers if chosen == 1 else 1)
        return chosen


@pytest.mark.parametrize("threads", [1, 3, 64])
def test_any_number_of_workers_computes_the_same(threads, open_native, tiny_model_path):
    """A whole model with 1, 3 and 64 threads, against the numpy tier."""
    from reference.cpu.tier import CpuTier

    model = open_model(tiny_model_path)
    with model.file, CpuTier() as cpu:
        expected_tokens, expected_logits = generate(model, cpu, REQUESTS)
        tokens, logits = generate(model, open_native(threads=threads), REQUESTS)
    assert tokens == expected_tokens
    for request, rows in expected_logits.items():
        assert len(rows) == len(logits[request])
        for row, other in zip(rows, logits[request], strict=True):
            assert np.array_equal(row.view(np.uint32), other.view(np.uint32))


ONE_PROCESSOR = """
import os, sys
from pathlib import Path
from accel.native.tier import Choices, NativeTier
from reference.model.open import open_model
from tests.model_runs import SHORT, generate

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
for threads in (None, 3):
    with NativeTier(choices=Choices(threads=threads, cache=Path(sys.argv[1]))) as tier:
        print(tier.workers, generate(open_model(Path(sys.argv[2])), tier, SHORT)[0], flush=True)
"""


def test_a_process_of_one_processor(kernel_cache, open_native, tiny_model_path):
    """It has one worker, and three that share the processor end, too: they sleep while they
    wait."""
    if not hasattr(os, "sched_setaffinity"):
        machine_lacks("way to bind a process to a processor")
    expected = generate(open_model(tiny_model_path), open_native(threads=2), SHORT)[0]
    done = subprocess.run(
        [sys.executable, "-c", ONE_PROCESSOR, str(kernel_cache), str(tiny_model_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PROCESS_SECONDS,
        check=False,
    )
    assert done.stdout.splitlines() == [f"1 {expected}", f"3 {expected}"], done.stderr


def test_workers_may_change_from_step_to_step(open_native):
    """A worker that has no part in a step meets the next one it has."""
    steady = Counter(open_native(threads=4))
    changing = Counter(open_native(threads=4, worker_choice=Alternating))
    numbers = range(2 * RING_STEPS)
    expected = steady.outputs([steady.submit(number) for number in numbers])
    assert changing.outputs([changing.submit(number) for number in numbers]) == expected


def test_closing_waits_for_what_was_submitted(open_native):
    """The steps' memory is given up after their end; closing twice is one time."""
    tier = open_native(threads=2)
    counter = Counter(tier)
    fences = [counter.submit(number) for number in range(RING_STEPS)]
    tier.close()
    tier.close()
    other = Counter(open_native(threads=2))
    expected = other.outputs([other.submit(number) for number in range(RING_STEPS)])
    assert [fence.outputs["y"].tobytes() for fence in fences] == expected  # type: ignore[attr-defined]


class Noted(FixedWorkers):
    """Counts the steps whose times are noted."""

    count = 0

    def note(self, *step: object) -> None:
        self.count += 1


def test_steps_that_nobody_needs_end_early(open_native):
    """Of steps of 400 ops in a row every other one is abandoned: these raise StepAbandoned, do not
    count as quick ones, and the others have their bits."""
    builder, size = GraphBuilder("long"), ShapeKey(2048, 0)
    value = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", WIDTH))
    for _ in range(399):
        value = builder.emit(Opcode.SCALE, x=value, factor=1.0)
    builder.emit(Opcode.SCALE, x=value, factor=1.0, y=builder.output("y", "tokens", WIDTH))
    graph, noted = builder.build(), Noted(2)
    tier = open_native(threads=2, worker_choice=lambda workers: noted)
    layout = input_layout(graph, size)
    y = tier.alloc(graph.buffers["y"], size.tokens * WIDTH * 4)
    batch = tier.lower(graph, {"y": y}, size, layout)
    values = [np.full((size.tokens, WIDTH), number, np.float32) for number in range(1, 17)]
    blocks = [pack_inputs(layout, size, {"x": one}) for one in values]
    tokens = [CancelToken() for _ in blocks]
    fences = []
    for number, (block, token) in enumerate(zip(blocks, tokens, strict=True)):
        fences.append(tier.submit_abandonable(batch, block, ["y"], None, token))
        if number % 2 == 0:
            token.cancel()
    for number, (fence, expected) in enumerate(zip(fences, values, strict=True)):
        if number % 2:
            tier.wait(fence)
            assert np.array_equal(fence.outputs["y"].view(np.float32), expected.reshape(-1))
        else:
            with pytest.raises(StepAbandoned):
                tier.wait(fence)
    last = fences[-2]
    assert (last.outputs["y"].view(np.float32) != values[-2].reshape(-1)).any()
    tier.submit(batch, blocks[0])
    assert noted.count == len(blocks) // 2
    late = [tier.submit_abandonable(batch, block, ["y"], None, CancelToken()) for block in blocks]
    tier.abandon()
    with pytest.raises(StepAbandoned):
        tier.wait(late[-1])
    tier.close()


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_process_is_told(open_native):
    """The threads stay in the first process, which goes on; the copy can open a tier of its own."""
    tier = open_native(threads=2)
    counter = Counter(tier)
    before = counter.outputs([counter.submit(0)])
    said = str(in_a_fork(lambda: str(counter.submit(1))))
    assert said.startswith(DeviceLost.__name__)
    assert FORKED in said

    def anew() -> list[bytes]:
        tier.close()
        fresh = Counter(open_native(threads=2))
        return fresh.outputs([fresh.submit(0)])

    assert in_a_fork(lambda: str(anew())) == str(before)
    assert counter.outputs([counter.submit(1)]) != before


INTERRUPTED = """
import os, signal, sys, threading, time
from pathlib import Path
from accel.native.tier import Choices, NativeTier
from tests.native.test_pool import Counter

with NativeTier(choices=Choices(threads=2, cache=Path(sys.argv[1]))) as tier:
    counter = Counter(tier)
    pool, done = tier._pool, tier._pool.done
    fence = counter.submit(0)
    try:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        # A step of a number that was not submitted yet never ends.
        pool.wait(fence.completion.number + 1, 60.0)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    outputs = counter.outputs([fence, counter.submit(1)])
    print(len(set(outputs)), flush=True)
"""


def test_an_interrupt_reaches_who_waits_for_a_step(kernel_cache):
    """At once, and the tier goes on afterwards."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(kernel_cache)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PROCESS_SECONDS,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert done.stdout.split() == ["interrupted", "2"], done.stderr


FLUSHING = '''
import ctypes, sys
from pathlib import Path
import numpy as np
from accel.native.compile import _built, find_compiler
from accel.native.names import this_target
from accel.native.tier import Choices, NativeTier
from contract.dtypes import F32
from contract.ir.graph import BufferKind, GraphBuilder
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from tests.run_graph import run_graph

folder = Path(sys.argv[2])
text = """__attribute__((visibility("default"))) void flush(void) {
    __builtin_ia32_ldmxcsr(0x9FC0);
}"""
target = this_target("x86_64")
(folder / "flush.so").write_bytes(_built({"flush": text}, (), target, find_compiler(), 1))
tiny = np.full(16, 1e-40, np.float32)
ctypes.CDLL(str(folder / "flush.so")).flush()
assert not (tiny + tiny).view(np.uint32).any(), "this thread flushes subnormals to zero"
b = GraphBuilder("sum")
x = b.buffer("x", BufferKind.REQUEST, F32, ("tokens", 16))
y = b.output("y", "tokens", 16)
b.emit(Opcode.ADD, a=x, b=x, y=y)
with NativeTier(choices=Choices(threads=2, cache=Path(sys.argv[1]))) as tier:
    found = run_graph(tier, b.build(), ShapeKey(1, 1), {"x": tiny.reshape(1, 16)})
print(*set(found["y"].view(np.uint32).tolist()))
'''


def test_subnormals_stay_whatever_the_caller_s_thread_does(kernel_cache, tmp_path):
    """Threads begin with the control register of the one that makes them."""
    if machine() != "x86_64":
        machine_lacks("control register of x86")
    done = subprocess.run(
        [sys.executable, "-c", FLUSHING, str(kernel_cache), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PROCESS_SECONDS,
        check=False,
    )
    doubled = np.float32(1e-40) + np.float32(1e-40)
    assert done.stdout.split() == [str(doubled.view(np.uint32))], done.stderr
