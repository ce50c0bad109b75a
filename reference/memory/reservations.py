"""Pages that are reserved for tenants."""

from __future__ import annotations

from collections.abc import Callable, Mapping


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
