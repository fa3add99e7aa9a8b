#!/usr/bin/env python3
"""Writes tests/vectors/eagle: a small model, EAGLE-3 draft models of random weights in every layout and both
containers, and which positions they pick, by a float64 reference of the published formulas.

Needs numpy and PyTorch, whose torch.save makes the pytorch_model.bin files. Run again only when a case is
added:
  tools/eagle_vectors.py tests/vectors/eagle

expected.bin, little endian: "EVEC", u32 records; a record is char case[32], u32 context, u32 tokens, u32 key
heads, u32 K for each head, the tokens as u32, then for each head the pooled softmax weights as f32 and the K
largest positions, ascending, as u32. A head's keys are rounded to 16 bit before they are scored, as the key
cache keeps them. The case "true-shape" has the shapes of a Llama 3.1 8B draft model; its weights are not
stored but a hash of their place, see `hashed`.
"""
import json
import math
import os
import struct
import sys
from collections import OrderedDict

import numpy as np
import torch

VOCAB, HIDDEN, LAYERS, KV_HEADS, DIM = 96, 64, 8, 2, 16
Q_HEADS = 8
EPS = 1e-5


# ---- containers ------------------------------------------------------------------------------------------

def bf16_bits(x):
    bits = np.ascontiguousarray(x, "<f4").view("<u4").astype(np.uint64)
    return ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16).astype("<u2")


def rounded(x, kind):
    """What the file will hold, as float64."""
    if kind == "F16":
        return x.astype("<f4").astype("<f2").astype(np.float64)
    if kind == "BF16":
        return (bf16_bits(x).astype("<u4") << 16).view("<f4").astype(np.float64)
    return x.astype("<f4").astype(np.float64)


def write_safetensors(path, tensors):
    header, data, at = {"__metadata__": {"format": "pt"}}, [], 0
    for name, (kind, x) in tensors.items():
        raw = {"F16": lambda: x.astype("<f4").astype("<f2"), "BF16": lambda: bf16_bits(x),
               "F32": lambda: x.astype("<f4"), "I64": lambda: x.astype("<i8"),
               "BOOL": lambda: x.astype("u1")}[kind]().tobytes()
        header[name] = {"dtype": kind, "shape": list(x.shape), "data_offsets": [at, at + len(raw)]}
        data.append(raw)
        at += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(data))


class Module(torch.nn.Module):
    """A state dict as modules give it: an OrderedDict with versions as an attribute."""

    def __init__(self, tensors):
        super().__init__()
        self.inner = torch.nn.Module()
        for name, t in tensors.items():
            self.inner.register_buffer(name.replace(".", "/"), t)

    def saved(self):
        state = self.inner.state_dict()
        named = OrderedDict((name.replace("/", "."), t) for name, t in state.items())
        named._metadata = state._metadata
        return named


def sliced(tensors):
    """All tensors of a type as parts of one storage."""
    out = {}
    for dtype in dict.fromkeys(t.dtype for t in tensors.values()):
        own = {n: t for n, t in tensors.items() if t.dtype == dtype}
        whole, at = torch.cat([t.reshape(-1) for t in own.values()]), 0
        for name, t in own.items():
            out[name] = whole[at:at + t.numel()].view(t.shape)
            at += t.numel()
    return out


def write_torch(path, tensors, how):
    kinds = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64,
             "BOOL": torch.bool}
    state = {}
    for name, (kind, x) in tensors.items():
        x = np.ascontiguousarray(x, np.int64 if kind in ("I64", "BOOL") else np.float32)
        state[name] = torch.from_numpy(x).to(kinds[kind])
    if how == "module":
        state = Module(state).saved()
    elif how == "parameters":
        state = {n: torch.nn.Parameter(t, requires_grad=False) for n, t in state.items()}
    elif how == "sliced":
        state = sliced(state)
    torch.save(state, path)


# ---- the reference ---------------------------------------------------------------------------------------

