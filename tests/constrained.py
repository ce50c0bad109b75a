"""Steps with masks, biases and log-probabilities, made without an engine, for the tests of both."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contract.records import LAST_TOKEN, LOGIT_BIAS, QUERY_TOKEN, SAMPLING
from reference.limits import Limits
from reference.ops.log_probabilities import log_probabilities
from reference.ops.sample import sample
from reference.runner import LOG_PROBABILITIES, LOGITS, ModelRunner, StepInput, StepOutput
from reference.sched.constraints import pack_mask

VOCAB = 320
LIMITS = Limits(
    slots=3, context=64, pages=12, step_tokens=40, step_rows=6, masks=3, biases=4,
    top_log_probabilities=5,
)  # fmt: skip
WANTED = (LOGITS, *LOG_PROBABILITIES)


@dataclass(frozen=True, slots=True)
class Row:
    """One sampled token: what the step said of it, and the logits it came from."""

    token: int
    log_probability: bytes
    top_ids: tuple[int, ...]
    top_logs: bytes
    logits: bytes


@dataclass(frozen=True, slots=True)
class Constrained:
    """A sequence whose tokens are constrained in a way that its seed and their position decide.

    ``forbidden`` is the position at which nothing is allowed."""

    seed: int
    length: int
    temperature: float = 0.0
    forbidden: int = -1

    @property
    def prompt(self) -> list[int]:
        """``length`` tokens."""
        return [(self.seed * 31 + 7 * n) % 256 for n in range(self.length)]

    def mask(self, position: int) -> NDArray[np.uint32] | None:
        """None (all allowed) every third position, else some forty tokens."""
        if position == self.forbidden:
            return pack_mask((), VOCAB)
        if position % 3 == 0:
            return None
        rng = np.random.default_rng((self.seed, position))
        return pack_mask(rng.choice(VOCAB, 40, replace=False).tolist(), VOCAB)

    @property
    def biases(self) -> NDArray[np.void]:
        """LOGIT_BIAS of up to four tokens, large enough to decide."""
        rng = np.random.default_rng(self.seed)
        count = self.seed % (LIMITS.biases + 1)
        records = np.zeros(count, LOGIT_BIAS)
        records["token"] = rng.choice(VOCAB, count, replace=False)
        records["bias"] = rng.uniform(-3, 6, count)
        return records

    def record(self, slot: int, position: int) -> NDArray[np.void]:
        """SAMPLING[1], without mask and biases."""
        record = np.zeros(1, SAMPLING)
        record["temperature"], record["top_p"] = self.temperature, 1.0
        record["seed_low"], record["slot"], record["position"] = self.seed, slot, position
        return record


def run(
    runner: ModelRunner, sequences: Sequence[Constrained], steps: int = 8, depth: int = 0
) -> list[list[Row]]:
    """The rows of every sequence: a step of prefill and ``steps`` - 1 of decode, together.

    ``depth`` steps are submitted before the oldest is read. Every row is checked against the
    definitions of rules R9 and R10 on the logits it came with."""
    rows: list[list[Row]] = [[] for _ in sequences]
    in_flight: deque[tuple[StepInput, object]] = deque()
    for number in range(steps):
        inputs = step_input(sequences, number)
        in_flight.append((inputs, runner.submit(inputs)))
        while len(in_flight) > (depth if number < steps - 1 else 0):
            given, submission = in_flight.popleft()
            output = runner.collect(submission)  # type: ignore[arg-type]
            check_by_definition(given, output)
            for index, kept in enumerate(rows):
                kept.append(row_of(output, index))
    return rows


def step_input(sequences: Sequence[Constrained], number: int) -> StepInput:
    """Step ``number`` of all sequences, each in the slot of its place, with pages of its own."""
    tokens = [s.prompt if number == 0 else [LAST_TOKEN] for s in sequences]
    query = np.zeros(sum(map(len, tokens)), QUERY_TOKEN)
    ends = np.cumsum([len(chunk) for chunk in tokens])
    sampling, masks, biases = [], [], []
    for slot, (sequence, chunk, end) in enumerate(zip(sequences, tokens, ends, strict=True)):
        here = slice(int(end) - len(chunk), int(end))
        last = sequence.length - 1 + number
        query["token"][here], query["slot"][here] = chunk, slot
        query["position"][here] = np.arange(last + 1 - len(chunk), last + 1)
        record = sequence.record(slot, last + 1)
        mask = sequence.mask(last + 1)
        if mask is not None:
            masks.append(mask)
            record["mask"] = len(masks)
        record["bias_first"], record["bias_count"] = sum(map(len, biases)), len(sequence.biases)
        biases.append(sequence.biases)
        sampling.append(record)
    pages = np.arange(LIMITS.pages, dtype=np.int32).reshape(LIMITS.slots, -1)
    return StepInput(
        query, (ends - 1).astype(np.int32), np.concatenate(sampling), pages, WANTED,
        np.array(masks) if masks else None, np.concatenate(biases),
    )  # fmt: skip


def row_of(output: StepOutput, index: int) -> Row:
    """Row ``index`` of a step."""
    return Row(
        int(output.token[index]), output.log_probability[index].tobytes(),
        tuple(output.top_ids[index].tolist()), output.top_log_probabilities[index].tobytes(),
        output.logits[index].tobytes(),
    )  # fmt: skip


def check_by_definition(inputs: StepInput, output: StepOutput) -> None:
    """Tokens and log-probabilities are what the definitions make of the step's own logits."""
    assert inputs.bias is not None
    token = sample(
        logits=output.logits,
        sampling=inputs.sampling.view(np.int32).reshape(-1, 16),
        recent=np.zeros((LIMITS.slots, 1), np.int32),
        allowed=None if inputs.allowed is None else inputs.allowed.view(np.int32),
        bias=inputs.bias.view(np.int32).reshape(-1, 2),
    )
    assert np.array_equal(output.token, token)
    chosen, ids, logs = log_probabilities(
        logits=output.logits, token=token, top=LIMITS.top_log_probabilities
    )
    assert output.log_probability.tobytes() == chosen.tobytes()
    assert np.array_equal(output.top_ids, ids)
    assert output.top_log_probabilities.tobytes() == logs.tobytes()
