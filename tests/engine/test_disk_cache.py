"""A server that is restarted answers from pages on disk, with the bits of a cold run."""

from collections import Counter

import pytest

from reference.memory.disk import entry as entry_module
from reference.memory.disk.entry import HEADER_BYTES
from reference.memory.disk.folder import CacheFolder
from reference.memory.disk.names import PageNames
from tests.engine.disk_engines import WHOLE, files, life, lived
from tests.engine.small_engine import ALL_TIERS as TIERS
from tests.families_table import DENSE, GEMMAS, HYBRIDS
from tests.named_tiers import on_each

MODELS = {"dense": DENSE["qwen3"], "hybrid": HYBRIDS["qwen35"], "window": GEMMAS["gemma3"]}


@pytest.mark.parametrize(("tier", "name"), on_each(TIERS, MODELS, "dense"))
def test_a_restarted_server_gives_the_bits_of_a_cold_one(synthetic_model, name, tier, tmp_path):
    model = synthetic_model(**dict(MODELS[name]) | {"quant": "q8_0"})
    folder = tmp_path / "cache"
    with life(model, None, tier=tier) as cold:
        expected = cold.ask()
    with life(model, folder, tier=tier) as first:
        assert first.ask() == expected
        assert first.from_disk == 0
    with life(model, folder, tier=tier) as second:
        assert second.ask() == expected
        assert second.from_disk == second.loads.reused[1] == WHOLE
        assert second.counts.tokens == WHOLE
        assert second.ask() == expected
        assert second.from_disk == 0, "the second time it is in memory"
        second.engine.memory.check([])
    assert not [*first.lines, *second.lines]


def test_a_restart_does_no_work_twice(synthetic_model, tmp_path, monkeypatch):
    """Each byte is hashed once, and no file is looked for before it is read. A page is named to
    find its file, and as a page in memory."""
    model = synthetic_model(**dict(MODELS["dense"]) | {"quant": "q8_0"})
    folder = tmp_path / "cache"
    expected = lived(model, folder)
    work = Counter[str]()
    checksum, name, has = entry_module._checksum, PageNames.page, CacheFolder.has

    def counted_checksum(secret: bytes, fields: bytes, payload: memoryview) -> bytes:
        work["hashed"] += payload.nbytes
        return checksum(secret, fields, payload)

    def counted_name(names: PageNames, before: bytes, tokens: bytes) -> bytes:
        work["named"] += 1
        return name(names, before, tokens)

    def counted_has(cache: CacheFolder, entry: entry_module.Entry) -> bool:
        work["looked for"] += 1
        return has(cache, entry)

    monkeypatch.setattr(entry_module, "_checksum", counted_checksum)
    monkeypatch.setattr(PageNames, "page", counted_name)
    monkeypatch.setattr(CacheFolder, "has", counted_has)
    with life(model, folder) as second:
        assert second.ask() == expected
        assert second.from_disk == WHOLE
    sizes = [file.stat().st_size - HEADER_BYTES for file in files(folder)]
    assert work == {"hashed": sum(sizes), "named": 2 * len(sizes)}


def test_the_end_of_a_prompt_makes_room_before_its_beginning(synthetic_model, tmp_path):
    """The states of a hybrid, too, whatever order they were written in."""
    for kind in ("dense", "hybrid"):
        model = synthetic_model(**dict(MODELS[kind]) | {"quant": "q8_0"})
        folder = tmp_path / kind
        lived(model, folder)
        times = [path.stat().st_mtime_ns for path in files(folder)]
        assert times == sorted(times, reverse=True)
        assert len(set(times)) == WHOLE // 16
        states = {path.stem: path.stat().st_mtime_ns for path in files(folder, ".state")}
        pages = {path.stem: path.stat().st_mtime_ns for path in files(folder)}
        assert bool(states) == (kind == "hybrid")
        assert all(used < pages[name] for name, used in states.items())
