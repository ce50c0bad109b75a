"""Ranks replicas by how much of a prompt they have cached and how busy they are.

A replica's prefix cache holds pages of the prompts that were sent to it, for the tenants that may
share them. The router knows what it sent where, so it need not ask the replicas."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence

from contract.arithmetic import PAGE_TOKENS

MAX_PAGES = 1 << 16
"""Most pages whose replicas are known; the least recently used are dropped."""
SLACK = 4
"""A replica with more than this many requests above the fewest counts as overloaded."""


class PrefixAffinity:
    """Ranks replicas, by name, for a prompt of a tenant. Not thread-safe."""

    def __init__(self, max_pages: int = MAX_PAGES) -> None:
        self._max_pages = max_pages
        self._replicas_of: OrderedDict[int, set[str]] = OrderedDict()
        self._load: Counter[str] = Counter()

    def rank(self, scope: int, prompt: Sequence[int], replicas: Collection[str]) -> list[str]:
        """``replicas``, best first. Replicas that are not overloaded come first, then those with
        most cached pages of the prompt, then those with fewest requests. Ties are broken by a hash
        of ``scope``, so that a tenant's first prompts go to the same replica."""
        idlest = min((self._load[name] for name in replicas), default=0)
        pages = self._pages(scope, prompt)

        def order(name: str) -> tuple[bool, int, int, bytes]:
            load = self._load[name]
            return load - idlest > SLACK, -self._cached(pages, name), load, _weight(scope, name)

        return sorted(replicas, key=order)

    def sent(self, scope: int, prompt: Sequence[int], replica: str) -> None:
        """Record that a prompt was sent to a replica, which caches it from now on."""
        self._load[replica] += 1
        for page in self._pages(scope, prompt):
            self._replicas_of.setdefault(page, set()).add(replica)
            self._replicas_of.move_to_end(page)
        while len(self._replicas_of) > self._max_pages:
            self._replicas_of.popitem(last=False)

    def ended(self, replica: str) -> None:
        """Record that a request of a replica ended."""
        if self._load[replica]:  # It may be forgotten before its last request ends.
            self._load[replica] -= 1

    def keep(self, replicas: Collection[str]) -> None:
        """Forget all replicas but these, whose pages and requests went with them."""
        for name in self._load.keys() - set(replicas):
            del self._load[name]
        for page, names in list(self._replicas_of.items()):
            names.intersection_update(replicas)
            if not names:
                del self._replicas_of[page]

    def _cached(self, pages: Sequence[int], replica: str) -> int:
        """How many of the first pages a replica has cached."""
        count = 0
        for page in pages:
            if replica not in self._replicas_of.get(page, ()):
                break
            count += 1
        return count

    @staticmethod
    def _pages(scope: int, prompt: Sequence[int]) -> list[int]:
        """A hash of each full page, over all tokens up to its end."""
        hashes: list[int] = []
        before = hash(("scope", scope))
        for start in range(0, len(prompt) - PAGE_TOKENS + 1, PAGE_TOKENS):
            before = hash((before, tuple(prompt[start : start + PAGE_TOKENS])))
            hashes.append(before)
        return hashes


def _weight(scope: int, name: str) -> bytes:
    """Rendezvous hashing (Thaler and Ravishankar, 1998)."""
    return hashlib.sha256(f"{scope} {name}".encode()).digest()
