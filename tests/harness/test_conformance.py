"""The conformance package: its list, what a run records, and what verification refuses."""

import io
import json
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contract.errors import ConfigError, DeviceLost
from contract.opcodes import Opcode
from harness.conformance.cases import VALIDATED, known_cases
from harness.conformance.identity import tree_digest
from harness.conformance.package import MEMBERS, pack, unpack
from harness.conformance.run import CaseResult, conformance_package, run_cases
from harness.conformance.verify import verify_package
from harness.conformance.waivers import parse_waivers
from harness.tiers import TIERS, TierOptions, open_tier
from reference.cpu.tier import CpuTier
from tests.needs import need_device

KNOWN = known_cases()
PARITY = [name for name in KNOWN if name.startswith("parity/")]
ADD = [name for name in PARITY if name.startswith("parity/add-") and "-0x" not in name]
SAMPLE = (
    "tier/arithmetic", "tier/opcodes", "parity/barrier", *PARITY[5:200:60], next(iter(VALIDATED)),
    "goldens/llama-q4_0-2",
)  # fmt: skip
"""A little of everything."""
WAIVER = '[[waiver]]\ncase = "{case}"\ndevice = "{device}"\nreason = "known erratum 7"\n'

Members = dict[str, bytes]
many_damages = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def chosen(names: Any) -> dict[str, Any]:
    return {name: KNOWN[name] for name in names}


def run(names: Any, tier: Any = CpuTier, waivers: str = "") -> tuple[bytes, list[CaseResult]]:
    return conformance_package(tier, chosen(names), waivers)


@pytest.fixture(scope="module")
def archive() -> bytes:
    """A passing run of SAMPLE."""
    data, results = run(SAMPLE)
    assert [result.status for result in results] == ["pass"] * len(SAMPLE)
    return data


@pytest.fixture
def package(archive, tmp_path) -> Path:
    path = tmp_path / "package.tar.gz"
    path.write_bytes(archive)
    return path


def rewritten(path: Path, **changes: bytes) -> Path:
    """The package with members replaced and its manifest made to fit."""
    members: Members = unpack(path)
    names = {name.partition(".")[0]: name for name in MEMBERS}
    path.write_bytes(pack(members | {names[key]: data for key, data in changes.items()}))
    return path


def changed_run(path: Path, **changes: Any) -> Path:
    facts = json.loads(unpack(path)["run.json"]) | changes
    return rewritten(path, run=json.dumps(facts).encode())


class WrongAdd(CpuTier):
    """A tier that flips the lowest bit of the first element of every sum."""

    def call_of(self, node, bound):
        call = super().call_of(node, bound)
        return self._wrong(call, bound["y"]) if node.opcode is Opcode.ADD else call

    def _wrong(self, call, y):
        def wrong() -> None:
            call()
            if y.size:
                y.view(np.uint32)[0, 0] ^= 1

        return wrong


class Unlucky(CpuTier):
    """A tier whose device is lost at one submission, and which counts how often it was opened."""

    opened = 0
    submissions = 0

    def __init__(self, lost_at: int, error: Exception) -> None:
        super().__init__(1)
        self.lost_at, self.error = lost_at, error
        Unlucky.opened += 1

    def submit(self, batch, inputs, requested=(), rows=None):
        Unlucky.submissions += 1
        if Unlucky.submissions == self.lost_at:
            raise self.error
        return super().submit(batch, inputs, requested, rows)


def test_a_package_of_every_listed_case_is_conformant(package):
    verdict = verify_package(package, SAMPLE)
    assert verdict.conformant
    assert verdict.lines()[0].startswith("CONFORMANT: cpu on ")
    assert verdict.cases == len(SAMPLE)


def test_package_says_what_was_run_where(package):
    members = unpack(package)
    facts = json.loads(members["run.json"])
    assert facts["tier"]["name"] == "cpu"
    assert facts["machine"]["cores"] >= 1
    assert set(facts["source"]["packages"]) == {"contract", "reference", "accel", "harness"}
    assert len(facts["definitions"]["opcode_table"]) == 64
    assert set(facts["definitions"]["goldens"]) == {"synthetic.json", "default_model.json"}
    assert facts["counts"] == {"pass": len(SAMPLE), "fail": 0, "waived": 0}
    assert members["must_pass.txt"].decode().splitlines() == list(SAMPLE)
    log = members["log.txt"].decode()
    assert all(f"pass {name}\n" in log for name in SAMPLE)


