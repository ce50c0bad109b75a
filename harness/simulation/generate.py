"""Draws the schedule of a seed: sizes and events that are rare in service are common here.

Each schedule leaves out about half of all features (swarm testing, Groce et al., ISSTA 2012), so
that features also occur without each other. Pages are scarce, lengths cluster at page boundaries,
and steps may take so long that requests age."""

from dataclasses import dataclass, fields, replace
from random import Random

from contract.arithmetic import PAGE_TOKENS
from contract.types import QosClass, Request, SamplingParams, Tenant
from harness.simulation.adversaries import draw_adversaries, draw_callers, with_adapters
from harness.simulation.constraint import Constraint
from harness.simulation.history import VOCAB, solo_run
from harness.simulation.schedule import (
    Action,
    Arrive,
    Cancel,
    EngineShape,
    Fault,
    Pause,
    Quota,
    Restart,
    Schedule,
    Stall,
)
from reference.engine import EngineOptions
from reference.limits import Limits, pages_for, with_drafts

UNKNOWN_TENANT = 999
MAX_BIASES = 3
MAX_LISTED = 3
MEANWHILE = ("submit", "collect", "collect")

STATE_INTERVALS = {0: 1024, 1: 16, 2: 48, 6: 32}
"""Tokens between two saved recurrent states of a prompt, by the room for saved states."""


@dataclass(frozen=True, slots=True)
class Features:
    """Kinds of events in a schedule."""

    shared_prefixes: bool
    cancels: bool
    stalls: bool
    quotas: bool
    faults: bool
    restarts: bool
    pauses: bool
    penalties: bool
    logits: bool
    bad_requests: bool
    scarce_pages: bool
    tight_quotas: bool
    lowered_classes: bool
    constraints: bool
    biases: bool
    log_probabilities: bool
    many_models: bool


@dataclass(frozen=True, slots=True)
class Profile:
    """A kind of schedules: the most slots, positions and requests, tokens below ``vocab``, and
    ``features`` that every schedule has. With ``model`` they are played on a tiny real model;
    with ``adversaries`` they have actions that try to break the engine's rules; with ``leaving``
    the device abandons the steps of clients that leave."""

    name: str
    slots: int = 4
    context: int = 128
    requests: int = 22
    vocab: int = VOCAB
    features: frozenset[str] = frozenset()
    recurrent: float = 0.25
    model: bool = False
    adversaries: bool = False
    leaving: bool = False


SCHEDULER = Profile("sched")
ADVERSARY = Profile(
    "adversary", features=frozenset({"lowered_classes", "cancels"}), adversaries=True
)
MEMORY = Profile("mem", features=frozenset({"shared_prefixes", "scarce_pages"}), recurrent=0.4)

LEAVING = Profile(
    "leaving", slots=3, features=frozenset({"shared_prefixes", "cancels"}), leaving=True
)


def generate(seed: int, profile: Profile = SCHEDULER) -> Schedule:
    """The schedule of ``seed``."""
    random = Random(seed)
    drawn = {field.name: random.random() < 0.5 for field in fields(Features)}
    features = Features(**drawn | dict.fromkeys(profile.features, True))
    shape = _shape(random, features, profile)
    tenants = _tenants(random, features, shape)
    actions = _Actions(random, features, shape, tenants, profile).draw()
    if profile.adversaries:
        steps = max(action.step for action in actions) + 20
        actions += draw_adversaries(random, shape, tenants, steps, copies=not profile.model)
        arrivals = [action for action in actions if isinstance(action, Arrive)]
        actions += draw_callers(random, arrivals, steps)
        if random.random() < 0.3 and not profile.model:
            shape = replace(shape, limits=replace(shape.limits, adapters=2))
            actions = with_adapters(random, actions)
        disk = random.random() < 0.3 and not profile.model
        shape = replace(shape, disk=disk)
        actions.sort(key=lambda action: action.step)
    if profile.leaving:
        shape = replace(shape, abandons=True, disk=random.random() < 0.3)
        actions = _with_leaving(random, actions)
    return Schedule(seed, shape, tenants, tuple(actions))


