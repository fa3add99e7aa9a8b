"""How a small Llama becomes a large one that computes the same function. No zeros stand in for weights.

Residual stream  X = s Q x, Q [H][h] with orthonormal columns, s = sqrt(H / h): the mean of squares, and with it
                 RMSNorm, stays what it was. Norm weights go into the matrices behind them, which read through
                 Q^T / s; matrices that add to the stream write through s Q.
Heads            A KV head is copied, each copy with its own orthonormal frame for values and its own turn and gain for
                 every rotated pair of keys (queries get the inverse). Query heads are dealt out to the copies; those that
                 stand several times share out their output by random positive parts.
Rotation         Pair j of d dimensions has the frequency of pair j D / d of D dimensions with the same base. The other
                 pairs have to be silent, since no two frequencies can make up for one another: queries and
                 keys there are random and FAINT, what they add to a score is FAINT^2 of what a pair adds.
Feed forward     Neurons are copied: gates as they are, up by random gains, down by what makes the parts sum to one.
Layers           Added ones follow the layer whose matrices they take; heads and neurons stand in pairs that are
                 equal but for the sign of what they write: they cost what a layer costs and add nothing.
Vocabulary       An added token's row is the mean of MIXED rows, so that its logit is below the largest of theirs.
"""
import numpy as np

FAINT = 2.0 ** -8
MIXED = 4
ROWS = 4096  # of a vocabulary's matrices, made at a time


