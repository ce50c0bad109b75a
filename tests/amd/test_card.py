"""``zinc-rt card-test``: what it finds, what it keeps, and its archive."""

import errno
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from accel.amd.packet_check import Bench
from accel.amd.sim.fake_kernel import FakeKernel
from accel.amd.sim.fake_machine import Behaviour
from accel.amd.system import findings
from accel.amd.tools.trace import load_trace, replay
from harness import amd_card
from harness.cli.main import main

Told = Callable[..., tuple[int, str]]


@pytest.fixture
def told(capsys, tmp_path) -> Told:
    """``told(*words)`` is the command's exit code and what it printed, of one case."""
    (tmp_path / "list.txt").write_text("tier/opcodes\nparity/barrier\n")

    def run(*words: object) -> tuple[int, str]:
        given = ["card-test", "--must-pass", tmp_path / "list.txt", "--device", "simulated"]
        code = main([str(word) for word in (*given, "--out", tmp_path / "card.tar.gz", *words)])
        return code, capsys.readouterr().out

    return run


def members(folder: Path) -> dict[str, bytes]:
    """What the archive holds."""
    with tarfile.open(folder / "card.tar.gz") as archive:
        found = {}
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            found[member.name.removeprefix("zinc-rt-card/")] = file.read()
        return found


def test_everything_in_one_archive(told, tmp_path):
    """Of both tiers: report, trace that replays, conformance package."""
    code, out = told()
    assert code == 0
    found = members(tmp_path)
    tiers = [f"{tier}/{name}" for tier in ("t1", "t2") for name in
             ("packets.trace", "conformance.tar.gz")]  # fmt: skip
    assert set(found) == {"report.txt", *tiers}
    report = found["report.txt"].decode()
    assert report.count("gfx1201 (simulated)") == 2
    assert "Linux 6.17.0-simulated" in report
    assert "firmware mec 3050" in report
    assert all(line in out for line in report.splitlines())
    (tmp_path / "t1.trace").write_bytes(found["t1/packets.trace"])
    assert replay(load_trace(tmp_path / "t1.trace")) is None


def test_a_packet_that_fails_ends_its_tier(told, tmp_path, monkeypatch):
    """Its trace is there, a conformance package is not; no model meets such a queue."""

    def fails(bench: Bench) -> bool:
        """A packet does nothing."""
        return False

    monkeypatch.setattr("accel.amd.packet_check.TESTS", (fails,))
    monkeypatch.setattr("harness.amd_card.conformance", lambda words: pytest.fail("was run"))
    code, out = told("--tier", "t2")
    assert (code, "FAILED  A packet does nothing." in out) == (1, True)
    assert set(members(tmp_path)) == {"report.txt", "t2/packets.trace"}


def test_a_case_that_fails_is_told(told, monkeypatch):
    monkeypatch.setattr("harness.amd_card.conformance", lambda words: 1)
    code, out = told("--tier", "t1")
    assert (code, "not everything passed" in out) == (1, True)


@pytest.mark.parametrize(
    ("behaviour", "tier", "problem"),
    [
        (Behaviour(errors={"/dev/kfd": errno.ENOENT}), "t1", "there is no /dev/kfd"),
        (Behaviour(errors={"/dev/kfd": errno.EACCES}), "t1", "groups render and video"),
        (Behaviour(slots=0, engines=0), "t2", "compute_userq_slots_missing"),
        (Behaviour(public=False), "t1", "resizable BAR"),
    ],
    ids=["no driver", "no permission", "no slots", "small window"],
)
def test_what_is_missing_is_said_and_written(told, tmp_path, monkeypatch, behaviour, tier, problem):
    kernel = FakeKernel(behaviour)
    monkeypatch.setattr(amd_card, "simulated_kernel", lambda: kernel)
    code, out = told("--tier", tier)
    assert (code, problem in out) == (1, True), out
    assert problem in members(tmp_path)["report.txt"].decode()
    assert kernel.leaked == []


@pytest.mark.parametrize(
    ("behaviour", "remedy"),
    [
        (Behaviour(release="6.11.5"), "update it to 6.16"),
        (Behaviour(user_queue="-1"), "boot with amdgpu.user_queue=1"),
        (Behaviour(firmware={"me": 2780, "pfp": 2840, "mec": 3049, "mes": 123}), "want 3050"),
        (Behaviour(errors={"/proc/sys/kernel/osrelease": errno.EACCES}), ""),
    ],
    ids=["Linux", "parameter", "firmware", "nothing is said"],
)
def test_what_the_system_says(behaviour, remedy):
    """One remedy for each thing that is too old."""
    found = [finding.remedy for finding in findings(FakeKernel(behaviour), "t2") if finding.remedy]
    assert len(found) == (1 if remedy else 0)
    assert all(remedy in said for said in found)


def test_amdkfd_needs_less():
    for release, fits in (("6.12.0", True), ("6.9.3-arch1", False), ("7.1", True)):
        (finding,) = findings(FakeKernel(Behaviour(release=release)), "t1")
        assert (finding.remedy == "") is fits


def test_a_folder_that_is_not_there(told, tmp_path):
    assert told("--out", tmp_path / "none" / "card.tar.gz")[0] == 2