def frequencies(dim, base, scaling=None, stretch=1, trained=2048):
    """Inverse frequencies and the factor of cos and sin. `stretch`: YaRN on top of what the file says."""
    f = base ** (-2.0 * np.arange(dim // 2) / dim)
    original, factor = trained, float(stretch)
    if scaling and scaling["rope_type"] == "llama3":
        wave = 2 * math.pi / f
        low, high, old = scaling["low_freq_factor"], scaling["high_freq_factor"], \
            scaling["original_max_position_embeddings"]
        smooth = (old / wave - low) / (high - low)
        mixed = (1 - smooth) * f / scaling["factor"] + smooth * f
        f = np.where(wave < old / high, f, np.where(wave > old / low, f / scaling["factor"], mixed))
    elif scaling:
        original, factor = scaling["original_max_position_embeddings"], scaling["factor"] * stretch
    if factor == 1:
        return f, 1.0

    def turning(turns):
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))
    low, high = max(math.floor(turning(32)), 0), min(math.ceil(turning(1)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    return f / factor * ramp + f * (1 - ramp), 0.1 * math.log(factor) + 1


def rms(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def rotate(x, freqs):
    """x [token][head][dim]: pairs (j, j + dim / 2)."""
    f, scale = freqs
    angle = np.arange(len(x))[:, None, None] * f
    a, b = np.split(x, 2, -1)
    cos, sin = np.cos(angle) * scale, np.sin(angle) * scale
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def pick(inputs, wq, wk, heads, freqs, norms=None):
    """Pooled weights [key head][token] of the last token's queries."""
    q_heads, kv_heads, dim = heads
    q = (inputs @ wq.T).reshape(-1, q_heads, dim)
    k = (inputs @ wk.T).reshape(-1, kv_heads, dim)
    if norms:
        q, k = rms(q, norms[0]), rms(k, norms[1])
    q, k = rotate(q, freqs)[-1], rotate(k, freqs).astype(np.float32).astype(np.float16).astype(np.float64)
    weights = []
    for h in range(kv_heads):
        group = q[h * (q_heads // kv_heads):(h + 1) * (q_heads // kv_heads)]
        scores = group @ k[:, h].T / math.sqrt(dim)
        e = np.exp(scores - scores.max(-1, keepdims=True))
        weights.append((e / e.sum(-1, keepdims=True)).max(0))
    return np.array(weights)


def record(case, context, tokens, weights):
    """K of each head stands where the gap between neighbours is widest: rounding cannot change the set."""
    out = struct.pack("<32s3I", case.encode(), context, len(tokens), len(weights))
    tops = []
    for w in weights:
        order = np.argsort(-w, kind="stable")
        gaps = w[order[16:64]] / w[order[17:65]]
        k = 17 + int(gaps.argmax())
        assert gaps.max() > 1.005, gaps.max()
        tops.append(np.sort(order[:k]).astype("<u4"))
    out += b"".join(struct.pack("<I", len(t)) for t in tops) + tokens.astype("<u4").tobytes()
    return out + b"".join(w.astype("<f4").tobytes() + t.tobytes() for w, t in zip(weights, tops))


# ---- cases -----------------------------------------------------------------------------------------------

def model_tensors(rng):
    def matrix(rows, cols):
        return "BF16", rng.normal(0, 1 / math.sqrt(cols), (rows, cols))
    t = {"model.embed_tokens.weight": ("BF16", rng.normal(0, 1, (VOCAB, HIDDEN))),
         "model.norm.weight": ("BF16", np.ones(HIDDEN))}
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        t.update({p + "input_layernorm.weight": ("BF16", rng.uniform(.5, 1.5, HIDDEN)),
                  p + "post_attention_layernorm.weight": ("BF16", rng.uniform(.5, 1.5, HIDDEN)),
                  p + "self_attn.q_proj.weight": matrix(4 * DIM, HIDDEN),
                  p + "self_attn.k_proj.weight": matrix(KV_HEADS * DIM, HIDDEN),
                  p + "self_attn.v_proj.weight": matrix(KV_HEADS * DIM, HIDDEN),
                  p + "self_attn.o_proj.weight": matrix(HIDDEN, 4 * DIM),
                  p + "mlp.gate_proj.weight": matrix(16, HIDDEN),
                  p + "mlp.up_proj.weight": matrix(16, HIDDEN),
                  p + "mlp.down_proj.weight": matrix(HIDDEN, 16)})
    return t


MODEL_CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
                "intermediate_size": 16, "max_position_embeddings": 8192, "num_attention_heads": 4,
                "num_key_value_heads": KV_HEADS, "head_dim": DIM, "num_hidden_layers": LAYERS,
                "rms_norm_eps": EPS, "rope_theta": 10000.0, "vocab_size": VOCAB, "tie_word_embeddings": True,
                "hidden_act": "silu"}


def layer_config(**more):
    return {"model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": Q_HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM,
            "rms_norm_eps": EPS, "vocab_size": VOCAB, **more}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 512}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}

# layout: prefix, element type, embedding, how torch.save gets it, base, scaling, trained context, config
LAYOUTS = {
    "eagle": ("midlayer.", "F16", None, "module", 10000.0, None, 2048,
              dict(layer_config(max_position_embeddings=2048), architectures=["LlamaForCausalLM"],
                   draft_vocab_size=32, torch_dtype="float16")),
    "specforge": ("midlayer.", "BF16", "own", "plain", 1e6, None, 2048,
                  dict(layer_config(max_position_embeddings=40960, rope_theta=1e6, rope_scaling=None),
                       architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=32,
                       eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]})),
    "angelslim": ("midlayer.", "F32", "model", "parameters", 500000.0, LLAMA3, 2048,
                  dict(layer_config(max_position_embeddings=4096, rope_theta=500000.0, rope_scaling=LLAMA3),
                       architectures=["Eagle3LlamaForCausalLM"], draft_vocab_size=32)),
    "speculators": ("layers.0.", "BF16", "own", "sliced", 10000.0, YARN, 4096,
                    {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
                     "draft_vocab_size": 32, "norm_before_residual": True, "norm_before_fc": True,
                     "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
                     "transformer_layer_config": dict(
                         layer_config(max_position_embeddings=4096,
                                      rope_parameters=dict(YARN, rope_theta=10000.0)), model_type="qwen3")}),
}


