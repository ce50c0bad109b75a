"""Several models in one process: turns, loading on demand, room made by what nobody uses."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contract.errors import DeviceLost, DoesNotFit, RequestError
from contract.types import LOCAL_TENANT, Request, SamplingParams
from reference.engine import Engine, EngineOptions
from reference.engine.models import Loaded, Models
from reference.limits import Limits
from reference.model.open import open_model
from reference.runner import ModelRunner
from reference.sched.tenants import Tenants
from tests.named_tiers import quick_tier
from tests.sched.manual_clock import ManualClock

LIMITS = Limits(slots=2, context=64, pages=8, step_tokens=16, step_rows=2)
NAMES = ("llama", "qwen2", "qwen3")
TENANTS = tuple(replace(LOCAL_TENANT, id=n, name=f"t{n}") for n in range(4))


class Machine:
    """Loads models by name into room for ``most``; steps take the seconds that are said."""

    def __init__(self, paths: dict[str, Path], most: int) -> None:
        self.clock = ManualClock()
        self.tier = quick_tier()
        self.seconds = dict.fromkeys(paths, 1.0)
        self.steps: Counter[str] = Counter()
        self.loads: list[str] = []
        self.inside: set[str] = set()
        self._paths = paths
        self._most = most
        self.tenants = Tenants(TENANTS, clock=lambda: 0.0)
        self.models = Models(self.load, self.clock)

    def load(self, name: str) -> Loaded:
        if name not in self._paths:
            raise RequestError("model", f"{name!r} is not known")
        if len(self.inside) == self._most:
            raise DoesNotFit(name, 2, 1, "unload something")
        model = open_model(self._paths[name])
        runner = ModelRunner(model, self.tier, LIMITS)
        collect = runner.collect

        def timed(submission: object) -> object:
            self.clock.now += self.seconds[name]
            self.steps[name] += 1
            return collect(submission)  # type: ignore[arg-type]

        runner.collect = timed  # type: ignore[method-assign,assignment]
        self.inside.add(name)
        self.loads.append(name)

        def close() -> None:
            runner.close()
            model.close()
            self.inside.remove(name)

        engine = Engine(runner, EngineOptions(queue_depth=6), tenants=self.tenants)
        return Loaded(engine, 1, close)

    def submit(self, name: str, request: Request) -> None:
        """Submit to the engine of a model, which is loaded if it is not."""
        self.models.engine(name).submit(request)

    def step(self, count: int) -> None:
        for _ in range(count):
            self.models.step()

    def turns(self, name: str, count: int) -> int:
        """How many of so many steps a model gets."""
        before = self.steps[name]
        self.step(count)
        return self.steps[name] - before


@pytest.fixture
def machine(synthetic_model) -> Iterator[Callable[[int], Machine]]:
    made: list[Machine] = []

    def make(most: int) -> Machine:
        paths = {name: synthetic_model(architecture=name, quant="q8_0") for name in NAMES}
        made.append(Machine(paths, most))
        return made[-1]

    yield make
    for one in made:
        one.models.close()
        one.tier.close()


Make = Callable[[int], Machine]


def request(number: int, tokens: int = 6, tenant: int = 0) -> Request:
    sampling = SamplingParams(temperature=0.7, seed=number)
    return Request(number, tuple(range(number, number + 9)), tokens, sampling, tenant=tenant)


def tokens_of(models: Models) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    while not models.idle:
        for event in models.step():
            tokens.setdefault(event.request_id, []).append(event.token)
    return tokens


def test_models_take_turns_and_change_no_bit_of_each_other(machine):
    here = machine(3)
    alone = {}
    for number, name in enumerate(NAMES):
        here.submit(name, request(number))
        alone |= tokens_of(here.models)
    for number, name in enumerate(NAMES):
        here.submit(name, request(number))
    assert tokens_of(here.models) == alone
    assert here.loads == list(NAMES)


def test_a_turn_is_time_not_steps(machine):
    """A model whose steps take three times as long gets a third of the steps."""
    here = machine(2)
    here.seconds.update(llama=3.0, qwen2=1.0)
    here.submit("llama", request(1, 50))
    here.submit("qwen2", request(2, 50))
    while here.steps["qwen2"] < 30:
        here.models.step()
    assert 9 <= here.steps["llama"] <= 11


def test_a_model_that_more_tenants_use_gets_more_time(machine):
    here = machine(2)
    here.submit("llama", request(1, 50, tenant=1))
    for number, tenant in ((2, 2), (3, 3)):
        here.submit("qwen2", request(number, 50, tenant=tenant))
    while here.steps["qwen2"] < 20:
        here.models.step()
    assert 9 <= here.steps["llama"] <= 11


def test_who_comes_late_takes_no_turns_for_the_past(machine):
    here = machine(2)
    here.submit("qwen2", request(3, 2))
    tokens_of(here.models)
    here.submit("llama", request(1, 50))
    here.step(20)
    here.submit("qwen2", request(2, 50))
    assert here.turns("llama", 12) >= 5


def test_one_that_is_loaded_again_begins_where_the_others_are(machine):
    """Also where nobody took a step meanwhile."""
    here = machine(2)
    here.submit("llama", request(1, 50))
    here.submit("qwen2", request(2, 50))
    here.step(20)
    here.models.engine("qwen2").cancel(2)
    assert here.models.unload("qwen2")
    here.submit("qwen2", request(3, 50))
    assert here.turns("llama", 12) >= 5


def test_a_tenant_is_put_and_removed_for_all_models(machine):
    """What it computed is nobody's on any of them, whoever gets its id; those whose requests run
    end them first."""
    here = machine(2)
    for name in ("llama", "qwen2"):
        engine = here.models.engine(name)
        here.submit(name, request(1, 30, tenant=1))
        tokens_of(here.models)
        assert engine.memory.cached
    here.submit("llama", request(2, 3, tenant=1))
    here.models.remove_tenant(1)
    with pytest.raises(RequestError, match="removed"):
        here.submit("qwen2", request(3, tenant=1))
    tokens_of(here.models)
    assert 1 not in here.tenants
    here.models.put_tenant(TENANTS[1])
    assert 1 in here.tenants
    for number, name in enumerate(("llama", "qwen2"), 4):
        assert not here.models.engine(name).memory.cached
        here.submit(name, request(number, tenant=1))
    assert {len(tokens) for tokens in tokens_of(here.models).values()} == {6}


def test_what_was_done_alone_is_not_held_against_anybody(machine):
    here = machine(2)
    here.submit("llama", request(1, 40))
    tokens_of(here.models)
    here.submit("qwen2", request(2, 50))
    here.submit("llama", request(3, 50))
    here.steps.clear()
    here.step(12)
    assert 5 <= here.steps["llama"] <= 7


def test_who_cannot_go_on_passes_its_turn(machine):
    """A model whose consumers take nothing holds up no other, and has no turns to catch up on."""
    here = machine(2)
    here.submit("qwen2", request(2, 50))
    here.submit("llama", request(1, 50))
    here.models.engine("qwen2").stall(2)
    here.step(20)
    assert here.steps["qwen2"] <= 2
    assert here.steps["llama"] >= 18
    here.models.engine("qwen2").unstall(2)
    assert here.turns("llama", 12) >= 5


def test_who_passed_has_no_turns_to_catch_up_on_when_the_next_step_fails(machine, monkeypatch):
    here = machine(2)
    here.submit("llama", request(1, 50))
    here.submit("qwen2", request(2, 50))
    here.step(2)
    here.models.engine("llama").stall(1)
    here.seconds["qwen2"] = 10.0
    collect = here.models.engine("qwen2").runner.collect

    def lost(submission: Any) -> Any:
        collect(submission)
        raise DeviceLost("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(here.models.engine("qwen2").runner, "collect", lost)
        with pytest.raises(DeviceLost):
            here.models.step()
    here.models.engine("llama").unstall(1)
    here.seconds["qwen2"] = 1.0
    assert 4 <= here.turns("llama", 10) <= 6


def test_a_tenant_waits_for_each_model_by_itself(machine):
    """A long line for one model takes no places of another's queue; quotas are those of all."""
    here = machine(2)
    here.tenants.put(replace(TENANTS[1], max_slots=2))
    for number in range(6):
        here.submit("llama" if number < 3 else "qwen2", request(number, tenant=1))
    here.models.step()
    assert here.tenants.usage(1).slots == 2
    assert here.models.engine("qwen2").statistics.waiting == 3
    changed = replace(TENANTS[1], max_slots=3, reserved_pages=1)
    here.models.put_tenant(changed)
    assert here.tenants[1] == changed
    assert len(tokens_of(here.models)) == 6


