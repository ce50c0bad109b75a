"""The KV page pool: the free pages, and the holders and the charged tenant of each other page."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from contract.arithmetic import PAGE_TOKENS
from contract.arrays import Records
from contract.records import NO_SLOT, PAGE_META


class PagePool:
    """A fixed number of pages. The page freed first is used again first.

    ``order`` is the order in which pages are first handed out; it changes no result. ``meta`` is
    PAGE_META[pages]: ``owner_slot`` is NO_SLOT for a page that was ever shared, ``tenant`` the
    tenant it is charged to, ``token_count`` 16 once the page was published. A page without
    references stays allocated until it is given back: until then it can be held again with its
    contents.

    Each page with references is charged to one tenant that holds it. If this tenant releases it and
    another still holds it, the charge moves to the other."""

    def __init__(self, pages: int, order: Iterable[int] | None = None) -> None:
        self._free = deque(range(pages) if order is None else order)
        self.meta: Records = np.zeros(pages, PAGE_META)
        self.meta["owner_slot"] = NO_SLOT
        self._references, self._owners = self.meta["ref_count"], self.meta["owner_slot"]
        self._payers = self.meta["tenant"]
        self._charged: Counter[int] = Counter()
        self._others: dict[int, list[int]] = {}
        if sorted(self._free) != list(range(pages)):
            raise ValueError("the order names every page once")

    @property
    def free(self) -> int:
        """The number of free pages."""
        return len(self._free)

    def charged(self, tenant: int) -> int:
        """Pages charged to the tenant."""
        return self._charged[tenant]

    def references(self, page: int) -> int:
        """The page's number of references."""
        return int(self._references[page])

    def holders(self, page: int) -> list[int]:
        """The tenant of every reference to the page, the one it is charged to first."""
        if not self._references[page]:
            return []
        return [int(self._payers[page]), *self._others.get(page, ())]

    def take(self, count: int, slot: int, tenant: int = 0) -> list[int]:
        """Take ``count`` free pages for ``slot``; the caller has checked ``free``."""
        if count > len(self._free):
            raise AssertionError(f"{count} pages asked of {len(self._free)} free ones")
        pages = [self._free.popleft() for _ in range(count)]
        self._occupy(pages, slot, tenant)
        return pages

    def hold(self, pages: Sequence[int], slot: int, tenant: int = 0) -> None:
        """Add a reference to each page; none of them may be free."""
        if not pages:
            return
        counts = self._references[list(pages)].tolist()
        unheld = [page for page, count in zip(pages, counts, strict=True) if not count]
        if unheld:
            self._occupy(unheld, slot, tenant)
        for page, count in zip(pages, counts, strict=True):
            if count:
                self._others.setdefault(page, []).append(tenant)
                self._references[page] += 1
                self._owners[page] = NO_SLOT

    def release(self, pages: Sequence[int], tenant: int = 0) -> list[int]:
        """Drop one reference of ``tenant`` to each page. Returns the pages that have none left, in
        order. Raises AssertionError, having changed nothing, if the tenant has no reference to one
        of them or one is named twice."""
        self._check_held(pages, tenant)
        left = []
        for page in pages:
            others = self._others.get(page)
            if others is None:
                left.append(page)
                continue
            leaver = tenant
            if int(self._payers[page]) == tenant and tenant not in others:
                leaver = others[0]
                self._charge(leaver, 1)
                self._charge(tenant, -1)
                self._payers[page] = leaver
            others.remove(leaver)
            self._references[page] -= 1
            if not others:
                del self._others[page]
        self._charge(tenant, -len(left))
        self._references[left] = 0
        self._owners[left] = NO_SLOT
        self._payers[left] = 0
        return left

    def effect_of(self, leaving: Sequence[tuple[int, Sequence[int]]]) -> tuple[int, Counter[int]]:
        """The effect of releasing ``leaving``, (tenant, pages) each: the number of pages that would
        have no holder, and how many more each tenant would be charged for."""
        leavers: dict[int, list[int]] = {}
        for tenant, pages in leaving:
            for page in pages:
                leavers.setdefault(page, []).append(tenant)
        freed, changes = 0, Counter[int]()
        for page, tenants in leavers.items():
            holders = self.holders(page)
            charged = holders[0]
            for tenant in tenants:
                holders.remove(tenant)
            freed += not holders
            if charged not in holders:
                changes[charged] -= 1
                changes.update(holders[:1])
        return freed, changes

    def mark_whole(self, page: int) -> None:
        """Record that keys and values of all positions of the page are computed."""
        self.meta["token_count"][page] = PAGE_TOKENS

    def give_back(self, pages: Sequence[int]) -> None:
        """Free pages that have no references."""
        held = [page for page in pages if self._references[page]]
        if held:
            raise AssertionError(f"page {held[0]} is held")
        self.meta["token_count"][pages] = 0
        self._free.extend(pages)

    def check(self) -> None:
        """Raise AssertionError if free pages, references and charges contradict each other."""
        free, references = list(self._free), self._references
        assert len(free) == len(set(free)), "a page is free twice"
        assert not references[free].any(), "a page is free and held"
        charged: Counter[int] = Counter(self._payers[references > 0].tolist())
        assert charged == self._charged, f"charged are {self._charged}, pages say {charged}"
        for page in np.flatnonzero(references).tolist():
            assert references[page] == 1 + len(self._others.get(page, ())), (
                f"page {page} counts {references[page]} references"
            )
        assert not any(references[page] == 0 for page in self._others), "a holder of nothing"

    def _occupy(self, pages: list[int], slot: int, tenant: int) -> None:
        self._references[pages] = 1
        self._owners[pages] = slot
        self._payers[pages] = tenant
        self._charge(tenant, len(pages))

    def _charge(self, tenant: int, pages: int) -> None:
        self._charged[tenant] += pages
        if not self._charged[tenant]:
            del self._charged[tenant]

    def _check_held(self, pages: Sequence[int], tenant: int) -> None:
        if len(set(pages)) != len(pages):
            raise AssertionError("a page is released twice at once")
        named = list(pages)
        holders = zip(
            named, self._references[named].tolist(), self._payers[named].tolist(), strict=True
        )
        for page, count, payer in holders:
            charged = count and payer == tenant
            if not charged and tenant not in self._others.get(page, ()):
                raise AssertionError(f"page {page} is not owned by tenant {tenant}")


