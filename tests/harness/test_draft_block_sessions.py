"""The draft block of a file, or its head, from where a user meets it: sessions, the command line, a
server, the benchmark."""

import atexit
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from contract.arithmetic import PAGE_TOKENS
from contract.errors import DoesNotFit
from contract.ir.graph import BufferKind
from contract.shape_key import ShapeKey
from contract.types import SamplingParams
from harness.bench import drafts
from harness.bench.drafts import DraftsPlan, render_drafts, run_drafts
from harness.cli.main import main
from harness.host.drafting import drafts_of, load_drafter
from harness.host.open import load_runner, prepare_session
from harness.host.options import SessionOptions
from harness.host.session import Session
from harness.progress import NullProgress
from harness.serve.model import ModelOptions
from harness.serve.run import ServeOptions, running
from reference.engine.draft_block import DraftBlock
from reference.engine.output_processor import OutputProcessor
from reference.hidden_rows import SHARED_STATES
from tests.engine.headed_models import head_of
from tests.engine.test_draft_block import drafting_model
from tests.long_cases import long_except
from tests.named_tiers import open_by_name
from tests.needs import need_installed
from tests.serve.http import Http

pytestmark = pytest.mark.usefixtures("unmeasured_steps")
PROMPT = tuple(range(7, 40))
SyntheticModel = Callable[..., Path]


@pytest.fixture(scope="module", params=["qwen35", "qwen3 head"])
def model(request, synthetic_model) -> Path:
    return drafting_model(synthetic_model, request.param)


def options(model: Path, tier: str, draft: int, **more: object) -> SessionOptions:
    built = SessionOptions(tier=tier, context=128, draft=draft, draft_model=head_of(model))
    return replace(built, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "tier", long_except(("cpu", "native", "opencl", "vulkan", "cuda"), "native", "cuda")
)
def test_answers_are_those_without_it(model, tier):
    """Greedy, sampled, and cut at a stop string."""
    open_by_name(tier).close()
    # A processor that plays a graphics card takes a second for a few tokens.
    prompt, count = (PROMPT[:9], 12) if tier == "vulkan" else (PROMPT, 40)
    said = []
    for draft in (0, 6):
        with Session.open(model, options(model, tier, draft)) as session:
            answers = []
            for sampling in (SamplingParams(), SamplingParams(temperature=0.9, top_k=40, seed=5)):
                generation = session.generate(prompt, sampling, count)
                answers.append(("".join(piece.text for piece in generation), generation.tokens))
            stop = answers[0][0][5:7]
            generation = session.generate(prompt, SamplingParams(), count, (stop,))
            answers.append(("".join(piece.text for piece in generation), generation.tokens))
            assert generation.stop_string == stop
            assert (session.engine.statistics.speculation.drafted > 0) == (draft > 0)
        said.append(answers)
    assert said[0] == said[1]


@pytest.mark.parametrize("tier", ["cpu", "native", "opencl", "cuda"])
def test_its_memory_is_planned(model, tier, monkeypatch):
    """The plan has the block's own buffers and none that it shares with the model; it is part of
    the budget, and a byte less is too little, or has CUDA stream weights. What verifies its drafts
    is lowered when it is loaded; on a device with memory of its own, as OpenCL's is taken for here,
    what reads a sequence's prompt, too, also where prompts have buckets of fewer rows."""
    open_by_name(tier).close()
    with ExitStack() as owned:
        prepared = prepare_session(model, options(model, tier, 6), owned)
        if tier == "opencl":
            largest = prepared.limits.largest
            fewer = ShapeKey(12, min(4, largest.rows))
            buckets = sorted({*prepared.tier.buckets(largest), fewer}, key=ShapeKey.pack)
            monkeypatch.setattr(prepared.tier, "buckets", lambda _: buckets)
        runner = owned.enter_context(
            load_runner(prepared.model, prepared.tier, prepared.limits, NullProgress())
        )
        assert not runner.executable.recorded
        if tier == "opencl":
            own_memory = replace(prepared.tier.info, host_unified=False)
            monkeypatch.setattr(prepared.tier, "_info", own_memory)
        drafter = load_drafter(prepared.drafting, runner, 6, owned, NullProgress())
        few = 1 + drafts_of(runner, 6)
        shapes = [ShapeKey(1, 1), ShapeKey(few, few)]
        if not prepared.tier.info.host_unified:
            most = runner.limits.slot_pages * PAGE_TOKENS
            large = [bucket for bucket in runner.executable.buckets if bucket.tokens > few]
            shapes += [replace(one, tokens=min(one.tokens, most)) for one in large]
        assert {runner.executable.bucket_of(one) for one in shapes} == {*runner.executable.recorded}
        assert isinstance(drafter, DraftBlock)
        assert prepared.drafting is not None
        plan, graph = prepared.drafting.plan, drafter._runner.graph
        held = prepared.tier.footprint(graph, drafter._runner.limits.largest)
        own = drafter._runner._buffers.keys()
        weights = {decl.name for decl in graph.of_kind(BufferKind.WEIGHT)}
        shared = "token_embd" if head_of(model) else "output"
        assert weights - own == {f"model.{shared}.weight"}
        assert not own & {*SHARED_STATES}
        sizes = (held.buffers.get(name, 0) + held.mapped.get(name, 0) for name in weights & own)
        assert sum(plan.weights.values()) == sum(sizes) > 0
        assert plan.kv * len(prepared.model.config.attention_layers) == prepared.plan.kv
        budget = prepared.plan.budgeted + plan.budgeted
    with ExitStack() as owned:
        fitting = prepare_session(model, options(model, tier, 6, memory_budget=budget), owned)
        assert fitting.plan.context == 128
        assert not fitting.residency.streamed
    with ExitStack() as owned:
        # What streams the layers of the model with a head takes more room than they do.
        if tier != "cuda" or head_of(model) is not None:
            owned.enter_context(pytest.raises(DoesNotFit))
        less = prepare_session(model, options(model, tier, 6, memory_budget=budget - 1), owned)
        assert less.residency.streamed


