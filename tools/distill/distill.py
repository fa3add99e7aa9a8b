#!/usr/bin/env python3
"""Trains retrieval heads on a language model's own attention.

Usage: distill.py -m MODEL.gguf -d TOKENS.npz -o FOLDER --fingerprints MODEL,TOKENIZER
                  [--features none|target] [--feature-layers L,L,...] [--head KEY=VALUE,...]... [--start HEAD]
                  [--steps N] [--seconds S] [--resume FILE]

Every step runs the model over one stretch of a document and takes the true attention mass of adjacent pairs of queries;
all heads named by --head learn from it side by side. Keys of --head: groups; split (even, best: where layers look at
the same positions, measured on training documents, start: as the head it begins from, or the groups' first layers as
0-4-9); start (a head's file in place of --start); layers (2-16-29: what a token's key and query are made of besides its
embedding, the model's hidden states, of the token before, that enter these layers; 0: none; default --feature-layers if
--features is target); views, taps (embeddings of the tokens before instead: see head.py); q_heads, head_dim, pool (max,
mean), lr, steady (weight of what changes between adjacent selections), fresh (1: not from --start), settled (1: the
head it begins from is nearly trained, so the later losses count at once), cross, missed, output, local (weights of the
later losses: .05, 4, 0, 0), lag (share of steps in which a query takes the set of the token before it, as `--selection
previous` does: 0), name. The loss goes from cross entropy over the positions that Top-K may pick (sinks and
window are always attended, so they are left out) to the mass that a soft Top-K misses and, with `output`, the KL of the
model's next token, with `local` an estimate of it from each layer's attention (output.py): these tell positions near
the threshold apart, where the mass moves all of them. Rotations are relative and the head has no biases, so an offset
added to all positions changes nothing: distances up to --context are learnt from documents of that length alone.

Held-out documents fall into two: heads are chosen by their figures on "choose", "report" is what may be told. With
`output` or `local` these are mass, overlap, KL, share of likeliest tokens that stay, rise of log perplexity (else the
first two); with `lag` the same of sets of the token before is printed, too.
--seconds counts from the program's start and leaves room for the last evaluation; the schedule follows it.

FOLDER gets, at each evaluation, NAME.safetensors for every head, with its calibration, results.json and state.pt
(for --resume), and log.txt. The fingerprints are those that `specontext inspect --json` prints.
"""
import argparse
import json
import math
import os
import time

BEGIN = time.monotonic()

import numpy as np
import torch

from head import (Head, Inputs, States, Trained, attended_mass, choose, export, first_layers, fit_calibration,
                  losses)
from llm import Llm
from output import Answers, Output, hard_gates, soft_gates
from split import best_split, split_values
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
        """(kind, split, ids): of each kind the first `each` held-out stretches that are long enough, in turn to choose
        by and to report."""
        found, counts = [], {}
        for d in self.held:
            kind = self.names[d].split("/")[0]
            size = int(self.starts[d + 1] - self.starts[d])
            least = EVAL_FROM + 1024 if kind == "extra" else 6000
            places = range(0, size - self.length, 20000) if kind == "novel" else [0]
            for at in places if size >= least else []:
                number = counts.get(kind, 0)
                if number < each:
                    counts[kind] = number + 1
                    split = "report" if kind == "extra" or number % 2 else "choose"
                    found.append((kind, split, self.stretch(d, at, min(self.length, size - at), False)))
        return found


def masks(queries, n):
    """future [m][n], candidates [m][n]: what Top-K may pick, as the retriever has it."""
    at = torch.arange(n, device=queries.device)
    return at > queries[:, None], (at >= SINKS) & (at < queries[:, None] - WINDOW)


def pairs(starts):
    return torch.stack((starts, starts + 1), 1).reshape(-1)


def merge(mass, first):
    """[layers][kv][m][n] -> [groups][kv][m][n]: mean over each group's layers."""
    return torch.stack([mass[a:b].mean(0, dtype=torch.float32) for a, b in zip(first, first[1:])])


