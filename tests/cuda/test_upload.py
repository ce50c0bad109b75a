"""Uploads that are read while their caller goes on: the device looks at all of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from accel.cuda import upload
from accel.cuda.program import Compiler, tuned_source
from accel.cuda.tier import CudaTier
from contract.dtypes import F32, I12, WEIGHT_DTYPES, DType, StorageClass
from contract.errors import ModelFileError
from contract.ir.graph import BufferDecl, BufferKind
from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from reference.limits import Limits
from reference.model.open import open_model
from reference.quant import find_nonfinite_scale, finite_words, moderate_scales
from reference.runner import ModelRunner
from tests.cuda.emulator import emulate
from tests.cuda.fake_devices import EmulatedDevices
from tests.cuda.fake_nvrtc import FakeNvrtc

LIMITS = Limits(1, 32, 2, I12, step_tokens=1, step_rows=1)
ROWS, WIDTH = 1000, 48


@pytest.mark.parametrize("slot_bytes", [1, 1000, 1 << 20])
def test_all_bytes_are_told_and_looked_at(
    tier: CudaTier, monkeypatch: pytest.MonkeyPatch, slot_bytes: int
) -> None:
    """Whatever they are cut into; what was found is forgotten with the uploads it was found in."""
    monkeypatch.setattr(upload, "SLOT_BYTES", slot_bytes)
    decl = BufferDecl("table", BufferKind.CONSTANT, F32, (ROWS, WIDTH // 4))
    data = np.zeros((ROWS, WIDTH), np.uint8)
    for broken in (None, (0, 3), (ROWS - 1, WIDTH - 1), None):
        told: list[int] = []
        if broken is not None:
            data[broken], data[broken[0], broken[1] - 1] = 0x7F, 0x80
        buffer = tier.upload_later(decl, data, finite_words(F32), told.append)
        assert tier.finish_uploads() == (broken is None)
        assert sum(told) == data.nbytes
        tier.free(buffer)
        data[:] = 0


@pytest.mark.parametrize("stage", ["read", "send", "interrupt"])
def test_what_goes_wrong_ends_an_upload(
    tier: CudaTier, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """Nothing is enqueued behind it, it is raised once, and what is uploaded next arrives."""
    monkeypatch.setattr(upload, "SLOT_BYTES", 2 * WIDTH)
    uploader, memory = tier._runtime.uploader, tier._memory
    data = np.arange(ROWS * WIDTH, dtype=np.uint32).astype(np.uint8).reshape(ROWS, WIDTH)
    target = memory.allocate("target", data.nbytes)
    sent: list[int] = []

    def fail(*given: object) -> None:
        sent.append(len(given))
        raise ArithmeticError(stage)

    if stage == "read":
        monkeypatch.setattr(upload, "copy_bytes", fail)
    uploader.copy(data, target, fail if stage == "send" else None)
    if stage == "interrupt":
        monkeypatch.setattr(uploader, "_wait", lambda: (monkeypatch.undo(), fail()))
    with pytest.raises(ArithmeticError, match=stage):
        uploader.finish()
    assert len(sent) == 1 or stage == "read"
    monkeypatch.undo()
    uploader.copy(data, target)
    uploader.finish()
    assert np.array_equal(memory.read(target, 0, data.nbytes), data.reshape(-1))
    memory.free(target)


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
def test_the_device_finds_what_the_host_finds(dtype: DType, folder: Path) -> None:
    """In any word that has to be finite and in no other, of few blocks and of many."""
    words = finite_words(dtype)
    kernel = emulate(tuned_source("find_broken.cu", {}), folder)
    rng = np.random.default_rng(dtype.ggml_id)
    for blocks in (1, 700):
        stored = rng.integers(0, 256, (1, blocks * dtype.block_bytes), np.uint8)
        if dtype.storage is StorageClass.FLOAT:
            stored &= 0x3F
        else:
            moderate_scales(dtype, stored)
        for place in (None, *words.offsets):
            at = (blocks - 1) * dtype.block_bytes
            if place is not None:
                word = slice(at + place, at + place + words.word_bytes)
                stored[0, word] = list(words.exponent.to_bytes(words.word_bytes, "little"))
            found = np.zeros(1, np.uint32)
            numbers = blocks, words.block_bytes, words.offsets[0], words.offsets[-1]
            kernel.run(
                "find_broken", (2, 1, 1), 64, stored.ctypes.data, found.ctypes.data, *numbers,
                words.word_bytes, words.exponent,
            )  # fmt: skip
            expected = find_nonfinite_scale(dtype, stored)
            assert bool(found[0]) == (expected is not None) == (place is not None)
            if place is not None:
                assert expected == (0, blocks - 1)
                stored[0, word] = 0


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
