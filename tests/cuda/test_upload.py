"""Uploads that are read while their caller goes on: who wants to see the data sees all of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from accel.cuda import upload
from accel.cuda.program import Compiler
from accel.cuda.tier import CudaTier
from contract.dtypes import F32, I12
from contract.errors import ModelFileError
from contract.ir.graph import BufferDecl, BufferKind
from harness.synth import sized_spec, write_synthetic
from reference.limits import Limits
from reference.model.open import open_model
from reference.runner import ModelRunner
from tests.cuda.fake_devices import EmulatedDevices
from tests.cuda.fake_driver import FakeNvrtc

LIMITS = Limits(1, 32, 2, I12, step_tokens=1, step_rows=1)
ROWS, WIDTH = 1000, 48


class Broken(Exception):
    """What a look at some rows ends with."""


def table(tier: CudaTier, data: np.ndarray, seen) -> object:
    decl = BufferDecl("table", BufferKind.CONSTANT, F32, (len(data), WIDTH // 4))
    return tier.upload_later(decl, data, seen)


def rows_of_rows() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (ROWS, WIDTH), np.uint8)


@pytest.mark.parametrize("slot_bytes", [1, 1000, 1 << 20])
def test_all_rows_are_seen_once(
    tier: CudaTier, monkeypatch: pytest.MonkeyPatch, slot_bytes: int
) -> None:
    """With their numbers, whatever they are cut into."""
    monkeypatch.setattr(upload, "SLOT_BYTES", slot_bytes)
    data, found = rows_of_rows(), {}

    def seen(first: int, rows: np.ndarray) -> None:
        found.update({first + n: row.tobytes() for n, row in enumerate(rows)})

    table(tier, data, seen)
    tier.finish_uploads()
    assert found == {n: row.tobytes() for n, row in enumerate(data)}


def test_the_first_error_counts(tier: CudaTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of uploads, whichever thread is first; the tier goes on with other uploads."""
    monkeypatch.setattr(upload, "SLOT_BYTES", 100)

    def seen(first: int, rows: np.ndarray) -> None:
        if first % 400 == 300:
            raise Broken(first)

    def upload_twice() -> None:
        for _ in range(2):
            table(tier, rows_of_rows(), seen)
        tier.finish_uploads()

    for _ in range(3):
        with pytest.raises(Broken, match=r"^300$"):
            upload_twice()
    table(tier, rows_of_rows(), lambda first, rows: None)
    tier.finish_uploads()


@pytest.mark.parametrize("quant", ["q8_0", "q4_k"])
def test_a_broken_scale_is_found_on_the_way(tmp_path: Path, folder: Path, quant: str) -> None:
    """Named as where it is found before; and the progress told is that of what was read."""
    path = tmp_path / "model.gguf"
    write_synthetic(path, sized_spec("tiny", architecture="llama", quant=quant))
    told: list[int] = []
    driver = EmulatedDevices(folder, 1)
    with CudaTier(binding=driver, compiler=Compiler(FakeNvrtc())) as tier:
        model = open_model(path)
        with model.file, ModelRunner(model, tier, LIMITS, told.append):
            weights = sum(tensor.nbytes for tensor in model.file.tensors.values())
            place = model.file.tensors["blk.1.ffn_down.weight"]
            assert sum(told) == weights
        with path.open("r+b") as file:
            file.seek(place.offset + 3 * place.row_bytes)
            file.write(b"\x00\x7e")
        model = open_model(path)
        with (
            model.file,
            pytest.raises(ModelFileError, match=r"blk\.1\.ffn_down\.weight.*row 3 block 0"),
        ):
            ModelRunner(model, tier, LIMITS)
