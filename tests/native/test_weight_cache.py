"""Arranged weights in the cache folder: written once, mapped later, replaced, removed."""

import mmap
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from accel.native import arrange, model_weights, weight_cache
from accel.native.arrange import Arranger
from accel.native.pool import WorkerPool
from accel.native.tier import NativeTier
from accel.native.weight_cache import (
    HEADER_BYTES,
    PARTIAL,
    SYNCED,
    UNSYNCED,
    has_entry,
    remove_entries,
    usage,
)
from contract.arrays import Records
from contract.dtypes import F16
from contract.file_reads import FileRange
from contract.ir.graph import BufferKind
from reference.limits import whole_contexts
from reference.model.open import open_model
from reference.runner import ModelRunner
from tests.families_table import FAMILIES
from tests.memory.test_allocation import close, plan_on, step_of
from tests.model_runs import assert_same
from tests.native.weight_starts import LIMITS, entries, outcome

End = Callable[[], None]


@pytest.fixture
def fills(monkeypatch) -> list[int]:
    """The bytes of every entry that is arranged."""
    found: list[int] = []
    real = model_weights.ModelWeights._fill

    def fill(self: model_weights.ModelWeights, weights: object, target: object) -> bool:
        found.append(target.nbytes)  # type: ignore[attr-defined]
        return real(self, weights, target)  # type: ignore[arg-type]

    monkeypatch.setattr(model_weights.ModelWeights, "_fill", fill)
    return found


def test_weights_are_arranged_once(model_path, open_one, folder, fills, expected):
    """The second start and a second model of the same tier map the first one's file."""
    tier = open_one()
    assert not has_entry(folder, model_path)
    assert_same(expected, outcome(model_path, tier))
    (entry,) = entries(folder)
    assert entry.suffix == SYNCED
    assert has_entry(folder, model_path)
    assert_same(expected, outcome(model_path, tier))
    assert_same(expected, outcome(model_path, open_one()))
    assert fills == [entry.stat().st_size - HEADER_BYTES]
    assert entries(folder) == [entry]


@pytest.mark.parametrize("width", [64, 24])
def test_a_weight_in_parts_is_arranged_as_in_one(
    width, synthetic_model, open_native, folder, monkeypatch
):
    """The entry has the same bytes, and each part leaves the page table after it was read. Experts
    whose rows are no whole groups stay together."""
    form = FAMILIES["qwen3moe"]
    experts = {**form["experts"], "width": width}
    path = synthetic_model(**{**form, "experts": experts, "quant": "q8_0"})
    os.utime(path, (1e9, 1e9))
    time.sleep(0.05)
    forgotten: list[FileRange] = []
    real = FileRange.forget_pages

    def forget(part: FileRange) -> None:
        forgotten.append(part)
        real(part)

    monkeypatch.setattr(FileRange, "forget_pages", forget)
    written, ranges = [], []
    for most in (1 << 40, 1):
        monkeypatch.setattr(model_weights, "MAX_JOB_BYTES", most)
        forgotten.clear()
        outcome(path, open_native(threads=2, weights=folder))
        (entry,) = entries(folder)
        written.append(entry.read_bytes()[HEADER_BYTES:])
        ranges.append([part for part in forgotten if part.nbytes < len(part.mapping)])
        entry.unlink()
    assert written[0] == written[1]
    whole, parts = ranges
    assert len(parts) > 2 * len(whole)

    def octets(found: list[FileRange]) -> list[int]:
        return sorted(at for part in found for at in range(part.offset, part.offset + part.nbytes))

    assert octets(parts) == octets(whole)


@pytest.mark.parametrize("stored", [True, False])
def test_a_late_host_keeps_few_stored_bytes_in_memory(
    stored, model_path, open_native, folder, monkeypatch
):
    """The host sees the end of a job only when it waits for it. The jobs whose end it has not seen
    read at most MAX_AHEAD_BYTES, or there is one. Weights are stored or stay in memory."""
    now, most, jobs = 0, 0, 0
    real = Arranger.run

    def run(self: Arranger, packets: Records, nbytes: int, used: object, at_end: End) -> None:
        def ended() -> None:
            nonlocal now
            now -= nbytes
            at_end()

        nonlocal now, most, jobs
        real(self, packets, nbytes, used, ended)
        now, jobs = now + nbytes, jobs + 1
        if now > nbytes:
            most = max(most, now)

    monkeypatch.setattr(Arranger, "run", run)
    monkeypatch.setattr(WorkerPool, "done", lambda pool, number: False)
    monkeypatch.setattr(model_weights, "MAX_JOB_BYTES", 1)
    monkeypatch.setattr(arrange, "MAX_AHEAD_BYTES", 1 << 12)
    tier = open_native(threads=2, weights=folder if stored else None)
    model = open_model(model_path)
    with model.file:
        ModelRunner(model, tier, LIMITS).close()
        assert model.file.size > 1 << 14
    assert jobs > arrange.MAX_AHEAD
    assert now == 0
    assert 0 < most <= 1 << 12


