"""Which tier ``auto`` opens, and what it says of the faster ones it could not."""

from collections.abc import Callable

import pytest

from contract.errors import TierUnavailable
from harness.best_tier import AMD, NVIDIA, card_makers, open_best
from harness.tiers import AUTO, TierOptions, open_tier


def _opens(name: str) -> Callable[[], str]:
    return lambda: name


def _fails(tier: str, reason: str, remedy: str = "") -> Callable[[], str]:
    def fail() -> str:
        raise TierUnavailable(tier, reason, remedy)

    return fail


def _opened(factories: dict[str, Callable[[], str]], *makers: int) -> tuple[str, list[str]]:
    said: list[str] = []
    return open_best(factories, frozenset(makers), said.append), said


def test_the_fastest_needs_no_word():
    """Also where tiers for cards that the machine does not have are missing."""
    factories = {
        "cuda": _fails("cuda", "no driver"), "vulkan": _fails("vulkan", "no loader"),
        "native": _opens("native"), "opencl": _opens("opencl"),
    }  # fmt: skip
    assert _opened(factories) == ("native", [])


@pytest.mark.parametrize(
    ("makers", "first"), [((), "native"), ((AMD,), "vulkan"), ((NVIDIA,), "cuda")]
)
def test_a_slower_tier_is_named_with_reason_and_remedy(makers, first):
    """In one line, of the fastest tier that was to be expected on this machine."""
    factories = {
        name: _fails(name, f"{name} is broken", f"mend {name}")
        for name in ("cuda", "vulkan", "native")
    }
    opened, said = _opened({**factories, "cpu": _opens("cpu")}, *makers)
    assert opened == "cpu"
    assert said == [f"tier cpu is used, a slower one than {first}: {first} is broken; mend {first}"]


def test_all_reasons_where_nothing_opens():
    """The error names every tier that was tried."""
    factories = {name: _fails(name, f"no {name} here") for name in ("native", "cpu")}
    with pytest.raises(TierUnavailable, match="native: no native here; cpu: no cpu here"):
        _opened(factories)


@pytest.mark.parametrize(
    "options",
    [
        TierOptions(threads=1, device="no such device"),
        TierOptions(threads=1, device="99"),
        TierOptions(threads=1, opencl_device="no such device"),
    ],
    ids=["name", "number", "opencl"],
)
def test_a_named_device_that_is_missing_is_an_error(options):
    """``auto`` takes no other device in its place."""
    with pytest.raises(TierUnavailable):
        open_tier(AUTO, options)


@pytest.mark.parametrize("name", ["cpu", "native"])
def test_a_processor_of_another_name_is_an_error(name):
    """The error says which processor there is."""
    with pytest.raises(TierUnavailable, match="no processor matches 'no such'; there is "):
        open_tier(name, TierOptions(threads=1, device="no such"))


def test_cards_are_found_by_class_and_maker(tmp_path):
    """A network adapter of the same maker is no graphics card."""
    for name, kind, maker in (
        ("0000:00:02.0", "0x030000", "0x1002"),
        ("0000:00:03.0", "0x020000", "0x10de"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "class").write_text(f"{kind}\n")
        (tmp_path / name / "vendor").write_text(f"{maker}\n")
    assert card_makers(tmp_path) == frozenset((AMD,))
    assert card_makers(tmp_path / "absent") == frozenset()
