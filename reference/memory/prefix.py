"""The prefix cache's index: for each scope a tree of pages by the tokens they hold.

A node is one page: its 16 tokens follow those of the nodes above it. Children are found by their
tokens, compared in full, so a collision of hashes cannot give a wrong page. A tenant finds only
pages below the root of its own scope."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from contract.arithmetic import PAGE_TOKENS
from contract.arrays import Ints
from contract.lazy_dataclass import dataclass
from contract.types import Tenant

KEY_BYTES = PAGE_TOKENS * 4
NO_TENANTS: frozenset[int] = frozenset()
MAX_COMPARED = 64
"""The most cached pages compared with a prompt to find the token at which it differs: the newest
ones."""


Scope = tuple[str | int, ...]
"""Who shares prefixes: ("tenant" or "group", number), then the identity of the adapters if there
are any, since adapters change keys and values."""


def scope_of(tenant: Tenant) -> Scope:
    """The scope in which a tenant shares prefixes: its isolation group, or itself alone."""
    if tenant.isolation_group is None:
        return "tenant", tenant.id
    return "group", tenant.isolation_group


def sharers(scope: Hashable) -> Hashable:
    """The part of a scope that says who shares it."""
    return scope[:2] if isinstance(scope, tuple) else scope


@dataclass(slots=True, eq=False)
class Node:
    """A full page of tokens.

    ``page`` is its number, None for a root and for a page in host memory, which is ``saved``.
    ``state`` is the slot of the recurrent state after its last token, if one is saved. ``parent``
    is None for a root and for a removed node; only a root has a ``scope``. ``tenants`` are those
    whose own sequences began with these tokens. ``digest`` is its name on disk, if there is a disk
    cache."""

    key: bytes
    parent: Node | None
    page: int | None = None
    saved: Any = None
    state: int | None = None
    scope: Hashable = None
    tenants: frozenset[int] = NO_TENANTS
    digest: bytes = b""
    children: dict[bytes, Node] = field(default_factory=dict)

    def upward(self) -> Iterator[Node]:
        """The node and the nodes above it, without the root."""
        node: Node = self
        while node.parent is not None:
            yield node
            node = node.parent


class TreeObserver:
    """Receives every change of the trees, to mirror them. This base class does nothing."""

    def added(self, scope: Hashable, node: Node) -> None:
        """A node was added; it gets its page next."""

    def state_saved(self, node: Node) -> None:
        """The recurrent state after a node was saved."""


NO_TREE_OBSERVER = TreeObserver()


@dataclass(frozen=True, slots=True)
class PublishedPrefix:
    """The published part of a sequence: ``pages`` pages, the last of which is ``node``."""

    node: Node
    pages: int

    @property
    def valid(self) -> bool:
        """False once the node was evicted."""
        return self.node.parent is not None


class Difference(NamedTuple):
    """The first token at which a sequence differs from a cached one: its ``position``, and the
    ``cached`` token there."""

    position: int
    cached: int


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The first ``tokens`` tokens of a sequence, which are in ``pages`` and need not be computed.

    ``state`` is the slot of the recurrent state after them, if the model has any. If ``tokens`` is
    not a whole number of pages, the last page is a copy that belongs to the sequence. Whole pages
    of its first ``matched`` tokens are cached, with or without a state. ``difference`` is where a
    cached sequence of the same tenant continues differently. ``from_disk`` of the tokens were only
    on disk."""

    pages: tuple[int, ...]
    tokens: int
    state: int | None = None
    matched: int = 0
    difference: Difference | None = None
    from_disk: int = 0


@dataclass(frozen=True, slots=True)
class PrefixStatistics:
    """Counts since the start: ``queries`` for ``tokens_asked`` tokens, of which ``tokens_hit`` were
    cached; pages ``evicted``, those of them ``spilled`` to host memory, ``restored`` from it, and
    ``copied`` because a sequence had to write to them."""

    queries: int = 0
    tokens_asked: int = 0
    tokens_hit: int = 0
    evicted: int = 0
    spilled: int = 0
    restored: int = 0
    copied: int = 0


