"""Ranks replicas by how much of a prompt they have computed and how busy they are.

A replica's prefix cache holds pages of the prompts it was given, each under the tenants that may
share it. Who routes need not ask: it knows what it sent where."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence

from contract.arithmetic import PAGE_TOKENS

MAX_PAGES = 1 << 16
"""Most pages whose replicas are remembered; those unused for longest are forgotten."""
SLACK = 4
"""So many requests more than the idlest a replica may have, and still be taken for its cache."""


class PrefixAffinity:
    """Ranks replicas, by name, for a prompt of a tenant. Not thread-safe."""

    def __init__(self, most_pages: int = MAX_PAGES) -> None:
        self._most = most_pages
        self._replicas_of: OrderedDict[int, set[str]] = OrderedDict()
        self._load: Counter[str] = Counter()

    def rank(self, scope: int, prompt: Sequence[int], replicas: Collection[str]) -> list[str]:
        """``replicas``, the best first: of those that are not overloaded the one that has most
        pages of the prompt; of equal ones the idlest; then one that is always the same for a
        ``scope``, so that a tenant's first prompts meet."""
        idlest = min((self._load[name] for name in replicas), default=0)
        pages = self._pages(scope, prompt)

        def order(name: str) -> tuple[bool, int, int, bytes]:
            load = self._load[name]
            return load - idlest > SLACK, -self._known(pages, name), load, _weight(scope, name)

        return sorted(replicas, key=order)

    def sent(self, scope: int, prompt: Sequence[int], replica: str) -> None:
        """Note that a request went to a replica, which has its prompt from now on."""
        self._load[replica] += 1
        for page in self._pages(scope, prompt):
            self._replicas_of.setdefault(page, set()).add(replica)
            self._replicas_of.move_to_end(page)
        while len(self._replicas_of) > self._most:
            self._replicas_of.popitem(last=False)

    def ended(self, replica: str) -> None:
        """Note that a request of a replica ended."""
        self._load[replica] = max(0, self._load[replica] - 1)

    def _known(self, pages: Sequence[int], replica: str) -> int:
        """How many of the first pages a replica has."""
        count = 0
        for page in pages:
            if replica not in self._replicas_of.get(page, ()):
                break
            count += 1
        return count

    @staticmethod
    def _pages(scope: int, prompt: Sequence[int]) -> list[int]:
        """A hash for each full page, over all tokens up to its end."""
        hashes: list[int] = []
        before = hash(("scope", scope))
        for start in range(0, len(prompt) - PAGE_TOKENS + 1, PAGE_TOKENS):
            before = hash((before, tuple(prompt[start : start + PAGE_TOKENS])))
            hashes.append(before)
        return hashes


def _weight(scope: int, name: str) -> bytes:
    """Rendezvous hashing (Thaler and Ravishankar, 1998)."""
    return hashlib.sha256(f"{scope} {name}".encode()).digest()
