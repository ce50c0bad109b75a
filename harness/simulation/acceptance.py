"""Rules by which an engine accepts requests, derived from the documentation alone."""

from contract.types import Request
from reference.limits import Limits, pages_for
from reference.sched.tenants import Tenants


def acceptable(request: Request, limits: Limits, tenants: Tenants, vocab: int) -> bool:
    """Whether a request may be accepted, if the queue has room and its id is not in use."""
    if request.tenant not in tenants or tenants.is_removed(request.tenant):
        return False
    tenant = tenants[request.tenant]
    return (
        0 < len(request.prompt) <= min(limits.context, tenant.max_context)
        and 0 <= min(request.prompt) <= max(request.prompt) < vocab
        and len(request.logit_bias) <= limits.biases
        and all(0 <= token < vocab for token, _ in request.logit_bias)
        and (request.log_probabilities or 0) <= limits.top_log_probabilities
        and _pages(request, limits, tenants) <= tenant.max_kv_pages
        and has_room(request, limits, tenants)
    )


def has_room(request: Request, limits: Limits, tenants: Tenants) -> bool:
    """Whether the pages that other tenants have not reserved are enough for a request."""
    if request.tenant not in tenants:
        return False
    reserved = tenants.reservations
    others = sum(pages for id, pages in reserved.items() if id != request.tenant)
    return _pages(request, limits, tenants) <= limits.pages - others


def _pages(request: Request, limits: Limits, tenants: Tenants) -> int:
    context = min(limits.context, tenants[request.tenant].max_context)
    return pages_for(min(len(request.prompt) + request.max_tokens, context))
