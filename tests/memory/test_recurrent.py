"""Recurrent states saved and loaded bit for bit, on every tier."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from contract.errors import RequestError
from contract.ir.graph import Graph
from contract.tier import PacketBatch, Tier
from harness import tiers
from harness.tiers import TIERS, open_tier
from reference.cpu.tier import CpuTier
from reference.memory.recurrent import RecurrentMemory, recurrent_buffers
from tests.contract.graphs import decoder
from tests.late_tier import LateTier
from tests.memory.recurrent_layers import STATE_SLOTS, VOCABULARY, Layers, graph, uninterrupted
from tests.needs import need_device
from tests.opencl_parts import SOME, holding

SLOTS = 3
FIRST, OTHER, RIGHT = (1, 2, 3, 4, 5), (6, 6, 0), (7, 1, 2, 2)


def _open(name: str) -> Tier:
    if name == "late":
        return LateTier()
    if name == "vulkan-own":
        from accel.vulkan.runtime import Choices as VulkanChoices
        from accel.vulkan.tier import VulkanTier

        pipelines = tiers.kernel_cache("vulkan")
        return VulkanTier(choices=VulkanChoices(shared=False, cache=pipelines))
    if name != "opencl-banked":
        return open_tier(name)

    from accel.opencl.runtime import Choices
    from accel.opencl.tier import OpenClTier

    cache = tiers.kernel_cache("opencl")
    return OpenClTier(choices=Choices(shared_addresses=False, cache=cache))


WAYS = [*TIERS, "late", "opencl-banked", "vulkan-own"]
"""Banked, own: as devices have it whose memory the host does not share."""


@contextmanager
def open_way(way: str) -> Iterator[Tier]:
    """One of ``WAYS``, as long as it is used: its programs are made by steps."""
    with holding(SOME, way == "opencl-banked"), need_device(partial(_open, way)) as opened:
        yield opened


@pytest.fixture(scope="module", params=WAYS)
def tier(request) -> Iterator[Tier]:
    with open_way(request.param) as opened:
        yield opened


@pytest.fixture
def layers(tier) -> Iterator[Layers]:
    built = Layers(tier, SLOTS)
    yield built
    built.close()


def feed(layers: Layers, slot: int, ids: tuple[int, ...]) -> NDArray[np.float32]:
    """The next tokens of a slot in one step."""
    first = layers.recurrent.position(slot)
    return layers.step([(token, slot, first + offset) for offset, token in enumerate(ids)])


def test_a_loaded_slot_continues_as_if_nothing_had_happened(layers):
    """Save, other tokens, load, the right tokens: the uninterrupted rows."""
    feed(layers, 1, FIRST)
    layers.recurrent.save(1, 0)
    feed(layers, 1, OTHER)
    layers.recurrent.load(0, 1)
    assert layers.recurrent.position(1) == len(FIRST)
    expected = uninterrupted(FIRST + RIGHT)[len(FIRST) :]
    assert (feed(layers, 1, RIGHT) == expected).all()


def test_a_slot_continues_behind_any_of_its_latest_states(tier):
    """Tokens are taken back as far as there are states, also positions that were computed twice,
    and a state inside is saved and loaded; a position before them is refused."""
    with closing(Layers(tier, SLOTS, states=3)) as layers:
        feed(layers, 1, FIRST)
        path = FIRST
        for back, ids in ((2, OTHER[:2]), (2, OTHER), (0, OTHER), (1, (4,)), (2, RIGHT)):
            begin = len(path) - back
            path = (*path[:begin], *ids)
            rows = layers.step([(token, 1, begin + n) for n, token in enumerate(ids)])
            assert (rows == uninterrupted(path)[begin:]).all()
        layers.recurrent.save(1, 0, len(path) - 2)
        layers.recurrent.load(0, 2)
        rows = feed(layers, 2, RIGHT)
        assert (rows == uninterrupted((*path[:-2], *RIGHT))[len(path) - 2 :]).all()
        for slot, refused in ((1, len(path) - 3), (2, len(path) - 1)):
            with pytest.raises(AssertionError, match=f"not {refused}"):
                layers.step([(1, slot, refused)])
        layers.step([(1, 1, len(path) - 2)])


@pytest.mark.parametrize("prepared", [True, False])
def test_copies_are_lowered_ahead(layers, prepared, monkeypatch):
    """After ``prepare`` no save or load lowers anything; without it both do."""
    lowered: list[str] = []
    lower = layers.tier.lower

    def noting(graph: Graph, *rest: Any) -> PacketBatch:
        lowered.append(graph.name)
        batch: PacketBatch = lower(graph, *rest)
        return batch

    with closing(RecurrentMemory(layers.tier, layers.graph, layers.buffers, STATE_SLOTS)) as memory:
        if prepared:
            memory.prepare()
        monkeypatch.setattr(layers.tier, "lower", noting)
        memory.save(1, 0)
        memory.load(0, 1)
        assert lowered == ([] if prepared else ["save", "load"])


def test_with_any_state_of_other_tokens_the_rows_differ(layers):
    """The negative control: other tokens leave a mark in each state."""
    feed(layers, 1, FIRST)
    layers.recurrent.save(1, 0)
    feed(layers, 2, OTHER)
    expected = uninterrupted(FIRST + RIGHT)[len(FIRST) :]
    for decl in recurrent_buffers(layers.graph):
        layers.recurrent.load(0, 1)
        write_state(layers, decl.name, 1, read_state(layers, decl.name, 2))
        assert (feed(layers, 1, RIGHT) != expected).any(), decl.name


def read_state(layers: Layers, name: str, slot: int) -> NDArray[np.uint8]:
    """The bytes of one state of a slot, once no save or load is running."""
    layers.recurrent._settle()
    nbytes = layers.buffers[name].nbytes // layers.slots
    return layers.tier.read(layers.buffers[name], slot * nbytes, nbytes)


def write_state(layers: Layers, name: str, slot: int, data: NDArray[np.uint8]) -> None:
    """Replace one state of a slot, once no save or load is running."""
    layers.recurrent._settle()
    layers.tier.write(layers.buffers[name], slot * data.nbytes, data)


def test_saved_state_continues_in_another_slot(layers):
    """Saved and loaded in the queue, between steps; the slots around are not touched, and a saved
    state can be loaded again."""
    feed(layers, 1, RIGHT)
    feed(layers, 0, FIRST)
    layers.recurrent.save(0, 1)
    layers.recurrent.save(1, 0)
    feed(layers, 0, RIGHT)
    layers.recurrent.load(1, 2)
    expected = uninterrupted(FIRST + OTHER)[len(FIRST) :]
    assert (feed(layers, 2, OTHER) == expected).all()
    layers.recurrent.load(1, 0)
    assert layers.recurrent.position(0) == len(FIRST)
    expected = uninterrupted(FIRST + RIGHT)[len(FIRST) :]
    assert (feed(layers, 0, RIGHT) == expected).all()
    expected = uninterrupted(RIGHT + FIRST)[len(RIGHT) :]
    assert (feed(layers, 1, FIRST) == expected).all()
    layers.recurrent.load(0, 2)
    assert (feed(layers, 2, FIRST) == expected).all()


def test_every_tier_has_the_same_states(layers):
    """Those of the definitions' tier after the same tokens, and either continues the other's."""
    feed(layers, 1, FIRST)
    rows = uninterrupted(FIRST + RIGHT)[len(FIRST) :]
    with CpuTier(1, definitions_only=True) as oracle:
        reference = Layers(oracle, 2)
        feed(reference, 1, FIRST)
        for decl in recurrent_buffers(layers.graph):
            expected, got = (read_state(each, decl.name, 1) for each in (reference, layers))
            assert (got.view(np.float32) == expected.view(np.float32)).all(), decl.name
            write_state(layers, decl.name, 1, expected)
            write_state(reference, decl.name, 1, got)
        assert (feed(layers, 1, RIGHT) == rows).all()
        assert (feed(reference, 1, RIGHT) == rows).all()
        reference.close()


@pytest.mark.parametrize("slot", [-1, SLOTS])
def test_slots_there_are_not(layers, slot):
    """And state slots: named, with how many there are."""
    message = f"slot: is {slot}, not one of {SLOTS}"
    for call in (
        lambda: layers.recurrent.save(slot, 0),
        lambda: layers.recurrent.load(0, slot),
        lambda: layers.recurrent.position(slot),
    ):
        with pytest.raises(RequestError, match=message):
            call()
    state_slot = STATE_SLOTS if slot > 0 else -1
    for call in (
        lambda: layers.recurrent.save(0, state_slot),
        lambda: layers.recurrent.load(state_slot, 0),
    ):
        with pytest.raises(
            RequestError, match=f"state_slot: is {state_slot}, not one of {STATE_SLOTS}"
        ):
            call()


def test_a_token_that_continues_nothing_is_a_broken_invariant(layers):
    """Neither the next position nor 0; the positions stay as they were."""
    feed(layers, 1, FIRST)
    with pytest.raises(AssertionError, match="slot 1 has a recurrent state for position 5, not 4"):
        layers.step([(0, 0, 0), (1, 1, 4)])
    assert [layers.recurrent.position(slot) for slot in range(SLOTS)] == [0, 5, 0]
    layers.step([(0, 1, 0), (1, 1, 1)])
    assert layers.recurrent.position(1) == 2


def test_recurrent_buffers_are_found_by_the_opcodes():
    """Of a graph with pages and slot tables none is recurrent; of ours all states are."""
    assert recurrent_buffers(decoder()) == ()
    names = {decl.name for decl in recurrent_buffers(graph(SLOTS))}
    assert names == {"blk.0.conv", "blk.0.memory", "blk.1.conv", "blk.1.memory"}


def test_a_model_without_recurrent_layers_has_nothing_to_save():
    """Its positions are free, and saving a state is an error."""
    with CpuTier(1) as tier:
        memory = RecurrentMemory(tier, decoder(), {})
        assert memory.slot_bytes == 0
        with pytest.raises(RequestError, match="not one of 0 with a recurrent state"):
            memory.save(0, 0)


ids = st.integers(0, VOCABULARY - 1)
slots = st.integers(0, SLOTS - 1)
state_slots = st.integers(0, STATE_SLOTS - 1)
actions = st.one_of(
    st.tuples(st.just("step"), st.lists(st.tuples(slots, ids), min_size=1, max_size=6)),
    st.tuples(st.just("begin"), slots),
    st.tuples(st.just("save"), slots, state_slots),
    st.tuples(st.just("load"), state_slots, slots),
)


@given(schedule=st.lists(actions, max_size=14))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_schedule_of_saving_and_loading(layers, schedule):
    """Every row ever computed is that of its slot's sequence run alone by the definitions."""
    sequences: list[tuple[int, ...]] = [()] * SLOTS
    begins = [True] * SLOTS
    kept: list[tuple[int, ...]] = [()] * STATE_SLOTS
    for action, *arguments in schedule:
        match action:
            case "step":
                tokens = []
                for slot, token in arguments[0]:
                    if begins[slot]:
                        sequences[slot], begins[slot] = (), False
                    tokens.append((token, slot, len(sequences[slot])))
                    sequences[slot] = (*sequences[slot], token)
                rows = layers.step(tokens)
                for row, (_, slot, position) in zip(rows, tokens, strict=True):
                    assert (row == uninterrupted(sequences[slot])[position]).all()
            case "begin":
                begins[arguments[0]] = True
            case "save" if not begins[arguments[0]]:
                slot, state_slot = arguments
                layers.recurrent.save(slot, state_slot)
                kept[state_slot] = sequences[slot]
            case "load" if kept[arguments[0]]:
                state_slot, slot = arguments
                layers.recurrent.load(state_slot, slot)
                sequences[slot], begins[slot] = kept[state_slot], False
