"""What a run of tests reports about its costs."""

import ctypes
import gc
import sys
from functools import cache
from types import ModuleType

import numpy as np

from tests.costs import GROWTH_GIGABYTES, Costs, FreedMemory, empty_caches, folder_of


def test_a_test_belongs_to_its_folder():
    """Or to its file, where there is none."""
    assert folder_of("tests/cuda/test_plan.py::test_one[a/b::c]") == "cuda"
    assert folder_of("tests/test_needs.py::test_two") == "test_needs.py"


def test_who_raised_the_memory_of_a_process_is_named():
    """Of each process, but for what every test adds."""
    costs = Costs()
    for process, memory, test in (
        ("gw0", 0.2, "a"),
        ("gw1", 0.9, "b"),
        ("gw0", 0.25, "c"),
        ("gw0", 0.7, "d"),
        ("gw0", 0.7, "e"),
    ):
        costs.note_memory(process, memory, test)
    assert costs.processes == {"gw0": 0.7, "gw1": 0.9}
    assert costs.raised["gw0"] == ["0.20 GB since a", "0.70 GB since d"]


def test_what_a_folder_cached_goes_with_it(monkeypatch):
    """What other folders and the product cached stays."""
    module = ModuleType("tests.one.test_caches")
    kept, gone = (cache(lambda: [0]) for _ in range(2))
    kept.__module__, gone.__module__ = "tests.other.tables", module.__name__
    vars(module).update(kept=kept, gone=gone)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before = kept(), gone()
    empty_caches("tests.one.")
    assert kept() is before[0]
    assert gone() is not before[1]


def test_freed_memory_is_given_back():
    """Many pieces below one that is kept: without a trim the C library keeps all of them."""
    freed = FreedMemory()
    if freed._trim is not None:
        freed._trim(0)
    before = freed._resident()
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.free.argtypes = [ctypes.c_void_p]
    pieces = [library.malloc(60_000) for _ in range(6_000)]
    for piece in pieces:
        ctypes.memset(piece, 1, 60_000)
    for piece in pieces[:-1]:
        library.free(piece)
    held = freed._resident()
    freed.give_back()
    library.free(pieces[-1])
    if freed._trim is not None:
        assert held > before + 2 * GROWTH_GIGABYTES
        assert freed._resident() < before + GROWTH_GIGABYTES


def test_what_grows_little_by_little_is_given_back():
    """Of garbage in cycles, each less than a process may grow, no more is left than that."""
    freed = FreedMemory()
    before = freed._resident()
    enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(8):
            garbage: list[object] = [np.ones(6_000_000)]
            garbage.append(garbage)
            del garbage
            freed.give_back()
    finally:
        if enabled:
            gc.enable()
    assert freed._resident() < before + 2 * GROWTH_GIGABYTES
