"""The language model as a teacher: a forward of whole documents that also gives, for some queries, where the
attention of each layer lies, and hidden states. Llama's architecture, pairs of neighbours rotated, as GGUF files
have it."""
import torch
import torch.nn.functional as F


def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps).to(x.dtype) * weight


def angles(positions, dims, base):
    """cos and sin [positions][dims / 2]."""
    freq = base ** (-torch.arange(0, dims, 2, device=positions.device, dtype=torch.float64) / dims)
    a = positions.double()[:, None] * freq
    return a.cos().float(), a.sin().float()


def rotate(x, cos, sin):
    """x [..., heads, position, dim]; the first 2 * cos.shape[-1] of dim are rotated, pair by pair."""
    d = 2 * cos.shape[-1]
    pairs = x[..., :d].unflatten(-1, (-1, 2))
    a, b = pairs[..., 0], pairs[..., 1]
    c, s = cos.to(x.dtype), sin.to(x.dtype)
    turned = torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)
    return turned if d == x.shape[-1] else torch.cat((turned, x[..., d:]), -1)


class Llm:
    def __init__(self, meta, tensors, device, dtype):
        get = lambda name: meta["llama." + name]
        self.layers, self.hidden = get("block_count"), get("embedding_length")
        self.q_heads, self.kv_heads = get("attention.head_count"), get("attention.head_count_kv")
        self.eps, self.base = get("attention.layer_norm_rms_epsilon"), get("rope.freq_base")
        self.context = get("context_length")
        self.head_dim = self.hidden // self.q_heads
        self.dtype = dtype
        self.w = {n: torch.from_numpy(t).to(device, dtype) for n, t in tensors.items()}
        self.embedding = torch.from_numpy(tensors["token_embd.weight"]).to(device)  # float32: the head's input

    @torch.no_grad()
    def forward(self, ids, queries=None, taps=(), kept=None):
        """ids [n]. Returns the last hidden state, normed; for positions `queries` [m] the attention mass
        [layers][kv_heads][m][n] in float32, mean over the query heads of a KV head; and the hidden states [n][hidden]
        that enter each of the layers `taps` (`layers`: what leaves the last), by layer. The list `kept` gets each
        layer's keys, rotated, and values, [kv_heads][n][head_dim] both."""
        n, w = len(ids), self.w
        cos, sin = angles(torch.arange(n, device=ids.device), self.head_dim, self.base)
        mass, states = None, {}
        if queries is not None:
            mass = torch.empty(self.layers, self.kv_heads, len(queries), n, device=ids.device)
            future = torch.arange(n, device=ids.device) > queries[:, None]
        x = w["token_embd.weight"][ids]
        for l in range(self.layers):
            if l in taps:
                states[l] = x
            p = lambda name: w[f"blk.{l}.{name}.weight"]
            h = rms_norm(x, p("attn_norm"), self.eps)
            q, k, v = (F.linear(h, p("attn_" + c)).view(n, -1, self.head_dim).transpose(0, 1) for c in "qkv")
            q, k = rotate(q.float(), cos, sin), rotate(k.float(), cos, sin)
            if mass is not None:
                grouped = q[:, queries].view(self.kv_heads, -1, self.head_dim)
                s = (grouped @ k.transpose(1, 2)).view(self.kv_heads, -1, len(queries), n)
                s = (s * self.head_dim ** -0.5).masked_fill_(future, float("-inf"))
                mass[l] = s.softmax(-1).mean(1)
            repeat, k = self.q_heads // self.kv_heads, k.to(self.dtype)
            if kept is not None:
                kept.append((k, v))
            k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
            o = F.scaled_dot_product_attention(q.to(self.dtype)[None], k[None], v[None], is_causal=True)[0]
            x = x + F.linear(o.transpose(0, 1).reshape(n, -1), p("attn_output"))
            h = rms_norm(x, p("ffn_norm"), self.eps)
            x = x + F.linear(F.silu(F.linear(h, p("ffn_gate"))) * F.linear(h, p("ffn_up")), p("ffn_down"))
        if self.layers in taps:
            states[self.layers] = x
        return rms_norm(x, w["output_norm.weight"], self.eps), mass, states
