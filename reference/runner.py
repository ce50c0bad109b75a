"""One model on one tier: uploads the weights once, then executes steps."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.cancel_token import CancelToken
from contract.context_manager import ContextManager
from contract.errors import DeviceLost, ModelFileError, StepAbandoned
from contract.execution import STEP_LOCAL, ExecutableGraph
from contract.ir.graph import BufferDecl, BufferKind, Graph
from contract.ir.inputs import InputLayout, InputRows, put_step
from contract.ir.scratch import buffer_bytes
from contract.ir.unread_outputs import ADAPTER_IDS, HIDDEN_STATES
from contract.lazy_dataclass import dataclass
from contract.records import EVENT_NUMBERS, LOGIT_BIAS, OUTPUT_EVENT, QUERY_TOKEN, SAMPLING
from contract.shape_key import ShapeKey
from contract.tier import Buffer, Fence, Tier, UploadsLater
from reference.adapter_inputs import ADAPTER_SCALES, AdapterInputs
from reference.draft_shifts import Verification, shift_behind
from reference.expert_outputs import expert_buffers, expert_outputs
from reference.hidden_rows import BLOCK_ENDS, HIDDEN_PAIRS, HIDDEN_ROWS, HiddenRows, shared_names
from reference.limits import Limits
from reference.memory.page_copies import PageCopies
from reference.memory.recurrent import RecurrentMemory
from reference.model.open import Model
from reference.model.weights import constant_bytes, unchecked_weight, weight_bytes
from reference.quant import finite_words
from reference.upload_progress import Progress, in_turn

LOGITS, HIDDEN = "output.logits", HIDDEN_STATES
"""The logits, and the states from which they are computed, if limits have ``hidden_states``."""
CHOSEN = "output.log_probability"
TOP_IDS = "output.top_ids"
TOP_LOGS = "output.top_log_probabilities"
LOG_PROBABILITIES = (CHOSEN, TOP_IDS, TOP_LOGS)
"""The outputs of rule R10, of a graph whose limits list some."""
RING = "output.ring"
"""The events of steps, from which hosts read the sampled tokens."""
ROW_DIGEST = "output.row_digest"
"""The digests of rule R12, an output of a graph whose limits have ``digests``."""
PAGE_TABLE = "request.page_table"
"""The page table, an input of models with attention."""
WHOLE_SAMPLING = np.dtype((np.void, SAMPLING.itemsize))
"""SAMPLING without its fields, which numpy would copy one by one."""
NOTHING_SHARED: Mapping[str, Buffer] = {}


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step: ``query`` QUERY_TOKEN[tokens], the requested rows and how each is sampled.

    ``output_rows`` int32[rows] indexes query; ``sampling`` is SAMPLING[rows]; ``page_table``
    int32[slots, slot_pages]. ``requested`` names the OUTPUT buffers to keep, such as LOGITS.
    ``page_versions``, int64[slots], is one array with the table for all steps: it numbers the
    latest change of each row, so that the others are not copied again. None: all may have changed.

    ``allowed`` uint32[n, mask words] are the masks and ``bias`` LOGIT_BIAS[n] the biases that
    records of ``sampling`` refer to; None if no record does. Of n there are at most
    ``limits.masks``, and ``limits.slots * limits.biases``. ``digested`` int32[rows] is not 0 in
    rows whose digests are requested, None if none are.

    ``hidden_rows`` int32[tokens] and ``hidden_pairs`` int32[rows, 2] are the rows of the table of
    hidden states that a draft block reads and writes; ``block_ends`` QUERY_TOKEN[tokens] is what a
    DFlash head reads. ``adapters`` ADAPTERS[tokens, combined] are those of each token, or None. A
    ``plain`` step has no drafts, nor what a block or head reads; an ``unread`` one requests
    no outputs and is not collected. A ``frequent`` one samples frequent tokens only, if there is a
    graph for that. ``token`` is for AbandonsSteps. For ``behind`` see ``shift_behind``."""

    query: NDArray[np.void]
    output_rows: NDArray[np.int32]
    sampling: NDArray[np.void]
    page_table: NDArray[np.int32]
    requested: tuple[str, ...] = ()
    allowed: NDArray[np.uint32] | None = None
    bias: NDArray[np.void] | None = None
    page_versions: NDArray[np.int64] | None = None
    hidden_rows: NDArray[np.int32] | None = None
    hidden_pairs: NDArray[np.int32] | None = None
    block_ends: NDArray[np.void] | None = None
    digested: NDArray[np.int32] | None = None
    adapters: NDArray[np.void] | None = None
    plain: bool = False
    unread: bool = False
    frequent: bool = False
    token: CancelToken | None = None
    behind: Verification | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of a step: ``token`` int32[rows], -1 where a logit was not finite, and
    ``accepted`` int32[rows], how many drafted tokens after the row's are right.

    ``outputs`` are the bytes of the requested buffers. The arrays are the step's own."""

    token: NDArray[np.int32]
    accepted: NDArray[np.int32]
    outputs: Mapping[str, NDArray[np.uint8]]

    @property
    def logits(self) -> NDArray[np.float32]:
        """float32[rows, vocab]; the step must have requested LOGITS."""
        return self.rows(LOGITS)

    def rows(self, name: str) -> NDArray[np.float32]:
        """float32[rows, n] of the output ``name``, which the step must have requested."""
        return self._rows(name, np.float32)

    @property
    def log_probability(self) -> NDArray[np.float32]:
        """float32[rows] of the sampled tokens (rule R10), NaN for token -1; the step must have
        requested CHOSEN."""
        return self.outputs[CHOSEN].view(np.float32)

    @property
    def top_ids(self) -> NDArray[np.int32]:
        """int32[rows, top], the likeliest first; the step must have requested TOP_IDS."""
        return self._rows(TOP_IDS, np.int32)

    @property
    def top_log_probabilities(self) -> NDArray[np.float32]:
        """float32[rows, top] of ``top_ids``; the step must have requested TOP_LOGS."""
        return self._rows(TOP_LOGS, np.float32)

    def _rows(self, name: str, dtype: Any) -> NDArray[Any]:
        values: NDArray[Any] = self.outputs[name].view(dtype)
        return values.reshape(len(self.token), -1) if len(self.token) else values.reshape(0, 0)


