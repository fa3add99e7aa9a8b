#!/usr/bin/env python3
"""Writes tests/vectors/inflated/head-small.safetensors, a head of random weights for the case llama-gqa that reads its
hidden states, and head-large.safetensors, what retrieval.py makes of it for tests/vectors/inflated.

Usage: tools/inflate/vectors.py SMALL FINGERPRINT tests/vectors/inflated PROGRAM

SMALL is the folder of `tools/reference_model.py folder llama-gqa SMALL`, FINGERPRINT that of the folder as the test makes
it (it is written in another order; the test names it when it finds another), PROGRAM specontext, which tells the
large model's. The shape and seed are those that tests/vectors/inflated was made with (inflate.py). Checked by
tests/unit/test_inflated.c.
"""
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np

import files
import retrieval
from source import Source
from transform import Inflation

LARGE = dict(layers=3, hidden=84, q_heads=6, kv_heads=3, head_dim=32, ffn=160, vocab=144, tied=False)
CONTEXT, LAYERS, FIRST = 256, (1, 2), (0, 1, 2)


def fingerprints(program, model):
    out = subprocess.run([program, "inspect", "-m", model, "--json"], check=True, capture_output=True).stdout
    report = json.loads(out)
    return report["fingerprint"], report["tokenizer_fingerprint"]


def write_small(path, s, model):
    rng = np.random.default_rng(7)
    h, rows = s.hidden, s.kv_heads * s.head_dim
    norm = lambda n: rng.uniform(0.5, 1.5, n).astype(np.float32)
    matrix = lambda n, m: rng.standard_normal((n, m)).astype(np.float32) / np.sqrt(m, dtype=np.float32)
    out = {"norm.weight": norm(h), "features.norm.weight": norm(h),
           "features.input_norm.weight": norm(len(LAYERS) * h), "features.fc.weight": matrix(h, len(LAYERS) * h)}
    for g in range(len(FIRST) - 1):
        out |= {f"groups.{g}.{c}.weight": 1.5 * matrix(rows, 2 * h) for c in "qk"}
    join = lambda numbers: ",".join(map(str, numbers))
    meta = {"format": "specontext-head", "version": 1, "model": model, "tokenizer": "0" * 32, "embedding": "model",
            "vocab": s.vocab, "hidden": h, "q_heads": s.kv_heads, "kv_heads": s.kv_heads, "head_dim": s.head_dim,
            "layers": s.layers, "groups": len(FIRST) - 1, "group_first_layer": join(FIRST), "rms_eps": 1e-5,
            "rope_base": 10000, "rope_dims": s.head_dim, "rope_pairs": "adjacent", "rope_scaling": "none",
            "rope_factor": 1, "rope_original_context": CONTEXT, "trained_context": CONTEXT, "features": "target",
            "feature_layers": join(LAYERS), "feature_hidden": h, "pool": "mean"}
    files.write(path, {n: x.shape for n, x in out.items()}, out.items(),
                lambda n: "F32" if "norm" in n else "F16", {k: str(v) for k, v in meta.items()})


def main():
    small, fingerprint, folder, program = sys.argv[1:]
    s = Source(small)
    heads = [os.path.join(folder, f"head-{size}.safetensors") for size in ("small", "large")]
    write_small(heads[0], s, fingerprint)
    retrieval.inflate(Inflation(s, SimpleNamespace(**LARGE), 1), *heads, fingerprints(program, folder), CONTEXT)


if __name__ == "__main__":
    main()
