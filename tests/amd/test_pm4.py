"""Packets word for word."""

from accel.amd import pm4
from tests.amd.code import wait_memory

CODE, ARGUMENTS, FENCE, BUFFER = (0x7F00_0000_0000 + 0x1000 * n for n in (1, 2, 3, 4))
LAUNCH = pm4.Dispatch(CODE, ARGUMENTS, (0x600F0000, 0x84, 0), 256, 2)

GOLDEN = """
c0065800 0 ffffffff ff 0 0 a c181
c0027600 20c 00000010 0000007f
c0027600 212 600f0000 00000084
c0017600 228 0
c0017600 218 0
c0017600 215 0
c0037600 21b 0 0 0
c0027600 240 00002000 00007f00
c0067600 204 0 0 0 100 1 1
c0031500 2 1 1 8005
c0004600 407
c0064900 00704514 40000000 00003000 00007f00 1 0 0
"""
"""A launch of two groups of 256, as other runtimes and an independent decoder have it."""


def read(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def test_a_launch_with_everything_around_it():
    writer = pm4.Writer()
    writer.put(pm4.acquire_memory())
    writer.dispatch(LAUNCH)
    writer.put(pm4.wait_for_launches())
    writer.put(pm4.release_memory(FENCE, 1))
    assert writer.words == read(GOLDEN)
    assert len(writer.words) == 57


def test_what_goes_into_a_ring():
    assert pm4.indirect_buffer(BUFFER, 57) == read("c0023f00 00004000 00007f00 00800039")
    assert wait_memory(FENCE, 1) == read("c0053c00 15 00003000 00007f00 1 ffffffff 4")
    assert pm4.release_memory(FENCE, 7)[2:] == read("40000000 3000 7f00 7 0 0")


def test_registers_that_stay_the_same_are_not_written_again():
    writer = pm4.Writer()
    writer.dispatch(LAUNCH)
    before = len(writer.words)
    writer.dispatch(LAUNCH)
    assert writer.words[before:] == read("c0031500 2 1 1 8005")
