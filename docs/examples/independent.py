"""A second implementation of docs/arithmetic.md, which imports nothing of the project.

    python docs/examples/independent.py goldens/vectors.json
    python docs/examples/independent.py MODEL.gguf 1 2 3          the digest of a text's logits
    python docs/examples/independent.py MODEL.gguf receipt.json   the steps of a receipt

The first line checks every vector; the others read a llama or qwen3 model without experts."""

import hashlib
import json
import math
import sys

import independent_experts as experts
import independent_recurrent as recurrent
import independent_rotated as rotated
import independent_rules as rules
import numpy as np
from independent_gguf import Gguf, Matrix

F = np.float32
WORD = 0xFFFFFFFF


def digest(logits):
    """SHA-256 of binary32 numbers, -0 written as +0."""
    return hashlib.sha256(np.ascontiguousarray(logits + F(0), "<f4").tobytes()).hexdigest()


# R9, R10: from logits to a token


def philox(key, counter):
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        p, q = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (q >> 32) ^ c1 ^ k0, q & WORD, (p >> 32) ^ c3 ^ k1, p & WORD
        k0, k1 = k0 + 0x9E3779B9 & WORD, k1 + 0xBB67AE85 & WORD
    return c0, c1, c2, c3


def sample(logits, position, temperature=0.0, recent=(), seed=0, top_k=0, top_p=1.0, min_p=0.0,
           repeat_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0, bias=(),
           allowed=None):  # fmt: skip
    """The token at a position after the tokens ``recent``, which the penalties count."""
    if not np.isfinite(logits).all():
        return -1
    x = logits.copy()
    for token, number in bias:
        x[token] += F(number)
    for token in sorted(set(recent)):
        seen = x[token]
        seen = seen / F(repeat_penalty) if seen > 0 else seen * F(repeat_penalty)
        seen = seen - F(list(recent).count(token)) * F(frequency_penalty)
        x[token] = seen - F(presence_penalty)
    if temperature > 0:
        x = x / F(temperature)
    if allowed is not None:
        x = np.array([v if i in set(allowed) else -np.inf for i, v in enumerate(x)], F)
    if not np.isfinite(x.max()):
        return -1
    if temperature <= 0:
        return int(x.argmax())
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    order = order[:top_k] if top_k > 0 else order
    weights = [int(w) for w in np.rint(rules.exp(x[order] - x[order[0]]) * F(2**24))]
    whole, before, kept = sum(weights), 0, []
    share, least = (round(float(F(p)) * 65536) for p in (top_p, min_p))
    for token, weight in zip(order, weights, strict=True):
        inside = top_p >= 1 or before << 16 < share * whole
        likely = min_p <= 0 or weight << 16 >= least * weights[0]
        if kept and not (inside and likely):
            break
        kept.append((token, weight))
        before += weight
    kept.sort()
    word = philox((seed & WORD, seed >> 32), (position, 0, 0, 0))[0]
    target = word * sum(weight for _, weight in kept) >> 32
    for token, weight in kept:
        if target < weight:
            return token
        target -= weight
    raise AssertionError


def log_probabilities(logits, token, top):
    x = logits.reshape(1, -1)
    most = x.max()
    order = sorted(range(x.size), key=lambda i: (-x[0, i], i))[:top]
    minus = rules.log(rules.total_of(rules.exp(x - most)))[0]
    logs = (x[0] - most) - minus
    return {"chosen": logs[[token]], "ids": np.array([order]), "logs": logs[order][None]}


# The model: llama and qwen3