@dataclass(frozen=True, slots=True)
class Submission:
    """A step in flight: its completion, and its events in the output ring."""

    fence: Fence
    rows: int
    first_event: int
    ring: Buffer


class ModelRunner(ContextManager):
    """Executes steps of ``model`` on ``tier``; owns the KV pool. A context manager.

    ``recurrent`` saves, restores and copies what delta-net layers keep of a slot's sequence.
    ``graph`` is that of the whole model, or of its draft block, which uses the buffers in
    ``shared`` of the model's runner; ``frequent`` is the same graph with frequent tokens only."""

    def __init__(
        self,
        model: Model,
        tier: Tier,
        limits: Limits,
        progress: Progress | None = None,
        *,
        graph: Graph | None = None,
        shared: Mapping[str, Buffer] = NOTHING_SHARED,
        frequent: Graph | None = None,
    ) -> None:
        self.model, self.tier, self.limits = model, tier, limits
        self.graph: Graph = model.graph(limits) if graph is None else graph
        self._buffers: dict[str, Buffer] = {}
        self._last: Submission | None = None
        self._copies: PageCopies | None = None
        self._saved = ExitStack()
        self._lowerings: list[ExecutableGraph] = []
        try:
            self._provide_all(shared, progress)
        except BaseException:
            self.close()
            raise
        self._executable = whole = self._lowering(self.graph, shared, limits.largest)
        # Steps leave out what they do not need: adapters, and what drafts need.
        made, self._variants = {limits: whole}, dict[tuple[bool, ...], ExecutableGraph]()
        for variant in product((True, False), repeat=2):
            needed = limits.for_step(*variant) if graph is None else limits
            if needed not in made:
                largest = limits.largest_step(drafts=variant[1])
                made[needed] = self._lowering(model.graph(needed), shared, largest, whole.inputs)
            self._variants[variant] = made[needed]
        self._frequent: ExecutableGraph | None = None
        if frequent is not None:
            self._frequent = self._lowering(frequent, shared, limits.largest, whole.inputs)
        self.expert_outputs = expert_outputs(self.graph)
        self.recurrent = RecurrentMemory(tier, self.graph, self._buffers, limits.saved_states)
        self._saved.callback(self.recurrent.close)
        self._inputs = np.zeros(whole.inputs.nbytes, np.uint8)
        self._page_table = self._optional_input(PAGE_TABLE, np.int32, limits.slots, -1)
        self._page_rows: InputRows | None = None
        self._page_version = 0
        self._allowed = self._optional_input("request.allowed", np.uint32, limits.masks, -1)
        self._bias = self._optional_input("request.bias", LOGIT_BIAS)
        self._hidden_rows = self._optional_input(HIDDEN_ROWS, np.int32)
        self._hidden_pairs = self._optional_input(HIDDEN_PAIRS, np.int32, -1, 2)
        self._block_ends = self._optional_input(BLOCK_ENDS, QUERY_TOKEN)
        self._hidden = HiddenRows.of(limits)
        self._digested = self._optional_input("request.digested", np.int32)
        ids = self._optional_input(ADAPTER_IDS, np.int32)
        scales = self._optional_input(ADAPTER_SCALES, np.float32)
        self._adapters = AdapterInputs(ids, scales, limits.adapters)
        self._query = self._input("request.query", QUERY_TOKEN)
        self._output_rows = self._input("request.output_rows", np.int32)
        self._sampling = self._input("request.sampling", WHOLE_SAMPLING)
        self._events = tier.map(self._buffers[RING]).reshape(-1).view(OUTPUT_EVENT)
        self._event_count = 0

    @property
    def executable(self) -> ExecutableGraph:
        """The graph on the tier, with its buffers."""
        return self._executable

    @property
    def frequent_tokens(self) -> int:
        """How many tokens, from id 0 on, ``frequent`` steps can sample; 0 for all."""
        frequent = self._frequent
        return 0 if frequent is None else int(frequent.graph.buffers[LOGITS].shape[-1])

    def step(self, inputs: StepInput) -> StepOutput:
        """Execute one step and wait for it."""
        return self.collect(self.submit(inputs))

    def submit(self, inputs: StepInput) -> Submission:
        """Start a step after those submitted before it; at most RING_STEPS may be in flight. Raises
        ValueError for more masks or biases than the limits allow, ModelFileError for a file changed
        under a tier."""
        if self.tier.info.host_unified:
            self.model.check_unchanged()
        tokens, rows = len(inputs.query), len(inputs.output_rows)
        _put(self._allowed, inputs.allowed, "masks")
        _put(self._bias, inputs.bias, "biases")
        self.recurrent.advance(inputs.query)
        first = self._event_count
        self._event_count = (first + rows) % EVENT_NUMBERS
        put_step(self._inputs, tokens, rows, first)
        self._query[:tokens] = inputs.query
        self._output_rows[:rows] = inputs.output_rows
        self._sampling[:rows] = inputs.sampling.view(WHOLE_SAMPLING)
        drafts = not inputs.plain or rows > self.limits.slots
        self._put_hidden(inputs, drafts)
        if self._digested is not None:
            self._digested[:rows] = 0 if inputs.digested is None else inputs.digested
        if inputs.adapters is not None:
            self._adapters.put(inputs.adapters, tokens)
        variant = self._variants[inputs.adapters is not None, drafts]
        if inputs.frequent and self._frequent is not None:
            variant = self._frequent
        pages = self._put_pages(inputs)
        block, behind, of_rows = self._inputs, inputs.behind, inputs.output_rows
        shift = shift_behind(behind, variant.inputs, tokens, of_rows, block, self.tier)
        fence = variant.replay(block, inputs.requested, pages, inputs.unread, inputs.token, shift)
        self._last = Submission(fence, rows, first, self._buffers[RING])
        return self._last

    def collect(self, submission: Submission) -> StepOutput:
        """Wait for a step. Raises StepAbandoned."""
        self.tier.wait(submission.fence)
        index = submission.first_event % len(self._events)
        events = self._events.take(np.arange(index, index + submission.rows), mode="wrap")
        return StepOutput(events["token"], events["flags"].view(np.int32), submission.fence.outputs)

    def page_copies(self) -> PageCopies | None:
        """Copies of whole KV pages in the queue of steps; None for a model that has none. Made when
        first needed: it lowers three graphs."""
        if self._copies is None and self._page_table is not None:
            self._copies = PageCopies(self.tier, self.graph, self._buffers)
            self._saved.callback(self._copies.close)
        return self._copies

    def prepare(self) -> None:
        """Lower every variant of a step now, so that no step pays for it."""
        for lowering in self._lowerings:
            for bucket in lowering.buckets:
                lowering.record(bucket)
        self.recurrent.prepare()

    def shared_buffers(self, graph: Graph) -> dict[str, Buffer]:
        """Weights, tables and hidden states that ``graph``, of another part of the model, uses."""
        return {name: self._buffers[name] for name in shared_names(self.graph, graph)}

    def buffer(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a non-scratch buffer, for tests and diagnosis."""
        return self.tier.map(self._buffers[name])

    def reopen(self, limits: Limits) -> None:
        """Open a closed runner anew, with ``limits`` that may differ in the number of pages."""
        ModelRunner.__init__(self, self.model, self.tier, limits)

    def close(self) -> None:
        """Wait for the last step and free the buffers; the tier stays open."""
        if self._last is not None:
            with suppress(DeviceLost, ModelFileError, StepAbandoned):
                self.tier.wait(self._last.fence)
            self._last = None
        self._saved.close()
        for lowering in self._lowerings:
            lowering.close()
        for buffer in self._buffers.values():
            self.tier.free(buffer)
        self._buffers = {}

    def _lowering(
        self,
        graph: Graph,
        shared: Mapping[str, Buffer],
        largest: ShapeKey,
        inputs: InputLayout | None = None,
    ) -> ExecutableGraph:
        used = {n: b for n, b in {**self._buffers, **shared}.items() if n in graph.buffers}
        outputs = LOG_PROBABILITIES, (ROW_DIGEST,), expert_buffers(graph)
        lowering = ExecutableGraph(self.tier, graph, used, largest, outputs, ((HIDDEN,),), inputs)
        self._lowerings.append(lowering)
        return lowering

    def _provide_all(self, shared: Mapping[str, Buffer], progress: Progress | None) -> None:
        self.tier.reserve(self.graph, self.limits.largest)
        later = self.tier if isinstance(self.tier, UploadsLater) else None
        for decl in self.graph.buffers.values():
            if decl.kind not in STEP_LOCAL and decl.name not in shared:
                self._buffers[decl.name] = self._provide(decl, progress, later)
        if later is not None and not later.finish_uploads():
            self._refuse_broken()

    def _provide(
        self, decl: BufferDecl, progress: Progress | None, later: UploadsLater | None
    ) -> Buffer:
        buffer: Buffer
        if decl.kind is BufferKind.WEIGHT and later is not None:
            data = unchecked_weight(self.model.tensors, decl)
            buffer = later.upload_later(decl, data, finite_words(decl.dtype), in_turn(progress))
        elif decl.kind is BufferKind.WEIGHT:
            data = weight_bytes(self.model.tensors, decl)
            in_turn(progress)(data.nbytes)
            buffer = self.tier.upload(decl, data)
        elif decl.kind is BufferKind.CONSTANT:
            buffer = self.tier.upload(decl, constant_bytes(self.model, decl))
        else:
            buffer = self.tier.alloc(decl, buffer_bytes(decl, self.limits.largest))
        return buffer

    def _refuse_broken(self) -> None:
        """Raise ModelFileError for the first weight with a number that is not finite."""
        for decl in self.graph.of_kind(BufferKind.WEIGHT):
            weight_bytes(self.model.tensors, decl)
        raise DeviceLost(f"{self.tier.info.device} found a broken weight, and none is")

    def _put_pages(self, inputs: StepInput) -> InputRows | None:
        """Bring the page table of the block up to date; what tells the tier which rows changed."""
        table, versions = self._page_table, inputs.page_versions
        if table is None or versions is None:
            if table is not None:
                table[:] = inputs.page_table
            self._page_rows = None
            return None
        rows = self._page_rows
        if rows is None or rows.versions is not versions:
            table[:] = inputs.page_table
            start = self._executable.inputs.offsets[PAGE_TABLE]
            self._page_rows = rows = InputRows(start, table[0].nbytes, versions)
            self._page_version = rows.latest
        elif (latest := rows.latest) > self._page_version:
            changed = (versions > self._page_version).nonzero()[0]
            table[changed] = inputs.page_table[changed]
            self._page_version = latest
        return rows

    def _put_hidden(self, inputs: StepInput, drafts: bool) -> None:
        """Write which hidden states the step reads and stores: by default those of its tokens."""
        if self._hidden_rows is not None and inputs.hidden_rows is not None:
            self._hidden_rows[: len(inputs.hidden_rows)] = inputs.hidden_rows
        if self._block_ends is not None and inputs.block_ends is not None:
            self._block_ends[: len(inputs.block_ends)] = inputs.block_ends
        if self._hidden_pairs is not None and drafts:
            if (pairs := inputs.hidden_pairs) is None:
                pairs = self._hidden.written(inputs.query)
            self._hidden_pairs[: len(pairs)] = pairs

    def _input(self, name: str, dtype: Any) -> NDArray[Any]:
        start = self._executable.inputs.offsets[name]
        nbytes = buffer_bytes(self.graph.buffers[name], self.limits.largest)
        return self._inputs[start : start + nbytes].view(dtype)

    def _optional_input(self, name: str, dtype: Any, *shape: int) -> NDArray[Any] | None:
        found = self._input(name, dtype) if name in self.graph.buffers else None
        return found.reshape(shape) if found is not None and shape else found


def _put(target: NDArray[Any] | None, given: NDArray[Any] | None, name: str) -> None:
    """Write ``given`` to the first rows of an input."""
    if given is None:
        return
    if target is None or len(given) > len(target) or given.shape[1:] != target.shape[1:]:
        room = "none" if target is None else target.shape
        raise ValueError(f"a step's {name} are {given.shape}, the limits allow {room}")
    target[: len(given)] = given
