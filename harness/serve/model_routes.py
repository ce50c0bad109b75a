"""The routes that list, fetch, activate and delete models."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from msgspec import Struct

from accel.packets.host_memory import available_memory
from contract.errors import CatalogError
from harness import catalog
from harness.best_tier import PROCESSOR_TIERS
from harness.console import text_of_name
from harness.progress import SILENT
from harness.serve.answers import Json
from harness.serve.errors import RESTART_SECONDS, ApiError, model_refused, try_again
from harness.serve.http_request import HttpRequest, ServerParts
from harness.serve.model import ServedModel
from harness.serve.pulls import pull_stream, pull_whole
from harness.serve.route import Route
from harness.serve.service import Answered
from harness.serve.wire import Id

IN_USE = "model_in_use"


class PullRequest(Struct, forbid_unknown_fields=True):
    """``POST /v1/models/pull``: a catalog id, or a name of the hub, ``hf.co/ORG/REPO[:QUANT]``.
    Without ``stream`` the answer comes when the model is complete."""

    model: Id
    stream: bool = True


class InstalledModel(Struct, forbid_unknown_fields=True):
    """``POST /v1/models/activate`` and ``POST /v1/models/remove``: a model that is installed."""

    model: Id


def models(incoming: HttpRequest) -> Json:
    """OpenAI's list, of the models that the tenant may name; the active one comes first."""
    account, names, served = incoming.account, incoming.server.models.names, incoming.model
    active, tenant = incoming.server.models.service.model, account.tenant
    data = [
        described
        for described in (_described(served), *_adapters_of(served), *_background(incoming))
        if names.is_permitted(described["id"], account.models, active)
    ]
    return {
        "object": "list",
        "data": data,
        "has_more": False,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "x_zinc": {
            "managed": list(_managed(incoming)),
            "memory_available_bytes": _memory_available(served),
            "tenant": {"name": tenant.name, "qos": tenant.qos.value},
        },
    }


def one_model(incoming: HttpRequest, model: str) -> Json:
    """The card of a model. Raises ApiError 404."""
    served = incoming.model
    for described in _adapters_of(served):
        if described["id"] == model:
            return described
    known = incoming.server.models.names.canonical(model) or model
    for described in _background(incoming):
        if described["id"] == known:
            return described
    if served.is_called(model):
        return _described(served)
    model = known
    for facts in _managed(incoming):
        if facts["id"] == model:
            return _card(model, 0) | {"x_zinc": facts}
    raise _unknown(model)


def _background(incoming: HttpRequest) -> Iterator[Json]:
    """The cards of the other models that requests may name."""
    models = incoming.server.models
    with models.held() as others:
        for name, model in others.items():
            if model is not None:
                yield _described(model)
                continue
            # Without its file it could not be loaded.
            with suppress(OSError):
                created = int(models.names.files[name].stat().st_mtime)
                yield _card(name, created) | {"x_zinc": {"loaded": False}}


def pull_model(incoming: HttpRequest, body: PullRequest) -> Answered:
    """Fetch a model. Raises ApiError."""
    pull = incoming.server.pulls.begin(known_model(body.model))
    return pull_stream(pull) if body.stream else pull_whole(pull)


def activate_model(incoming: HttpRequest, body: InstalledModel) -> Json:
    """Make an installed model the active one. Raises ApiError."""
    path = _path_of(incoming.server, body.model)
    return _described(incoming.server.models.activate(body.model, path).model)


def remove_named_model(incoming: HttpRequest, body: InstalledModel) -> Json:
    """As ``remove_model``, of the model in the body."""
    return remove_model(incoming, body.model)


def remove_model(incoming: HttpRequest, model: str) -> Json:
    """Delete a model that was pulled, or end its pull. Raises ApiError."""
    server, name = incoming.server, known_model(model)
    given_up = server.pulls.give_up(name)
    found = catalog.find_pulled(name, server.cache_dir)
    if found is None and not given_up:
        raise _not_installed(name)
    freed = 0 if found is None else _removed(server, name, found.path.resolve())
    deleted = {"id": name, "object": "model", "deleted": True}
    return {**deleted, "x_zinc": {"freed_bytes": freed}}


def _removed(server: ServerParts, name: str, path: Path) -> int:
    """The bytes freed by deleting the model in ``path``, which nothing here uses. Raises
    ApiError."""
    models = server.models
    activating = models.activating
    if not activating.acquire(blocking=False):
        raise try_again("a model is being loaded or deleted", "model_loading", RESTART_SECONDS)
    try:
        if path in models.paths:
            problem = f"{name} answers requests; activate another one first"
            raise model_refused(400, problem, IN_USE)
        started = (models.began_with[1], *models.names.files.values())
        if path in [file.resolve() for file in started]:
            problem = (
                f"{name} is what the server is started with, and would be fetched again; "
                "start it with another --model or without it in --beside first"
            )
            raise model_refused(400, problem, IN_USE)
        return catalog.remove(name, server.cache_dir, SILENT)
    finally:
        activating.release()


