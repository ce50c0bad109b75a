"""Every error a caller may meet, each a single line that says what to do.

The command line prints ``str(error)`` and exits with ``error.exit_code``; a traceback is shown
only under ``--debug``. A broken invariant inside the project is an ``AssertionError`` instead.
"""

from __future__ import annotations

from collections.abc import Sequence


class ZincError(Exception):
    """Base of all errors that are the input's or the machine's fault, not the project's."""

    exit_code = 2


class ModelFileError(ZincError):
    """A model file that cannot be trusted or understood.

    ``where`` names the place inside the file: a byte offset, a metadata key or a tensor name.
    """

    def __init__(self, path: object, where: str, problem: str, remedy: str = "") -> None:
        self.path = str(path)
        self.where = where
        self.problem = problem
        self.remedy = remedy
        tail = f"; {remedy}" if remedy else ""
        super().__init__(f"{self.path}: {where}: {problem}{tail}")


class UnsupportedModel(ModelFileError):
    """A well-formed file that asks for something this build has no code for."""


class TemplateError(ZincError):
    """A chat template that raised, ran too long, wrote too much or tried to escape. ``summary``
    says so without anything a conversation may hold."""

    def __init__(self, problem: str, summary: str | None = None) -> None:
        self.summary = summary or problem
        super().__init__(problem)


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


class QueueFull(ZincError):
    """As many requests wait as may: ``depth`` of them. Try again in ``retry_after`` seconds."""

    def __init__(self, depth: int, retry_after: float) -> None:
        self.depth = depth
        self.retry_after = retry_after
        super().__init__(
            f"the queue is full: {depth:,} requests wait; try again in {retry_after:.0f} s"
        )


class TenantQueueFull(QueueFull):
    """As many requests of one tenant wait as may: ``depth`` of them, while there is room for
    others. ``rate`` says that they wait because the tenant computes as much a second as it may."""

    def __init__(self, depth: int, retry_after: float, rate: bool = False) -> None:
        super().__init__(depth, retry_after)
        self.rate = rate
        why = "it computes as many tokens a second as it may, and " if rate else ""
        self.args = (
            f"the tenant has as many requests as it may: {why}{depth:,} wait; "
            f"try again in {retry_after:.0f} s",
        )


class DoesNotFit(ZincError):
    """What was asked for needs more memory than may be used; sizes in bytes."""

    def __init__(self, what: str, need: int, have: int, remedy: str) -> None:
        self.need = need
        self.have = have
        self.remedy = remedy
        super().__init__(f"{what}: needs {need:,} bytes of memory, has {have:,}; {remedy}")


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
        place = f"graph {graph}: {node}" if node else f"graph {graph}"
        super().__init__(f"{place}: {rule}: {detail}")


class CodecError(ZincError):
    """Bytes that are not a serialized graph or kernel of a version this build reads.

    ``section`` names the part of the file and ``offset`` the byte where the problem lies; both
    are absent when the file as a whole is the problem.
    """

    def __init__(self, problem: str, *, section: str = "", offset: int | None = None) -> None:
        self.problem = problem
        self.section = section
        self.offset = offset
        place = section if offset is None else f"{section} at byte {offset}".lstrip()
        super().__init__(f"{place}: {problem}" if place else problem)


class TierError(ZincError):
    """Base of what a tier may raise."""


class TierUnavailable(TierError):
    """The tier cannot run here; says why and what to install."""

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

    def __init__(self, what: str, asked: int, used: int, free: int) -> None:
        self.asked = asked
        self.used = used
        self.free = free
        super().__init__(
            f"out of memory for {what}: need {asked:,} bytes, {used:,} in use, {free:,} free"
        )


class DeviceLost(TierError):
    """The device stopped answering; nothing submitted to it can be trusted."""


class ExecutionError(TierError):
    """Execution objects put together wrongly: an unbound port, a cycle, a range out of bounds."""


class NonFiniteLogits(ZincError):
    """A sequence's logits contain NaN or infinity; other sequences are unaffected (rule R0)."""
