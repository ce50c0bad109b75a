"""Writes a timeline of an engine's decisions for Chrome and Perfetto (ui.perfetto.dev).

It has three groups of tracks: the steps, with counters of requests and pages; the slots, each with
its request and what the steps compute for it; the tenants, each with its waiting and running
requests. The file is the JSON array of the trace event format, which may end anywhere."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from contract.context_manager import ContextManager
from contract.errors import system_errors_as
from contract.types import FinishReason, Request
from reference.observer import Observer, StepObservation

STEPS, SLOTS, TENANTS = 1, 2, 3
GROUPS = {STEPS: "steps", SLOTS: "slots", TENANTS: "tenants"}
"""Names of the groups of tracks, which the format calls processes."""
WAITING, RUNNING = "waiting", "running"


@dataclass(slots=True)
class _Resident:
    """The request in a slot, since when it has the slot, and how many of its tokens were
    returned."""

    request: int
    since: float
    known: int


class Timeline(ContextManager, Observer):
    """Writes a timeline to a new file as it happens. A context manager.

    It keeps only what it needs for requests in flight."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when the file cannot be written, or exists."""
        with system_errors_as(f"{path}: cannot be written"):
            self._file: TextIO = path.open("x", encoding="utf-8")
        self._tenant: dict[int, int] = {}
        self._in_slots: dict[int, _Resident] = {}
        self._named: set[tuple[int, int]] = set()
        self._read_at = 0.0
        self._separator = "[\n"
        for group, name in GROUPS.items():
            self._put("M", group, 0, "process_name", args={"name": name})
            self._put("M", group, 0, "process_sort_index", args={"sort_index": group})

    def submitted(self, at: float, request: Request) -> None:
        """Begin the waiting time of a request."""
        self._tenant[request.id] = request.tenant
        args = {"prompt": len(request.prompt), "max_tokens": request.max_tokens}
        self._span("b", WAITING, at, request.id, args)

    def admitted(self, at: float, request_id: int, slot: int, known: int, reused: int) -> None:
        """Show that a request got a slot."""
        self._in_slots[slot] = _Resident(request_id, at, known)
        args = {"slot": slot, "known": known, "reused": reused}
        self._span("e", WAITING, at, request_id)
        self._span("b", RUNNING, at, request_id, args)
        self._name(SLOTS, slot, f"slot {slot}")
        self._put("B", SLOTS, slot, f"request {request_id}", at, args=args)

    def preempted(self, at: float, request_id: int, slot: int, known: int) -> None:
        """Show that a request lost its slot and waits again."""
        self._end_slot(at, slot)
        self._span("e", RUNNING, at, request_id, {"preempted": True, "known": known})
        self._span("b", WAITING, at, request_id, {"known": known})

    def finished(self, at: float, request_id: int, slot: int | None, reason: FinishReason) -> None:
        """Show that a request ended."""
        if slot is not None:
            self._end_slot(at, slot)
        state = WAITING if slot is None else RUNNING
        self._span("e", state, at, request_id, {"finish_reason": reason.value})
        self._tenant.pop(request_id, None)

    def step(self, step: StepObservation) -> None:
        """Draw a step, from the end of the step before, since steps run in order."""
        began = max(step.began, self._read_at)
        self._read_at = step.ended
        tokens = {"prefill": 0, "decode": 0, "unused": 0}
        for request, (slot, start, count) in zip(step.requests, step.chunks, strict=True):
            resident = self._in_slots.get(slot)
            # Skip what a step computed for a request that has left the slot since.
            if resident is None or resident.request != request or resident.since > step.began:
                tokens["unused"] += count
                continue
            name = "prefill" if start < resident.known else "decode"
            tokens[name] += count
            args = {"step": step.number, "position": start, "tokens": count}
            self._slice(SLOTS, slot, name, began, step.ended, args)
        self._slice(STEPS, 0, "step", began, step.ended, {"number": step.number} | tokens)
        requests = {"running": len(self._in_slots), "waiting": step.waiting}
        self._put("C", STEPS, 0, "requests", step.began, args=requests)
        pages = {"free": step.free_pages, "cached": step.cached_pages}
        self._put("C", STEPS, 0, "pages", step.began, args=pages)

    def close(self) -> None:
        """End the file. Harmless when already ended."""
        if not self._file.closed:
            self._write("\n]\n", last=True)

    def _end_slot(self, at: float, slot: int) -> None:
        if self._in_slots.pop(slot, None) is not None:
            self._put("E", SLOTS, slot, "", at)

    def _span(
        self, phase: str, name: str, at: float, request: int, args: dict[str, Any] | None = None
    ) -> None:
        """Begin or end a state of a request in its tenant's track."""
        tenant = self._tenant.get(request, 0)
        self._name(TENANTS, tenant, f"tenant {tenant}")
        self._put(phase, TENANTS, tenant, name, at, args, cat="request", id=request)

    def _slice(
        self, group: int, track: int, name: str, began: float, ended: float, args: dict[str, Any]
    ) -> None:
        duration = _microseconds(ended) - _microseconds(began)
        self._put("X", group, track, name, began, args, dur=duration)

    def _name(self, group: int, track: int, name: str) -> None:
        if (group, track) not in self._named:
            self._named.add((group, track))
            self._put("M", group, track, "thread_name", args={"name": name})

    def _put(
        self,
        phase: str,
        group: int,
        track: int,
        name: str,
        at: float = 0.0,
        args: dict[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        event = {"ph": phase, "pid": group, "tid": track, "name": name, "ts": _microseconds(at)}
        if args is not None:
            event["args"] = args
        self._write(self._separator + json.dumps(event | fields, separators=(",", ":")))
        self._separator = ",\n"

    def _write(self, text: str, *, last: bool = False) -> None:
        with system_errors_as(f"{self._file.name}: cannot be written"):
            self._file.write(text)
            if last:
                self._file.close()


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
