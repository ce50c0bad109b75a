"""The sizes an engine is built for, which graph, memory plan, runner and scheduler share."""

from __future__ import annotations

from dataclasses import replace

from contract.arithmetic import MASK_WORD_BITS, MOST_LOG_PROBABILITIES, PAGE_TOKENS
from contract.dtypes import F32, DType
from contract.lazy_dataclass import dataclass
from contract.shape_key import ShapeKey
from contract.spec import KV

RING_STEPS = 4
"""Steps whose events the output ring holds, more than are ever in flight."""

DRAFT_STATES = 4
"""Recurrent states of a slot for which tokens are drafted: for the last known token and so many
drafts less one, which pay off most on all devices that were measured. A state is tens of MB."""

MOST_BIASES = 4096
"""Most logit biases of one sequence."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Room for ``slots`` sequences of up to ``context`` positions on ``pages`` KV pages of 16
    positions.

    A step has at most ``step_tokens`` query tokens and ``step_rows`` rows of logits.
    ``recent_tokens`` is the number of tokens stored for the sampling penalties, ``saved_states``
    the number of recurrent states stored in addition to those of the slots; one is saved after
    every ``state_interval`` tokens of a prompt. A slot has the states after each of its latest
    ``slot_states`` positions, so that drafted tokens can be taken back. Of up to ``draft_tokens``
    drafted tokens of a sequence in a step, each of which needs a row, the device counts the right
    ones.

    Up to ``masks`` rows of a step can have an allowed-token mask, and every sequence up to
    ``biases`` logit biases; ``top_log_probabilities`` is the most tokens per row whose
    log-probabilities are listed. When one of these is 0 the graph has no operand for it. With
    ``hidden_states`` the input of the output projection, the normed state of the last layer, can be
    read too. With ``scores`` every row of a step can give the log-probability of a token of its
    prompt, which needs ``top_log_probabilities``. With ``hidden_rows`` the normed states of the
    last so many positions of every slot stay on the device, for a draft block to read. With
    ``digests`` rows of logits can be digested where they are (rule R12). With ``experts`` the
    experts that each token of a mixture uses can be read. Each request can combine ``adapters`` of
    the model's adapters: as many as ``Adapters.combined``, or 0 for none.

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

    def __post_init__(self) -> None:
        if self.kv_dtype not in KV:
            accepted = ", ".join(map(str, KV))
            raise ValueError(f"KV pages are one of {accepted}, not {self.kv_dtype}")
        for name, limit in (
            ("masks", self.step_rows),
            ("biases", MOST_BIASES),
            ("top_log_probabilities", MOST_LOG_PROBABILITIES),
        ):
            if not 0 <= getattr(self, name) <= limit:
                raise ValueError(f"{name} is {getattr(self, name)}, not 0 to {limit}")
        if self.scores and not self.top_log_probabilities:
            raise ValueError("scores need top_log_probabilities of at least 1")

    @property
    def largest(self) -> ShapeKey:
        """The largest step."""
        return ShapeKey(self.step_tokens, self.step_rows)

    @property
    def score_records(self) -> int:
        """Biases of a step that make its rows give the tokens of prompts: one a row."""
        return self.step_rows if self.scores else 0

    @property
    def bias_records(self) -> int:
        """Biases of a step: those of rows that are scored, then ``biases`` of every slot."""
        return self.score_records + self.slots * self.biases

    @property
    def ring_events(self) -> int:
        """Entries of the output ring: a power of two, so that event numbers may wrap around."""
        return RING_STEPS << max(0, self.step_rows - 1).bit_length()

    @property
    def hidden_table(self) -> int:
        """Rows of the table of hidden states: ``hidden_rows`` of every slot, one of every token of
        a step, one of zeros, and one of every slot for what a draft block computed."""
        return self.slots * self.hidden_rows + self.step_tokens + 1 + self.slots

    def for_step(self, adapted: bool, drafts: bool) -> Limits:
        """The same for steps of which no token has an adapter unless ``adapted``, and which without
        ``drafts`` have no drafted tokens, and hidden states that no draft block reads."""
        found = self if adapted else replace(self, adapters=0)
        return found if drafts else replace(found, draft_tokens=0, hidden_rows=0)

    @property
    def slot_pages(self) -> int:
        """Columns of the page table."""
        return pages_for(self.context)


def with_drafts(limits: Limits, drafts: int) -> Limits:
    """The same for at most ``drafts`` drafted tokens of a sequence in a step, with recurrent states
    to return to from wrong ones."""
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
