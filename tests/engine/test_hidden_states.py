"""Hidden states that an engine hands over: what logits are computed from, the same bits always."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from contract.errors import RequestError
from contract.opcodes import Opcode
from contract.types import FinishReason, Request
from reference.engine import Engine, EngineOptions
from reference.limits import Limits
from reference.matrix import Matrix
from reference.model.weights import weight_bytes
from reference.ops import DEFINITIONS
from reference.runner import HIDDEN, LOGITS
from tests.named_tiers import named, quick_tier, runner_on

LIMITS = Limits(slots=3, context=96, pages=18, step_tokens=32, step_rows=8, hidden_states=True)
FAMILIES = ("llama", "qwen35", "gemma3")
TIERS = named("native", "opencl", "vulkan")
PROMPT = tuple((i * 37) % 250 for i in range(50))
Rows = NDArray[np.float32]


def rows_of(engine: Engine, number: int, prompt: tuple[int, ...], output: str = HIDDEN) -> Rows:
    """All rows of a request, which other requests may share the engine with."""
    parts: list[tuple[int, Rows]] = []

    def take(first: int, rows: Rows) -> None:
        parts.append((first, rows))

    engine.submit(Request(number, prompt, 0), take, output=output)
    ends = [event.finish_reason for event in engine.run() if event.request_id == number]
    assert ends == [FinishReason.LENGTH]
    firsts = np.cumsum([0] + [len(rows) for _, rows in parts]).tolist()
    assert [first for first, _ in parts] == firsts[:-1]
    return np.concatenate([rows for _, rows in parts])


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_computed_from_them(synthetic_model, family):
    """The head's definition, given the hidden states, gives the logits of the same positions."""
    with runner_on(
        synthetic_model(architecture=family, quant="q8_0"), quick_tier, LIMITS
    ) as runner:
        engine = Engine(runner)
        hidden, logits = rows_of(engine, 1, PROMPT), rows_of(engine, 2, PROMPT, LOGITS)
        (head,) = (node for node in runner.graph.nodes if node.opcode is Opcode.LM_HEAD)
        decl = runner.graph.buffers[head.operands["weight"].buffer]
        blocks = weight_bytes(runner.model.file, decl).reshape(decl.shape[0], -1)
        weight = Matrix(decl.dtype, decl.shape, blocks)
        computed = DEFINITIONS[Opcode.LM_HEAD](x=hidden, weight=weight)
    assert hidden.shape == (len(PROMPT), runner.model.config.hidden)
    assert computed.tobytes() == logits.tobytes()


@pytest.mark.parametrize("name", TIERS)
def test_they_are_the_same_on_every_tier_and_in_any_company(synthetic_model, name):
    """Alone on the CPU tier in one chunk; elsewhere beside requests that sample, and chunked."""
    path = synthetic_model(architecture="qwen3", quant="q4_k_m")
    with runner_on(path, quick_tier, replace(LIMITS, step_tokens=64, step_rows=60)) as runner:
        alone = rows_of(Engine(runner), 1, PROMPT)
    with runner_on(path, TIERS[name], LIMITS) as runner:
        engine = Engine(runner, EngineOptions(chunk_tokens=11))
        for number in (2, 3):
            engine.submit(Request(number, PROMPT[: 10 * number], 30, ignore_end=True))
            engine.step()
        assert rows_of(engine, 1, PROMPT).tobytes() == alone.tobytes()
        assert rows_of(engine, 4, PROMPT[:-1]).tobytes() == alone[:-1].tobytes()


def test_an_engine_without_them_refuses(tiny_model_path):
    limits = replace(LIMITS, hidden_states=False)
    with runner_on(tiny_model_path, quick_tier, limits) as runner:
        engine = Engine(runner)
        with pytest.raises(RequestError, match="hidden states"):
            engine.submit(Request(1, PROMPT, 0), lambda first, rows: None, output=HIDDEN)
        assert HIDDEN not in runner.graph.buffers
        assert engine.idle
