"""Whatever is wrong with the disk cache, answers have the bits of a cold run and the engine goes
on."""

import os
import shutil
from pathlib import Path

import numpy as np

from contract.dtypes import I3R, I4R, I12
from reference.memory.disk import entry as entry_module
from reference.memory.disk.entry import HEADER_BYTES
from tests.engine.disk_engines import WHOLE, files, life, lived
from tests.families_table import DENSE


def flip(path: Path, index: int) -> None:
    whole = bytearray(path.read_bytes())
    whole[index] ^= 0x10
    path.write_bytes(whole)


def test_a_flipped_bit_changes_no_answer(dense, folder):
    """In a page in the middle: what comes before it is used, it and what follows are computed, and
    it is written anew. Every byte of a file has ``tests/memory``."""
    expected = lived(dense, folder)
    flip(files(folder)[2], -1)
    with life(dense, folder) as second:
        assert second.ask() == expected
        assert second.from_disk == second.loads.reused[1] == 32
        assert second.counts.ignored == len(second.lines) == 1
    with life(dense, folder) as third:
        assert third.ask() == expected
        assert third.from_disk == WHOLE, "the page was not written again"


def test_a_page_that_is_trusted_unchecked_would_change_the_answer(dense, folder, monkeypatch):
    """The negative control: without the checksum the flipped bits are computed with."""
    monkeypatch.setattr(entry_module, "_checksum", lambda *parts: bytes(32))
    expected = lived(dense, folder)
    for page in files(folder):
        whole = np.frombuffer(page.read_bytes(), np.uint8).copy()
        whole[HEADER_BYTES:] ^= 0x15
        page.write_bytes(whole.tobytes())
    with life(dense, folder) as second:
        assert second.ask() != expected


def test_a_state_that_is_damaged_or_gone_is_computed(hybrid, folder):
    """A hit ends at an earlier state."""
    expected = lived(hybrid, folder)
    with life(hybrid, folder) as second:
        assert second.ask() == expected
        assert second.from_disk == WHOLE
    states = files(folder, ".state")
    assert len(states) >= 3
    for harm in (lambda path: flip(path, -1), lambda path: flip(path, 70), Path.unlink):
        before = shutil.copytree(folder, folder.with_name("before"))
        with life(hybrid, None) as cold:
            assert cold.ask() == expected
        for state in states:
            if state.exists():
                harm(state)
        with life(hybrid, folder) as third:
            assert third.ask() == expected
            assert third.from_disk == 0
        shutil.rmtree(folder)
        before.rename(folder)


def test_another_model_of_the_same_shape_reads_nothing(synthetic_model, folder, tmp_path):
    """It even has the file name, the size and the time of the first one."""
    kinds = [dict(DENSE["qwen3"]) | {"quant": "q8_0", "seed": seed} for seed in (1, 2)]
    path = tmp_path / "model.gguf"
    answers = []
    for kind in kinds:
        shutil.copyfile(synthetic_model(**kind), path)
        os.utime(path, ns=(10**18, 10**18))
        with life(path, None) as cold:
            expected = cold.ask()
        with life(path, folder) as swapped:
            assert swapped.ask() == expected
            assert swapped.from_disk == 0
        answers.append(expected)
    assert answers[0] != answers[1]


def test_another_type_of_keys_and_values_reads_nothing(dense, folder):
    answers = {}
    for kv_dtype in (I12, I4R, I3R):
        with life(dense, None, kv_dtype=kv_dtype) as cold:
            answers[kv_dtype] = cold.ask()
        with life(dense, folder, kv_dtype=kv_dtype) as first:
            assert first.ask() == answers[kv_dtype]
            assert first.from_disk == 0
    for kv_dtype, expected in answers.items():
        with life(dense, folder, kv_dtype=kv_dtype) as again:
            assert again.ask() == expected
            assert again.from_disk == WHOLE, "both are there"
