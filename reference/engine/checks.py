"""Checks of a request at submission; one that could never run to its end is refused."""

from __future__ import annotations

from contract.errors import PromptTooLong, RequestError
from contract.types import QosClass, Request, Tenant
from reference.limits import Limits, pages_for
from reference.runner import HIDDEN, ROW_DIGEST, ModelRunner
from reference.sched.constraints import check_constraints, check_forced


def check_sizes(limits: Limits) -> None:
    """Raise ValueError unless a step has room for a decode token of every slot and one prefill
    token, and for a mask of every slot if there are masks."""
    if limits.step_tokens <= limits.slots or limits.step_rows < limits.slots:
        raise ValueError("a step must hold a decode token of every slot and one of prefill")
    if 0 < limits.masks < limits.slots:
        raise ValueError("a step must hold a mask for every slot, or none")


def check_request(
    request: Request, tenant: Tenant, runner: ModelRunner, pages: int, *, masked: bool
) -> None:
    """Raise RequestError naming the wrong field.

    ``pages`` is the most KV pages the tenant can get. ``masked``: token masks, from a grammar or
    another function of the tokens so far, restrict the answer."""
    limits, vocab = runner.limits, runner.model.config.vocab
    request.sampling.validate()
    if not request.prompt:
        raise RequestError("prompt", "is empty; give at least one token")
    if min(request.prompt) < 0 or max(request.prompt) >= vocab:
        raise RequestError("prompt", f"holds a token id outside 0 to {vocab - 1}")
    limit = min(limits.context, tenant.max_context)
    if len(request.prompt) > limit:
        raise PromptTooLong("prompt", f"{len(request.prompt)} tokens", limit)
    if request.sampling.penalizes and request.sampling.repeat_last_n > limits.recent_tokens:
        raise RequestError("repeat_last_n", f"is at most {limits.recent_tokens}")
    if not isinstance(request.qos, QosClass | None):
        raise RequestError("qos", f"is {request.qos!r}, not a QosClass")
    _check_min_tokens(request, vocab)
    check_constraints(request, limits, vocab, masked=masked)
    check_forced(request, limits, vocab, masked=masked)
    runner.model.adapters.check(request.adapters)
    if len(request.prompt) + len(request.force_tokens) > limit:
        answer = f"is {len(request.force_tokens)} tokens"
        raise RequestError(
            "force_tokens", f"{answer}, which with the prompt exceed the context, {limit}"
        )
    limit = min(tenant.max_kv_pages, pages)
    needed = pages_for(max_positions_of(request, tenant, limits))
    if needed > limit:
        raise RequestError(
            "max_tokens", f"with the prompt needs {needed} KV pages, there are {limit}"
        )


def _check_min_tokens(request: Request, vocab: int) -> None:
    """Raise RequestError for ``min_tokens`` or ``stop_tokens`` out of range."""
    least = request.min_tokens
    if type(least) is not int or not 0 <= least <= request.max_tokens:
        raise RequestError("min_tokens", f"is {least!r}, not from 0 to max_tokens")
    if least and request.force_tokens:
        raise RequestError("min_tokens", "changes nothing where force_tokens are given")
    if not all(0 <= token < vocab for token in request.stop_tokens):
        raise RequestError("stop_token_ids", f"holds an id outside 0 to {vocab - 1}")


def check_outputs(runner: ModelRunner, output: str, *, experts: bool) -> None:
    """Raise RequestError if the engine's steps lack a requested output: ``output``, the name of a
    row output (logits, HIDDEN or ROW_DIGEST), or the ids of ``experts``."""
    if output == HIDDEN and not runner.limits.hidden_states:
        raise RequestError("output", "cannot be hidden states: the limits have none")
    if output == ROW_DIGEST and not runner.limits.digests:
        raise RequestError("output", "cannot be digests: the limits have none")
    if experts and not runner.expert_outputs:
        mixture = runner.model.config.experts is not None
        why = "this engine was built without them" if mixture else "the model has none"
        raise RequestError("experts", f"cannot be read: {why}")


def max_positions_of(request: Request, tenant: Tenant, limits: Limits) -> int:
    """The most positions a request can have: its prompt and ``max_tokens``, or the context."""
    limit = min(limits.context, tenant.max_context)
    return min(len(request.prompt) + request.max_tokens, limit)