def draft_tensors(rng, prefix, kind, embedding, model_embedding, norms, taps=3):
    def matrix(rows, cols, scale=1.0):
        return kind, rng.normal(0, scale / math.sqrt(cols), (rows, cols))

    def vector(n):
        return kind, rng.uniform(.5, 1.5, n)
    p = prefix
    t = {"fc.weight": matrix(HIDDEN, taps * HIDDEN), p + "input_layernorm.weight": vector(HIDDEN),
         p + "hidden_norm.weight": vector(HIDDEN), p + "post_attention_layernorm.weight": vector(HIDDEN),
         p + "self_attn.q_proj.weight": matrix(Q_HEADS * DIM, 2 * HIDDEN, 1.7),
         p + "self_attn.k_proj.weight": matrix(KV_HEADS * DIM, 2 * HIDDEN, 1.7),
         p + "self_attn.v_proj.weight": matrix(KV_HEADS * DIM, 2 * HIDDEN),
         p + "self_attn.o_proj.weight": matrix(HIDDEN, Q_HEADS * DIM),
         p + "mlp.gate_proj.weight": matrix(16, HIDDEN),
         p + "mlp.up_proj.weight": matrix(16, HIDDEN), p + "mlp.down_proj.weight": matrix(HIDDEN, 16),
         "norm.weight": vector(HIDDEN), "lm_head.weight": matrix(32, HIDDEN),
         "d2t": ("I64", np.arange(32) * 2), "t2d": ("BOOL", np.arange(VOCAB) % 3 == 0)}
    if norms:
        t.update({p + "self_attn.q_norm.weight": vector(DIM), p + "self_attn.k_norm.weight": vector(DIM),
                  "input_norm.weight": vector(taps * HIDDEN)})
    if embedding == "own":
        t["embed_tokens.weight"] = kind, rng.normal(0, 1, (VOCAB, HIDDEN))
    elif embedding == "model":
        t["embed_tokens.weight"] = kind, model_embedding
    return t


