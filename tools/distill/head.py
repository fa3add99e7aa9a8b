"""The retrieval head in PyTorch: the same arithmetic as the daemon's, the losses, and the file."""
import json
import math
import struct

import torch

from llm import angles, rms_norm, rotate

FAR = -1e4  # in place of minus infinity where a gradient passes


def first_layers(layers, groups):
    """Group g serves layers [first[g], first[g + 1]): those l with l * groups // layers == g."""
    return [-(-layers * g // groups) for g in range(groups + 1)]


class Head(torch.nn.Module):
    """norm [groups][hidden], q [groups][q_heads * head_dim][hidden], k [groups][kv_heads * head_dim][hidden].
    Begins as the projections of the model's first layer, whose input is the embedding, too; query heads beyond
    the model's own begin as disturbed copies, dimensions beyond them as noise that is not rotated."""

    def __init__(self, llm, groups=1, q_heads=0, head_dim=0, pool="mean"):
        super().__init__()
        self.groups, self.pool, self.kv_heads, self.eps = groups, pool, llm.kv_heads, llm.eps
        self.q_heads, self.head_dim = q_heads or llm.q_heads, head_dim or llm.head_dim
        self.rope_dims, self.base = llm.head_dim, llm.base
        q = llm.w["blk.0.attn_q.weight"].float().view(self.kv_heads, -1, llm.head_dim, llm.hidden)
        k = llm.w["blk.0.attn_k.weight"].float().view(self.kv_heads, 1, llm.head_dim, llm.hidden)
        each = self.q_heads // self.kv_heads
        copies = -(-each // q.shape[1])
        more = q.repeat(1, copies, 1, 1)[:, :each]
        noise = torch.randn_like(more) * q.std() * 0.5
        noise[:, :q.shape[1]] = 0
        q = self.widen(more + noise) * math.sqrt(self.head_dim / llm.head_dim)
        k = self.widen(k)
        copy = lambda t: torch.nn.Parameter(t.reshape(1, -1, llm.hidden).repeat(groups, 1, 1).contiguous())
        self.q, self.k = copy(q), copy(k)
        self.norm = torch.nn.Parameter(llm.w["blk.0.attn_norm.weight"].float().repeat(groups, 1))

    def widen(self, t):
        extra = self.head_dim - self.rope_dims
        shape = (*t.shape[:2], extra, t.shape[3])
        return torch.cat((t, torch.randn(shape, device=t.device) * t.std() * 0.3), 2) if extra else t

    def forward(self, embedded, queries, future):
        """Log weights [groups][kv_heads][m][n] of positions for queries [m]; FAR where future [m][n]."""
        n, m = len(embedded), len(queries)
        cos, sin = angles(torch.arange(n, device=embedded.device), self.rope_dims, self.base)
        x = rms_norm(embedded, self.norm[:, None, :], self.eps)
        k = (x @ self.k.transpose(1, 2)).view(self.groups, n, self.kv_heads, self.head_dim).transpose(1, 2)
        q = x[:, queries] @ self.q.transpose(1, 2)
        q = q.view(self.groups, m, self.q_heads, self.head_dim).transpose(1, 2)
        k, q = rotate(k, cos, sin), rotate(q, cos[queries], sin[queries])
        each = self.q_heads // self.kv_heads
        s = q.reshape(self.groups, self.kv_heads, each * m, self.head_dim) @ k.transpose(2, 3)
        s = s.view(self.groups, self.kv_heads, each, m, n) * self.head_dim ** -0.5
        s = s.masked_fill(future, FAR)
        s = s - torch.logsumexp(s, -1, keepdim=True)
        return s.amax(2) if self.pool == "max" else torch.logsumexp(s, 2) - math.log(each)


def soft_choice(z, k, width):
    """Memberships in [0, 1] of the k largest along the last axis, summing to k: a logistic step of `width` around
    a threshold that is found by bisection and moves with z."""
    with torch.no_grad():
        high = z.amax(-1, keepdim=True) + 1
        low = high - 60
        for _ in range(18):
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
    """Hard Top-K: bool of z's shape."""
    at = z.masked_fill(~candidates, float("-inf")).topk(k, -1).indices
    return torch.zeros_like(z, dtype=torch.bool).scatter_(-1, at, True)


def export(head, path, llm_layers, vocab, fingerprints, context, source):
    """The safetensors file that the daemon loads: projections in float16, norms in float32."""
    first = ",".join(str(n) for n in first_layers(llm_layers, head.groups))
    hidden = head.q.shape[-1]
    meta = {"format": "specontext-head", "version": "1", "embedding": "model", "features": "none",
            "model": fingerprints[0], "tokenizer": fingerprints[1], "vocab": vocab, "hidden": hidden,
            "q_heads": head.q_heads, "kv_heads": head.kv_heads, "head_dim": head.head_dim, "layers": llm_layers,
            "groups": head.groups, "group_first_layer": first, "rms_eps": f"{head.eps:.9g}",
            "rope_base": f"{head.base:.9g}", "rope_dims": head.rope_dims, "rope_pairs": "adjacent",
            "rope_scaling": "none", "rope_factor": "1", "rope_original_context": context,
            "trained_context": context, "pool": head.pool, "source": source}
    tensors = {}
    for g in range(head.groups):
        tensors["norm.weight" if g == 0 else f"groups.{g}.norm.weight"] = head.norm[g].detach().float().cpu()
        tensors[f"groups.{g}.q.weight"] = head.q[g].detach().half().cpu()
        tensors[f"groups.{g}.k.weight"] = head.k[g].detach().half().cpu()
    header, at = {"__metadata__": {k: str(v) for k, v in meta.items()}}, 0
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
