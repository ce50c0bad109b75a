"""Whatever is wrong with the disk cache, answers have the bits of a cold run and the engine goes
on."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.dtypes import F16, I12
from reference.memory.disk import cache as cache_module
from reference.memory.disk import entry as entry_module
from reference.memory.disk import folder as folder_module
from reference.memory.disk.entry import HEADER_BYTES
from reference.memory.disk.folder import SUBFOLDER
from tests.conftest import SyntheticModel
from tests.engine.disk_engines import PROMPT, life
from tests.families_table import DENSE, HYBRIDS
from tests.patience import wait_until

WHOLE = len(PROMPT) // 16 * 16
POSITIONS = {
    "magic": 0,
    "version": 16,
    "kind": 20,
    "size": 24,
    "name": 32,
    "tokens": 64,
    "checksum": 128,
    "payload begins": HEADER_BYTES,
    "payload ends": -1,
}
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


def lived(model: Path, folder: Path) -> str:
    """The answer of a first life that fills the folder."""
    with life(model, folder) as first:
        return first.ask()


def files(folder: Path, ending: str = ".page") -> list[Path]:
    """The files of the prompt's pages, or of states after them, in the order of the prompt."""
    ids = np.array(PROMPT, np.int32).tobytes()
    pages = [ids[start : start + 64] for start in range(0, WHOLE * 4, 64)]
    found = {}
    for path in (folder / SUBFOLDER).glob(f"*/*{ending}"):
        tokens = path.read_bytes()[64:128]
        if tokens in pages:
            found[pages.index(tokens)] = path
    return [found[number] for number in sorted(found)]


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
    for kv_dtype in (I12, F16):
        with life(dense, None, kv_dtype=kv_dtype) as cold:
            answers[kv_dtype] = cold.ask()
        with life(dense, folder, kv_dtype=kv_dtype) as first:
            assert first.ask() == answers[kv_dtype]
            assert first.from_disk == 0
    for kv_dtype, expected in answers.items():
        with life(dense, folder, kv_dtype=kv_dtype) as again:
            assert again.ask() == expected
            assert again.from_disk == WHOLE, "both are there"


