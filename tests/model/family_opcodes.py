"""How many nodes of each opcode the graph of a small file of every family has."""

ONCE = (
    *("embed", "lm_head", "load_request_state", "sample", "select_rows", "store_request_state"),
    "stream_out",
)
COLUMNS = """
rms_norm
rms_norm_fused_qkv
rms_norm_fused_mlp_gate_up
rms_norm_fused_rope_kv_write
residual_rms_norm
matmul
head_product
bias_add
add
scale
scale_columns
soft_cap
rope
kv_write_batched
flash_attn_batched
swiglu
xielu
moe_gate_topk moe_gate_up moe_swiglu moe_down_acc
shared_expert
ssm_conv1d
ssm_delta_net ssm_gated_norm
ssm_scan
"""
"""Opcodes of which a graph has as many as a column of TABLE says."""
TABLE = """
 1  4  4  4  0  8  0  0  8  0  0  0  0  0  4  4  0  0  0  0  0  0  llama mistral3 smollm3
 1  4  4  4  0  8  0  0  8  0  0  0  0  0  4  4  0  0  0  0  0  0  internlm2 ernie4_5 phi3 qwen3
 1  4  4  4  0  8  0  0  8  0  0  0  0  0  4  4  0  0  0  0  0  0  qwen3vl exaone baichuan xverse
 5  0  4  4  0 12  0  4  8  0  0  0  0  0  4  4  0  0  0  0  0  0  chatglm qwen
 5  0  4  4  0 20  0 16  8  0  0  0  0  0  4  4  0  0  0  0  0  0  pangu-embedded
 5  4  0  4  0 12  0  0  8  0  0  0  0  0  4  4  0  0  0  0  0  0  arcee
 1  4  2  4  2  8  0  2  4  2  0  0  0  0  4  4  0  2  2  0  0  0  llama4
 5  4  0  4  0 12  0  0  8  0  0  0  0  0  4  0  4  0  0  0  0  0  apertus
 1  4  4  4  0  8  0  0  8 10  0  0  0  0  4  4  0  0  0  0  0  0  granite minicpm
 5  4  0  4  0  4  0  0  8 10  0  0  0  0  4  0  0  4  4  0  0  0  granitemoe
 1  4  1  4  3  5  0  0  2  0  0  0  0  0  4  1  0  3  3  0  0  0  ernie4_5-moe
 9  0  0  4  0 28  0  0  8  0  0  0  0  0  4  4  0  0  0  0  0  0  exaone4
 9  4  4  4  0  8  0  0  8  0  0  0  0  0  4  4  0  0  0  0  0  0  glm4
13  0  1  0  3 25  8  0  2 11  0  0  8  4  4  1  0  3  3  0  0  0  deepseek2 mistral4
 5  0  1  4  3 17  0 12  2  3  0  0  0  0  4  1  0  3  3  0  0  0  glm4moe
 1  4  1  4  3  5  0  0  2  3  0  0  0  0  4  1  0  3  3  0  0  0  dots1 exaone-moe hy_v3
 1  4  1  4  3  5  0  0  2  0  0  0  0  0  4  1  0  3  3  0  0  0  deepseek
 1  4  0  4  4  4  0  0  0  0  0  0  0  0  4  0  0  4  4  0  0  0  bailingmoe
 9  0  0  0  0  8  0  0  4  0  0  0  0  0  0  4  0  0  0  4  0  4  mamba2
 5  0  1  4  3  9  0  0  2  3  0  0  0  0  4  1  0  3  3  0  0  0  bailingmoe2
16  0  1  4  0 21  0  0  8  4  0  0  0  0  4  5  0  3  3  0  0  0  afmoe
13  0  0  4  4 16  0  0  0  0  0  0  0  0  4  0  0  4  0  0  0  0  minimax-m2 olmoe
17  0  0  4  0 28  0  0  8  0  0  0  0  0  4  4  0  0  0  0  0  0  olmo2
 5  0  4  4  0 20  0 12  8  0  0  0  0  0  4  4  0  0  0  0  0  0  seed_oss qwen2 qwen2vl
 1  4  0  4  4  4  0  0  0  0  0  0  0  0  4  0  0  4  0  0  0  0  qwen3moe qwen3vlmoe mellum
 1  4  0  4  4  4  0  0  0  0  0  0  0  0  4  0  0  4  0  0  0  0  smallthinker
 5  0  0  4  4 16  0 12  0  0  0  0  0  0  4  0  0  4  4  0  0  0  qwen2moe
 5  0  4  2  0 24  0  0  8  0  0  0  0  0  2  6  0  0  0  2  2  0  qwen35
 5  0  0  2  4 20  0  0  0  0  0  0  0  0  2  2  0  4  4  2  2  0  qwen35moe qwen3next
 9  0  1  0  3 29  4  0  2  7  0  0  0  2  2  3  0  3  3  6  0  0  kimi-linear
 3  2  4  2  0 10  0  0  8  0  0  0  0  0  2  4  0  0  0  2  0  0  lfm2
 3  2  1  2  3  7  0  0  2  0  0  0  0  0  2  1  0  3  0  2  0  0  lfm2moe
 5  2  4  2  0 10  0  0  8 10  0  0  0  0  2  6  0  0  0  2  0  2  granitehybrid
 9  0  4  4  0 28  0  0 12  0  0  0  0  0  4  8  0  0  0  4  0  4  falcon-h1
 5  1  0  1  0  7  0  0  4  0  0  0  0  0  1  3  0  0  0  1  0  1  nemotron_h
 5  1  0  1  0  7  0  0  4  2  0  0  0  0  1  3  0  2  0  1  0  1  nemotron_h_moe
 9  4  4  0  0  8  0  0  8  0  0  0  8  4  4  4  0  0  0  0  0  0  hunyuan-dense maincoder
 9  4  0  0  4  4  0  0  0  0  0  0  8  4  4  0  0  4  4  0  0  0  hunyuan-moe
 1  4  4  4  0  8  0  0  8  1  0  0  0  0  4  4  0  0  0  0  0  0  gemma
 9  4  4  4  0  8  0  0  8  1  0  1  0  0  4  4  0  0  0  0  0  0  gemma2
 9  4  4  4  0  8  0  0  8  1  0  0  0  0  4  4  0  0  0  0  0  0  gemma3
15  2  4  4  0 12  0  0  8  1  4  1  0  0  4  4  0  0  0  0  0  0  gemma4
46  0  0  2  0 77 10  8 110 71 4  9  2  0  4 90  0  0  0  0  0  0  gemma3n
 5  0  0  4  4 16  0 16  0  0  0  0  0  0  4  0  0  4  0  0  0  0  gpt-oss
 1  4  4  4  0 18  0  0 13  6  0  0  0  0  4  4  0  0  0  0  0  0  command-r cohere2
 9  0  0  4  0 42  0 37 17 13  0  0  0  0  4  4  0  0  0  0  0  0  starcoder2 gptneox
 5  0  0  4  0 34  0 34 13  9  0  0  0  0  4  4  0  0  0  0  0  0  phi2
 9  0  0  4  0 34  0 30 18 15  0  0  1  0  4  4  0  0  0  0  0  0  gpt2 starcoder
 9  0  0  4  0 46  0  9 17  9  0  0  0  0  4  4  0  0  0  0  0  0  stablelm orion
 9  0  0  4  0 34  0 29 17 13  0  0  0  0  4  4  0  0  0  0  0  0  codeshell
 9  0  0  4  0 42  0  9 17  9  0  0  0  0  4  4  0  0  0  0  0  0  nemotron
 9  0  0  4  0 42  0 33 17  9  0  0  0  0  4  4  0  0  0  0  0  0  jais2
 9  0  0  4  0 46  0  0 17  9  0  0  0  0  4  4  0  0  0  0  0  0  olmo
 5  0  0  4  0 26  0  9 13  9  0  0  0  0  4  4  0  0  0  0  0  0  falcon
"""
"""Behind the numbers, the families. A barrier stands before each attention, and one at the end."""


def composition() -> dict[str, dict[str, int]]:
    """The counts that are not 0, by family."""
    columns = [line.split() for line in COLUMNS.split("\n") if line]
    found = {}
    for words in (line.split() for line in TABLE.split("\n") if line):
        counts = dict.fromkeys(ONCE, 1)
        for names, count in zip(columns, map(int, words), strict=False):
            counts |= dict.fromkeys(names, count)
        counts["barrier"] = counts["flash_attn_batched"] + 1
        for family in words[len(columns) :]:
            found[family] = {name: count for name, count in counts.items() if count}
    # Its layers have embeddings, too, and half of them keys and values of others.
    found["gemma3n"] |= {"embed": 2, "barrier": 3}
    # Its delta nets have gates of another kind behind their norms.
    found["kimi-linear"]["ssm_delta_net"] = 2
    return found
