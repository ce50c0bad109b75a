"""Schedules: what happens to an engine and when; and how part of one is written in a line."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from contract.errors import ConfigError
from contract.types import Request, Tenant
from harness.simulation.constraint import Constraint
from reference.limits import Limits


@dataclass(frozen=True, slots=True)
class EngineShape:
    """The engines of a schedule. ``page_order`` is the order in which pages are handed out;
    ``step_seconds`` is the fixed time of a step. With ``guesses`` the engine decodes speculatively.
    With a ``disk`` it has a disk cache. The device ``abandons`` steps that nobody needs. There are
    ``models`` of this shape, and memory for ``room`` of them."""

    limits: Limits
    page_order: tuple[int, ...]
    chunk_tokens: int
    steps_ahead: int
    stall_steps: int
    queue_depth: int
    step_seconds: float
    host_pages: int = 0
    copy_pages: bool = False
    guesses: bool = False
    recurrent: bool = False
    prefix_cache: bool = True
    cached_pages: int | None = None
    disk: bool = False
    abandons: bool = False
    models: int = 1
    room: int = 1


@dataclass(frozen=True, slots=True)
class Arrive:
    """A client submits ``request`` to ``model``, perhaps with a sink for ``logits`` and a
    ``constraint`` on its tokens."""

    step: int
    request: Request
    logits: bool = False
    constraint: Constraint | None = None
    model: int = 0


@dataclass(frozen=True, slots=True)
class Cancel:
    """A client cancels its request: between two steps, or, if the device abandons steps,
    ``meanwhile``: while the engine's thread is in its next "submit" or "collect" of a step."""

    step: int
    request_id: int
    meanwhile: str = ""


@dataclass(frozen=True, slots=True)
class Stall:
    """A client stops taking tokens, or takes them again if ``over``."""

    step: int
    request_id: int
    over: bool = False


@dataclass(frozen=True, slots=True)
class Quota:
    """An operator adds or changes a tenant."""

    step: int
    tenant: Tenant


@dataclass(frozen=True, slots=True)
class Fault:
    """The device is lost with the next step of a model, when it is submitted or when it is
    collected."""

    step: int
    where: str
    model: int = 0


@dataclass(frozen=True, slots=True)
class Restart:
    """The engine is replaced by a new one on the same device; clients submit the rest of their
    requests to it."""

    step: int


@dataclass(frozen=True, slots=True)
class Pause:
    """The engine is not called for some seconds."""

    step: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Remove:
    """An operator removes a tenant."""

    step: int
    tenant_id: int


@dataclass(frozen=True, slots=True)
class FailCopy:
    """The next copy of a page or a state on a model's device fails."""

    step: int
    model: int = 0


@dataclass(frozen=True, slots=True)
class Interrupt:
    """A KeyboardInterrupt at a line of the next step of an engine; or, with ``call``, of its next
    other call, which the caller repeats."""

    step: int
    line: int
    call: bool = False


@dataclass(frozen=True, slots=True)
class Prefix:
    """A client saves, loads or drops what is cached of a request's tokens: ``operation`` is "save",
    "load" or "drop"."""

    step: int
    request_id: int
    operation: str


Action = (
    Arrive
    | Cancel
    | Stall
    | Quota
    | Fault
    | Restart
    | Pause
    | Remove
    | FailCopy
    | Interrupt
    | Prefix
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """All ``actions`` in order, each before the engine's step of its number. When the engine is
    idle before the next action, this action happens at once."""

    seed: int
    shape: EngineShape
    tenants: tuple[Tenant, ...]
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class KeptAction:
    """One action of a schedule that is kept in a smaller one, by its index. Of a request,
    ``prompt`` and ``tokens`` limit the numbers of prompt tokens and of generated tokens; None keeps
    all."""

    action: int
    prompt: int | None = None
    tokens: int | None = None

    def __str__(self) -> str:
        parts = (self.action, self.prompt, self.tokens)
        return "/".join("" if part is None else str(part) for part in parts).rstrip("/")


def keep(schedule: Schedule, kept: Sequence[KeptAction]) -> Schedule:
    """The schedule with these actions only. Raises ConfigError for an action that does not
    exist."""
    actions: list[Action] = []
    for item in kept:
        if not 0 <= item.action < len(schedule.actions):
            raise ConfigError(
                f"--keep: there is no action {item.action}, the schedule of seed {schedule.seed} "
                f"has {len(schedule.actions)}"
            )
        action = schedule.actions[item.action]
        if isinstance(action, Arrive):
            request = action.request
            if item.prompt is not None:
                request = replace(request, prompt=request.prompt[: item.prompt])
            if item.tokens is not None:
                request = replace(request, max_tokens=min(item.tokens, request.max_tokens))
            action = replace(action, request=request)
        actions.append(action)
    return replace(schedule, actions=tuple(actions))


def parse_actions(text: str) -> tuple[KeptAction, ...]:
    """Parse the text of ``format_actions``. Raises ConfigError for other text."""
    kept = []
    for item in text.split(","):
        parts = item.split("/")
        if len(parts) > 3 or not all(part.isdecimal() for part in parts if part) or not parts[0]:
            raise ConfigError(f"--keep: {item!r} is not ACTION[/PROMPT[/TOKENS]], such as 4/17/3")
        numbers = [int(part) if part else None for part in parts]
        assert numbers[0] is not None
        kept.append(KeptAction(numbers[0], *numbers[1:]))
    return tuple(kept)


def format_actions(kept: Sequence[KeptAction]) -> str:
    """The actions as one word for the command line."""
    return ",".join(map(str, kept))
