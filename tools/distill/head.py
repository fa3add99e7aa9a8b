"""The retrieval head in PyTorch: the same arithmetic as the daemon's, the losses, and the file."""
import json
import math
import struct

import numpy as np
import torch

from llm import angles, rotate

FAR = -1e4  # in place of minus infinity where a gradient passes


def first_layers(layers, groups):
    """Group g serves layers [first[g], first[g + 1]): those l with l * groups // layers == g."""
    return [-(-layers * g // groups) for g in range(groups + 1)]


def first_taps(views, taps):
    """[views][taps]: the token itself, the one before it, then averages whose spans double from 4 on, the token itself
    left out."""
    t = torch.zeros(views, taps)
    age = torch.arange(1, taps).float()
    for v in range(views):
        if v < 2:
            t[v, min(v, taps - 1)] = 1
        else:
            fade = torch.exp(-age / 2 ** v)
            t[v, 1:] = fade / fade.norm()
    return t


class States:
    """What hidden states are like: sums over tokens of their products. The first tokens of a text, whose states are of
    another size, are left out."""

    def __init__(self, layers):
        self.layers, self.moment, self.count = sorted(layers), 0, 0

    def add(self, states):
        x = torch.cat([states[l] for l in self.layers], 1)
        x = x[len(x) // 8:].float()
        self.moment, self.count = self.moment + x.T @ x, self.count + len(x)

    def first(self, layers, rows):
        """For the states of `layers`: scale [width], which brings each dimension to a mean square of 1, none raised a
        hundredfold over the others; and fc [rows][width], of the states so scaled: their principal components, brought
        to one size too."""
        hidden = len(self.moment) // len(self.layers)
        at = torch.cat([torch.arange(hidden) + hidden * self.layers.index(l) for l in layers]).to(self.moment.device)
        moment = self.moment[at][:, at] / self.count
        rms = moment.diagonal().sqrt()
        scale = 1 / torch.maximum(rms, 0.01 * rms.mean())
        size, components = torch.linalg.eigh((moment * scale * scale[:, None]).double())
        size = size[-rows:].clamp_min(1e-3)
        return scale, (components[:, -rows:] / size.sqrt()).T.float().contiguous()


class Inputs:
    """The tokens as heads see them: embeddings with a mean square of 1, the same of the tokens before, which heads
    mix, and the model's hidden states of the token before (none before the first) by layer. Nothing to learn: all
    heads share it."""

    def __init__(self, embedded, eps, taps=1, states=None):
        self.count = len(embedded)
        self.states = {l: torch.cat((x.new_zeros(1, x.shape[1]), x[:-1])).float() for l, x in (states or {}).items()}
        x = embedded * torch.rsqrt(embedded.square().mean(-1, keepdim=True) + eps)
        padded = torch.cat((x.new_zeros(taps - 1, x.shape[1]), x))
        delayed = [padded[taps - 1 - i:taps - 1 - i + self.count] for i in range(taps)]
        self.delayed = torch.stack(delayed, 1)  # [n][taps][hidden]

    def views(self, mix):
        """mix [groups][views][taps] -> [groups][n][views * hidden]. A product for each token: so the gradient of mix
        is a sum of small products, not one of millions of terms."""
        groups, views, taps = mix.shape
        mix = mix.reshape(1, groups * views, taps).expand(self.count, -1, -1)
        return torch.bmm(mix, self.delayed[:, :taps]).view(self.count, groups, -1).transpose(0, 1)


class Head(torch.nn.Module):
    """norm [groups][hidden], mix [groups][views][taps], q [groups][q_heads * head_dim][parts][hidden], k
    [groups][kv_heads * head_dim][parts][hidden]; parts: the views, or, with `layers`, the embedding and the model's
    features: fc [hidden][layers * hidden] of the hidden states that enter `layers`, normed, times feature_norm
    [hidden]. Group g serves layers [first[g], first[g + 1]). Begins as the projections of the model's first layer,
    whose input is the embedding, too, or as `start`, a trained head; query heads beyond those begin as disturbed
    copies, dimensions beyond them as noise that is not rotated, parts beyond the token itself at zero."""

    def __init__(self, llm, first=None, q_heads=0, head_dim=0, pool="mean", views=1, taps=1, start=None, layers=(),
                 states=None):
        super().__init__()
        self.first = first or [0, llm.layers]
        self.groups, self.pool, self.kv_heads, self.eps = len(self.first) - 1, pool, llm.kv_heads, llm.eps
        self.q_heads, self.head_dim = q_heads or llm.q_heads, head_dim or llm.head_dim
        self.rope_dims, self.base, self.hidden = llm.head_dim, llm.base, llm.hidden
        self.views, self.taps, self.layers = views, taps, tuple(layers)
        self.parts = 2 if layers else views
        made = [self.first_weights(llm, start, (a + b - 1) // 2) for a, b in zip(self.first, self.first[1:])]
        parameter = lambda i: torch.nn.Parameter(torch.stack([m[i] for m in made]).contiguous())
        self.norm, self.q, self.k = parameter(0), parameter(1), parameter(2)
        if layers:
            self.first_features(start, states)
        else:
            self.mix = torch.nn.Parameter(first_taps(views, taps).repeat(self.groups, 1, 1))

    def first_features(self, start, states):
        """fc is kept for states whose dimensions are of one size, so that one rate of learning suits all."""
        scale, fc = states.first(self.layers, self.hidden)
        norm = torch.ones(self.hidden, device=fc.device)
        if start and start.layers == self.layers:
            fc, norm = start.fc / scale * float(fc.std() / (start.fc / scale).std()), start.feature_norm
        self.register_buffer("scale", scale)
        self.fc, self.feature_norm = torch.nn.Parameter(fc.contiguous()), torch.nn.Parameter(norm.clone())

    def first_weights(self, llm, start, layer):
        """norm, q, k of a group around `layer`."""
        if start:
            g = sum(f <= layer for f in start.first[:-1]) - 1
            norm, q, k = start.norm[g], start.q[g], start.k[g]
        else:
            norm, q, k = (llm.w[f"blk.0.attn_{c}.weight"].float() for c in ("norm", "q", "k"))
        found = q.shape[1] // self.hidden
        if found > 1 and (found != self.parts or start.layers != self.layers):
            raise SystemExit(f"the head to start from: found features of layers {start.layers}, expected none or those "
                             f"of {self.layers}")
        width = found * self.hidden
        q = q.reshape(self.kv_heads, -1, self.rope_dims, width)
        k = k.reshape(self.kv_heads, 1, self.rope_dims, width)
        each = self.q_heads // self.kv_heads
        copies = -(-each // q.shape[1])
        more = q.repeat(1, copies, 1, 1)[:, :each]
        noise = torch.randn_like(more) * q.std() * 0.5
        noise[:, :q.shape[1]] = 0
        q = self.widen(more + noise) * math.sqrt(self.head_dim / self.rope_dims)
        q, k = (t.reshape(-1, found, self.hidden) for t in (q, self.widen(k)))
        blank = lambda t: t.new_zeros(len(t), self.parts - found, self.hidden)
        return norm.clone(), torch.cat((q, blank(q)), 1), torch.cat((k, blank(k)), 1)

    def widen(self, t):
        extra = self.head_dim - self.rope_dims
        shape = (*t.shape[:2], extra, t.shape[3])
        return torch.cat((t, torch.randn(shape, device=t.device) * t.std() * 0.3), 2) if extra else t

    def forward(self, inputs, queries, future):
        """Log weights [groups][kv_heads][m][n] of positions for queries [m]; FAR where future [m][n]."""
        n, m = inputs.count, len(queries)
        cos, sin = angles(torch.arange(n, device=queries.device), self.rope_dims, self.base)
        x, norm = self.inputs(inputs), self.norm[:, None, None, :]
        if self.layers:
            norm = torch.cat((norm, self.feature_norm.expand_as(norm)), 2)
        flat = lambda w: (w * norm).flatten(2).transpose(1, 2)
        k = x @ flat(self.k)
        q = x[..., queries, :] @ flat(self.q)
        k = k.view(self.groups, n, self.kv_heads, self.head_dim).transpose(1, 2)
        q = q.view(self.groups, m, self.q_heads, self.head_dim).transpose(1, 2) * self.head_dim ** -0.5
        k, q = rotate(k, cos, sin), rotate(q, cos[queries], sin[queries])
        each = self.q_heads // self.kv_heads
        s = q.reshape(self.groups, self.kv_heads, each * m, self.head_dim) @ k.transpose(2, 3)
        s = s.view(self.groups, self.kv_heads, each, m, n).masked_fill(future, FAR).log_softmax(-1)
        return s.amax(2) if self.pool == "max" else torch.logsumexp(s, 2) - math.log(each)

    def inputs(self, inputs):
        """[n][parts * hidden], or [groups][n][parts * hidden] where the groups mix views of their own."""
        if not self.layers:
            return inputs.views(self.mix)
        g = torch.cat([inputs.states[l] for l in self.layers], 1) @ (self.fc * self.scale).T
        g = g * torch.rsqrt(g.square().mean(-1, keepdim=True) + self.eps)
        return torch.cat((inputs.delayed[:, 0], g), 1)


class Trained:
    """A head's file without views, to start from: norm, q, k by group, first layers of the groups, with features fc,
    feature_norm and their layers."""

    def __init__(self, path, device):
        with open(path, "rb") as f:
            header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
            data = f.read()
        meta = header["__metadata__"]
        if meta["features"] not in ("none", "target") or meta["rope_pairs"] != "adjacent":
            raise SystemExit(f"{path}: found features {meta['features']}, rope_pairs {meta['rope_pairs']}, expected "
                             "none or target, adjacent")
        types = {"F32": np.float32, "F16": np.float16}

        def tensor(name):
            t = header[name]
            x = np.frombuffer(data[slice(*t["data_offsets"])], types[t["dtype"]]).astype(np.float32)
            return torch.from_numpy(x).view(t["shape"]).to(device)

        self.first, self.q_heads = [int(n) for n in meta["group_first_layer"].split(",")], int(meta["q_heads"])
        groups = range(len(self.first) - 1)
        own = lambda g: f"groups.{g}.norm.weight"
        self.norm = [tensor(own(g) if own(g) in header else "norm.weight") for g in groups]
        self.q, self.k = ([tensor(f"groups.{g}.{c}.weight") for g in groups] for c in "qk")
        self.layers = ()
        if meta["features"] == "target":
            self.layers = tuple(int(l) for l in meta["feature_layers"].split(","))
            self.fc, self.feature_norm = tensor("features.fc.weight"), tensor("features.norm.weight")


def soft_margin(z, k, width, halvings=14):
    """How far the values along the last axis lie above the threshold of a soft Top-K of k, in `width`s: the sigmoid of
    it sums to k. The threshold is found by bisection and moves with z."""
    with torch.no_grad():
        high = z.amax(-1, keepdim=True) + 1
        low = high - 60
        # 16 bits are enough to count with, and half to read on a GPU, where this takes most of a step.
        coarse = z.clamp_min(-200).half() if z.is_cuda else z
        for _ in range(halvings):
            mid = (low + high) / 2
            sure = torch.sigmoid((coarse - mid.to(coarse.dtype)) / width).sum(-1, keepdim=True, dtype=z.dtype)
            low, high = torch.where(sure > k, mid, low), torch.where(sure > k, high, mid)
        threshold = ((low + high) / 2).to(z.dtype)
        slope = torch.sigmoid((z - threshold) / width)
        slope = slope * (1 - slope)
        slope = slope / slope.sum(-1, keepdim=True).clamp_min(1e-9)
    moving = (z * slope).sum(-1, keepdim=True)
    return (z - threshold - (moving - moving.detach())) / width


def soft_choice(z, k, width):
    """Memberships in [0, 1] of the k largest along the last axis, summing to k: a logistic step of `width`."""
    return torch.sigmoid(soft_margin(z, k, width))


def losses(logw, p, candidates, k, share, width=0.5, steady=True):
    """logw as of Head.forward, p the true mass of the same shape, candidates [m][n] the positions that Top-K may
    pick, share [groups] of the layers; queries lie in adjacent pairs. Returns the cross entropy over the candidates
    (weighted by their mass), the mass that a soft Top-K of k misses, and (with `steady`, else 0) the share of it that
    changes from a query to the next."""
    z = logw.masked_fill(~candidates, FAR)
    p = p * candidates
    cross = -((p * z.log_softmax(-1)).sum(-1).mean((1, 2)) * share).sum()
    rows = candidates.sum(-1) > k
    chosen = soft_choice(z, k, width)
    mean = lambda x, rows: ((x * rows).sum((1, 2)) * share).sum() / (rows.sum() * p.shape[1]).clamp_min(1)
    missed = mean((p * (1 - chosen)).sum(-1), rows)
    if not steady:
        return cross, missed, torch.zeros_like(missed)
    pair = chosen.unflatten(2, (-1, 2))
    kept = torch.minimum(pair[..., 0, :], pair[..., 1, :]).sum(-1) / k
    return cross, missed, mean(1 - kept, rows.view(-1, 2).all(-1))


def choose(z, candidates, k):
    """Hard Top-K: bool of z's shape; all of them where there are no more than k."""
    k = min(k, z.shape[-1])
    at = z.masked_fill(~candidates, float("-inf")).topk(k, -1).indices
    return torch.zeros_like(z, dtype=torch.bool).scatter_(-1, at, True)


def attended_mass(logw, chosen, candidates, future):
    """The head's own mass on what is attended, as the daemon reports it."""
    w = logw.exp().masked_fill(future, 0)
    return (w * (chosen | ~candidates)).sum(-1) / w.sum(-1).clamp_min(1e-30)


def fit_calibration(own, true, points=16):
    """Text of "own:measured" pairs, never falling: means over equal shares of the rows, pooled where they fall."""
    order = torch.argsort(own)
    bins = [(float(o.mean()), float(t.mean()), len(o)) for o, t in
            zip(own[order].chunk(points), true[order].chunk(points))]
    pooled = []
    for x, y, n in bins:
        pooled.append((x, y, n))
        while len(pooled) > 1 and pooled[-2][1] > pooled[-1][1]:
            (x0, y0, n0), (x1, y1, n1) = pooled[-2:]
            pooled[-2:] = [((x0 * n0 + x1 * n1) / (n0 + n1), (y0 * n0 + y1 * n1) / (n0 + n1), n0 + n1)]
    pairs = [(0.0, 0.0)]
    for x, y, _ in pooled:
        if round(x, 4) > pairs[-1][0] and x < 0.9999:
            pairs.append((round(x, 4), min(max(round(y, 4), pairs[-1][1]), 1.0)))
    return ",".join(f"{x:g}:{y:g}" for x, y in [*pairs, (1.0, 1.0)])


def export(head, path, llm_layers, vocab, fingerprints, context, source, calibration=""):
    """The safetensors file that the daemon loads: projections in float16, norms and taps in float32."""
    first = ",".join(str(n) for n in head.first)
    mixed = head.views > 1 or head.taps > 1
    features = "target" if head.layers else "context" if mixed else "none"
    meta = {"format": "specontext-head", "version": "1", "embedding": "model",
            "features": features,
            "model": fingerprints[0], "tokenizer": fingerprints[1], "vocab": vocab, "hidden": head.hidden,
            "q_heads": head.q_heads, "kv_heads": head.kv_heads, "head_dim": head.head_dim, "layers": llm_layers,
            "groups": head.groups, "group_first_layer": first, "rms_eps": f"{head.eps:.9g}",
            "rope_base": f"{head.base:.9g}", "rope_dims": head.rope_dims, "rope_pairs": "adjacent",
            "rope_scaling": "none", "rope_factor": "1", "rope_original_context": context,
            "trained_context": context, "pool": head.pool, "source": source}
    if head.layers:
        meta |= {"feature_layers": ",".join(str(l) for l in head.layers), "feature_hidden": head.hidden}
    if mixed:
        meta |= {"views": head.views, "taps": head.taps}
    if calibration:
        meta["calibration"] = calibration
    tensors = {}
    for g in range(head.groups):
        tensors["norm.weight" if g == 0 else f"groups.{g}.norm.weight"] = head.norm[g].detach().float().cpu()
        scale = 1 if mixed or head.layers else float(head.mix[g].detach())
        tensors[f"groups.{g}.q.weight"] = (head.q[g].detach() * scale).flatten(1).half().cpu()
        tensors[f"groups.{g}.k.weight"] = (head.k[g].detach() * scale).flatten(1).half().cpu()
        if mixed:
            tensors[f"groups.{g}.taps.weight"] = head.mix[g].detach().float().cpu()
    if head.layers:
        fc = (head.fc * head.scale).detach().float().cpu()
        tensors["features.fc.weight"] = (fc * 2.0 ** -math.floor(math.log2(float(fc.abs().max()) / 8))).half()
        tensors["features.norm.weight"] = head.feature_norm.detach().float().cpu()
    write(path, {k: str(v) for k, v in meta.items()}, tensors)


def write(path, meta, tensors):
    header, at = {"__metadata__": meta}, 0
    for name, t in tensors.items():
        if not torch.isfinite(t).all():
            raise SystemExit(f"{path}: tensor {name}: found a weight that 16 bits cannot hold")
        size = t.numel() * t.element_size()
        header[name] = {"dtype": "F32" if t.dtype == torch.float32 else "F16", "shape": list(t.shape),
                        "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for t in tensors.values():
            f.write(t.contiguous().numpy().tobytes())
