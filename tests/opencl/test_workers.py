"""The number of workers of a step is nobody's business but the clock's: every bit stays."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from accel.opencl.launcher import Mode
from accel.packets.worker_tuner import AdaptiveWorkers, FixedWorkers, WorkerChoice
from reference.model.open import open_model
from tests.model_runs import compare
from tests.needs import machine_lacks

STEPS_AHEAD = 1
"""Steps that may still run when the last one is enqueued, as the engine does it on this tier."""


@dataclass
class RandomWorkers:
    """Any number, another one for every step. ``chosen`` counts them, ``noted`` their times."""

    max_workers: int
    chosen: list[int] = field(default_factory=list)
    noted: list[int] = field(default_factory=list)
    chance: random.Random = field(default_factory=lambda: random.Random(8))

    def choose(self, tokens: int, ops: int) -> int:
        self.chosen.append(self.chance.randint(1, self.max_workers))
        return self.chosen[-1]

    def note(self, tokens: int, ops: int, workers: int, seconds: float) -> None:
        assert seconds > 0
        self.noted.append(workers)


CHOICES: dict[str, Callable[[int], WorkerChoice]] = {
    "one": lambda most: FixedWorkers(1),
    "all": FixedWorkers,
    "adaptive": AdaptiveWorkers,
}


@pytest.fixture
def cores(device) -> int:
    if not device.is_cpu or device.compute_units < 2:
        machine_lacks("processor of several cores for OpenCL")
    return device.compute_units


@pytest.mark.parametrize("choice", CHOICES)
def test_bits_do_not_depend_on_the_number_of_workers(open_opencl, tiny_model_path, cores, choice):
    tier = open_opencl(mode=Mode.PERSISTENT, worker_choice=CHOICES[choice])
    compare(open_model(tiny_model_path), tier)


@pytest.mark.parametrize("architecture", ["llama", "qwen35moe"])
def test_bits_survive_another_number_at_every_step(
    open_opencl, synthetic_model, cores, architecture
):
    """State passes between any numbers of workers, and the time of every step is noted."""
    choice = RandomWorkers(cores)
    tier = open_opencl(mode=Mode.PERSISTENT, worker_choice=lambda most: choice)
    compare(open_model(synthetic_model(architecture=architecture, quant="q4_k_m")), tier)
    assert set(choice.chosen) == set(range(1, cores + 1))
    assert choice.noted == choice.chosen[: len(choice.noted)]
    assert len(choice.noted) >= len(choice.chosen) - 1 - STEPS_AHEAD
