"""Engines broken on purpose where experts and recurrent states can go wrong."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from contract.opcodes import Opcode
from contract.records import QUERY_TOKEN
from reference.cpu.tier import CpuTier
from reference.ops.moe_down_acc import moe_down_acc
from reference.ops.ssm_conv1d import ssm_conv1d
from reference.ops.ssm_delta_net import ssm_delta_net
from tests.invariance.controls import BrokenTier, Operands


def reversed_experts(operands: Operands, params: Mapping[str, Any]) -> np.ndarray:
    """The weighted sum of a token's experts from the least likely to the likeliest."""
    turned = {name: operands[name][:, ::-1] for name in ("x", "ids", "weights")}
    given = {
        name: operands[name]
        for name in ("down_weight", "expert_scale", "residual")
        if operands.get(name) is not None
    }
    return moe_down_acc(**given, **turned)


def stale_state(operands: Operands, params: Mapping[str, Any]) -> np.ndarray:
    """A delta net that goes on from whatever its slot holds."""
    query = operands["query"].copy()
    query.view(QUERY_TOKEN)["position"] += 1
    given = {name: array for name, array in operands.items() if name not in ("query", "y")}
    return ssm_delta_net(query=query, **given, **params)


def forgetful(operands: Operands, params: Mapping[str, Any]) -> np.ndarray:
    """A convolution that takes what came before a chunk for zeros."""
    operands["state"][...] = 0.0
    given = {name: array for name, array in operands.items() if name != "y"}
    return ssm_conv1d(**given, **params)


def reversed_experts_tier() -> CpuTier:
    """Another order of the experts, for batches only."""
    return BrokenTier(Opcode.MOE_DOWN_ACC, "y", reversed_experts)


def stale_state_tier() -> CpuTier:
    """Recurrent states that nobody clears."""
    return BrokenTier(Opcode.SSM_DELTA_NET, "y", stale_state, above=0)


def forgetful_tier() -> CpuTier:
    """A convolution without history in steps of more than one token."""
    return BrokenTier(Opcode.SSM_CONV1D, "y", forgetful)
