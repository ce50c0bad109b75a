"""What the thread of an engine asks of the disk cache while the cache's own threads work."""

import threading
from typing import Any

from reference.memory.disk.cache import DiskCache, DiskCacheOptions
from reference.memory.disk.folder import CacheFolder
from tests.memory.test_disk_entries import PLENTY, SCOPE, entry_of, payload_of
from tests.memory.test_disk_reading import Memory
from tests.patience import PATIENCE_SECONDS


def test_a_scope_is_forgotten_until_the_last_removal(tmp_path, monkeypatch):
    """A tenant may be removed again before the files of its first removal are gone: what was
    written in between is not found."""
    removing, gates = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]
    removals = iter(zip(removing, gates, strict=True))
    remove = CacheFolder.remove_scope

    def held(folder: CacheFolder, scope: str) -> None:
        begun, gate = next(removals)
        begun.set()
        assert gate.wait(PATIENCE_SECONDS)
        remove(folder, scope)

    monkeypatch.setattr(CacheFolder, "remove_scope", held)
    options = DiskCacheOptions(tmp_path, PLENTY, "a function", flush_seconds=PATIENCE_SECONDS)
    cache = DiskCache(options, lambda line: None, lambda: 0.0)
    entry = entry_of(CacheFolder(tmp_path, PLENTY), 1)
    make: Any = Memory
    try:
        cache.forget(SCOPE)
        assert cache.reserve(entry.nbytes)
        cache.write(entry, payload_of(1))
        cache.forget(SCOPE)
        gates[0].set()
        assert removing[1].wait(PATIENCE_SECONDS)
        assert cache.read([entry], None, 0, make) is None
        gates[1].set()
        assert cache.flush()
        assert cache.read([entry], None, 0, make) is not None
        assert not CacheFolder(tmp_path, PLENTY).has(entry)
    finally:
        for gate in gates:
            gate.set()
        cache.close()