def test_progress_counts_every_byte_once(model_path, open_one, open_native, monkeypatch):
    """Where weights are arranged in memory, written, mapped, and arranged after a failed write."""

    def counted(tier: NativeTier) -> int:
        seen: list[int] = []
        model = open_model(model_path)
        with model.file:
            ModelRunner(model, tier, LIMITS, seen.append).close()
        return sum(seen)

    def fail(*arguments: object) -> None:
        real(*arguments)  # type: ignore[arg-type]
        raise OSError(28, "No space left on device")

    in_memory = counted(open_native(threads=2))
    assert in_memory > 0
    assert [counted(open_one()) for _ in range(2)] == [in_memory, in_memory]
    real = model_weights.write_entry
    monkeypatch.setattr(model_weights, "open_entry", lambda *arguments: None)
    monkeypatch.setattr(model_weights, "write_entry", fail)
    assert counted(open_one()) == in_memory


def _mapped(path: Path) -> tuple[int, set[str]]:
    """Bytes of a mapped file in this process's page table, and the mappings' permissions."""
    resident, permissions, inside = 0, set(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            inside = line.endswith(str(path))
            if inside:
                permissions.add(words[1])
        elif inside and words[0] == "Rss:":
            resident += int(words[1]) * 1024
    return resident, permissions


def test_one_form_of_the_weights_is_in_memory(model_path, open_one, folder):
    """The stored bytes leave the page table; the arranged ones are mapped read-only."""
    for _ in range(2):
        with open_model(model_path).file as file:
            model = open_model(model_path)
            stored = sum(tensor.nbytes for tensor in file.tensors.values())
            with model.file, ModelRunner(model, open_one(), LIMITS):
                (entry,) = entries(folder)
                assert _mapped(entry)[1] == {"r--s"}
                assert _mapped(model_path)[0] < stored // 2


def test_a_mapped_model_takes_what_is_planned(model_path, open_one, folder):
    """By the tier's count, by the size of the entry and by this process's page table; the first
    start writes the entry, the second maps it."""
    limits = whole_contexts(2, 100, F16, 8, 2)
    for _ in range(2):
        tier, model = open_one(), open_model(model_path)
        plan, footprint = plan_on(model, tier, limits)
        weights = model.graph(limits).of_kind(BufferKind.WEIGHT)
        planned = sum(footprint.buffers[decl.name] for decl in weights)
        with model.file, ModelRunner(model, tier, limits) as runner:
            runner.prepare()
            for tokens in (8, 1, 3):
                runner.step(step_of(tokens, limits))
            assert close(tier.allocated_bytes, plan.allocated)
            (entry,) = entries(folder)
            assert planned <= entry.stat().st_size - HEADER_BYTES <= planned + len(weights) * 64
            assert _mapped(entry)[0] <= entry.stat().st_size + mmap.PAGESIZE
        tier.close()


def cut(path: Path) -> None:
    """The last page is missing."""
    os.truncate(path, path.stat().st_size - 4096)


def extend(path: Path) -> None:
    """Cut, and as long as before."""
    size = path.stat().st_size
    os.truncate(path, size // 2)
    os.truncate(path, size)


def empty(path: Path) -> None:
    """Nothing is left."""
    os.truncate(path, 0)


def overwrite(path: Path) -> None:
    """One byte of a matrix is another one."""
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + 100)
        byte = file.read(1)[0]
        file.seek(HEADER_BYTES + 100)
        file.write(bytes([byte ^ 1]))


def break_header(path: Path) -> None:
    """One bit of the header, under the old time of change."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def crash(path: Path) -> None:
    """The machine restarted before the file was on disk."""
    status = path.stat()
    header = bytearray(path.read_bytes()[:HEADER_BYTES])
    at = header.index(b'"boot": "') + len(b'"boot": "')
    header[at] = ord("0") if header[at] != ord("0") else ord("1")
    text = header[: -weight_cache.DIGEST_BYTES]
    header[-weight_cache.DIGEST_BYTES :] = weight_cache.digest(text).digest()
    with path.open("r+b") as file:
        file.write(header)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    path.rename(path.with_suffix(UNSYNCED))


@pytest.mark.parametrize("damage", [cut, extend, empty, overwrite, break_header, crash])
def test_a_damaged_entry_is_arranged_again(model_path, open_one, folder, fills, expected, damage):
    """It is replaced, and the next start maps the new one."""
    outcome(model_path, open_one())
    (entry,) = entries(folder)
    damage(entry)
    assert_same(expected, outcome(model_path, open_one()))
    assert len(fills) == 2
    assert_same(expected, outcome(model_path, open_one()))
    assert len(fills) == 2
    assert entries(folder) == [entry]


def test_an_entry_of_another_build_or_file_is_left_alone(
    model_path, open_one, folder, fills, expected, monkeypatch
):
    """Other kernels and a file that changed have entries of their own."""
    monkeypatch.setattr(model_weights, "sources_digest", lambda: "another build")
    outcome(model_path, open_one())
    monkeypatch.undo()
    monkeypatch.setattr(weight_cache, "MIN_BYTES", 1)
    other = entries(folder)
    assert_same(expected, outcome(model_path, open_one()))
    os.utime(model_path, (1e9 + 1, 1e9 + 1))
    time.sleep(0.05)
    assert_same(expected, outcome(model_path, open_one()))
    assert len(entries(folder)) == 3
    assert set(other) < set(entries(folder))


def test_the_folder_is_bounded(model_path, tmp_path, open_one, folder, monkeypatch):
    """Entries that were used least recently go, the leavings of other processes too."""
    copies = [tmp_path / f"{number}.gguf" for number in range(3)]
    for copy in copies:
        shutil.copyfile(model_path, copy)
    time.sleep(0.05)
    for copy in copies[:2]:
        outcome(copy, open_one())
    size = max(path.stat().st_size for path in entries(folder))
    assert usage(folder) == (2, 2 * size)
    stale = folder / f"left{PARTIAL}"
    stale.write_bytes(bytes(100))
    os.utime(stale, (1, 1))
    monkeypatch.setattr(weight_cache, "MAX_BYTES", 2 * size)
    outcome(copies[0], open_one())
    outcome(copies[2], open_one())
    assert [has_entry(folder, copy) for copy in copies] == [True, False, True]
    assert not stale.exists()
    assert usage(folder) == (2, 2 * size)
    assert len(list(folder.glob("*.lock"))) == 2
    monkeypatch.setattr(weight_cache, "MAX_ENTRIES", 1)
    outcome(copies[1], open_one())
    assert [has_entry(folder, copy) for copy in copies] == [False, True, False]
    monkeypatch.setattr(weight_cache, "MAX_BYTES", size - 1)
    outcome(copies[2], open_one())
    assert [has_entry(folder, copy) for copy in copies] == [False, True, False]


def test_entries_of_a_model_are_removed(model_path, tmp_path, open_one, folder, expected):
    """Those of other files stay, and who has one mapped goes on."""
    other = tmp_path / "other.gguf"
    shutil.copyfile(model_path, other)
    time.sleep(0.05)
    tier = open_one()
    outcome(other, tier)
    model = open_model(model_path)
    with model.file, ModelRunner(model, tier, LIMITS):
        assert len(entries(folder)) == 2
        freed = remove_entries(folder, [model_path, tmp_path / "none"])
        assert usage(folder) == (1, freed)
        assert has_entry(folder, other)
        assert not has_entry(folder, model_path)
    assert remove_entries(folder, [model_path]) == 0
    assert_same(expected, outcome(model_path, tier))


def test_an_entry_that_gets_its_last_name_meanwhile_is_seen_and_removed(
    model_path, open_one, folder, monkeypatch
):
    """The folder was listed just before a thread that writes the entry to disk renamed it."""
    outcome(model_path, open_one())
    (entry,) = entries(folder)
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter([entry.with_suffix(UNSYNCED)]))
    size = entry.stat().st_size
    assert usage(folder) == (1, size)
    assert remove_entries(folder, [model_path]) == size
    assert not entry.exists()


def test_a_file_that_has_just_changed_is_not_stored(model_path, open_one, folder, expected):
    """It may change again without another time of change."""
    changed = model_path.stat().st_ctime_ns
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_cache.time, "time_ns", lambda: changed + 1_000_000)
        assert_same(expected, outcome(model_path, open_one()))
    assert not folder.exists()
