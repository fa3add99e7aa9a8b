#!/usr/bin/env python3
"""Trains retrieval heads on a language model's own attention.

Usage: distill.py -m MODEL.gguf -d TOKENS.npz -o FOLDER --fingerprints MODEL,TOKENIZER
                  [--head KEY=VALUE,...]... [--steps N] [--seconds S] [--resume FILE]

Every step runs the model over one stretch of a document and takes the true attention mass of adjacent pairs of
queries; all heads named by --head learn from it side by side. Keys of --head: groups, q_heads, head_dim, pool
(max, mean), lr, steady (weight of what changes between adjacent selections), name. The loss goes from cross
entropy over the positions that Top-K may pick (sinks and window are always attended, so they are left out) to the
mass that a soft Top-K misses. Rotations are relative and the head has no biases, so an offset added to all
positions changes nothing: distances up to --context are learnt from documents of that length alone.

FOLDER gets NAME.safetensors for every head, log.txt, results.json and state.pt (for --resume). The fingerprints
are those that `specontext inspect --json` prints.
"""
import argparse
import json
import math
import os
import time

import numpy as np
import torch

from head import Head, choose, export, first_layers, losses
from llm import Llm
from weights import load

SINKS, WINDOW = 4, 64
EVAL_FROM, EVAL_PAIRS, BUDGETS = 4096, 48, (512, 1024)


class Documents:
    def __init__(self, path, length, prefix, device):
        f = np.load(path)
        self.tokens, self.starts, self.names = f["tokens"], f["starts"], [str(n) for n in f["names"]]
        self.prefix = f["prefix"] if prefix else f["prefix"][:0]
        self.length, self.device = length, device
        sizes = np.diff(self.starts)
        self.train = [i for i in range(len(sizes)) if not f["held"][i]]
        self.held = [i for i in range(len(sizes)) if f["held"][i]]
        self.chances = np.array([sizes[i] for i in self.train], dtype=float)
        self.chances /= self.chances.sum()

    def stretch(self, document, at, length, chat):
        """`length` tokens of a document from `at` on; short documents are followed by the next ones."""
        opening = self.prefix if chat else self.prefix[:0]
        begin = self.starts[document] + at
        ids = np.concatenate((opening, self.tokens[begin:begin + length - len(opening)]))
        return torch.from_numpy(ids.astype(np.int64)).to(self.device)

    def draw(self, rng):
        """Half of the stretches open as a chat does. A document shorter than a stretch is joined by others that are
        trained on."""
        parts, missing = [], self.length
        while missing > 0:
            d = rng.choice(self.train, p=self.chances)
            size = int(self.starts[d + 1] - self.starts[d])
            at = int(rng.integers(0, max(size - self.length, 0) + 1))
            parts.append(self.stretch(d, at, min(missing, size - at), not parts and rng.random() < 0.5))
            missing -= len(parts[-1])
        return torch.cat(parts)

    def evaluation(self, each):
        """(kind, ids): of each kind the first `each` held-out documents that are long enough."""
        found, counts = [], {}
        for d in self.held:
            kind = self.names[d].split("/")[0]
            size = int(self.starts[d + 1] - self.starts[d])
            least = EVAL_FROM + 1024 if kind == "extra" else 6000
            places = range(0, size - self.length, 40000) if kind == "novel" else [0]
            for at in places if size >= least else []:
                if counts.get(kind, 0) < each:
                    counts[kind] = counts.get(kind, 0) + 1
                    found.append((kind, self.stretch(d, at, min(self.length, size - at), False)))
        return found


def masks(queries, n):
    """future [m][n], candidates [m][n]: what Top-K may pick, as the retriever has it."""
    at = torch.arange(n, device=queries.device)
    return at > queries[:, None], (at >= SINKS) & (at < queries[:, None] - WINDOW)


def pairs(starts):
    return torch.stack((starts, starts + 1), 1).reshape(-1)


def merge(mass, layers, groups):
    """[runs][kv][m][n], summed over each run's layers -> mean over each group's layers."""
    first = first_layers(layers, groups)
    count = torch.tensor([first[g + 1] - first[g] for g in range(groups)], device=mass.device)
    return mass.unflatten(0, (groups, -1)).sum(1) / count.view(-1, 1, 1, 1)


def figures(z, p, candidates, k, share):
    """Mass attended and overlap of adjacent sets: means over layers, KV heads and queries."""
    chosen = choose(z, candidates, k)
    mass = (p * (chosen | ~candidates)).sum(-1).mean((1, 2))  # p is 0 behind the query
    pair = chosen.unflatten(2, (-1, 2))
    overlap = (pair[..., 0, :] & pair[..., 1, :]).sum(-1).float().mean((1, 2)) / k
    return float((mass * share).sum()), float((overlap * share).sum())


