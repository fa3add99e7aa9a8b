"""What attention to chosen positions does to the model's output: the model computed again at some positions alone,
against the keys and values that its own forward has for all tokens before them, in which each position is attended in
part. A query's own key and value are its own. The parts are given by their logarithms, which are added to the scores:
0 for a position that is attended, FAR for one that is not."""
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from head import FAR, soft_margin
from llm import angles


def soft_gates(z, candidates, future, k, width, halvings=14):
    """Logarithms of the parts that a soft Top-K of k takes of the candidates: z as of Head.forward -> z's shape. Where
    there are none to choose from (sinks, window, the token itself) all is attended."""
    always = torch.zeros_like(future, dtype=z.dtype).masked_fill(future, FAR)
    margin = soft_margin(z.masked_fill(~candidates, FAR), k, width, halvings)
    return torch.where(candidates, F.logsigmoid(margin), always)


def hard_gates(chosen, candidates, future, dtype=torch.float32):
    """The same of sets as `choose` gives them."""
    left = future | candidates & ~chosen
    return torch.zeros(chosen.shape, dtype=dtype, device=chosen.device).masked_fill_(left, FAR)


def attention(q, k, v, own_k, own_v, gates, queries):
    """q [kv_heads][rep][m][dim], scaled; k, v [kv_heads][n][dim] of all tokens; own_k, own_v [kv_heads][m][dim]; gates
    [kv_heads or 1][m][n]; queries [m]. Returns q's shape."""
    kv, rep, m, dim = q.shape
    at = queries[:, None].expand(kv, rep, m, 1)
    s = (q.reshape(kv, rep * m, dim) @ k.transpose(1, 2)).view(kv, rep, m, -1) + gates[:, None]
    s = s.scatter_(-1, at, (q * own_k[:, None]).sum(-1, keepdim=True))
    w = s.softmax(-1)
    o = (w.view(kv, rep * m, -1) @ v).view(q.shape)
    return o + w.gather(-1, at) * (own_v - v[:, queries])[:, None]


def side_by_side(o):
    """[kv_heads][rep][m][dim] -> [m][kv_heads * rep * dim]"""
    return o.flatten(0, 1).transpose(0, 1).flatten(1)


class Output:
    """The model's weights for that: in `dtype`, which a GPU needs no less than float32 for, since the differences
    looked for are small. Those that read the same input are one matrix: a GPU waits for its orders here."""

    def __init__(self, llm, dtype=torch.float32):
        get = lambda name: llm.w[name + ".weight"].to(dtype)
        self.llm, self.dtype, self.embedding = llm, dtype, get("token_embd")
        self.last_norm = get("output_norm")
        self.table = get("output") if "output.weight" in llm.w else self.embedding
        self.layers = [SimpleNamespace(
            attn_norm=get(b + "attn_norm"), qkv=torch.cat([get(b + "attn_" + c) for c in "qkv"]),
            attn_output=get(b + "attn_output"), ffn_norm=get(b + "ffn_norm"),
            ffn_in=torch.cat((get(b + "ffn_gate"), get(b + "ffn_up"))), ffn_down=get(b + "ffn_down"))
            for b in (f"blk.{l}." for l in range(llm.layers))]

    def norm(self, x, weight):
        return F.rms_norm(x, x.shape[-1:], weight, self.llm.eps)

    def __call__(self, ids, queries, kept, gates, seen=None):
        """Log probabilities [m][vocab] of the token after each query. kept: keys and values by layer, as Llm.forward
        keeps them; gates: by layer [kv_heads or 1][m][n]. The list `seen` gets each layer's queries, own keys and
        values, and what its attention gives, as `attention` has them."""
        llm, m = self.llm, len(queries)
        cos, sin = angles(queries, llm.head_dim, llm.base)
        turn = torch.complex(cos.to(self.dtype), sin.to(self.dtype))
        x = self.embedding[ids[queries]]
        x.requires_grad_(seen is not None and torch.is_grad_enabled())
        for w, (k, v), g in zip(self.layers, kept, gates):
            qkv = F.linear(self.norm(x, w.attn_norm), w.qkv).view(m, -1, llm.head_dim).transpose(0, 1)
            turned = torch.view_as_complex(qkv[:-llm.kv_heads].unflatten(-1, (-1, 2))) * turn
            turned = torch.view_as_real(turned).flatten(-2)
            q, own = turned[:llm.q_heads] * llm.head_dim ** -0.5, turned[llm.q_heads:]
            q, own_v = q.unflatten(0, (llm.kv_heads, -1)), qkv[-llm.kv_heads:]
            o = attention(q, k, v, own, own_v, g, queries)
            if seen is not None:
                seen.append((q, own, own_v, o))
            x = x + F.linear(side_by_side(o), w.attn_output)
            gate, up = F.linear(self.norm(x, w.ffn_norm), w.ffn_in).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, w.ffn_down)
        return F.linear(self.norm(x, self.last_norm), self.table).log_softmax(-1)


