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


class Inputs:
    """The tokens as heads see them: embeddings with a mean square of 1, and the same of the tokens before, which heads
    mix. Nothing to learn: all heads share it."""

    def __init__(self, embedded, eps, taps):
        self.count = len(embedded)
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
    """norm [groups][hidden], mix [groups][views][taps], q [groups][q_heads * head_dim][views][hidden], k
    [groups][kv_heads * head_dim][views][hidden]. Begins as the projections of the model's first layer, whose input is
    the embedding, too, or as `start`, a trained head; query heads beyond those begin as disturbed copies, dimensions
    beyond them as noise that is not rotated, views beyond the token itself at zero."""

    def __init__(self, llm, groups=1, q_heads=0, head_dim=0, pool="mean", views=1, taps=1, start=None):
        super().__init__()
        self.groups, self.pool, self.kv_heads, self.eps = groups, pool, llm.kv_heads, llm.eps
        self.q_heads, self.head_dim = q_heads or llm.q_heads, head_dim or llm.head_dim
        self.rope_dims, self.base, self.hidden = llm.head_dim, llm.base, llm.hidden
        self.views, self.taps = views, taps
        made = [self.first_weights(llm, start, llm.layers * g // groups) for g in range(groups)]
        parameter = lambda i: torch.nn.Parameter(torch.stack([m[i] for m in made]).contiguous())
        self.norm, self.q, self.k = parameter(0), parameter(1), parameter(2)
        self.mix = torch.nn.Parameter(first_taps(views, taps).repeat(groups, 1, 1))

    def first_weights(self, llm, start, layer):
        """norm, q, k of a group whose first layer is `layer`."""
        if start:
            g = sum(f <= layer for f in start.first) - 1
            norm, q, k = start.norm[g], start.q[g], start.k[g]
        else:
            norm, q, k = (llm.w[f"blk.0.attn_{c}.weight"].float() for c in ("norm", "q", "k"))
        q = q.view(self.kv_heads, -1, self.rope_dims, self.hidden)
        k = k.view(self.kv_heads, 1, self.rope_dims, self.hidden)
        each = self.q_heads // self.kv_heads
        copies = -(-each // q.shape[1])
        more = q.repeat(1, copies, 1, 1)[:, :each]
        noise = torch.randn_like(more) * q.std() * 0.5
        noise[:, :q.shape[1]] = 0
        q = self.widen(more + noise) * math.sqrt(self.head_dim / self.rope_dims)
        q, k = (t.reshape(-1, 1, self.hidden) for t in (q, self.widen(k)))
        blank = lambda t: t.new_zeros(len(t), self.views - 1, self.hidden)
        return norm.clone(), torch.cat((q, blank(q)), 1), torch.cat((k, blank(k)), 1)

    def widen(self, t):
        extra = self.head_dim - self.rope_dims
        shape = (*t.shape[:2], extra, t.shape[3])
        return torch.cat((t, torch.randn(shape, device=t.device) * t.std() * 0.3), 2) if extra else t

    def forward(self, inputs, queries, future):
        """Log weights [groups][kv_heads][m][n] of positions for queries [m]; FAR where future [m][n]."""
        n, m = inputs.count, len(queries)
        cos, sin = angles(torch.arange(n, device=queries.device), self.rope_dims, self.base)
        x = inputs.views(self.mix)
        flat = lambda w: (w * self.norm[:, None, None, :]).flatten(2).transpose(1, 2)
        k = x @ flat(self.k)
        q = x[:, queries] @ flat(self.q)
        k = k.view(self.groups, n, self.kv_heads, self.head_dim).transpose(1, 2)
        q = q.view(self.groups, m, self.q_heads, self.head_dim).transpose(1, 2) * self.head_dim ** -0.5
        k, q = rotate(k, cos, sin), rotate(q, cos[queries], sin[queries])
        each = self.q_heads // self.kv_heads
        s = q.reshape(self.groups, self.kv_heads, each * m, self.head_dim) @ k.transpose(2, 3)
        s = s.view(self.groups, self.kv_heads, each, m, n).masked_fill(future, FAR)
        s = s - torch.logsumexp(s, -1, keepdim=True)
        return s.amax(2) if self.pool == "max" else torch.logsumexp(s, 2) - math.log(each)


class Trained:
    """A head's file without views, to start from: norm, q, k by group, first layers of the groups."""

    def __init__(self, path, device):
        with open(path, "rb") as f:
            header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
            data = f.read()
        meta = header["__metadata__"]
        if meta["features"] != "none" or meta["rope_pairs"] != "adjacent":
            raise SystemExit(f"{path}: found features {meta['features']}, rope_pairs {meta['rope_pairs']}, expected "
                             "none, adjacent")
        types = {"F32": np.float32, "F16": np.float16}

        def tensor(name):
            t = header[name]
            x = np.frombuffer(data[slice(*t["data_offsets"])], types[t["dtype"]]).astype(np.float32)
            return torch.from_numpy(x).view(t["shape"]).to(device)

        self.groups, self.first = int(meta["groups"]), [int(n) for n in meta["group_first_layer"].split(",")[:-1]]
        groups = range(self.groups)
        own = lambda g: f"groups.{g}.norm.weight"
        self.norm = [tensor(own(g) if own(g) in header else "norm.weight") for g in groups]
        self.q, self.k = ([tensor(f"groups.{g}.{c}.weight") for g in groups] for c in "qk")


def soft_choice(z, k, width):
    """Memberships in [0, 1] of the k largest along the last axis, summing to k: a logistic step of `width` around
    a threshold that is found by bisection and moves with z."""
    with torch.no_grad():
        high = z.amax(-1, keepdim=True) + 1
        low = high - 60
        for _ in range(14):
            mid = (low + high) / 2
            above = torch.sigmoid((z - mid) / width).sum(-1, keepdim=True) > k
            low, high = torch.where(above, mid, low), torch.where(above, high, mid)
        threshold = (low + high) / 2
        slope = torch.sigmoid((z - threshold) / width)
        slope = slope * (1 - slope)
        slope = slope / slope.sum(-1, keepdim=True).clamp_min(1e-9)
    moving = (z * slope).sum(-1, keepdim=True)
    return torch.sigmoid((z - threshold - (moving - moving.detach())) / width)


def losses(logw, p, candidates, k, width=0.5):
    """logw as of Head.forward, p the true mass of the same shape, candidates [m][n] the positions that Top-K may
    pick; queries lie in adjacent pairs. Returns the cross entropy over the candidates (weighted by their mass),
    the mass that a soft Top-K of k misses, and the share of it that changes from a query to the next."""
    z = logw.masked_fill(~candidates, FAR)
    p = p * candidates
    cross = -(p * (z - torch.logsumexp(z, -1, keepdim=True))).sum(-1).mean()
    rows = candidates.sum(-1) > k
    chosen = soft_choice(z, k, width)
    missed = ((p * (1 - chosen)).sum(-1) * rows).sum() / (rows.sum() * p.shape[0] * p.shape[1]).clamp_min(1)
    pair = chosen.unflatten(2, (-1, 2))
    kept = torch.minimum(pair[..., 0, :], pair[..., 1, :]).sum(-1) / k
    both = rows.view(-1, 2).all(-1)
    changed = ((1 - kept) * both).sum() / (both.sum() * p.shape[0] * p.shape[1]).clamp_min(1)
    return cross, missed, changed


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
    first = ",".join(str(n) for n in first_layers(llm_layers, head.groups))
    mixed = head.views > 1 or head.taps > 1
    meta = {"format": "specontext-head", "version": "1", "embedding": "model",
            "features": "context" if mixed else "none",
            "model": fingerprints[0], "tokenizer": fingerprints[1], "vocab": vocab, "hidden": head.hidden,
            "q_heads": head.q_heads, "kv_heads": head.kv_heads, "head_dim": head.head_dim, "layers": llm_layers,
            "groups": head.groups, "group_first_layer": first, "rms_eps": f"{head.eps:.9g}",
            "rope_base": f"{head.base:.9g}", "rope_dims": head.rope_dims, "rope_pairs": "adjacent",
            "rope_scaling": "none", "rope_factor": "1", "rope_original_context": context,
            "trained_context": context, "pool": head.pool, "source": source}
    if mixed:
        meta |= {"views": head.views, "taps": head.taps}
    if calibration:
        meta["calibration"] = calibration
    tensors = {}
    for g in range(head.groups):
        tensors["norm.weight" if g == 0 else f"groups.{g}.norm.weight"] = head.norm[g].detach().float().cpu()
        scale = 1 if mixed else float(head.mix[g].detach())
        tensors[f"groups.{g}.q.weight"] = (head.q[g].detach() * scale).flatten(1).half().cpu()
        tensors[f"groups.{g}.k.weight"] = (head.k[g].detach() * scale).flatten(1).half().cpu()
        if mixed:
            tensors[f"groups.{g}.taps.weight"] = head.mix[g].detach().float().cpu()
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