def test_the_command_line_tells_how_many_were_accepted(model, capsys):
    said = []
    head = head_of(model)
    for draft in ("0", "5"):
        run = ["run", "--model", str(model), "--tier", "native", "--context", "128", "-n", "30"]
        run += [] if head is None else ["--draft-model", str(head)]
        assert main([*run, "--draft", draft, "--json", "Hello"]) == 0
        said.append(json.loads(capsys.readouterr().out))
        assert main([*run, "--draft", draft, "Hello"]) == 0
        assert ("drafts accepted" in capsys.readouterr().err) == (draft == "5")
    assert said[0]["text"] == said[1]["text"]
    assert said[0]["drafts"] == {"drafted": 0, "accepted": 0}
    assert said[1]["drafts"]["drafted"] >= said[1]["drafts"]["accepted"] > 0


BODIES = (
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.9, "seed": 5, "logprobs": 1},
    {"temperature": 0, "structured_outputs": {"grammar": 'root ::= ("ab" | "c")+ "."'}},
    {"temperature": 0, "structured_outputs": {"json": {"type": "array"}}},
    {"temperature": 0, "stop": ["a", "e"]},
)


def test_a_server_drafts_with_it(model, tmp_path):
    """Several at once in two slots, with a grammar, a schema, stop strings and log-probabilities to
    the last bit."""
    said = []
    for draft in (0, 6):
        session = options(model, "native", draft, slots=2, top_log_probabilities=3)
        served = ModelOptions(session, "tiny", tmp_path / "digests.json")
        ledger = tmp_path / f"{draft}.sqlite"
        with (
            running(ServeOptions(model, served, cache_dir=tmp_path, ledger=ledger)) as server,
            ThreadPoolExecutor(len(BODIES)) as clients,
        ):

            def choice(body: dict[str, object], url: str = server.url) -> object:
                asked = {"prompt": "abc", "max_tokens": 24, **body}
                return Http(url).post("/v1/completions", asked).json["choices"][0]

            said.append([*clients.map(choice, BODIES)])
            driver = server.service.model.driver
            drafted = driver.call(lambda engine: engine.statistics.speculation.drafted)
            assert (drafted > 0) == (draft > 0)
    assert said[0] == said[1]


def test_the_benchmark_counts_equal_answers(model, monkeypatch):
    """The control: where wrong drafts are accepted it says so."""
    monkeypatch.setattr(drafts, "SEQUENCES", (1,))
    head = head_of(model)
    plan = DraftsPlan(model, ("native",), 1, decode_tokens=24, repeat=1, draft_model=head)
    (result,) = run_drafts(plan)["results"]
    assert result["drafter"] == ("draft block" if head is None else head.name)
    assert result["equal"] == result["answers"] == 2
    assert result["tokens_a_step"] > 1
    take = OutputProcessor._take_drafted

    def accepting(self: OutputProcessor, part, tokens, output):  # type: ignore[no-untyped-def]
        accepted = np.full_like(output.accepted, part.end_row - part.first_row - 1)
        return take(self, part, tokens, replace(output, accepted=accepted))

    monkeypatch.setattr(OutputProcessor, "_take_drafted", accepting)
    report = run_drafts(plan)
    assert report["results"][0]["equal"] < 2
    assert "of 2 answers equal" in render_drafts(report)


@pytest.mark.peer
def test_the_benchmark_measures_the_peer_too(synthetic_model):
    """Its own drafts from the prompt, on the same file."""
    need_installed("llama_cpp", "peer")
    import llama_cpp

    path = synthetic_model(architecture="qwen3", quant="q4_k_m")
    plan = DraftsPlan(path, ("llama.cpp",), 1, decode_tokens=16, repeat=1, draft=3)
    report = run_drafts(plan)
    # The binding leaves both open for good, of which the interpreter would complain at its end.
    for file in (llama_cpp._utils.outnull_file, llama_cpp._utils.errnull_file):
        atexit.register(file.close)
    assert report["results"][0]["answers"] == 2
    assert "llama.cpp, 1 at once, drafts from the prompt" in render_drafts(report)
