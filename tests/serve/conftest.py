"""Servers in this process on a tiny model, and OpenAI's own client for them."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from openai import OpenAI

from harness import tiers
from harness.cli.main import main
from harness.host import disk
from harness.host.options import SessionOptions
from harness.host.remote import process
from harness.host.structured.grammars import Grammars
from harness.host.submissions import EngineStopped
from harness.host.threaded_driver import ThreadedDriver
from harness.named_adapters import NamedAdapter
from harness.serve import listen, metrics
from harness.serve.model import ModelOptions
from harness.serve.run import Running, ServeOptions, running
from reference.engine import Engine
from reference.engine.statistics import EngineStatistics
from reference.model.open import Model, open_model
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.serve.engine_child import ADDED, PATIENT, QUICK, rests
from tests.serve.http import Http
from tests.serve.speaking_models import CONTEXT as SPEAKING_CONTEXT
from tests.serve.speaking_models import HERMES, speaking_model

Verify = Callable[[object, object], tuple[int, str, str]]
SLOTS = 4
CONTEXT = 256
COMPARE_TIERS = (
    *("test_experts", "test_receipt_attacks", "test_receipts", "test_recording"),
    "test_rerank_receipts",
)
"""Files whose tests need the CPU tier itself."""
BOTH = (
    *("test_adapters", "test_disk_cache", "test_experts", "test_force_tokens", "test_gbnf"),
    *("test_openai_client", "test_plain_heads", "test_receipt_service"),
    *("test_recording", "test_rerank", "test_slots", "test_tenants", "test_text_offsets"),
)
"""Files whose tests also run with the engines in a process of their own: of each feature one."""
ALL_TOKENS = MappingProxyType({"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0})
"""What servers sample with here where a request names nothing. A model of random weights says more
that way, and a bias decides more."""
Serve = Callable[..., AbstractContextManager[Running]]
RUNNING: list[Running] = []
"""The servers of ``serve`` that have not ended."""


@contextmanager
def servers_of_tests() -> Iterator[None]:
    """What servers open or start here has tests' tiers and patience. A server that outlives its
    module is started in one of these, and each module has one: what ends in the order in which it
    began leaves nothing replaced."""
    with pytest.MonkeyPatch.context() as patch:
        for name, opened in ADDED.items():
            patch.setitem(tiers.TIERS, name, opened)
        patch.setattr(disk, "DiskCacheOptions", PATIENT)
        patch.setattr(process, "MODULE", "tests.serve.engine_child")
        patch.setattr(metrics, "ANSWER_SECONDS", PATIENCE_SECONDS)
        yield


@pytest.fixture(scope="module", autouse=True)
def models_are_opened_with_them() -> Iterator[None]:
    """By servers that run already, too."""
    with servers_of_tests():
        yield


@pytest.fixture(scope="module", autouse=True)
def cpu_is_quick_where_tiers_are_not_compared(request) -> None:
    """Most tests name it because any machine has it."""
    if request.path.stem not in COMPARE_TIERS:
        request.getfixturevalue("cpu_is_quick")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Some files test servers with and without a process for their engines."""
    if metafunc.module.__name__.rpartition(".")[2] in BOTH and "serve" in metafunc.fixturenames:
        ways = {"ids": ["here", "child"], "indirect": True, "scope": "session"}
        child = pytest.param(True, marks=pytest.mark.long)
        metafunc.parametrize("serve", [False, child], **ways)


@pytest.fixture
def patient_end(monkeypatch) -> None:
    """A server that ends sends what it says of that, however late its threads are."""
    monkeypatch.setattr(listen, "FLUSH_SECONDS", PATIENCE_SECONDS)


@pytest.fixture(scope="session")
def serve(tiny_model_path, tmp_path_factory, request) -> Serve:
    """``serve(queue_depth=, slots=, buffered_events=, path=, context=, draft=, repeat_last_n=,
    tier=, aliases=, sampling=, experts=, disk_cache=, lora=, **ServeOptions)``: a server of its
    own. The tier ``null`` computes nothing: every token is NULL_TOKEN. Where none is named it is a
    quick one, whose steps may end before a client has an event: who acts in between holds them."""
    folder, numbers = tmp_path_factory.mktemp("serve"), itertools.count()
    session = SessionOptions(context=CONTEXT, slots=SLOTS, biases=8, top_log_probabilities=20)

    @contextmanager
    def start(
        queue_depth: int = 64,
        slots: int = SLOTS,
        buffered_events: int = 256,
        path: Path = tiny_model_path,
        context: int = CONTEXT,
        draft: int = 0,
        repeat_last_n: int = 64,
        tier: str = "",
        aliases: tuple[str, ...] = (),
        sampling: Mapping[str, float] = ALL_TOKENS,
        experts: bool = False,
        disk_cache: Path | None = None,
        lora: tuple[NamedAdapter, ...] = (),
        **options: object,
    ) -> Iterator[Running]:
        sizes = {"slots": slots, "context": context, "draft": draft, "experts": experts}
        sizes |= {"queue_depth": queue_depth, "repeat_last_n": repeat_last_n}
        model = ModelOptions(
            replace(session, tier=tier or QUICK, disk_cache=disk_cache, lora=lora, **sizes),
            "tiny",
            folder / "digests.json",
            buffered_events,
            aliases,
            sampling,
        )
        options.setdefault("engine_process", getattr(request, "param", False))
        options.setdefault("cache_dir", folder / "models")
        options.setdefault("ledger", folder / f"{next(numbers)}.sqlite")
        with ExitStack() as ended:
            with servers_of_tests():
                starting = running(ServeOptions(path, model, **options))  # type: ignore[arg-type]
                server = ended.enter_context(starting)
            RUNNING.append(server)
            ended.callback(RUNNING.remove, server)
            yield server

    return start


