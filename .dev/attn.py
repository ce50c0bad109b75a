"""Attention alone: LAYERS ops of one layer shape in a graph, by context; us a launch and hash."""
import hashlib, os, sys, time
import numpy as np
from pathlib import Path
if os.environ.get("OLD"):
    import accel.cuda.registered as r, accel.cuda.plan as p
    rules = tuple(x for x in r.RULES if x.__name__ != "attention_groups_rule")
    r.RULES = rules
    if hasattr(p, "RULES"): p.RULES = rules
import accel.cuda.attention as att
extra = {k: int(v) for k, v in (x.split("=") for x in os.environ.get("MACROS", "").split(",") if x)}
whole = att._batch_macros
att._batch_macros = lambda ops: {**whole(ops), **extra}
from accel.cuda.tier import CudaTier
from accel.cuda.runtime import Choices
from contract.dtypes import F32, I12, I32
from contract.ir.graph import BufferKind, GraphBuilder
from contract.ir.inputs import input_layout, pack_inputs
from contract.ir.scratch import buffer_bytes
from contract.opcodes import Opcode
from contract.records import QUERY_TOKEN
from contract.shape_key import ShapeKey
from contract.tier import Heap
from reference.exact.kv_storage import page_view, store

def graph_of(heads, kv_heads, head_dim, pages, layers):
    b = GraphBuilder("attention")
    q = b.buffer("q", BufferKind.REQUEST, F32, ("tokens", heads * head_dim))
    kv = b.buffer("kv", BufferKind.STATE, I12, (pages, 2, 16, kv_heads, head_dim))
    pt = b.buffer("page_table", BufferKind.REQUEST, I32, (1, pages))
    query = b.buffer("query", BufferKind.REQUEST, I32, ("tokens", 4))
    for i in range(layers):
        b.emit(Opcode.FLASH_ATTN_BATCHED, q=q, kv=kv, page_table=pt, query=query,
               y=b.output(f"y{i}", "tokens", heads * head_dim), heads=heads, kv_heads=kv_heads,
               head_dim=head_dim, scale=head_dim**-0.5, window=0, soft_cap=0.0)
    return b.build()

heads, kv_heads, hd = map(int, os.environ.get("SHAPE", "32,8,128").split(","))
LAYERS = 8
contexts = [int(c) for c in os.environ.get("CONTEXTS", "512,2048,8192,32768").split(",")]
tokens_list = [int(c) for c in os.environ.get("TOKENS", "512").split(",")]
pages = max(contexts) // 16
graph = graph_of(heads, kv_heads, hd, pages, LAYERS)
rng = np.random.default_rng(1)
with CudaTier(choices=Choices(cache=Path("/tmp/cubins-prompt"))) as tier:
    shape = (pages, 2, 16, kv_heads, hd)
    record = 16 * (3 * hd + 2)
    # random records: bytes random, exponents small
    raw = rng.integers(0, 256, (64 * kv_heads, record), np.uint8)
    raw[:, 48 * hd:] = rng.integers(-2, 3, (64 * kv_heads, 32)).astype(np.int8).view(np.uint8)
    raw = np.tile(raw, (pages // 64 + 1, 1)).reshape(-1)[: pages * kv_heads * record]
    for tokens in tokens_list:
        form = ShapeKey(tokens, 0)
        layout = input_layout(graph, form)
        buffers = {}
        for d in graph.buffers.values():
            n = buffer_bytes(d, form)
            if d.kind in (BufferKind.STATE, BufferKind.OUTPUT):
                buffers[d.name] = tier.alloc(d, n, Heap.DEVICE_LOCAL)
        assert raw.nbytes == buffer_bytes(graph.buffers["kv"], form), (raw.nbytes, buffer_bytes(graph.buffers["kv"], form))
        tier.write(buffers["kv"], 0, raw)
        batch = tier.lower(graph, buffers, form, layout)
        q = rng.standard_normal((tokens, heads * hd)).astype(np.float32)
        pt = np.random.default_rng(2).permutation(pages).astype(np.int32)[None]
        for c in contexts:
            if c < tokens: continue
            query = np.zeros(tokens, QUERY_TOKEN)
            query["position"] = np.arange(c - tokens, c)
            packed = pack_inputs(layout, form, {"q": q, "page_table": pt, "query": query.view(np.int32).reshape(tokens, 4)})
            tier.wait(tier.submit(batch, packed), 20)
            best = 1e9
            stream = tier._memory.stream
            rec = batch.recording
            rec.prepare(stream); tier.synchronize()
            for _ in range(4):
                n = 6 if c < 20000 else 2
                t = time.perf_counter()
                for _ in range(n): rec.enqueue(stream)
                tier.synchronize()
                best = min(best, (time.perf_counter() - t) / n)
            digest = hashlib.sha256(tier.read(buffers["y0"], 0, tokens * heads * hd * 4).tobytes()).hexdigest()[:12]
            us = best / LAYERS * 1e6
            scores = sum(range(c - tokens + 1, c + 1)) * heads
            print(f"{'old' if os.environ.get('OLD') else 'new ' + os.environ.get('MACROS', '')} {heads},{kv_heads},{hd} tokens {tokens} context {c}: {us:.1f} us a layer, {scores * hd * 4 / us / 1e6:.0f} TFLOP/s {digest}", flush=True)
        for b_ in buffers.values(): tier.free(b_)
