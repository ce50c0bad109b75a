"""Verifies receipts with a model: lists every problem, and how much was recomputed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock

from msgspec.structs import asdict

from harness.host.stream_driver import SharedDriver
from harness.progress import SILENT, Progress
from harness.serve.accounts import Accounts
from harness.serve.ledger_store import LedgerStore
from harness.serve.metrics import Metrics
from harness.serve.model import ServedModel
from harness.serve.receipts.check import (
    READINGS,
    DerivedRequests,
    chain_problems,
    derive_requests,
    model_problems,
    record_problems,
    request_problems,
)
from harness.serve.receipts.document import Receipt
from harness.serve.receipts.recompute import (
    Recomputed,
    reading_problems,
    recompute_all,
    recompute_results,
    recompute_sample,
)
from harness.serve.service import Service

TENTH = 10


@dataclass(frozen=True, slots=True)
class ReceiptDemands:
    """What receipts are checked for. ``trusted``: public keys, None for any. ``tenant``: its name,
    None for any. ``sample``: how many steps of each are recomputed, None for all."""

    trusted: Sequence[str] | None = None
    tenant: str | None = None
    sample: int | None = None


@dataclass(frozen=True, slots=True)
class ReceiptVerdict:
    """The problems of a receipt, and what was recomputed, if anything."""

    receipt: Receipt
    problems: Sequence[str]
    recomputed: Recomputed | None

    @property
    def lines(self) -> Iterator[str]:
        """The verdict as text."""
        name = self.receipt.payload.id
        for problem in self.problems:
            yield f"different: {name}: {problem}"
        if self.problems or self.recomputed is None:
            return
        done = self.recomputed
        if done.checked == done.steps:
            yield f"identical: {name}: all {done.steps} steps"
            return
        tenth = -(-done.steps // TENTH)
        more = f", {tenth} with {done.seen(tenth):.1%}" if tenth > 1 else ""
        yield (
            f"identical: {name}: {done.checked} of {done.steps} steps; one wrong step would have "
            f"been seen with probability {done.seen(1):.1%}{more}"
        )


def verify_receipts(
    receipts: Sequence[Receipt],
    model: ServedModel,
    demands: ReceiptDemands,
    progress: Progress = SILENT,
) -> Iterator[ReceiptVerdict]:
    """The verdict on each receipt; ``progress`` counts computed tokens."""
    with uncounted_service(model) as service, shown_steps(model.driver, progress):
        for receipt in receipts:
            yield _verdict(receipt, service, demands)


def chain_verdict(receipts: Sequence[Receipt]) -> list[str]:
    """The errors in a chain of receipts, and a note if its beginning is missing."""
    problems = [f"different: {problem}" for problem in chain_problems(receipts)]
    first = receipts[0].payload.number
    if first != 1:
        problems.append(f"not whole: the chain begins with receipt {first}")
    return problems


def _verdict(receipt: Receipt, service: Service, demands: ReceiptDemands) -> ReceiptVerdict:
    problems = record_problems(receipt, demands.trusted, demands.tenant)
    problems += model_problems(receipt, service.model)
    adapters = receipt.payload.model.adapters
    if adapters and not any(problem.startswith("adapter:") for problem in problems):
        scales = service.model.adapters.found(list(map(asdict, adapters)))
        service = replace(service, model=service.model.with_adapters(scales))
    if receipt.payload.kind in READINGS:
        problems += reading_problems(service, receipt)
        if problems:
            return ReceiptVerdict(receipt, problems, None)
        done = recompute_results(receipt, service, demands.sample)
        return ReceiptVerdict(receipt, [done.problem] if done.problem else [], done)
    derived = derive_requests(receipt, service)
    if not isinstance(derived, DerivedRequests):
        return ReceiptVerdict(receipt, [*problems, derived], None)
    problems += [] if _broken(problems) else request_problems(receipt, derived)
    if problems:
        # The receipt is already wrong; recomputing with another model would prove nothing.
        return ReceiptVerdict(receipt, problems, None)
    derived = derived.within_context
    if demands.sample is None:
        done = recompute_all(receipt, derived)
    else:
        done = recompute_sample(receipt, derived, demands.sample)
    return ReceiptVerdict(receipt, [done.problem] if done.problem else [], done)


def _broken(problems: Sequence[str]) -> bool:
    """Whether the receipt is not consistent in itself."""
    return any(problem.startswith("prompt:") for problem in problems)


@contextmanager
def uncounted_service(model: ServedModel) -> Iterator[Service]:
    """A service for verification, with a local tenant whose counts are discarded."""
    with LedgerStore(None) as ledger:
        yield Service(model, Accounts(None), ledger, Metrics(model))


@contextmanager
def shown_steps(driver: SharedDriver, progress: Progress) -> Iterator[None]:
    """Show on ``progress`` how many tokens are computed, instead of counting them."""
    shown = _ShownSteps(progress)
    progress.start("computing it again", 0, "token")
    driver.listen(shown)
    try:
        yield
    finally:
        shown.close()


class _ShownSteps:
    """Shows the tokens of steps, until its end."""

    def __init__(self, progress: Progress) -> None:
        self._progress: Progress = progress
        self._lock = Lock()

    def stepped(self, seconds: float, tokens: int) -> None:
        """A step was computed."""
        with self._lock:
            self._progress.advance(tokens)

    def close(self) -> None:
        """Show nothing more."""
        with self._lock:
            self._progress.close()
            self._progress = SILENT
