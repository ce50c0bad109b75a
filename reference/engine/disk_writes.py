"""Writes pages to the disk cache, and names them on disk.

A page is written once the step that computed it was read without an error. Its copy to host memory
is a submission in the queue of steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable

from contract.lazy_dataclass import dataclass
from reference.memory.disk.cache import DiskCache
from reference.memory.disk.entry import Entry, EntryKind
from reference.memory.page_copies import PageCopies
from reference.memory.prefix import Node, Scope, TreeObserver, sharers
from reference.memory.recurrent import RecurrentMemory
from reference.memory.row_copies import Saved
from reference.runner import ModelRunner
from reference.sched.tenants import Tenants

MAX_SAVED = 64
"""Most pages copied for the disk after one step."""
MAX_USED = 64
"""Most ended sequences whose use of the cache is not yet recorded on disk."""
MAX_WAITING = 1 << 16
"""Most pages that wait to be copied; beyond it the oldest is dropped."""


@dataclass(frozen=True, slots=True)
class _Unsaved:
    """A page or state to write; it is complete once the first ``steps`` steps were read."""

    entry: Entry
    node: Node
    steps: int


@dataclass(frozen=True, slots=True)
class _Copied:
    """A page or state being copied to host memory; it is there once ``steps`` steps were read."""

    entry: Entry
    saved: Saved
    steps: int


class DiskWrites(TreeObserver):
    """Writes the pages that ``KvMemory`` publishes to ``cache``, unless they come from there.
    ``tenants`` tells who shares a scope."""

    def __init__(
        self, cache: DiskCache, copies: PageCopies, recurrent: RecurrentMemory, tenants: Tenants
    ) -> None:
        self.cache = cache
        self.steps = 0
        """Steps submitted so far."""
        self._copies, self._recurrent = copies, recurrent
        self._stateful = recurrent.slot_bytes > 0
        self._tenants = tenants
        self._roots: dict[Hashable, bytes] = {}
        self._folders: dict[Hashable, str] = {}
        self._waiting: deque[_Unsaved] = deque()
        self._copying: deque[_Copied] = deque()
        self._used: deque[Node] = deque()
        self._publishing = False

    def added(self, scope: Hashable, node: Node) -> None:
        """Name a new node and write its page, unless it comes from disk."""
        above = node.parent
        assert above is not None
        if above.parent is None and not above.digest:
            above.digest = self._root(scope)
        node.digest = self.cache.names.page(above.digest, node.key)
        if not self._publishing:
            self._wait(self._page(scope, node.digest, node.key), node)

    def state_saved(self, node: Node) -> None:
        """Write the recurrent state after a node, unless it comes from disk."""
        if not self._publishing:
            *_, first = node.upward()
            assert first.parent is not None
            self._wait(self._state(first.parent.scope, node.digest, node.key), node)

    def _wait(self, entry: Entry, node: Node) -> None:
        if len(self._waiting) == MAX_WAITING:
            self._waiting.popleft()
            self.cache.count(dropped=1)
        self._waiting.append(_Unsaved(entry, node, self.steps))

    def save(self, read: int, *, waits: bool = False) -> None:
        """Copy what the first ``read`` steps computed to host memory, as far as there is room, and
        pass on the copies that have arrived; with ``waits``, wait for the others."""
        self._touch()
        while self._copying and (waits or self._copying[0].steps <= read):
            copied = self._copying.popleft()
            self.cache.write(copied.entry, copied.saved.bytes())
        for _ in range(MAX_SAVED):
            if not self._waiting or self._waiting[0].steps > read:
                return
            unsaved = self._waiting[0]
            if not self.cache.reserve(unsaved.entry.nbytes):
                return
            self._waiting.popleft()
            saved = None
            try:
                saved = self._saved(unsaved)
            finally:
                if saved is None:
                    self.cache.release(unsaved.entry.nbytes)
            if saved is None:
                self.cache.count(dropped=1)
            else:
                self._copying.append(_Copied(unsaved.entry, saved, self.steps + 1))

    def _saved(self, unsaved: _Unsaved) -> Saved | None:
        """Queue a copy to host memory; None if the page or state has been evicted."""
        node = unsaved.node
        if node.parent is None:
            return None
        if unsaved.entry.kind is EntryKind.STATE:
            return None if node.state is None else self._recurrent.read(node.state)
        if node.page is None:
            saved: Saved | None = node.saved
            return saved
        return self._copies.save(node.page)

    def used(self, node: Node) -> None:
        """Record that an ended sequence used a node and the nodes above it."""
        if len(self._used) == MAX_USED:
            self._used.popleft()
        self._used.append(node)

    def _touch(self) -> None:
        """Record on disk which written pages were used. The end of a path counts as least recently
        used: it is useless without the pages above it."""
        while self._used and not self._waiting and not self._copying:
            path = list(self._used.popleft().upward())
            above = path[-1].parent if path else None
            if above is None:
                continue
            entries = []
            for one in path:
                if self._stateful:
                    entries.append(self._state(above.scope, one.digest, one.key))
                entries.append(self._page(above.scope, one.digest, one.key))
            self.cache.touch(entries)

    def save_all(self, read: int) -> None:
        """Pass all that the first ``read`` steps computed to the cache, as far as there is room."""
        before = -1
        while before != (before := 2 * len(self._waiting) + len(self._copying)):
            self.save(read, waits=True)
        self._touch()

    def finish(self, read: int) -> None:
        """``save_all``, waiting for room as long as the time for closing allows. What is left is
        dropped."""
        before = -1
        while before != (before := len(self._waiting)) and self.cache.wait_for_room():
            self.save_all(read)
        self.cache.count(dropped=len(self._waiting))
        self._waiting.clear()

    def clear(self) -> None:
        """Forget what is to be written, after a fault: what was computed is unknown."""
        for copied in self._copying:
            self.cache.release(copied.entry.nbytes)
        self._copying.clear()
        self._waiting.clear()
        self._used.clear()

    def abandoned(self, step: int) -> None:
        """Drop copies made behind step number ``step``, which was abandoned: a page that it was to
        write may have replaced one that waited to be copied."""
        lost = [one for one in self._copying if one.steps > step + 1]
        self._drop_copies(lost)
        self.cache.count(dropped=len(lost))

    def reopened(self, runner: ModelRunner) -> None:
        """Use a reopened runner, which has the same pages and states in other memory."""
        copies = runner.page_copies()
        assert copies is not None
        self._copies, self._recurrent = copies, runner.recurrent

    def forget(self, ended: Collection[Scope]) -> None:
        """Remove the files of scopes that ended."""
        for scope in ended:
            self.cache.forget(scope)
            folder = self._folder(scope)
            self._drop_copies([one for one in self._copying if one.entry.scope == folder])
            self._waiting = deque(one for one in self._waiting if one.entry.scope != folder)
            self._roots = {one: root for one, root in self._roots.items() if sharers(one) != scope}

    def erase(self, scope: Hashable, nodes: Iterable[Node]) -> None:
        """Remove the files of nodes that are no longer cached."""
        entries = [self._page(scope, node.digest, node.key) for node in nodes]
        if self._stateful:
            entries += [self._state(scope, entry.name, entry.tokens) for entry in entries]
        names = {entry.name for entry in entries}
        self._drop_copies([one for one in self._copying if one.entry.name in names])
        self.cache.erase(entries)

    def _drop_copies(self, dropped: Iterable[_Copied]) -> None:
        """Drop copies that are on their way to host memory."""
        for copied in dropped:
            self.cache.release(copied.entry.nbytes)
            self._copying.remove(copied)

    def _page(self, scope: Hashable, name: bytes, tokens: bytes) -> Entry:
        nbytes = self._copies.page_bytes
        return Entry(self._folder(scope), name, tokens, EntryKind.PAGE, nbytes)

    def _state(self, scope: Hashable, name: bytes, tokens: bytes) -> Entry:
        nbytes = self._recurrent.slot_bytes
        return Entry(self._folder(scope), name, tokens, EntryKind.STATE, nbytes)

    def _folder(self, scope: Hashable) -> str:
        scope = sharers(scope)
        folder = self._folders.get(scope)
        if folder is None:
            assert isinstance(scope, tuple)
            folder = self._folders[scope] = self.cache.names.scope(scope)
        return folder

    def _root(self, scope: Hashable) -> bytes:
        """The name before the first page of a scope, until the scope ends. It contains the ids and
        names of those who share the scope when first asked: after a restart others may have its
        number."""
        root = self._roots.get(scope)
        if root is None:
            assert isinstance(scope, tuple)
            members = self._tenants.members(scope[:2])
            root = self._roots[scope] = self.cache.names.root([*members, *scope])
        return root
