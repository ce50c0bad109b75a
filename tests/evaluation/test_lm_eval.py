"""lm-evaluation-harness itself, in process and against the server: equal results on every tier."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from harness.tiers import open_tier
from tests.cli.conftest import environment
from tests.needs import missing, need_device
from tests.paths import ROOT
from tests.patience import PROCESS_SECONDS
from zinc_rt import LLM, serve

FOLDER = os.environ.get("ZINC_RT_LM_EVAL", "")
"""A folder of ``pip install --target``, for a harness that is installed nowhere else."""
CONTEXT = 96
TIERS = ("cpu", "native", "opencl")
TASKS = ("arc", "hellaswag", "lambada", "wikitext", "answers")
pytestmark = pytest.mark.lm_eval


@pytest.fixture(autouse=True, scope="module")
def lm_eval_is_there() -> None:
    """``pip install 'lm_eval[api]'``, or a folder that ZINC_RT_LM_EVAL names."""
    if not FOLDER and find_spec("lm_eval") is None:
        missing("lm_eval is not installed", "pip install 'lm_eval[api]', or name its folder")


QUESTIONS = [
    {"question": f"What is {n} and {n + 1}?", "choices": [f"It is {2 * n + d}" for d in (0, 1, 5)],
     "answer": 1}
    for n in range(4)
]  # fmt: skip
STORIES = [
    {"context": f"A dog number {n} runs and", "endings": ["barks loudly", "reads a book", "flies"],
     "label": n % 3}
    for n in range(3)
]  # fmt: skip
TEXTS = [{"text": f"The quick brown fox {n} jumps over the lazy dog"} for n in range(4)]
PAGES = [{"page": "one two three four five six seven eight nine ten " * n} for n in (1, 5)]
COMMON = "dataset_path: json\noutput_type: {kind}\ntest_split: test\n"
MULTIPLE = "metric_list:\n  - metric: acc\n  - metric: acc_norm\n"
DEFINITIONS = {
    "arc": (
        "multiple_choice",
        QUESTIONS,
        "doc_to_text: 'Question: {{question}}\\nAnswer:'\ndoc_to_choice: choices\n"
        "doc_to_target: answer\n" + MULTIPLE,
    ),
    "hellaswag": (
        "multiple_choice",
        STORIES,
        "doc_to_text: context\ndoc_to_choice: endings\ndoc_to_target: label\n" + MULTIPLE,
    ),
    "lambada": (
        "loglikelihood",
        TEXTS,
        "doc_to_text: \"{{text.split(' ')[:-1]|join(' ')}}\"\n"
        "doc_to_target: \"{{' '+text.split(' ')[-1]}}\"\n"
        "metric_list:\n  - metric: perplexity\n  - metric: acc\n",
    ),
    "wikitext": (
        "loglikelihood_rolling",
        PAGES,
        "doc_to_text: ''\ndoc_to_target: page\nmetric_list:\n  - metric: word_perplexity\n",
    ),
    "answers": (
        "generate_until",
        TEXTS,
        "doc_to_text: text\ndoc_to_target: text\ngeneration_kwargs:\n  until: ['q']\n"
        "  max_gen_toks: 12\nmetric_list:\n  - metric: exact_match\n",
    ),
}
IN_PROCESS = (ROOT / "docs" / "examples" / "evaluate.py",)
UNCHANGED = ("-m", "lm_eval")
Samples = dict[str, list[Any]]
Evaluate = Callable[..., Samples]


@pytest.fixture(scope="module")
def evaluate(tmp_path_factory) -> Evaluate:
    """``evaluate(folder, *arguments)`` runs all tasks: by task what each request was answered."""
    folder = tmp_path_factory.mktemp("tasks")
    for name, (kind, documents, lines) in DEFINITIONS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(one) + "\n" for one in documents))
        files = f"dataset_kwargs:\n  data_files:\n    test: {data}\n"
        text = f"task: zinc_{name}\n{COMMON.format(kind=kind)}{files}{lines}"
        (folder / f"{name}.yaml").write_text(text)
    paths = [str(ROOT), str(ROOT / "harness" / "python"), *filter(None, [FOLDER])]

    def run(output: Path, *arguments: object, program: Sequence[object] = IN_PROCESS) -> Samples:
        named = {
            **environment(), "PYTHONPATH": os.pathsep.join(paths), "HF_HOME": str(folder / "hub"),
            "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, *map(str, (*program, *arguments)),
             "--include_path", folder, "--tasks", ",".join(f"zinc_{name}" for name in TASKS),
             "--output_path", output, "--log_samples"],
            env=named, capture_output=True, text=True, timeout=PROCESS_SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return {name: answered(output, name) for name in TASKS}

    return run


def answered(folder: Path, task: str) -> list[Any]:
    """What the model answered each request of a task, as the harness kept it."""
    (path,) = folder.rglob(f"samples_zinc_{task}_*.jsonl")
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    return [sample["resps"] for sample in sorted(samples, key=lambda one: one["doc_id"])]


@pytest.fixture(scope="module")
def on_cpu(evaluate, tiny_model_path, tmp_path_factory) -> Samples:
    output = tmp_path_factory.mktemp("cpu")
    named = f"model={tiny_model_path},tier=cpu,context={CONTEXT}"
    return evaluate(output, "--model", "zinc_rt", "--model_args", named)


def test_results_are_those_of_score(on_cpu, tiny_model_path):
    with LLM(tiny_model_path, tier="cpu", context=CONTEXT, progress=False) as llm:
        for sample, document in zip(on_cpu["lambada"], TEXTS, strict=True):
            context, last = document["text"].rsplit(" ", 1)
            whole = llm.tokenizer.encode(f"{context} {last}", add_bos=False)
            start = len(llm.tokenizer.encode(context, add_bos=False))
            (score,) = llm.score([whole], start=start)
            ((log, greedy),) = sample[0]
            assert float(log) == sum(score.log_probabilities[start:].tolist())
            assert str(greedy) == str(score.greedy)
    assert all(len(sample) == 3 for sample in on_cpu["arc"])


@pytest.mark.parametrize("tier", TIERS[1:])
def test_tiers_agree_to_the_last_digit(evaluate, on_cpu, tiny_model_path, tmp_path, tier):
    need_device(lambda: open_tier(tier)).close()
    named = f"model={tiny_model_path},tier={tier},context={CONTEXT},slots=2"
    assert evaluate(tmp_path, "--model", "zinc_rt", "--model_args", named) == on_cpu


@pytest.mark.parametrize("tier", TIERS)
def test_the_server_gives_the_same_results(evaluate, on_cpu, tiny_model_path, tmp_path, tier):
    """Its own tokenizer is used, several requests at a time, several texts a request."""
    need_device(lambda: open_tier(tier)).close()
    ledger = tmp_path / "ledger.sqlite"
    with serve(tiny_model_path, tier=tier, context=CONTEXT, port=0, ledger=ledger) as server:  # type: ignore[arg-type]
        named = (
            f"model={tiny_model_path.stem},base_url={server.url}/v1/completions,tokenizer_backend=remote,"
            f"num_concurrent=3,max_length={CONTEXT}"
        )
        found = evaluate(
            tmp_path / "out", "--model", "local-completions", "--model_args", named,
            "--batch_size", 2, program=UNCHANGED,
        )  # fmt: skip
    assert found == on_cpu


def test_other_weights_give_other_results(evaluate, on_cpu, synthetic_model, tmp_path):
    """Negative control."""
    other = synthetic_model(architecture="qwen3", quant="q4_k_m", seed=8)
    named = f"model={other},tier=cpu,context={CONTEXT}"
    found = evaluate(tmp_path, "--model", "zinc_rt", "--model_args", named)
    assert found["lambada"] != on_cpu["lambada"]
