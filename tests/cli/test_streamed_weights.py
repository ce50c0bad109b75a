"""What the commands say of a model of which not all weights fit on the device."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import harness.host.open
import harness.tiers
from accel.opencl.runtime import Choices
from accel.opencl.tier import OpenClTier
from contract.tier import Tier
from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from harness.tiers import TierOptions
from tests.cli.conftest import Zinc
from tests.needs import need_device
from tests.opencl_parts import SOME, holding

SAID = "of weights stay in host memory; every step copies them to the device, at most "


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    spec = sized_spec(
        "tiny", architecture="qwen3", quant="q8_0", layers=5, hidden=256, feed_forward=1024
    )
    write_synthetic(path, spec)
    return path


@pytest.fixture
def card(kernel_cache, monkeypatch) -> Iterator[None]:
    """The device has memory of its own."""

    def open_it(name: str, options: TierOptions) -> Tier:
        choices = Choices(shared_addresses=False, cache=kernel_cache)
        return need_device(lambda: OpenClTier(choices=choices))

    for module in (harness.tiers, harness.host.open):
        monkeypatch.setattr(module, "open_tier", open_it)
    with holding(SOME):
        yield


def memory_of(zinc: Zinc, *words: object) -> Any:
    return json.loads(zinc("inspect", "--json", *words).out)["run"]["memory"]


def assert_rows_are_plans(zinc: Zinc, small: Any, words: tuple[object, ...], where: str) -> None:
    """What ``inspect`` lists as fitting with weights elsewhere is what it plans when asked."""
    text = zinc("inspect", *words).out
    assert small["kinds"]["i12"]["longest_context"] == small["context"]
    assert small["kinds"]["i12"]["weights"] == where
    row = small["sequences"][1]
    assert (row["slots"], row["context"], row["weights"]) == (2, small["context"], where)
    if where == "from disk":
        assert row["total"] == memory_of(zinc, *words, "--slots", 2)["total"]
    assert f"it is the whole context, weights {where}" in text


@pytest.mark.usefixtures("card")
def test_inspect_and_run_say_where_weights_are(zinc, model_path):
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
    for part in (SAID, "in host memory", "\nring", "on the device, in the budget"):
        assert part in text
    assert_rows_are_plans(zinc, small, (*sizes, *budget), "in host memory")
    asked = ("run", "--model", model_path, *sizes[1:], "--max-tokens", 5, "--temperature", 0)
    plain, less = (zinc(*asked, *more, "Hello") for more in ((), budget))
    assert (plain.code, less.code) == (0, 0)
    assert less.out == plain.out
    assert plain.err.count(SAID) == 0
    assert less.err.count(SAID) == 1


def test_a_mapped_file_is_more_than_the_budget(zinc, model_path, monkeypatch):
    """A processor reads what has no room from disk: ``inspect`` never says that it is within the
    budget, and says how fast the disk lets it be, as ``run`` does."""
    monkeypatch.setattr("accel.native.weight_cache.MIN_BYTES", 0)
    monkeypatch.setattr("harness.residency.disk_rate", lambda path: 1e9)
    sizes = (model_path, "--tier", "native", "--context", 64, "--chunk", 16)
    whole = memory_of(zinc, *sizes)
    words = (*sizes, "--memory-budget", f"{int(str(whole['total'])) - (1 << 20)}B")
    small = memory_of(zinc, *words)
    assert (small["fits"], small["beyond"]) == (True, 1 << 20)
    text = zinc("inspect", *words).out
    said = "is read from disk in every step: if that is all of it, at most "
    assert "1.05 MB more than the budget of" in text
    assert "in the budget" not in text
    assert f"{said}954 times a second by the disk" in text
    assert_rows_are_plans(zinc, small, words, "from disk")
    ran = zinc("run", "--model", *words, "--max-tokens", 2, "Hello")
    assert (ran.code, ran.err.count(said)) == (0, 1)


def test_without_a_tier_inspect_names_the_option(zinc, model_path):
    text = zinc("inspect", model_path, "--memory-budget", "1MB").out
    assert "--tier auto says whether weights may stay in host memory or on disk" in text


@pytest.mark.usefixtures("card")
def test_too_small_a_budget_is_refused_with_the_least_that_works(zinc, model_path):
    """``inspect`` says so too, and shows the plan without streaming."""
    sizes = (model_path, "--tier", "opencl", "--context", 64, "--memory-budget", "1MB")
    assert memory_of(zinc, *sizes)["fits"] is False
    refused = zinc("run", "--model", *sizes, "Hello")
    assert refused.code != 0
    assert "with the weights of all layers in host memory: needs" in refused.err
