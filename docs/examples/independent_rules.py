"""The rules of docs/arithmetic.md, written from that page. Every line rounds once."""

import math
from decimal import Decimal, localcontext

import numpy as np
from independent_gguf import Blocks, Supers, planes

F = np.float32
NAN = F(np.nan)


def bits(*words):
    """Binary32 numbers from their bits."""
    return [np.uint32(int(word, 16)).view(F) for word in words]


EXP = bits("39506967", "3ab743ce", "3c088908", "3d2aa9c1", "3e2aaaaa", "3f000000")
LOG = bits("3d9021bb", "bdebd1b8", "3def251a", "bdfe5d4f", "3e11e9bf", "be2aae50", "3e4cceac",
           "be7ffffc", "3eaaaaaa")  # fmt: skip
LOG2E, LN2_HIGH, LN2_LOW, ROOT_HALF = bits("3fb8aa3b", "3f318000", "b95e8083", "3f3504f3")
GELU_SLOPE, GELU_CUBIC, STEEPNESS = bits("3f4c422a", "3d372713", "3fd9db23")
EXP2 = bits("3d61fbb0", "3e786f0d", "3f31798d", "3f7ffb49")
# fmt: off
SIN = (1.58969099521155010221e-10, -2.50507602534068634195e-08, 2.75573137070700676789e-06,
       -1.98412698298579493134e-04, 8.33333333332248946124e-03, -1.66666666666666324348e-01)
COS = (-1.13596475577881948265e-11, 2.08757232129817482790e-09, -2.75573143513906633035e-07,
       2.48015872894767294178e-05, -1.38888888888741095749e-03, 4.16666666666666019037e-02)
# fmt: on


def polynomial(coefficients, x):
    value = coefficients[0] * x + coefficients[1]
    for coefficient in coefficients[2:]:
        value = value * x + coefficient
    return value


def power(n):
    """2^n in binary32."""
    return np.ldexp(F(1), n)


# R2


def exp(x):
    with np.errstate(invalid="ignore"):
        c = np.clip(x, F(-87), F(87))
        n = np.rint(c * LOG2E)
        r = (c - n * LN2_HIGH) - n * LN2_LOW
        y = (polynomial(EXP, r) * (r * r) + r) + F(1)
        y = y * power(np.where(np.isnan(n), 0, n).astype(np.int32))
    return np.where(x < F(-87), F(0), y)


def log(x):
    mantissa, exponent = np.frexp(x)
    small = mantissa < ROOT_HALF
    e = np.where(small, exponent - 1, exponent).astype(F)
    f = np.where(small, mantissa + mantissa, mantissa) - F(1)
    z = f * f
    y = polynomial(LOG, f) * f * z + LN2_LOW * e
    return (f + (y - F(0.5) * z)) + LN2_HIGH * e


def sigmoid(x):
    return F(1) / (F(1) + exp(-x))


def silu(x):
    return x / (F(1) + exp(-x))


def clamped(gate, up):
    g, u = np.minimum(gate, F(7)), np.clip(up, F(-7), F(7))
    return (g / (F(1) + exp(-(STEEPNESS * g)))) * (u + F(1))


def tanh(x):
    return F(1) - F(2) / (exp(x + x) + F(1))


def gelu(x):
    return (F(0.5) * x) * (F(1) + tanh(GELU_SLOPE * (x + GELU_CUBIC * ((x * x) * x))))


def softplus(x):
    e = exp(-np.abs(x))
    u = F(1) + e
    return np.maximum(x, F(0)) + (log(u) + (e - (u - F(1))))


