"""The options of an engine, as plain values."""

from __future__ import annotations

from contract.lazy_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The settings of an ``Engine``. None of them changes a bit of any answer.

    Ends: ``end_of_generation`` are the token ids that finish an answer. A request ends with an
    error after ``stall_steps`` steps in which its consumer took no tokens.

    Steps: ``chunk_tokens`` is the most prompt tokens in a step, ``chunk_while_decoding`` the most
    in a step that also decodes; None means as many as the runner's limits allow. ``steps_ahead`` is
    how many steps are submitted before the oldest one is read, at most RING_STEPS - 1; None means 1
    where the tier computes while the host plans, and 0 elsewhere. With a drafter, ``draft_tokens``
    is the most tokens drafted for a sequence in one step.

    Waiting: ``queue_depth`` is the most requests that wait.

    Memory: ``page_order`` is the order in which KV pages are first handed out, None for ascending.
    With ``prefix_cache`` a request reuses the pages of an earlier one that began with the same
    tokens. ``cached_pages`` is the most pages the cache retains that no sequence holds, None for no
    limit. With ``copy_pages`` a prefix that ends inside a cached page is reused through a copy of
    that page. ``host_pages`` is the most evicted pages that are saved in host memory."""

    end_of_generation: frozenset[int] = frozenset()
    chunk_tokens: int | None = None
    chunk_while_decoding: int | None = None
    page_order: tuple[int, ...] | None = None
    steps_ahead: int | None = None
    queue_depth: int = 1024
    prefix_cache: bool = True
    cached_pages: int | None = None
    copy_pages: bool = False
    host_pages: int = 0
    stall_steps: int = 64
    draft_tokens: int = 11


ENGINE_DEFAULTS = EngineOptions()
