"""A draft model from where a user names it: the command line, Python, a server."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from contract.errors import DoesNotFit, ModelFileError, RequestError
from contract.types import SamplingParams
from harness.cli.main import main
from harness.host import open as host_open
from harness.host.open import prepare_session
from harness.host.options import SessionOptions
from harness.host.session import Session
from harness.serve.model import ModelOptions
from harness.serve.run import ServeOptions, running
from reference.memory.planner import MemoryPlan
from tests.long_cases import long_except
from tests.serve.http import Http
from zinc_rt import LLM
from zinc_rt import SamplingParams as Sampling

pytestmark = pytest.mark.usefixtures("unmeasured_steps")
TIERS = ("cpu", "native")
PROMPT = tuple(range(7, 40))
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.9, top_k=40, seed=5)
SyntheticModel = Callable[..., Path]


@pytest.fixture(scope="module")
def target(synthetic_model) -> Path:
    return synthetic_model(architecture="qwen3", quant="q4_k_m", layers=3)


@pytest.fixture(scope="module")
def drafts(synthetic_model, target) -> dict[str, Path]:
    """A model that is always right and one that is mostly wrong, of fewer layers."""
    other = synthetic_model(architecture="llama", quant="q8_0", layers=1, seed=9)
    return {"itself": target, "another": other}


def options(tier: str, draft_model: Path | None = None, **more: object) -> SessionOptions:
    draft = 0 if draft_model is None else 6
    built = SessionOptions(tier=tier, context=128, draft=draft, draft_model=draft_model)
    return replace(built, **more)  # type: ignore[arg-type]


def answer(path: Path, with_options: SessionOptions, sampling: SamplingParams) -> list[int]:
    with Session.open(path, with_options) as session:
        generation = session.generate(PROMPT, sampling, 40)
        for _ in generation:
            pass
        tokens = list(generation.tokens)
        done = session.engine.statistics.speculation
    assert (done.drafted > 0) == (with_options.draft_model is not None)
    return tokens


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("tier", long_except(TIERS, "native"))
def test_answers_are_those_without_it(target, drafts, tier, sampling):
    plain = answer(target, options(tier), sampling)
    assert len(plain) == 40
    for path in drafts.values():
        assert answer(target, options(tier, path), sampling) == plain


@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
def test_a_planted_draft_model_is_right_so_often(synthetic_model, right):
    """Of other weights and sizes; what is right depends on the token before alone."""
    fields = {"architecture": "qwen3", "quant": "q4_k_m"}
    model = synthetic_model(**fields, draft_agreement=1.0, layers=3)
    drafting = synthetic_model(**fields, draft_agreement=right, layers=1, seed=9)
    with Session.open(model, replace(options("native", drafting), draft=1, context=256)) as session:
        for _ in session.generate(PROMPT, GREEDY, 200):
            pass
        done = session.engine.statistics.speculation
    assert done.accepted == pytest.approx(right * done.drafted, abs=0.15 * done.drafted * right)
    assert done.drafted > (60 if right else 0)


def test_another_vocabulary_is_refused_before_anything_is_loaded(
    target, synthetic_model, monkeypatch
):
    def loaded(*arguments: object) -> NoReturn:
        raise AssertionError("the model was loaded first")

    monkeypatch.setattr(host_open, "load_runner", loaded)
    other = synthetic_model(architecture="gemma3", quant="q8_0")
    with pytest.raises(RequestError, match=r"draft_model: .*token 0 is '<pad>'"):
        Session.open(target, options("cpu", other))


def test_a_file_that_is_no_model_is_named(target, tmp_path):
    path = tmp_path / "none.gguf"
    path.write_bytes(b"no model")
    with pytest.raises(ModelFileError, match=r"none\.gguf"):
        Session.open(target, options("cpu", path))


def test_its_memory_is_part_of_the_budget(target, drafts):
    """The context is as long as leaves room for both."""

    def plans(budget: int | None) -> tuple[MemoryPlan, MemoryPlan]:
        built = options("cpu", drafts["another"], memory_budget=budget, context=None)
        with ExitStack() as owned:
            prepared = prepare_session(target, built, owned)
            assert prepared.drafting is not None
            return prepared.plan, prepared.drafting.plan

    whole, beside = plans(None)
    assert beside.budgeted > 0
    both = whole.budgeted + beside.budgeted
    assert plans(both)[0].context == whole.context
    tight = both - whole.kv // 2
    shorter, beside_shorter = plans(tight)
    assert shorter.context < whole.context
    assert shorter.budgeted + beside_shorter.budgeted <= tight
    with pytest.raises(DoesNotFit):
        plans(1 << 16)


def test_the_command_line_takes_it(target, drafts, capsys):
    said = []
    for more in ((), ("--draft-model", str(drafts["another"]))):
        run = ["run", "--model", str(target), "--tier", "cpu", "--context", "128", "-n", "20"]
        assert main([*run, *more, "--json", "Hello"]) == 0
        said.append(json.loads(capsys.readouterr().out))
    assert said[0]["text"] == said[1]["text"]


def test_python_takes_it(target, drafts):
    texts = []
    for path in (None, drafts["itself"]):
        with LLM(target, tier="cpu", context=128, draft_model=path, progress=False) as llm:
            outputs = llm.generate(["abc", "x y"], Sampling(max_tokens=12, temperature=0.0))
            texts.append([output.text for output in outputs])
    assert texts[0] == texts[1]


def test_a_server_takes_it(target, drafts, tmp_path):
    """Several at once, and its log-probabilities to the last bit."""
    said = []
    for path in (None, drafts["itself"]):
        session = options("cpu", path, slots=2, top_log_probabilities=3)
        model = ModelOptions(session, "tiny", tmp_path / "digests.json")
        ledger = tmp_path / f"{len(said)}.sqlite"
        with running(ServeOptions(target, model, cache_dir=tmp_path, ledger=ledger)) as server:
            body = {"prompt": "abc", "max_tokens": 16, "temperature": 0, "logprobs": 2}
            answered = Http(server.url).post("/v1/completions", body).json
            said.append(answered["choices"][0])
            driver = server.service.model.driver
            drafted = driver.call(lambda engine: engine.statistics.speculation.drafted)
            assert (drafted > 0) == (path is not None)
    assert said[0] == said[1]
    assert np.isfinite(said[0]["logprobs"]["token_logprobs"]).all()
