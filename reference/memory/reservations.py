"""Pages that are guaranteed to tenants."""

from __future__ import annotations

from collections.abc import Callable, Mapping


class Reservations:
    """How many of ``total`` pages each tenant is guaranteed: what it does not hold of its own,
    nobody else can take. A reservation frees nothing by itself."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._pages: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._pages)

    def check(self, pages: Mapping[int, int]) -> None:
        """Raise ValueError where these, by tenant, are more pages than there are."""
        together = sum(pages.values())
        if min(pages.values(), default=0) < 0 or together > self._total:
            raise ValueError(f"{together} pages would be reserved, there are {self._total}")

    def set_all(self, pages: Mapping[int, int]) -> None:
        """Guarantee each tenant so many pages, and others none. Raises ValueError, having changed
        nothing, when there are not so many."""
        self.check(pages)
        self._pages = {tenant: count for tenant, count in pages.items() if count}

    def set_one(self, tenant: int, pages: int) -> None:
        """Change what one tenant is guaranteed. Raises as ``set_all`` does."""
        self.set_all(self._pages | {tenant: pages})

    def most_for(self, tenant: int) -> int:
        """Pages that others cannot claim."""
        return self._total - sum(self._pages.values()) + self._pages.get(tenant, 0)

    def kept_from(self, tenant: int, held: Callable[[int], int]) -> int:
        """Pages that ``tenant`` cannot take since others, who have ``held`` so many, may still
        claim them."""
        others = ((other, pages) for other, pages in self._pages.items() if other != tenant)
        return sum(max(0, pages - held(other)) for other, pages in others)
