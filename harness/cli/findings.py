"""The checks of ``zinc-rt check``. None changes the machine for longer than a moment."""

from __future__ import annotations

import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import threadpoolctl

from contract.amounts import format_bytes
from contract.errors import CatalogError, DoesNotFit, RequestError, TierUnavailable, ZincError
from contract.ir.nodes import BufferKind
from harness import catalog
from harness.arranged_weights import arranged_usage
from harness.catalog import CatalogEntry, WheelMember
from harness.cli.exactness import broken_rules
from harness.cli.prompt import encode_messages, opening, user
from harness.cli.sessions import model_file, session_options
from harness.digest import file_digest
from harness.host.open import Prepared, prepare_session
from harness.settings import Settings
from harness.tiers import AUTO, TierOptions, arranged_folder, open_tier, probe
from reference.model.weights import weight_bytes

GREETING = "Hello"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; ``remedy`` is empty when it is ``ok``."""

    subject: str
    ok: bool
    detail: str
    remedy: str = ""


def all_findings(settings: Settings) -> Iterator[Finding]:
    """Check everything a run with these settings needs, in the order it is needed."""
    yield python_finding()
    yield numpy_finding()
    yield exactness_finding()
    tier = tier_finding(settings["tier"], settings["device"])
    yield tier
    yield configuration_finding(settings.path)
    yield cache_finding(settings)
    yield arranged_finding()
    yield from model_findings(settings, tier.ok)


def python_finding() -> Finding:
    """Check the interpreter; one that is too old cannot even load this module."""
    return Finding("python", True, f"{platform.python_version()} at {sys.executable}")


def numpy_finding() -> Finding:
    """Check numpy and its BLAS."""
    np.ones((2, 2), np.float32) @ np.ones((2, 2), np.float32)
    libraries = [
        f"{library['internal_api']} {library['version']}, {library['num_threads']} threads"
        for library in threadpoolctl.threadpool_info()
        if library["user_api"] == "blas"
    ]
    detail = f"{np.__version__}, BLAS: {'; '.join(libraries) or 'built in'}"
    return Finding("numpy", True, detail)


def exactness_finding() -> Finding:
    """Check that numpy computes the bits the arithmetic rules define."""
    broken = list(broken_rules())
    if broken:
        remedy = "install numpy from its wheel on PyPI, and unset variables that tune BLAS"
        return Finding("arithmetic", False, "; ".join(broken), remedy)
    return Finding("arithmetic", True, "division, exp, folds and integer BLAS give exact bits")


def tier_finding(name: str, device: str = "") -> Finding:
    """Check which tiers run here and whether the requested one does; with a ``device``, whether it
    opens there."""
    if device:
        try:
            with open_tier(name, TierOptions(device=device)) as tier:
                return Finding("tier", True, f"{tier.info.name} on {tier.info.device}")
        except TierUnavailable as error:
            return Finding("tier", False, f"{name}: {error.reason}", error.remedy)
    statuses = probe()
    here = [f"{status.name} on {status.device}" for status in statuses if status.available]
    for status in statuses:
        if status.name == name and not status.available:
            return Finding("tier", False, f"{name}: {status.reason}", status.remedy)
    if not here:
        return Finding("tier", False, "none runs here", "see zinc-rt devices")
    return Finding("tier", True, f"{name}; {', '.join(here)}" if name == AUTO else here[0])


def configuration_finding(path: Path) -> Finding:
    """Say which configuration file is read; one that cannot be used was an error before."""
    absent = "is not there; `zinc-rt config init` writes an example"
    return Finding("configuration", True, f"{path} {'is read' if path.exists() else absent}")


def cache_finding(settings: Settings) -> Finding:
    """Check that pulled models can be stored; where the model is there, none has to be."""
    existing = folder = settings["cache_dir"]
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free
    except OSError as error:
        detail = f"{folder}: cannot write: {error.strerror}"
        with suppress(CatalogError):
            model_file(settings, pull_missing=False)
            return Finding("cache", True, f"{detail}; the model is there, others cannot be pulled")
        remedy = "make the folder writable, or set --cache-dir or ZINC_RT_CACHE_DIR"
        return Finding("cache", False, detail, remedy)
    return Finding("cache", True, f"{folder}, {format_bytes(free)} of disk free")


def arranged_finding() -> Finding:
    """The weights that the native tier stores, and how to remove them."""
    entries, nbytes = arranged_usage()
    held = f"{entries} file{'s' * (entries > 1)}, {format_bytes(nbytes)}" if entries else "none"
    detail = f"{held} in {arranged_folder()}; delete that folder to clear it"
    return Finding("arranged weights", True, detail)


def model_findings(settings: Settings, opens: bool = True) -> Iterator[Finding]:
    """Check that the model is present and complete, and where the tier ``opens``, that it is
    supported and fits in memory."""
    try:
        entry = _entry(settings)
        path = model_file(settings, pull_missing=False)
    except CatalogError as error:
        yield _absent(settings, str(error))
        return
    if entry is not None and file_digest(path) != entry.file.sha256:
        remedy = f"zinc-rt model rm {entry.id} && zinc-rt model pull {entry.id}"
        yield Finding("model", False, f"{path}: its SHA-256 is not {entry.file.sha256}", remedy)
        return
    verified = f", sha256 {entry.file.sha256[:16]}... verified" if entry is not None else ""
    if opens:
        yield from _session_findings(path, settings, verified)
    else:
        yield Finding("model", True, f"{path}{verified}")


def _entry(settings: Settings) -> CatalogEntry | None:
    """The catalog entry the settings name, None for a file or a name of the hub."""
    spec = settings["model"]
    if spec is None:
        spec = catalog.active(settings["cache_dir"]) or catalog.DEFAULT_ID
    if catalog.existing_file(spec) is not None:
        return None
    spec = catalog.pasted_name(spec)
    return None if catalog.is_hub_name(spec) else catalog.find(spec)


def _absent(settings: Settings, problem: str) -> Finding:
    try:
        entry = _entry(settings)
    except CatalogError:
        entry = None
    if entry is None:
        return Finding("model", False, problem, "name another model with --model")
    need = entry.file.size * (2 if isinstance(entry.file.source, WheelMember) else 1)
    folder = settings["cache_dir"]
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    detail = f"{entry.id} ({format_bytes(entry.file.size)}) is not pulled yet"
    if free < need:
        remedy = f"free {format_bytes(need - free)} of disk, then zinc-rt model pull {entry.id}"
    else:
        remedy = f"zinc-rt model pull {entry.id}; zinc-rt run pulls it by itself"
    return Finding("model", False, detail, remedy)


def _encode(prepared: Prepared, settings: Settings) -> None:
    """Encode a turn as a run does; raises what that raises."""
    if prepared.template is None:
        prepared.model.tokenizer.encode(GREETING)
    else:
        messages = [*opening(settings["system"]), user(GREETING)]
        encode_messages(prepared, messages, settings["thinking"])


def _session_findings(path: Path, settings: Settings, verified: str) -> Iterator[Finding]:
    """Check all that a run does before it allocates memory, and every weight it would load."""
    model = Finding("model", True, f"{path}{verified}")
    try:
        with ExitStack() as owned:
            prepared = prepare_session(path, session_options(settings, chat=True), owned)
            _encode(prepared, settings)
            graph = prepared.model.graph(prepared.limits)
            for decl in graph.of_kind(BufferKind.WEIGHT):
                weight_bytes(prepared.model.tensors, decl)
    except DoesNotFit as error:
        detail = f"{format_bytes(error.need)} needed, {format_bytes(error.have)} may be used"
        yield from (model, Finding("memory", False, detail, error.remedy))
    except RequestError as error:
        yield from (model, Finding("settings", False, str(error), f"change {error.field}"))
    except TierUnavailable as error:
        yield from (model, Finding("memory", False, f"unknown: {error.reason}", error.remedy))
    except ZincError as error:
        yield Finding("model", False, str(error), "choose another file with --model")
    else:
        plan = prepared.plan
        detail = (
            f"{format_bytes(plan.budgeted)} for the model and a context of {plan.context:,} tokens "
            f"(zinc-rt inspect lists it); the program takes about "
            f"{format_bytes(catalog.MEMORY_OVERHEAD_BYTES)} more"
        )
        yield from (model, Finding("memory", True, detail))