@pytest.mark.parametrize("name", TIERS)
def test_every_tier_passes_a_sample(name):
    _, results = run_cases(
        lambda: need_device(partial(open_tier, name, TierOptions(1))), chosen(SAMPLE)
    )
    assert [result for result in results if result.status != "pass"] == []


def test_incomplete_packages_are_not_conformant(package):
    verdict = verify_package(package, (*SAMPLE, *ADD[:2]))
    assert verdict.reasons == (f"2 cases of the list did not run, first {ADD[0]}",)
    changed_run(package, quick=True)
    assert verify_package(package, (*SAMPLE, ADD[0])).reasons[0].startswith("a quick run: 1 case")


def test_a_wrong_bit_is_recorded_with_its_place_and_patterns():
    """Negative control: the one flipped bit of each sum, and nothing else, fails."""
    name = "parity/add-1x1-normal"
    (case,) = [found for found in ADD if found.startswith(name)]
    _, results = run_cases(WrongAdd, chosen([case, SAMPLE[3]]))
    assert [result.status for result in results] == ["fail", "pass"]
    (finding,) = results[0].findings
    assert finding["operand"] == "y"
    assert finding["index"] == (0, 0)
    assert (finding["differing"], finding["elements"]) == (1, 1)
    assert int(finding["expected_bits"], 16) ^ int(finding["got_bits"], 16) == 1
    bits = np.float32(finding["expected"]).view(np.uint32)
    assert int(bits) == int(finding["expected_bits"], 16)


@pytest.mark.parametrize("group", ["validate/", "goldens/"])
def test_a_wrong_bit_is_noticed_by_models_too(group):
    """The same mistake under a whole model: residual additions are everywhere."""
    case = next(name for name in KNOWN if name.startswith(group))
    _, (result,) = run_cases(WrongAdd, chosen([case]))
    assert result.status == "fail"
    assert result.findings


def test_failures_speak_against_conformance_unless_waived(tmp_path):
    names = [name for name in ADD if name.startswith("parity/add-3x257")][:2]
    path = tmp_path / "package.tar.gz"
    path.write_bytes(run(names, WrongAdd)[0])
    verdict = verify_package(path, names)
    assert verdict.reasons == (f"2 cases failed without a waiver, first {names[0]}",)
    everywhere = WAIVER.format(case="parity/add-*", device="*")
    archive, results = run(names, WrongAdd, everywhere)
    assert {result.status for result in results} == {"waived"}
    assert {result.waiver for result in results} == {"known erratum 7"}
    path.write_bytes(archive)
    verdict = verify_package(path, names)
    assert verdict.conformant
    assert verdict.waived == 2
    assert "2 waived" in verdict.lines()[0]
    assert any("known erratum 7" in note for note in verdict.notes)
    rewritten(path, waivers=b"")
    assert not verify_package(path, names).conformant


def test_a_waiver_of_another_device_or_case_covers_nothing():
    for case, device in (("parity/add-*", "some other device"), ("parity/scale-*", "*")):
        _, results = run_cases(WrongAdd, chosen(ADD[:1]), WAIVER.format(case=case, device=device))
        assert results[0].status == "fail"


@pytest.mark.parametrize(
    ("error", "opened"),
    [(DeviceLost("gone"), 2), (RuntimeError("driver"), 2), (ConfigError("no"), 1)],
)
def test_a_fault_fails_one_case_and_the_run_goes_on(error, opened):
    """Only after a fault the device may not have survived is it opened anew."""
    Unlucky.opened = Unlucky.submissions = 0
    _, results = run_cases(lambda: Unlucky(2, error), chosen(PARITY[:4]))
    assert [result.status for result in results] == ["pass", "fail", "pass", "pass"]
    assert results[1].findings == ({"note": f"{type(error).__name__}: {error}"},)
    assert Unlucky.opened == opened


def test_a_device_that_does_not_come_back_fails_what_is_left():
    tiers = iter([Unlucky(1, DeviceLost("gone"))])

    def open_once():
        for tier in tiers:
            return tier
        raise DeviceLost("still gone")

    Unlucky.submissions = 0
    _, results = run_cases(open_once, chosen(PARITY[:3]))
    assert [result.status for result in results] == ["fail"] * 3
    assert "still gone" in results[2].findings[0]["note"]


def test_archive_is_a_function_of_its_members(archive, package):
    members = unpack(package)
    assert pack(members) == archive
    assert pack(dict(reversed(members.items()))) == archive


