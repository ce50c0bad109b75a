"""Which model the name in a request means, and which models a tenant may use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.serve.errors import ApiError, model_refused
from harness.serve.model import LATEST, ServedModel, other_names


class ModelNames:
    """The models that requests may name: their ``files`` by name. Empty if the active model is the
    only one."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = files
        self._by_other_name = {
            other: name for name, file in files.items() for other in other_names(file)
        }

    def canonical(self, name: str | None) -> str | None:
        """The key in ``files`` for a name in a request, which may also be a file name or a catalog
        id. Any other name is returned as it is."""
        if name is None or name in self.files:
            return name
        short = name.removesuffix(LATEST)
        return short if short in self.files else self._by_other_name.get(short, name)

    def permitted(
        self, name: str | None, models: Sequence[str], active: ServedModel, lora: bool = False
    ) -> str | None:
        """The name of the model for a request of a tenant that may use ``models``; empty means all.
        ``lora`` says that the request lists adapters. Without a name it is the tenant's first model
        on this server. Raises ApiError 403."""
        if not models:
            return name
        canonical = [own for own in map(self.canonical, models) if own in self.files]
        if name is None and canonical:
            return canonical[0]
        name = self.canonical(name)
        if name in canonical:
            return name
        if name not in self.files and active.is_open_to(models, name, lora):
            return name
        problem = f"this key may use {', '.join(models)} alone, not {name or active.name}"
        raise model_refused(403, problem, "model_not_allowed")

    def is_permitted(self, name: str, models: Sequence[str], active: ServedModel) -> bool:
        """Whether a tenant that may use ``models``, all if empty, may use the model ``name``."""
        try:
            self.permitted(name, models, active)
        except ApiError:
            return False
        return True