class PrefixTrees:
    """The trees of all scopes, and the node of each page. ``observer`` receives new nodes."""

    def __init__(self, observer: TreeObserver = NO_TREE_OBSERVER) -> None:
        self._observer = observer
        self._roots: dict[Hashable, Node] = {}
        self._nodes: dict[int, Node] = {}
        self._alone: dict[int, frozenset[int]] = {}

    def of_page(self, page: int) -> Node | None:
        """The node of a page."""
        return self._nodes.get(page)

    def find(self, scope: Hashable, tokens: Ints, limit: int) -> list[Node]:
        """The nodes of the longest cached prefix of ``tokens``, of at most ``limit`` tokens."""
        path: list[Node] = []
        node = self._roots.get(scope)
        if node is None:
            return path
        for key in _keys(tokens, 0, min(len(tokens), limit) // PAGE_TOKENS):
            node = node.children.get(key)
            if node is None:
                break
            path.append(node)
        return path

    def child(self, scope: Hashable, above: Sequence[Node], tokens: Ints) -> Node | None:
        """The node of the page of ``tokens`` that follows the path ``above``."""
        node = above[-1] if above else self._roots.get(scope)
        keys = _keys(tokens, len(above), min(len(tokens) // PAGE_TOKENS, len(above) + 1))
        return node.children.get(keys[0]) if node is not None and keys else None

    def difference(
        self, scope: Hashable, above: Sequence[Node], tokens: Ints, tenant: int
    ) -> Difference | None:
        """The first token of ``tokens`` after the path ``above`` that differs from the tenant's
        cached page with the longest agreement. None if all tokens agree, or no page starts with the
        same token."""
        node = above[-1] if above else self._roots.get(scope)
        first = len(above) * PAGE_TOKENS
        rest = tokens[first : first + PAGE_TOKENS]
        newest = () if node is None else islice(reversed(node.children.values()), MAX_COMPARED)
        keys = [child.key for child in newest if tenant in child.tenants]
        if not keys:
            return None
        # Few pages start alike. This runs between two steps, at every admission.
        begin = rest[:1].tobytes()
        keys = [key for key in keys if key.startswith(begin)] or keys[:1]
        cached = np.frombuffer(b"".join(keys), np.int32).reshape(-1, PAGE_TOKENS)[:, : len(rest)]
        differing = cached != rest
        if not differing.any(axis=1).all():
            return None
        same = differing.argmax(axis=1)
        nearest = int(same.argmax())
        position = first + int(same[nearest])
        return Difference(position, int(cached[nearest, same[nearest]])) if position else None

    def extend(
        self,
        scope: Hashable,
        tokens: Ints,
        whole: int,
        end: PublishedPrefix | None,
        tenant: int | None,
    ) -> Iterator[tuple[int, Node]]:
        """The nodes of the first ``whole`` pages of a tenant's ``tokens`` after ``end``, each with
        the number of its page. Missing nodes are created, without a page."""
        alone = NO_TENANTS
        if tenant is not None:
            alone = self._alone.setdefault(tenant, frozenset([tenant]))
        first = 0
        if end is not None:
            node, first = end.node, end.pages
        elif scope in self._roots:
            node = self._roots[scope]
        else:
            node = self._roots[scope] = Node(b"", None, scope=scope)
        for number, key in enumerate(_keys(tokens, first, whole), first):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(key, node)
                self._observer.added(scope, child)
            if not alone <= child.tenants:
                child.tenants = child.tenants | alone if child.tenants else alone
            node = child
            yield number, node

    def set_page(self, node: Node, page: int | None) -> None:
        """Record that the node's tokens are in ``page``, or in none."""
        if node.page is not None:
            del self._nodes[node.page]
        node.page = page
        if page is not None:
            if page in self._nodes:
                raise AssertionError(f"page {page} holds other tokens already")
            self._nodes[page] = node

    def drop(self, node: Node) -> list[Node]:
        """Remove the node and all nodes below it from their tree, and return them. They still have
        their pages, but are no longer found."""
        assert node.parent is not None, "a node is dropped twice"
        above = node.parent
        del above.children[node.key]
        if above.parent is None and not above.children:
            del self._roots[above.scope]
        dropped = [node]
        for gone in dropped:
            dropped += gone.children.values()
            gone.children = {}
            gone.parent = None
            if gone.page is not None:
                del self._nodes[gone.page]
        return dropped

    def below(self, scope: Hashable) -> list[Node]:
        """The nodes of the first pages in a scope."""
        root = self._roots.get(scope)
        return [] if root is None else list(root.children.values())

    def scopes(self) -> Iterator[tuple[Hashable, Node]]:
        """Every scope and its root."""
        yield from self._roots.items()

    def forget_tenants(self, tenants: Collection[int]) -> None:
        """Remove all tenants but ``tenants`` from the owners of cached tokens."""
        for _, root in self.scopes():
            for node in self.walk(root):
                if not node.tenants.issubset(tenants):
                    node.tenants = node.tenants.intersection(tenants)
        self._alone.clear()

    def check(self) -> Iterator[tuple[Hashable, Node]]:
        """Every node with its scope. Raises AssertionError if nodes and pages disagree."""
        for scope, root in self.scopes():
            assert root.children, "a scope without pages is remembered"
            for node in self.walk(root):
                if node.page is None:
                    assert node.saved is not None, "a node has its tokens nowhere"
                else:
                    assert node.saved is None, "a node has its tokens twice"
                    assert self.of_page(node.page) is node, "a page is not its node's"
                yield scope, node

    def walk(self, root: Node) -> Iterator[Node]:
        """Every node below ``root``, parents first."""
        found = list(root.children.values())
        for node in found:
            found += node.children.values()
        yield from found


def _keys(tokens: Ints, first: int, stop: int) -> list[bytes]:
    """The bytes of the tokens of each of the pages ``first`` to ``stop`` - 1 of a sequence."""
    part = np.ascontiguousarray(tokens[first * PAGE_TOKENS : stop * PAGE_TOKENS], np.int32)
    data = part.tobytes()
    return [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)]
