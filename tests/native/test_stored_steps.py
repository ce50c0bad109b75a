"""Lowered steps in the cache folder: what they bind to, which entry is used, and how many stay."""

import gc
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from accel.native import stored_steps, tier
from accel.native.stored_steps import MAGIC, StepCache, StoredStep
from accel.packets.binding import bind_step
from accel.packets.disk_cache import write_entry
from accel.packets.layouts import WeightLayout
from accel.packets.rules import lower_graph
from accel.packets.schedule import schedule_workers
from accel.packets.shape_buckets import shape_buckets
from accel.packets.step import Schedule, Step
from contract.errors import UnsupportedOp
from contract.ir.inputs import input_layout
from contract.ir.nodes import Graph
from contract.shape_key import ShapeKey
from reference.limits import Limits
from reference.model.open import open_model
from tests.families_table import FAMILIES, without_variants
from tests.long_cases import long_except
from tests.model_runs import assert_same
from tests.native.weight_starts import outcome

LIMITS = Limits(2, 64, 8, step_tokens=24, step_rows=2)
WORKERS = 3


def lowered(graph: Graph, bucket: ShapeKey) -> tuple[Step, Schedule]:
    step = lower_graph(graph, bucket, WORKERS, "native")
    return step, schedule_workers(step, WORKERS)


def refuse(*_: object) -> tuple[Step, Schedule]:
    raise AssertionError("lowered, though there is an entry")


@pytest.mark.parametrize("family", long_except(FAMILIES, *without_variants()))
def test_a_stored_program_binds_as_its_step(family, synthetic_model, tmp_path):
    """To any addresses, strides and layouts, in every shape bucket; its scratch is the step's."""
    rng = np.random.default_rng(7)
    known: dict[Any, int] = {}

    def number(*key: object) -> int:
        return known.setdefault(key, int(rng.integers(1 << 30, 1 << 46)))

    def matrix(name: str) -> tuple[int, int, WeightLayout]:
        layouts = list(WeightLayout)
        stride = number(name, "stride") & 0xFFFFFF
        return number(name, "matrix"), stride, layouts[stride % len(layouts)]

    cache = StepCache(tmp_path, WORKERS)
    with open_model(synthetic_model(**FAMILIES[family])).file as file:
        graph = open_model(file.path).graph(LIMITS)
        inputs = input_layout(graph, LIMITS.largest)
        for bucket in shape_buckets(LIMITS.largest):
            step, schedule = lowered(graph, bucket)
            right = bind_step(step, schedule, inputs, number, matrix)
            made = cache.of(graph, bucket, inputs, partial(lowered, graph, bucket))
            stored = cache.of(graph, bucket, inputs, refuse)
            for one in (made, stored):
                assert one.bound(number, matrix).tobytes() == right.tobytes()
                assert one.shared_bytes == schedule.shared_bytes
                assert one.own_bytes == schedule.own_bytes


def test_a_second_start_lowers_nothing(model_path, open_native, expected, tmp_path, monkeypatch):
    """It gives the same tokens and logits; with another number of workers it lowers."""
    folder = tmp_path / "lowered"
    assert_same(expected, outcome(model_path, open_native(threads=2, lowered=folder)))
    assert list(folder.glob("*.step"))
    monkeypatch.setattr(tier, "lower_graph", refuse)
    assert_same(expected, outcome(model_path, open_native(threads=2, lowered=folder)))
    with pytest.raises(AssertionError, match="lowered"):
        outcome(model_path, open_native(threads=1, lowered=folder))


@pytest.mark.parametrize("writable", [True, False])
def test_a_first_start_lowers_each_step_once(graph, open_native, store, monkeypatch, writable):
    """To know their memory. Until one is submitted it lies in the folder, in memory only where that
    cannot be written."""
    made: list[ShapeKey] = []

    def lower(graph: Graph, bucket: ShapeKey, workers: int, name: str) -> Step:
        made.append(bucket)
        return lower_graph(graph, bucket, workers, name)

    monkeypatch.setattr(tier, "StepMemoryCache", lambda *_: SimpleNamespace(of=None))
    monkeypatch.setattr(tier, "lower_graph", lower)
    if not writable:
        store.write_bytes(b"")
    before = steps_alive()
    opened = open_native(threads=2, lowered=store)
    opened.footprint(graph, LIMITS.largest)
    buckets = list(opened.buckets(LIMITS.largest))
    assert made == buckets
    assert steps_alive() - before == (0 if writable else len(buckets))
    inputs = input_layout(graph, LIMITS.largest)
    for bucket in buckets:
        found = StepCache(store, 2).of(
            graph, bucket, inputs, partial(opened.scheduled, graph, bucket)
        )
        assert len(found.packets)
    assert made == buckets, "none is lowered again"