def _managed(incoming: HttpRequest) -> Iterator[Json]:
    """The models of the catalog, of the cache, being pulled, and the server's first model."""
    server = incoming.server
    served, pulls = server.models.paths[0], server.pulls.states()
    began_with, path = server.models.began_with
    for facts in catalog.managed_models(server.cache_dir):
        where = facts.pop("path")
        active = where is not None and Path(where).resolve() == served
        yield {**facts, "active": active, "pull": pulls.pop(facts["id"], None)}
        if facts["id"] == began_with:
            began_with = ""
    for name, state in pulls.items():
        yield _outside(name, name, installed=False) | {"active": False, "pull": state}
    if began_with:
        facts = _outside(began_with, "the file the server was started with", installed=True)
        yield facts | {"active": path.resolve() == served, "pull": None}


def _path_of(server: ServerParts, name: str) -> Path:
    """The file of an installed model. Raises ApiError 404."""
    began_with, path = server.models.began_with
    if name == began_with:
        return path
    found = catalog.find_pulled(known_model(name), server.cache_dir)
    if found is None:
        raise _not_installed(name)
    return found.path


def _memory_available(served: ServedModel) -> int | None:
    """Bytes that another model could take; None on tiers with memory of their own."""
    if served.tier not in PROCESSOR_TIERS:
        return None
    return available_memory()


def _card(name: str, created: int) -> Json:
    """The fields of a model that OpenAI's clients read, and Anthropic's in addition to them."""
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created))
    openai = {"id": name, "object": "model", "created": created, "owned_by": "zinc-rt"}
    anthropic = {"type": "model", "display_name": name, "created_at": at, "lifecycle": "active"}
    return openai | anthropic


def _described(model: ServedModel) -> Json:
    """The card of a loaded model."""
    template = model.template
    return {
        **_card(model.name, model.created),
        "max_model_len": model.context,
        "x_zinc": {
            "fingerprint": model.fingerprint,
            "context": model.context,
            "slots": model.limits.slots,
            "tier": model.tier,
            "device": model.device,
            "chat": template is not None,
            "thinking": template is not None and template.has_thinking_toggle,
            "aliases": sorted(model.names - {model.name}),
            "sampling": model.sampling.facts,
        },
    }


def _adapters_of(model: ServedModel) -> Iterator[Json]:
    """The cards of the adapters that requests may name as their model, as vLLM lists them."""
    for adapter in model.adapters.named:
        described = _described(model.for_request(adapter.name))
        yield described | {
            "id": adapter.name,
            "root": text_of_name(adapter.path.name),
            "parent": model.name,
        }


def _outside(name: str, source: str, *, installed: bool) -> Json:
    """The facts of a model that is neither in the catalog nor in the cache."""
    return {"id": name, "size_bytes": None, "source": source, "installed": installed}


def known_model(name: str) -> str:
    """The canonical name of a model that can be pulled. Raises ApiError 404 for any other name."""
    try:
        return catalog.known_name(name)
    except CatalogError:
        raise _unknown(name) from None


def _unknown(name: str) -> ApiError:
    problem = f"{name!r} is no model of the catalog and no name of the hub, hf.co/ORG/REPO[:QUANT]"
    return model_refused(404, problem, "model_not_found")


def _not_installed(name: str) -> ApiError:
    problem = f"{name} is not installed; POST /v1/models/pull fetches it"
    return model_refused(404, problem, "model_not_installed")


_for_admins = partial(Route, strict=True, admin=True)
MODEL_ROUTES = (
    Route("GET", "/v1/models", models, "The model that answers, and those there are."),
    Route("GET", "/v1/models/<path:model>", one_model, "One of them."),
    _for_admins("DELETE", "/v1/models/<path:model>", remove_model, "Delete one. For admins."),
    _for_admins(
        "POST", "/v1/models/pull", pull_model, "Fetch one; progress as events. For admins.",
        PullRequest,
    ),
    _for_admins(
        "POST", "/v1/models/activate", activate_model,
        "Let one answer from now on. For admins.", InstalledModel,
    ),
    _for_admins(
        "POST", "/v1/models/remove", remove_named_model, "Delete one. For admins.",
        InstalledModel,
    ),
)  # fmt: skip