def make_case(out, name, rng, model_embedding):
    prefix, kind, embedding, how, base, scaling, trained, config = LAYOUTS[name]
    t = draft_tensors(rng, prefix, kind, embedding, model_embedding, name == "speculators")
    for container in ("safetensors", "bin"):
        folder = os.path.join(out, f"{name}-{container}")
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "config.json"), "w") as f:
            json.dump(config, f, indent=1)
            f.write("\n")
        if container == "bin":
            write_torch(os.path.join(folder, "pytorch_model.bin"), t, how)
        else:
            write_safetensors(os.path.join(folder, "model.safetensors"), t)
    values = {n: rounded(x, k) for n, (k, x) in t.items() if k not in ("I64", "BOOL")}
    table = values["embed_tokens.weight"] if embedding == "own" else model_embedding
    wq, wk = (values[f"{prefix}self_attn.{x}_proj.weight"][:, :HIDDEN] for x in "qk")
    norms = None
    if name == "speculators":
        norms = [values[f"{prefix}self_attn.{x}_norm.weight"] for x in "qk"]
    for context, count in ((trained, 300), (4 * trained - 100, 2600)):
        tokens = rng.integers(0, VOCAB, count)
        stretch = -(-context // trained)
        x = rms(table[tokens], values[prefix + "input_layernorm.weight"])
        freqs = frequencies(DIM, base, scaling, stretch, trained)
        yield record(name, context, tokens, pick(x, wq, wk, (Q_HEADS, KV_HEADS, DIM), freqs, norms))


def hashed(seed, rows, cols, row_length, scale):
    """f16 weights: a hash of seed and place (row * row_length + column), uniform in [-scale, scale)."""
    x = np.arange(rows, dtype=np.uint32)[:, None] * np.uint32(row_length)
    x = x + np.arange(cols, dtype=np.uint32)[None, :]
    x = x + np.uint32(seed * 0x9e3779b9 % 2**32)
    for shift, factor in ((16, 0x7feb352d), (15, 0x846ca68b)):
        x ^= x >> np.uint32(shift)
        x *= np.uint32(factor)
    x ^= x >> np.uint32(16)
    unit = ((x >> np.uint32(8)).astype(np.float32) / np.float32(8388608) - np.float32(1)) * np.float32(scale)
    return unit.astype(np.float16).astype(np.float64)


def true_shape(rng):
    vocab, hidden, heads = 96, 4096, (32, 8, 128)
    rows_q, rows_k = heads[0] * heads[2], heads[1] * heads[2]
    table = hashed(1, vocab, hidden, hidden, 1)
    norm = 1 + hashed(2, 1, hidden, hidden, .5)[0]
    wq = hashed(3, rows_q, hidden, 2 * hidden, 1 / 32)
    wk = hashed(4, rows_k, hidden, 2 * hidden, 1 / 32)
    tokens = rng.integers(0, vocab, 400)
    x = rms(table[tokens], norm)
    for context in (2048, 32768):
        freqs = frequencies(heads[2], 10000.0, None, context // 2048)
        yield record("true-shape", context, tokens, pick(x, wq, wk, heads, freqs))


def main():
    out = sys.argv[1]
    rng = np.random.default_rng(20)
    os.makedirs(os.path.join(out, "model"), exist_ok=True)
    model = model_tensors(rng)
    write_safetensors(os.path.join(out, "model", "model.safetensors"), model)
    with open(os.path.join(out, "model", "config.json"), "w") as f:
        json.dump(MODEL_CONFIG, f, indent=1)
        f.write("\n")
    embedding = rounded(model["model.embed_tokens.weight"][1], "BF16")
    records = [r for name in LAYOUTS for r in make_case(out, name, rng, embedding)] + list(true_shape(rng))
    with open(os.path.join(out, "expected.bin"), "wb") as f:
        f.write(b"EVEC" + struct.pack("<I", len(records)) + b"".join(records))


main()
