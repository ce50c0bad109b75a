"""What commands do with the weights that the native tier stores."""

import shutil
import time
from pathlib import Path

import pytest

from accel.native import weight_cache
from harness import catalog, tiers
from harness.arranged_weights import arranged_usage, needs_model_file
from harness.catalog import DEFAULT_ID
from harness.catalog.store import model_path
from harness.cli.findings import arranged_finding
from harness.host.options import SessionOptions
from harness.host.session import Session
from harness.progress import NullProgress
from reference.model.gguf.file import GgufFile
from tests.needs import machine_lacks, need_device

OPTIONS = SessionOptions(tier="native", context=64)


@pytest.fixture
def stored(tiny_model_path, tmp_path, monkeypatch) -> Path:
    """A pulled model, whose arranged weights are stored."""
    if not weight_cache.CAN_ALLOCATE:
        machine_lacks("way to reserve disk space for a file")
    monkeypatch.setattr(weight_cache, "MIN_BYTES", 1)
    monkeypatch.setattr(tiers, "arranged_folder", lambda: tmp_path / "weights")
    monkeypatch.setattr("harness.arranged_weights.arranged_folder", lambda: tmp_path / "weights")
    path = model_path(catalog.find(DEFAULT_ID), tmp_path)
    path.parent.mkdir(parents=True)
    shutil.copyfile(tiny_model_path, path)
    time.sleep(0.05)
    assert needs_model_file("native", path)
    need_device(lambda: Session.open(path, OPTIONS)).close()
    return path


def test_a_file_that_is_not_read_is_not_read_ahead(stored, monkeypatch):
    """Only other tiers read it."""
    read: list[GgufFile] = []
    monkeypatch.setattr(GgufFile, "read_ahead", lambda file: read.append(file))
    Session.open(stored, OPTIONS).close()
    assert read == []
    Session.open(stored, SessionOptions(tier="cpu", context=64)).close()
    assert len(read) == 1
    assert not needs_model_file("auto", stored)
    assert needs_model_file("native", stored.parent / "none")


def test_removing_a_model_removes_them(stored, tmp_path):
    """The bytes that were freed are those of both."""
    entries, nbytes = arranged_usage()
    assert entries == 1
    size = stored.stat().st_size
    assert catalog.remove(DEFAULT_ID, tmp_path, NullProgress()) == size + nbytes
    assert arranged_usage() == (0, 0)


def test_the_check_says_how_to_clear_them(stored, tmp_path):
    """With their number and size."""
    assert arranged_finding().detail.startswith("1 file, ")
    assert arranged_finding().detail.endswith("delete that folder to clear it")
    shutil.rmtree(tmp_path / "weights")
    assert arranged_finding().detail.startswith("none in ")
