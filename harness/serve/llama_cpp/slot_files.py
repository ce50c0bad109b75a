"""Files of saved slots: a conversation's tokens, their keys and values, and the recurrent state.

    DIR/.secret      random bytes, the key of every checksum
    DIR/NAME         without tenants
    DIR/SCOPE/NAME   of a tenant or an isolation group

A file that was cut off or changed, or belongs to another model, scope or folder, is refused. A new
file is renamed when it is complete."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
import struct
from collections.abc import Iterable, Sequence
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from accel.packets.host_memory import available_memory
from contract.arithmetic import PAGE_TOKENS
from contract.arrays import Bytes, Ints
from contract.cached_files import PARTIAL, partial_file, remove_abandoned
from contract.errors import RequestError, ZincError, system_errors_as
from contract.types import LOCAL_TENANT, Tenant
from harness.serve.storage import StorageProblem
from reference.memory.disk.folder import secret_in
from reference.memory.disk.names import SCOPE_BYTES, SECRET_BYTES, PageNames
from reference.memory.prefix import scope_of

SECRET = ".secret"
MAGIC = b"zinc-rt kv slot\0"
VERSION = 1
_FIELDS = struct.Struct("<16sI32sIQQ")
"""MAGIC, VERSION, the name of function and scope, pages, bytes of a page, bytes of the state."""
HEADER_BYTES = _FIELDS.size + hashlib.sha256().digest_size
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,126}")
MAX_FILES = 256
"""Most files of one scope."""


class SlotFileRefused(ZincError):
    """A file that must not be used, with the reason."""


class SavedSlot(NamedTuple):
    """The contents of a file: ``tokens`` of whole pages, the keys and values of each of ``pages``,
    and the recurrent ``state`` after the last token, None for models without one. ``nbytes`` is the
    size of the file."""

    tokens: Ints
    pages: list[Bytes]
    state: Bytes | None
    nbytes: int


class SlotFolder:
    """The saved slots in the folder ``path``. Raises ConfigError if it cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._scopes: set[str] = set()
        with system_errors_as(f"{path}: cannot save slots there"):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (path, *path.glob("?" * 2 * SCOPE_BYTES)):
                remove_abandoned(folder, ".")
            remove_abandoned(path, f"{SECRET}.")
            # ``secret_in`` would replace a file of another length.
            if (path / SECRET).exists() and (path / SECRET).stat().st_size != SECRET_BYTES:
                raise OSError(errno.EEXIST, f"its {SECRET} is another program's")
            self._secret = secret_in(path / SECRET)

    def write(
        self, name: str, tenant: Tenant, function: str, parts: Iterable[Bytes], state: Bytes | None,
        tokens: Ints,
    ) -> tuple[int, int]:  # fmt: skip
        """Save ``tokens``, whose pages ``parts`` yields, and the recurrent ``state``. ``function``
        identifies the model. Returns the number of pages and the bytes of the file; 0, 0 if there
        are fewer pages than the state needs. Raises RequestError for a bad name, and
        StorageProblem."""
        target = self._file(name, tenant)
        partial = target.with_name(f".{os.urandom(8).hex()}{PARTIAL}")
        try:
            target.parent.mkdir(mode=0o700, exist_ok=True)
            remove_abandoned(target.parent, ".")
            if not os.path.lexists(target):
                if _count_files(target.parent) >= MAX_FILES:
                    raise RequestError("filename", f"would be one of more than {MAX_FILES} files")
            elif not _is_saved(target):
                raise RequestError("filename", "is a file there that is no saved slot")
            with partial_file(partial) as file:
                root = self._root(tenant, function)
                pages = self._write(file, root, parts, state, tokens)
                nbytes = file.tell()
                file.close()
                if not pages:
                    return 0, 0
                os.replace(partial, target)
        except OSError as error:
            problem = f"the slot cannot be saved: {error.strerror}"
            raise StorageProblem(problem, full=True) from None
        return pages, nbytes

    def read(self, name: str, tenant: Tenant, function: str, max_pages: int) -> SavedSlot:
        """The saved slot ``name`` of the model that ``function`` identifies, of at most
        ``max_pages`` pages. Raises RequestError for a bad name, FileNotFoundError, StorageProblem,
        and SlotFileRefused."""
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
        path = self._file(name, tenant)
        try:
            if path.is_symlink():
                raise SlotFileRefused("it is no file of a saved slot")
            with open(os.open(path, flags), "rb") as file:
                return self._read(file, self._root(tenant, function), max_pages)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StorageProblem(f"the slot cannot be read: {error.strerror}", full=False) from None

    def only(self, tenants: Iterable[Tenant]) -> None:
        """Remove the files of scopes that had tenants at an earlier call and have none now."""
        scopes = {self._scope(tenant) for tenant in tenants}
        for gone in self._scopes - scopes - {""}:
            shutil.rmtree(self.path / gone, ignore_errors=True)
        self._scopes = scopes

    def _write(
        self, file: BinaryIO, root: bytes, parts: Iterable[Bytes], state: Bytes | None,
        tokens: Ints,
    ) -> int:  # fmt: skip
        digest, pages, page_bytes = hashlib.sha256(self._secret), 0, 0

        def write(data: Bytes) -> None:
            digest.update(data.data)
            file.write(data.data)

        file.write(bytes(HEADER_BYTES))
        for page in parts:
            pages, page_bytes = pages + 1, page.nbytes
            write(page)
        if state is not None:
            if pages * PAGE_TOKENS != len(tokens):
                return 0
            write(state)
        write(np.ascontiguousarray(tokens[: pages * PAGE_TOKENS]).view(np.uint8))
        state_bytes = 0 if state is None else state.nbytes
        fields = _FIELDS.pack(MAGIC, VERSION, root, pages, page_bytes, state_bytes)
        digest.update(fields)
        file.seek(0)
        file.write(fields + digest.digest())
        file.flush()
        os.fsync(file.fileno())
        file.seek(0, os.SEEK_END)
        return pages

    def _read(self, file: BufferedReader, root: bytes, max_pages: int) -> SavedSlot:
        status = os.fstat(file.fileno())
        header = file.read(HEADER_BYTES) if stat.S_ISREG(status.st_mode) else b""
        if len(header) < HEADER_BYTES or not header.startswith(MAGIC):
            raise SlotFileRefused("it is no file of a saved slot")
        _, version, own, count, page_bytes, state_bytes = _FIELDS.unpack_from(header)
        if version != VERSION:
            raise SlotFileRefused("it was saved by another version")
        if own != root:
            raise SlotFileRefused("it was saved of another model, by another tenant or elsewhere")
        token_bytes = count * PAGE_TOKENS * 4
        nbytes = count * page_bytes + state_bytes + token_bytes
        if status.st_size != HEADER_BYTES + nbytes:
            raise SlotFileRefused("it was cut")
        if count > max_pages:
            problem = f"it has {count} pages of {PAGE_TOKENS} tokens, and there are {max_pages}"
            raise SlotFileRefused(problem)
        if nbytes > available_memory() // 2:
            raise SlotFileRefused(f"its {nbytes} bytes are too many for this machine's free memory")
        data = np.empty(nbytes, np.uint8)
        if file.readinto(data.data) != nbytes:
            raise SlotFileRefused("it was cut")
        digest = hashlib.sha256(self._secret)
        digest.update(data.data)
        digest.update(header[: _FIELDS.size])
        if digest.digest() != header[_FIELDS.size :]:
            raise SlotFileRefused("it was changed, or saved in another folder")
        pages = [data[at : at + page_bytes] for at in range(0, count * page_bytes, page_bytes)]
        state = data[count * page_bytes : nbytes - token_bytes] if state_bytes else None
        tokens = data[nbytes - token_bytes :].copy().view(np.int32)
        return SavedSlot(tokens, pages, state, HEADER_BYTES + nbytes)

    def _file(self, name: str, tenant: Tenant) -> Path:
        """The path for a name. Raises RequestError for a name that could be outside the folder."""
        if NAME.fullmatch(name) is None:
            problem = "has letters, digits, '.', '_' and '-' only, at most 127, and no '.' first"
            raise RequestError("filename", problem)
        return self.path / self._scope(tenant) / name

    def _scope(self, tenant: Tenant) -> str:
        """The subfolder of a tenant; "" without tenants."""
        if tenant.id == LOCAL_TENANT.id:
            return ""
        return PageNames(self._secret, "").scope(_key(tenant))

    def _root(self, tenant: Tenant, function: str) -> bytes:
        return PageNames(self._secret, function).root(_key(tenant))


def _is_saved(path: Path) -> bool:
    """Whether a slot may replace this file: it is a saved slot, or empty."""
    if not path.is_file() or path.is_symlink():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) in (b"", MAGIC)


def _key(tenant: Tenant) -> Sequence[str | int]:
    """The scope of a tenant with its name, since ids can be reused."""
    kind, number = scope_of(tenant)
    return (kind, number, tenant.name) if kind == "tenant" else (kind, number)


def _count_files(folder: Path) -> int:
    return sum(not name.startswith(".") for name in os.listdir(folder))