def steps_alive() -> int:
    """The number of lowered steps in memory."""
    gc.collect()
    return sum(isinstance(found, Step) for found in gc.get_objects())


@pytest.fixture
def store(tmp_path) -> Path:
    """A folder of lowered steps, which does not exist."""
    return tmp_path / "lowered"


@pytest.fixture
def graph(model_path) -> Graph:
    model = open_model(model_path)
    with model.file:
        return model.graph(LIMITS)


class Cached:
    """Programs of one graph by a cache; ``made`` counts those that were lowered."""

    def __init__(self, graph: Graph, folder: Path, workers: int = WORKERS) -> None:
        self.graph = graph
        self.cache = StepCache(folder, workers)
        self.inputs = input_layout(graph, LIMITS.largest)
        self.made = 0

    def of(self, tokens: int) -> StoredStep:
        bucket = ShapeKey(tokens, 1)

        def lower() -> tuple[Step, Schedule]:
            self.made += 1
            return lowered(self.graph, bucket)

        return self.cache.of(self.graph, bucket, self.inputs, lower)


@pytest.mark.parametrize("what", ["workers", "bucket", "inputs", "graph", "code"])
def test_whatever_it_follows_from_is_asked_for(graph, store, monkeypatch, what):
    Cached(graph, store).of(1)
    other, tokens = Cached(graph, store, 2 if what == "workers" else WORKERS), 1
    if what == "bucket":
        tokens = 2
    elif what == "inputs":
        other.inputs = input_layout(graph, ShapeKey(200, 2))
    elif what == "graph":
        other.graph = replace(graph, nodes=graph.nodes[:-1])
    elif what == "code":
        monkeypatch.setattr(stored_steps, "code_state", lambda packages: "other")
    other.of(tokens)
    assert other.made == 1
    assert len(list(store.iterdir())) == 2


@pytest.mark.parametrize("harm", ["cut", "changed", "empty", "foreign", "folder", "huge", "link"])
def test_an_entry_that_is_damaged_is_lowered_anew(graph, store, harm):
    """And replaced where that is possible."""
    right = Cached(graph, store).of(1).encoded()
    (entry,) = store.iterdir()
    content = bytearray(entry.read_bytes())
    content[-9] ^= 1
    if harm == "foreign":
        write_entry(entry, b"x" * len(MAGIC), right)
    elif harm == "folder":
        entry.unlink()
        entry.mkdir()
    elif harm == "huge":
        with entry.open("wb") as file:
            file.truncate(1 << 42)
    elif harm == "link":
        entry.unlink()
        entry.symlink_to(entry)
    else:
        entry.write_bytes(bytes({"cut": content[:-100], "changed": content, "empty": b""}[harm]))
    again = Cached(graph, store)
    assert again.of(1).encoded() == again.of(1).encoded() == right
    assert again.made == (2 if harm == "folder" else 1)


def test_nothing_is_stored_where_that_cannot_be(graph, store, monkeypatch):
    """In a folder that is a file or cannot be entered, of code that is no files, and of what cannot
    be lowered."""
    store.write_bytes(b"")
    inputs = input_layout(graph, LIMITS.largest)
    for folder in (store, store.with_name("n" * 300)):
        cached, bucket = Cached(graph, folder), ShapeKey(1, 1)
        assert len(cached.of(1).packets)
        assert not cached.cache.store(graph, bucket, inputs, lowered(graph, bucket))
    store.unlink()

    def unsupported() -> tuple[Step, Schedule]:
        raise UnsupportedOp("native", "SAMPLE")

    with pytest.raises(UnsupportedOp):
        StepCache(store, 1).of(graph, ShapeKey(1, 1), inputs, unsupported)
    monkeypatch.setattr(stored_steps, "code_state", lambda packages: None)
    assert len(Cached(graph, store).of(1).packets)
    assert not (store).exists()


def test_the_oldest_make_room(graph, store, monkeypatch):
    monkeypatch.setattr(stored_steps, "MAX_STEPS", 3)
    cached = Cached(graph, store)
    for tokens in range(1, 6):
        cached.of(tokens)
        for entry in store.iterdir():
            os.utime(entry, (entry.stat().st_mtime - 10,) * 2)
    assert len(list(store.iterdir())) == 3
    again = Cached(graph, store)
    for tokens in (3, 4, 5):
        again.of(tokens)
    assert again.made == 0
