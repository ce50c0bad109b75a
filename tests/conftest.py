"""Models shared by the tests: the default model, and synthetic ones written once a session."""

import asyncio
import fcntl
import gc
import hashlib
import os
import random
import shutil
import signal
import ssl
import subprocess
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from accel.native.library import default_cache
from accel.native.names import sources_digest
from accel.opencl import contents, modules
from accel.opencl.device import POCL_COMPILES_ONCE
from contract.errors import CatalogError, ConfigError
from harness import progress, tiers
from harness.catalog import DEFAULT_ID, resolve_model
from harness.serve import engine_requests
from harness.settings import SETTINGS
from harness.synth.sizes import sized_spec
from harness.synth.spec import SynthSpec
from harness.synth.write import write_synthetic
from reference import worker_process
from reference.cpu import threads
from reference.cpu import tier as cpu_tier
from reference.model.open import Model, open_model
from reference.sched.drafts import DraftPolicy
from tests import costs, failures
from tests.kernels.rolled import rolled_source
from tests.long_cases import in_share, mark_combinations
from tests.named_tiers import quick_tier
from tests.needs import missing
from tests.opencl_parts import little_optimized
from tests.patience import PATIENCE_SECONDS, PROCESS_SECONDS
from tests.played import mark_played, texts_of
from tests.replaced import Originals
from tests.worker_forks import ForkServer

SyntheticModel = Callable[..., Path]
DEVICE_TIERS = ("cuda", "metal", "t1", "t2", "intel")
"""Tiers that run on no machine without a device of their own."""
ORIGINALS = Originals()
ALL_CORES = ("conformance", "cpu", "parity", "quant")
"""Folders of tests that compare what several threads compute with definitions."""

# A busy machine makes no property false, and no run draws what others did not, be CI set in the
# environment, which hypothesis looks for, or not. The long profile draws others each time.
for profile, examples in (("any machine", 20), ("all", 50)):
    settings.register_profile(
        profile, deadline=None, max_examples=examples, derandomize=True, database=None
    )
settings.register_profile("long", deadline=None, max_examples=1000, derandomize=False)
settings.load_profile("any machine")
of_loaded_modules = providers._get_local_constants
# Hypothesis draws constants of the project's modules, which are others where other tests are found.
providers._get_local_constants = lambda: (
    Constants() if settings().derandomize else of_loaded_modules()
)


def pytest_configure(config: pytest.Config) -> None:
    """Let an interrupt reach the programs that tests interrupt: a shell's background job ignores
    it, and so would they. Tests of all formats share one OpenCL program of everything. Kernels that
    tests build by themselves PoCL then compiles as those of tiers. Numpy's BLAS has one thread, as
    in processes of ours: those of OpenBLAS spin behind each product."""
    costs.register(config)
    contents.ALWAYS = contents.EVERYTHING
    os.environ.setdefault(*POCL_COMPILES_ONCE)
    threads.limit_blas()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Only now is there a terminal."""
    failures.register(session.config)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What is imported and made while tests are found stays: garbage is looked for afterwards."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """The tests themselves, some hundred thousand objects, are no garbage: tests that ask for a
    collection, to count what is left, need not wait for a walk through them."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Shows what a process said that failed, or did not end in time."""
    report = yield
    error = call.excinfo.value if call.excinfo is not None else None
    if isinstance(error, subprocess.CalledProcessError | subprocess.TimeoutExpired):
        for name, said in (("output", error.stdout), ("errors", error.stderr)):
            text = said.decode(errors="replace") if isinstance(said, bytes) else said
            if text:
                report.sections.append((f"{name} of the process", text))
    return report


