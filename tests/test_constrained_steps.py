"""Masks, biases and log-probabilities of a step: the same bits on every tier, in any company."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from contract.tier import Tier
from harness import tiers
from reference.cpu.tier import CpuTier
from reference.model.open import open_model
from reference.runner import ModelRunner
from reference.sched.constraints import pack_mask
from tests.constrained import LIMITS, VOCAB, WANTED, Constrained, Row, row_of, run, step_input
from tests.named_tiers import named, runner_on
from tests.needs import need_device
from tests.opencl_parts import SOME, holding


def _banked() -> Tier:
    """As devices have it whose memory the host does not share."""
    from accel.opencl.runtime import Choices
    from accel.opencl.tier import OpenClTier

    cache = tiers.kernel_cache("opencl")
    return OpenClTier(choices=Choices(shared_addresses=False, cache=cache))


TIERS = named("native", "opencl") | {"opencl-banked": lambda: need_device(_banked)}
SEQUENCES = (Constrained(8, 5), Constrained(2, 17, temperature=0.9), Constrained(4, 9))


@pytest.fixture(scope="module", params=TIERS)
def runner(request: pytest.FixtureRequest, tiny_model_path: Path) -> Iterator[ModelRunner]:
    model = open_model(tiny_model_path)
    with (
        model.file,
        holding(SOME, request.param == "opencl-banked"),
        TIERS[request.param]() as tier,
        ModelRunner(model, tier, LIMITS) as runner,
    ):
        yield runner


@pytest.fixture(scope="module")
def alone(tiny_model_path: Path) -> list[list[Row]]:
    """Every sequence by itself on the CPU tier, one step at a time."""
    with runner_on(tiny_model_path, CpuTier, LIMITS) as runner:
        return [run(runner, [sequence])[0] for sequence in SEQUENCES]


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2), (0,)], ids=str)
def test_company_depth_and_tier_change_no_bit(runner, alone, order, depth):
    """Masks and biases lie elsewhere in the inputs in every one of these."""
    together = run(runner, [SEQUENCES[index] for index in order], depth=depth)
    assert together == [alone[index] for index in order]


def test_constraints_decide_tokens(alone, runner):
    """The negative control: without the masks, or with another's, other tokens come out."""

    class Unmasked(Constrained):
        def mask(self, position: int) -> None:
            return None

    class Misled(Constrained):
        def mask(self, position: int) -> np.ndarray | None:
            return Constrained(self.seed + 1, self.length).mask(position)

    for other in (Unmasked, Misled):
        rows = run(runner, [other(s.seed, s.length, s.temperature) for s in SEQUENCES])
        for changed, expected in zip(rows, alone, strict=True):
            assert [row.token for row in changed] != [row.token for row in expected]


def test_an_empty_mask_ends_its_row_only(runner, alone):
    """Token -1 and a NaN log-probability; the model's list is as ever, and so are the others."""
    first, *others = SEQUENCES
    rows = run(runner, [replace(first, forbidden=first.length), *others])
    ended = rows[0][0]
    assert ended.token == -1
    assert np.isnan(np.frombuffer(ended.log_probability, np.float32)).all()
    assert (ended.top_ids, ended.top_logs) == (alone[0][0].top_ids, alone[0][0].top_logs)
    assert rows[1:] == alone[1:]


def test_broken_logits_end_their_row_only(runner, alone):
    """A NaN among the keys of slot 0: no mask hides it, and nobody else sees it."""
    for number in range(3):
        output = runner.step(step_input(SEQUENCES, number))
        if number == 0:
            kv = runner.buffer("state.kv[0]").view(np.float32).reshape(LIMITS.pages, 2, 16, -1)
            kept = kv[0, 0, 0].copy()
            kv[0, 0, 0] = np.nan
    kv[0, 0, 0] = kept
    assert output.token.tolist() == [-1, *(rows[2].token for rows in alone[1:])]
    assert np.isnan(output.log_probability).tolist() == [True, False, False]
    assert (output.top_ids[0] == -1).all()
    assert np.isnan(output.top_log_probabilities[0]).all()
    for index in (1, 2):
        assert output.top_log_probabilities[index].tobytes() == alone[index][2].top_logs


def test_a_mask_of_an_earlier_step_is_forgotten(runner, alone):
    """Its bits are still in the inputs; a record that names no mask does not look."""
    run(runner, [replace(s, forbidden=s.length) for s in SEQUENCES], steps=1)
    assert run(runner, SEQUENCES) == alone


def test_steps_that_list_nothing_sample_the_same_tokens(runner, alone):
    """They are computed without log-probabilities, between steps that are asked for them."""
    for number, rows in enumerate(zip(*alone, strict=True)):
        listed = number % 2 > 0
        inputs = replace(step_input(SEQUENCES, number), requested=WANTED if listed else ())
        output = runner.step(inputs)
        assert output.token.tolist() == [row.token for row in rows]
        if listed:
            assert [row_of(output, index) for index in range(len(rows))] == list(rows)


def test_more_than_the_limits_allow_is_refused(runner, alone):
    """Too many masks or biases, masks of another vocabulary: nothing was submitted."""
    inputs = step_input(SEQUENCES, 0)
    mask = pack_mask((1, 2), VOCAB)
    most = LIMITS.slots * LIMITS.biases
    for bad in (
        replace(inputs, allowed=np.array([mask] * (LIMITS.masks + 1))),
        replace(inputs, allowed=np.array([mask[:-1]])),
        replace(inputs, bias=np.zeros(most + 1, SEQUENCES[0].biases.dtype)),
    ):
        with pytest.raises(ValueError, match="the limits allow"):
            runner.submit(bad)
    assert run(runner, SEQUENCES) == alone


def test_a_graph_without_masks_takes_none(tiny_model_path):
    model = open_model(tiny_model_path)
    plain = replace(LIMITS, masks=0, biases=0)
    with model.file, CpuTier() as tier, ModelRunner(model, tier, plain) as runner:
        with pytest.raises(ValueError, match=r"masks are .* the limits allow none"):
            runner.submit(step_input(SEQUENCES, 1))
        free = replace(step_input(SEQUENCES, 0), allowed=None, bias=None, requested=WANTED)
        assert len(runner.step(free).log_probability) == len(SEQUENCES)
