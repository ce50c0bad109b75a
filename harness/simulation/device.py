"""The memory of the simulated device: which tokens every page, state and ring entry stands for.

A KV position holds the history of the tokens up to it, and a page the history before its first
token, as keys and values depend on both. A step reads all positions before its own through the page
table and requires that they are one unbroken sequence from position 0 on. So a stale, leaked,
swapped, overwritten or not restored page is noticed when it is read, even if all tokens are right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from contract.arithmetic import PAGE_TOKENS
from contract.arrays import Records
from contract.records import SAMPLING
from harness.simulation.constraint import nearest
from harness.simulation.history import (
    OF_POSITION,
    OF_TOKEN,
    WORD,
    adapted,
    bias_number,
    model_number,
    sample,
)
from harness.simulation.invariants import Invariant, Violation
from reference.limits import Limits
from reference.runner import StepInput

LOST = -1
"""A history that no tokens have: the contents of memory after a fault."""
NO_SCOPE = -1

_FIELDS: tuple[str, ...] = SAMPLING.names or ()
_SLOT, _POSITION, _LOW, _HIGH, _RECENT, _MASK, _BIAS_FIRST, _BIAS_COUNT = map(
    _FIELDS.index,
    (
        "slot",
        "position",
        "seed_low",
        "seed_high",
        "repeat_last_n",
        "mask",
        "bias_first",
        "bias_count",
    ),
)


def tokens_of(mask: NDArray[np.uint32]) -> list[int]:
    """The tokens that a packed mask allows, in order."""
    bits = np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little")
    allowed: list[int] = bits.nonzero()[0].tolist()
    return allowed


class StepCopy(NamedTuple):
    """A snapshot of a step's inputs. ``allowed`` are the tokens of each mask in order, ``bias`` the
    records of all slots, ``scopes`` the isolation scope of each slot, ``adapters`` the number of
    the adapters of each token."""

    query: list[tuple[int, int, int, int]]
    rows: list[int]
    sampling: list[tuple[float, ...]]
    page_table: list[list[int]]
    allowed: list[list[int]]
    bias: list[tuple[int, float]]
    scopes: list[int]
    adapters: list[int]

    @classmethod
    def of(cls, step: StepInput, scopes: Sequence[int]) -> StepCopy:
        """A snapshot of ``step``."""
        return cls(
            step.query.tolist(),
            step.output_rows.tolist(),
            step.sampling.tolist(),
            np.asarray(step.page_table).tolist(),
            [] if step.allowed is None else [tokens_of(mask) for mask in step.allowed],
            [] if step.bias is None else step.bias.tolist(),
            list(scopes),
            [0] * len(step.query) if step.adapters is None else [*map(_adapted, step.adapters)],
        )


def _adapted(entries: Records) -> int:
    """The number of a token's adapters: those behind the entries that add nothing."""
    unused = len(entries)
    pairs = zip(entries["id"].tolist(), entries["scale"].tolist(), strict=True)
    return adapted((id - unused, scale) for id, scale in pairs if id >= unused)


class SavedState(NamedTuple):
    """A recurrent state: the position that begins with it, and the history up to there."""

    position: int
    history: int


@dataclass(slots=True)
class Page:
    """16 positions: the history ``before`` the first, and the history up to each written one."""

    before: int = LOST
    after: list[int] = field(default_factory=list)
    scope: int = NO_SCOPE

    def copy(self) -> Page:
        """A copy that shares nothing with this page."""
        return Page(self.before, list(self.after), self.scope)