def refusing(number: int) -> Callable[..., Any]:
    def refuse(*_: object) -> Any:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_a_disk_that_takes_nothing_is_told_once(
    dense: Path, folder: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full, read-only, forbidden or broken."""
    with life(dense, None) as cold:
        expected = cold.ask()
    monkeypatch.setattr(folder_module, "_write_all", _after_the_secret(refusing(number)))
    with life(dense, folder) as first:
        assert first.ask() == expected
        assert first.ask(PROMPT[::-1]) != expected
        assert first.engine.disk is not None
        first.engine.disk.flush()
        assert first.counts.written == 0
        assert first.counts.dropped
        assert os.strerror(number) in first.counts.problem
    (line,) = first.lines
    assert os.strerror(number) in line
    assert str(folder) in line
    assert not list(folder.rglob("*.partial"))


def _after_the_secret(refuse: Callable[..., Any]) -> Callable[[int, bytes], None]:
    write = folder_module._write_all

    def write_or_refuse(handle: int, part: bytes) -> None:
        (write if len(part) == folder_module.SECRET_BYTES else refuse)(handle, part)

    return write_or_refuse


def test_a_disk_that_is_full_for_a_while_is_used_again(
    dense: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with life(dense, folder) as first:
        with monkeypatch.context() as patch:
            patch.setattr(folder_module, "_write_all", refusing(errno.ENOSPC))
            expected = first.ask()
            assert first.engine.disk is not None
            first.engine.disk.flush()
            assert not first.counts.written
        for turn in range(8):
            first.ask(PROMPT[turn:])
            first.engine.disk.flush()
        assert first.counts.written
        assert first.counts.problem == ""
    with life(dense, folder) as second:
        assert second.ask() == expected
        assert len(first.lines) == 1


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_disk_that_gives_nothing_is_told_once(
    dense: Path, folder: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = lived(dense, folder)
    monkeypatch.setattr(cache_module, "read_entry", refusing(number))
    with life(dense, folder) as second:
        assert second.ask() == expected
        assert second.from_disk == 0
    (line,) = second.lines
    assert os.strerror(number) in line


def test_a_folder_that_cannot_be_made_is_told_once(dense: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("this is no folder")
    with life(dense, None) as cold:
        expected = cold.ask()
    with life(dense, tmp_path / "file") as first:
        assert first.ask() == expected
        assert first.counts.problem
    (line,) = first.lines
    assert "goes on without it" in line


def test_a_folder_that_vanishes_is_told_once(dense: Path, folder: Path) -> None:
    with life(dense, folder) as first:
        expected = first.ask()
        assert first.engine.disk is not None
        first.engine.disk.flush()
        shutil.rmtree(folder)
        for turn in range(1, 4):
            first.ask(PROMPT[turn:])
        assert first.ask() == expected
        first.engine.disk.flush()
        assert first.counts.dropped
    assert len(first.lines) == 1
    with life(dense, folder) as second:
        assert second.ask() == expected
        assert second.from_disk == 0


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What the disk waits for; it is opened at the end of the test, so that no thread stays."""
    event = threading.Event()
    yield event
    event.set()


def test_a_disk_that_hangs_while_it_is_read_delays_nobody(
    dense: Path, folder: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nothing is read of for the time of patience, here none, is computed."""
    expected = lived(dense, folder)
    read = entry_module.read_entry

    def hang(*parts: Any) -> Any:
        gate.wait()
        return read(*parts)

    monkeypatch.setattr(cache_module, "read_entry", hang)
    with life(dense, folder, patience=-1.0) as second:
        assert second.ask() == expected
        assert second.from_disk == 0
        assert second.ask(PROMPT[:40]) == second.ask(PROMPT[:40])
        assert len(second.lines) == 1
        gate.set()
        assert second.engine.disk is not None


def test_a_disk_that_hangs_while_it_is_written_delays_nobody(
    dense: Path, folder: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has no room in the queue is not written, unless it is still in memory when there is
    room again."""
    with life(dense, None) as cold:
        expected = [cold.ask(PROMPT[turn:]) for turn in range(3)]
    write = folder_module.CacheFolder.write

    def hang(*parts: Any) -> bool:
        gate.wait()
        return write(*parts)

    monkeypatch.setattr(folder_module.CacheFolder, "write", hang)
    with life(dense, folder, queue_bytes=1, pages=14, slots=1) as first:
        assert [first.ask(PROMPT[turn:]) for turn in range(3)] == expected
        assert first.counts.written == 0
        gate.set()
        assert first.engine.disk is not None
        first.engine.disk.flush()
        assert first.ask(PROMPT[5:]) != expected
    assert first.counts.dropped, "what was evicted while the disk hung"
    assert first.counts.written
    with life(dense, folder) as second:
        assert [second.ask(PROMPT[turn:]) for turn in range(3)] == expected


def test_the_end_waits_no_longer_than_it_may(
    dense: Path, folder: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module.CacheFolder, "write", lambda *parts: gate.wait())
    with life(dense, folder, flush_seconds=0.0) as first:
        first.ask()
    assert first.counts.dropped


def test_what_waits_at_the_end_is_written(
    dense: Path, folder: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the queue has no room for it before."""
    write = folder_module.CacheFolder.write

    def hang(*parts: Any) -> bool:
        gate.wait()
        return write(*parts)

    monkeypatch.setattr(folder_module.CacheFolder, "write", hang)
    with life(dense, folder, queue_bytes=1) as first:
        expected = first.ask()
        assert first.counts.written == 0
        gate.set()
    with life(dense, folder) as second:
        assert second.ask() == expected
        assert second.from_disk == WHOLE


def test_a_step_that_fails_leaves_nothing_on_disk(
    dense: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages may hold anything: here a third of the prompt was computed with wrong bits."""
    with life(dense, None) as cold:
        expected = cold.ask()
    with life(dense, folder, tier="late") as first:
        runner = first.engine.runner
        collect, failing = runner.collect, [True]

        def fail_once(submission: Any) -> Any:
            result = collect(submission)
            if failing.pop() if failing else False:
                for name in ("state.kv[0]", "state.kv[1]"):
                    runner.buffer(name)[...] ^= 0x11
                raise RuntimeError("the device failed")
            return result

        monkeypatch.setattr(runner, "collect", fail_once)
        with pytest.raises(RuntimeError, match="the device failed"):
            first.ask()
        monkeypatch.undo()
        assert first.engine.disk is not None
        first.engine.disk.flush()
        assert first.counts.written == 0
        list(first.engine.run())
    wait_until(lambda: bool(files(folder)))
    with life(dense, folder) as second:
        assert second.ask() == expected
        assert second.from_disk == WHOLE
