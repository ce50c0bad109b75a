"""What is known to be wrong on a device is refused there, before anything is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from contract.dtypes import I4R, I12, DType
from contract.errors import RequestError
from harness.memory import plan_context
from harness.synth import SynthSpec, write_synthetic
from reference.cpu.tier import CpuTier
from reference.limits import Limits
from reference.model.open import open_model


@pytest.mark.parametrize(
    ("device", "dtype", "refused"),
    [("NVIDIA H200", I4R, True), ("NVIDIA H200", I12, False), ("llvmpipe", I4R, False)],
    ids=["nvidia-i4r", "nvidia-i12", "other-i4r"],
)
def test_rotated_pages_are_refused_on_nvidias_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, dtype: DType, refused: bool
) -> None:
    path = tmp_path / "model.gguf"
    write_synthetic(path, SynthSpec("qwen3", "q8_0", seed=3, head_dim=32))
    model = open_model(path)
    with CpuTier() as tier:
        info = replace(tier.info, device=device)
        monkeypatch.setattr(CpuTier, "info", property(lambda tier: info))

        def limits(context: int) -> Limits:
            return Limits(1, context, context // 16, dtype)

        if refused:
            with pytest.raises(RequestError, match=r"failed conformance .* take i12"):
                plan_context(model, tier, limits, 64, 1 << 30)
        else:
            assert plan_context(model, tier, limits, 64, 1 << 30).context == 64
    model.close()
