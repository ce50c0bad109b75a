"""The LoRA adapters of a served model, and which of them a request uses."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.named_adapters import NamedAdapter, Scales
from harness.serve.wire import LoraScale
from reference.model.adapters import Adapters

Json = dict[str, Any]


@dataclass(eq=False)
class ServedAdapters:
    """The adapters of a model. ``defaults`` are the scales for requests that name no adapter; an
    administrator can change them."""

    named: tuple[NamedAdapter, ...] = ()
    opened: Adapters = field(default_factory=Adapters)
    defaults: Scales = ()

    def called(self, name: str | None) -> Scales:
        """The scales for a request whose ``model`` is the name of an adapter: that adapter with its
        own scale. Empty for any other name."""
        return tuple((n, one.scale) for n, one in enumerate(self.named) if one.name == name)

    def chosen(self, name: str | None, lora: Sequence[LoraScale] | None) -> Scales:
        """The scales of a request: those in its ``lora``, else the adapter that its ``model``
        names, else the defaults. Raises RequestError."""
        if lora is None:
            return self.called(name) or self.defaults
        scales = tuple((one.id, one.scale) for one in lora)
        self.opened.check(scales)
        return scales

    def facts(self, scales: Scales) -> list[Json]:
        """The digests and scales by which a verifier finds the same adapters."""
        used = self.opened.used(scales)
        return [{"sha256": self.opened.opened[n].digest, "scale": scale} for n, scale in used]

    def found(self, facts: Sequence[Json]) -> Scales:
        """The scales for recorded ``facts``. Each open adapter is used once, since several may have
        the same file. Raises KeyError with the digest of one that is not open, or not that
        often."""
        left = [one.digest for one in self.opened.opened]
        scales = []
        for one in facts:
            digest = str(one["sha256"])
            if digest not in left:
                raise KeyError(digest)
            index = left.index(digest)
            left[index] = ""
            scales.append((index, float(one["scale"])))
        return tuple(scales)

    def fingerprint(self, alone: str, scales: Scales) -> str:
        """The fingerprint of the model with these adapters; ``alone`` is its fingerprint without
        any."""
        identity = self.opened.identity(scales)
        if not identity:
            return alone
        digest = hashlib.sha256("\n".join((alone, *identity)).encode()).hexdigest()
        return f"{alone.rpartition('-')[0]}-{digest[:16]}"