class Model:
    def __init__(self, path, context):
        self.file = file = Gguf(path)
        self.name = name = file.metadata["general.architecture"]
        assert name in ("llama", "qwen3")
        key = lambda part, default=None: file.metadata.get(f"{name}.{part}", default)  # noqa: E731
        self.layers, self.heads = key("block_count"), key("attention.head_count")
        self.kv_heads = key("attention.head_count_kv", self.heads)
        self.size = key("attention.key_length", key("embedding_length") // self.heads)
        self.eps = key("attention.layer_norm_rms_epsilon")
        kind, factors = key("rope.scaling.type", "none"), None
        if "rope_freqs.weight" in file.tensors:
            factors = file.floats("rope_freqs.weight").tolist()
        scaling = {} if kind == "none" else {"factor": key("rope.scaling.factor", 1.0)}
        if kind == "yarn":
            original = key("rope.scaling.original_context_length")
            scaling |= {"yarn": 1, "original_context": original}
        dims = key("rope.dimension_count", self.size)
        base = key("rope.freq_base", 10000.0)
        self.table = rules.rotary_table(context, base, dims, factors, **scaling)
        self.cache = [([], []) for _ in range(self.layers)]
        self.position = 0

    def step(self, token):
        """The logits after one more token."""
        matrix = self.file.tensors
        x = rules.values_of(matrix["token_embd.weight"].take([token]))[0]
        for layer in range(self.layers):
            x = x + self._attention(self._norm(x, f"blk.{layer}.attn_norm"), layer)
            h = self._norm(x, f"blk.{layer}.ffn_norm")
            gate, up = (self._product(h, f"blk.{layer}.ffn_{part}") for part in ("gate", "up"))
            x = x + self._product(rules.silu(gate) * up, f"blk.{layer}.ffn_down")
        self.position += 1
        output = "output" if "output.weight" in matrix else "token_embd"
        return self._product(self._norm(x, "output_norm"), output)

    def _norm(self, x, name):
        return rules.rms_norm(x, self.file.floats(f"{name}.weight"), self.eps)

    def _product(self, x, name):
        return rules.product(x, self.file.tensors[f"{name}.weight"])

    def _attention(self, h, layer):
        parts = [self._product(h, f"blk.{layer}.attn_{side}") for side in "qkv"]
        q, k, v = (part.reshape(-1, self.size) for part in parts)
        if self.name == "qwen3":
            weights = [self.file.floats(f"blk.{layer}.attn_{side}_norm.weight") for side in "qk"]
            c = rules.powers(*weights, pairs=np.arange(self.size) % self.table.shape[-1])
            q = rules.rms_norm(q, np.ldexp(weights[0], c), self.eps)
            k = rules.rms_norm(k, np.ldexp(weights[1], -c), self.eps)
        turn = self.table[self.position]
        q, k = (rules.rotate(rows, turn, self.name == "qwen3") for rows in (q, k))
        keys, values = self.cache[layer]
        keys.append(rules.row(k, 10))
        values.append(rules.row(v, 10))
        queries, out = rules.row(q, rules.query_bits(self.size)), []
        for head in range(self.heads):
            of = head // (self.heads // self.kv_heads)
            seen = [
                (np.array([m[of] for m, _ in rows]), np.array([e[of] for _, e in rows]))
                for rows in (keys, values)
            ]
            query = queries[0][head], queries[1][head]
            out.append(rules.attention(query, *seen, 0, 1.0 / math.sqrt(self.size)))
        return self._product(np.concatenate(out), f"blk.{layer}.attn_output")


# The vectors


def numbers(seed, shape, exponent):
    """A long input: see harness/vector_cases.py, or the page."""
    counters = np.arange(math.prod(shape), dtype=np.uint64)
    words = (philox((seed, 0), (counters, 0, 0, 0))[0] >> 8).astype(np.int64)
    return np.ldexp((words - 2**23).astype(F), exponent - 23).reshape(shape)


def read(value):
    if not isinstance(value, dict):
        return value
    if "seed" in value:
        return numbers(**value)
    if "f32" in value:
        words = np.array([int(word, 16) for word in value["f32"].split()], np.uint32)
        return words.view(F).reshape(value["shape"])
    if "bytes" in value:
        return np.frombuffer(bytes.fromhex(value["bytes"]), np.uint8).reshape(value["shape"])
    return np.array(value["int"], np.int64).reshape(value["shape"])


def case_attention(q, k, v, storage, scale, window=0, soft_cap=0.0, sinks=None):
    first = max(0, len(k) - window) if window else 0
    bits = {"i4r": (5, 4), "i3r": (4, 3)}.get(storage)
    if bits:
        q, k, v = (rotated.rotated(each, philox) for each in (q, k, v))
    stored = [rules.row(rules.kv_stored(each, storage), 10) for each in (k, v)]
    if bits:
        stored = [(rotated.coded(m, b), e) for (m, e), b in zip(stored, bits, strict=True)]
    m, e = rules.row(q, rules.query_bits(q.shape[-1]))
    heads = range(len(q))
    sink = [None if sinks is None else sinks[head] for head in heads]
    y = np.array([
        rules.attention((m[h], e[h]), *stored, first, scale, soft_cap, sink[h]) for h in heads
    ])  # fmt: skip
    return rotated.rotated_back(y, philox) if bits else y


def case_swiglu(gate, up, activation):
    gates = (rules.silu, rules.gelu, rules.sigmoid, None, lambda x: np.where(x <= 0, F(0), x))
    return rules.clamped(gate, up) if activation == 3 else gates[activation](gate) * up


def case_embedding(rows, dimensions, pooling):
    wide = rows.astype(np.float64)
    if pooling == "mean":
        total = wide[0]
        for each in wide[1:]:
            total = total + each
        wide = [total / len(rows)]
    part = wide[0 if pooling != "last" else -1][:dimensions]
    length = math.sqrt(math.fsum(part * part))
    return (part / length if length else part).astype(F)


def case_product(x, blocks, dtype):
    matrix = Matrix(dtype, blocks)
    return {"values": rules.values_of(matrix), "y": rules.product(x[0], matrix)[None]}


def case_norm(x, weight, eps, groups):
    heads = x.reshape(len(x), groups, -1)
    return rules.rms_norm(heads, weight, eps).reshape(x.shape)


def case_gated_norm(x, gate, weight, eps, heads):
    return case_norm(x, weight, eps, heads) * rules.silu(gate)


def case_quantize(x):
    m, scale = rules.quantize(x[0])
    return {"m": m[None], "scale": scale[None]}


def case_rope(x, positions, dims, neox):
    table = rules.rotary_table(16, 1e4, dims)
    turned = [
        rules.rotate(row[None], table[at], neox) for row, at in zip(x, positions, strict=True)
    ]
    return np.concatenate(turned)


def case_rows(x, bits):
    m, exponent = rules.row(x, bits)
    return {"m": m, "exponent": exponent}


def case_sample(logits, **more):
    return {"tokens": np.array([sample(logits, at, **more) for at in range(100, 108)])}


def case_xielu(x, parameters):
    p, n, b, e = parameters
    below = ((rules.exp(np.where(x > e, e, x)) - F(1)) - x) * n
    return np.where(x > 0, (p * x) * x, below) + b * x


OPS = {
    "binary16": lambda x: np.clip(x, F(-65504), F(65504)).astype(np.float16).view(np.uint16),
    "log": lambda x: rules.log(np.abs(x)),
    "exp": rules.exp, "sigmoid": rules.sigmoid, "silu": rules.silu, "tanh": rules.tanh,
    "softplus": rules.softplus, "gelu": rules.gelu, "swiglu": case_swiglu,
    "xielu": case_xielu,
    "soft_cap": lambda x, cap: F(cap) * rules.tanh(x / F(cap)),
    "sum": rules.total_of, "rms_norm": case_norm, "quantize": case_quantize,
    "rotary_table": rules.rotary_table, "rope": case_rope, "product": case_product,
    "rows": case_rows, "exp2": rules.exp2, "attention": case_attention, "route": experts.case_route,
    "choice": experts.case_choice, "heads": experts.case_heads,
    "mixture": experts.case_mixture, "shared_expert": experts.case_shared,
    "convolution": recurrent.case_convolution,
    "gated_convolution": recurrent.case_gated_convolution, "scan": recurrent.case_scan,
    "delta_rule": recurrent.case_delta, "gated_norm": case_gated_norm, "embedding": case_embedding,
    "philox": lambda key, counter: {"words": np.array(philox(key, counter))},
    "sample": case_sample, "log_probabilities": log_probabilities,
    "row_digest": rules.span_digests, "codes": rotated.case_codes,
    "rotate": lambda x: rotated.both_ways(x, philox),
}  # fmt: skip


def same(found, stored):
    if "f32_sha256" in stored:
        return list(found.shape) == stored["shape"] and digest(found) == stored["f32_sha256"]
    known = read(stored)
    return np.shape(found) == known.shape and np.array_equal(
        found, known, equal_nan=known.dtype == F
    )


def check(case):
    """Whether a vector's results are ours, to the last bit."""
    inputs = {name: read(value) for name, value in case["in"].items()}
    found = OPS[case["op"]](**inputs)
    found = found if isinstance(found, dict) else {"y": np.atleast_1d(found)}
    return all(same(found[name], stored) for name, stored in case["out"].items())


def tree(leaves):
    """The Merkle tree hash of RFC 9162, hex."""
    level = [hashlib.sha256(b"\0" + bytes.fromhex(leaf)).digest() for leaf in leaves]
    while len(level) > 1:
        pairs = [
            hashlib.sha256(b"\1" + b"".join(level[i : i + 2])) for i in range(0, len(level), 2)
        ]
        last = level[-1:] if len(level) % 2 else []
        level = [each.digest() for each in pairs[: len(level) // 2]] + last
    return level[0].hex()


def leaf_of(logits, form):
    """The leaf of a row in a receipt of version 1 or 2."""
    spans = rules.span_digests(logits) if form == 2 else None
    return (
        digest(logits) if form == 1 else hashlib.sha256(spans.astype("<u4").tobytes()).hexdigest()
    )


def check_receipt(path, receipt):
    """Print how many steps of each choice are those of the model."""
    with open(receipt) as file:
        document = json.load(file)
    payload, wrong = document["payload"], 0
    form, forced = payload["receipt"], json.loads(payload["request"]).get("force_tokens")
    for choice, leaves in zip(payload["choices"], document["leaves"], strict=True):
        text, sampling = list(payload["prompts"][choice["prompt"]]), dict(choice["sampling"])
        model, window = Model(path, len(text) + len(leaves)), sampling.pop("repeat_last_n")
        rows, good = [model.step(token) for token in text][-1:], [0, 0]
        for token, leaf in zip(choice["tokens"], leaves, strict=True):
            recent = text[-window:] if window else []
            step = len(text) - len(payload["prompts"][choice["prompt"]])
            chosen = (
                forced[step]
                if forced
                else sample(rows[0], len(text), recent=recent, seed=int(choice["seed"]), **sampling)
            )
            good[0], good[1] = (
                good[0] + (leaf_of(rows[0], form) == leaf),
                good[1] + (chosen == token),
            )
            text.append(token)
            rows = [model.step(token)]
        wrong += good != [len(leaves)] * 2 or tree(leaves) != choice["root"]
        root = "agrees" if tree(leaves) == choice["root"] else "differs"
        print(f"{good[0]} leaves and {good[1]} tokens of {len(leaves)} agree, the root {root}")
    return bool(wrong)


def main(path, *tokens):
    if tokens and tokens[0].endswith(".json"):
        return check_receipt(path, tokens[0])
    if path.endswith(".json"):
        with open(path) as file:
            cases = json.load(file)["cases"]
        wrong = [f"{case['rule']} {case['op']}" for case in cases if not check(case)]
        print(f"{len(cases) - len(wrong)} of {len(cases)} vectors agree", *wrong, sep="\n")
        return bool(wrong)
    model = Model(path, len(tokens))
    print(digest(np.array([model.step(int(token)) for token in tokens])))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
