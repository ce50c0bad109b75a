"""The sizes an engine is built for; graph, memory plan, runner and scheduler share them."""

from __future__ import annotations

from dataclasses import replace

from contract.arithmetic import MASK_WORD_BITS, MAX_LOG_PROBABILITIES, PAGE_TOKENS
from contract.dtypes import F32, DType
from contract.lazy_dataclass import dataclass
from contract.shape_key import ShapeKey
from contract.spec import KV

RING_STEPS = 4
"""Steps whose events the output ring holds; fewer are ever in flight."""

DRAFT_STATES = 4
"""Recurrent states per slot if tokens are drafted: one after the last known token and one after
each of DRAFT_STATES - 1 drafts, the number that was fastest on all measured devices. A state takes
tens of MB."""

MAX_BIASES = 4096
"""Most logit biases of one sequence."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Room for ``slots`` sequences of up to ``context`` positions on ``pages`` KV pages of 16
    positions.

    - ``step_tokens``, ``step_rows``: the most query tokens and rows of logits of a step.
    - ``recent_tokens``: tokens stored per slot for the sampling penalties.
    - ``saved_states``: recurrent states stored besides those of the slots; one is saved after every
      ``state_interval`` tokens of a prompt. ``slot_states``: the latest positions after which a
      slot keeps its state, so that drafted tokens can be undone.
    - ``draft_tokens``: the most drafts of a sequence in a step, each of which needs a row; the
      device counts the accepted ones.
    - ``masks``: the most rows of a step with a token mask. ``biases``: the most logit biases of a
      sequence. ``top_log_probabilities``: the most tokens per row whose log-probabilities are
      listed. If one is 0 the graph has no operand for it.
    - ``hidden_states``: the input of the output projection, the normed state of the last layer, can
      be read. ``scores``: every row can give the log-probability of a token of its prompt, which
      needs ``top_log_probabilities``. ``digests``: rows of logits can be digested on the device
      (rule R12). ``experts``: the experts that each token of a mixture uses can be read.
    - ``hidden_rows``: the number of latest positions of a slot whose normed states stay on the
      device, for a draft block.
    - ``frequent_tokens``: the number of tokens, from id 0 on, whose logits the graph of a drafter
      computes; 0 for all. Vocabularies list frequent tokens first.
    - ``adapters``: how many of the model's adapters a request can combine, ``Adapters.combined`` or
      0.

    Raises ValueError for a storage type that keys and values cannot have, and for ``masks``,
    ``biases`` or ``top_log_probabilities`` out of range."""

    slots: int
    context: int
    pages: int
    kv_dtype: DType = F32
    recent_tokens: int = 64
    step_tokens: int = 64
    step_rows: int = 16
    saved_states: int = 0
    slot_states: int = 1
    state_interval: int = 1024
    draft_tokens: int = 0
    masks: int = 0
    biases: int = 0
    top_log_probabilities: int = 0
    hidden_states: bool = False
    scores: bool = False
    hidden_rows: int = 0
    digests: bool = False
    experts: bool = False
    adapters: int = 0
    frequent_tokens: int = 0

    def __post_init__(self) -> None:
        if self.kv_dtype not in KV:
            accepted = ", ".join(map(str, KV))
            raise ValueError(f"KV pages are one of {accepted}, not {self.kv_dtype}")
        for name, limit in (
            ("masks", self.step_rows),
            ("biases", MAX_BIASES),
            ("top_log_probabilities", MAX_LOG_PROBABILITIES),
        ):
            if not 0 <= getattr(self, name) <= limit:
                raise ValueError(f"{name} is {getattr(self, name)}, not 0 to {limit}")
        if self.scores and not self.top_log_probabilities:
            raise ValueError("scores need top_log_probabilities of at least 1")

    @property
    def largest(self) -> ShapeKey:
        """The largest step."""
        return ShapeKey(self.step_tokens, self.step_rows)

    def largest_step(self, drafts: bool) -> ShapeKey:
        """The largest step with or without ``drafts``. The latter has a row for each slot; a step
        that reads more rows is computed like one with drafts."""
        fewer = self.draft_tokens and not drafts
        return ShapeKey(self.step_tokens, self.slots) if fewer else self.largest

    @property
    def score_records(self) -> int:
        """Biases of a step that make rows sample the tokens of prompts: one per row."""
        return self.step_rows if self.scores else 0

    @property
    def bias_records(self) -> int:
        """Biases of a step: one per scored row, then ``biases`` of every slot."""
        return self.score_records + self.slots * self.biases

    @property
    def ring_events(self) -> int:
        """Entries of the output ring: a power of two, so that event numbers may wrap around."""
        return RING_STEPS << max(0, self.step_rows - 1).bit_length()

    @property
    def hidden_table(self) -> int:
        """Rows of the table of hidden states: ``hidden_rows`` per slot, one per token of a step,
        one of zeros, and one per slot for the latest result of a draft block."""
        return self.slots * self.hidden_rows + self.step_tokens + 1 + self.slots

    def for_step(self, adapted: bool, drafts: bool) -> Limits:
        """The limits of a graph variant: without ``adapted`` no token has an adapter; without
        ``drafts`` there are no drafts, and no hidden states for a draft block."""
        found = self if adapted else replace(self, adapters=0)
        return found if drafts else replace(found, draft_tokens=0, hidden_rows=0)

    @property
    def slot_pages(self) -> int:
        """Columns of the page table."""
        return pages_for(self.context)


def with_drafts(limits: Limits, drafts: int) -> Limits:
    """``limits`` for at most ``drafts`` drafts of a sequence in a step, with recurrent states for
    undoing wrong ones."""
    return replace(limits, slot_states=DRAFT_STATES, draft_tokens=drafts)


def pages_for(positions: int) -> int:
    """The KV pages that ``positions`` positions of one sequence need."""
    return -(-positions // PAGE_TOKENS)


def mask_words(vocab: int) -> int:
    """32-bit words of an allowed-token mask."""
    return -(-vocab // MASK_WORD_BITS)


def whole_contexts(
    slots: int,
    context: int,
    kv_dtype: DType,
    step_tokens: int,
    step_rows: int,
    recent_tokens: int = 64,
) -> Limits:
    """Limits with pages for the whole context of every slot."""
    pages = slots * pages_for(context)
    return Limits(slots, context, pages, kv_dtype, recent_tokens, step_tokens, step_rows)