def test_the_model_unused_for_longest_makes_room(machine):
    here = machine(2)
    for number, name in enumerate(("llama", "qwen2", "llama", "qwen3", "qwen2")):
        here.submit(name, request(number))
        assert len(tokens_of(here.models)[number]) == 6
    assert here.loads == ["llama", "qwen2", "qwen3", "qwen2"]
    assert here.models.loaded == ("qwen3", "qwen2")


def test_a_model_in_use_is_not_unloaded(machine):
    here = machine(1)
    here.submit("llama", request(1))
    assert not here.models.unload("llama")
    with pytest.raises(DoesNotFit):
        here.submit("qwen2", request(2))
    with pytest.raises(RequestError, match="not known"):
        here.submit("gpt", request(3))
    assert len(tokens_of(here.models)[1]) == 6
    here.submit("qwen2", request(2))
    here.models.engine("qwen2").cancel(2)
    assert here.models.idle
    assert here.models.unload("qwen2")
    assert here.models.loaded == ()


def test_one_that_is_loaded_again_before_each_turn_does_not_pass_who_waits(machine):
    """Its time begins with that of the others each time."""
    here = machine(2)
    here.submit("qwen2", request(1, 20))
    for number in range(2, 10):
        here.submit("llama", request(number, 1))
        here.submit("qwen2", request(20 + number, 1))
        here.models.step()
        here.models.take_out("llama")
    assert here.steps["qwen2"] >= 3