def shares(first):
    """Of the layers, by group."""
    return torch.tensor([(b - a) / first[-1] for a, b in zip(first, first[1:])])


def figures(chosen, p, candidates, k, share):
    """Mass attended and overlap of adjacent sets: means over layers, KV heads and queries."""
    mass = (p * (chosen | ~candidates)).sum(-1).mean((1, 2))  # p is 0 behind the query
    pair = chosen.unflatten(2, (-1, 2))
    overlap = (pair[..., 0, :] & pair[..., 1, :]).sum(-1).float().mean((1, 2)) / k
    return float((mass * share).sum()), float((overlap * share).sum())


def answers_of(llm, output, ids, queries, grad=False):
    kept = []
    llm.forward(ids, kept=kept)
    return Answers(output, ids, queries, kept, grad)


def senses_of(o, llm, documents, output, stretches=8):
    """Answers.senses of documents that are trained on."""
    rng, found = np.random.default_rng(o.seed + 2), 0
    for _ in range(stretches):
        ids = documents.draw(rng)
        queries = torch.from_numpy(rng.integers(len(ids) // 4, len(ids), 2 * o.pairs)).to(o.device)
        found = found + answers_of(llm, output, ids, queries, True).senses() / stretches
    return found


class Evaluation:
    """True masses of the held-out documents, and hidden states that enter the layers `taps`, kept on the device. With
    `output` (output.Output) what sets do to it is measured, too; keys and values are computed anew for that."""

    def __init__(self, llm, documents, taps, each, pairs_each, output=None):
        self.llm, self.items, self.output = llm, [], output
        generator = torch.Generator().manual_seed(1)
        for kind, split, ids in documents.evaluation(each):
            starts = torch.randint(min(EVAL_FROM, len(ids) * 3 // 4), len(ids) - 1, (pairs_each,), generator=generator)
            queries = pairs(starts.to(ids.device))
            _, mass, states = llm.forward(ids, queries, taps)
            self.items.append((kind, split, ids, queries, mass.to(torch.bfloat16), states))

    @torch.no_grad()
    def measure(self, first, scores, seen=None, lag=0):
        """scores(ids, queries, future, p, states) -> [groups][kv][m][n]. {kind or split: {budget: (mass, overlap)}},
        with an output (mass, overlap, KL, likeliest token kept, rise of log perplexity). seen(split, p, z, chosen,
        candidates, future) is called for each budget. lag 1: sets are those of the token before."""
        got = {}
        for kind, split, ids, queries, mass, states in self.items:
            future, _ = masks(queries, len(ids))
            unseen, candidates = masks(queries - lag, len(ids))
            p = merge(mass, first)
            z = scores(ids, queries - lag, unseen, p, states)
            answers = answers_of(self.llm, self.output, ids, queries) if self.output else None
            for b in BUDGETS:
                k = b - SINKS - WINDOW - 1
                chosen = choose(z, candidates, k)
                one = figures(chosen, p, candidates, k, shares(first).to(p.device))
                if answers:
                    one += answers.figures(first, hard_gates(chosen, candidates, future))
                for key in (split, kind) if split == "report" else (split,):
                    got.setdefault(key, {}).setdefault(b, []).append(one)
                if seen:
                    seen(split, p, z, chosen, candidates, future)
        return {key: {b: tuple(np.mean(v, 0)) for b, v in by.items()} for key, by in got.items()}

    def head(self, head, seen=None, lag=0):
        def scores(ids, queries, future, p, states):
            own = {l: states[l] for l in head.layers}
            return head(Inputs(self.llm.embedding[ids], head.eps, head.taps, own), queries, future)

        return self.measure(head.first, scores, seen, lag)

    def calibrated(self, head):
        """The head's figures and the text of its calibration, fitted on the documents to choose by."""
        own, true = [], []

        def seen(split, p, z, chosen, candidates, future):
            if split == "choose":
                own.append(attended_mass(z, chosen, candidates, future).flatten())
                true.append((p * (chosen | ~candidates)).sum(-1).flatten())

        got = self.head(head, seen)
        return got, fit_calibration(torch.cat(own).cpu(), torch.cat(true).cpu())

    def oracle(self, first):
        return self.measure(first, lambda ids, q, future, p, states: p)

    def recency(self):
        newest = lambda ids, q, future, p, states: torch.arange(len(ids), device=q.device).float().expand(p.shape)
        return self.measure([0, self.llm.layers], newest)


def line(name, got, oracle=None, recency=None):
    """One line of figures; with the oracle of the same groups and the newest positions also what was reached of the
    one, and of the way from the other to it."""
    def of(split, b):
        text = f"{b}: {got[split][b][0]:.4f}"
        if oracle:
            most, least = oracle[split][b][0], recency[split][b][0]
            text += f" ({got[split][b][0] / most:.2%}, gain {(got[split][b][0] - least) / (most - least):.3f})"
        return f"{text} overlap {got[split][b][1]:.3f}"

    parts = [f"{split} " + "  ".join(of(split, b) for b in BUDGETS) for split in ("choose", "report") if split in got]
    return f"{name:24s} {'  '.join(parts)}  at 512: " + " ".join(
        f"{kind} {by[BUDGETS[0]][0]:.3f}" for kind, by in got.items() if kind not in ("choose", "report"))


def output_line(name, got):
    """Of what the sets do to the output; empty without such figures."""
    if len(got["choose"][BUDGETS[0]]) == 2:
        return ""
    of = lambda f: f"KL {f[2]:.5f} top-1 {f[3]:.4f} log perplexity {f[4]:+.4f}"
    return f"\n{name:24s} " + "  ".join(f"{split} {b}: {of(got[split][b])}" for split in ("choose", "report")
                                       if split in got for b in BUDGETS)


def layer_list(text, separator, layers):
    """The layers that hidden states are taken of, ascending; "0": none."""
    found = tuple(int(n) for n in text.split(separator))
    if found == (0,):
        return ()
    if list(found) != sorted(set(found)) or not 0 <= found[0] <= found[-1] <= layers or len(found) > 8:
        raise SystemExit(f"layers of features: found {text}, expected up to 8 ascending numbers up to {layers}")
    return found


def parse_head(text):
    o = {"groups": 1, "split": "even", "layers": "", "q_heads": 0, "head_dim": 0, "views": 1, "taps": 1, "fresh": 0,
         "settled": 0, "start": "", "pool": "mean", "lr": 0.0, "steady": None, "cross": 0.05, "missed": 4.0,
         "output": 0.0, "local": 0.0, "lag": 0.0, "name": text}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key not in o:
            raise SystemExit(f"--head: found {key}, expected {', '.join(o)}")
        texts = ("pool", "name", "split", "layers", "start")
        reals = ("lr", "steady", "cross", "missed", "output", "local", "lag")
        o[key] = value if key in texts else float(value) if key in reals else int(value)
    return o


def tempered(x):
    """The few queries at which much is lost would drown the others: so gradients agree twice as much from stretch to
    stretch, and on the same as without, about."""
    return 0.02 * torch.log1p(x / 0.02)


class Student:
    """A head in training."""

    def __init__(self, o, llm, defaults, start, first, states):
        self.name = o["name"].replace("=", "").replace(",", "-")
        self.steady = defaults.steady if o["steady"] is None else o["steady"]
        self.lr = o["lr"] or defaults.lr
        self.head = Head(llm, first, o["q_heads"], o["head_dim"], o["pool"], o["views"], o["taps"],
                         None if o["fresh"] else start, o["layers"], states).to(llm.embedding.device)
        # What all groups share moves a third as fast as what they make of it.
        shared = [p for n, p in self.head.named_parameters() if n == "fc"]
        own = [p for n, p in self.head.named_parameters() if n != "fc"]
        self.optimizer = torch.optim.Adam([{"params": own, "part": 1}] + [{"params": shared, "part": 1 / 3}] * (
            len(shared) > 0), lr=self.lr, betas=(0.9, 0.98))
        self.recent, self.settled = [], o["settled"]
        self.cross, self.missed, self.output, self.local = (o[n] for n in ("cross", "missed", "output", "local"))
        self.lag = o["lag"]

    def step(self, inputs, queries, p, k, progress, warm, answers, senses):
        future, _ = masks(queries, inputs.count)
        asked = queries - 1 if float(torch.rand(())) < self.lag else queries
        unseen, candidates = masks(asked, inputs.count)
        late = 1 if self.settled else min(max((progress - 0.1) / 0.3, 0), 1)
        width = 0.5 - 0.25 * progress  # of the soft Top-K's edge
        share = shares(self.head.first).to(p.device)
        z = self.head(inputs, asked, unseen)
        cross, missed, changed = losses(z, p, candidates, k, share, width, self.steady > 0)
        loss = (1 - late + late * self.cross) * cross + late * (self.missed * missed + 4 * self.steady * changed)
        kl = local = torch.zeros_like(missed)
        if late > 0 and (self.output > 0 or self.local > 0):
            # Narrower, and ever more so: a set is hard when it is used, and what a soft one leaks or dims would be
            # learnt in its place. The mass has the wide gates that move what is far from the threshold.
            gates = soft_gates(z, candidates, future, k, 0.3 - 0.2 * min(progress, 1))
            if self.output > 0:
                kl = answers.kl(self.head.first, gates)
            if self.local > 0:
                local = answers.local(self.head.first, gates, senses)
            loss = loss + late * (self.output * tempered(kl).mean() + self.local * tempered(local).mean())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        rate = self.lr * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(progress, 1))))
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["part"]
        self.optimizer.step()
        self.recent.append(torch.stack((cross, missed, changed, kl.mean(), local.mean())).detach())

    def setup(self):
        h = self.head
        seen = "".join(f"+{l}" for l in h.layers)[1:]
        made_of = f"states entering {seen}" if seen else f"{h.views} views of {h.taps} tokens"
        return (f"{h.groups} groups, {made_of}, {h.q_heads} query heads of {h.head_dim}, pool {h.pool}, "
                f"lr {self.lr:g}, steady {self.steady:g}" + "".join(
                    f", {n} {getattr(self, n):g}" for n in ("cross", "missed", "output", "local", "lag")))

    def report(self):
        means = torch.stack(self.recent).mean(0).tolist()
        self.recent = []
        kl = f" KL {means[3]:.5f}" * (self.output > 0) + f" local {means[4]:.5f}" * (self.local > 0)
        return f"{self.name}: cross {means[0]:.4f} missed {means[1]:.4f} changed {means[2]:.3f}{kl}"


def options():
    a = argparse.ArgumentParser(description="Trains retrieval heads on a language model's own attention.")
    a.add_argument("-m", "--model", required=True)
    a.add_argument("-d", "--data", required=True)
    a.add_argument("-o", "--output", required=True)
    a.add_argument("--fingerprints", required=True, help="of the model and its tokenizer, 32 hex digits each")
    a.add_argument("--head", action="append", default=[])
    a.add_argument("--features", choices=("none", "target"), default="none")
    a.add_argument("--feature-layers", default="", help="of the hidden states, by commas (default: three)")
    a.add_argument("--steps", type=int, default=4000)
    a.add_argument("--seconds", type=float, default=1e9, help="end by then, the last evaluation included")
    a.add_argument("--start", help="a trained head without views, from which the others begin")
    a.add_argument("--context", type=int, default=0, help="tokens of a stretch (default: the model's context)")
    a.add_argument("--pairs", type=int, default=128, help="adjacent pairs of queries a step")
    a.add_argument("--lr", type=float, default=1e-3)
    a.add_argument("--steady", type=float, default=0.05)
    a.add_argument("--eval-each", type=int, default=4, help="held-out stretches of a kind of text")
    a.add_argument("--eval-pairs", type=int, default=EVAL_PAIRS, help="adjacent pairs of queries in each")
    a.add_argument("--eval-every", type=int, default=1000, help="steps")
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--no-chat", action="store_true", help="no stretch opens as a chat does")
    a.add_argument("--resume", help="a state.pt")
    a.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return a.parse_args()


def save(s, evaluation, o, llm, name, context, step):
    """Measures a head and writes its file. Returns the figures."""
    got, calibration = evaluation.calibrated(s.head)
    source = (f"distilled from the attention of {name} by tools/distill/distill.py: {s.setup()}, seed {o.seed}, "
              f"{step} steps of {context} tokens")
    export(s.head, os.path.join(o.output, s.name + ".safetensors"), llm.layers, len(llm.embedding),
           o.fingerprints.split(","), context, source[:250], calibration)
    return got


def resume(o, students, rng):
    state = torch.load(o.resume, map_location=o.device)
    rng.bit_generator.state = state["rng"]
    for s in students:
        s.head.load_state_dict(state["heads"][s.name])
        s.optimizer.load_state_dict(state["optimizers"][s.name])
    return state["step"]


def keep_state(o, students, rng, step):
    torch.save({"step": step, "rng": rng.bit_generator.state,
                "heads": {s.name: s.head.state_dict() for s in students},
                "optimizers": {s.name: s.optimizer.state_dict() for s in students}},
               os.path.join(o.output, "state.pt"))


def draw_k(rng, output):
    """Positions that Top-K picks: 256 to 1200, with an output mostly 400 to 900, as few steps are left to learn in."""
    return int(math.exp(rng.uniform(math.log(256), math.log(1200), 2 if output else 1).mean()))


def train(o, llm, documents, students, seconds, output, measure, say):
    """measure(step): of all students. `seconds`: since the program's start."""
    senses = senses_of(o, llm, documents, output) if any(s.local > 0 for s in students) else None
    rng = np.random.default_rng(o.seed)
    begin = time.monotonic() - BEGIN
    step = resume(o, students, rng) if o.resume else 0
    progress = step / o.steps
    taps, layers = max(s.head.taps for s in students), {l for s in students for l in s.head.layers}
    while progress < 1:
        ids = documents.draw(rng)
        least = min(2048, len(ids) // 2)
        queries = pairs(torch.from_numpy(rng.integers(least, len(ids) - 1, o.pairs)).to(o.device))
        k, kept = draw_k(rng, output), []
        _, mass, states = llm.forward(ids, queries, layers, kept)
        answers = Answers(output, ids, queries, kept) if output else None
        inputs = Inputs(llm.embedding[ids], llm.eps, taps, states)
        merged = {first: merge(mass, first) for first in {tuple(s.head.first) for s in students}}
        del mass
        for s in students:
            s.step(inputs, queries, merged[tuple(s.head.first)], k, progress, min(1, (step + 1) / 100), answers,
                   senses)
        step += 1
        now = time.monotonic() - BEGIN
        progress = max(step / o.steps, (now - begin) / max(seconds - begin, 1e-9))
        if step % 100 == 0 or step in (1, 10):
            say(f"step {step} ({now:.0f} s): " + "; ".join(s.report() for s in students))
        if step % o.eval_every == 0 and progress < 0.9:
            measure(step)
            keep_state(o, students, rng, step)
    keep_state(o, students, rng, step)
    return step


class Surroundings:
    """What heads begin with: sizes of the hidden states, and where layers part best, from documents trained on."""

    def __init__(self, o, llm, documents, layers, split):
        rng = np.random.default_rng(o.seed + 1)
        self.states, self.value = States(layers), None
        for i in range(4):
            ids = documents.draw(rng)
            queries = torch.randint(min(EVAL_FROM, len(ids) // 2), len(ids), (48,), device=ids.device)
            _, mass, states = llm.forward(ids, queries if split else None, layers)
            if layers:
                self.states.add(states)
            if split:
                value = split_values(mass, masks(queries, len(ids))[1], [b - SINKS - WINDOW - 1 for b in BUDGETS])
                self.value = value if self.value is None else self.value + value

    def first(self, text, groups, layers, start):
        """First layers of a head's groups."""
        if text == "start" and start:
            return start.first
        if text == "best":
            return best_split(self.value, groups)
        if text == "even":
            return first_layers(layers, groups)
        first = [int(n) for n in text.split("-")] + [layers]
        if len(first) != groups + 1 or first[0] != 0 or first != sorted(set(first)):
            raise SystemExit(f"split: found {text}, expected {groups} ascending numbers from 0 up to {layers - 1}")
        return first


def make_students(o, llm, documents, start):
    wanted = [parse_head(h) for h in o.head or ["groups=1"]]
    three = f"2-{llm.layers // 2}-{llm.layers - 1}"
    for w in wanted:
        default = (o.feature_layers or three).replace(",", "-") if o.features == "target" else "0"
        w["layers"] = layer_list(w["layers"] or default, "-", llm.layers)
    starts = [Trained(w["start"], o.device) if w["start"] else start for w in wanted]
    seen = {l for w in wanted for l in w["layers"]} | set(start.layers if start else ())
    around = Surroundings(o, llm, documents, seen, any(w["split"] == "best" for w in wanted))
    return [Student(w, llm, o, s, around.first(w["split"], w["groups"], llm.layers, s), around.states)
            for w, s in zip(wanted, starts)], around.states


def parted(first):
    return "-".join(str(f) for f in first[:-1])


def baselines(evaluation, students, start, states, llm, o, say):
    """Figures to compare with; returns them and how long the measurement of the students took."""
    results = {"recency": evaluation.recency()}
    for first in sorted({tuple(s.head.first) for s in students}, key=lambda f: (len(f), f)):
        results[f"oracle {parted(first)}"] = evaluation.oracle(first)
    results["layer 0, untrained"] = evaluation.head(Head(llm).to(o.device))
    if start:
        begun = Head(llm, start.first, start.q_heads, start=start, layers=start.layers, states=states)
        results["start"] = evaluation.head(begun.to(o.device))
    begin = time.monotonic()
    for s in students:
        results[f"begin {s.name}"] = evaluation.head(s.head)
        if s.lag > 0:
            results[f"begin {s.name} previous"] = evaluation.head(s.head, lag=1)
    took = time.monotonic() - begin
    for name, got in results.items():
        say(line(name, got) + output_line(name, got))
    return results, took


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
    start = Trained(o.start, o.device) if o.start else None
    students, states = make_students(o, llm, documents, start)
    output = Output(llm) if any(s.output > 0 or s.local > 0 for s in students) else None
    evaluation = Evaluation(llm, documents, states.layers, o.eval_each, o.eval_pairs, output)
    results, took = baselines(evaluation, students, start, states, llm, o, say)
    reserve = min(2 + 1.5 * took, 0.3 * o.seconds)
    say(f"{time.monotonic() - BEGIN:.0f} s: training begins; {reserve:.0f} s are kept for the last evaluation")
    for s in students:
        say(f"{s.name}: {s.setup()}, first layers {parted(s.head.first)}")

    def measure(step, kind="step"):
        for s in students:
            results[s.name] = save(s, evaluation, o, llm, meta.get("general.name", "the model"), context, step)
            say(line(f"{kind} {step} {s.name}", results[s.name], results[f"oracle {parted(s.head.first)}"],
                     results["recency"]) + output_line(s.name, results[s.name]))
            if s.lag > 0:
                name = s.name + " previous"
                results[name] = evaluation.head(s.head, lag=1)
                say(line(name, results[name]) + output_line(name, results[name]))
        with open(os.path.join(o.output, "results.json"), "w") as f:
            json.dump(results, f, indent=1)

    step = train(o, llm, documents, students, o.seconds - reserve, output, measure, say)
    measure(step, "final")
    by_mass = lambda s: sum(results[s.name]["choose"][b][0] for b in BUDGETS)
    best = max(students, key=(lambda s: -results[s.name]["choose"][1024][2]) if output else by_mass)
    say(f"best by the documents to choose by: {best.name}; {time.monotonic() - BEGIN:.0f} s in all")


if __name__ == "__main__":
    main()
