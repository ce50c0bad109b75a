"""Access to the hub through ``huggingface_hub``: lists a repository and fetches one file of it.

The library is imported only when a file of the hub is needed. It supports what users of the hub
expect: HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE, proxies, interrupted transfers that continue, and its
own cache of files."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from contract.errors import CatalogError
from harness.catalog.entries import HubFile, ManagedModel, ModelFile
from harness.catalog.names import HubName, choose
from harness.console import DISK_ERRORS
from harness.progress import Progress

LIBRARY_NAME = "zinc-rt"
TIMEOUT_SECONDS = 30.0
RESOLVER_OPTIONS = "timeout:1 attempts:2"
"""Of the resolver of names, for which a machine that is offline notices in seconds."""
REACH_SECONDS = 4.0
"""Seconds that the hub may take to answer at all, before anything is asked of it."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def find_on_hub(name: HubName) -> ManagedModel:
    """Find the model ``name`` on the hub now, pinned to a commit. Raises CatalogError."""
    repository = name.repository
    with _hub(repository) as library:
        api = library.HfApi(_endpoint(), library_name=LIBRARY_NAME)
        info = api.model_info(repository, files_metadata=True, timeout=TIMEOUT_SECONDS)
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    stem, paths = choose(name, siblings)
    files = []
    for path in paths:
        found = siblings[path]
        if found.size is None or info.sha is None:
            raise CatalogError(f"{name}: the hub does not say how large {path} is; try again later")
        source = HubFile(repository, info.sha, path)
        files.append(ModelFile(source, found.size, found.lfs.sha256 if found.lfs else ""))
    return ManagedModel(str(name), hub_folder(repository, stem), tuple(files))


def hub_folder(repository: str, stem: str) -> str:
    """The folder in the cache of the model whose parts have the common ``stem``."""
    return f"hf.co/{repository}/{stem.replace('/', '--')}"


def download_file(file: HubFile, folder: Path, progress: Progress) -> None:
    """Fetch ``file`` to its path below ``folder``, without verifying it.

    Temporary files go to ``folder / ".cache"``. ``progress`` receives bytes as they arrive. Raises
    CatalogError."""
    from tqdm import tqdm

    class Reporter(tqdm):  # type: ignore[type-arg]
        """The progress bar that the library updates; it forwards to ``progress`` and shows
        nothing."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})
            self.counts = "downloading bytes" not in str(options.get("desc"))

        def update(self, n: float | None = 1) -> bool | None:
            if self.counts and n:
                progress.advance(int(n))
            return None

    with _hub(file.repository) as library:
        library.hf_hub_download(
            file.repository,
            file.path,
            revision=file.revision,
            local_dir=folder,
            endpoint=_endpoint(),
            library_name=LIBRARY_NAME,
            tqdm_class=Reporter,
        )


def _endpoint() -> str:
    """The address of the hub, or of the mirror that HF_ENDPOINT names; raises CatalogError."""
    address = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    parts = urlsplit(address)
    if parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in LOOPBACK):
        return address
    raise CatalogError(f"HF_ENDPOINT is {address!r}: only https is used; correct or unset it")


@functools.cache
def _library() -> ModuleType:
    """Import the library, configured to send no telemetry and to connect only to the hub."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    # Xet is a second way to fetch files, which connects to any address it is given.
    os.environ["HF_HUB_DISABLE_XET"] = "1"
    # A machine without a name server notices in seconds.
    os.environ.setdefault("RES_OPTIONS", RESOLVER_OPTIONS)
    import huggingface_hub

    from harness.catalog.reach import make_client

    huggingface_hub.set_client_factory(lambda: make_client(lambda: urlsplit(_endpoint())))
    return huggingface_hub


@contextlib.contextmanager
def _hub(repository: str) -> Iterator[ModuleType]:
    """The library; its errors become CatalogErrors that say what to do."""
    name, library = f"hf.co/{repository}", _library()
    if library.is_offline_mode():
        raise CatalogError(f"{name}: HF_HUB_OFFLINE is set; unset it to pull, or name a GGUF file")

    from httpx2 import HTTPError
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        # Its own attempts to reach a hub that is away take half a minute and print a line each.
        library.get_session().head(_endpoint(), timeout=REACH_SECONDS)
        yield library
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        if isinstance(error, OSError) and (error.filename or error.errno in DISK_ERRORS):
            raise
        cause = error.__cause__ if isinstance(error, FileNotFoundError) else None
        problem = cause or error
        status = getattr(getattr(problem, "response", None), "status_code", None)
        reason = (str(problem) or type(problem).__name__).strip().partition("\n")[0]
        advice = f"{reason.rstrip('.')}; check the connection and pull again"
        if isinstance(problem, GatedRepoError):
            page = f"https://huggingface.co/{repository}"
            advice = f"is gated: accept its terms at {page}, then set HF_TOKEN"
        elif isinstance(problem, RepositoryNotFoundError) or status == 401:
            advice = "no such repository, or a private one: check the name, or set HF_TOKEN"
        raise CatalogError(f"{name}: {advice}") from None