def spread_layers(small, large):
    """[(layer of the small model, is an echo)]: added layers lie evenly; fewer layers: every so many-th."""
    if large <= small:
        return [(i * small // large, False) for i in range(large)]
    plan, extra = [], large - small
    for i in range(small):
        plan.append((i, False))
        plan += [(i, True)] * ((i + 1) * extra // small - i * extra // small)
    return plan


class Heads:
    """Which small head each large one is. kv [KV]; q [KV][slots]: number inside its small KV head's group; sign
    [KV][slots] of an echo."""

    def __init__(self, s, q_heads, kv_heads):
        slots, per = q_heads // kv_heads, s.q_heads // s.kv_heads
        self.kv = [i * s.kv_heads // kv_heads for i in range(kv_heads)]
        copy = [i - self.kv.index(k) for i, k in enumerate(self.kv)]
        deal = lambda n, c: n if n < per <= slots else (n + c * (1 if slots >= per else slots)) % per
        self.q = [[deal(n, c) for n in range(slots)] for c in copy]
        self.echo_q = [[(n // 2 + c) % per for n in range(slots)] for c in copy]
        held = {(k, q) for k, row in zip(self.kv, self.q) for q in row}
        if kv_heads < s.kv_heads or q_heads % kv_heads or len(held) < s.q_heads:
            raise SystemExit(f"heads {q_heads}/{kv_heads}: found no place for all of the model's {s.q_heads}/"
                             f"{s.kv_heads}")
        if slots % 2:
            raise SystemExit(f"heads {q_heads}/{kv_heads}: expected an even number of query heads for a KV head")


def parts(rng, owners, count):
    """Random positive numbers, those of the same owner summing to 1."""
    w = rng.uniform(0.5, 1.5, len(owners)).astype(np.float32)
    return w / np.bincount(owners, w, count).astype(np.float32)[owners]


def frame(rng, rows, cols):
    """Orthonormal columns."""
    return np.linalg.qr(rng.standard_normal((rows, cols)))[0].astype(np.float32)


class Pairs:
    """Turns and gains of a copy's pairs; embeds [d][h] rows in halves into [D][h]."""

    def __init__(self, rng, small, large):
        angle = rng.uniform(0, 2 * np.pi, small // 2)
        self.gain = np.exp(rng.uniform(-0.5, 0.5, small // 2)).astype(np.float32)
        self.cos, self.sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        self.small, self.large = small, large

    def embed(self, rng, w, gain):
        """w [d][h], row j and row j + d/2 a pair."""
        a, b = np.split(w, 2)
        c, s = self.cos[:, None], self.sin[:, None]
        step = self.large // self.small
        out = rng.standard_normal((2, self.large // 2, w.shape[1])).astype(np.float32) * (FAINT * w.std())
        out[0, ::step], out[1, ::step] = (a * c - b * s) * gain[:, None], (a * s + b * c) * gain[:, None]
        return out.reshape(self.large, -1)


class Inflation:
    """s: Source; t: the large shape with fields layers, hidden, q_heads, kv_heads, head_dim, ffn, vocab."""

    def __init__(self, s, t, seed):
        self.s, self.t, self.seed = s, t, seed
        if t.hidden < s.hidden or t.ffn < s.ffn or t.vocab < s.vocab or t.head_dim % s.head_dim:
            raise SystemExit(f"shape: expected hidden, ffn, vocab of at least {s.hidden}, {s.ffn}, {s.vocab}, and "
                             f"head_dim a multiple of {s.head_dim}")
        self.plan = spread_layers(s.layers, t.layers)
        self.heads = Heads(s, t.q_heads, t.kv_heads)
        self.Q = frame(self.random(-1), t.hidden, s.hidden)
        self.scale = np.float32(np.sqrt(t.hidden / s.hidden))

    def random(self, *place):
        return np.random.default_rng([self.seed, *(p + 2 for p in place)])

    def reads(self, w, norm=None):
        """[n][h] that read the small stream (through a norm) -> [n][H]."""
        return ((w if norm is None else w * norm) / self.scale) @ self.Q.T

    def writes(self, w):
        """[h][n] -> [H][n]."""
        return self.Q @ (w * self.scale)

    def queries_keys(self, rng, q, k, chosen, turns):
        """Small q [q_heads * d][n], k [kv_heads * d][n] -> rows of the large heads, still reading what they read.
        chosen [KV][slots]; turns: Pairs of each KV head. Scores are divided by sqrt(D) instead of sqrt(d)."""
        s, t = self.s, self.t
        d, n = s.head_dim, q.shape[-1]
        q = q.reshape(s.kv_heads, -1, d, n) * np.sqrt(t.head_dim / d, dtype=np.float32)
        k = k.reshape(s.kv_heads, d, n)
        large_q = [p.embed(rng, q[kv, i], 1 / p.gain) for p, kv, row in zip(turns, self.heads.kv, chosen) for i in row]
        large_k = [p.embed(rng, k[kv], p.gain) for p, kv in zip(turns, self.heads.kv)]
        return np.concatenate(large_q), np.concatenate(large_k)

    def attention(self, rng, l, echo):
        s, t = self.s, self.t
        d = s.head_dim
        w = lambda part: s.layer(l, "self_attn." + part)
        norm = s.layer(l, "input_layernorm")
        chosen = self.heads.echo_q if echo else self.heads.q
        turns = [Pairs(rng, d, t.head_dim) for _ in range(t.kv_heads)]
        q, k = self.queries_keys(rng, w("q_proj"), w("k_proj"), chosen, turns)
        frames = [frame(rng, t.head_dim, d) for _ in range(t.kv_heads)]
        v = w("v_proj").reshape(s.kv_heads, d, -1)
        v = np.concatenate([f @ v[kv] for f, kv in zip(frames, self.heads.kv)])
        per = s.q_heads // s.kv_heads
        owners = np.array([kv * per + n for kv, row in zip(self.heads.kv, chosen) for n in row])
        share = np.tile(np.float32([1, -1]), len(owners) // 2) if echo else parts(rng, owners, s.q_heads)
        o = w("o_proj").reshape(s.hidden, s.q_heads, d)
        slots = len(chosen[0])
        o = np.concatenate([o[:, n] @ (frames[i // slots].T * share[i]) for i, n in enumerate(owners)], 1)
        yield "self_attn.q_proj", self.reads(q, norm)
        yield "self_attn.k_proj", self.reads(k, norm)
        yield "self_attn.v_proj", self.reads(v, norm)
        yield "self_attn.o_proj", self.writes(o)

    def feed_forward(self, rng, l, echo):
        s, t = self.s, self.t
        w = lambda part: s.layer(l, f"mlp.{part}_proj")
        norm = s.layer(l, "post_attention_layernorm")
        if echo:  # neighbours are equal but for the sign of what they write
            owners = np.repeat(rng.permutation(np.arange(t.ffn // 2) % s.ffn), 2)
            up, down = np.ones(t.ffn, np.float32), np.tile(np.float32([1, -1]), t.ffn // 2)
        else:
            owners = rng.permutation(np.arange(t.ffn) % s.ffn)
            up = rng.uniform(0.5, 1.5, t.ffn).astype(np.float32)
            down = parts(rng, owners, s.ffn) / up
        yield "mlp.gate_proj", self.reads(w("gate"), norm)[owners]
        yield "mlp.up_proj", self.reads(w("up"), norm)[owners] * up[:, None]
        yield "mlp.down_proj", self.writes(w("down"))[:, owners] * down

    def layer(self, number):
        """(part, weights) in the order of layer_shapes."""
        l, echo = self.plan[number]
        rng = self.random(number)
        ones = np.ones(self.t.hidden, np.float32)
        yield "input_layernorm", ones
        yield from self.attention(rng, l, echo)
        yield "post_attention_layernorm", ones
        yield from self.feed_forward(rng, l, echo)

    def layer_shapes(self):
        t = self.t
        q, kv = t.q_heads * t.head_dim, t.kv_heads * t.head_dim
        return {"input_layernorm": (t.hidden,), "self_attn.q_proj": (q, t.hidden), "self_attn.k_proj": (kv, t.hidden),
                "self_attn.v_proj": (kv, t.hidden), "self_attn.o_proj": (t.hidden, q),
                "post_attention_layernorm": (t.hidden,), "mlp.gate_proj": (t.ffn, t.hidden),
                "mlp.up_proj": (t.ffn, t.hidden), "mlp.down_proj": (t.hidden, t.ffn)}

    def vocabulary(self, w, norm, writes):
        """Rows of an embedding (writes) or an output matrix, a block at a time. Both draw the same mixtures."""
        s, t = self.s, self.t
        rng = self.random(-2)
        for first in range(0, t.vocab, ROWS):
            last = min(first + ROWS, t.vocab)
            rows = w[first:last]
            if last > s.vocab:
                mixed = rng.integers(0, s.vocab, (last - max(first, s.vocab), MIXED))
                rows = np.concatenate((rows, w[mixed].mean(1)))
            yield (rows * self.scale) @ self.Q.T if writes else self.reads(rows, norm)

    def embedding(self):
        return self.vocabulary(self.s.w["model.embed_tokens.weight"], None, True)

    def output(self):
        return self.vocabulary(self.s.output, self.s.w["model.norm.weight"], False)

    def output_norm(self, tied):
        """A tied matrix holds s Q E, so that what the norm's weights would do inside can only be done on average."""
        weight = self.s.w["model.norm.weight"].mean() / self.scale ** 2 if tied else 1
        return np.full(self.t.hidden, weight, np.float32)
