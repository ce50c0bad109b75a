"""A hosted model gives memory of its device back, idle or busy, and its metrics say so."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

import harness.host.open
import harness.memory
from accel.opencl.runtime import Choices
from accel.opencl.tier import OpenClTier
from contract.tier import Tier
from contract.types import Request
from harness.host import engine_thread, live_memory
from harness.host.engine_thread import EngineThread
from harness.host.hosted import host_model
from harness.host.options import SessionOptions
from harness.host.submissions import Submission
from harness.serve.metrics import Metrics
from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from harness.tiers import TierOptions
from tests.needs import need_device
from tests.opencl_parts import SOME, holding
from tests.patience import wait_until

PROMPT = tuple(range(40))
GIGABYTE = 10**9


@pytest.fixture
def device(kernel_cache, monkeypatch) -> dict[str, int]:
    """A device of a gigabyte, all but ``left`` bytes of which other programs may take."""
    state = {"left": GIGABYTE}

    def open_it(name: str, options: TierOptions) -> Tier:
        choices = Choices(shared_addresses=False, cache=kernel_cache)
        return need_device(lambda: OpenClTier(choices=choices))

    def available(tier: OpenClTier) -> int:
        return max(0, state["left"] - tier.allocated_bytes)

    monkeypatch.setattr(harness.host.open, "open_tier", open_it)
    monkeypatch.setattr(OpenClTier, "available_bytes", property(available))
    for module in (engine_thread, live_memory):
        monkeypatch.setattr(module, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(live_memory, "FREE_SECONDS", 0.01)
    monkeypatch.setattr(harness.memory, "MARGIN_BYTES", 0)
    return state


def test_a_hosted_model_gives_memory_back(device, tmp_path, caplog):
    """While nobody asks, and while a request runs; answers are the same."""
    caplog.set_level(logging.WARNING)
    path = tmp_path / "tiny.gguf"
    write_synthetic(path, sized_spec("tiny", quant="q8_0", seed=3, layers=4))
    options = SessionOptions(tier="opencl", context=96, chunk=16, slots=4)
    with holding(SOME), EngineThread() as thread, ExitStack() as owned:
        hosted = host_model(path, options, thread, owned)
        driver, memory = hosted.driver, hosted.driver.memory
        assert memory is not None

        def answer(meanwhile: Callable[[], None] = lambda: None) -> list[int]:
            stream, tokens = driver.open_stream(), []
            request = Request(driver.new_id(), PROMPT, 40, ignore_end=True)
            driver.submit_to(stream, [Submission([request])])
            while True:
                for one in stream.take(1.0):
                    tokens.append(one.event.token)
                    if one.event.finish_reason is not None:
                        return tokens
                meanwhile()

        def take() -> None:
            device["left"] = memory.first.plan.budgeted

        before = answer()
        take()
        wait_until(lambda: memory.given_back > 0)
        device["left"] = GIGABYTE
        wait_until(lambda: memory.given_back == 0 and memory.changes >= 2)
        assert answer(take) == before
        wait_until(lambda: memory.given_back > 0)
        measured: Any = SimpleNamespace(name="tiny", driver=driver, tier="", device="", memory=dict)
        metrics = Metrics(measured)

        def told() -> bool:
            """Whether they say what is, which may change meanwhile."""
            text = metrics.text().decode()
            facts = {"given_back_bytes": memory.given_back, "changes_total": memory.changes}
            lines = [f'memory_{name}{{model_name="tiny"}} {float(n)}' for name, n in facts.items()]
            return all(line in text for line in lines)

        wait_until(told)
    assert sum("gave back" in one.getMessage() for one in caplog.records) >= 2
