"""Files of heads from where a user meets them: written, inspected, opened, changed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from contract.errors import ConfigError, ModelFileError
from contract.types import Request, SamplingParams
from harness.cli.main import main
from harness.host.options import Recording, SessionOptions
from harness.host.session import Session
from reference.engine.drafter import SpeculationStatistics
from reference.sched.drafts import DraftPolicy
from tests.engine.headed_models import head_of
from tests.engine.test_draft_block import drafting_model

PROMPT = tuple(range(7, 40))


@pytest.fixture(scope="module")
def model(synthetic_model) -> Path:
    return drafting_model(synthetic_model, "qwen3 head")


@pytest.fixture(scope="module")
def block_model(synthetic_model) -> Path:
    return drafting_model(synthetic_model, "qwen3 dflash")


def options(model: Path, tier: str) -> SessionOptions:
    return SessionOptions(tier=tier, context=128, draft=1, draft_model=head_of(model))


@pytest.mark.parametrize("kind", ["eagle", "dflash"])
@pytest.mark.parametrize("agreement", [0.0, 0.5, 1.0])
def test_a_written_head_is_right_as_often_as_asked(agreement, kind, tmp_path, monkeypatch):
    """The tokens that are asked are no random ones: each right draft leaves one out."""
    monkeypatch.setattr(DraftPolicy, "draft_count", lambda policy, own, running, most, *_: most)
    path, head = tmp_path / "m.gguf", tmp_path / "h.gguf"
    asked = ["synth", "--arch", "qwen3", "--quant", "q8_0", "--eagle-agreement", str(agreement)]
    assert main([*asked, "--out", str(path), f"--{kind}-out", str(head)]) == 0
    done = speculation(path, head, 1)
    assert done.drafted > 40
    assert done.accepted / done.drafted == pytest.approx(agreement, abs=0.15)


def speculation(path: Path, head: Path, drafts: int) -> SpeculationStatistics:
    """What drafting did for an answer of 100 tokens."""
    built = SessionOptions(tier="native", context=128, draft=drafts, draft_model=head)
    with Session.open(path, built) as session:
        session.engine.submit(Request(0, PROMPT[:5], 100, SamplingParams(), ignore_end=True))
        list(session.engine.run())
        return session.engine.statistics.speculation


def test_a_written_dflash_head_is_right_in_all_rows(tmp_path, monkeypatch):
    """In as many as it has heads: 4 of this size."""
    monkeypatch.setattr(
        DraftPolicy, "draft_count", lambda policy, own, running, most, unread=0: most
    )
    path, head = tmp_path / "m.gguf", tmp_path / "h.gguf"
    asked = ["synth", "--arch", "qwen3", "--quant", "q8_0", "--eagle-agreement", "1"]
    assert main([*asked, "--out", str(path), "--dflash-out", str(head)]) == 0
    done = speculation(path, head, 4)
    assert done.accepted > 0.9 * done.drafted > 70


def test_inspect_tells_what_it_is(model, capsys):
    head = str(head_of(model))
    assert main(["inspect", head]) == 0
    said = capsys.readouterr().out
    assert "an EAGLE-3 head: give it with --draft-model beside its model" in said
    assert "CANNOT" not in said
    assert main(["inspect", head, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["run"]["head"]
    assert (facts["target_layers"], facts["target_hidden"]) == ([1, 1, 0], 256)
    assert (facts["tokens"], facts["own_embedding"], facts["own_output"]) == (256, False, True)
    assert main(["run", "--model", head, "--tier", "cpu", "Hello"]) != 0
    assert "this file with --draft-model" in capsys.readouterr().err


def test_inspect_tells_what_a_dflash_head_is(block_model, capsys):
    head = str(head_of(block_model))
    assert main(["inspect", head]) == 0
    said = capsys.readouterr().out
    assert "a DFlash head: give it with --draft-model beside its model" in said
    assert "blocks of 7 tokens" in said
    assert main(["inspect", head, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["run"]["head"]
    assert (facts["kind"], facts["block"], facts["layers"]) == ("a DFlash head", 8, 1)


def test_pages_on_disk_are_those_of_the_head_too(block_model, tmp_path):
    """A session without the head, and one with another, read none of them."""
    head = head_of(block_model)
    assert head is not None
    other = tmp_path / "other.head"
    other.write_bytes(head.read_bytes().replace(b"DFlash head of", b"Dflash head of"))
    hits = []
    for drafter in (head, None, other, head):
        built = replace(
            options(block_model, "native"), draft_model=drafter, disk_cache=tmp_path / "disk"
        )
        with Session.open(block_model, built) as session:
            answer = list(session.generate(PROMPT, SamplingParams(), 4))
            disk = session.engine.statistics.disk
        assert len(answer) == 4
        assert disk is not None
        hits.append(disk.tokens)
    assert hits == [0, 0, 0, 32]


def test_a_trace_is_refused(model, tmp_path):
    asked = replace(options(model, "cpu"), recording=Recording(trace=tmp_path / "trace"))
    with pytest.raises(ConfigError, match="a trace holds no head"):
        Session.open(model, asked)


def test_a_head_that_changes_under_a_session_is_noticed(model, tmp_path):
    """Steps of tiers that compute in the host's memory may read it."""
    head, copy = head_of(model), tmp_path / "copy.gguf"
    assert head is not None
    copy.write_bytes(head.read_bytes())
    with Session.open(model, replace(options(model, "cpu"), draft_model=copy)) as session:
        with copy.open("r+b") as file:
            file.truncate(copy.stat().st_size // 2)
        with pytest.raises(ModelFileError, match=r"copy\.gguf"):
            for _ in session.generate(PROMPT, SamplingParams(), 40):
                pass