@pytest.fixture(autouse=True)
def earlier_requests_have_ended() -> None:
    """A server goes on for a moment after its client has the whole answer, or has left: what a test
    counts begins afterwards."""
    for server in RUNNING:
        wait_for_rest(server)


def wait_for_rest(server: Running) -> None:
    """Waits until a server has done all that its answers lead to: leases of models, lines of the
    log and the last statistics come behind them."""
    wait_until(lambda: _rests(server))


def _rests(server: Running) -> bool:
    """Whether no thread of HTTP has a request, and the engine has ended what they cancelled."""
    tasks = server.http._server.task_dispatcher
    if tasks.queue or tasks.active_count:
        return False
    with suppress(EngineStopped):
        server.service.model.driver.call(rests)
    return True


@pytest.fixture(scope="session")
def server(serve) -> Iterator[Running]:
    """One server for the tests that leave it as they found it."""
    with serve() as running_server:
        yield running_server


@pytest.fixture(scope="session")
def hermes(serve, tmp_path_factory) -> Iterator[Running]:
    """A server of a model that speaks as Qwen 3 does."""
    folder = tmp_path_factory.mktemp("hermes")
    path, slots = speaking_model(folder, HERMES), folder / "slots"
    with serve(path=path, context=SPEAKING_CONTEXT, slot_save_path=slots) as running_server:
        yield running_server


@pytest.fixture
def http(server) -> Http:
    """Plain HTTP to it."""
    return Http(server.url)


@pytest.fixture
def client(server) -> Iterator[OpenAI]:
    """OpenAI's client for it, which tries nothing twice."""
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as openai:
        yield openai


@pytest.fixture(scope="session")
def model(tiny_model_path) -> Iterator[Model]:
    """The tiny model, opened."""
    model = open_model(tiny_model_path)
    with model.file:
        yield model


@pytest.fixture(scope="session")
def grammars(model) -> Iterator[Grammars]:
    """Grammars over its vocabulary."""
    with closing(Grammars(model.tokenizer, model.config.vocab)) as grammars:
        yield grammars


@dataclass
class Cancellations:
    """What engines did about the requests that servers cancelled."""

    posted_at: list[int] = field(default_factory=list)
    """Steps that the engine had made when each cancellation was posted."""
    after: list[EngineStatistics] = field(default_factory=list)
    """The engine's statistics right after each request was cancelled."""


@pytest.fixture
def cancellations(monkeypatch) -> Cancellations:
    """Notes cancellations on the thread and under the lock where each happens."""
    noted = Cancellations()
    post, cancel = ThreadedDriver.cancel, Engine.cancel

    def noted_post(driver: ThreadedDriver, *arguments: Any, **options: Any) -> None:
        # While this thread has the lock, the engine begins no turn.
        with driver._thread.changed:
            noted.posted_at.append(driver.engine.statistics.steps)
            post(driver, *arguments, **options)

    def noted_cancel(engine: Engine, request_id: int) -> None:
        cancel(engine, request_id)
        noted.after.append(engine.statistics)

    monkeypatch.setattr(ThreadedDriver, "cancel", noted_post)
    monkeypatch.setattr(Engine, "cancel", noted_cancel)
    return noted


@pytest.fixture
def verify(tmp_path, tiny_model_path, capsys, monkeypatch) -> Verify:
    """``verify(request, response)``: exit code and what was printed."""
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setitem(tiers.TIERS, "native", ADDED[QUICK])

    def run(request: object, response: object) -> tuple[int, str, str]:
        words = ["verify"]
        for name, value in (("request", request), ("response", response)):
            path = tmp_path / f"{name}.json"
            path.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
            words.append(str(path))
        words += ["--model", str(tiny_model_path), "--tier", "native", "--context", "128"]
        code = main([*words, "--slots", "2"])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run