class Evaluation:
    """True masses of the held-out documents, kept on the device."""

    def __init__(self, llm, documents, runs, each):
        self.llm, self.runs, self.items = llm, runs, []
        generator = torch.Generator().manual_seed(1)
        for kind, ids in documents.evaluation(each):
            starts = torch.randint(min(EVAL_FROM, len(ids) * 3 // 4), len(ids) - 1, (EVAL_PAIRS,), generator=generator).to(ids.device)
            queries = pairs(starts)
            self.items.append((kind, ids, queries, llm.forward(ids, queries, runs)[1].to(torch.bfloat16)))

    @torch.no_grad()
    def measure(self, groups, scores):
        """scores(ids, queries, future, p) -> [groups][kv][m][n]. {kind: {budget: (mass, overlap)}}, with "all"."""
        first = first_layers(self.llm.layers, groups)
        share = torch.tensor([(first[g + 1] - first[g]) / self.llm.layers for g in range(groups)])
        got = {}
        for kind, ids, queries, mass in self.items:
            future, candidates = masks(queries, len(ids))
            p = merge(mass.float(), self.llm.layers, groups)
            z = scores(ids, queries, future, p)
            for b in BUDGETS:
                one = figures(z, p, candidates, b - SINKS - WINDOW - 1, share.to(p.device))
                for key in (kind, "all"):
                    got.setdefault(key, {}).setdefault(b, []).append(one)
        return {key: {b: tuple(np.mean(v, 0)) for b, v in by.items()} for key, by in got.items()}

    def head(self, head):
        return self.measure(head.groups, lambda ids, q, future, p: head(self.llm.embedding[ids], q, future))

    def oracle(self, groups):
        return self.measure(groups, lambda ids, q, future, p: p)

    def recency(self):
        newest = lambda ids, q, future, p: torch.arange(len(ids), device=q.device).float().expand(p.shape)
        return self.measure(1, newest)


def line(name, got):
    parts = [f"{b}: {got['all'][b][0]:.4f} overlap {got['all'][b][1]:.3f}" for b in BUDGETS]
    return f"{name:24s} {'  '.join(parts)}  at 512: " + " ".join(
        f"{kind} {by[BUDGETS[0]][0]:.3f}" for kind, by in got.items() if kind != "all")


def parse_head(text):
    o = {"groups": 1, "q_heads": 0, "head_dim": 0, "pool": "mean", "lr": 0.0, "steady": None, "name": text}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key not in o:
            raise SystemExit(f"--head: found {key}, expected {', '.join(o)}")
        o[key] = value if key in ("pool", "name") else float(value) if key in ("lr", "steady") else int(value)
    return o


class Student:
    """A head in training."""

    def __init__(self, o, llm, defaults):
        self.o = o
        self.name = o["name"].replace("=", "").replace(",", "-")
        self.steady = defaults.steady if o["steady"] is None else o["steady"]
        self.lr = o["lr"] or defaults.lr
        self.head = Head(llm, o["groups"], o["q_heads"], o["head_dim"], o["pool"]).to(llm.embedding.device)
        self.optimizer = torch.optim.Adam(self.head.parameters(), lr=self.lr, betas=(0.9, 0.98))
        self.recent = []

    def step(self, embedded, queries, p, k, progress, warm):
        future, candidates = masks(queries, len(embedded))
        cross, missed, changed = losses(self.head(embedded, queries, future), p, candidates, k)
        late = min(max((progress - 0.15) / 0.3, 0), 1)
        loss = (1 - 0.95 * late) * cross + late * (4 * missed + 4 * self.steady * changed)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(progress, 1))))
        self.optimizer.step()
        self.recent.append(torch.stack((cross, missed, changed)).detach())

    def setup(self):
        h = self.head
        return (f"{h.groups} groups, {h.q_heads} query heads of {h.head_dim}, pool {h.pool}, lr {self.lr:g}, "
                f"steady {self.steady:g}")

    def report(self):
        means = torch.stack(self.recent).mean(0).tolist()
        self.recent = []
        return f"{self.name}: cross {means[0]:.4f} missed {means[1]:.4f} changed {means[2]:.3f}"


