"""Every error a caller can meet. Its message is one line that says what to do.

The command line prints ``str(error)`` and exits with ``error.exit_code``; it shows a traceback only
under ``--debug``. A broken invariant of the project itself is an ``AssertionError`` instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, Self

from contract.amounts import format_bytes


def system_words(error: Exception) -> str:
    """The system's message of an error, without number and path; else the error's text."""
    return getattr(error, "strerror", None) or str(error)


class ZincError(Exception):
    """Base of all errors that the input or the machine causes, not the project."""

    exit_code = 2

    def __reduce__(self) -> tuple[Any, ...]:
        return _error_copy, (type(self), self.args, self.__dict__)


def _error_copy(kind: type[ZincError], words: tuple[Any, ...], facts: dict[str, Any]) -> ZincError:
    """A copy of an error from its message, since its constructor takes other arguments."""
    error = kind.__new__(kind, *words)
    error.__dict__.update(facts)
    return error


class ModelFileError(ZincError):
    """A model file that is damaged, hostile or not understood.

    ``where`` says where in the file: a byte offset, a metadata key or a tensor name."""

    def __init__(self, path: object, where: str, problem: str, remedy: str = "") -> None:
        self.path = str(path)
        self.where = where
        self.problem = problem
        self.remedy = remedy
        tail = f"; {remedy}" if remedy else ""
        words = f"{self.path}: {where}: {problem}{tail}"
        # Names in a file may contain line ends and terminal controls, and logs print the message.
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in words))


class UnsupportedModel(ModelFileError):
    """A well-formed model file that needs something this build does not implement."""


class TemplateError(ZincError):
    """A chat template that raised, ran too long, wrote too much or tried to escape. ``summary``
    says so without any text of a conversation."""

    def __init__(self, problem: str, summary: str | None = None) -> None:
        self.summary = summary or problem
        super().__init__(problem)


class TemplateUnavailable(TemplateError):
    """A chat template that the system refuses a process: a later try may succeed."""


class TemplateRefused(TemplateError):
    """A conversation that a chat template refuses; ``words`` are the template's own."""

    def __init__(self, problem: str, words: str) -> None:
        self.words = words
        super().__init__(problem)


class RequestError(ZincError):
    """A request the engine cannot serve; ``field`` is the name of the offending parameter."""

    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        self.problem = problem
        super().__init__(f"{field}: {problem}")

    def renamed(self, names: Mapping[str, str]) -> Self:
        """This error with the caller's name of its field; ``names`` has those that differ."""
        error = copy(self)
        RequestError.__init__(error, names.get(self.field, self.field), self.problem)
        return error.with_traceback(self.__traceback__)


class PromptTooLong(RequestError):
    """A prompt of ``size``, such as "9 tokens", longer than the context of ``limit`` tokens."""

    def __init__(self, field: str, size: str, limit: int) -> None:
        advice = "shorten it or give a larger context"
        super().__init__(field, f"is too long: {size} > {limit} maximum; {advice}")


class QueueFull(ZincError):
    """The queue is full: ``depth`` requests wait. The caller may try again in ``retry_after``
    seconds."""

    def __init__(self, depth: int, retry_after: float) -> None:
        self.depth = depth
        self.retry_after = retry_after
        super().__init__(
            f"the queue is full: {depth:,} requests wait; try again in {retry_after:.0f} s"
        )


class TenantQueueFull(QueueFull):
    """The tenant has its maximum of ``depth`` waiting requests; other tenants can still submit.
    ``rate`` is True when they wait because the tenant has reached its tokens per second."""

    def __init__(self, depth: int, retry_after: float, rate: bool = False) -> None:
        super().__init__(depth, retry_after)
        self.rate = rate
        why = "it computes as many tokens a second as it may, and " if rate else ""
        self.args = (
            f"the tenant has as many requests as it may: {why}{depth:,} wait; "
            f"try again in {retry_after:.0f} s",
        )


class DoesNotFit(ZincError):
    """A request or model needs more memory than it may use; sizes are in bytes."""

    def __init__(self, purpose: str, need: int, have: int, remedy: str) -> None:
        self.need = need
        self.have = have
        self.remedy = remedy
        super().__init__(
            f"{purpose}: needs {format_bytes(need)} of memory, may use {format_bytes(have)} "
            f"(--memory-budget, or what is free less a margin); {remedy}"
        )


class ConfigError(ZincError):
    """A flag, environment variable or configuration-file value that cannot be used."""


class CatalogError(ZincError):
    """A managed model that is unknown, could not be fetched, or is not what it claims to be."""


class VerifyError(ZincError):
    """An IR graph that breaks a rule; names the node (or the buffer) and the rule."""

    def __init__(self, graph: str, node: str, rule: str, detail: str) -> None:
        self.graph = graph
        self.node = node
        self.rule = rule
        self.detail = detail
        location = f"graph {graph}: {node}" if node else f"graph {graph}"
        super().__init__(f"{location}: {rule}: {detail}")


class CodecError(ZincError):
    """Bytes that are not a serialized graph or kernel of a version this build reads.

    ``section`` names the part of the file and ``offset`` the byte where the problem lies; both
    are absent when the file as a whole is the problem."""

    def __init__(self, problem: str, *, section: str = "", offset: int | None = None) -> None:
        self.problem = problem
        self.section = section
        self.offset = offset
        location = section if offset is None else f"{section} at byte {offset}".lstrip()
        super().__init__(f"{location}: {problem}" if location else problem)


class TierError(ZincError):
    """Base of the errors a tier may raise."""


class TierUnavailable(TierError):
    """The tier cannot run on this machine; the message says why and what to install."""

    def __init__(self, tier: str, reason: str, remedy: str) -> None:
        self.tier = tier
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"tier {tier} is not available: {reason}; {remedy}")


class UnsupportedOp(TierError):
    """The graph uses opcodes the tier has no kernel for."""

    def __init__(self, tier: str, opcodes: Sequence[str]) -> None:
        self.tier = tier
        self.opcodes = tuple(opcodes)
        super().__init__(f"tier {tier} has no kernel for {', '.join(self.opcodes)}")


class OutOfMemory(TierError):
    """An allocation that does not fit. Sizes are in bytes."""

    def __init__(self, purpose: str, needed: int, used: int, free: int) -> None:
        self.needed = needed
        self.used = used
        self.free = free
        super().__init__(
            f"out of memory for {purpose}: need {format_bytes(needed)}, "
            f"{format_bytes(used)} in use, {format_bytes(free)} free"
        )


class DeviceLost(TierError):
    """The device stopped answering; no result of anything submitted to it can be trusted."""


class StepAbandoned(TierError):
    """A step that ended early, because its CancelToken was cancelled."""


class ExecutionError(TierError):
    """A wrong use of execution objects: an unbound port, a cycle, a range out of bounds."""


class NonFiniteLogits(ZincError):
    """A sequence's logits contain NaN or infinity; other sequences are unaffected (rule R0)."""


@contextmanager
def system_errors_as(problem: str, kind: type[ZincError] = ConfigError) -> Iterator[None]:
    """Raise what the system refuses as this kind of error: the problem, and the system's words."""
    try:
        yield
    except OSError as error:
        raise kind(f"{problem}: {system_words(error)}") from None
