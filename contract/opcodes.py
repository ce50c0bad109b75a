"""Stable opcode numbers. A number never changes its meaning, since stored graphs hold it."""

from __future__ import annotations

from enum import IntEnum


class Opcode(IntEnum):
    """The operations a graph can contain. ``contract.ops`` defines each of them.

    Numbers 1-28 are the opcodes of a transformer step; all others start at 64. Stored graphs may
    hold these retired numbers, so they stay reserved: 19 was ARGMAX, 22 MATMUL_WMMA_F16, 23
    MATMUL_WMMA_Q4K, 66 MUL, 73 FEED_TOKENS."""

    EMBED = 1
    RMS_NORM = 2
    RMS_NORM_FUSED_QKV = 3
    RMS_NORM_FUSED_MLP_GATE_UP = 4
    ROPE = 5
    RMS_NORM_FUSED_ROPE_KV_WRITE = 6
    FLASH_ATTN = 7
    FLASH_ATTN_BATCHED = 8
    MOE_GATE_TOPK = 9
    MOE_GATE_UP = 10
    MOE_SWIGLU = 11
    MOE_DOWN_ACC = 12
    SHARED_EXPERT = 13
    SSM_CONV1D = 14
    SSM_DELTA_NET = 15
    SSM_GATED_NORM = 16
    RESIDUAL_RMS_NORM = 17
    LM_HEAD = 18
    SAMPLE = 20
    KV_WRITE_BATCHED = 21
    BARRIER = 24
    STREAM_OUT = 25
    LOAD_REQUEST_STATE = 26
    STORE_REQUEST_STATE = 27
    VERIFY_K = 28

    MATMUL = 64
    ADD = 65
    SCALE = 67
    SOFT_CAP = 68
    BIAS_ADD = 69
    SWIGLU = 70
    SELECT_ROWS = 71
    SCALE_COLUMNS = 72
    COPY_ROWS = 74
    LOG_PROBABILITIES = 75
    ROW_DIGEST = 76
    SSM_SCAN = 77
    MAP_TOKENS = 78
    HEAD_PRODUCT = 79
    XIELU = 80
