"""Pages with contents, whose scope and which tokens: what a sequence reads can be compared."""

from collections.abc import Hashable, Iterable

import numpy as np
from numpy.typing import NDArray

from contract.types import Tenant

PAGE = 16
TENANTS = {
    tenant.id: tenant
    for tenant in (
        Tenant(1, "alone"),
        Tenant(2, "also alone"),
        Tenant(3, "in a team", isolation_group=1),
        Tenant(4, "of the team", isolation_group=1),
    )
}
Content = tuple[Hashable, bytes]


class Contents:
    """What is in each page, and the copies a device would make."""

    def __init__(self) -> None:
        self.pages: dict[int, Content] = {}

    def copy(self, source: int, target: int) -> None:
        self.pages[target] = self.pages[source]

    def save(self, page: int) -> Content:
        return self.pages[page]

    def load(self, saved: Content, page: int) -> None:
        self.pages[page] = saved


def sequence_of(kinds: Iterable[int], rest: int) -> NDArray[np.int32]:
    """Pages of equal tokens, so that sequences often share some, and a part of a page."""
    whole = np.repeat(np.fromiter(kinds, np.int32), PAGE)
    return np.concatenate([whole, np.full(rest, 7, np.int32)])