def rotary_table(context, base, dims, factors=None, factor=1.0, yarn=0, original_context=0,
                 attention_factor=1.0):  # fmt: skip
    with localcontext() as precise:
        precise.prec = 60
        f = [float(Decimal(base) ** (Decimal(-2 * m) / dims)) for m in range(dims // 2)]
        ln = lambda x: float(Decimal(x).ln())  # noqa: E731
        if factors is not None:
            f = [value / divisor for value, divisor in zip(f, factors, strict=True)]
        magnitude = attention_factor
        if yarn:
            magnitude = (1.0 + 0.1 * ln(factor)) * attention_factor
            turns = [original_context / (r * 2.0 * math.pi) for r in (32.0, 1.0)]
            edge = [dims * ln(turn) / (2.0 * ln(base)) for turn in turns]
            low, high = max(0.0, math.floor(edge[0])), min(dims - 1.0, math.ceil(edge[1]))
            ramp = [1.0 - min(max((m - low) / max(0.001, high - low), 0.0), 1.0)
                    for m in range(dims // 2)]  # fmt: skip
            f = [v * r + (v * (1.0 / factor)) * (1.0 - r) for v, r in zip(f, ramp, strict=True)]
        elif factor != 1.0:
            f = [value * (1.0 / factor) for value in f]
    angle = np.arange(context, dtype=np.float64)[:, None] * np.array(f)
    n = np.rint(angle * 6.36619772367581382433e-01)
    r = angle - n * 1.57079632673412561417e00
    r = r - n * 6.07710050630396597660e-11
    r = r - n * 2.02226624871116645580e-21
    z = r * r
    sine = r + (r * z) * polynomial(SIN, z)
    cosine = 1.0 - (0.5 * z - (z * z) * polynomial(COS, z))
    quadrant = n.astype(np.int64) & 3
    s = np.choose(quadrant, [sine, cosine, -sine, -cosine])
    c = np.choose(quadrant, [cosine, -sine, -cosine, sine])
    return np.stack([c * magnitude, s * magnitude], axis=1).astype(F)


def rotate(x, table, neox):
    """Rotate the heads of one position, x[heads, n], by the table's row [2, pairs]."""
    cosine, sine = table
    count, y = len(cosine), x.copy()
    at = (slice(0, count), slice(count, 2 * count)) if neox else (
        slice(0, 2 * count, 2), slice(1, 2 * count, 2))  # fmt: skip
    a, b = x[:, at[0]], x[:, at[1]]
    y[:, at[0]], y[:, at[1]] = a * cosine - b * sine, a * sine + b * cosine
    return y


# R3, R4


def fold(values):
    """One segment: padded to 256, folded in halves."""
    v = np.zeros((*values.shape[:-1], 256), F)
    v[..., : values.shape[-1]] = values
    while v.shape[-1] > 1:
        v = v[..., : v.shape[-1] // 2] + v[..., v.shape[-1] // 2 :]
    return v[..., 0]


def fold_segments(segments):
    """Segments on the last axis: by fours into spans, spans into the total."""
    total = np.zeros(segments.shape[:-1], F)
    for first in range(0, segments.shape[-1], 4):
        span = np.zeros(segments.shape[:-1], F)
        for index in range(first, min(first + 4, segments.shape[-1])):
            span = span + segments[..., index]
        total = total + span
    return total


def total_of(x):
    parts = [fold(x[..., at : at + 256]) for at in range(0, x.shape[-1], 256)]
    return fold_segments(np.stack(parts, axis=-1))


def rms_norm(x, weight, eps):
    """Norm the last axis."""
    r = F(1) / np.sqrt(total_of(x * x) / F(x.shape[-1]) + F(eps))
    return (x * r[..., None]) * weight


# R5


def quantize(x):
    """One token's activations: integers m[K] and a power of two for each segment."""
    m, scales = np.zeros(len(x), np.int32), []
    for at in range(0, len(x), 256):
        part = x[at : at + 256]
        largest = np.abs(part).max()
        if not largest < np.inf or largest < F(2.0**-64):
            scales.append(F(0) if largest < np.inf else NAN)
            continue
        e = int(np.frexp(largest)[1]) - 1
        m[at : at + 256] = np.clip(np.rint(part * power(10 - e)), -2047, 2047)
        scales.append(power(e - 10))
    return m, np.array(scales, F)


def product(x, matrix):
    """One token x[K] times a matrix: [rows]."""
    p = planes(matrix)
    if isinstance(p, np.ndarray):
        return total_of(p * x)
    m, scales = quantize(x)
    if isinstance(p, Supers):
        m = m.reshape(p.q.shape[1:])
        j = (p.scales * (p.q * m).sum(axis=-1)).sum(axis=-1)
        values = p.d * j.astype(F)
        if p.minima is not None:
            low = (p.minima * m.sum(axis=-1)).sum(axis=-1)
            values = values - p.dmin * low.astype(F)
        return fold_segments(values * scales)
    m = m.reshape(-1, 32)
    terms = p.d * (p.q * m).sum(axis=-1).astype(F)
    if p.m is not None:
        terms = terms + p.m * m.sum(axis=-1).astype(F)
    segments = np.zeros((len(terms), len(scales)), F)
    for block in range(terms.shape[1]):
        segments[:, block // 8] = segments[:, block // 8] + terms[:, block]
    return fold_segments(segments * scales)


def values_of(matrix):
    """The numbers that a matrix stores: [rows, K]."""
    p = planes(matrix)
    if isinstance(p, Blocks):
        y = p.q.astype(F) * p.d[..., None]
        y = y if p.m is None else y + p.m[..., None]
    elif isinstance(p, Supers):
        y = (p.d[..., None] * p.scales.astype(F))[..., None] * p.q.astype(F)
        if p.minima is not None:
            y = y - (p.dmin[..., None] * p.minima.astype(F))[..., None]
    else:
        y = p
    return y.reshape(len(y), -1)


# R6


def row(x, count):
    """Integers m and exponent of rows x[..., n] with ``count`` bits; -128 marks a broken row."""
    a = np.abs(x).max(axis=-1)
    e = np.frexp(a)[1] - 1
    broken, zero = ~(a < F(2.0**40)), a < F(2.0**-40)
    unit = power(np.where(broken | zero, 0, count - e)) * np.where(broken | zero, F(0), F(1))
    with np.errstate(invalid="ignore"):
        m = np.clip(np.rint(x * unit[..., None]), 1 - 2 ** (count + 1), 2 ** (count + 1) - 1)
    m = np.where(broken[..., None], 0, m).astype(np.int64)
    return m, np.where(broken, -128, np.where(zero, -40, e))


def query_bits(n):
    return min(13, 19 - math.ceil(math.log2(n)))


def exp2(x):
    n = np.rint(x)
    return polynomial(EXP2, x - n) * power(n.astype(np.int32))


def kv_stored(x, storage):
    """Rows of keys or values as a cache of this type gives them back."""
    if storage == "f16":
        return np.clip(x, F(-65504), F(65504)).astype(np.float16).astype(F)
    if storage == "q8_0":
        parts = x.reshape(*x.shape[:-1], -1, 32)
        d = np.minimum(np.abs(parts).max(axis=-1) / F(127), F(65504))
        d = d.astype(np.float16).astype(F)[..., None]
        q = np.clip(np.rint(parts / np.where(d > 0, d, F(1))), F(-127), F(127))
        return (np.where(d > 0, q, F(0)) * d).reshape(x.shape)
    return x


def attention(q, keys, values, first, scale, soft_cap=0.0, sink=None):
    """One head's output for a query row, over the positions from ``first`` to the last of
    ``keys`` and ``values``, each (m, exponent)."""
    total, last = None, len(keys[0])
    for span in range(first // 1024 * 1024, last, 1024):
        merged = None
        for start in range(span, min(span + 1024, last), 64):
            at = slice(max(start, first), min(start + 64, last))
            if at.start < at.stop:
                part = tile(q, keys, values, at, at.start - start, F(scale), F(soft_cap))
                merged = part if merged is None else merge(merged, part)
        total = merged if total is None else merge(total, merged)
    if sink is not None:
        x = sink * LOG2E
        top = np.rint(x)
        total = merge(total, (top, exp2(x - top), np.zeros(len(q[0]), F)))
    _, weight, output = total
    y = (output * F(2.0**-23)) / weight
    return np.where(np.abs(output) < F(2.0**-20), F(0), y)


def tile(q, keys, values, at, offset, scale, soft_cap):
    mq, eq = q
    mk, ek, mv, ev = keys[0][at], keys[1][at], values[0][at], values[1][at]
    if eq == -128 or (ek == -128).any() or (ev == -128).any():
        return F(0), F(1), np.full(len(mq), NAN)
    j = (mk @ mq).astype(F)
    unit = power(int(eq) - query_bits(len(mq)) - 10)
    if soft_cap > 0:
        s = (j * (scale * unit)) * power(ek)
        x = (soft_cap * tanh(s / soft_cap)) * LOG2E
    else:
        x = (j * ((scale * LOG2E) * unit)) * power(ek)
    top = np.rint((x + ev.astype(F)).max())
    if not abs(top) < F(2.0**20):
        return F(0), F(1), np.full(len(mq), NAN)
    p = exp2(np.maximum(x - top, F(-80)))
    w = np.rint(p * power(ev + 13)).astype(np.int64)
    weights = np.zeros(64, F)
    weights[offset : offset + len(p)] = p
    return top, fold(weights), (w @ mv).astype(F)


def merge(left, right):
    top = max(left[0], right[0])
    s, t = (F(0) if each[0] - top < -60 else power(int(each[0] - top)) for each in (left, right))
    return top, left[1] * s + right[1] * t, left[2] * s + right[2] * t


def powers(queries, keys, pairs):
    """The exponent c of every channel, where keys have outliers; zeros where they have none."""

    def binades(weights):
        largest = [np.abs(weights[pairs == pair]).max() for pair in range(pairs.max() + 1)]
        found = [int(np.frexp(max(value, F(2.0**-126)))[1]) for value in largest]
        return [max(0, each - sorted(found)[len(found) // 2]) for each in found]

    q, k = binades(queries), binades(keys)
    if max(k) < 3:
        return np.zeros(len(pairs), np.int32)
    finer, best = 2 * (query_bits(len(pairs)) - 10), None
    for level in range(max(k), max(0, max(k) - 12) - 1, -1):
        c = [max(0, each - level) for each in k]
        higher = [4 ** (a + b) for a, b in zip(q, c, strict=True)]
        lower = [4 ** (a - b) for a, b in zip(k, c, strict=True)]
        noise = (max(lower) * sum(higher) << finer) + max(higher) * sum(lower)
        if best is None or noise < best[0]:
            best = noise, c
    return np.array(best[1])[pairs]


# R12: the digests of a row of logits

U = np.uint32
IV = (
    0x6A09E667,
    0xBB67AE85,
    0x3C6EF372,
    0xA54FF53A,
    0x510E527F,
    0x9B05688C,
    0x1F83D9AB,
    0x5BE0CD19,
)
MIXED = ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
         (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14))  # fmt: skip
NEXT = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)


def turned(words, right):
    return words >> U(right) | words << U(32 - right)


def blake3(message):
    """BLAKE3 of whole blocks of 64 bytes, of each column of words."""
    constant = lambda values: [np.full(message.shape[1:], v, U) for v in values]  # noqa: E731
    chain = constant(IV)
    for start in range(0, len(message), 16):
        m = list(message[start : start + 16])
        flags = (start == 0) + 10 * (start + 16 == len(message))
        s = chain + constant((*IV[:4], 0, 0, 64, flags))
        for _ in range(7):
            for n, (a, b, c, d) in enumerate(MIXED):
                for x, first, second in ((m[2 * n], 16, 12), (m[2 * n + 1], 8, 7)):
                    s[a] = s[a] + s[b] + x
                    s[d] = turned(s[d] ^ s[a], first)
                    s[c] = s[c] + s[d]
                    s[b] = turned(s[b] ^ s[c], second)
            m = [m[n] for n in NEXT]
        chain = [s[n] ^ s[n + 8] for n in range(8)]
    return np.array(chain)


def span_digests(logits):
    """Eight words of each 1,024 logits."""
    words = np.where(np.abs(logits) < F(2.0**-126), F(0), logits)
    words = np.where(np.isnan(words), U(0x7FC00000), words.view(U))
    spans = np.pad(words, (0, -len(words) % 1024)).reshape(-1, 64, 16)
    leaves = blake3(spans.transpose(1, 0, 2))
    children = lambda digests: np.concatenate(list(digests))  # noqa: E731
    nodes = blake3(children(leaves.reshape(8, -1, 4, 4).transpose(2, 0, 1, 3)))
    return blake3(children(nodes.transpose(2, 0, 1))).T