class DeviceMemory:
    """The memory that steps read and write: KV pages, slots' last tokens, saved recurrent
    states."""

    def __init__(self, limits: Limits, *, recurrent: bool, model: int = 0) -> None:
        self.limits = limits
        self._model = model_number(model)
        self.recurrent = recurrent
        self.pages: list[Page] = []
        self.lose()

    def lose(self) -> None:
        """Lose all contents: memory that is read before it is written is noticed."""
        limits = self.limits
        self.pages[:] = [Page() for _ in range(limits.pages)]
        self.last_token = [0] * limits.slots
        self.last_position = [-1] * limits.slots
        self.recent = [[0] * limits.recent_tokens for _ in range(limits.slots)]
        self.states = [[LOST] * limits.slot_states for _ in range(limits.slots)]
        self.state_positions = [0] * limits.slots
        self.saved_states = [SavedState(0, LOST)] * limits.saved_states

    def execute(self, step: StepCopy) -> tuple[list[int], list[int]]:
        """Run a step: the sampled token and the history of every output row. Raises Violation."""
        after: list[int] = []
        begun: set[int] = set()
        current, expected, history = -1, 0, 0
        row: list[int] = []
        ring: list[int] = []
        pages, recent_tokens = self.pages, self.limits.recent_tokens
        for (token, slot, position, _), adapters in zip(step.query, step.adapters, strict=True):
            if slot != current:
                if slot in begun:
                    raise Violation(Invariant.SLOT_OWNER, f"slot {slot} has two parts in a step")
                begun.add(slot)
                current, expected = slot, position
                row, ring = step.page_table[slot], self.recent[slot]
                history = self._read(slot, row, position, step.scopes[slot])
            if position != expected:
                raise Violation(
                    Invariant.HISTORY, f"slot {slot} computes {position} after {expected - 1}"
                )
            if token < 0:
                token = self._last(slot, position)
            ring[position % recent_tokens] = token
            page, offset = pages[row[position // PAGE_TOKENS]], position % PAGE_TOKENS
            if offset == 0:
                page.before, page.after, page.scope = history, [], step.scopes[slot]
            history = (history + (OF_TOKEN[token] + adapters) * OF_POSITION[position]) & WORD
            del page.after[offset:]
            page.after.append(history)
            after.append(history)
            self.keep_state(slot, position + 1, history)
            expected += 1
        return self._sample(step, after)

    def spoil(self, step: StepCopy) -> None:
        """Leave the results of a step undefined: memory that is read before it is written again is
        noticed."""
        for _, slot, position, _ in step.query:
            page, offset = (
                self.pages[step.page_table[slot][position // PAGE_TOKENS]],
                position % PAGE_TOKENS,
            )
            page.after[offset:] = [LOST]
            if not offset:
                page.before = LOST
            self.keep_state(slot, position + 1, LOST)
            self.last_position[slot] = -1

    def keep_state(self, slot: int, position: int, history: int) -> None:
        """Store the recurrent state with which ``position`` of a slot begins."""
        self.states[slot][position % self.limits.slot_states] = history
        self.state_positions[slot] = position

    def _last(self, slot: int, position: int) -> int:
        """LOAD_REQUEST_STATE: the slot's last token, which must belong at ``position``."""
        if self.last_position[slot] != position:
            raise Violation(
                Invariant.HISTORY,
                f"slot {slot} has a last token for position {self.last_position[slot]}, "
                f"not {position}",
            )
        return max(self.last_token[slot], 0)

    def _read(self, slot: int, row: list[int], position: int, scope: int) -> int:
        """The history before ``position``. Raises Violation where a page does not continue the one
        before it."""
        history = 0
        for number in range(-(-position // PAGE_TOKENS)):
            page = self.pages[row[number]]
            needed = min(PAGE_TOKENS, position - number * PAGE_TOKENS)
            if page.before != history or len(page.after) < needed:
                raise Violation(
                    Invariant.HISTORY,
                    f"slot {slot} reads at position {number * PAGE_TOKENS}, in page {row[number]}, "
                    "what does not continue its sequence",
                )
            if page.scope != scope:
                raise Violation(
                    Invariant.PAGE_ISOLATION,
                    f"slot {slot} of scope {scope} reads page {row[number]} of scope {page.scope}",
                )
            history = page.after[needed - 1]
        if self.recurrent and position and self.state(slot, position) != history:
            raise Violation(Invariant.HISTORY, f"slot {slot} has the state of other tokens")
        return history

    def state(self, slot: int, position: int) -> int:
        """The recurrent state with which ``position`` of a slot begins, unless it was replaced."""
        return self.states[slot][position % self.limits.slot_states]

    def _sample(self, step: StepCopy, after: list[int]) -> tuple[list[int], list[int]]:
        """SAMPLE and STORE_REQUEST_STATE."""
        tokens, histories = [], []
        for query_row, record in zip(step.rows, step.sampling, strict=True):
            _, slot, position, _ = step.query[query_row]
            position += 1
            if record[_SLOT] != slot or record[_POSITION] != position:
                raise Violation(
                    Invariant.HISTORY,
                    f"position {position} of slot {slot} is sampled as position "
                    f"{record[_POSITION]} of slot {record[_SLOT]}",
                )
            window, recent = int(record[_RECENT]), 0
            if window:
                ring, adapters = self.recent[slot], step.adapters[query_row]
                for seen in range(max(0, position - window), position):
                    recent += (OF_TOKEN[ring[seen % len(ring)]] + adapters) * OF_POSITION[seen]
            seed = int(record[_LOW]) | int(record[_HIGH]) << 32
            history = after[query_row]
            others = recent + self._model
            if count := int(record[_BIAS_COUNT]):
                first = int(record[_BIAS_FIRST])
                biases = step.bias[first : first + count]
                if len(biases) != count:
                    raise Violation(Invariant.TOKENS, f"slot {slot} has biases that a step lacks")
                others += bias_number(biases)
            token = sample(history, seed, others)
            if record[_MASK]:
                token = nearest(token, step.allowed[int(record[_MASK]) - 1])
            self.last_token[slot], self.last_position[slot] = token, position
            tokens.append(token)
            histories.append(history)
        return tokens, histories