class Reservations:
    """The number of pages, of ``total``, reserved for each tenant. No other tenant can take the
    reserved pages that a tenant does not hold yet. A reservation takes no page from a present
    holder."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._pages: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._pages)

    def check(self, pages: Mapping[int, int]) -> None:
        """Raise ValueError if ``pages``, by tenant, are more than there are."""
        together = sum(pages.values())
        if min(pages.values(), default=0) < 0 or together > self._total:
            raise ValueError(f"{together} pages would be reserved, there are {self._total}")

    def set_all(self, pages: Mapping[int, int]) -> None:
        """Reserve ``pages`` for each tenant, none for others. Raises ValueError, having changed
        nothing, if there are too few."""
        self.check(pages)
        self._pages = {tenant: count for tenant, count in pages.items() if count}

    @property
    def pages(self) -> int:
        """All reserved pages."""
        return sum(self._pages.values())

    def max_for(self, tenant: int) -> int:
        """The most pages a tenant can ever have: all that no other tenant has reserved."""
        return self._total - self.pages + self._pages.get(tenant, 0)

    def reserved_for_others(self, tenant: int, held: Callable[[int], int]) -> int:
        """Pages that ``tenant`` cannot take, because they are reserved for other tenants that do
        not hold them yet. ``held`` gives the pages that a tenant holds."""
        others = ((other, pages) for other, pages in self._pages.items() if other != tenant)
        return sum(max(0, pages - held(other)) for other, pages in others)
