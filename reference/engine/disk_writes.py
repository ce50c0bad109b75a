"""The engine's side of what the disk cache writes, and the names of pages on disk.

A page is given to the cache once the step that computed it was read without an error; its copy to
host memory is a submission in the queue of steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable

from contract.lazy_dataclass import dataclass
from reference.memory.disk.cache import DiskCache
from reference.memory.disk.entry import Entry, EntryKind
from reference.memory.page_copies import PageCopies
from reference.memory.prefix import Node, Scope, TreeWatch, sharers
from reference.memory.recurrent import RecurrentMemory
from reference.memory.row_copies import Saved
from reference.runner import ModelRunner
from reference.sched.tenants import Tenants

MOST_SAVED = 64
"""Pages that are copied for the disk after one step."""
MOST_USED = 64
"""Most sequences that ended whose use of the cache is not noted on disk yet."""
MOST_WAITING = 1 << 16
"""Most pages that wait to be copied; then the one that waits for longest is not written."""


@dataclass(frozen=True, slots=True)
class _Unsaved:
    """A page or state to write, which the first ``steps`` steps computed."""

    entry: Entry
    node: Node
    steps: int


@dataclass(frozen=True, slots=True)
class _Copied:
    """A page or state on its way to host memory; it is there when ``steps`` steps were read."""

    entry: Entry
    saved: Saved
    steps: int


class DiskWrites(TreeWatch):
    """Writes what ``KvMemory`` publishes to ``cache``, unless it comes from there. ``tenants`` say
    who shares a scope."""

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
        if len(self._waiting) == MOST_WAITING:
            self._waiting.popleft()
            self.cache.count(dropped=1)
        self._waiting.append(_Unsaved(entry, node, self.steps))

    def save(self, read: int, *, waits: bool = False) -> None:
        """Copy what the first ``read`` steps computed to host memory, as far as there is room, and
        hand over what has arrived there, or, where it ``waits``, will arrive."""
        self._touch()
        while self._copying and (waits or self._copying[0].steps <= read):
            copied = self._copying.popleft()
            self.cache.write(copied.entry, copied.saved.bytes())
        for _ in range(MOST_SAVED):
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
        """Queue a copy to host memory; None if the page or state was evicted meanwhile."""
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
        """Note that a sequence that ended used a node and those above it."""
        if len(self._used) == MOST_USED:
            self._used.popleft()
        self._used.append(node)

    def _touch(self) -> None:
        """Note on disk what was used, once it is written. The end of a path makes room first:
        without the pages above it, it could not be used."""
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
        """Give all that the first ``read`` steps computed to the cache, as far as there is room."""
        before = -1
        while before != (before := 2 * len(self._waiting) + len(self._copying)):
            self.save(read, waits=True)
        self._touch()

    def finish(self, read: int) -> None:
        """Do ``save_all``, and wait for room as far as the time for the end allows."""
        before = -1
        while before != (before := len(self._waiting)) and self.cache.wait_for_room():
            self.save_all(read)

    def clear(self) -> None:
        """Forget what is to be written, after a fault: nobody knows what was computed."""
        for copied in self._copying:
            self.cache.release(copied.entry.nbytes)
        self._copying.clear()
        self._waiting.clear()
        self._used.clear()

    def reopened(self, runner: ModelRunner) -> None:
        """Read and write the pages and states of a runner that was opened anew; it has the same
        pages in other memory."""
        copies = runner.page_copies()
        assert copies is not None
        self._copies, self._recurrent = copies, runner.recurrent

    def forget(self, ended: Collection[Scope]) -> None:
        """Remove what scopes that ended have on disk."""
        for scope in ended:
            self.cache.forget(scope)
            folder = self._folder(scope)
            self._drop_copies([one for one in self._copying if one.entry.scope == folder])
            self._waiting = deque(one for one in self._waiting if one.entry.scope != folder)
            self._roots = {one: root for one, root in self._roots.items() if sharers(one) != scope}

    def erase(self, scope: Hashable, nodes: Iterable[Node]) -> None:
        """Remove what nodes that are not cached any more have on disk."""
        entries = [self._page(scope, node.digest, node.key) for node in nodes]
        if self._stateful:
            entries += [self._state(scope, entry.name, entry.tokens) for entry in entries]
        names = {entry.name for entry in entries}
        self._drop_copies([one for one in self._copying if one.entry.name in names])
        self.cache.erase(entries)

    def _drop_copies(self, dropped: Iterable[_Copied]) -> None:
        """Do not write what is on its way to host memory."""
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
        """What a scope's names on disk begin with, until it ends. It has the ids and names of those
        who share the scope when this is first asked: after a restart others may have its number."""
        root = self._roots.get(scope)
        if root is None:
            assert isinstance(scope, tuple)
            members = self._tenants.members(scope[:2])
            root = self._roots[scope] = self.cache.names.root([*members, *scope])
        return root