def _with_leaving(random: Random, actions: list[Action]) -> list[Action]:
    """The actions, with most requests cancelled soon, at times several at once."""
    others: list[Action] = [action for action in actions if not isinstance(action, Cancel)]
    for arrival in [action for action in others if isinstance(action, Arrive)]:
        if random.random() < 0.6:
            step = arrival.step + random.choice([0, 0, 1, 1, 2, 3, 5, 9])
            others.append(Cancel(step, arrival.request.id, random.choice(("", *MEANWHILE))))
    return sorted(others, key=lambda action: action.step)


def _shape(random: Random, features: Features, profile: Profile) -> EngineShape:
    slots = random.choice([1, 2, 2, 3, 3, profile.slots])
    context = random.choice([32, 64, 96, profile.context])
    max_pages = slots * pages_for(context)
    min_pages = pages_for(context)
    if features.scarce_pages:
        pages = random.randint(min_pages, max(min_pages, 2 * max_pages // 3))
    else:
        pages = random.randint(max_pages, max_pages + min_pages)
    chunk = random.choice([1, 3, 16, 17, 24, 48])
    recurrent = random.random() < profile.recurrent
    order = list(range(pages))
    random.shuffle(order)
    models = random.choice([1, 1, 2, 3, 3]) if features.many_models and not profile.model else 1
    shape = EngineShape(
        limits=Limits(
            slots,
            context,
            pages,
            recent_tokens=16,
            step_tokens=slots + chunk,
            step_rows=slots + random.choice([0, 1, 8]),
            saved_states=(saved := random.choice([1, 2, 6]) if recurrent else 0),
            state_interval=STATE_INTERVALS[saved],
            masks=slots if features.constraints else 0,
            biases=MAX_BIASES if features.biases else 0,
            top_log_probabilities=MAX_LISTED if features.log_probabilities else 0,
        ),
        page_order=tuple(order),
        chunk_tokens=random.randint(1, chunk),
        steps_ahead=random.choice([0, 1, 1, 2, 3]),
        stall_steps=random.choice([1, 4, 12]),
        queue_depth=random.choice([2, 6, 1024]),
        step_seconds=random.choice([0.005, 0.005, 0.1, 1.0]),
        host_pages=random.choice([0, 3, pages, 2 * pages]),
        copy_pages=random.random() < 0.5,
        guesses=random.random() < 0.25,
        recurrent=recurrent,
        prefix_cache=random.random() < 0.85,
        cached_pages=random.choice([None, None, 0, 3]),
        models=models,
        room=min(models, random.choice([1, 2, 2, 3])),
    )
    drafts = EngineOptions().draft_tokens
    return replace(shape, limits=with_drafts(shape.limits, drafts)) if shape.guesses else shape


def _tenants(random: Random, features: Features, shape: EngineShape) -> tuple[Tenant, ...]:
    pages, slots = shape.limits.pages, shape.limits.slots
    count = random.choice([1, 2, 2, 3, 4])
    tenants = []
    spare = pages // 2
    for id in range(count):
        max_slots, max_pages = slots, pages
        if features.tight_quotas:
            max_slots = random.randint(1, slots)
            max_pages = random.randint(pages_for(shape.limits.context) // 2, pages)
        reserved = random.choice([0, 0, 0, min(spare, max_pages, pages // 4)])
        spare -= reserved
        tenants.append(
            Tenant(
                id,
                f"tenant-{id}",
                weight=random.choice([1.0, 1.0, 2.0, 0.5]),
                max_slots=max_slots,
                max_kv_pages=max_pages,
                isolation_group=random.choice([None, 7, 7, 7, 8]),
                qos=random.choice(list(QosClass)),
                decode_tokens_per_s=random.choice([4, 50]) if random.random() < 0.2 else 1_000_000,
                prefill_tokens_per_s=30 if random.random() < 0.1 else 1_000_000,
                max_context=random.choice([shape.limits.context, 10_000]),
                reserved_pages=reserved,
            )
        )
    return tuple(tenants)


class _Actions:
    """Draws the actions of one schedule, in order of their steps."""

    def __init__(
        self,
        random: Random,
        features: Features,
        shape: EngineShape,
        tenants: tuple[Tenant, ...],
        profile: Profile,
    ) -> None:
        self._random = random
        self._features = features
        self._shape = shape
        self._tenants = tenants
        self._profile = profile
        context = shape.limits.context
        self._documents = [self._tokens(context) for _ in range(random.choice([1, 2]))]
        self._earlier: list[tuple[int, ...]] = []
        self._prompts: list[tuple[int, ...]] = []

    def draw(self) -> list[Action]:
        """All actions."""
        random = self._random
        actions: list[Action] = []
        step = 0
        for id in range(random.randint(1, self._profile.requests)):
            step += random.choice([0, 0, 0, 0, 1, 2, 5, 12])
            model = random.randrange(self._shape.models)
            request = self._request(id, model)
            logits = self._features.logits and random.random() < 0.3
            actions.append(Arrive(step, request, logits, self._constraint(), model))
            actions += self._with_request(step, id)
            if self._features.bad_requests and random.random() < 0.2:
                model = random.randrange(self._shape.models)
                actions.append(Arrive(step, self._bad(1000 + id, request), model=model))
        actions += self._at_large(step + 20)
        actions.sort(key=lambda action: action.step)
        return actions

    def _constraint(self) -> Constraint | None:
        random = self._random
        if not self._features.constraints or random.random() < 0.6:
            return None
        return Constraint(
            random.choice([1, 2, 7, 100]), random.choice([None, None, None, 0, 5, 18])
        )

    def _tokens(self, count: int) -> tuple[int, ...]:
        vocab, drawn = self._profile.vocab, self._random.random
        return tuple([int(drawn() * vocab) for _ in range(count)])

    def _request(self, id: int, model: int) -> Request:
        random, context = self._random, self._shape.limits.context
        # Long answers make pages run out.
        longest = [context] * (3 if self._features.scarce_pages else 1)
        prompt = self._prompt(context)
        sampling = SamplingParams(seed=random.getrandbits(64))
        if self._features.penalties and random.random() < 0.4:
            sampling = SamplingParams(
                temperature=0.8,
                repeat_penalty=1.3,
                repeat_last_n=random.choice([1, 5, 16]),
                seed=random.getrandbits(64),
            )
        request = Request(
            id,
            prompt,
            random.choice([0, 1, 2, 5, 14, 17, 33, *longest]),
            sampling,
            tenant=random.choice(self._tenants).id,
            ignore_end=random.random() < 0.7,
            qos=random.choice([None, *QosClass]) if self._features.lowered_classes else None,
            logit_bias=self._biases(),
            log_probabilities=self._listed(),
            turns=(len(prompt) // 3, len(prompt) - 1),
        )
        if self._features.shared_prefixes:
            tokens = solo_run(request, context, model=model).tokens
            self._earlier.append(tuple(token % self._profile.vocab for token in tokens))
            self._prompts.append(prompt)
        return request

    def _biases(self) -> tuple[tuple[int, float], ...]:
        random = self._random
        if not self._features.biases or random.random() < 0.5:
            return ()
        tokens = random.sample(range(self._profile.vocab), random.randint(1, MAX_BIASES))
        return tuple((token, random.choice([-100.0, -0.5, 1.5, 100.0])) for token in tokens)

    def _listed(self) -> int | None:
        if not self._features.log_probabilities:
            return None
        return self._random.choice([None, None, 0, 1, MAX_LISTED])

    def _prompt(self, context: int) -> tuple[int, ...]:
        random = self._random
        boundary = PAGE_TOKENS * random.randint(1, context // PAGE_TOKENS)
        length = random.choice([1, 3, random.randint(1, context), boundary - 1, boundary])
        length = max(1, min(length + random.choice([0, 0, 1]), context))
        if not self._features.shared_prefixes or random.random() < 0.2:
            return self._tokens(length)
        if self._prompts and random.random() < 0.3:
            return random.choice(self._prompts)
        length = max(length, min(context, random.choice([1, PAGE_TOKENS + 3, 2 * PAGE_TOKENS + 9])))
        shared = random.choice([*self._documents, *self._earlier[-3:]])[: length - 1]
        return (
            shared
            + self._tokens(random.choice([1, min(7, length), length]))[: length - len(shared)]
        )

    def _with_request(self, step: int, id: int) -> list[Action]:
        """Draw what the client of a request does later."""
        random = self._random
        actions: list[Action] = []
        if self._features.cancels and random.random() < 0.3:
            actions.append(Cancel(step + random.choice([0, 0, 1, 2, 6, 15]), id))
        if self._features.stalls and random.random() < 0.4:
            begin = step + random.choice([0, 1, 3, 10])
            actions.append(Stall(begin, id))
            if random.random() < 0.7:
                actions.append(Stall(begin + random.choice([0, 1, 3, 20]), id, over=True))
        return actions

    def _bad(self, id: int, good: Request) -> Request:
        """A request that no engine may accept."""
        kind = self._random.randrange(8)
        tokens, tenant, bias, listed = good.prompt, good.tenant, good.logit_bias, None
        if kind == 0:
            tokens = ()
        elif kind == 1:
            tokens = (*tokens[:3], self._profile.vocab)
        elif kind == 2:
            tenant = UNKNOWN_TENANT
        elif kind == 3:
            tokens = self._tokens(self._shape.limits.context + 1)
        elif kind == 4:
            tokens = (-1,)
        elif kind == 5:
            bias = tuple((token, 1.0) for token in range(MAX_BIASES + 1))
        elif kind == 6:
            listed = MAX_LISTED + 1
        else:
            # An id in use is refused, also where the other request is for another model.
            id = good.id
        return replace(
            good, id=id, prompt=tokens, tenant=tenant, logit_bias=bias, log_probabilities=listed
        )

    def _at_large(self, steps: int) -> list[Action]:
        """Draw events that concern the whole engine."""
        random, features = self._random, self._features
        actions: list[Action] = []
        if features.faults:
            for _ in range(random.randint(1, 3)):
                where = random.choice(["submit", "collect"])
                model = random.randrange(self._shape.models)
                actions.append(Fault(random.randrange(steps), where, model))
        if features.restarts:
            actions.append(Restart(random.randrange(steps)))
        if features.pauses:
            for _ in range(random.randint(1, 3)):
                seconds = random.choice([0.1, 4.0, 11.0])
                actions.append(Pause(random.randrange(steps), seconds))
        if features.quotas:
            for _ in range(random.randint(1, 3)):
                tenant = random.choice(self._tenants)
                actions.append(Quota(random.randrange(steps), self._changed(tenant)))
        return actions

    def _changed(self, tenant: Tenant) -> Tenant:
        random, limits = self._random, self._shape.limits
        return Tenant(
            tenant.id,
            tenant.name,
            weight=random.choice([0.25, 1.0, 4.0]),
            max_slots=random.randint(1, limits.slots),
            max_kv_pages=random.randint(max(1, tenant.reserved_pages), limits.pages),
            isolation_group=tenant.isolation_group,
            qos=random.choice(list(QosClass)),
            decode_tokens_per_s=random.choice([4, 1_000_000]),
            prefill_tokens_per_s=tenant.prefill_tokens_per_s,
            max_context=tenant.max_context,
            reserved_pages=tenant.reserved_pages,
        )
