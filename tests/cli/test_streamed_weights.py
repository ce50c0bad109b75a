"""What the commands say of a model of which not all weights fit on the device."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import harness.host.open
import harness.tiers
from accel.opencl.runtime import Choices
from accel.opencl.tier import OpenClTier
from contract.tier import Tier
from harness.synth import sized_spec, write_synthetic
from harness.tiers import TierOptions
from tests.cli.conftest import Result
from tests.needs import need_device
from tests.opencl_parts import SOME, holding

Zinc = Callable[..., Result]
SAID = "of weights stay in host memory; every step copies them to the device, at most "


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    spec = sized_spec(
        "tiny", architecture="qwen3", quant="q8_0", layers=5, hidden=256, feed_forward=1024
    )
    write_synthetic(path, spec)
    return path


@pytest.fixture
def card(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The device has memory of its own."""

    def open_it(name: str, options: TierOptions) -> Tier:
        choices = Choices(shared_addresses=False, cache=kernel_cache)
        return need_device(lambda: OpenClTier(choices=choices))

    for module in (harness.tiers, harness.host.open):
        monkeypatch.setattr(module, "open_tier", open_it)
    with holding(SOME):
        yield


def memory_of(zinc: Zinc, *words: object) -> dict[str, object]:
    found: dict[str, object] = json.loads(zinc("inspect", "--json", *words).out)["run"]["memory"]
    return found


@pytest.mark.usefixtures("card")
def test_inspect_and_run_say_where_weights_are(zinc: Zinc, model_path: Path) -> None:
    """The bytes of both, what a step copies, and the speed to expect; run says it once and
    answers as without the budget."""
    sizes = (model_path, "--tier", "opencl", "--context", 64, "--chunk", 16)
    whole = memory_of(zinc, *sizes)
    assert (whole["fits"], whole["notes"], whole["streamed"]) == (True, [], 0)
    budget = ("--memory-budget", f"{int(str(whole['total'])) * 4 // 5}B")
    small = memory_of(zinc, *sizes, *budget)
    streamed, ring = int(str(small["streamed"])), int(str(small["ring"]))
    assert small["fits"] is True
    assert streamed > ring > 0
    assert int(str(small["device"])) <= int(str(small["budget"])) < int(str(whole["device"]))
    text = zinc("inspect", *sizes, *budget).out
    for part in (SAID, "in host memory", "\nring", "in the budget"):
        assert part in text
    asked = ("run", "--model", model_path, *sizes[1:], "--max-tokens", 5, "--temperature", 0)
    plain, less = (zinc(*asked, *more, "Hello") for more in ((), budget))
    assert (plain.code, less.code) == (0, 0)
    assert less.out == plain.out
    assert plain.err.count(SAID) == 0
    assert less.err.count(SAID) == 1


@pytest.mark.usefixtures("card")
def test_too_small_a_budget_is_refused_with_the_least_that_works(
    zinc: Zinc, model_path: Path
) -> None:
    """``inspect`` says so too, and shows the plan without streaming."""
    sizes = (model_path, "--tier", "opencl", "--context", 64, "--memory-budget", "1MB")
    assert memory_of(zinc, *sizes)["fits"] is False
    refused = zinc("run", "--model", *sizes, "Hello")
    assert refused.code != 0
    assert "with the weights of all layers in host memory: needs" in refused.err
