"""A retrieval head of the small model for the large one: the same scores out of the large model's embedding and, for a
head that reads them, out of the large model's hidden states."""
import numpy as np

import files
from source import halves
from transform import Pairs


def first_layers(plan, small_first):
    """Where each group begins in the large model; layers that follow a layer stay in its group."""
    bounds = [int(n) for n in small_first.split(",")]
    return [next((i for i, (l, _) in enumerate(plan) if l >= b), len(plan)) for b in bounds]


def views(inflation, w, norms):
    """w [n][views * h], each view in the small stream behind its norm -> [n][views * H]."""
    parts = np.split(w, len(norms), axis=1)
    return np.concatenate([inflation.reads(p, norm) for p, norm in zip(parts, norms)], 1)


def features(inflation, w, count):
    """What turns hidden states into the projections' second half. g = fc of them keeps its mean of squares, as they do."""
    s, t = inflation.s, inflation.t
    out = {"features.norm.weight": np.ones(t.hidden, np.float32)}
    norms = [None] * count
    if "features.input_norm.weight" in w:
        norms = np.split(w["features.input_norm.weight"], count)
        out["features.input_norm.weight"] = np.ones(count * t.hidden, np.float32)
    out["features.fc.weight"] = inflation.writes(views(inflation, w["features.fc.weight"], norms))
    return out


def inflate(inflation, source, path, fingerprints, context):
    s, t = inflation.s, inflation.t
    meta, w = files.read(source)
    number = lambda key: int(meta[key])
    if (meta["rope_pairs"] != "adjacent" or meta["rope_scaling"] != "none" or number("head_dim") != s.head_dim or
            number("rope_dims") != s.head_dim or number("kv_heads") != s.kv_heads or number("hidden") != s.hidden):
        raise SystemExit(f"{source}: expected a head of the model's own {s.kv_heads} key heads x {s.head_dim}, all "
                         f"rotated, without scaling")
    first = first_layers(inflation.plan, meta["group_first_layer"])
    if len(set(first)) < len(first):
        raise SystemExit(f"{source}: found {len(first) - 1} groups, expected no more than {t.layers} layers can hold")
    per = number("q_heads") // s.kv_heads  # as many as the model's are dealt out as they are, others stand once
    chosen = inflation.heads.q if number("q_heads") == s.q_heads else [list(range(per))] * t.kv_heads
    out, target = {}, meta["features"] == "target"
    if target:
        layers = first_layers(inflation.plan, meta["feature_layers"])
        if len(set(layers)) < len(layers):
            raise SystemExit(f"{source}: feature_layers: found {meta['feature_layers']}, expected layers that stand apart "
                             f"in {t.layers}")
        out = features(inflation, w, len(layers))
        meta |= {"feature_layers": ",".join(map(str, layers)), "feature_hidden": t.hidden}
    for g in range(number("groups")):
        rng = inflation.random(-2, g)
        turns = [Pairs(rng, s.head_dim, t.head_dim) for _ in range(t.kv_heads)]
        norm = w.get(f"groups.{g}.norm.weight", w["norm.weight"])
        q, k = (halves(w[f"groups.{g}.{c}.weight"], s.head_dim) for c in "qk")
        norms = [norm, w["features.norm.weight"]] if target else [norm] * (q.shape[1] // s.hidden)
        q, k = inflation.queries_keys(rng, q, k, chosen, turns)
        out[f"groups.{g}.q.weight"], out[f"groups.{g}.k.weight"] = views(inflation, q, norms), views(inflation, k, norms)
        if meta["features"] == "context":
            out[f"groups.{g}.taps.weight"] = w[f"groups.{g}.taps.weight"]
    out["norm.weight"] = np.ones(t.hidden, np.float32)
    meta |= {"model": fingerprints[0], "tokenizer": fingerprints[1], "vocab": t.vocab, "hidden": t.hidden,
             "q_heads": len(chosen[0]) * t.kv_heads, "kv_heads": t.kv_heads, "head_dim": t.head_dim,
             "rope_dims": t.head_dim, "layers": t.layers, "group_first_layer": ",".join(map(str, first)),
             "rope_pairs": "halves", "source": ("inflated: " + meta.get("source", ""))[:250]}
    meta["trained_context"] = meta["rope_original_context"] = max(context, number("trained_context"))
    files.write(path, {n: x.shape for n, x in out.items()}, out.items(),
                lambda n: "F32" if "norm" in n or "taps" in n else "F16", {k: str(v) for k, v in meta.items()})