FIRST = (
    "tests/walk/",
    "tests/test_import_rule.py",
    "tests/structure/",
    "tests/peer/test_default_model.py",
)
"""Tests that come first, in this order. Some take long: a process would be left with them while
the others have ended. Some share what takes long, which each process does to which they are moved:
the import rule's syntax trees are those of the structure, and are given up behind its folder."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks ``device`` what runs on a tier that needs a device of its own, and ``long`` what
    ``ci/test`` does not need. Of long tests only the share that the environment names is left."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and set(DEVICE_TIERS) & set(texts_of(callspec.params.values())):
            item.add_marker(pytest.mark.device)
    mark_played(items)
    mark_combinations(items)
    items[:] = [one for one in items if not one.get_closest_marker("long") or in_share(one.nodeid)]
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    """The place in FIRST of what this test's name begins with; the others come after all."""
    starts = (turn for turn, start in enumerate(FIRST) if item.nodeid.startswith(start))
    return next(starts, len(FIRST))


CHROMIUM_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@pytest.fixture(scope="module", autouse=True)
def nothing_stays_replaced() -> Iterator[None]:
    """The tests of the next module find the project as this one has found it."""
    ORIGINALS.note()
    yield
    left = ORIGINALS.newly_replaced()
    assert not left, f"tests of this module have put others in the place of {', '.join(left)}"


def _the_same_seeds(request: pytest.FixtureRequest) -> Iterator[None]:
    """Requests that name no seed draw the same ones whenever a module or test runs: of other
    answers a few are empty, or end where the test waits for more."""
    drawn = random.Random(request.node.nodeid)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_requests, "random_bits", drawn.getrandbits)
        yield


@pytest.fixture(scope="module", autouse=True)
def fixtures_draw_the_same_seeds(
    request: pytest.FixtureRequest, nothing_stays_replaced: None
) -> Iterator[None]:
    """In their turn, see ``_the_same_seeds``."""
    yield from _the_same_seeds(request)


the_same_seeds_in_every_run = pytest.fixture(autouse=True)(_the_same_seeds)


@pytest.fixture(scope="module", autouse=True)
def no_event_loop() -> None:
    """No earlier module left an event loop running: every coroutine after it would be refused."""
    with pytest.raises(RuntimeError, match="no running event loop"):
        asyncio.get_running_loop()


@pytest.fixture(scope="module", autouse=True)
def tests_share_the_cores(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where tests run beside each other, a CPU tier that is not told how many threads has one:
    more would take the lock of the interpreter from each other, and the core from another test."""
    with pytest.MonkeyPatch.context() as patch:
        folder = request.path.relative_to(Path(__file__).parent).parts[0]
        if "PYTEST_XDIST_WORKER" in os.environ and folder not in ALL_CORES:
            for module in (threads, cpu_tier):
                patch.setattr(module, "thread_count", lambda: 1)
        yield


@pytest.fixture(scope="module")
def native_is_quick() -> Iterator[None]:
    """The native tier has one thread, and its lowered steps are shared: for tests of what the host
    does around steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiers.TIERS, "native", lambda options: quick_tier())
        yield


@pytest.fixture(scope="module")
def cpu_is_quick() -> Iterator[None]:
    """What opens the CPU tier by its name has the quick one, which says that it is the CPU's: for
    tests that name it because any machine has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiers.TIERS, "cpu", lambda options: quick_tier("cpu"))
        yield


def open_browser() -> Iterator[Any]:
    """One headless Chromium: Playwright allows a process only one of itself, and its event loop is
    that of the main thread as long as it is open."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    if path is None:
        missing("there is no chromium", "apt-get install chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=path, args=list(CHROMIUM_FLAGS), timeout=5_000 * PATIENCE_SECONDS
        )
        yield started
        started.close()


@pytest.fixture(scope="module")
def browser(no_event_loop: None) -> Iterator[Any]:
    """A browser that is closed after the module."""
    yield from open_browser()


@pytest.fixture
def unmeasured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of drafts does not depend on how fast this machine is."""
    monkeypatch.setattr(DraftPolicy, "_measures", lambda policy: False)


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """A file that holds the engines of processes that are given it."""
    path = tmp_path / "hold"
    path.touch()
    return path


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model, pulled if it is missing."""
    named = os.environ.get(SETTINGS["cache_dir"].env)
    cache_dir = Path(named) if named else SETTINGS["cache_dir"].default_value()
    try:
        return resolve_model(DEFAULT_ID, cache_dir)
    except CatalogError as error:
        missing(f"the default model cannot be had here: {error}", "zinc-rt model pull")


