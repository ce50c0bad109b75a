"""What a start does not do: load what it has no use for, or search for garbage all the while."""

import json

import pytest

from accel.opencl import driver
from accel.opencl.device import find_device
from harness.cli.main import COMMANDS, build_parser
from harness.cli.parser import commands
from harness.startup import load_ahead
from tests.cli.conftest import script_process
from tests.needs import need_device

UNUSED = (
    *("accel.kernels.source", "accel.opencl.modules", "accel.packets.fused", "asyncio"),
    *("concurrent.futures.thread", "difflib", "email", "flask", "harness.catalog.wheel"),
    *("harness.cli.check_command", "harness.cli.serve_command", "huggingface_hub"),
    *("importlib.metadata", "jinja2", "logging", "numpy.fft", "numpy.ma", "numpy.polynomial"),
    "numpy.random",
    *("numpy.testing", "reference.cpu.tier", "reference.model.gguf.writer"),
    *("psutil", "pyopencl", "secrets", "threadpoolctl", "tomllib", "tqdm"),
)
UNUSED_BY_NATIVE = ("hashlib", "random", "tempfile")
"""The first one loads OpenSSL, the last one both."""
MOST_MODULES = 510
"""Of a run on the native tier: each costs a seventh of a millisecond before it does anything."""
COMPILER = "accel.native.compile"
SCRIPT = """
import gc, json, sys
from harness.cli.main import entry

def collections():
    return sum(generation["collections"] for generation in gc.get_stats())

if "opencl" in sys.argv:
    # As in the tests' own process: there is one program for all of them.
    from accel.opencl import contents

    contents.ALWAYS = contents.EVERYTHING
before = collections()
code = entry()
modules = sorted(sys.modules)
collected = collections() - before
import threadpoolctl

threads = [pool["num_threads"] for pool in threadpoolctl.threadpool_info()]
print(json.dumps([code, modules, collected, gc.get_freeze_count(), threads]))
"""


def _started(*words: object) -> tuple[set[str], int, int, list[int]]:
    """The modules a command loads, how often it searches for garbage, how many objects Python does
    not search when it ends, and the threads of every library that has a pool of them."""
    done = script_process(SCRIPT, *words)
    code, modules, collections, frozen, threads = json.loads(done.out.splitlines()[-1])
    assert code == 0, done.err
    return set(modules), collections, frozen, threads


@pytest.mark.parametrize("tier", ["cpu", "native", "opencl"])
def test_a_run_loads_only_what_it_uses(tiny_model, tier):
    """Libraries of other commands, tiers and formats stay where they are."""
    if tier == "opencl":
        need_device(find_device)
    used = {"reference.cpu.tier", "psutil", "threadpoolctl", "concurrent.futures.thread", "logging"}
    unused = set(UNUSED) - (used if tier == "cpu" else set())
    unused |= set(UNUSED_BY_NATIVE if tier == "native" else ())
    words = "run", "hi", "--model", tiny_model, "--max-tokens", 2, "--raw", "--tier", tier
    loaded, collections, frozen, threads = _started(*words)
    if COMPILER in loaded or tier == "native":
        # The first start in an empty cache folder builds kernels and stores lowered steps.
        loaded, collections, frozen, threads = _started(*words)
        assert COMPILER not in loaded
        assert len(loaded) <= MOST_MODULES
    assert unused & loaded == set()
    assert collections == 0
    assert frozen > len(loaded)
    assert set(threads) <= {1}


def test_what_only_parses_loads_no_numpy():
    """It takes most of the time of a command that prints a help or refuses its words; the help
    loads every command."""
    assert "numpy" not in _started("--help")[0]


def test_every_command_is_in_the_module_the_table_says():
    """What one module adds is what the table says of it."""
    for module in dict.fromkeys(COMMANDS.values()):
        words = [word for word, name in COMMANDS.items() if name == module]
        added = {command.prog.split()[1] for command in commands(build_parser(words))}
        assert added == {*words, "help"}, module


@pytest.mark.parametrize(
    ("tier", "loaded"), [("opencl", 1), ("auto", 0), ("native", 0), ("cpu", 0)]
)
def test_drivers_are_loaded_ahead_where_the_tier_has_any(monkeypatch, tier, loaded):
    """Once, while the rest of a run is loaded."""
    calls: list[None] = []
    monkeypatch.setattr(driver, "load_drivers", lambda: calls.append(None))
    load_ahead(tier)
    assert len(calls) == loaded