def by_layer(first, gates):
    parts = gates.unbind(0)  # one node of autograd for all layers
    return [g for g, a, b in zip(parts, first, first[1:]) for _ in range(b - a)]


class Answers:
    """What the model says after each of `queries` when it attends to all of the text; to compare with what it says
    under gates. The same arithmetic makes both, so that all gates open is a difference of nothing."""

    def __init__(self, output, ids, queries, kept, grad=False):
        self.output, self.ids, self.queries, self.seen = output, ids, queries, []
        self.kept = [(k.to(output.dtype), v.to(output.dtype)) for k, v in kept]
        future = torch.arange(len(ids), device=ids.device) > queries[:, None]
        open_ = torch.zeros(future.shape, dtype=output.dtype, device=ids.device).masked_fill_(future, FAR)[None]
        with torch.set_grad_enabled(grad):
            self.full = output(ids, queries, self.kept, [open_] * len(kept), self.seen)

    def under(self, first, gates):
        """Log probabilities [m][vocab]; gates [groups][kv_heads][m][n], groups begin at layers `first`."""
        return self.output(self.ids, self.queries, self.kept, by_layer(first, gates))

    def kl(self, first, gates):
        """Of what the model says to what it says under gates, by query [m]."""
        return self.distance(self.under(first, gates))

    def distance(self, found):
        return (self.full.exp() * (self.full - found)).sum(-1)

    def local(self, first, gates, senses):
        """The same, about, without the way through the layers: of each layer's attention, given what it is asked
        with all attended, the error as `senses` weigh it. [m]"""
        found = 0
        for (q, own_k, own_v, o), (k, v), g, sense in zip(self.seen, self.kept, by_layer(first, gates), senses):
            d = side_by_side(attention(q, k, v, own_k, own_v, g, self.queries) - o)
            found = found + (d @ sense * d).sum(-1) / 2
        return found

    def senses(self, samples=4):
        """How the output's KL grows with errors of each layer's attention, in the second order: mean products
        [layers][width][width] of the gradients of log probabilities of tokens drawn from them. With grad=True."""
        outs, found = [o for _, _, _, o in self.seen], 0
        for i in range(samples):
            drawn = self.full.gather(1, torch.multinomial(self.full.detach().exp(), 1)).sum()
            g = torch.stack([side_by_side(x) for x in torch.autograd.grad(drawn, outs, retain_graph=i < samples - 1)])
            found = found + g.transpose(1, 2) @ g / (samples * len(self.queries))
        return found

    @torch.no_grad()
    def figures(self, first, gates):
        """Means over the queries: KL, how often the likeliest token is the same, and how much less likely the text's
        next token became (difference of log perplexity)."""
        found = self.under(first, gates)
        known = self.queries < len(self.ids) - 1
        at = self.ids[self.queries[known] + 1][:, None]
        rise = (self.full[known] - found[known]).gather(1, at).mean()
        same = (self.full.argmax(-1) == found.argmax(-1)).double().mean()
        return float(self.distance(found).mean()), float(same), float(rise)
