#!/usr/bin/env python3
"""Writes tests/vectors/distill: a head with features target of random weights, as distill.py exports heads, and its
pooled weights.

Usage: tools/distill/vectors.py tests/vectors/eagle/model MODEL_FINGERPRINT tests/vectors/distill

The model is a small one in safetensors, whose fingerprint `specontext inspect --json` prints; its hidden states are
made up, with dimensions of very different sizes and a first token of its own, as real ones are. The weights are
computed from what the file holds. expected.bin, little endian: "DVEC", u32 tokens n, width of the states, queries m,
groups, key heads, then tokens u32 [n], states f16 [n][width], queries u32 [m], pooled weights f32
[groups][key heads][m][n].
"""
import json
import os
import struct
import sys
from types import SimpleNamespace

import numpy as np
import torch

from head import Head, Inputs, States, Trained, export

LAYERS, N, QUERIES = (2, 5, 8), 96, (0, 1, 40, 95)
FIRST, Q_HEADS = [0, 3, 8], 6


def embedding(folder):
    with open(os.path.join(folder, "model.safetensors"), "rb") as f:
        header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        data = f.read()
    entry = header["model.embed_tokens.weight"]
    raw = np.frombuffer(data[slice(*entry["data_offsets"])], "<u2").astype("<u4") << 16
    return torch.from_numpy(raw.view("<f4").reshape(entry["shape"]).copy())


def main():
    model, fingerprint, folder = sys.argv[1:]
    torch.manual_seed(5)
    with open(os.path.join(model, "config.json")) as f:
        c = json.load(f)
    hidden, dim, kv = c["hidden_size"], c["head_dim"], c["num_key_value_heads"]
    q_heads = c["num_attention_heads"]
    w = {"blk.0.attn_norm.weight": 1 + 0.3 * torch.randn(hidden),
         "blk.0.attn_q.weight": torch.randn(q_heads * dim, hidden) * 0.2,
         "blk.0.attn_k.weight": torch.randn(kv * dim, hidden) * 0.2}
    llm = SimpleNamespace(layers=c["num_hidden_layers"], kv_heads=kv, q_heads=q_heads, head_dim=dim, hidden=hidden,
                          eps=c["rms_norm_eps"], base=c["rope_theta"], w=w)
    sizes = torch.exp(torch.randn(len(LAYERS), 1, hidden))
    states = torch.randn(len(LAYERS), N, hidden) * sizes
    states[:, 0] *= 30
    states = {l: x.half().float() for l, x in zip(LAYERS, states)}
    kept = States(LAYERS)
    kept.add(states)
    head = Head(llm, FIRST, Q_HEADS, layers=LAYERS, states=kept)
    with torch.no_grad():
        for p in (head.q, head.k, head.norm, head.feature_norm):
            p += 0.15 * torch.randn_like(p)
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, "head.safetensors")
    table = embedding(model)
    export(head, path, llm.layers, len(table), (fingerprint, "0" * 32), c["max_position_embeddings"], "random weights")
    held = Trained(path, "cpu")
    head = Head(llm, held.first, held.q_heads, start=held, layers=held.layers, states=kept)
    tokens, queries = torch.randint(len(table), (N,)), torch.tensor(QUERIES)
    future = torch.arange(N) > queries[:, None]
    with torch.no_grad():
        weights = head(Inputs(table[tokens], llm.eps, states=states), queries, future).exp()
    with open(os.path.join(folder, "expected.bin"), "wb") as f:
        f.write(b"DVEC" + struct.pack("<5I", N, len(LAYERS) * hidden, len(QUERIES), len(FIRST) - 1, kv))
        f.write(tokens.numpy().astype("<u4").tobytes())
        f.write(torch.cat([states[l] for l in LAYERS], 1).numpy().astype("<f2").tobytes())
        f.write(queries.numpy().astype("<u4").tobytes())
        f.write(weights.numpy().astype("<f4").tobytes())


if __name__ == "__main__":
    main()
