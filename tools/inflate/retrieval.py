"""A retrieval head of the small model for the large one: the same scores out of the large model's embedding."""
import numpy as np

import files
from source import halves
from transform import Pairs


def first_layers(plan, small_first):
    """Where each group begins in the large model; layers that follow a layer stay in its group."""
    bounds = [int(n) for n in small_first.split(",")]
    return [next((i for i, (l, _) in enumerate(plan) if l >= b), len(plan)) for b in bounds]


def inflate(inflation, source, path, fingerprints, context):
    s, t = inflation.s, inflation.t
    meta, w = files.read(source)
    number = lambda key: int(meta[key])
    if (meta["features"] not in ("none", "context") or meta["rope_pairs"] != "adjacent" or meta["rope_scaling"] != "none" or
            number("head_dim") != s.head_dim or number("rope_dims") != s.head_dim or number("q_heads") != s.q_heads):
        raise SystemExit(f"{source}: expected a head of the model's own {s.q_heads} x {s.head_dim}, all rotated, "
                         "without scaling or features of the model")
    first = first_layers(inflation.plan, meta["group_first_layer"])
    if len(set(first)) < len(first):
        raise SystemExit(f"{source}: found {len(first) - 1} groups, expected no more than {t.layers} layers can hold")
    out = {}
    for g in range(number("groups")):
        rng = inflation.random(-2, g)
        turns = [Pairs(rng, s.head_dim, t.head_dim) for _ in range(t.kv_heads)]
        norm = w.get(f"groups.{g}.norm.weight", w["norm.weight"])
        q, k = (halves(w[f"groups.{g}.{c}.weight"], s.head_dim) for c in "qk")
        q, k = inflation.queries_keys(rng, q, k, inflation.heads.q, turns)
        for name, rows in (("q", q), ("k", k)):  # [rows][views * hidden]; views are sums, which the rotation keeps
            views = inflation.reads(rows.reshape(-1, s.hidden), norm)
            out[f"groups.{g}.{name}.weight"] = views.reshape(len(rows), -1)
        if meta["features"] == "context":
            out[f"groups.{g}.taps.weight"] = w[f"groups.{g}.taps.weight"]
    out["norm.weight"] = np.ones(t.hidden, np.float32)
    meta |= {"model": fingerprints[0], "tokenizer": fingerprints[1], "vocab": t.vocab, "hidden": t.hidden,
             "q_heads": t.q_heads, "kv_heads": t.kv_heads, "head_dim": t.head_dim, "rope_dims": t.head_dim,
             "layers": t.layers, "group_first_layer": ",".join(map(str, first)), "rope_pairs": "halves",
             "source": ("inflated: " + meta.get("source", ""))[:250]}
    meta["trained_context"] = meta["rope_original_context"] = max(context, number("trained_context"))
    files.write(path, {n: x.shape for n, x in out.items()}, out.items(),
                lambda n: "F32" if n == "norm.weight" or "taps" in n else "F16", {k: str(v) for k, v in meta.items()})