@many_damages
@given(data=st.data())
def test_any_changed_byte_is_refused(archive, package, data):
    """Or changes nothing: a compressed stream may point to another copy of the same bytes."""
    package.write_bytes(archive)
    members = unpack(package)
    place = data.draw(st.integers(0, len(archive) - 1))
    changed = bytearray(archive)
    changed[place] ^= data.draw(st.integers(1, 255))
    package.write_bytes(changed)
    try:
        verify_package(package, SAMPLE)
    except ConfigError:
        return
    assert unpack(package) == members


@many_damages
@given(data=st.data())
def test_any_truncation_or_appendix_is_refused(archive, package, data):
    cut = data.draw(st.integers(0, len(archive) - 1))
    for damaged in (archive[:cut], archive + data.draw(st.binary(min_size=1, max_size=40))):
        package.write_bytes(damaged)
        with pytest.raises(ConfigError, match="not a conformance package"):
            verify_package(package, SAMPLE)


def test_an_edited_member_does_not_match_the_manifest(package, monkeypatch):
    members = unpack(package)
    honest = pack(members)
    edited = members | {"log.txt": members["log.txt"] + b"fine\n"}
    monkeypatch.setattr("harness.conformance.package._manifest", lambda _: manifest_of(honest))
    package.write_bytes(pack(edited))
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"log\.txt is not what manifest\.json says"):
        unpack(package)


def manifest_of(archive: bytes) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(archive)) as file:
        member = file.extractfile("zinc-rt-conformance/manifest.json")
        assert member is not None
        return member.read()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"definitions": {"arithmetic": 2}}, "it was made with other definitions (opcode table"),
        ({"definitions": {}}, "made with arithmetic version None, this source has version 2"),
        ({"definitions": {"arithmetic": 1}}, "made with arithmetic version 1, this source has"),
    ],
)
def test_other_definitions_are_not_comparable(package, changes, reason):
    changed_run(package, **changes)
    (found,) = verify_package(package, SAMPLE).reasons
    assert reason in found


def lines_of(results: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.decode().splitlines()]


def stored(records: list[dict[str, Any]]) -> bytes:
    return "".join(f"{json.dumps(record)}\n" for record in records).encode()


def test_results_that_contradict_themselves_or_the_list_are_noticed(package):
    members = unpack(package)
    records = lines_of(members["results.jsonl"])
    for changed, reason in (
        ([records[0] | {"status": "fail"}, *records[1:]], "contradicts itself"),
        ([records[0] | {"findings": [{"note": "x"}]}, *records[1:]], "contradicts itself"),
        ([records[0] | {"status": "splendid"}, *records[1:]], "contradicts itself"),
        ([*records, records[0]], "a case has several results"),
        ([*records, records[0] | {"case": "parity/none"}], "1 case not of the list"),
        (records[1:], "1 case of the list did not run"),
        (records[1:], "its list and its results name different cases"),
    ):
        rewritten(package, results=stored(changed))
        reasons = verify_package(package, SAMPLE).reasons
        assert any(reason in found for found in reasons), reasons


@pytest.mark.parametrize("results", [b"[]\n", b"{\n", b"\xff\n", b"{}\n", b"[" * 100_000])
def test_results_that_cannot_be_understood_are_an_error(package, results):
    rewritten(package, results=results)
    with pytest.raises(ConfigError, match="cannot be understood"):
        verify_package(package, SAMPLE)


@pytest.mark.parametrize(
    "text",
    [
        "waiver = 3", "[[waiver]]", '[[waiver]]\ncase = "a"\ndevice = "b"\nreason = " "',
        '[[waiver]]\ncase = "a"\ndevice = "b"\nreason = 7', "x = 1", "not toml",
    ],
)  # fmt: skip
def test_bad_waivers_are_refused(text):
    with pytest.raises(ConfigError, match="waivers"):
        parse_waivers(text, "waivers")


def test_source_digest_depends_on_every_file_but_caches(tmp_path):
    (tmp_path / "a.py").write_text("1")
    first = tree_digest(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_text("2")
    assert tree_digest(tmp_path) == first
    (tmp_path / "b.cl").write_text("")
    assert tree_digest(tmp_path) != first


def test_result_line_is_complete_json():
    result = CaseResult("parity/x", "waived", 0.5, ({"note": "n"},), "because")
    assert json.loads(result.line()) == {
        "case": "parity/x", "status": "waived", "seconds": 0.5, "findings": [{"note": "n"}],
        "waiver": "because",
    }  # fmt: skip