@pytest.fixture(scope="session")
def default_model(default_model_path: Path) -> Model:
    """The default model, open."""
    return open_model(default_model_path)


@pytest.fixture(scope="session")
def kernel_cache(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of built programs: one for all tests and the processes that share them, kept from
    one run of the suite to the next, since building takes long. Not the user's, whose next start
    would load a program of everything. It begins with the native libraries that installing the
    project has built, whose names contain a digest of their texts."""
    if hasattr(pytestconfig, "cache"):
        folder = Path(pytestconfig.cache.mkdir("kernels"))
    elif "PYTEST_XDIST_WORKER" in os.environ:
        folder = tmp_path_factory.getbasetemp().parent / "kernels"
        folder.mkdir(exist_ok=True)
    else:
        folder = tmp_path_factory.mktemp("kernels")
    with suppress(ConfigError):
        for library in default_cache().glob(f"*-{sources_digest()}.*"):
            if library.suffix != ".lock" and not (folder / library.name).exists():
                copy = folder / f"{library.name}.{os.getpid()}"
                shutil.copyfile(library, copy)
                os.replace(copy, folder / library.name)
    return folder


@pytest.fixture(scope="session", autouse=True)
def tiers_share_kernels(kernel_cache: Path) -> Iterator[None]:
    """Tiers that are opened by name build there too. They store no lowered steps: tests
    change what lowers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiers, "kernel_cache", lambda tier: kernel_cache)
        patch.setattr(tiers, "lowered_folder", lambda: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def files_need_not_outlive_the_power() -> Iterator[None]:
    """Tests write thousands, and a disk takes milliseconds for each to be told that it is safe."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def workers_are_forks() -> Iterator[None]:
    """Processes of templates and grammars: each would spend most of its time on imports."""
    with closing(ForkServer()) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_process, "start_process", server.start)
        yield


@pytest.fixture(scope="session", autouse=True)
def slow_work_says_nothing() -> Iterator[None]:
    """What a command prints of its progress would depend on how busy the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "LINE_SECONDS", PROCESS_SECONDS)
        yield


@pytest.fixture(scope="session", autouse=True)
def nobody_has_a_certificate() -> Iterator[None]:
    """Each client reads all authorities there are, and no server of a test has one of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl.SSLContext, "load_verify_locations", lambda context, *files: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def loops_stay_loops() -> Iterator[None]:
    """In kernels that a processor compiles in place of an accelerator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modules, "module_source", rolled_source)
        yield


@pytest.fixture(scope="session", autouse=True)
def programs_are_built_quickly() -> Iterator[None]:
    """But for the one that users of a processor have."""
    with little_optimized():
        yield


@pytest.fixture(scope="session")
def synthetic_model(tmp_path_factory: pytest.TempPathFactory) -> SyntheticModel:
    """``synthetic_model(size="tiny", **fields)`` -> path of that model, written on first use by any
    process of the run."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "synthetic"
    folder.mkdir(exist_ok=True)
    written: dict[SynthSpec, Path] = {}

    def write(size: str = "tiny", **fields: Any) -> Path:
        spec = sized_spec(size, **fields)
        if spec not in written:
            digest = hashlib.sha256(repr(spec).encode()).hexdigest()[:12]
            path = folder / f"{spec.architecture}-{spec.quant}-{digest}.gguf"
            whole = path.with_suffix(".whole")
            with path.with_suffix(".lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.exists():
                    write_synthetic(whole, spec)
                    os.replace(whole, path)
            written[spec] = path
        return written[spec]

    return write


@pytest.fixture(scope="session")
def tiny_model_path(synthetic_model: SyntheticModel) -> Path:
    """A two-layer Qwen 3 in Q4_K_M with a byte-level vocabulary of 320 tokens."""
    return synthetic_model(architecture="qwen3", quant="q4_k_m")
