"""Reads the metadata keys of a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from contract.arithmetic import EXPERT_GROUPS_MAX
from reference.model.config.keys import MAX_WIDTH, Keys
from reference.model.config.records import Experts, ModelConfig

COUNT = "expert_count"
USED = "expert_used_count"
WIDTH = "expert_feed_forward_length"
SHARED_WIDTH = "expert_shared_feed_forward_length"
GATING = "expert_gating_func"
GATINGS_OF_CHOSEN = (0, 3)
"""Values of the key for a softmax over the chosen experts: not given, and its own number."""
SOFTMAX, SIGMOID = 1, 2
"""Values of the key for a softmax over all experts, and for a sigmoid of each router logit."""
NORMALIZED = "expert_weights_norm"
WEIGHT_SCALE = "expert_weights_scale"
SHARED_COUNT = "expert_shared_count"
GROUPS, GROUPS_USED = "expert_group_count", "expert_group_used_count"
LEADING_DENSE = "leading_dense_block_count"
SHARED_TENSOR = "blk.0.ffn_up_shexp.weight"
MAX_EXPERTS = 1 << 16
MAX_GATING = 255


def read_mixtral_experts(keys: Keys, config: ModelConfig) -> Experts | None:
    """Experts with the width of the dense block they replace, or None for a dense model."""
    counted = _counts(keys, config)
    if counted is None:
        return None
    return Experts(*counted, config.feed_forward)


def read_experts(keys: Keys, config: ModelConfig, shared: bool = False) -> Experts:
    """Experts of width ``expert_feed_forward_length``; by default the dense width / experts
    used."""
    counted = _counts(keys, config)
    if counted is None:
        raise keys.error(COUNT, f"is 0 or missing, must be 1 to {MAX_EXPERTS}")
    count, used = counted
    given = _widths(keys, config)
    widths = []
    for layer, (width, dense, chosen) in enumerate(
        zip(given, config.feed_forward, used, strict=True)
    ):
        if width == 0 and (dense == 0 or dense % chosen):
            raise keys.error(
                WIDTH,
                f"is 0 or missing and {keys.key('feed_forward_length')} ({dense}) is no multiple "
                f"of the {chosen} experts used (layer {layer})",
            )
        widths.append(width or dense // chosen)
    return Experts(count, used, tuple(widths), _shared_width(keys, config) if shared else 0)


def read_plain_weights(keys: Keys, experts: Experts | None) -> Experts:
    """``experts`` weighted by their probabilities among all, unless the file says otherwise."""
    if experts is None:
        raise keys.error(COUNT, f"is 0 or missing, must be 1 to {MAX_EXPERTS}")
    return replace(experts, renormalize=keys.flag(NORMALIZED, False))


def read_parallel_experts(keys: Keys, config: ModelConfig) -> Experts | None:
    """Experts in addition to a dense block, with a width of their own; None for a dense model."""
    counted = _counts(keys, config)
    if counted is None:
        return None
    widths = _widths(keys, config)
    if 0 in widths:
        raise keys.error(WIDTH, f"is 0 or missing, must be 1 to {MAX_WIDTH}")
    return Experts(*counted, widths)


def read_experts_of_chosen(keys: Keys, config: ModelConfig) -> Experts:
    """Experts weighted by a softmax over the chosen ones, which is a softmax renormalized."""
    gating = keys.file.get(keys.key(GATING), int, 0)
    if gating not in GATINGS_OF_CHOSEN:
        raise keys.unsupported(GATING, f"is {gating}", "supported is 3, softmax over the chosen")
    return read_experts(keys, config)


def read_chosen_by_bias(keys: Keys, config: ModelConfig, default: int | None = None) -> Experts:
    """Experts weighted by a sigmoid and chosen by its sum with a bias, behind dense layers;
    ``default`` is how they are weighted where the file does not say."""
    gating = keys.integer(GATING, 0, MAX_GATING, default) or default
    if gating != SIGMOID:
        raise keys.unsupported(GATING, f"is {gating}", f"supported is {SIGMOID}, a sigmoid")
    leading = keys.integer(LEADING_DENSE, 0, config.layers, 0)
    experts = read_experts(keys, config)
    return replace(experts, choice_bias=True, leading_dense=leading)


def read_glm_experts(keys: Keys, config: ModelConfig) -> Experts:
    """Experts chosen by a bias, their weights times a factor, and shared ones as a single one."""
    if not keys.flag(NORMALIZED, False):
        raise keys.unsupported(NORMALIZED, "is false or missing", "supported is true")
    experts = read_chosen_by_bias(keys, config, SIGMOID)
    return replace(
        experts,
        weight_scale=keys.factor(WEIGHT_SCALE),
        shared_width=keys.integer(SHARED_COUNT, 0, MAX_EXPERTS) * experts.widths[0],
        shared_gate=False,
    )


def read_latent_experts(keys: Keys, config: ModelConfig) -> Experts | None:
    """DeepSeek's experts, or None for a dense model. Where the file does not say how they are
    weighted, a bias of the choice tells."""
    leading = keys.integer(LEADING_DENSE, 0, config.layers, 0)
    if not keys.integer(COUNT, 0, MAX_EXPERTS, 0):
        return None
    biased = f"blk.{leading}.exp_probs_b.bias" in keys.file.tensors
    return read_routed_experts(keys, config, SIGMOID if biased else SOFTMAX)


def read_routed_experts(keys: Keys, config: ModelConfig, default: int) -> Experts:
    """Experts behind dense layers, of groups if the file has some, with shared ones as a single
    one; ``default`` is how they are weighted where the file does not say."""
    leading = keys.integer(LEADING_DENSE, 0, config.layers, 0)
    gating = keys.integer(GATING, 0, MAX_GATING, 0) or default
    if gating not in (SOFTMAX, SIGMOID):
        raise keys.unsupported(GATING, f"is {gating}", "supported are 1, a softmax, 2, a sigmoid")
    experts = read_experts(keys, config)
    groups, chosen = _groups(keys, gating, experts)
    return replace(
        experts,
        choice_bias=gating == SIGMOID,
        groups=groups,
        groups_used=chosen,
        leading_dense=leading,
        renormalize=keys.flag(NORMALIZED, False),
        weight_scale=keys.factor(WEIGHT_SCALE),
        shared_width=keys.integer(SHARED_COUNT, 0, MAX_EXPERTS, 0) * experts.widths[0],
        shared_gate=False,
    )


def _groups(keys: Keys, gating: int, experts: Experts) -> tuple[int, int]:
    """The number of groups of experts, of two or more, and of how many a token chooses."""
    groups = keys.integer(GROUPS, 0, EXPERT_GROUPS_MAX, 1) or 1
    chosen = keys.integer(GROUPS_USED, 0, groups, 1) or groups
    if groups > 1 and gating != SIGMOID:
        raise keys.unsupported(GROUPS, f"is {groups}, with a softmax", "supported is 1")
    size, rest = divmod(experts.count, groups)
    if rest or (groups > 1 and size < 2):
        raise keys.error(GROUPS, f"is {groups}, for {experts.count} experts")
    if max(experts.used) > chosen * size:
        raise keys.error(
            GROUPS_USED, f"is {chosen}, groups of {size} for {max(experts.used)} experts a token"
        )
    return groups, chosen


def _widths(keys: Keys, config: ModelConfig) -> tuple[int, ...]:
    nothing = (0,) * config.layers
    return keys.per_layer(WIDTH, config.layers, config.blocks, 0, nothing)


def _counts(keys: Keys, config: ModelConfig) -> tuple[int, tuple[int, ...]] | None:
    """The number of experts and how many each layer uses, or None without experts."""
    count = keys.integer(COUNT, 0, MAX_EXPERTS, 0)
    used = keys.per_layer(USED, config.layers, config.blocks, 0, (0,) * config.layers)
    for layer, chosen in enumerate(used):
        if chosen > count or (chosen == 0) != (count == 0):
            must = f"must be 1 to the {count} of {keys.key(COUNT)}" if count else "must be 0"
            raise keys.error(USED, f"is {chosen} (layer {layer}), {must}")
    return (count, used) if count else None


def _shared_width(keys: Keys, config: ModelConfig) -> int:
    """The width of the shared expert: the key, else the tensor's, else the dense block's."""
    width = keys.integer(SHARED_WIDTH, 0, MAX_WIDTH, 0)
    tensor = keys.file.tensors.get(SHARED_TENSOR)
    if width == 0:
        width = tensor.shape[0] if tensor is not None else config.feed_forward[0]
    if width == 0:
        raise keys.error(SHARED_WIDTH, f"is 0 or missing, must be 1 to {MAX_WIDTH}")
    return width
