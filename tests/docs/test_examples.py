"""Every script of docs/examples runs on a tiny model and prints what the engine computes."""

import ast
import json
import math
import os
import re
import runpy
from collections.abc import Callable

import pytest

from tests.paths import ROOT
from tests.serve.conftest import serve, server
from tests.serve.speaking_models import HERMES, speaking_model
from zinc_rt import LLM, SamplingParams

__all__ = ["serve", "server"]
EXAMPLES = ROOT / "docs" / "examples"
MAX_LINES = 50
ELSEWHERE = {"evaluate": ROOT / "tests" / "evaluation" / "test_lm_eval.py"}
"""Examples that need more than this project's test packages, and the file that runs them."""
LONG = "independent"
"""How the files of an implementation begin that test_independent.py tests."""
Play = Callable[[str], str]
ALONE = {"tier": "cpu", "slots": 1, "progress": False}


@pytest.fixture
def play(
    tiny_model_path, tmp_path, monkeypatch,
    capsys,
) -> Play:  # fmt: skip
    """``play(name)`` runs a script as its user does and returns what it printed."""
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("ZINC_RT_MODEL", str(tiny_model_path))
    monkeypatch.setenv("ZINC_RT_TIER", "cpu")
    paths = (str(ROOT), str(ROOT / "harness" / "python"), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.chdir(tmp_path)

    def run(name: str) -> str:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


def constant(name: str, variable: str) -> object:
    """The value of a constant at the top of an example."""
    for node in ast.parse((EXAMPLES / f"{name}.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == variable:
            return ast.literal_eval(node.value)
    raise AssertionError(f"{name}.py has no constant {variable}")


def test_generate(play, tiny_model_path):
    """Three prompts in one call print the bits of each prompt alone."""
    printed = play("generate")
    prompts = constant("generate", "PROMPTS")
    assert isinstance(prompts, list)
    sampled = SamplingParams(max_tokens=32, temperature=0.8, seed=7)
    with LLM(tiny_model_path, **ALONE) as llm:
        texts = [prompt + llm.generate(prompt, sampled)[0].text for prompt in prompts]
    assert printed == "".join(f"{text}\n--\n" for text in texts)


def test_chat(play):
    printed = play("chat")
    questions = constant("chat", "QUESTIONS")
    assert isinstance(questions, list)
    assert all(f"> {question}\n" in printed for question in questions)
    counts = re.findall(r"\((\d+) of (\d+) prompt tokens were cached\)", printed)
    (first, first_all), (second, second_all) = [tuple(map(int, count)) for count in counts]
    assert first == 0
    assert first_all // 16 * 16 <= second < second_all  # whole pages of the first turn


def test_stream(play, tiny_model_path):
    """The pieces together are the text of ``generate``."""
    printed = play("stream")
    with LLM(tiny_model_path, **ALONE) as llm:
        (output,) = llm.generate("Once upon a time", SamplingParams(max_tokens=48))
    end = f"({len(output.tokens)} tokens, finish reason {output.completion.finish_reason})"
    assert printed == f"{output.text}\n{end}\n"


def test_score(play, server):
    """The scores are those that ``echo`` gives over HTTP, and their sum is exact."""
    from openai import OpenAI

    printed = play("score")
    text = str(constant("score", "TEXT"))
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        scored = client.completions.create(
            model="tiny", prompt=text, echo=True, logprobs=1, max_tokens=0
        )
    logprobs = scored.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    values = logprobs.token_logprobs[1:]
    assert re.findall(r"^ *(-[\d.]+)  '", printed, re.MULTILINE) == [f"{v:.4f}" for v in values]
    assert f"sum {math.fsum(values)!r}, perplexity " in printed


def test_tools(play, tmp_path, monkeypatch):
    """The call obeys the parameters, and its result goes back to the model."""
    monkeypatch.setenv("ZINC_RT_MODEL", str(speaking_model(tmp_path, HERMES)))
    printed = play("tools")
    calls = re.findall(r"^call: (.*) -> 12 degrees and rain in (.*)$", printed, re.MULTILINE)
    assert calls
    cities = constant("tools", "CITIES")
    assert isinstance(cities, dict)
    for arguments, city in calls:
        assert json.loads(arguments) == {"city": city}
        assert city in cities["enum"]
    assert "answer: " in printed


def test_openai_client(play, server, monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
    printed = play("openai_client")
    assert "fingerprint: exact-2-" in printed
    assert printed.endswith("streamed and whole are the same: True\n")


def test_verify(play):
    """The answer is proved, and one that was changed is not."""
    printed = play("verify")
    assert "\nthe answer: identical\n" in printed
    assert "\nwith one character more: different: choices[0].text: " in printed


def test_examples_are_short_and_all_tested():
    examples = [path for path in EXAMPLES.glob("*.py") if not path.stem.startswith(LONG)]
    names = {path.stem for path in examples}
    assert all(f'"{name}.py"' in path.read_text() for name, path in ELSEWHERE.items())
    tested = {name.removeprefix("test_") for name in globals() if name[5:] in names}
    assert names == tested | ELSEWHERE.keys()
    for path in examples:
        assert len(path.read_text().splitlines()) <= MAX_LINES, path.name
