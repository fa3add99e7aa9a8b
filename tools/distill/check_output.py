#!/usr/bin/env python3
"""Checks output.py on a CPU: that the model computed again at some positions is the model, that sets do what a forward
masked by them does, and that gradients are those of finite differences. Prints figures; fails when one is off.

Usage: check_output.py MODEL.gguf HEAD.safetensors
"""
import sys

import torch
import torch.nn.functional as F

from head import Head, Inputs, States, Trained, choose
from llm import Llm, angles, rms_norm, rotate
from output import Answers, Output, hard_gates, soft_gates
from weights import load

N, K, WIDTH = 768, 96, 0.2
QUERIES = (300, 301, 520, 521, 766, 767)


def masked_model(llm, ids, first, attended):
    """Log probabilities after the last of `ids`, whose attention alone is masked: attended [groups][kv_heads][n]."""
    n, w, rep = len(ids), llm.w, llm.q_heads // llm.kv_heads
    cos, sin = angles(torch.arange(n), llm.head_dim, llm.base)
    x = w["token_embd.weight"][ids]
    for l in range(llm.layers):
        p = lambda name: w[f"blk.{l}.{name}.weight"]
        h = rms_norm(x, p("attn_norm"), llm.eps)
        q, k, v = (F.linear(h, p("attn_" + c)).view(n, -1, llm.head_dim).transpose(0, 1) for c in "qkv")
        mask = torch.ones(llm.kv_heads, n, n, dtype=torch.bool).tril()
        mask[:, -1] = attended[sum(f <= l for f in first) - 1]
        o = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin).repeat_interleave(rep, 0),
                                           v.repeat_interleave(rep, 0), mask.repeat_interleave(rep, 0))
        x = x + F.linear(o.transpose(0, 1).reshape(n, -1), p("attn_output"))
        h = rms_norm(x, p("ffn_norm"), llm.eps)
        x = x + F.linear(F.silu(F.linear(h, p("ffn_gate"))) * F.linear(h, p("ffn_up")), p("ffn_down"))
    return F.linear(rms_norm(x[-1], w["output_norm.weight"], llm.eps), w["token_embd.weight"]).log_softmax(-1)


def distance(a, b):
    """KL of log probabilities."""
    return float((a.exp() * (a - b)).sum(-1).mean())


def main():
    model, path = sys.argv[1:]
    torch.manual_seed(1)
    meta, tensors = load(model)
    llm, start, bad = Llm(meta, tensors, "cpu", torch.float32), Trained(path, "cpu"), []

    def say(what, found, most):
        print(f"{what}: {found:.3g}, at most {most:g}")
        if not abs(found) <= most:
            bad.append(what)

    # Half of a text of random tokens, then the same again: so there is something far away to attend to.
    ids, queries = torch.randint(len(llm.embedding), (N // 2,)).repeat(2), torch.tensor(QUERIES)
    kept = []
    last, _, states = llm.forward(ids, None, start.layers, kept)
    answers = Answers(Output(llm), ids, queries, kept)
    full = F.linear(last[queries], answers.output.table).log_softmax(-1)
    say("all positions attended: KL to the model's own forward", distance(full, answers.full), 1e-5)

    around = States(start.layers)
    around.add(states)
    head = Head(llm, start.first, start.q_heads, start=start, layers=start.layers, states=around)
    inputs = Inputs(llm.embedding[ids], llm.eps, states=states)
    at = torch.arange(N)
    future, candidates = at > queries[:, None], (at >= 4) & (at < queries[:, None] - 64)
    with torch.no_grad():
        chosen = choose(head(inputs, queries, future), candidates, K)
        found = answers.under(head.first, hard_gates(chosen, candidates, future))
    attended = (chosen | ~candidates) & ~future
    for i, q in enumerate(QUERIES):
        expected = masked_model(llm, ids[:q + 1], head.first, attended[:, :, i, :q + 1])
        say(f"Top-K at {q}: KL {distance(full[i], expected):.3g}, from a masked forward's",
            distance(expected, found[i]), 1e-5)

    # In double precision and with an exact threshold; central differences of the weights whose gradients are largest.
    head, answers = head.double(), Answers(Output(llm, torch.float64), ids, queries, kept)
    inputs.states = {l: x.double() for l, x in inputs.states.items()}
    inputs.delayed = inputs.delayed.double()

    def kl():
        gates = soft_gates(head(inputs, queries, future), candidates, future, K, WIDTH, 45)
        return answers.kl(head.first, gates).mean()

    kl().backward()
    for name in ("q", "k", "fc"):
        weights = getattr(head, name)
        flat, place = weights.data.view(-1), int(weights.grad.abs().argmax())
        slope, was, step = float(weights.grad.view(-1)[place]), float(flat[place]), 1e-4
        both = []
        for sign in (1, -1):
            flat[place] = was + sign * step
            with torch.no_grad():
                both.append(float(kl()))
        flat[place] = was
        say(f"gradient of {name}[{place}] {slope:.5g}: relative to finite differences, off by",
            (both[0] - both[1]) / (2 * step) / slope - 1, 1e-3)
    if bad:
        raise SystemExit("failed: " + "; ".join(bad))


if __name__ == "__main__":
    main()
