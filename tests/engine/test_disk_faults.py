"""Whatever is wrong with the disk cache, answers have the bits of a cold run and the engine goes
on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from contract.dtypes import I3R, I4R, I12
from reference.memory.disk import entry as entry_module
from reference.memory.disk.entry import HEADER_BYTES
from tests.conftest import SyntheticModel
from tests.engine.disk_engines import WHOLE, files, life, lived
from tests.families_table import DENSE, HYBRIDS

POSITIONS = {
    "magic": 0, "version": 16, "kind": 20, "size": 24, "name": 32, "tokens": 64, "checksum": 128,
    "payload begins": HEADER_BYTES, "payload ends": -1,
}  # fmt: skip
"""A byte of each part of a file."""


@pytest.fixture
def dense(synthetic_model: SyntheticModel) -> Path:
    return synthetic_model(**dict(DENSE["qwen3"]) | {"quant": "q8_0"})


@pytest.fixture
def hybrid(synthetic_model: SyntheticModel) -> Path:
    return synthetic_model(**dict(HYBRIDS["qwen35"]) | {"quant": "q8_0"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def flip(path: Path, index: int) -> None:
    whole = bytearray(path.read_bytes())
    whole[index] ^= 0x10
    path.write_bytes(whole)


def test_a_flipped_bit_changes_no_answer(dense: Path, folder: Path) -> None:
    """In a page in the middle: what comes before it is used, it and what follows are computed, and
    it is written anew."""
    expected = lived(dense, folder)
    page = files(folder)[2]
    for part, index in POSITIONS.items():
        flip(page, index)
        with life(dense, folder) as second:
            assert second.ask() == expected, part
            assert second.from_disk == second.loads.reused[1] == 32, part
            assert second.counts.ignored == len(second.lines) == 1, part
        with life(dense, folder) as third:
            assert third.ask() == expected
            assert third.from_disk == WHOLE, f"{part}: the page was not written again"


def test_a_page_that_is_trusted_unchecked_would_change_the_answer(
    dense: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: without the checksum the flipped bits are computed with."""
    monkeypatch.setattr(entry_module, "_checksum", lambda *parts: bytes(32))
    expected = lived(dense, folder)
    for page in files(folder):
        whole = np.frombuffer(page.read_bytes(), np.uint8).copy()
        whole[HEADER_BYTES:] ^= 0x15
        page.write_bytes(whole.tobytes())
    with life(dense, folder) as second:
        assert second.ask() != expected


@pytest.mark.parametrize("left", [0, 20, HEADER_BYTES, HEADER_BYTES + 9])
def test_a_cut_file_changes_no_answer(dense: Path, folder: Path, left: int) -> None:
    expected = lived(dense, folder)
    os.truncate(files(folder)[0], left)
    with life(dense, folder) as second:
        assert second.ask() == expected
        assert second.from_disk == 0
        assert second.counts.ignored == len(second.lines) == 1


def test_pages_in_each_others_place_change_no_answer(dense: Path, folder: Path) -> None:
    expected = lived(dense, folder)
    first, second = files(folder)[:2]
    other = second.read_bytes()
    second.write_bytes(first.read_bytes())
    first.write_bytes(other)
    with life(dense, folder) as again:
        assert again.ask() == expected
        assert again.from_disk == 0
        assert again.counts.ignored


def test_files_of_an_older_version_change_no_answer(
    dense: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(entry_module, "VERSION", entry_module.VERSION - 1)
        expected = lived(dense, folder)
    with life(dense, folder) as second:
        assert second.ask() == expected
        assert second.from_disk == 0
        assert second.counts.ignored
        assert len(second.lines) == 1


def test_a_state_that_is_damaged_or_gone_is_computed(hybrid: Path, folder: Path) -> None:
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


def test_another_model_of_the_same_shape_reads_nothing(
    synthetic_model: SyntheticModel, folder: Path, tmp_path: Path
) -> None:
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


def test_another_type_of_keys_and_values_reads_nothing(dense: Path, folder: Path) -> None:
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
