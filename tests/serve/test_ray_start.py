"""The start of Ray, which is a double: what it raises, and what it does to this process."""

import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from harness.host.options import SessionOptions
from harness.serve.model import ModelOptions
from harness.serve.replicas import open as replicas
from tests.serve.ray_double import doubled_ray

OPTIONS = ModelOptions(SessionOptions(tier="cpu"), "m", Path("digests.json"))


def ends_the_process(*_: object) -> None:
    raise SystemExit(15)


def take_signals(**_: Any) -> None:
    """As Ray does in the main thread."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ends_the_process)


def refuse(**_: Any) -> None:
    take_signals()
    raise Exception("The current node timed out during startup.")


def start(monkeypatch: pytest.MonkeyPatch, init: Any) -> None:
    with doubled_ray(), ExitStack() as owned:
        ray, serve = sys.modules["ray"], sys.modules["ray.serve"]
        config = ModuleType("ray.serve.config")
        config.RequestRouterConfig = dict  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, config.__name__, config)
        vars(ray).update(init=init, shutdown=lambda: None)
        vars(serve).update(
            start=take_signals,
            shutdown=lambda: None,
            deployment=lambda *_, **options: SimpleNamespace(bind=lambda *_: None),
            run=lambda *_, **options: "handle",
        )
        replicas._deployed(Path("m.gguf"), OPTIONS, None, 1, owned)


@pytest.mark.parametrize("init", [take_signals, refuse])
def test_ray_takes_no_signals_of_the_server(monkeypatch, init):
    """SIGTERM drains; Ray's handlers end the process at once."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        if init is refuse:
            with pytest.raises(replicas.RayUnavailable, match=r"^--ray: Ray does not start: The"):
                start(monkeypatch, init)
        else:
            start(monkeypatch, init)
        assert {number: signal.getsignal(number) for number in before} == before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
