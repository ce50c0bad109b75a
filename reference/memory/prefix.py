"""The prefix cache's index: for each scope a tree of pages by the tokens they hold.

A node is one page: its 16 tokens follow those of the nodes above it. Children are found by their
tokens, compared in full, so a collision of hashes cannot give a wrong page. A tenant finds only
pages below the root of its own scope.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.arithmetic import PAGE_TOKENS
from contract.lazy_dataclass import dataclass
from contract.types import Tenant

KEY_BYTES = PAGE_TOKENS * 4


def scope_of(tenant: Tenant) -> tuple[str, int]:
    """The scope in which a tenant shares prefixes: its isolation group, or itself alone."""
    if tenant.isolation_group is None:
        return "tenant", tenant.id
    return "group", tenant.isolation_group


@dataclass(slots=True, eq=False)
class Node:
    """A full page of tokens.

    ``page`` is its page, None for a root and for a page in host memory, which is ``saved``.
    ``state`` is the state slot of the recurrent state after its last token, if one is saved.
    ``parent`` is None for a root and for a node that was taken out of the tree. Only a root has a
    ``scope``.
    """

    key: bytes
    parent: Node | None
    page: int | None = None
    saved: Any = None
    state: int | None = None
    scope: Hashable = None
    children: dict[bytes, Node] = field(default_factory=dict)

    def upward(self) -> Iterator[Node]:
        """The node and the nodes above it, without the root."""
        node: Node = self
        while node.parent is not None:
            yield node
            node = node.parent


@dataclass(frozen=True, slots=True)
class PathEnd:
    """How far a sequence was published: its first ``pages`` pages, the last of which is
    ``node``."""

    node: Node
    pages: int

    @property
    def valid(self) -> bool:
        """False once the node was evicted."""
        return self.node.parent is not None


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The first ``tokens`` tokens of a sequence, which are in ``pages`` and need not be computed.

    ``state`` is the state slot of the recurrent state after them, where the model has one. Where
    ``tokens`` is not a whole number of pages, the last page is a copy of the sequence's own.
    """

    pages: tuple[int, ...]
    tokens: int
    state: int | None = None


@dataclass(frozen=True, slots=True)
class PrefixStatistics:
    """Counts since the start: ``queries`` for ``tokens_asked``, of which ``tokens_hit`` were
    cached; pages that were ``evicted``, those of them ``spilled`` to host memory, ``restored`` from
    it, and ``copied`` because a sequence had to write in them."""

    queries: int = 0
    tokens_asked: int = 0
    tokens_hit: int = 0
    evicted: int = 0
    spilled: int = 0
    restored: int = 0
    copied: int = 0


class PrefixTrees:
    """The trees of all scopes, and the node of each page."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, Node] = {}
        self._nodes: dict[int, Node] = {}

    def of_page(self, page: int) -> Node | None:
        """The node of a page."""
        return self._nodes.get(page)

    def find(self, scope: Hashable, tokens: NDArray[np.int32], most: int) -> list[Node]:
        """The nodes of the longest cached prefix of ``tokens``, of at most ``most`` tokens."""
        path: list[Node] = []
        node = self._roots.get(scope)
        if node is None:
            return path
        for key in _keys(tokens, 0, min(len(tokens), most) // PAGE_TOKENS):
            node = node.children.get(key)
            if node is None:
                break
            path.append(node)
        return path

    def child(
        self, scope: Hashable, above: Sequence[Node], tokens: NDArray[np.int32]
    ) -> Node | None:
        """The node of the page of ``tokens`` that follows the path ``above``."""
        node = above[-1] if above else self._roots.get(scope)
        keys = _keys(tokens, len(above), min(len(tokens) // PAGE_TOKENS, len(above) + 1))
        return node.children.get(keys[0]) if node is not None and keys else None

    def extend(
        self, scope: Hashable, tokens: NDArray[np.int32], whole: int, end: PathEnd | None
    ) -> Iterator[tuple[int, Node]]:
        """The nodes of the first ``whole`` pages of ``tokens`` behind ``end``, each with the number
        of its page in the sequence. Missing nodes are made, without a page."""
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
            node = child
            yield number, node

    def place(self, node: Node, page: int | None) -> None:
        """Note that the node's tokens are in ``page``, or in none."""
        if node.page is not None:
            del self._nodes[node.page]
        node.page = page
        if page is not None:
            if page in self._nodes:
                raise AssertionError(f"page {page} holds other tokens already")
            self._nodes[page] = node

    def drop(self, node: Node) -> list[Node]:
        """Take the node and all nodes below it out of their tree; returns them. They still name
        their pages, but are not found any more."""
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
        """The nodes of first pages in a scope."""
        root = self._roots.get(scope)
        return [] if root is None else list(root.children.values())

    def scopes(self) -> Iterator[tuple[Hashable, Node]]:
        """Every scope and its root."""
        yield from self._roots.items()

    def check(self) -> Iterator[tuple[Hashable, Node]]:
        """Every node with its scope. Raises AssertionError where nodes and pages contradict each
        other."""
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


def _keys(tokens: NDArray[np.int32], first: int, stop: int) -> list[bytes]:
    """The bytes of the tokens of each of the pages ``first`` to ``stop`` - 1 of a sequence."""
    part = np.ascontiguousarray(tokens[first * PAGE_TOKENS : stop * PAGE_TOKENS], np.int32)
    data = part.tobytes()
    return [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)]