def options():
    a = argparse.ArgumentParser(description="Trains retrieval heads on a language model's own attention.")
    a.add_argument("-m", "--model", required=True)
    a.add_argument("-d", "--data", required=True)
    a.add_argument("-o", "--output", required=True)
    a.add_argument("--fingerprints", required=True, help="of the model and its tokenizer, 32 hex digits each")
    a.add_argument("--head", action="append", default=[])
    a.add_argument("--steps", type=int, default=4000)
    a.add_argument("--seconds", type=float, default=1e9, help="end by then; the schedule follows")
    a.add_argument("--context", type=int, default=0, help="tokens of a stretch (default: the model's context)")
    a.add_argument("--pairs", type=int, default=128, help="adjacent pairs of queries a step")
    a.add_argument("--lr", type=float, default=1e-3)
    a.add_argument("--steady", type=float, default=0.05)
    a.add_argument("--eval-each", type=int, default=3, help="held-out stretches of a kind of text")
    a.add_argument("--eval-every", type=int, default=1000, help="steps")
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--no-chat", action="store_true", help="no stretch opens as a chat does")
    a.add_argument("--resume", help="a state.pt")
    a.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return a.parse_args()


def train(o, llm, documents, students, runs, evaluation, say):
    rng = np.random.default_rng(o.seed)
    step, begin = 0, time.monotonic()
    if o.resume:
        state = torch.load(o.resume, map_location=o.device)
        step = state["step"]
        rng.bit_generator.state = state["rng"]
        for s in students:
            s.head.load_state_dict(state["heads"][s.name])
            s.optimizer.load_state_dict(state["optimizers"][s.name])
    progress = step / o.steps
    while progress < 1:
        ids = documents.draw(rng)
        least = min(1024, len(ids) // 2)
        queries = pairs(torch.from_numpy(rng.integers(least, len(ids) - 1, o.pairs)).to(o.device))
        k = int(math.exp(rng.uniform(math.log(192), math.log(1400))))
        mass = llm.forward(ids, queries, runs)[1]
        embedded = llm.embedding[ids]
        by_groups = {g: merge(mass, llm.layers, g) for g in {s.head.groups for s in students}}
        for s in students:
            s.step(embedded, queries, by_groups[s.head.groups], k, progress, min(1, (step + 1) / 50))
        step += 1
        progress = max(step / o.steps, (time.monotonic() - begin) / o.seconds)
        if step % 100 == 0 and step % 500 < 100:
            say(f"step {step} ({time.monotonic() - begin:.0f} s): " + "; ".join(s.report() for s in students))
        if step % o.eval_every == 0 and progress < 1:
            for s in students:
                say(line(f"step {step} {s.name}", evaluation.head(s.head)))
    torch.save({"step": step, "rng": rng.bit_generator.state,
                "heads": {s.name: s.head.state_dict() for s in students},
                "optimizers": {s.name: s.optimizer.state_dict() for s in students}},
               os.path.join(o.output, "state.pt"))
    return step


def main():
    o = options()
    os.makedirs(o.output, exist_ok=True)
    log = open(os.path.join(o.output, "log.txt"), "a")

    def say(text):
        print(text, flush=True)
        print(text, file=log, flush=True)

    torch.manual_seed(o.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    meta, tensors = load(o.model)
    llm = Llm(meta, tensors, o.device, torch.bfloat16 if o.device.startswith("cuda") else torch.float32)
    context = o.context or llm.context
    documents = Documents(o.data, context, not o.no_chat, o.device)
    students = [Student(parse_head(h), llm, o) for h in o.head or ["groups=1"]]
    runs = max(s.head.groups for s in students)
    if any(runs % s.head.groups for s in students):
        raise SystemExit(f"--head: groups: found one that does not divide {runs}, the most")
    evaluation = Evaluation(llm, documents, runs, o.eval_each)
    results = {"recency": evaluation.recency()}
    for g in sorted({s.head.groups for s in students}):
        results[f"oracle groups={g}"] = evaluation.oracle(g)
    results["layer 0, untrained"] = evaluation.head(Head(llm).to(o.device))
    for name, got in results.items():
        say(line(name, got))
    step = train(o, llm, documents, students, runs, evaluation, say)
    for s in students:
        results[s.name] = evaluation.head(s.head)
        say(line(f"final {s.name}", results[s.name]))
        source = (f"distilled from the attention of {meta.get('general.name', 'the model')} by "
                  f"tools/distill/distill.py: {s.setup()}, seed {o.seed}, {step} steps of {context} tokens")
        export(s.head, os.path.join(o.output, s.name + ".safetensors"), llm.layers, len(llm.embedding),
               o.fingerprints.split(","), context, source[:250])
    with open(os.path.join(o.output, "results.json"), "w") as f:
        json.dump(results, f, indent=1)


if __name__ == "__main__":
    main()
