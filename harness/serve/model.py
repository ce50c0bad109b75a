"""A served model: its names, fingerprint, sampling defaults and adapters, and the prompts of its
chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from contract.arithmetic import PAGE_TOKENS
from contract.errors import PromptTooLong, RequestError
from contract.types import MAX_INT32, SamplingParams, Tenant
from harness import catalog
from harness.console import text_of_name
from harness.file_digests import adapted_fingerprint, file_digests, system_fingerprint
from harness.host.dialect import Dialect
from harness.host.disk import function_name
from harness.host.engine_thread import EngineThread
from harness.host.hosted import HostedModel, host_model
from harness.host.options import SessionOptions
from harness.host.remote.process import EngineProcess
from harness.host.stream_driver import BUFFERED_EVENTS
from harness.host.template_dialect import tried_dialect
from harness.named_adapters import NamedAdapter, Scales
from harness.progress import SILENT, Progress
from harness.sampling_defaults import SamplingDefaults, sampling_defaults
from harness.serve.chat import ChatPlan, plan_chat
from harness.serve.errors import ApiError, model_refused
from harness.serve.storage import ProblemLog, StorageProblem
from harness.serve.wire import ChatRequest, LoraScale
from harness.trace.record import TracedTier
from reference.engine import Engine
from reference.model.adapters import Adapters
from reference.model.chat_template import ChatTemplate, RenderedChat
from reference.model.open import Model
from reference.model.spoken_turns import encode_spoken

Json = dict[str, Any]
Engines = EngineThread | EngineProcess
"""What steps the engines of a server."""


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


WINDOW = "repeat_last_n"
"""Names how far penalties look back, in answers and receipts."""
CONTEXT = "context"
"""Names there the most positions of a prompt and its answer."""
STALL_STEPS = 256
"""A request ends after this many steps in which its tokens were not read."""
ANY_NAME = "*"
"""An alias that means any name."""
LATEST = ":latest"
"""The tag that Ollama's clients add to a name without a tag."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How a server opens a model. ``name``: what requests call it. ``aliases``: other names; "*" is
    any name. ``digests``: the file that caches digests of model files. ``buffered_events``: unread
    events of a request before it stalls. ``sampling``: defaults of sampling parameters."""

    session: SessionOptions
    name: str
    digests: Path
    buffered_events: int = BUFFERED_EVENTS
    aliases: tuple[str, ...] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ServedModel(HostedModel):
    """A hosted model as the server names it.

    ``fingerprint`` identifies the function it computes. ``created``: time of its file in seconds
    since 1970. ``trace``: name of the file that records it. ``names``: other names in requests.
    ``sampling``: defaults of sampling parameters. ``keeps_prompts``: whether it has a prefix cache.
    ``files``: SHA-256 digests of its files. ``scales``: the adapters of one request; None for the
    model without a request."""

    name: str
    fingerprint: str
    created: int
    trace: str | None = None
    names: frozenset[str] = frozenset()
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    keeps_prompts: bool = True
    files: tuple[str, ...] = ()
    trace_log: ProblemLog = field(default_factory=ProblemLog)
    adapters: ServedAdapters = field(default_factory=ServedAdapters)
    scales: Scales | None = None

    @classmethod
    def named(cls, hosted: HostedModel, path: Path, options: ModelOptions) -> ServedModel:
        """The hosted model of the file ``path``, served with these options."""
        session, model = options.session, hosted.model
        return cls(
            **vars(hosted),
            name=options.name,
            fingerprint=system_fingerprint(model, hosted.limits, options.digests),
            created=int(path.stat().st_mtime),
            trace=None if session.recording.trace is None else session.recording.trace.name,
            names=frozenset((*other_names(path), *options.aliases)),
            sampling=_sampling_of_file(path, model, options),
            keeps_prompts=session.prefix_cache != 0,
            files=tuple(file_digests(model, options.digests)),
            adapters=ServedAdapters(session.lora, model.adapters),
        )

    def memory(self) -> dict[str, int]:
        """Bytes of memory by part: total, weights, context, runtime, and the budget."""
        live = self.driver.memory_state
        plan = self.plan if live is None else live.plan
        weights, context = sum(plan.weights.values()), plan.kv + plan.recurrent
        return {
            "total_bytes": plan.total,
            "weights_bytes": weights,
            "context_bytes": context,
            "runtime_bytes": plan.total - weights - context,
            "budget_bytes": self.budget,
        }

    @cached_property
    def kv_function(self) -> str:
        """Identifies the function that computes keys and values; names saved pages."""
        return function_name(self.model, self.limits, self.files)

    @cached_property
    def dialect(self) -> Dialect:
        """The model's syntax of reasoning and tool calls."""
        return Dialect() if self.template is None else tried_dialect(self.template, self.tokenizer)

    def for_request(self, name: str | None, lora: Sequence[LoraScale] | None = None) -> ServedModel:
        """The model with the adapters of one request, which calls it ``name``. Raises ApiError for
        an unknown name, and RequestError."""
        self.check_name(name)
        if self.scales is not None:
            return self
        chosen = self.adapters.chosen(name and name.removesuffix(LATEST), lora)
        return self.with_adapters(chosen) if chosen else self

    def with_adapters(self, scales: Scales) -> ServedModel:
        """A copy of the model with these adapters, for one request."""
        made = replace(
            self,
            scales=scales,
            fingerprint=adapted_fingerprint(self.fingerprint, self.model, scales),
        )
        vars(made)["dialect"] = self.dialect
        return made

    def check_name(self, name: str | None) -> None:
        """Raises ApiError 404 unless ``name`` is one of the model's names or None."""
        if not self.is_called(name):
            problem = f"there is no model {name!r} here; this server has {self.name!r}"
            problem += ", and more names by zinc-rt serve --alias NAME ('*' for any)"
            raise model_refused(404, problem, "model_not_found")

    def check_trace(self) -> None:
        """Raises StorageProblem while the trace cannot be written."""
        traced = self.traced
        if traced is None or traced.problem is None:
            return
        problem = self.driver.call(_retry_trace)
        self.trace_log.note(problem)
        if problem is not None:
            raise StorageProblem(f"the trace {self.trace} cannot be written: {problem}", full=True)

    def left_out(self, tenant: Tenant) -> dict[str, float]:
        """The values of what a tenant's requests leave out, how far their penalties look back, and
        the most positions of a prompt and its answer."""
        return {**self.sampling.values, WINDOW: self.penalty_window, CONTEXT: self.reach(tenant)}

    def check_window(self, sampling: SamplingParams) -> None:
        """Raises RequestError for penalties over more than ``penalty_window`` tokens. The engine
        may store more tokens for drafts, but answers must not depend on drafts."""
        if sampling.penalizes and sampling.repeat_last_n > self.penalty_window:
            problem = f"is at most {self.penalty_window}, the --repeat-last-n of this server"
            raise RequestError("repeat_last_n", problem)

    def is_called(self, name: str | None) -> bool:
        """Whether ``name`` in a request means this model; None means any model."""
        if name in (None, self.name) or ANY_NAME in self.names or name in self.names:
            return True
        short = name.removesuffix(LATEST)
        return short in (self.name, *self.names) or bool(self.adapters.called(short))

    def is_open_to(self, models: Sequence[str], name: str | None, lora: bool) -> bool:
        """Whether a request of who may use ``models`` alone may call this one ``name`` and, with
        ``lora``, list adapters. A name of the model's own opens all adapters, an adapter's name
        that one."""
        allowed = {one.removesuffix(LATEST) for one in models}
        adapters = allowed & {one.name for one in self.adapters.named}
        if any(map(self.is_called, allowed - adapters)):
            return True
        return name is not None and name.removesuffix(LATEST) in adapters and not lora

    def chat_plan(self, body: ChatRequest) -> ChatPlan:
        """Plan the answer to a chat request. Raises ApiError and TemplateError."""
        return plan_chat(body, self._template(), self.dialect, self.name)

    def check_length(self, text: str, field: str = "prompt") -> None:
        """Raises PromptTooLong for a ``text`` that cannot fit the context, however it is tokenized.
        Tokenizing such a text could take seconds."""
        max_bytes = self.context * self.tokenizer.longest_token
        if len(text.encode()) > max_bytes:
            raise PromptTooLong(field, f"at least {self.context + 1} tokens", self.context)

    def encode(
        self, text: str, *, parse_special: bool = False, add_special_tokens: bool = True
    ) -> list[int]:
        """Token ids of a text. ``parse_special``: the text of a control token becomes that token.
        ``add_special_tokens``: a BOS token in front, if the model has one. Raises RequestError."""
        self.check_length(text)
        add_bos = None if add_special_tokens else False
        return self.tokenizer.encode(text, parse_special=parse_special, add_bos=add_bos)

    def encode_chat(
        self, rendered: RenderedChat, spoken: Sequence[Sequence[int]] = ()
    ) -> list[int]:
        """Token ids of a rendered conversation. ``spoken``: the token ids of earlier answers, see
        ``encode_spoken``. Raises RequestError."""
        self.check_length(rendered.text, "messages")
        return encode_spoken(self.tokenizer, rendered, spoken)

    def turns(self, rendered: RenderedChat, prompt: Sequence[int]) -> tuple[int, ...]:
        """The position in ``prompt`` at which the model's turn begins, if it is known."""
        opening = rendered.opening
        if not opening:
            return ()
        ids = self._openings.get(opening)
        if ids is None:
            ids = self.tokenizer.encode_spans(opening, [(0, len(opening))], add_bos=False)
            self._openings[opening] = ids
        begin = len(prompt) - len(ids)
        return (begin,) if list(prompt[begin:]) == ids else ()

    @cached_property
    def _openings(self) -> dict[str, list[int]]:
        """The token ids of the few beginnings of a turn that the template has."""
        return {}

    def _template(self) -> ChatTemplate:
        if self.template is None:
            raise ApiError(
                400,
                f"{self.name} has no chat template; use /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        return self.template

    def room(self, prompt: int, tenant: Tenant) -> int:
        """Most tokens of an answer to a prompt of ``prompt`` tokens. At least one: the engine
        refuses a prompt that leaves no room."""
        return min(MAX_INT32, max(1, self.reach(tenant) - prompt))

    def reach(self, tenant: Tenant) -> int:
        """Most positions of a prompt and its answer."""
        pages = min(tenant.max_kv_pages, self.limits.pages)
        return min(self.context, tenant.max_context, pages * PAGE_TOKENS)


def _retry_trace(engine: Engine) -> str | None:
    """Try to write the trace of a traced engine; returns the problem that remains."""
    tier = engine.runner.tier
    assert isinstance(tier, TracedTier)
    return tier.retry()


def other_names(path: Path) -> tuple[str, ...]:
    """The names of a model besides its own: its file name with and without the extension, and the
    catalog id."""
    entry = catalog.entry_of_file(path)
    of_file = map(text_of_name, (path.stem, path.name))
    return (*of_file, *(() if entry is None else (entry.id,)))


def _sampling_of_file(path: Path, model: Model, options: ModelOptions) -> SamplingDefaults:
    """The sampling defaults: from the model file, the catalog and the options."""
    entry = catalog.entry_of_file(path)
    catalogued = {} if entry is None else dict(entry.sampling)
    return sampling_defaults(model.file.metadata, catalogued, options.sampling)


def served_session(session: SessionOptions) -> SessionOptions:
    """``session`` with every ability that requests to a server may use."""
    scores = session.top_log_probabilities > 0
    return replace(
        session, chat=True, masks=True, hidden_states=True, scores=scores, stall_steps=STALL_STEPS
    )


def open_model(
    path: Path,
    options: ModelOptions,
    engines: Engines,
    owned: ExitStack,
    progress: Progress = SILENT,
) -> ServedModel:
    """Load a model. ``engines`` steps its engine until ``owned`` closes. Raises what
    ``harness.host.open.load_model`` raises."""
    session, buffered = served_session(options.session), options.buffered_events
    if isinstance(engines, EngineThread):
        hosted = host_model(path, session, engines, owned, progress, buffered_events=buffered)
    else:
        hosted = engines.open(path, session, owned, progress, buffered)
    return ServedModel.named(hosted, path, options)
