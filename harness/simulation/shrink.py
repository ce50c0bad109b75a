"""Shrinks a failing schedule: fewer actions, shorter prompts, fewer tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from harness.simulation.schedule import Arrive, KeptAction, Schedule, keep

MAX_TRIALS = 2000
"""The most schedules that are played to shrink one."""


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool]) -> tuple[KeptAction, ...]:
    """A small part of ``schedule``, which fails, that still fails.

    Delta debugging (Zeller and Hildebrandt 2002) on the actions, then halving of the lengths."""
    return _Shrinking(schedule, fails).smallest()


class _Shrinking:
    def __init__(self, schedule: Schedule, fails: Callable[[Schedule], bool]) -> None:
        self._schedule = schedule
        self._fails = fails
        self._trials = 0
        self._kept = [KeptAction(index) for index in range(len(schedule.actions))]

    def smallest(self) -> tuple[KeptAction, ...]:
        before = None
        while before != self._kept and self._trials < MAX_TRIALS:
            before = list(self._kept)
            self._delete()
            self._shorten()
        return tuple(self._kept)

    def _accept(self, kept: list[KeptAction]) -> bool:
        """Continue from ``kept`` if it fails too."""
        if self._trials >= MAX_TRIALS:
            return False
        self._trials += 1
        if not self._fails(keep(self._schedule, kept)):
            return False
        self._kept = kept
        return True

    def _delete(self) -> None:
        size = max(1, len(self._kept) // 2)
        while True:
            start = 0
            while start < len(self._kept):
                if not self._accept(self._kept[:start] + self._kept[start + size :]):
                    start += size
            if size == 1:
                return
            size //= 2

    def _shorten(self) -> None:
        for index, kept in enumerate(self._kept):
            action = self._schedule.actions[kept.action]
            if not isinstance(action, Arrive):
                continue
            self._lower(index, "prompt", len(action.request.prompt), 1)
            self._lower(index, "tokens", action.request.max_tokens, 0)

    def _lower(self, index: int, field: str, full: int, least: int) -> None:
        """Lower one length as far as the schedule still fails, in steps that get smaller."""
        now = getattr(self._kept[index], field)
        now = full if now is None else now
        by = now - least
        while by > 0:
            lower = now - by
            if lower >= least:
                smaller = replace(self._kept[index], **{field: lower})
                if self._accept([*self._kept[:index], smaller, *self._kept[index + 1 :]]):
                    now = lower
                    continue
            by //= 2
